"""The command line: instant help, one-line errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "nybble", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_loads_no_heavy_library():
    done = run(code="""
import sys
from nybble.cli import app
app(["--help"], exit_on_error=False, result_action="return_value")
print(sorted(m for m in ("torch", "triton", "transformers", "numpy", "fastapi", "rich.progress") if m in sys.modules))
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
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
        (("generate", ".", "hi", "--temperature", "-1"), "temperature"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it(arguments, expected):
    done = run(*arguments)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("nybble: ")
    assert expected in lines[-1]
    assert "Traceback" not in done.stderr


def test_an_unknown_option_is_refused():
    done = run("serve", str(Path(__file__).parent), "--kv", "int3")
    assert done.returncode != 0
    assert "int3" in done.stdout + done.stderr
