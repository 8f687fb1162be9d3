"""Special states around calls of compiled callables: the same as stock, with as many compilations.

See tests/states.py for how a scenario is run.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import trident
from tests.states import (
    DOORED,
    TENSOR_TO_TENSOR,
    Enter,
    X,
    call_all,
    callables,
    cases,
    check,
    outcome,
    registry,
    served,
)
from trident import _frame

SCENARIOS, scenario = registry()


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionLog(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


# ---- states in which Trident must stand aside ----


@contextlib.contextmanager
def functorch_level(transform: Callable[..., Any]) -> Iterator[None]:
    """The state inside a functorch transform, for calls with ordinary tensors."""
    level = torch._C._functorch._grad_increment_nesting() if transform is torch.func.grad else None
    if level is None:
        torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        if level is None:
            torch._C._functorch._vmap_decrement_nesting()
        else:
            torch._C._functorch._grad_decrement_nesting()


ASIDE: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "dispatch mode": Log,
    "fake tensor mode": FakeTensorMode,
    "vmap": lambda: functorch_level(torch.vmap),
    "grad": lambda: functorch_level(torch.func.grad),
    "force_eager": lambda: torch.compiler.set_stance("force_eager"),
    "eager_on_recompile": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "fail_on_recompile": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "eager_then_compile": lambda: torch.compiler.set_stance("eager_then_compile"),
    "aot_eager_then_compile": lambda: torch.compiler.set_stance("aot_eager_then_compile"),
    "skip_guard_eval_unsafe": lambda: torch.compiler.set_stance(skip_guard_eval_unsafe=True),
    "force_backend": lambda: torch.compiler.set_stance(force_backend="eager"),
    "no python key": torch._C._DisableTorchDispatch,
}


@pytest.mark.parametrize("name", list(ASIDE))
def test_stands_aside(fresh: None, monkeypatch: Any, name: str) -> None:
    """No call is served in the state, and calls are served again right after, all as stock."""
    monkeypatch.setenv("TRIDENT_STRICT", "1")

    def state(functions: dict[str, Callable[..., Any]]) -> Any:
        with ASIDE[name]():
            return call_all(functions, X)

    torch._dynamo.reset()
    expected = state(callables())
    torch._dynamo.reset()
    with trident.enable():
        functions = callables()
        doors = _frame.n_doors()
        assert doors >= len(DOORED)
        before = served()
        actual = state(functions)
        assert served() == before
        assert _frame.n_doors() == doors
        again = {}
        for function_name, function in functions.items():
            before = served()
            outcome(function, X)
            again[function_name] = served() - before
        # In some states Dynamo looks at the others, and decides not to compile them any more.
        assert all(again[n] for n in ("skip", "pair", "identity", "in_place")), again
    assert call_texts(actual) == call_texts(expected)


def call_texts(results: dict[str, Any]) -> dict[str, str]:
    """Results as text: some states give tensors that cannot be compared outside."""
    with torch.utils._python_dispatch._disable_current_modes():
        return {name: repr(result) for name, result in results.items()}


def test_answers_without_calling_are_real_hits(fresh: None) -> None:
    """`mark` would notice a wrong answer: compiled it says 1, eager 0."""
    with trident.enable():
        mark = callables()["mark"]
        assert _frame.has_door(mark)
        assert mark(X) == 1
        with torch.compiler.set_stance("force_eager"):
            assert mark(X) == 0
        assert mark(X) == 1


# ---- stances ----


@scenario
def stance_new_shape(enter: Enter) -> Any:
    functions = callables()
    enter()
    result = []
    for stance in ("force_eager", "eager_on_recompile", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            result += [call_all(functions, torch.arange(6.0)), call_all(functions, X)]
    return result, call_all(functions, torch.arange(6.0)), call_all(functions, X)


@scenario
def stance_then_compile(enter: Enter) -> Any:
    functions = callables()
    enter()
    result = []
    for stance in ("eager_then_compile", "aot_eager_then_compile"):
        with torch.compiler.set_stance(stance):
            result += [call_all(functions, torch.arange(float(n))) for n in (4, 5, 6, 4)]
    return result, call_all(functions, X)


@scenario
def stance_skips_guards(enter: Enter) -> Any:
    functions = callables()
    call_all(functions, torch.arange(6.0))
    enter()
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        inside = [call_all(functions, x) for x in (X, torch.arange(6.0), X.double())]
    return inside, call_all(functions, X)


@scenario
def stance_force_backend(enter: Enter) -> Any:
    functions = callables()
    enter()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        inside = [call_all(functions, X) for _ in range(3)]
    return inside, [call_all(functions, X) for _ in range(2)]


@scenario
def stance_decorator_and_nesting(enter: Enter) -> Any:
    functions = callables()
    enter()

    @torch.compiler.set_stance("force_eager")
    def eager(x: torch.Tensor) -> Any:
        with torch.compiler.set_stance("default"):
            compiled = call_all(functions, x)
        return compiled, call_all(functions, x)

    return eager(X), call_all(functions, X)


@scenario
def stance_set_back_by_a_call(enter: Enter) -> Any:
    functions = callables()
    enter()
    torch.compiler.set_stance("force_eager")
    try:
        inside = call_all(functions, X)
    finally:
        torch.compiler.set_stance("default")
    return inside, call_all(functions, X)


def test_served_after_the_default_stance_is_set_anew(fresh: None) -> None:
    """`set_stance("default")` puts another object in place than the one of the import."""
    with trident.enable():
        functions = callables()
        former = torch._dynamo.eval_frame._stance
        try:
            torch.compiler.set_stance("force_eager")
            call_all(functions, X)
            torch.compiler.set_stance("default")
            before = served()
            call_all(functions, X)
            assert served() == before + len(functions)
            torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
            call_all(functions, X)
            assert served() == before + len(functions)
        finally:
            torch._dynamo.eval_frame._stance = former


@scenario
def stance_changed_inside(enter: Enter) -> Any:
    @torch._dynamo.disable
    def change() -> None:
        torch.compiler.set_stance("default")

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        change()
        return y * 2

    f = torch.compile(body, backend="eager")
    result = [outcome(f, X), outcome(f, X), outcome(f, X)]
    enter()
    return result, outcome(f, X), outcome(f, X)


def test_first_enabled_in_another_stance() -> None:
    """What the stance is when Trident is set up is not taken for the default."""
    code = """
        import torch, trident
        def mark(x):
            return 1 if torch.compiler.is_compiling() else 0
        x = torch.arange(4.0)
        eager = torch.compiler.set_stance("force_eager")
        with eager, trident.enable():
            pass
        with trident.enable():
            f = torch.compile(mark, backend="eager", fullgraph=True)
            assert [f(x) for _ in range(4)] == [1] * 4
            assert trident.stats().hits == 3, trident.stats()
            with eager:
                assert f(x) == 0
            assert f(x) == 1
            assert trident.stats().hits == 4, trident.stats()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# ---- tracers ----


