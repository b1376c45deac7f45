"""The command line: instant help, one-line errors, exit codes."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from nybble import LLM, SamplingParams
from nybble.cli import app, stream_answer
from nybble.llm import Piece, Response
from nybble.text import load_tokenizer


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "nybble", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_loads_no_heavy_library():
    done = run(code="""
import sys
from nybble.cli import app
app(["--help"], exit_on_error=False, result_action="return_value")
print(sorted(m for m in ("torch", "triton", "transformers", "numpy", "fastapi", "rich.progress") if m in sys.modules))
commands = [[name] for name in "quantize generate chat serve eval convert report explain demo".split()]
for name in [*commands, ["bench", "offline"], ["bench", "serving"]]:
    app([*name, "--help"], exit_on_error=False, result_action="return_value")
print(sorted(m for m in ("torch", "triton", "transformers") if m in sys.modules))
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("[]") == 2
    assert done.stdout.count("auto, cpu, cuda, cuda:N.") == 11
    for command in ("quantize", "generate", "chat", "serve", "eval", "explain", "bench", "demo"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("generate", "no/such/model", "hi"), "no/such/model"),
        (("explain", "no/such/model"), "no/such/model"),
        (("eval", "no/such/model", "--ppl", "no/such/text"), "no/such"),
        (("quantize", "no/such/model", "-o", "no/such/out"), "no/such/model"),
        (("quantize", ".", "-o", "no/such/out", "--group", "many"), "group"),
        (("quantize", ".", "-o", "no/such/out", "--scheme", "w8a8", "--group", "32"), "leave --group out"),
        (("generate", ".", "hi", "--temperature", "-1"), "temperature"),
        (("chat", ".", "--top-p", "1.5"), "top_p"),
        (("serve", "no/such/model"), "no/such/model"),
        (("serve", ".", "--port", "99999"), "65535"),
        (("bench", "offline", "llama-3-8b", "--dummy", "--device", "tpu"), "tpu"),
        (("bench", "kernels", "--schemes", "w4a8,w3a8"), "--schemes w3a8: wants some of "),
        *(((command, "Org/Model-1B"), "hub comes by `hf download Org/Model-1B --local-dir Model-1B`")
          for command in ("chat", "serve", "explain")),
        (("quantize", "Org/Model-1B", "-o", "no/such/out"), "`hf download Org/Model-1B"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it(arguments, expected):
    done = run(*arguments)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("nybble: ")
    assert expected in lines[-1]
    assert "Traceback" not in done.stderr


def test_answers_go_to_standard_output_alone_and_a_closed_pipe_is_no_error(tmp_path):
    model = tmp_path / "tiny"
    make_tiny(model)
    done = run("generate", str(model), "hi", "--max-tokens", "5")
    llm = LLM(model, device="cpu")
    answer = llm.generate("hi", SamplingParams(temperature=0.0, max_tokens=5))
    assert (done.returncode, done.stdout) == (0, answer.text + "\n")
    assert "2 tokens in" in done.stderr
    said = subprocess.run([sys.executable, "-m", "nybble", "generate", str(model), "--max-tokens", "5"], timeout=120,
                          check=False, input="hi\n", capture_output=True, text=True)
    assert said.stdout == done.stdout
    (tmp_path / "shell").write_text(f"{sys.executable} -m nybble generate {model} hi --max-tokens 200 | head -c 1")
    piped = subprocess.run(["sh", tmp_path / "shell"], capture_output=True, timeout=120, check=False)
    assert len(piped.stdout) == 1
    assert b"Error" not in piped.stderr
    chat = subprocess.run([sys.executable, "-m", "nybble", "chat", str(model), "--max-tokens", "3", "--temperature", "0"],
                          timeout=120, check=False, input=b"\xff\n\n" + b"x" * 300 + b"\nhi\n/exit\nhi\n", capture_output=True)
    assert chat.returncode == 0
    assert chat.stderr.count(b" 3 out") == 2
    assert b"longer than the context" in chat.stderr
    assert b"tiny: 16bit, KV cache int8, 256 tokens of conversation, on " in chat.stderr


def test_sampling_not_asked_for_is_the_checkpoints(tmp_path):
    """top_k = 1 leaves nothing to chance: transformers' greedy tokens, under the same penalty."""
    model = make_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 3.0, "top_k": 1, "repetition_penalty": 1.4}')
    ids = load_tokenizer(tmp_path).encode("hello")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, repetition_penalty=1.4)[0, len(ids):]
    done = run("generate", str(tmp_path), "hello", "--max-tokens", "12", "--kv", "fp32", "--device", "cpu")
    assert (done.returncode, done.stdout) == (0, load_tokenizer(tmp_path).decode(expected.tolist()) + "\n")
    plain = run("generate", str(tmp_path), "hello", "--max-tokens", "12", "--kv", "fp32", "--device", "cpu", "--top-k", "0",
                "--seed", "1")
    assert plain.stdout != done.stdout  # a temperature of 3 shows


