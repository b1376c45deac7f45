"""Our own server for the length of a benchmark, in processes of its own. With a shape instead of a checkpoint it serves random
weights, and a tokenizer made up to fit: the work of detokenizing is real, the words are not.

Run as `python -m nybble.bench.spawn JSON`, it is that server.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nybble.engine.config import ProcessConfig
from nybble.serve.launch import listen, process_config, run, serve
from nybble.text import load_tokenizer


@contextmanager
def own_server(model: str, dummy: bool, scheme: str, engine: dict[str, Any], report: Callable[[str], object]) -> Iterator[str]:
    """Its base URL. engine: `kv`, `device` and fields of EngineConfig. Raises RuntimeError when it does not start."""
    options = json.dumps({"model": model, "dummy": dummy, "scheme": scheme, "engine": engine})
    command = [sys.executable, "-m", "nybble.bench.spawn", options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            for line in process.stdout:
                report(line.rstrip())
                if found := re.search(r"is served at (http://\S+)", line):
                    break
            else:
                raise RuntimeError(f"the server of {model} did not start; its messages above say why")
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def dummy_engine(config: ProcessConfig) -> Any:
    """A factory for `engine.process`: config.model is a shape, config.engine.scheme the scheme of its random weights."""
    from nybble.engine.load import open_engine

    return open_engine(config.model, config.device, config.engine, dummy=True)


def made_up_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a byte-level tokenizer of `vocabulary` tokens: every byte, then words of one to four letters after a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    for number in range(vocabulary - len(words)):
        letters = ""
        while number >= 0:
            letters, number = chr(97 + number % 26) + letters, number // 26 - 1
        words.append("Ġ" + letters)
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words[:vocabulary])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))


def main(options: dict[str, Any]) -> None:
    say = lambda text: print(text, flush=True)  # noqa: E731, T201
    if not options["dummy"]:
        return serve(options["model"], port=0, engine=options["engine"], progress=say)
    from nybble.models.shapes import shape

    process = process_config(options["model"], scheme=options["scheme"], factory="nybble.bench.spawn:dummy_engine",
                             **options["engine"])
    with tempfile.TemporaryDirectory() as folder:
        made_up_tokenizer(Path(folder), shape(options["model"]).vocab_size)
        asyncio.run(run(process, load_tokenizer(folder), listen("127.0.0.1", 0), progress=say))


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except (ValueError, RuntimeError, OSError) as problem:
        sys.exit(f"nybble: {problem}")