def graph_text(module: Any) -> str:
    return str(module.graph)


@scenario
def traced_by_make_fx(enter: Enter) -> Any:
    functions = callables()
    enter()
    result = []
    for name in (*TENSOR_TO_TENSOR, "bundle", "mark"):
        for options in (
            {},
            {"pre_dispatch": True},
            {"tracing_mode": "fake"},
            {"tracing_mode": "symbolic"},
        ):
            traced = outcome(make_fx(functions[name], **options), X)
            if isinstance(traced, torch.fx.GraphModule):
                result.append((graph_text(traced), traced(X + 1)))
            else:
                result.append(traced)
        result.append(outcome(functions[name], X))
    return result


class Outer(torch.nn.Module):
    def __init__(self, functions: dict[str, Any], names: tuple[str, ...]) -> None:
        super().__init__()
        self.functions = [functions[name] for name in names]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for function in self.functions:
            x = function(x)
        return x + 1


@scenario
def traced_by_export(enter: Enter) -> Any:
    functions = callables()
    enter()
    result: list[Any] = []
    for strict in (False, True):
        for name in ("skip", "graph", "identity", "in_place", "module"):
            outer = Outer(functions, (name,))
            exported = outcome(torch.export.export, outer, (X,), strict=strict)
            if isinstance(exported, tuple):
                result.append(exported[:2])
            else:
                result.append((graph_text(exported), exported.module()(X)))
            result.append(outcome(functions[name], X))
    direct = outcome(torch.export.export, functions["module"], (X,))
    return result, type(direct).__name__, call_all(functions, X)


