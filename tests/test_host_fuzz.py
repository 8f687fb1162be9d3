"""Some random programs; ``python -m tests.host_fuzz`` runs as many as there is time for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def test_programs() -> None:
    """In a process of its own, so that no other test shows in the numbers of what is random."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.host_fuzz"]
    command += ["--seed", "0", "--count", "40", "--seconds", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.match(r"(\d+) programs, (\d+) of them native", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) == 40, done.stdout
    assert int(found[2]) >= 30, done.stdout
