"""`enable(recompile_limit=...)`, and frames that Dynamo compiles no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import trident
from tests.conftest import compilations, frame_stats, reset_compilations
from trident import TridentError, _frame

X = torch.arange(4.0)
config = torch._dynamo.config


@pytest.fixture(autouse=True)
def limits_as_before() -> Iterator[None]:
    before = limits()
    yield
    assert limits() == before


def limits() -> tuple[int, int]:
    return config.recompile_limit, config.accumulated_recompile_limit


def compiled_graphs(numbers: range) -> int:
    """How many graphs Dynamo makes for as many numbers."""

    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="eager", dynamic=False)
    reset_compilations()
    for n in numbers:
        assert torch.equal(compiled(X, n), X * n)
    return compilations()["graphs"]


def in_thread(function: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_limit_holds_while_enabled(fresh: None) -> None:
    assert limits() == (8, 256)
    with trident.enable(recompile_limit=3):
        assert limits() == (3, 256)
        assert compiled_graphs(range(2, 12)) == 3
    assert limits() == (8, 256)
    with trident.enable(recompile_limit=300):
        assert limits() == (300, 300)
        assert compiled_graphs(range(2, 16)) == 14
    with trident.enable():
        assert limits() == (8, 256)
        assert compiled_graphs(range(2, 16)) == 8


def test_plain_calls(fresh: None) -> None:
    trident.enable(recompile_limit=5)
    try:
        assert limits() == (5, 256)
    finally:
        trident.disable()
    assert limits() == (8, 256)


def test_nested(fresh: None) -> None:
    with trident.enable(recompile_limit=5) as outer:
        with trident.enable():
            assert limits() == (5, 256)
            with trident.enable(recompile_limit=400):
                assert limits() == (400, 400)
                with outer:  # once more: the latest
                    assert limits() == (5, 256)
                assert limits() == (400, 400)
            assert limits() == (5, 256)
        trident.enable(recompile_limit=7)
        assert limits() == (7, 256)
        trident.disable()
        assert limits() == (5, 256)
    assert limits() == (8, 256)
    assert not trident.is_enabled()


def test_enabled_again_after_its_end(fresh: None) -> None:
    token = trident.enable(recompile_limit=6)
    trident.disable()
    with token:
        pass
    with token:
        assert limits()[0] == 6
    assert limits()[0] == 8


def test_ends_out_of_order(fresh: None) -> None:
    first, second = trident.enable(recompile_limit=5), trident.enable(recompile_limit=6)
    first.__exit__(None, None, None)
    assert limits()[0] == 6
    second.__exit__(None, None, None)
    assert limits()[0] == 8


def test_left_by_an_exception(fresh: None) -> None:
    with pytest.raises(RuntimeError), trident.enable(recompile_limit=5):
        raise RuntimeError
    assert limits() == (8, 256)


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8", [8], torch.tensor(8)])
def test_wrong_values_change_nothing(fresh: None, value: Any) -> None:
    with pytest.raises(TridentError, match="an int of at least 1, or None"):
        trident.enable(recompile_limit=value)
    assert not trident.is_enabled()
    assert limits() == (8, 256)


def test_disabled_by_the_environment(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIDENT_DISABLE", "1")
    with trident.enable(recompile_limit=5):
        assert limits() == (8, 256)


def test_limits_that_others_set_stay(fresh: None) -> None:
    with config.patch(recompile_limit=4):
        with trident.enable(recompile_limit=6):
            assert limits()[0] == 6
            with config.patch(recompile_limit=2):
                assert compiled_graphs(range(2, 12)) == 2
                assert limits()[0] == 2
            assert limits()[0] == 6
        assert limits()[0] == 4
    former = config.recompile_limit
    with trident.enable(recompile_limit=6):
        config.recompile_limit = 5
    assert config.recompile_limit == 5
    config.recompile_limit = former


def test_limit_of_one_function_goes_before(fresh: None) -> None:
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    try:
        compiled = torch.compile(f, backend="eager", dynamic=False, recompile_limit=2)
    except TypeError:
        pytest.skip("torch.compile(recompile_limit=...) came later")
    with trident.enable(recompile_limit=5):
        reset_compilations()
        for n in range(2, 12):
            compiled(X, n)
        assert compilations()["graphs"] == 2


def test_all_threads(fresh: None) -> None:
    """Newer releases of torch keep a configuration per thread."""
    with trident.enable(recompile_limit=3):
        assert in_thread(lambda: compiled_graphs(range(2, 12))) == 3
        assert compiled_graphs(range(2, 12)) == 3
    assert in_thread(lambda: compiled_graphs(range(2, 16))) == 8


def test_a_thread_that_compiled_is_as_before(fresh: None) -> None:
    """One thread compiles during the limit and after it."""
    steps, done = threading.Semaphore(0), threading.Semaphore(0)
    result: list[Any] = []

    def work() -> None:
        for _ in range(2):
            steps.acquire()
            result.append(compiled_graphs(range(2, 16)))
            done.release()
        result.append(limits())

    thread = threading.Thread(target=work)
    thread.start()
    with trident.enable(recompile_limit=3):
        steps.release()
        done.acquire()
    steps.release()
    done.acquire()
    thread.join()
    assert result == [3, 8, (8, 256)]


def test_ended_by_another_thread(fresh: None) -> None:
    trident.enable(recompile_limit=3)
    in_thread(trident.disable)
    assert not trident.is_enabled()
    assert compiled_graphs(range(2, 16)) == 8  # the next compilation here sees to it
    assert limits() == (8, 256)


def test_setting_it_compiles_nothing_again(fresh: None) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(X)
    reset_compilations()
    with trident.enable(recompile_limit=20):
        compiled(X)
    compiled(X)
    assert compilations()["graphs"] == 0


# ---- over the limit ----


def test_over_the_limit_known_calls_are_served(enabled: None) -> None:
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    compiled = torch.compile(f, backend="trident", dynamic=False)
    with config.patch(recompile_limit=2):
        for n in (2, 2, 3, 3, 4, 5):
            compiled(X, n)
        frame = trident.explain(compiled).frames[0]
        assert frame.over_limit
        assert len(frame.specializations) == 2
        text = str(trident.explain(compiled))
        assert "over Dynamo's recompile limit" in text
        assert "n: expected 2, got 5" in text
        hits = frame_stats("f").hits
        for n in (2, 3, 4) * 50:
            assert torch.equal(compiled(X, n), X * n)
        assert frame_stats("f").hits == hits + 100
        assert _frame.is_hooked(f.__code__)


def test_under_the_limit_nothing_is_said(enabled: None) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(X)
    compiled(X)
    assert not trident.explain(compiled).frames[0].over_limit
    assert "recompile limit" not in str(trident.explain(compiled))


def test_over_the_limit_others_back_off_and_known_calls_return(enabled: None) -> None:
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    # Dynamo's code serves the frame: no door would.
    compiled = torch.compile(f, backend="eager", dynamic=False)
    with config.patch(recompile_limit=1):
        for n in (2, 2, 3):
            compiled(X, n)
        for _ in range(10_000):
            compiled(X, 7)
        # Asked after 64, then after 64, 128, 256, ... calls that are left to stock.
        assert frame_stats("f").misses < 64 + 10
        (frame,) = trident.explain(compiled).frames
        assert frame.passes > 0
        assert f"the next {frame.passes} calls, too" in str(trident.explain(compiled))
        served = frame_stats("f").run_code
        for _ in range(frame.passes + 10):
            assert torch.equal(compiled(X, 2), X * 2)
        assert frame_stats("f").run_code == served + 10
        compiled(X, 7)  # asked again
        assert trident.explain(compiled).frames[0].passes == 0
