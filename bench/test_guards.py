"""What guards cost: of two tensors, of many specializations, of frames in pieces; building them."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trident
from bench.compare import Comparison, Variant, compare_checks, interleave
from bench.instructions import locals_of
from trident import _frame
from trident.control import runtime
from trident.scm import Entry

ROOT = Path(__file__).resolve().parent.parent
Record = Callable[..., None]
MANY = (1, 8, 64)


@contextlib.contextmanager
def unlimited() -> Iterator[None]:
    """As many specializations as there are shapes or modules."""
    with torch._dynamo.config.patch(
        recompile_limit=100, accumulated_recompile_limit=1000, automatic_dynamic_shapes=False
    ):
        yield


def entry_of(f: Callable[..., Any], *inputs: Any, backend: str = "eager") -> Entry:
    """The built specialization of a function called once."""
    with trident.enable():
        torch.compile(f, backend=backend)(*inputs)
        module = runtime.module_of(f.__code__)
        module.build()
    (entry,) = module.entries
    assert entry.native is not None, entry.reason
    return entry


def without(entry: Entry, *operations: str) -> _frame.NativeSpecialization:
    """The guards of `entry` but for some of their rows: only for measuring."""
    assert entry.built is not None
    table = entry.built.table
    assert table is not None
    native = _frame.NativeSpecialization(table.framelocals)
    native.set_guards([row for row in table.rows if row.op not in operations], table.n_registers)
    return native


def natively(native: _frame.NativeSpecialization, values: tuple[Any, ...]) -> float:
    """Nanoseconds of a check, the median of many short measurements."""
    samples = sorted(native.check_many(values, 500) for _ in range(201))
    return samples[len(samples) // 2]


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def test_two_tensors(benchmark: Any, record: Record) -> None:
    """The guards of a function of two tensors, with and without GLOBAL_STATE."""
    x, y = torch.randn(16), torch.randn(16)
    entry = entry_of(add, x, y)
    assert entry.native is not None
    benchmark(entry.native.check, (x, y))
    comparison = compare_checks(
        entry.spec.guard_manager.root.check, {"x": x, "y": y}, entry.native.check, (x, y)
    )
    whole = natively(entry.native, (x, y))
    rest = natively(without(entry, "check_global_state"), (x, y))
    record(
        comparison,
        ratio=comparison.ratio("stock", "Trident"),
        guards_ns=rest,
        global_state_ns=whole - rest,
        target_ns=60,
    )


def compare_many(calls: dict[int, list[Callable[[], Any]]]) -> tuple[Comparison, dict[str, float]]:
    """Stock and Trident calling, in turn, what needs 1, 8 or 64 specializations; and for each the
    nanoseconds of one call."""

    def each(functions: list[Callable[[], Any]]) -> Callable[[], None]:
        def run() -> None:
            for f in functions:
                f()

        return run

    variants = {}
    for n, functions in calls.items():
        run = each(functions)
        with trident.enable():
            for _ in range(4):
                run()
            trident.reset_stats()
            run()
            assert trident.stats().hits == n, trident.stats()
        variants[f"stock, {n}"] = Variant.of(run)
        variants[f"Trident, {n}"] = Variant.of(run, context=trident.enable)
    comparison = interleave(variants, warmup_calls=3)
    a_call = {name: t.median_ns / int(name.split()[-1]) for name, t in comparison.timings.items()}
    return comparison, a_call


def anew(source: str, name: str) -> Any:
    """What `source` defines, as code objects of its own."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(source, f"<{name}>", "exec"), names)
    return names[name]


def test_many_sizes(benchmark: Any, record: Record) -> None:
    """Specializations that differ in one size."""
    with unlimited():
        calls: dict[int, list[Callable[[], Any]]] = {}
        for n in MANY:
            f = torch.compile(anew("def f(x):\n    return x * 2\n", "f"), backend="trident")
            calls[n] = [functools.partial(f, torch.randn(i + 2)) for i in range(n)]
        comparison, a_call = compare_many(calls)
        benchmark(calls[64][0])
    record(comparison, a_call_ns=a_call, ratio=a_call["stock, 64"] / a_call["Trident, 64"])


LAYER = """
class Layer(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale
"""


def test_many_modules(benchmark: Any, record: Record) -> None:
    """One `forward` shared by modules that differ in an attribute."""
    with unlimited():
        calls: dict[int, list[Callable[[], Any]]] = {}
        x = torch.randn(16)
        for n in MANY:
            layer = anew(LAYER, "Layer")
            modules = [torch.compile(layer(i + 0.5), backend="trident") for i in range(n)]
            calls[n] = [functools.partial(module, x) for module in modules]
        comparison, a_call = compare_many(calls)
        benchmark(calls[64][0])
    record(comparison, a_call_ns=a_call, ratio=a_call["stock, 64"] / a_call["Trident, 64"])


@pytest.mark.parametrize("backend", ["eager", "trident"])
def test_graph_breaks(benchmark: Any, record: Record, backend: str) -> None:
    """A function in three pieces."""

    def pieces(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        return x - 3

    x = torch.randn(16)
    stock, ours = torch.compile(pieces, backend="eager"), torch.compile(pieces, backend=backend)
    stock(x)
    with trident.enable():
        for _ in range(4):
            assert torch.equal(ours(x), pieces(x))
        benchmark(ours, x)
    comparison = interleave(
        {
            "eager": Variant("f(x)", {"f": pieces, "x": x}),
            "stock": Variant("f(x)", {"f": stock, "x": x}),
            "Trident": Variant("f(x)", {"f": ours, "x": x}, trident.enable),
        }
    )
    record(comparison, ratio=comparison.ratio("stock", "Trident"))


def test_guard_build(benchmark: Any, record: Record) -> None:
    """Building guards, a leaf; and what a specialization and what it remembers take."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100))).requires_grad_(False)

    def many(x: Tensor) -> Any:
        return model(x)

    x = torch.randn(1, 16)
    entry = entry_of(many, x)
    assert entry.native is not None
    assert entry.built is not None
    leaves = sum(1 for _ in entry.spec.tree.leaves())
    values = locals_of(entry, {"x": x, "model": model})
    for _ in range(3):
        assert entry.native.check(values)
    memos, memo_bytes = entry.native.memos
    gc.collect()
    tracemalloc.start()
    again = Entry(entry.spec)
    again.build()
    python_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert again.built is not None
    benchmark(entry.native.check, values)
    record(
        leaves=leaves,
        rows=entry.native.size,
        build_us_per_leaf=again.built.build_s / leaves * 1e6,
        row_bytes=48 * entry.native.size,
        memo_bytes=memo_bytes // max(1, memos),
        python_bytes=python_bytes,
    )


def test_instructions(benchmark: Any, record: Record) -> None:
    """Instructions of a check, counted by callgrind: what a noisy machine does not touch."""
    command = [sys.executable, "-m", "bench.instructions"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    benchmark(lambda: None)
    record(**json.loads(done.stdout))
