"""`python -m trident run script.py …`: runs an unchanged script under `trident.enable()`.

The script sees what it would see under plain `python`: `sys.argv`, `sys.path[0]`, a `__main__`
module of its own, its exit code, and tracebacks without frames of this file. One difference stays:
torch is imported before its first line, so environment variables that torch reads at import must
be set outside.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import trident
from trident import report

USAGE = """\
usage: python -m trident run [options] script.py [arguments…]
       python -m trident run [options] -m module [arguments…]

Runs a Python script or module, unchanged, under trident.enable(), and ends with a short report
on stderr. Exit code, sys.argv and output are the script's own.

options:
  --stats FILE   also write the statistics to FILE, as JSON (or set TRIDENT_STATS_JSON=FILE)
  --quiet        no report
  -h, --help     this text

environment:
  TRIDENT_DISABLE=1   run the script with stock torch.compile
  TRIDENT_STRICT=1    re-check every hit with Dynamo's own guards, raise on internal failures
"""


class UsageError(Exception):
    """Wrong command line: reported without a traceback, exit code 2."""


@dataclass(frozen=True)
class Command:
    target: str  # a script's path, or a module's name
    is_module: bool
    arguments: list[str]
    stats_file: str | None
    quiet: bool


@dataclass(frozen=True)
class Program:
    """Code to run as `__main__`, and what its module says about itself."""

    code: types.CodeType
    attributes: dict[str, Any]
    argv0: str
    path0: str | None  # becomes sys.path[0]; None leaves it


def parse(arguments: list[str]) -> Command:
    """Everything after the script or module belongs to it, so options end there."""
    if not arguments or arguments[0] != "run":
        raise UsageError("expected: python -m trident run script.py")
    rest = arguments[1:]
    stats_file, quiet = os.environ.get("TRIDENT_STATS_JSON"), False
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--quiet":
            quiet = True
        elif option == "--stats" and rest:
            stats_file = rest.pop(0)
        elif option.startswith("--stats="):
            stats_file = option.removeprefix("--stats=")
        elif option == "-m" and rest:
            return Command(rest[0], True, rest[1:], absolute(stats_file), quiet)
        elif option == "--":
            break
        elif option in ("--stats", "-m"):
            raise UsageError(f"option {option} needs a value")
        else:
            raise UsageError(f"unknown option {option}")
    if not rest:
        raise UsageError("no script to run")
    return Command(rest[0], False, rest[1:], absolute(stats_file), quiet)


def absolute(path: str | None) -> str | None:
    """The script may change the working directory."""
    return os.path.abspath(path) if path else None


def load_script(script: str) -> Program:
    """A script file; or a folder or zip archive with a `__main__.py`, as `python PATH` allows."""
    path = os.path.abspath(script)
    archive = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if archive is not None:
        return program_of_spec(archive, argv0=script, path0=path)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(
            f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        ) from None
    code = compile(source, path, "exec", dont_inherit=True)
    attributes = {
        "__file__": path,
        "__cached__": None,
        "__package__": None,
        "__spec__": None,
        "__loader__": importlib.machinery.SourceFileLoader("__main__", path),
    }
    return Program(code, attributes, argv0=script, path0=os.path.dirname(os.path.realpath(path)))


def load_module(name: str) -> Program:
    """A module by name, or a package's `__main__`, as `python -m NAME` finds it."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the parent package exists and fails to import something else
        spec = None
    if spec is None:
        fail(f"No module named {name}", status=1)
    return program_of_spec(spec, argv0=spec.origin or name, path0=None)


def program_of_spec(spec: importlib.machinery.ModuleSpec, argv0: str, path0: str | None) -> Program:
    get_code: Callable[[str], types.CodeType | None] | None = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        fail(f"No code object available for {spec.name}", status=1)
    attributes = {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__package__": spec.parent,
        "__spec__": spec,
        "__loader__": spec.loader,
    }
    return Program(code, attributes, argv0, path0)


def execute(program: Program) -> None:
    """Runs the program in a fresh `__main__` module that outlives it (threads, atexit, pickle)."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins  # the module, as in any other __main__
    module.__dict__.update(program.attributes)
    sys.modules["trident.__main__"] = sys.modules["__main__"]  # keeps this file's globals alive
    sys.modules["__main__"] = module
    try:
        exec(program.code, module.__dict__)
    except BaseException as error:
        global interrupted
        interrupted = isinstance(error, KeyboardInterrupt)
        hide_own_frames()
        raise


interrupted = False  # the script ended by an uncaught KeyboardInterrupt


def die_of_interrupt() -> None:
    """Ends the process as an uncaught Ctrl-C ends `python script.py`: by the signal itself.

    From 3.12 on the interpreter does so for a script only, and exits with 1 for `python -m`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def hide_own_frames() -> None:
    """Makes an uncaught exception print as under plain `python`.

    The interpreter itself reports it, so exit codes, signals and the user's own `sys.excepthook`
    stay as they are; only the traceback is cut before it is shown.
    """
    shown: Callable[..., object] = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        rest = trace
        while rest is not None and rest.tb_frame.f_code.co_filename in OWN_FILES:
            rest = rest.tb_next
        if rest is not None or isinstance(error, SyntaxError):
            trace = rest  # otherwise it was raised by Trident: show where
            error.__traceback__ = rest
        shown(kind, error, trace)

    sys.excepthook = excepthook


OWN_FILES = (hide_own_frames.__code__.co_filename, "<frozen runpy>")


def finish(command: Command, process_id: int) -> None:
    """The report; runs after the script's own exit handlers, and only in the first process."""
    if os.getpid() != process_id:
        return
    try:
        if command.stats_file is not None:
            with open(command.stats_file, "w", encoding="utf-8") as file:
                json.dump(trident.stats().as_dict(), file, indent=2)
        if not command.quiet:
            print(report.summary(), file=sys.stderr)
    except Exception as error:  # a report must not change how the script ends
        print(f"trident: no report: {type(error).__name__}: {error}", file=sys.stderr)
    if interrupted and sys.version_info >= (3, 12):
        die_of_interrupt()


def fail(message: str, status: int) -> NoReturn:
    print(f"trident: {message}", file=sys.stderr)
    raise SystemExit(status)


def run(command: Command) -> None:
    sys.argv[:] = [command.target, *command.arguments]
    try:
        program = (load_module if command.is_module else load_script)(command.target)
    except (SyntaxError, ImportError):
        hide_own_frames()
        raise
    sys.argv[0] = program.argv0
    if program.path0 is not None and not sys.flags.safe_path:
        sys.path[0] = program.path0  # `python -m` had put the working directory there
    atexit.register(finish, command, os.getpid())
    trident.enable()
    execute(program)


def main(arguments: list[str]) -> None:
    if arguments in (["-h"], ["--help"], ["run", "-h"], ["run", "--help"]):
        print(USAGE, end="")
        return
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        raise SystemExit(2)
    try:
        command = parse(arguments)
        run(command)
    except UsageError as error:
        print(f"trident: {error}\n(python -m trident --help tells more)", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1:])
