"""Calls compared with eager: what they return, raise, warn of and leave behind."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

import trident
from tests.conftest import frame_stats
from tests.test_equality import assert_same
from tests.test_host_programs import native_programs

Inputs = Sequence[Any]


@dataclasses.dataclass
class Outcome:
    result: Any
    error: tuple[type[BaseException], str] | None
    lines: list[tuple[str, int]]  # of the traceback, in the file of the function
    warned: list[tuple[Any, ...]]
    inputs: list[Any]
    state: tuple[Any, ...]


def thread_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.get_rng_state().tolist()[:24],
    )


def outcome(
    f: Callable[..., Any], inputs: Inputs, file: str = "", action: Any = "always"
) -> Outcome:
    result, error, lines = None, None, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        try:
            result = f(*inputs)
        except BaseException as raised:
            error = (type(raised), str(raised))
            lines = _lines(raised.__traceback__, file)
    warned = [(w.category, str(w.message), w.filename, w.lineno) for w in caught]
    return Outcome(result, error, lines, warned, list(inputs), thread_state())


def _lines(entries: TracebackType | None, file: str) -> list[tuple[str, int]]:
    found = traceback.extract_tb(entries)
    return [(entry.name, entry.lineno or 0) for entry in found if entry.filename == file]


def hits(name: str) -> tuple[int, int]:
    """Native runs of the frame called `name`, with and without a result."""
    counters = frame_stats(name)
    return counters.hits, counters.raised


def compiled(f: Callable[..., Any], good: Callable[[], Inputs], native: bool = True) -> Any:
    """`f` compiled, and called until its host program is in use."""
    g = torch.compile(f, backend="trident")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            g(*good())
    name = f.__name__ if hasattr(f, "__name__") else "forward"
    assert native_programs(name) == [native], trident.explain(g)
    return g


def assert_as_eager(
    f: Callable[..., Any],
    good: Callable[[], Inputs],
    *cases: Callable[[], Inputs],
    native: bool = True,
    action: Any = "always",
) -> list[Outcome]:
    """Compiled with the inputs `good`, `f` does the same as in eager for those and all `cases`."""
    g = compiled(f, good, native)
    file = f.__code__.co_filename
    found = []
    for make in (good, *cases, good):
        torch.manual_seed(5)
        expected = outcome(f, make(), file, action)
        torch.manual_seed(5)
        before = sum(hits(f.__name__)) if native else 0
        actual = outcome(g, make(), file, action)
        if native:
            assert sum(hits(f.__name__)) == before + 1, trident.explain(g)
        # Functions that were inlined have no entry of their own, but the innermost one does.
        assert actual.lines[-1:] == expected.lines[-1:]
        actual.lines = expected.lines = []
        assert_same(actual, expected)
        found.append(actual)
    return found
