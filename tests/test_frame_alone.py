"""The CPython part of the runtime, without torch, under every interpreter that is at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUNTIME = HERE.parent / "trident" / "runtime"


def interpreters() -> list[str]:
    """This Python, and one of each other supported version that is found."""
    found = {sys.version_info[:2]: sys.executable}
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in (11, 12, 13):
        pyenv = [str(p) for p in sorted(root.glob(f"3.{minor}.*/bin/python3"))]
        for candidate in [*pyenv, shutil.which(f"python3.{minor}")]:
            if candidate is not None and (3, minor) not in found and works(candidate):
                found[3, minor] = candidate
    return [found[version] for version in sorted(found)]


def works(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


@pytest.mark.parametrize("python", interpreters())
def test_frame_alone(python: str, tmp_path: Path) -> None:
    ask = "import sysconfig as s; print(s.get_paths()['include'])"
    include = subprocess.check_output([python, "-c", ask], text=True).strip()
    if not (Path(include) / "Python.h").exists():
        pytest.skip(f"{python} has no headers")
    sources = [str(HERE / "native" / "frame_alone.cpp"), str(RUNTIME / "binding.cpp")]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{RUNTIME}", f"-I{include}"]
    target = tmp_path / "frame_alone.so"
    subprocess.run([*command, *sources, "-o", str(target)], check=True)
    done = subprocess.run(
        [python, "-X", "faulthandler", str(HERE / "native" / "check_frame_alone.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok")
