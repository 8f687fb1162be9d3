"""`python -m trident run` against plain `python`: the same output, traceback and exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
"""A script."""
import atexit, os, pickle, sys

class Point: pass

spec = getattr(__spec__, 'name', None)
print(__name__, __file__, __doc__, spec, type(__builtins__), sys.argv, sys.path[0])
print(sys.modules["__main__"].Point is Point, type(pickle.loads(pickle.dumps(Point()))) is Point)
atexit.register(print, "the script's exit handler")
case = sys.argv[1] if len(sys.argv) > 1 else ""

def fails():
    try:
        1 / 0
    except ZeroDivisionError:
        raise ValueError("second")

if case == "exit 7": sys.exit(7)
if case == "exit text": sys.exit("a last word")
if case == "raise": fails()
if case == "interrupt": raise KeyboardInterrupt
if case == "excepthook":
    sys.excepthook = lambda kind, error, trace: print("hook", kind, trace.tb_frame.f_code.co_name)
    fails()
if case == "fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
if case == "chdir": os.chdir("/")
'''


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def run_both(
    folder: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    return run(folder, *arguments), run(folder, "-m", "trident", "run", "--quiet", *arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("x = = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nprint(__name__, __package__, __spec__.name, sys.argv, sys.path[0])\n"
    )
    (tmp_path / "application").mkdir()
    (tmp_path / "application" / "__main__.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["script.py"],
        ["script.py", "--stats", "-m", "x"],
        ["script.py", "exit 7"],
        ["script.py", "exit text"],
        ["script.py", "raise"],
        ["script.py", "interrupt"],
        ["script.py", "excepthook"],
        ["script.py", "fork"],
        ["broken.py"],
        ["-m", "package", "a", "b"],
        ["application", "exit 7"],
    ],
    ids=" ".join,
)
def test_runs_as_plain_python_does(folder: Path, arguments: list[str]) -> None:
    plain, ours = run_both(folder, *arguments)
    assert (ours.stdout, ours.stderr, ours.returncode) == (
        plain.stdout,
        plain.stderr,
        plain.returncode,
    )


def test_report_is_last_and_statistics_are_written(folder: Path) -> None:
    done = run(folder, "-m", "trident", "run", "--stats", "stats.json", "script.py", "chdir")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "the script's exit handler"
    assert done.stderr.startswith("trident: 0 of 0 calls")
    assert json.loads((folder / "stats.json").read_text())["hits"] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run", "nowhere.py"], 2, "trident: can't open file '"),
        (["run", "-m", "nowhere_at_all"], 1, "trident: No module named nowhere_at_all"),
        (["run"], 2, "trident: no script to run"),
        (["run", "--stats"], 2, "trident: option --stats needs a value"),
        (["run", "--fast", "script.py"], 2, "trident: unknown option --fast"),
        (["start"], 2, "trident: expected: python -m trident run script.py"),
        ([], 2, "usage: python -m trident run"),
    ],
)
def test_wrong_command_lines(folder: Path, arguments: list[str], status: int, message: str) -> None:
    done = run(folder, "-m", "trident", *arguments)
    assert done.returncode == status
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr
