"""Each way in which the extension may not fit gives one error that says what to run."""

from __future__ import annotations

from pathlib import Path

import pytest

import trident
from trident import _build_check as checked


def test_this_installation_passes() -> None:
    checked.check()


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_unsupported_python(version: tuple[int, int]) -> None:
    with pytest.raises(
        trident.BuildMismatchError, match=r"supports Python 3\.11 to 3\.13, this is"
    ):
        checked.check_python(version, free_threaded=False)


def test_free_threaded_python() -> None:
    with pytest.raises(trident.BuildMismatchError, match=r"free-threaded build of Python 3\.13"):
        checked.check_python((3, 13), free_threaded=True)


def test_other_torch() -> None:
    with pytest.raises(
        trident.BuildMismatchError,
        match=r"torch 2\.13\.0, but torch 2\.12\.1 is installed\.\nBuild it again:  .*setup",
    ):
        checked.check_build((3, 11), "2.13.0", (3, 11), "2.12.1")


def test_other_python() -> None:
    with pytest.raises(trident.BuildMismatchError, match=r"built for Python 3\.12, this is 3\.11"):
        checked.check_build((3, 12), "2.13.0", (3, 11), "2.13.0")


def test_missing_extension_names_what_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "_frame.cpython-310-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(checked, "PACKAGE", tmp_path)
    with pytest.raises(trident.BuildMismatchError, match=r"\(trident\._frame\) is not built in "):
        checked.read_build_info()
    assert "cpython-310" in checked.missing(["_frame.cpython-310-x86_64-linux-gnu.so"])


def test_it_is_an_import_error() -> None:
    assert issubclass(trident.BuildMismatchError, ImportError)
    assert issubclass(trident.BuildMismatchError, trident.TridentError)


def test_installed_copies_are_told_to_reinstall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checked, "PACKAGE", tmp_path / "trident")
    assert "pip install --no-build-isolation" in checked.rebuild_command()
    (tmp_path / "setup.py").touch()
    assert "setup.py build_ext --inplace" in checked.rebuild_command()
