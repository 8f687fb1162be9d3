"""Guards while other threads change what they look at, and guards that nobody knows."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import frame_stats
from tests.guard_worlds import Color, Scale
from trident.capture import dynamo, payload, recorder
from trident.codegen import import_guards, lower_guards
from trident.control import runtime

X = torch.ones(4)


class Shared(torch.nn.Module):
    """All that threads change: each change leaves the result among POSSIBLE."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Scale()
        self.scale, self.flag, self.mode = 2, True, Color.RED
        self.table: dict[str, int] = {"a": 1}
        self.items = [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.child(x) * self.scale
        for value in self.table.values():
            y = y + value
        for value in self.items:
            y = y + value
        y = y + 1000 if self.mode is Color.RED else y
        return y if self.flag else -y


POSSIBLE = {
    sign * (3 * scale + a + b + first + second + mode)
    for sign, scale, a, b, first, second, mode in itertools.product(
        (1, -1), (2, 3), (0, 10, 20), (0, 50), (1, 2), (0, 100), (0, 1000)
    )
} | {0}
# After these, guards of another specialization pass.
TOGGLES: list[Callable[[Shared], Any]] = [
    lambda m: setattr(m, "scale", 5 - m.scale),
    lambda m: m.table.__setitem__("a", 10 if m.table.get("a") != 10 else 20),
    lambda m: m.items.pop() if len(m.items) > 1 else m.items.append(100),
]
# After these none, or the same as before.
CHANGES: list[Callable[[Shared], Any]] = [
    lambda m: m.table.__setitem__("a", m.table.pop("a", 10)),
    lambda m: setattr(m, "child", Scale()),
    lambda m: setattr(m, "table", dict(m.table)),
    lambda m: setattr(m, "items", list(m.items)),
    lambda m: m.__dict__.update(m.__dict__),
    lambda m: setattr(m.child, "weight", torch.nn.Parameter(torch.full((4,), 2.0))),
    lambda m: m.child._parameters.__setitem__("weight", m.child._parameters.pop("weight")),
]
RARE: list[Callable[[Shared], Any]] = [
    lambda m: setattr(m, "flag", not m.flag),
    lambda m: setattr(m, "mode", Color.BLUE if m.mode is Color.RED else Color.RED),
    lambda m: m.table.pop("b", 0) or m.table.update(b=50),
    lambda m: m.items.__setitem__(0, 3 - m.items[0]),
]


def changer(model: Shared, seed: int) -> Callable[[], None]:
    rng = random.Random(seed)

    def change() -> None:
        for _ in range(20):
            rng.choice(TOGGLES if rng.random() < 0.3 else CHANGES)(model)
        time.sleep(rng.choice([0, 0.001]))

    return change


def compile_all(model: Shared, function: Callable[[torch.Tensor], Any]) -> None:
    """A specialization for each state that the toggles lead to."""
    for toggles in itertools.product(*((None, toggle) for toggle in TOGGLES)):
        chosen = [toggle for toggle in toggles if toggle is not None]
        for _ in range(2):  # there and back
            for toggle in chosen:
                toggle(model)
            for _ in range(2):
                function(X)


class Threads:
    """Runs bodies over and over, each in its thread, for some seconds."""

    def __init__(self) -> None:
        self.stop, self.errors = threading.Event(), []  # type: ignore[var-annotated]

    def _loop(self, body: Callable[[], None]) -> None:
        try:
            while not self.stop.is_set():
                body()
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()

    def run(self, bodies: list[Callable[[], None]], seconds: float) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=self._loop, args=(body,)) for body in bodies]
        try:
            for thread in threads:
                thread.start()
            self.stop.wait(seconds)
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(60)
            sys.setswitchinterval(interval)


