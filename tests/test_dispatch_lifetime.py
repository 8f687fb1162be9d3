"""Nothing leaks or outlives what it must not; threads, forks and resets change no result."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.conftest import frame_stats
from trident import _frame, capture

X = torch.arange(4.0)
CALLS = 100_000


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def assert_flat(call: Callable[[], Any], n: int, *objects: Any) -> None:
    """`n` calls leave the objects' reference counts and the process's memory as they are."""
    for _ in range(min(n, 2000)):
        call()
    gc.collect()
    counts = [sys.getrefcount(o) for o in objects]
    # The allocator of a large process may take or give back a megabyte at any time, but a leak is
    # there in each round.
    for _ in range(3):
        memory = rss_bytes()
        for _ in range(n):
            call()
        gc.collect()
        assert [sys.getrefcount(o) for o in objects] == counts
        if rss_bytes() - memory < 2**20:
            return
    raise AssertionError(f"each {n} calls take more than a megabyte")


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Identity(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def same(x: Any) -> Any:
    return x


def test_door_hits_are_flat(enabled: None) -> None:
    compiled = torch.compile(same, backend="eager")
    module = torch.compile(Identity(), backend="eager")
    argument = object()
    for _ in range(5):
        compiled(argument)
        module(X)
    hits = trident.stats().hits
    assert_flat(lambda: compiled(argument), CALLS, argument, same, same.__code__, compiled)
    assert_flat(lambda: module(X), CALLS, X, module)
    assert_flat(lambda: compiled(x=argument), CALLS, argument)
    assert trident.stats().hits - hits >= 3 * CALLS


def test_tuple_and_varargs_hits_are_flat(enabled: None) -> None:
    constant = ("constant", 1.5)

    def f(a: Any, *rest: Any, **more: Any) -> Any:
        return (a, rest, more, constant)

    compiled, argument = torch.compile(f, backend="eager"), object()
    for _ in range(5):
        compiled(argument)
    hits = frame_stats("f").hits
    assert_flat(lambda: compiled(argument, 2, z=argument), CALLS, argument, f, constant)
    assert frame_stats("f").hits - hits >= CALLS


def test_guarded_plan_hits_are_flat(enabled: None) -> None:
    def f(x: Any, n: int) -> Any:
        return (x, n)

    compiled = torch.compile(f, backend="eager", fullgraph=True, dynamic=False)
    for _ in range(5):
        compiled(X, 1)
    assert frame_stats("f").specializations == 1
    hits = frame_stats("f").hits
    assert_flat(lambda: compiled(X, 1), 20_000, X, f, f.__code__)
    assert frame_stats("f").hits - hits >= 20_000


def test_run_code_hits_are_flat(enabled: None) -> None:
    model = Scale()
    compiled = torch.compile(model, backend="eager")
    for _ in range(5):
        compiled(X)
    code = Scale.forward.__code__
    assert_flat(lambda: compiled(X), CALLS, X, model, model.weight, code)
    assert frame_stats("forward").run_code >= CALLS


def test_models_are_freed(fresh: None) -> None:
    def make() -> list[weakref.ref[Any]]:
        model = Scale()
        compiled = torch.compile(model, backend="eager")
        for _ in range(4):
            compiled(X)
        return [weakref.ref(model), weakref.ref(model.weight), weakref.ref(compiled)]

    stock = make()
    gc.collect()
    with trident.enable():
        references = make()
        gc.collect()
        assert [r() is None for r in references] == [r() is None for r in stock]
        torch._dynamo.reset()
        gc.collect()
        assert [r() for r in references] == [None, None, None]


def test_addresses_are_not_trusted_after_death(enabled: None) -> None:
    """A guard on an object's identity must not accept another one at the same address."""

    class Config:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    def f(x: torch.Tensor, config: Config) -> torch.Tensor:
        return x * config.scale

    compiled = torch.compile(f, backend="eager")
    for i in range(12):
        config = Config(float(i))
        for _ in range(3):
            assert torch.equal(compiled(X, config), X * float(i))
        del config
        gc.collect()
    for i in range(8):
        kind = type("Config", (Config,), {"scale": property(lambda self, i=i: i)})
        config = kind.__new__(kind)
        for _ in range(3):
            assert torch.equal(compiled(X, config), X * i)
        del config, kind
        gc.collect()
    for i in range(8):
        model = Scale()
        model.weight.fill_(i)
        compiled_model = torch.compile(model, backend="eager")
        for _ in range(3):
            assert torch.equal(compiled_model(X), X * i)
        del model, compiled_model
        gc.collect()