@scenario
def traced_by_fx(enter: Enter) -> Any:
    functions = callables()
    enter()
    result: list[Any] = []
    for error in (True, False):
        with torch._dynamo.config.patch(error_on_nested_fx_trace=error):
            for name in (*TENSOR_TO_TENSOR, "mark"):
                traced = outcome(torch.fx.symbolic_trace, Outer(functions, (name,)))
                if isinstance(traced, torch.fx.GraphModule):
                    result.append((graph_text(traced), traced(X)))
                else:
                    result.append(traced)
    return result, call_all(functions, X)


@scenario
def traced_by_jit(enter: Enter) -> Any:
    functions = callables()
    enter()
    result = []
    for name in (*TENSOR_TO_TENSOR, "pair"):
        result.append(outcome(torch.jit.trace, functions[name], (X,)))
        result.append(type(outcome(torch.jit.script, functions[name])).__name__)
        result.append(outcome(functions[name], X))
    return result


# ---- functorch ----


@scenario
def functorch_transforms(enter: Enter) -> Any:
    functions = callables()
    enter()
    batch, func = torch.arange(8.0).reshape(2, 4), torch.func
    result: list[Any] = []
    for name in TENSOR_TO_TENSOR:
        f = functions[name]
        result += [
            outcome(torch.vmap(f), batch),
            outcome(torch.vmap(torch.vmap(f)), batch.reshape(2, 2, 2)),
            outcome(func.grad(lambda x, f=f: f(x).sum()), X),
            outcome(func.jvp, f, (X,), (torch.ones(4),)),
            outcome(func.jacrev(f), X),
            outcome(func.jacfwd(f), X),
            outcome(func.functionalize(f), X),
            outcome(f, X),
        ]
    return result


@scenario
def compiled_transforms(enter: Enter) -> Any:
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).sum()

    fs = [
        torch.compile(torch.func.grad(body), backend="eager"),
        torch.compile(torch.vmap(body), backend="eager"),
        torch.compile(lambda x: torch.func.jvp(body, (x,), (x,)), backend="eager"),
    ]
    batch = torch.arange(8.0).reshape(2, 4)
    result = [f(batch) for f in fs[1:] for _ in range(3)] + [fs[0](X) for _ in range(3)]
    enter()
    result += [f(batch) for f in fs[1:] for _ in range(3)] + [fs[0](X) for _ in range(3)]
    return result, outcome(torch.vmap(fs[0]), batch), fs[0](X)


@scenario
def functional_call(enter: Enter) -> Any:
    functions = callables()
    enter()
    weights = {"_orig_mod.weight": torch.full((4,), 5.0)}
    result = [functions["module"](X)]
    for _ in range(3):
        result.append(outcome(torch.func.functional_call, functions["module"], weights, (X,)))
        result.append(functions["module"](X))
    weights = {"weight": torch.full((4,), 7.0)}
    result.append(outcome(torch.func.functional_call, functions["in_place_doubler"], weights, X))
    return result, call_all(functions, X)


@scenario
def forward_mode_ad(enter: Enter) -> Any:
    functions = callables()
    enter()
    fw, result = torch.autograd.forward_ad, []
    with fw.dual_level():
        result.append(call_all(functions, X))
        dual = fw.make_dual(X, torch.ones(4))
        for name in TENSOR_TO_TENSOR:
            got = outcome(functions[name], dual)
            result.append(tuple(fw.unpack_dual(got)) if isinstance(got, torch.Tensor) else got)
    return result, call_all(functions, X)


# ---- modes ----


