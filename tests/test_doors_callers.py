"""Who calls a doored function: compiled callers, tracers and threads; and the switch around them.

On CPython 3.11 a door changes its function's type; no guard and no tracer may notice.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.conftest import compilations, reset_compilations
from tests.test_doors import Uses, normal, outcome
from trident import _frame
from trident.errors import TridentError

X = torch.arange(4.0)


def make() -> Any:
    def doored(x: Any) -> Any:
        return x

    return torch.compile(doored, backend="eager")


def make_method() -> Any:
    def doored(self: Any, x: Any) -> Any:
        return x

    return torch.compile(doored, backend="eager")


class Identity(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def open_doors(*functions: Any) -> None:
    for function in functions:
        for _ in range(4):
            function(X)


# ---- compiled callers ----

Caller = tuple[Callable[..., Any], list[Any], Callable[[int], tuple[Any, ...]]]
CALLERS: dict[str, Callable[[], Caller]] = {}


def caller(function: Callable[[], Caller]) -> Callable[[], Caller]:
    """Gives what to compile, the functions to open doors on, and the arguments of the i-th call."""
    CALLERS[function.__name__] = function
    return function


@caller
def from_closure() -> Caller:
    f = make()
    return (lambda x: f(x) + 1), [f], lambda i: (X,)


@caller
def as_argument() -> Caller:
    """Others arrive where a guard asks for the type of the first."""
    functions = [make() for _ in range(3)]
    return (lambda fn, x: fn(x) + 1), functions, lambda i: (functions[i % 3], X)


@caller
def as_argument_that_is_returned() -> Caller:
    functions = [make() for _ in range(3)]

    def body(fn: Any, x: Any) -> Any:
        return x + 1, fn is functions[0], callable(fn), fn

    return body, functions, lambda i: (functions[i % 3], X)


@caller
def after_a_plain_function() -> Caller:
    def plain(x: Any) -> Any:
        return x

    functions = [make() for _ in range(2)]
    return (lambda fn, x: (x + 1, fn)), functions, lambda i: ([plain, *functions][i % 3], X)


@caller
def from_containers() -> Caller:
    listed, named = [make(), make()], {"a": make(), "b": (make(),)}

    def body(x: Any) -> Any:
        return listed[0](x) + listed[1](x) + named["a"](x) + named["b"][0](x)

    return body, [*listed, named["a"], named["b"][0]], lambda i: (X,)


@caller
def from_attributes() -> Caller:
    class Holder:
        static = staticmethod(make())
        method = make_method()

    holder = Holder()
    holder.own = make()  # type: ignore[attr-defined]

    def body(h: Any, x: Any) -> Any:
        return h.static(x) + h.method(x) + h.own(x)

    return body, [holder.static, holder.method, holder.own], lambda i: (holder, X)  # type: ignore[attr-defined]


@caller
def by_type() -> Caller:
    f = make()

    def body(x: Any) -> Any:
        exact = type(f) is types.FunctionType
        return x + 1, exact, isinstance(f, types.FunctionType), f.__name__, hasattr(f, "nothing")

    return body, [f], lambda i: (X,)


@caller
def through_builtins() -> Caller:
    f = make()

    def body(x: Any) -> Any:
        return sum(map(f, [x, x])) + functools.partial(f)(x)

    return body, [f], lambda i: (X,)


@caller
def from_a_module() -> Caller:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(Identity(), backend="eager")
            self.function = make()
            self.in_place = Identity()
            self.in_place.compile(backend="eager")

        def forward(self, x: Any) -> Any:
            return self.function(self.inner(x)) + 1 + self.in_place(x)

    model = Model()
    return model, [model.inner, model.function, model.in_place], lambda i: (X,)


def run_caller(name: str, first: bool, fullgraph: bool) -> tuple[list[Any], dict[str, int]]:
    torch._dynamo.reset()
    reset_compilations()
    body, functions, arguments = CALLERS[name]()
    if first:
        open_doors(*functions)
    compiled: Any = torch.compile(body, backend="eager", fullgraph=fullgraph)
    results = []
    for i in range(9):
        args = arguments(i)
        result = outcome(compiled, *args)
        if isinstance(result, tuple):  # functions differ from run to run
            result = tuple(functions.index(r) if r in functions else r for r in result)
        results.append(str(result).partition(" at 0x")[0])
        open_doors(*functions)
    return results, compilations()


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", sorted(CALLERS))
def test_compiled_caller(
    fresh: None, monkeypatch: Any, name: str, first: bool, fullgraph: bool
) -> None:
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    expected = run_caller(name, first, fullgraph)
    with trident.enable():
        assert run_caller(name, first, fullgraph) == expected


def takes_function(fn: Any, x: Any) -> Any:
    return x + 1, fn, torch.compiler.is_compiling()


def test_lookup_of_stock_sees_plain_functions(strictly_enabled: None) -> None:
    """Where only stock may look: a stance, and after more misses than the hook bears otherwise."""
    functions = [make() for _ in range(2)]
    compiled = torch.compile(takes_function, backend="eager", dynamic=False)
    compiled(functions[0], X)
    compiled(functions[0], X)
    open_doors(*functions)
    assert _frame.has_door(functions[1])
    with torch.compiler.set_stance("fail_on_recompile"):
        assert compiled(functions[1], X)[2]
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(100):
            assert not compiled(functions[0], torch.ones(9))[2]
    with torch.compiler.set_stance("fail_on_recompile"):
        assert compiled(functions[1], X)[2]
    assert compiled(functions[1], X)[2]
    assert _frame.has_door(functions[1])


BEFORE_IMPORT = """
import torch

