"""The command line as a whole: help, versions, mistakes, pipes, and what it must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from longitude import __version__

from .conftest import ROOT, Ran, python

COMMANDS = ("schemes", "show", "train", "lab", "read", "stream", "bench", "env")
MISTAKES = [
    ("show", "rop"),
    ("show", "rope() + + +"),
    ("show", "rope() + rope()"),
    ("show", "rope(remap=rerope(0))"),
    ("show", "rope", "--length", "1"),
    ("show", "rope", "--length", "many"),
    ("show", "rope", "--heads", "0"),
    ("show", "rope", "--dim", "7"),
    ("show", "rope", "--out", "page.pdf"),
    ("show", "randomized(64) + rope()", "--length", "65"),
    ("show", "rope(frequencies=longrope((1, 2), (1, 2), original=8))", "--dim", "64"),
    ("show",),
    ("show", "rope", "--lenght", "64"),
    ("schemes", "--site", "bais"),
    ("shwo", "rope"),
]


@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)])
def test_help_by_both_names(longitude: Callable[..., Ran], command: tuple[str, ...]) -> None:
    short, long = longitude(*command, "-h"), longitude(*command, "--help")
    assert short == long
    assert short[0] == 0 and "Usage: longitude" in short[1] and not short[2]


def test_help_names_every_command_in_kebab_case(longitude: Callable[..., Ran]) -> None:
    code, bare, _ = longitude()
    assert code == 0 and all(f"\n  {c} " in bare for c in COMMANDS)
    flags = [w for c in COMMANDS for w in longitude(c, "-h")[1].split() if w.startswith("--")]
    assert flags and not [f for f in flags if "_" in f]


def test_version(longitude: Callable[..., Ran]) -> None:
    assert longitude("--version") == (0, f"longitude {__version__}\n", "")


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line(longitude: Callable[..., Ran], args: tuple[str, ...]) -> None:
    code, out, err = longitude(*args)
    assert (code, out) == (2, "")
    assert err.startswith("longitude: ") and err.endswith(".\n") and err.count("\n") == 1
    assert "Traceback" not in err


def test_mistakes_name_the_nearest(longitude: Callable[..., Ran]) -> None:
    assert "rope" in longitude("show", "rop")[2]
    assert "leaky_rerope" in longitude("show", "rope(remap=leaky_reropr(4, 2))")[2]
    assert "bias" in longitude("schemes", "--site", "bais")[2]
    assert "--length" in longitude("show", "rope", "--lenght", "64")[2]
    assert "show" in longitude("shwo", "rope")[2]


@pytest.mark.parametrize("args", [("--debug", "show", "rop"), ("show", "rop", "--debug")])
def test_debug_adds_the_traceback(longitude: Callable[..., Ran], args: tuple[str, ...]) -> None:
    code, _, err = longitude(*args)
    assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("longitude: ")


def test_a_fault_of_ours_is_one_line_and_another_code(
    longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longitude.inspection.api.as_scheme", lambda text: {}["nothing"])
    code, out, err = longitude("show", "rope")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "KeyError" in err and "longitude env" in err


def test_a_file_that_cannot_be_written_is_one_line(longitude: Callable[..., Ran]) -> None:
    code, _, err = longitude("show", "alibi", "--out", str(ROOT / "README.md" / "page.html"))
    assert code == 1 and err.startswith("longitude: ") and err.count("\n") == 1


def test_interrupting_is_quiet(
    longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longitude.inspection.api.as_scheme", interrupt)
    assert longitude("show", "rope") == (130, "", "")


TERMINATED = """import signal, sys
from longitude.cli.main import main
from longitude.inspection import api
api.as_scheme = lambda text: signal.raise_signal(signal.SIGTERM)
sys.argv[1:] = ["show", "rope"]
main()"""


def test_terminating_is_interrupting() -> None:
    command = [sys.executable, "-c", TERMINATED]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_a_pipe_closed_early_is_quiet() -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "longitude", "schemes"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout and program.stderr
    program.stdout.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait() == 1


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from longitude.cli.main import run
for args in (["--help"], ["show", "-h"], ["--version"], ["shwo"]):
    run(args)
heavy = {"torch", "numpy", "altair", "transformers", "vl_convert", "rich"}
print(sorted(heavy & set(sys.modules)))
"""
    ran = python("-c", code)
    assert ran.stdout.splitlines()[-1] == "[]", ran.stderr


def test_public_names_bring_neither_compiler_nor_transformers() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import longitude, longitude.nn, longitude.parts, longitude.presets
for name in longitude.__all__:
    getattr(longitude, name)
heavy = ("torch._dynamo", "torch._inductor", "transformers", "triton", "altair", "typer")
print([m for m in set(sys.modules) - before if m.startswith(heavy)])
"""
    ran = python("-c", code)
    assert ran.stdout == "[]\n", ran.stderr


def test_env(longitude: Callable[..., Ran]) -> None:
    code, out, _ = longitude("env", "--json")
    found = json.loads(out)
    assert code == 0 and found["longitude"] == __version__
    names = "longitude python platform torch transformers triton flash-attn-4 cuda device"
    assert list(found) == names.split()
    assert [line.split()[0] for line in longitude("env")[1].splitlines()] == list(found)


def test_module_runs_as_a_program() -> None:
    ran = python("-m", "longitude", "shwo")  # a mistake that is told without torch
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("longitude: ") and "show" in ran.stderr
