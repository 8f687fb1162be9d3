"""A part of PyTorch's own operator samples; ``make test-ops`` runs them all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow
pytest.importorskip("expecttest", reason="torch's own samples need it")


def run(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.op_samples", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def number(text: str, pattern: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_samples() -> None:
    text = run("--every", "10", "--first", "3", "--most", "1")
    assert number(text, r"^native: (\d+)$") > 100, text
    assert number(text, r"^native of those in one graph: ([\d.]+)%$") >= 95, text


def test_inductors_samples() -> None:
    """The same through Inductor, against stock Inductor."""
    text = run("--inductor", "--every", "40", "--first", "9", "--most", "1")
    assert number(text, r"^native: (\d+)$") > 20, text
    assert number(text, r"^native of those in one graph: ([\d.]+)%$") >= 90, text


def test_errors() -> None:
    """Operators refuse what they refuse in stock, with the same words."""
    text = run("--errors", "--every", "10", "--first", "3")
    assert number(text, r"^refused: (\d+)$") > 30, text


def test_leaks() -> None:
    """Operators leave no memory behind, whether what follows them succeeds or raises."""
    text = run("--leaks", "--every", "16", "--first", "2")
    for what in ("succeeds", "raises"):
        assert number(text, rf"^{what}: (\d+)$") >= 30, text