def test_a_turn_without_an_answer_is_forgotten(tmp_path, monkeypatch, capsys):
    """Ctrl-C before the first token; then /new in between leaves the system message alone."""
    make_tiny(tmp_path)
    asked = []

    def answer(llm, messages, params):
        asked.append([message["content"] for message in messages])
        if messages[-1]["content"] == "b":
            raise KeyboardInterrupt
        return f"to {messages[-1]['content']}"

    monkeypatch.setattr("nybble.cli.stream_answer", answer)
    (tmp_path / "said").write_text("a\nb\nc\n/new\n\nd\n/exit\ne\n")
    with (tmp_path / "said").open() as said:
        monkeypatch.setattr("sys.stdin", said)
        app(["chat", str(tmp_path), "--system", "s", "--device", "cpu"], result_action="return_value")
    assert asked == [["s", "a"], ["s", "a", "to a", "b"], ["s", "a", "to a", "c"], ["s", "d"]]
    assert capsys.readouterr().out == ""


def test_explain_says_once_what_layers_share(tmp_path, capsys):
    make_tiny(tmp_path / "tiny")
    (tmp_path / "recipe.toml").write_text('method = "rtn"\nhead = "w8a8"\n[layers]\n"1.down" = "w8a8"\n')
    words = ["quantize", tmp_path / "tiny", "-o", tmp_path / "a b", "--recipe", tmp_path / "recipe.toml", "--device", "cpu"]
    app([str(word) for word in words], result_action="return_value")
    assert f"report '{tmp_path / 'a b'}' --against {tmp_path / 'tiny'}\n" in capsys.readouterr().out
    app(["explain", str(tmp_path / "a b"), "--device", "cpu"], result_action="return_value")
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    at = lines.index(["layers", "linear", "scheme"]) + 1
    assert lines[at:] == [["0-1", "self_attn.q_proj,k_proj,v_proj", "w4a8"], ["0-1", "self_attn.o_proj", "w4a8"],  # 64 wide:
                          ["0-1", "mlp.gate_proj,up_proj", "w4a8"], ["0", "mlp.down_proj", "w4a8_qqq_g128"],  # not by 128
                          ["1", "mlp.down_proj", "w8a8"], ["lm_head", "w8a8", "cpu"]]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_an_answer_after_a_token_and_twice_at_once(presses, capsys):
    done = []

    class Model:
        def stream(self, prompt, params):
            response = Response(input_token_len=3)
            try:
                for letter in "abcdef":
                    for _ in range(presses if letter == "c" else 0):
                        signal.raise_signal(signal.SIGINT)
                    response.text += letter
                    yield Piece(letter, response)
            finally:
                done.append(response.text)

    before = signal.getsignal(signal.SIGINT)
    text = stream_answer(Model(), "x", SamplingParams())
    assert (text, done) == (("abc", ["abc"]) if presses == 1 else ("ab", ["ab"]))
    assert capsys.readouterr().out == text + "\n"
    assert signal.getsignal(signal.SIGINT) == before


def test_a_tensor_that_is_missing_is_one_line(tmp_path):
    make_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    done = run("explain", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"nybble: {tmp_path} has no tensor 'model.layers.2.")
    assert done.stderr.count("\n") == 1


def test_a_model_in_this_directory_is_called_by_its_name(tmp_path, monkeypatch, capsys):
    make_tiny(tmp_path / "tiny" / "inner")
    make_tiny(tmp_path / "tiny")
    for place, path in (("tiny", "."), ("tiny/inner", "..")):
        monkeypatch.chdir(tmp_path / place)
        (tmp_path / "text").write_text("to be or not to be")
        app(["eval", path, "--ppl", str(tmp_path / "text"), "--device", "cpu"], result_action="return_value")
        assert capsys.readouterr().out.startswith("tiny: 16bit")


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    make_tiny(tmp_path / "tiny")
    arguments = [tmp_path / "tiny", "-o", tmp_path / "out", "--method", "rtn", "--transform", "none", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-m", "nybble", "quantize", *arguments], capture_output=True, text=True, timeout=120,
                          check=False, preexec_fn=fill)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert "File too large" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_is_refused():
    done = run("serve", str(Path(__file__).parent), "--kv", "int3")
    assert done.returncode != 0
    assert "int3" in done.stdout + done.stderr
