"""Flipped settings and Dynamo's own options around compiled callables: the same as stock.

See tests/states.py for how a scenario is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.states import (
    TENSOR_TO_TENSOR,
    Backend,
    Enter,
    X,
    call_all,
    callables,
    cases,
    check,
    outcome,
    registry,
)

SCENARIOS, scenario = registry()


# ---- settings that Dynamo guards on ----


def set_threads(on: bool) -> None:
    torch.set_num_threads(2 if on else 1)


def set_dtype(on: bool) -> None:
    torch.set_default_dtype(torch.float64 if on else torch.float32)


SETTINGS: dict[str, Callable[[bool], Any]] = {
    "grad": lambda on: torch.set_grad_enabled(not on),
    "deterministic": torch.use_deterministic_algorithms,
    "deterministic, warns": lambda on: torch.use_deterministic_algorithms(on, warn_only=True),
    "threads": set_threads,
    "dtype": set_dtype,
    "matmul precision": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    "torch function": torch._C._set_torch_function_mode_enabled
    if hasattr(torch._C, "_set_torch_function_mode_enabled")
    else lambda on: None,
}


@scenario
def settings_flipped(enter: Enter) -> Any:
    functions = callables()
    enter()
    result = []
    for flip in SETTINGS.values():
        try:
            flip(True)
            result += [call_all(functions, X), call_all(functions, X)]
        finally:
            flip(False)
        result.append(call_all(functions, X))
    return result


@scenario
def grad_and_inference_modes(enter: Enter) -> Any:
    functions = {n: f for n, f in callables().items() if n in TENSOR_TO_TENSOR}
    enter()
    leaf = torch.ones(4, requires_grad=True)
    result: list[Any] = []
    with torch.inference_mode():
        inference = torch.ones(4)
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with context():
            for value in (X, leaf, inference):
                got = call_all(functions, value)
                result += [(n, str(r), is_plain(r)) for n, r in got.items()]
    result += [(n, str(r), is_plain(r)) for n, r in call_all(functions, inference).items()]
    return result, call_all(functions, X)


def is_plain(value: Any) -> Any:
    return isinstance(value, torch.Tensor) and (value.requires_grad, value.is_inference())


@scenario
def autocast(enter: Enter) -> Any:
    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    f = torch.compile(square, backend="eager")
    functions, matrix = callables(), torch.ones(4, 4)
    result = [f(matrix) for _ in range(3)]
    enter()
    for options in ({}, {"dtype": torch.float16}, {"enabled": False}, {"cache_enabled": False}):
        with torch.autocast("cpu", **options):
            result += [f(matrix), f(matrix)]
            result.append(call_all(functions, X))
    return result, f(matrix), call_all(functions, X)


@scenario
def saved_tensor_hooks(enter: Enter) -> Any:
    def square(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()

    f, functions = torch.compile(square, backend="aot_eager"), callables()
    packed: list[str] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed.append("pack")
        return x

    leaf = X.clone().requires_grad_()
    result: list[Any] = [f(leaf).detach() for _ in range(3)]
    enter()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            result += [f(leaf).detach(), f(leaf).detach(), call_all(functions, X)]
    with torch.autograd.graph.save_on_cpu():
        result += [f(leaf).detach(), call_all(functions, X)]
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        result += [f(leaf).detach(), call_all(functions, X)]
    return result, packed, f(leaf).detach()


# ---- Dynamo's own options ----


@scenario
def backends_on_one_function(enter: Enter) -> Any:
    log: list[str] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def mark(x: torch.Tensor) -> Any:
        return 1 if torch.compiler.is_compiling() else 0

    names = ("a", "b", "c")
    graphs = {n: torch.compile(body, backend=Backend(n, log)) for n in names}
    marks = {n: torch.compile(mark, backend=Backend(n, log), fullgraph=True) for n in names[:2]}
    result = [[outcome(f, X) for f in (*graphs.values(), *marks.values())] for _ in range(4)]
    enter()
    for order in ("aabbcc", "abcabc", "ccba"):
        result.append([outcome(graphs[n], X) for n in order])
        result.append([outcome(marks[n], X) for n in order if n in marks])
    return result, log


@scenario
def isolated_recompilations(enter: Enter) -> Any:
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this torch has no isolate_recompiles")
    log: list[str] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + x.shape[0]

    shared = [torch.compile(body, backend=Backend("eager", log)) for _ in range(2)]
    isolated = [
        torch.compile(body, backend=shared_backend, isolate_recompiles=True)
        for shared_backend in (Backend("eager", log),) * 2
    ]
    result: list[Any] = []
    for step in range(4):
        if step == 2:
            enter()
        for f in (*shared, *isolated, *reversed(isolated), shared[0]):
            result += [outcome(f, X), outcome(f, torch.arange(6.0))]
    return result, log


@scenario
def dynamic_shapes(enter: Enter) -> Any:
    result = []
    for dynamic in (True, False, None):

        def body(x: torch.Tensor) -> torch.Tensor:
            return x * x.shape[0]

        f = torch.compile(body, backend="eager", dynamic=dynamic)
        result += [f(torch.ones(n)) for n in (3, 4, 5, 3)]
        if dynamic is True:
            enter()
        result += [f(torch.ones(n)) for n in (3, 4, 5, 9, 1, 0, 4)]
    return result


@scenario
def marked_dimensions(enter: Enter) -> Any:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0]

    f, functions = torch.compile(body, backend="eager"), callables()
    result = [f(torch.ones(4)) for _ in range(3)]
    enter()
    for mark in (torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic):
        x = torch.ones(4)
        mark(x, 0)
        result += [f(x), f(x), call_all(functions, x), call_all(functions, x)]
    y = torch.ones(4)
    torch._dynamo.mark_static(y, 0)
    result += [f(y), call_all(functions, y), [f(torch.ones(n)) for n in (4, 5, 6)]]
    return result


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", ["throughout", "after_warm_up"])
def test_recompile_limit(fresh: None, mode: str, fails: bool) -> None:
    def body(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + n

    def limited(enter: Enter) -> Any:
        log: list[str] = []
        f = torch.compile(body, backend=Backend("eager", log), dynamic=False)
        options = {"recompile_limit": 3, "fail_on_recompile_limit_hit": fails}
        with torch._dynamo.config.patch(options):
            result = [outcome(f, X, n) for n in (1, 1, 2, 2, 3)]
            enter()
            result += [outcome(f, X, n) for n in (1, 2, 3, 4, 5, 1, 2, 3, 4, 1)]
        return result, log

    check(limited, mode)


@scenario
def guard_complete_hook(enter: Enter) -> Any:
    """Guard collectives: told of each lookup, and able to overrule it."""
    functions = callables()
    enter()
    log: list[Any] = []

    def hook(found: bool) -> bool:
        log.append(found)
        return found

    set_hook = torch._C._dynamo.eval_frame.set_guard_complete_hook
    former = set_hook(hook)
    try:
        result = [call_all(functions, X), call_all(functions, X.double()), call_all(functions, X)]
    finally:
        set_hook(former)
    return result, log, call_all(functions, X)


@scenario
def settings_of_dynamo(enter: Enter) -> Any:
    functions = callables()
    enter()
    result: list[Any] = []
    for name, value in (
        ("error_on_recompile", True),
        ("disable", True),
        ("suppress_errors", True),
        ("error_on_dynamo_callback_in_fullgraph_compiled_code", True),
        ("force_compile_during_fx_trace", True),
        ("guard_nn_modules", False),
        ("verbose", True),
    ):
        with torch._dynamo.config.patch({name: value}):
            result += [call_all(functions, X), call_all(functions, X.double())]
            result.append(call_all(functions, X))
    return result


@scenario
def run_only_and_decorators(enter: Enter) -> Any:
    functions = callables()
    enter()
    result: list[Any] = []
    for name in ("skip", "pair", "mark", "graph", "identity"):
        for wrap in (torch._dynamo.run, torch._dynamo.disable, torch.compiler.disable):
            wrapped = wrap(functions[name])
            result += [outcome(wrapped, X), outcome(wrapped, X.double()), outcome(wrapped, X)]
            result.append(outcome(functions[name], X))
        off = torch.compiler.disable(functions[name], recursive=False)
        result += [outcome(off, X), outcome(torch.compile(off, backend="eager"), X)]
        again = torch.compile(functions[name], backend="eager")
        result += [outcome(again, X), outcome(again, X), outcome(functions[name], X)]
    return result


@scenario
def fullgraph_without_compiled_code(enter: Enter) -> Any:
    def same(x: Any) -> Any:
        return x

    def numbers(x: torch.Tensor) -> Any:
        yield x + 1

    @torch._dynamo.disable
    def off(x: torch.Tensor) -> Any:
        return x + 1

    plain = torch.compile(same, backend="eager")
    result: list[Any] = [outcome(plain, X) for _ in range(4)]
    full = [torch.compile(f, backend="eager", fullgraph=True) for f in (same, off, len)]
    result += [outcome(f, X) for f in full for _ in range(2)]
    enter()
    result += [outcome(f, X) for f in full for _ in range(3)]
    result += [outcome(plain, X) for _ in range(3)]
    full_numbers = torch.compile(numbers, backend="eager", fullgraph=True)
    result += [outcome(lambda: list(full_numbers(X))) for _ in range(3)]
    for f in callables(fullgraph=True).values():
        result += [outcome(f, X), outcome(f, X.double()), outcome(f, X), outcome(f, 3)]
    return result


@pytest.mark.parametrize(("name", "mode"), cases(SCENARIOS, "settings_flipped"))
def test_same_as_stock(fresh: None, monkeypatch: Any, name: str, mode: str) -> None:
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    # Dynamo keeps isolated entries in lists of their own: from then on the frame is left to stock.
    isolated = name == "isolated_recompilations" and mode == "after_warm_up"
    check(SCENARIOS[name], mode, serves=not isolated)