x, compiled = torch.ones(3), []

def backend(gm, inputs):
    compiled.append(gm)
    return gm.forward

def f(x):
    return x

f = torch.compile(f, backend="eager")
callers = [lambda fn, x: fn(x) + 1, lambda fn, x: f(x) + 2, lambda fn, x: (x + 3, fn)]
callers = [torch.compile(c, backend=backend, fullgraph=True) for c in callers]
for c in callers:
    c(f, x)
assert len(compiled) == 3

import trident
from trident import _frame

with trident.enable():
    for _ in range(3):
        for _ in range(4):
            f(x)
        for c in callers:
            c(f, x)
    assert _frame.has_door(f)
assert len(compiled) == 3, len(compiled)
"""


def test_callers_compiled_before_the_import() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BEFORE_IMPORT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


# ---- tracers ----

TRACERS: dict[str, Callable[[Any], Any]] = {
    "export": lambda f: torch.export.export(Calls(f), (X,), strict=False).module()(X),
    "strict export": lambda f: torch.export.export(Calls(f), (X,), strict=True).module()(X),
    "dynamo export": lambda f: torch._dynamo.export(lambda x: f(x) + 1)(X).graph_module(X),
    "explain": lambda f: torch._dynamo.explain(lambda x: f(x) + 1)(X).graph_count,
    "jit trace": lambda f: torch.jit.trace(Calls(f), (X,))(X),
    "fx": lambda f: torch.fx.symbolic_trace(Calls(f))(X),
    "vmap": lambda f: torch.func.vmap(f)(X),
    "disable": lambda f: torch._dynamo.disable(f)(X),
    "compile again": lambda f: torch.compile(f, backend="eager")(X),
    "compile a method": lambda f: torch.compile(types.MethodType(f, X), backend="eager")(),
    "checkpoint": lambda f: torch.compile(
        lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False) + 1,
        backend="eager",
        fullgraph=True,
    )(X),
    "compiled vmap": lambda f: torch.compile(
        lambda x: torch.func.vmap(f)(x) + 1, backend="eager", fullgraph=True
    )(X),
}


class Calls(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x) + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(TRACERS))
def test_traced(fresh: None, name: str) -> None:
    def run() -> list[Any]:
        torch._dynamo.reset()
        function = make()
        open_doors(function)
        assert _frame.has_door(function) == trident.is_enabled()
        results = []
        for _ in range(2):
            results.append(outcome(TRACERS[name], function))
            open_doors(function)
        return results

    expected = run()
    with trident.enable():
        assert run() == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_types_come_back_after_a_failed_compilation(strictly_enabled: None, error: Any) -> None:
    function = make()
    open_doors(function)
    doored = type(function)

    def backend(nested: bool, gm: Any, inputs: Any) -> Any:
        assert type(function) is types.FunctionType
        if nested:
            torch.compile(lambda x: x * 2, backend="eager")(X)
            assert type(function) is types.FunctionType
        raise error("stopped")

    for nested in (False, True):
        with pytest.raises((error, torch._dynamo.exc.BackendCompilerFailed)):
            torch.compile(lambda x: x + 1, backend=functools.partial(backend, nested))(X)
        assert type(function) is doored
        assert _frame.has_door(function)
        before = trident.stats().hits
        function(X)
        assert trident.stats().hits == before + 1


def test_doors_come_and_go_while_threads_call(fresh: None) -> None:
    """Hooks, switches and compilations in one thread, calls in others."""
    trident.enable()
    function, module = make(), Identity()
    compiled = torch.compile(module, backend="eager")
    open_doors(function, compiled)
    stop, wrong = threading.Event(), []

    def call() -> None:
        while not stop.is_set():
            if function(X) is not X or function(x=7) != 7:
                wrong.append("function")
            if compiled(X) is not X:
                wrong.append("module")

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(30):
            handle = module.register_forward_hook(lambda *_: None)
            with trident.enable():
                handle.remove()
            trident.disable()
            module.forward = lambda x: x  # type: ignore[method-assign]
            if i % 10 == 0:
                torch.compile(lambda x, i=i: x + i, backend="eager")(X)
            del module.forward
            trident.enable()
            open_doors(function, compiled)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        trident.disable()
    assert not wrong


# ---- the switch ----


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nested_in_any_order(fresh: None, order: tuple[int, ...]) -> None:
    function = make()
    tokens = [trident.enable() for _ in range(3)]
    open_doors(function)
    for i, k in enumerate(order):
        assert trident.is_enabled()
        assert _frame.has_door(function)
        tokens[k].__exit__(None, None, None)
        tokens[k].__exit__(None, None, None)  # once more does nothing
        assert trident.is_enabled() == (i < 2)
    assert not _frame.has_door(function)
    assert type(function) is types.FunctionType


def test_a_context_can_be_entered_again(fresh: None) -> None:
    context = trident.enable()
    with context:
        assert trident.is_enabled()
    assert not trident.is_enabled()
    with context:
        assert trident.is_enabled()
        with context:
            assert trident.is_enabled()
        assert trident.is_enabled()
    assert not trident.is_enabled()


def test_disabled_by_environment_when_entered_again(fresh: None, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRIDENT_DISABLE", "1")
    context = trident.enable(reset=True)
    for _ in range(2):
        with context:
            assert not trident.is_enabled()


def test_switched_in_the_middle_of_calls(fresh: None) -> None:
    """By a call's argument, a hook, a default's finalizer, a backend: everything goes on."""

    class Ends:
        def __del__(self) -> None:
            while trident.is_enabled():
                trident.disable()
            torch._dynamo.reset()

    def f(x: Any, y: Any = None) -> Any:
        return (x,)

    for _ in range(5):
        trident.enable()
        compiled = torch.compile(f, backend="eager")
        open_doors(compiled)
        f.__defaults__ = (Ends(),)
        assert compiled(1) == (1,)
        f.__defaults__ = (None,)
        assert not trident.is_enabled()
        trident.enable()
        assert compiled(2, Ends()) == (2,)
        assert not trident.is_enabled()
        assert compiled(3) == (3,)


@pytest.mark.parametrize("arguments", [{"colour": 1}, {"RESET": True}, {"": 0}])
def test_unknown_options(fresh: None, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        trident.enable(**arguments)
    with pytest.raises(TypeError, match="positional"):
        trident.enable(True)  # type: ignore[misc]
    assert not trident.is_enabled()


# ---- explain ----


class Decorated(torch.nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def names_explained(value: Any) -> list[str]:
    explanation = trident.explain(value, ir=True)
    assert str(explanation)
    # `inner` is Dynamo's own frame around a callable that it would not look into.
    return [frame.name for frame in explanation.frames if frame.name != "inner"]


def test_explain_finds_what_was_compiled(strictly_enabled: None) -> None:
    decorated, own, in_place = Decorated(), Identity(), Identity()
    own.forward = torch.compile(own.forward, backend="eager")  # type: ignore[method-assign]
    in_place.compile(backend="eager")
    nested = torch.nn.Sequential(Decorated(), torch.compile(Decorated(), backend="eager"))
    uses = Uses()
    assert "Nothing was compiled" in str(trident.explain(decorated))
    assert trident.explain(uses.method).frames == []
    for _ in range(3):
        decorated(X)
        own(X)
        in_place(X)
        nested(X)
        uses.method(X)
    for module in (decorated, own, in_place, nested, torch.compile(decorated)):
        assert names_explained(module) == ["forward"]
    assert names_explained(decorated.forward) == ["forward"]
    assert names_explained(own.forward) == ["forward"]
    assert names_explained(own.__call__) == ["forward"]
    for method in (uses.method, Uses.method, vars(Uses)["method"]):
        assert names_explained(method) == ["method"]
    assert names_explained(torch.compile(functools.partial(max, 1), backend="eager")) == []


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError if name == "__name__" else RuntimeError(name)


@pytest.mark.parametrize(
    "garbage", [None, 3, "f", [], len, int, torch, (lambda: 0).__code__, X, Hostile(), property()]
)
def test_explain_garbage(strictly_enabled: None, garbage: Any) -> None:
    with pytest.raises(TridentError, match="takes a function"):
        trident.explain(garbage)
    with pytest.raises(TridentError):
        trident.explain(garbage, ir=True)


def test_explain_does_not_disturb(strictly_enabled: None) -> None:
    """Neither what was compiled, nor what is then served."""
    function, module = make(), torch.compile(Decorated(), backend="eager")
    reset_compilations()
    for _ in range(3):
        trident.explain(function)
        trident.explain(module, ir=True)
        function(X)
        assert normal(module(X)) == normal(X + 1)
    assert compilations()["graphs"] == 1
    trident.reset_stats()
    assert trident.stats().hits == trident.stats().run_code == 0
    function(X)
    module(X)
    assert trident.stats().hits == 1
    assert trident.stats().run_code == 1
    trident.reset_stats()
    assert not [f for f in trident.stats().frames if f.hits or f.run_code or f.build_s]
