"""The first thing `import trident` runs: does the extension fit this Python and this torch?

The extension reads the memory layout of CPython frames and of torch tensors. Loaded into another
version it would crash, not raise, so nothing else of the package is imported before this check.
Only what old Pythons understand is used here, for the message to reach their users as well.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from trident.errors import BuildMismatchError

FIRST_PYTHON, LAST_PYTHON = (3, 11), (3, 13)
PACKAGE = Path(__file__).resolve().parent


def check() -> None:
    """Raises BuildMismatchError, which says what to run, unless the extension can be loaded.

    Imports torch (which Trident needs anyway) and reads no other private state.
    """
    check_python(sys.version_info[:2], bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
    try:
        import torch
    except ImportError as error:
        raise BuildMismatchError(
            f"trident needs torch, which cannot be imported here ({error}).\n"
            f"Install torch, then run:  {rebuild_command()}"
        ) from error
    built_python, built_torch = read_build_info()
    check_build(built_python, built_torch, sys.version_info[:2], str(torch.__version__))


def check_python(version: tuple[int, int], free_threaded: bool) -> None:
    if not FIRST_PYTHON <= version <= LAST_PYTHON:
        raise BuildMismatchError(
            f"trident supports Python {dotted(FIRST_PYTHON)} to {dotted(LAST_PYTHON)}, "
            f"this is {dotted(version)}. Install it in an environment of a supported Python."
        )
    if free_threaded:
        raise BuildMismatchError(
            f"trident does not support the free-threaded build of Python {dotted(version)}. "
            "Install it in an environment of the default build (with a GIL)."
        )


def read_build_info() -> tuple[tuple[int, int], str]:
    """What setup.py recorded: the Python (major, minor) and the torch version built for."""
    extension = any((PACKAGE / f"_frame{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
    try:
        from trident import _build_info
    except ImportError:
        found = sorted(path.name for path in PACKAGE.glob("_frame*.so"))
        raise BuildMismatchError(missing(found)) from None
    if not extension:
        built_for = tuple(_build_info.PYTHON_VERSION)
        if built_for == sys.version_info[:2]:
            raise BuildMismatchError(missing([]))
    major, minor = _build_info.PYTHON_VERSION
    return (major, minor), _build_info.TORCH_VERSION


def check_build(
    built_python: tuple[int, int], built_torch: str, python: tuple[int, int], torch: str
) -> None:
    if built_python != python:
        raise BuildMismatchError(
            f"trident was built for Python {dotted(built_python)}, this is {dotted(python)}.\n"
            f"Build it again:  {rebuild_command()}"
        )
    if built_torch != torch:
        raise BuildMismatchError(
            f"trident was built for torch {built_torch}, but torch {torch} is installed.\n"
            f"Build it again:  {rebuild_command()}"
        )


def missing(found: list[str]) -> str:
    what = f"; there is only {', '.join(found)}" if found else ""
    return (
        f"trident's extension (trident._frame) is not built in {PACKAGE}{what}.\n"
        f"Build it:  {rebuild_command()}"
    )


def rebuild_command() -> str:
    """The command that mends this installation: in a source checkout, or of an installed copy."""
    checkout = PACKAGE.parent
    python = sys.executable or "python"
    if (checkout / "setup.py").exists():
        return f"cd {checkout} && {python} setup.py build_ext --inplace"
    return (
        f"{python} -m pip install --no-build-isolation --force-reinstall --no-deps "
        "PATH_OF_TRIDENT_SOURCES"
    )


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
