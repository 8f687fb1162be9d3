"""What a call costs on its way into compiled code: stock Dynamo against Trident's SCM."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trident
from bench import instructions, programs
from bench.compare import Variant, compare_checks, interleave
from trident import _frame
from trident.control import runtime

ROOT = Path(__file__).resolve().parent.parent
Record = Callable[..., None]


def entries_of(code: Any) -> list[Any]:
    """The built specializations of a frame, newest first."""
    module = runtime.module_of(code)
    module.build()
    return module.entries


def test_noop_function(benchmark: Any, record: Record) -> None:
    """A compiled function that returns its argument: all overhead, no work."""

    def identity(x: Tensor) -> Tensor:
        return x

    compiled, x = torch.compile(identity, backend="eager"), torch.ones(3)
    assert compiled(x) is x
    with trident.enable():
        trident.reset_stats()
        for _ in range(100):
            assert compiled(x) is x
        assert trident.stats().hits > 90
        benchmark(compiled, x)
    names = {"f": compiled, "x": x}
    comparison = interleave(
        {
            "plain call": Variant("f(x)", {"f": identity, "x": x}),
            "stock": Variant("f(x)", names),
            "Trident": Variant("f(x)", names, trident.enable),
        }
    )
    record(comparison, ratio=comparison.ratio("stock", "Trident"), target=40)


def test_noop_module(benchmark: Any, record: Record) -> None:
    """The same for a module, whose call goes through `OptimizedModule.__call__` as well."""

    class Identity(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    module = Identity()
    compiled, x = torch.compile(module, backend="eager"), torch.ones(3)
    assert compiled(x) is x
    with trident.enable():
        trident.reset_stats()
        for _ in range(100):
            assert compiled(x) is x
        assert trident.stats().hits > 90
        benchmark(compiled, x)
    names = {"f": compiled, "x": x}
    comparison = interleave(
        {
            "plain call": Variant("f(x)", {"f": module, "x": x}),
            "stock": Variant("f(x)", names),
            "Trident": Variant("f(x)", names, trident.enable),
        }
    )
    record(comparison, ratio=comparison.ratio("stock", "Trident"), target=60)


def test_small_graph(benchmark: Any, record: Record) -> None:
    """Three small operators: guards are native, the graph runs in Dynamo's code object."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x + y) * 2

    compiled = torch.compile(function, backend="eager")
    x, y = torch.randn(16), torch.randn(16)
    expected = function(x, y)
    assert torch.equal(compiled(x, y), expected)
    with trident.enable():
        trident.reset_stats()
        for _ in range(100):
            assert torch.equal(compiled(x, y), expected)
        assert trident.stats().run_code > 90
        benchmark(compiled, x, y)
    names = {"f": compiled, "x": x, "y": y}
    comparison = interleave(
        {
            "eager": Variant("f(x, y)", {**names, "f": function}),
            "stock": Variant("f(x, y)", names),
            "Trident": Variant("f(x, y)", names, trident.enable),
        }
    )
    record(comparison, ratio=comparison.ratio("stock", "Trident"))


def test_decoder_guards(benchmark: Any, record: Record) -> None:
    """The guards of a 28-layer decoder alone, checked by Dynamo's C++ tree and by ours."""
    entry, values, given = instructions.decoder()
    wrong = {**given, "tokens": given["tokens"].int()}
    dynamo_check = entry.spec.guard_manager.root.check
    with torch.no_grad():
        assert not dynamo_check(wrong)
        assert not entry.native.check(instructions.locals_of(entry, wrong))
        benchmark(entry.native.check, values)
        comparison = compare_checks(dynamo_check, given, entry.native.check, values, round_s=0.02)
    record(
        comparison,
        ratio=comparison.ratio("stock", "Trident"),
        target=20,
        checks=sum(n for op, n in entry.built.counts.items() if op.startswith("check")),
        rows=sum(entry.built.counts.values()),
        build_ms=entry.built.build_s * 1e3,
    )