def agree(model: Shared) -> None:
    """The native verdicts for `model` are Dynamo's."""
    for entry in runtime.modules[id(Shared.forward.__code__)].entries:
        values = {"self": model, "x": X}
        if entry.native is not None and entry.spec.alive:
            row = tuple(values.get(name, NotImplemented) for name in entry.native.framelocals)
            assert entry.native.check(row) == dynamo.guard_check(entry.spec, values)


@pytest.mark.parametrize("backend", ["eager", "trident"])
def test_threads_change_what_guards_look_at(
    without_strict: None, enabled: None, backend: str
) -> None:
    models = [Shared(), Shared()]
    for model in models:
        model.table["a"] = 10
    threads, results, raised = Threads(), [0], [0]
    with torch._dynamo.config.patch(recompile_limit=32, accumulated_recompile_limit=10_000):
        compiled = [torch.compile(model, backend=backend) for model in models]

        def call() -> None:
            for function in compiled:
                try:
                    result = function(X)
                except (RuntimeError, AssertionError, LookupError, AttributeError):
                    raised[0] += 1  # a container changed while it was iterated, as eager may see
                    continue
                assert float(result[0].detach()) in POSSIBLE
                results[0] += 1

        for model, function in zip(models, compiled, strict=True):
            compile_all(model, function)
        changers = [changer(model, seed) for seed, model in enumerate(models)]
        threads.run([call, call, *changers, lambda: (gc.collect(), time.sleep(0.01))], 4)
        assert threads.errors == []
        assert results[0] > 20
        hits, _, _, run_code = runtime.modules[id(Shared.forward.__code__)].native.counters
        assert hits + run_code > 20
        for change in [*CHANGES, *TOGGLES, *RARE]:
            for model, function in zip(models, compiled, strict=True):
                change(model)
                agree(model)
                assert torch.equal(function(X), model(X))


def test_threads_do_not_hide_a_change_of_this_thread(enabled: None) -> None:
    """What this thread changed is seen by its next call, whatever others do meanwhile."""
    models = [Shared(), Shared()]
    compiled = [torch.compile(model, backend="eager") for model in models]
    busy = changer(models[1], 3)

    def other() -> None:
        busy()
        try:
            compiled[1](X)
        except (RuntimeError, AssertionError, LookupError, AttributeError):
            return

    def mine() -> None:
        for scale, flag, a in itertools.product((2, 3), (True, False), (10, 20)):
            models[0].scale, models[0].flag, models[0].table["a"] = scale, flag, a
            expected = (3 * scale + a + 1 + 1000) * (1 if flag else -1)
            assert float(compiled[0](X)[0].detach()) == expected

    with torch._dynamo.config.patch(recompile_limit=32, accumulated_recompile_limit=10_000):
        mine()
        threads = Threads()
        threads.run([mine, other, lambda: (gc.collect(), time.sleep(0.01))], 3)
    assert threads.errors == []


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "leaf to the recorder": (payload.RULES, "TENSOR_MATCH"),
    "leaf to the importer": (import_guards.LEAF_RULES, "TENSOR_MATCH"),
    "accessor to the recorder": (recorder.ACCESSORS, "framelocals_manager"),
    "accessor to the importer": (import_guards.ACCESSOR_RULES, "framelocals_manager"),
    "operation to the table": (lower_guards.ROW_RULES, "scm.check_tensor"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_guard_stays_stock(enabled: None, monkeypatch: Any, what: str) -> None:
    registry, name = UNKNOWN[what]
    monkeypatch.delitem(registry, name)

    def unknown_to_us(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    compiled = torch.compile(unknown_to_us, backend="eager")
    for n in (2, 2, 2, 3, 3, 2):
        assert torch.equal(compiled(X, n), X * n)
        assert torch.equal(compiled(X.double(), n), X.double() * n)
    stats = frame_stats("unknown_to_us")
    assert (stats.hits, stats.run_code) == (0, 0)
    entries = runtime.modules[id(unknown_to_us.__code__)].entries
    assert entries
    assert all(entry.native is None and entry.reason for entry in entries)