@scenario
def modes_entered_before_compiling(enter: Enter) -> Any:
    log, functions_log = Log(), FunctionLog()
    result: list[Any] = []
    with log:
        functions = callables()
        enter()
        result += [call_all(functions, X), call_all(functions, X)]
    result.append(call_all(functions, X))
    torch._dynamo.reset()
    with functions_log:
        functions = callables()
        result += [call_all(functions, X), call_all(functions, X)]
    return result, log.seen, functions_log.seen, call_all(functions, X)


@scenario
def modes_entered_after_compiling(enter: Enter) -> Any:
    functions = callables()
    enter()
    log, functions_log = Log(), FunctionLog()
    result: list[Any] = []
    for mode in (log, functions_log):
        with mode:
            result += [call_all(functions, X), call_all(functions, X)]
            with FunctionLog():
                result += [call_all(functions, X), call_all(functions, X)]
        result.append(call_all(functions, X))
    return result, log.seen, functions_log.seen


@scenario
def torch_function_disabled(enter: Enter) -> Any:
    functions = callables()
    enter()
    log = FunctionLog()
    result: list[Any] = []
    for guard in (torch._C.DisableTorchFunction, torch._C.DisableTorchFunctionSubclass):
        with guard():
            result += [call_all(functions, X), call_all(functions, X)]
            with log:
                result.append(call_all(functions, X))
        result.append(call_all(functions, X))
    return result, log.seen


@scenario
def default_devices(enter: Enter) -> Any:
    def make(x: torch.Tensor) -> Any:
        return torch.ones(4).device.type, x

    functions = {**callables(), "make": torch.compile(make, backend="eager")}
    call_all(functions, X)
    enter()
    result: list[Any] = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            result += [shown(call_all(functions, X)), shown(call_all(functions, X))]
        torch.set_default_device(device)
        try:
            result += [shown(call_all(functions, X)), shown(call_all(functions, X))]
        finally:
            torch.set_default_device(None)
        result.append(call_all(functions, X))
    return result


def shown(results: dict[str, Any]) -> dict[str, Any]:
    """Fake and meta tensors as text."""
    return {n: repr(r) if isinstance(r, torch.Tensor) else str(r) for n, r in results.items()}


@scenario
def fake_tensors(enter: Enter) -> Any:
    functions = callables()
    enter()
    mode = FakeTensorMode()
    fake = mode.from_tensor(X)
    result = [shown(call_all(functions, fake))]
    with mode:
        result += [shown(call_all(functions, fake)), shown(call_all(functions, torch.ones(4)))]
    result.append(shown(call_all(functions, fake)))
    assert isinstance(functions["skip"](fake), FakeTensor)
    return result, call_all(functions, X)


class Sub(torch.Tensor):
    log: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.log.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@scenario
def tensor_kinds(enter: Enter) -> Any:
    functions = callables()
    enter()
    Sub.log.clear()
    z = torch.complex(X, X)
    inputs = [
        X.as_subclass(Sub),
        torch.nn.Parameter(X),
        torch.nn.Parameter(X, requires_grad=False),
        X.double(),
        X.reshape(2, 2).t(),
        torch.zeros(()).expand(4),
        z,
        z.conj(),
        z.imag,
        torch._neg_view(X),
        X.clone().requires_grad_(),
        X.to_sparse(),
        X.to("meta"),
        3,
        None,
        [X],
    ]
    result = []
    for value in inputs:
        for _ in range(2):
            result.append(call_all({n: functions[n] for n in (*DOORED, "graph")}, value))
    return repr(result), [n for n in Sub.log if "repr" not in n], call_all(functions, X)


@pytest.mark.parametrize(
    ("name", "mode"), cases(SCENARIOS, "stance_new_shape", "traced_by_fx", "functional_call")
)
def test_same_as_stock(fresh: None, monkeypatch: Any, name: str, mode: str) -> None:
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    # A functorch transform as compiled function has a guard on all of the frame's locals: stock.
    check(SCENARIOS[name], mode, serves=name != "compiled_transforms")