def test_shape_guards(benchmark: Any, record: Record) -> None:
    """The guards of two tensors with dynamic dimensions, checked by Dynamo and by ours."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum() if x.shape[0] * y.shape[1] > 20 else x

    x, y = torch.ones(8, 3), torch.ones(3, 7)
    with trident.enable():
        torch.compile(function, backend="eager", dynamic=True)(x, y)
        (entry,) = entries_of(function.__code__)
        assert entry.native is not None, entry.reason
        assert "check_shapes" in entry.built.counts
        dynamo_check = entry.spec.guard_manager.root.check
        wrong = torch.ones(3, 2)
        assert not entry.native.check((x, wrong))
        assert not dynamo_check({"x": x, "y": wrong})
        benchmark(entry.native.check, (x, y))
        comparison = compare_checks(dynamo_check, {"x": x, "y": y}, entry.native.check, (x, y))
    record(comparison, ratio=comparison.ratio("stock", "Trident"))


def specialized(width: int) -> Callable[[Tensor, str], Tensor]:
    """A function of its own code object that compiles anew for each `mode`."""
    source = f"def f(x, mode):\n    return x * {width} if mode else x\n"
    names: dict[str, Any] = {}
    exec(compile(source, f"<specialized {width}>", "exec"), names)
    return names["f"]


def plan_build_ms(width: int) -> float:
    """Building the SCM of a frame without a graph: its native plan goes through MLIR and LLVM."""
    names: dict[str, Any] = {}
    exec(compile("def f(x):\n    return x", f"<plan {width}>", "exec"), names)
    compiled, x = torch.compile(names["f"], backend="eager"), torch.ones(3)
    for _ in range(3):
        assert compiled(x) is x
    module = runtime.module_of(names["f"].__code__)
    assert module.has_skip_plan
    return module.build_s * 1e3


def test_build_time(benchmark: Any, record: Record) -> None:
    """An SCM's build: what the first costs, and whether the 20th specialization is as the 2nd."""
    functions, count = 9, 20
    times_ms: list[list[float]] = []
    with (
        torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False),
        trident.enable(),
    ):
        for width in range(functions):
            function = specialized(width)
            compiled, x = torch.compile(function, backend="eager"), torch.ones(3)
            module = runtime.module_of(function.__code__)
            series = []
            for index in range(count):
                assert torch.equal(compiled(x, f"mode {index}"), x * width)
                before = module.build_s
                assert torch.equal(compiled(x, f"mode {index}"), x * width)  # built now
                series.append((module.build_s - before) * 1e3)
            assert all(entry.native is not None for entry in module.entries)
            assert len(module.entries) == count
            times_ms.append(series)
        plans_ms = [plan_build_ms(width) for width in range(functions)]
    medians = [statistics.median(series[i] for series in times_ms[1:]) for i in range(count)]
    benchmark.pedantic(lambda: runtime.module_of(function.__code__).build(), rounds=3)
    record(
        first_ms=medians[0],
        plan_ms=statistics.median(plans_ms),
        fixed_ms=medians[0] + statistics.median(plans_ms),
        second_ms=medians[1],
        twentieth_ms=medians[-1],
        target=40,
    )


def test_python_tax(benchmark: Any, record: Record) -> None:
    """Pure Python while Trident is enabled, against disabled; the worst of several programs."""
    for program in programs.PROGRAMS.values():
        expected = program()
        with trident.enable():
            assert program() == expected
    ratios, results = {}, {}
    for name, program in programs.PROGRAMS.items():
        comparison = interleave(
            {"disabled": program, "enabled": Variant.of(program, context=trident.enable)},
            rounds=101,
            round_s=0.001,
            warmup_calls=2,
        )
        ratios[name] = comparison.ratio("enabled", "disabled")
        results[name] = comparison
    worst = max(ratios, key=lambda name: ratios[name])
    with trident.enable():
        benchmark(programs.fibonacci)
    assert not _frame.installed()
    record(results[worst], ratio=ratios[worst], program=worst, ratios=ratios)


def test_python_tax_after_disable(benchmark: Any, record: Record) -> None:
    """The same programs in processes of their own: Trident never imported, or used and disabled."""
    samples: dict[str, list[dict[str, float]]] = {"never": [], "after": []}
    for _ in range(9):
        for state, found in samples.items():
            command = [sys.executable, "-m", "bench.programs", state]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout))
    pairs = list(zip(samples["after"], samples["never"], strict=True))
    ratios = {
        name: statistics.median(after[name] / never[name] for after, never in pairs)
        for name in programs.PROGRAMS
    }
    benchmark(programs.fibonacci)
    record(ratio=max(ratios.values()), ratios=ratios)


def test_recursion_depth(benchmark: Any, record: Record) -> None:
    """How deep plain recursion gets: before, while enabled, after."""
    depths = {"before": programs.depth_of_recursion()}
    with trident.enable():
        depths["enabled"] = programs.depth_of_recursion()
    depths["after"] = programs.depth_of_recursion()
    assert len(set(depths.values())) == 1, depths
    benchmark.pedantic(programs.depth_of_recursion, rounds=1)
    record(**depths)


def test_enable_disable(benchmark: Any, record: Record) -> None:
    """Switching on and off, which a script may do around every call."""

    def toggle() -> None:
        with trident.enable():
            pass

    benchmark(toggle)
    started = time.perf_counter_ns()
    for _ in range(100):
        toggle()
    record(toggle_us=(time.perf_counter_ns() - started) / 100 / 1e3)
    assert not trident.is_enabled()
