"""Regions within regions, generators, exceptions, warnings and observers: the same as stock.

See tests/states.py for how a scenario is run.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.states import (
    MODES,
    Backend,
    Enter,
    X,
    call_all,
    callables,
    cases,
    check,
    normal,
    outcome,
    registry,
    served,
)
from trident import _frame

SCENARIOS, scenario = registry()


# ---- regions within regions ----


@scenario
def nested_in_compiled_code(enter: Enter) -> Any:
    functions = callables()

    def broken(x: torch.Tensor) -> Any:
        y = x + 1
        torch._dynamo.graph_break()
        results = [functions[n](y) for n in ("skip", "pair", "graph", "identity", "module")]
        return results, functions["mark"](y), functions["bundle"](y)

    def inlined(x: torch.Tensor) -> Any:
        return functions["graph"](functions["skip"](x)) + functions["module"](x)

    callers = [
        torch.compile(broken, backend="eager"),
        torch.compile(inlined, backend="eager", fullgraph=True),
        torch.compile(inlined, backend="aot_eager"),
    ]
    result = [[outcome(f, X) for f in callers] for _ in range(3)]
    enter()
    result += [[outcome(f, X) for f in callers] for _ in range(3)]
    return result, call_all(functions, X)


@scenario
def nested_in_disabled_code(enter: Enter) -> Any:
    functions = callables()

    @torch.compiler.disable
    def off(x: torch.Tensor) -> Any:
        return call_all(functions, x)

    @torch.compiler.disable(recursive=False)
    def off_here(x: torch.Tensor) -> Any:
        return call_all(functions, x)

    def outer(x: torch.Tensor, inner: Any) -> Any:
        return x + 1, inner(x + 1)

    f = torch.compile(outer, backend="eager")
    result = [outcome(f, X, inner) for inner in (off, off_here) for _ in range(3)]
    enter()
    return result, [outcome(f, X, inner) for inner in (off, off_here) for _ in range(3)], off(X)


@scenario
def nested_under_an_error_on_callbacks(enter: Enter) -> Any:
    """error_on_dynamo_callback_in_fullgraph_compiled_code, with calls that do need Dynamo."""
    functions = callables()

    @torch.library.custom_op("trident_states::error_on_callback", mutates_args=())
    def call_inside(x: torch.Tensor) -> torch.Tensor:
        functions["skip"](x)
        return functions["graph"](x).clone()

    call_inside.register_fake(torch.empty_like)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return call_inside(x) + 1

    f = torch.compile(outer, backend="eager", fullgraph=True)
    name = "error_on_dynamo_callback_in_fullgraph_compiled_code"
    result = [outcome(f, X) for _ in range(3)]
    enter()
    result += [outcome(f, X) for _ in range(3)]
    with torch._dynamo.config.patch({name: True}):
        result += [outcome(f, X) for _ in range(3)]
        result += [outcome(f, X.double()), outcome(f, X)]
    return result, call_all(functions, X)


@scenario
def broken_graph_under_fullgraph(enter: Enter) -> Any:
    """Dynamo leaves the frames that compiled code calls alone below a fullgraph caller: here the
    rest of a function after its graph break."""
    seen: list[Any] = []

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * (2 if torch.compiler.is_compiling() else 3)

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(broken(X))
            return graph(*args)

        return run

    outer = torch.compile(lambda x: x - 1, backend=backend, fullgraph=True)
    result = [outer(X) for _ in range(3)]
    enter()
    result += [outer(X) for _ in range(3)]
    result += [broken(X), outer(X), broken(X), outer(X), outer(X)]
    return result, seen


@scenario
def called_by_a_custom_operator(enter: Enter) -> Any:
    functions = callables()
    seen: list[Any] = []

    @torch.library.custom_op("trident_states::call_all", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        seen.append(call_all(functions, x))
        return x.clone()

    operator.register_fake(torch.empty_like)
    f = torch.compile(lambda x: operator(x) * 2, backend="eager", fullgraph=True)
    result = [f(X), operator(X), f(X)]
    enter()
    result += [f(X), operator(X), f(X), f(torch.arange(6.0)), operator(X.requires_grad_().detach())]
    X.requires_grad_(False)
    return result, seen


@scenario
def called_by_autograd(enter: Enter) -> Any:
    functions = callables()
    log: list[Any] = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            log.append(call_all(functions, x.detach()))
            return functions["graph"](x) * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            log.append(call_all(functions, grad))
            return functions["module"](grad)

    result: list[Any] = []
    for step in range(4):
        if step == 2:
            enter()
        leaf = X.clone().requires_grad_()
        y = Function.apply(functions["skip"](leaf))
        y.register_hook(lambda grad: functions["skip"](functions["graph"](grad)))
        y.sum().backward()
        result.append(leaf.grad)
        leaf = X.clone().requires_grad_()
        z = torch.utils.checkpoint.checkpoint(functions["graph"], leaf, use_reentrant=False)
        z.sum().backward()
        result.append(leaf.grad)
    return result, log


# ---- generators, coroutines, threads ----


@scenario
def generators_and_coroutines(enter: Enter) -> Any:
    def numbers(x: torch.Tensor) -> Any:
        received = yield x
        while received is not None:
            received = yield x + received

    async def items(x: torch.Tensor) -> Any:
        for i in range(3):
            yield x + i

    def one(x: torch.Tensor) -> Any:
        yield x

    functions = callables()
    # torch 2.13 crashes when a compiled coroutine function is called again: these only call others.
    f, h, i = (torch.compile(fn, backend="eager") for fn in (numbers, items, one))

    def use() -> Any:
        generator = f(X)
        sent = [next(generator), generator.send(1), generator.send(2), outcome(generator.close)]

        async def main() -> Any:
            before = call_all(functions, X)
            await asyncio.sleep(0)
            return before, call_all(functions, X), [item async for item in h(X)]

        return sent, asyncio.run(main()), list(i(X)), type(i(X)).__name__

    result = [use() for _ in range(3)]
    enter()
    return result, [use() for _ in range(3)]


# ---- exceptions and warnings ----


@scenario
def exceptions(enter: Enter) -> Any:
    def shape_error(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.relu(x)
        return z @ y

    def raises(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        if y.sum() > 100:
            raise ValueError(f"too large: {float(y.sum())}") from KeyError("cause")
        return y

    def helper(x: torch.Tensor) -> Any:
        return x.item().missing

    def in_helper(x: torch.Tensor) -> Any:
        return helper(x.sum())

    def user_error(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] < 5, lambda: "not so long")
        return x + 1

    options: dict[str, Any] = {"backend": "eager", "dynamic": True}
    f, g, h, k = (
        torch.compile(fn, **options) for fn in (shape_error, raises, in_helper, user_error)
    )
    good = torch.ones(4, 4)

    def use() -> Any:
        return [
            outcome(f, good, good),
            outcome(f, torch.ones(3, 4), torch.ones(5, 2)),
            outcome(f, good),
            outcome(f, good, good, extra=1),
            outcome(g, X),
            outcome(g, X + 100),
            outcome(h, X),
            outcome(k, X),
            outcome(k, torch.ones(7)),
        ]

    result = [use() for _ in range(3)]
    enter()
    return result, [use() for _ in range(3)]


@scenario
def wrong_arguments(enter: Enter) -> Any:
    functions = callables()
    enter()
    result = []
    for function in functions.values():
        result += [outcome(function), outcome(function, X, 1, 2, 3), outcome(function, X, z=1)]
        result += [outcome(function, x=X), outcome(function, X, x=X), outcome(function, X)]
    return result


@scenario
def exception_in_a_backend(enter: Enter) -> Any:
    log: list[str] = []

    class Failing(Backend):
        def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            if inputs[0].dtype == torch.float64:
                raise ZeroDivisionError("no doubles")
            run = super().__call__(gm, inputs)

            def fails_at_times(*args: Any) -> Any:
                if args[0].sum() == 0:
                    raise LookupError("zeros")
                return run(*args)

            return fails_at_times

    f = torch.compile(lambda x: x + 1, backend=Failing("failing", log))
    functions = callables()

    def use() -> Any:
        return [outcome(f, X), outcome(f, torch.zeros(4)), outcome(f, X.double()), outcome(f, X)]

    result = [use() for _ in range(3)]
    enter()
    return [*result, use(), use()], log, call_all(functions, X)


@scenario
def warns(enter: Enter) -> Any:
    def warner(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        warnings.warn("from compiled code", UserWarning, stacklevel=1)
        warnings.warn("about its caller", DeprecationWarning, stacklevel=2)
        return y * 2

    f, functions = torch.compile(warner, backend="eager"), callables()
    result = [f(X) for _ in range(3)]
    enter()
    return result, [f(X) for _ in range(3)], call_all(functions, X)


# ---- observers ----


def observe(log: list[str], names: set[str]) -> Callable[..., Any]:
    def observer(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_name in names:
            log.append(f"{event} {normal(frame.f_code.co_name)} {frame.f_lineno}")
        return observer

    return observer


OBSERVED = {"skip", "pair", "mark", "bundle", "graph", "forward", "compile_wrapper"}


@scenario
def traced_and_profiled(enter: Enter) -> Any:
    functions = callables()
    enter()
    log: list[str] = []
    result = [call_all(functions, X)]
    for switch in (sys.settrace, sys.setprofile):
        switch(observe(log, OBSERVED))
        try:
            result += [call_all(functions, X), call_all(functions, X)]
        finally:
            switch(None)
        log.append("off")
        result.append(call_all(functions, X))
    return result, log


@scenario
def observed_from_inside(enter: Enter) -> Any:
    """Tracing starts and ends while a compiled function is running."""
    functions = callables()
    log: list[str] = []

    @torch._dynamo.disable
    def toggle(on: bool) -> None:
        sys.setprofile(observe(log, OBSERVED) if on else None)

    def body(x: torch.Tensor) -> Any:
        y = x + 1
        toggle(True)
        results = functions["skip"](y), functions["graph"](y), functions["bundle"](y)
        toggle(False)
        return results, functions["skip"](y)

    f = torch.compile(body, backend="eager")
    result = [f(X) for _ in range(3)]
    enter()
    return result, [f(X) for _ in range(3)], log


@scenario
def observed_in_another_thread(enter: Enter) -> Any:
    functions = callables()
    enter()
    log: list[str] = []
    results: list[Any] = []
    threading.setprofile(observe(log, OBSERVED))
    try:
        thread = threading.Thread(target=lambda: results.append(call_all(functions, X)))
        thread.start()
        thread.join()
    finally:
        threading.setprofile(None)
    return results, log, call_all(functions, X)


@scenario
def torch_profiler(enter: Enter) -> Any:
    functions = callables()
    enter()
    with torch.profiler.profile() as profile:
        results = call_all(functions, X)
    names = [e.name for e in profile.events() if e.name != "TorchDynamo Cache Lookup"]
    return results, [normal(n) for n in names], call_all(functions, X)


@pytest.mark.parametrize("switch", [sys.settrace, sys.setprofile])
def test_stands_aside_while_observed(fresh: None, switch: Callable[..., Any]) -> None:
    with trident.enable():
        functions = callables()
        doors, before, events = _frame.n_doors(), served(), []
        # Not a trivial function: the observer's own frames could be served.
        switch(lambda frame, event, arg: events.append(event))
        try:
            call_all(functions, X)
        finally:
            switch(None)
        assert (_frame.n_doors(), served()) == (doors, before)
        assert events
        call_all(functions, X)
        assert served() == before + len(functions)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with 3.12")
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_monitored(fresh: None, mode: str, local: bool) -> None:
    def monitored(enter: Enter) -> Any:
        functions = callables()
        enter()
        monitoring, log = sys.monitoring, list[str]()
        start = monitoring.events.PY_START
        codes = [
            f._torchdynamo_orig_callable.__code__
            for n, f in functions.items()
            if n in ("skip", "graph")
        ]
        monitoring.use_tool_id(3, "test")
        try:
            monitoring.register_callback(3, start, lambda code, _: log.append(code.co_name))
            if local:
                for code in codes:
                    monitoring.set_local_events(3, code, start)
            else:
                monitoring.set_events(3, start)
            results = call_all(functions, X)
        finally:
            for code in codes:
                monitoring.set_local_events(3, code, 0)
            monitoring.set_events(3, 0)
            monitoring.free_tool_id(3)
        return results, [n for n in log if n in OBSERVED], call_all(functions, X)

    check(monitored, mode)


@pytest.mark.parametrize(
    ("name", "mode"), cases(SCENARIOS, "nested_in_compiled_code", "traced_and_profiled")
)
def test_same_as_stock(fresh: None, monkeypatch: Any, name: str, mode: str) -> None:
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    check(SCENARIOS[name], mode)
