from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import trident
from trident import capture
from trident.control import runtime

# Tests compare bits; the number of threads may change them, and is guarded on by Dynamo.
torch.set_num_threads(1)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Dynamo and Trident as after import, and checked to be so again at the end."""
    assert not trident.is_enabled()
    capture.install()
    capture.set_listener(runtime)
    torch._dynamo.reset()
    trident.reset_stats()
    failures = capture.failures()
    yield
    left_enabled = trident.is_enabled()
    while trident.is_enabled():
        trident.disable()
    torch._dynamo.reset()
    assert not left_enabled, "a test left Trident enabled"
    assert capture.failures() == failures


@pytest.fixture
def enabled(fresh: None) -> Iterator[None]:
    with trident.enable():
        yield


@pytest.fixture
def without_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that make the second check, Dynamo's, differ by themselves (other threads change
    what it sees, the recursion limit is reached in it), or that need a failure to stay silent."""
    monkeypatch.delenv("TRIDENT_STRICT", raising=False)


@pytest.fixture
def strictly_enabled(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    with trident.enable():
        yield


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or the exception's type and message."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def compilations() -> dict[str, int]:
    """How often Dynamo compiled since `reset_compilations()`."""
    counters = torch._dynamo.utils.counters
    return {
        "frames": counters["frames"]["ok"],
        "attempts": counters["frames"]["total"],
        "graphs": counters["stats"]["unique_graphs"],
    }


def reset_compilations() -> None:
    torch._dynamo.utils.counters.clear()


def frame_stats(name: str) -> Any:
    """The FrameStats of the one frame called `name`."""
    (found,) = (frame for frame in trident.stats().frames if frame.name == name)
    return found