def test_code_objects_live_no_longer_than_stock_lets_them(fresh: None) -> None:
    def survivors() -> int:
        references = []
        for i in range(10):
            namespace: dict[str, Any] = {}
            exec(f"def f(x): return (x, {i})", namespace)
            compiled = torch.compile(namespace["f"], backend="eager")
            for _ in range(3):
                assert compiled(1) == (1, i)
            references.append(weakref.ref(namespace["f"].__code__))
            del compiled, namespace
        torch._dynamo.reset()
        gc.collect()
        return sum(r() is not None for r in references)

    expected = survivors()
    with trident.enable():
        assert survivors() <= expected


def test_reset_in_the_middle_of_a_call(enabled: None) -> None:
    resets = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        if resets:
            torch._dynamo.reset()
        return y * 2

    compiled = torch.compile(f, backend="eager")
    for i in range(12):
        if i in (4, 8):
            resets.append(1)
        assert torch.equal(compiled(X), (X + 1) * 2)
        resets.clear()


def test_many_specializations(enabled: None) -> None:
    def f(x: torch.Tensor, n: str) -> torch.Tensor:
        return x * len(n)

    compiled = torch.compile(f, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=32):
        for _ in range(3):
            for i in range(20):
                assert torch.equal(compiled(X, "n" * i), X * i)
    stats = frame_stats("f")
    assert stats.specializations == 20
    assert stats.run_code == 40
    assert stats.misses == 19


def test_threads(enabled: None) -> None:
    """Calls, compilations and switching at once: only the speed may change. (No resets here: stock
    torch 2.13 itself crashes when a thread resets Dynamo while others are in its cache lookup.)"""
    model, stop = Scale(), threading.Event()
    functions = [
        (torch.compile(same, backend="eager"), X),
        (torch.compile(model, backend="eager"), X),
        (torch.compile(lambda x: torch.relu(x) + 1, backend="eager"), X + 1),
        (torch.compile(Identity(), backend="eager"), X),
    ]
    errors: list[Any] = []

    def guarded(body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not stop.is_set():
                    body()
            except Exception as error:
                errors.append(error)
                stop.set()

        return run

    def call() -> None:
        for function, expected in functions:
            if not torch.equal(function(X), expected):
                raise AssertionError(function)

    def compile_new() -> None:
        number = time.monotonic_ns() % 1000
        f = torch.compile(lambda x: x + number, backend="eager")
        for _ in range(3):
            if not torch.equal(f(X), X + number):
                raise AssertionError("fresh")

    def switch() -> None:
        with trident.enable():
            time.sleep(0.002)
        trident.stats()

    call()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    bodies = (call, call, compile_new, switch)
    threads = [threading.Thread(target=guarded(body)) for body in bodies]
    try:
        for thread in threads:
            thread.start()
        stop.wait(4)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(interval)
    assert errors == []


def test_fork(enabled: None) -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    fast = torch.compile(same, backend="eager")
    for _ in range(4):
        compiled(X)
        fast(X)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ok = torch.equal(compiled(X), X * 2) and fast(X) is X
            if not torch.cuda.is_available():  # Dynamo's compiler asks CUDA, which cannot fork
                fresh_function = torch.compile(lambda x: x - 2, backend="eager")
                ok = ok and all(torch.equal(fresh_function(X), X - 2) for _ in range(3))
            status = 0 if ok else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(compiled(X), X * 2)
    assert fast(X) is X


def test_recursion_depth_is_unchanged(fresh: None) -> None:
    def depth() -> int:
        reached = 0

        def down(n: int) -> None:
            nonlocal reached
            reached = n
            down(n + 1)

        with pytest.raises(RecursionError):
            down(0)
        return reached

    expected = depth()
    with trident.enable():
        compiled = torch.compile(same, backend="eager")
        for _ in range(4):
            compiled(X)
        assert depth() == expected
    assert depth() == expected


def test_recursive_compiled_function(enabled: None) -> None:
    @torch.compile(backend="eager")
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x if n == 0 else f(x + 1, n - 1)

    for _ in range(4):
        assert torch.equal(f(X, 3), X + 3)


def test_internal_failure_leaves_the_frame_stock(enabled: None, monkeypatch: Any) -> None:
    from trident.codegen import pipeline

    def broken(spec: Any) -> Any:
        raise ZeroDivisionError("deliberate")

    monkeypatch.delenv("TRIDENT_STRICT", raising=False)
    monkeypatch.setattr(pipeline, "build", broken)
    compiled = torch.compile(lambda x: x + 4, backend="eager")
    for _ in range(4):
        assert torch.equal(compiled(X), X + 4)
    (frame,) = trident.explain(compiled).frames
    assert "ZeroDivisionError: deliberate" in str(frame.specializations[0].guards_reason)
    assert trident.stats().run_code == 0


def test_strict_raises_internal_failures(fresh: None, monkeypatch: Any) -> None:
    from trident.codegen import pipeline

    def broken(spec: Any) -> Any:
        raise ZeroDivisionError("deliberate")

    monkeypatch.setattr(pipeline, "build", broken)
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    with trident.enable():
        compiled = torch.compile(lambda x: x + 4, backend="eager")
        compiled(X)
        with pytest.raises(trident.TridentError, match="deliberate"):
            compiled(X)


def test_strict_catches_a_wrong_hit(fresh: None, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    with trident.enable():
        compiled = torch.compile(lambda x: x + 4, backend="eager")
        compiled(X)
        compiled(X)
        monkeypatch.setattr(capture.dynamo, "guard_check", lambda spec, f_locals: False)
        with pytest.raises(trident.TridentError, match="Dynamo's own guards reject"):
            compiled(X)


SHUTDOWN = """
    import sys, threading, torch, trident
    trident.enable()
    same = torch.compile(lambda x: x, backend="eager")
    graph = torch.compile(lambda x: x + 1, backend="eager")
    class M(torch.nn.Module):
        def forward(self, x): return x
    module = torch.compile(M(), backend="eager")
    x = torch.ones(2)
    for _ in range(4): same(x), graph(x), module(x)
    thread = threading.Thread(target=lambda: [graph(x) for _ in range(100)])
    thread.start(); thread.join()
    assert trident.stats().hits > 4
    {end}
"""


@pytest.mark.parametrize(
    ("end", "status"), [("pass", 0), ("sys.exit(3)", 3), ("same.me = same", 0)]
)
def test_quiet_shutdown(end: str, status: int) -> None:
    code = textwrap.dedent(SHUTDOWN.format(end=end))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_disabled_by_environment() -> None:
    code = """
        import torch, trident
        from trident import capture
        with trident.enable():
            assert not trident.is_enabled()
            f = torch.compile(lambda x: x, backend="eager")
            for _ in range(4): f(1)
        assert not capture.is_installed()
        assert trident.stats().hits == 0
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "TRIDENT_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_not_recorded_is_named() -> None:
    code = """
        import torch
        f = torch.compile(lambda x: x + 1, backend="eager")
        f(torch.ones(2))
        import trident
        with trident.enable():
            f(torch.ones(2))
            text = str(trident.explain(f))
            assert "compiled before trident was imported" in text, text
            assert "reset=True" in text
            assert trident.stats().run_code == 0
        with trident.enable(reset=True):
            for _ in range(3): f(torch.ones(2))
            assert trident.stats().run_code == 2, trident.stats()
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_thread_state_question(enabled: None) -> None:
    assert _frame.calling_thread_allows()
    with torch._C._DisableTorchDispatch():
        assert not _frame.calling_thread_allows()
    assert _frame.calling_thread_allows()
