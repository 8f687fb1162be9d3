"""Doors: how arguments are bound, what closes a door, and that nobody notices one."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.conftest import compilations, frame_stats, outcome, reset_compilations
from trident import _frame
from trident.errors import TridentError

X = torch.arange(4.0)


def opened(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function` compiled and called until it has a door."""
    compiled = torch.compile(function, backend="eager")
    for _ in range(4):
        compiled(*args, **kwargs)
    assert _frame.has_door(compiled)
    return compiled


def module_level(x: Any) -> Any:
    return x


def test_arguments(strictly_enabled: None) -> None:
    def f(a: Any, b: Any = 2, /, c: Any = 3, *rest: Any, d: Any, e: Any = 5, **more: Any) -> Any:
        return (a, b, c, rest, d, e, more)

    compiled = opened(f, 1, d=4)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((1,), {"d": 4}),
        ((1, 2), {"d": 4, "e": 6}),
        ((1, 2, 3), {"d": 4, "z": 9, "y": 8}),
        ((1, 2, 3, 4, 5), {"d": 4}),
        ((1,), {"c": 7, "d": 4}),
        ((1,), {"a": 7, "d": 4}),
        ((), {"d": 4}),
        ((1,), {}),
        ((1, 2, 3), {"c": 3, "d": 4}),
        ((1,), {"b": 2, "d": 4}),
        ((1,), {"d": 4, "self": 1, "args": 2}),
    ]
    before = frame_stats("f").hits
    for args, kwargs in calls:
        assert outcome(compiled, *args, **kwargs) == outcome(f, *args, **kwargs), (args, kwargs)
    assert frame_stats("f").hits - before >= 7


def test_too_many_and_unknown_arguments(strictly_enabled: None) -> None:
    def f(a: Any, b: Any = 1) -> Any:
        return (a, b)

    compiled = opened(f, 1)
    for args, kwargs in (
        ((1, 2, 3), {}),
        ((), {}),
        ((1,), {"c": 1}),
        ((1,), {"a": 1}),
        ((1, 2), {"b": 3}),
    ):
        expected = outcome(f, *args, **kwargs)
        assert outcome(compiled, *args, **kwargs) == expected
        assert expected[0] is TypeError


def test_string_subclass_keywords(strictly_enabled: None) -> None:
    class Name(str):
        __slots__ = ()

    def f(a: Any = 0, **more: Any) -> Any:
        return (a, more)

    compiled = opened(f, 1)
    assert compiled(**{Name("a"): 3}) == (3, {})
    assert compiled(**{Name("b"): 3}) == (0, {"b": 3})


def test_defaults_change(strictly_enabled: None) -> None:
    def f(a: Any, b: Any = 1, *, c: Any = 2) -> Any:
        return (a, b, c)

    compiled = opened(f, 0)
    f.__defaults__ = (10,)
    f.__kwdefaults__["c"] = 20
    assert compiled(0) == (0, 10, 20)
    del f.__kwdefaults__["c"]
    assert outcome(compiled, 0) == outcome(f, 0)
    f.__kwdefaults__ = None
    f.__defaults__ = None
    assert outcome(compiled, 0) == outcome(f, 0)
    assert compiled(0, 1, c=2) == (0, 1, 2)


def test_closure_cells(strictly_enabled: None) -> None:
    value: Any = 1

    def f(x: Any) -> Any:
        return (x, value)

    compiled = opened(f, 0)
    assert compiled(0) == (0, 1)
    value = [2]
    assert compiled(0) == (0, [2])
    del value
    assert outcome(compiled, 0) == outcome(f, 0)
    value = 3
    assert compiled(5) == (5, 3)


def test_code_replaced(strictly_enabled: None) -> None:
    def f(x: Any) -> Any:
        return x

    def g(x: Any) -> Any:
        return (x, x)

    compiled = opened(f, 1)
    f.__code__ = g.__code__
    assert [compiled(1) for _ in range(4)] == [(1, 1)] * 4
    del g
    gc.collect()
    assert compiled(2) == (2, 2)


def test_methods(strictly_enabled: None) -> None:
    class C:
        @torch.compile(backend="eager")
        def method(self, x: Any) -> Any:
            return (self, x)

        @staticmethod
        @torch.compile(backend="eager")
        def static(x: Any) -> Any:
            return x

        def plain(self, x: Any) -> Any:
            return (self, x)

    c = C()
    bound = torch.compile(c.plain, backend="eager")
    for i in range(6):
        assert c.method(i) == (c, i)
        assert c.static(i) == i
        assert bound(i) == (c, i)
        assert C.method(c, i) == (c, i)
    assert _frame.has_door(C.__dict__["method"])
    assert _frame.has_door(bound)


class Identity(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def opened_module(module: torch.nn.Module) -> Any:
    compiled = torch.compile(module, backend="eager")
    for _ in range(4):
        compiled(X)
    assert _frame.has_door(compiled)
    return compiled


def _forward_hook(log: list[str]) -> Callable[[torch.nn.Module], Any]:
    return lambda m: m.register_forward_hook(lambda *_: log.append("forward"))


def _forward_pre_hook(log: list[str]) -> Callable[[torch.nn.Module], Any]:
    return lambda m: m.register_forward_pre_hook(lambda *_: log.append("pre"))


def _backward_hook(log: list[str]) -> Callable[[torch.nn.Module], Any]:
    return lambda m: m.register_full_backward_hook(lambda *_: log.append("backward"))


@pytest.mark.parametrize("where", ["original", "compiled"])
@pytest.mark.parametrize("kind", [_forward_hook, _forward_pre_hook, _backward_hook])
def test_module_hooks(fresh: None, kind: Any, where: str) -> None:
    def run() -> list[Any]:
        torch._dynamo.reset()
        original, log = Identity(), []
        compiled = torch.compile(original, backend="eager")
        for _ in range(4):
            compiled(X)
        handle = kind(log)(original if where == "original" else compiled)
        results = [compiled(X) for _ in range(3)]
        handle.remove()
        results += [compiled(X) for _ in range(2)]
        return [log, [torch.equal(r, X) for r in results]]

    expected = run()
    with trident.enable():
        assert run() == expected


def test_global_module_hook(strictly_enabled: None) -> None:
    compiled, log = opened_module(Identity()), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: log.append(1))
    with pytest.warns(UserWarning, match="global hooks"):
        compiled(X)
    handle.remove()
    assert log
    before = frame_stats("forward").hits
    assert compiled(X) is X
    assert frame_stats("forward").hits == before + 1


def test_forward_replaced(strictly_enabled: None) -> None:
    class M(Identity):
        def forward(self, x: Any) -> Any:
            return x

    module = M()
    compiled = opened_module(module)
    module.forward = lambda x: (x, "instance")  # type: ignore[method-assign]
    assert compiled(X) == (X, "instance")
    del module.forward
    assert compiled(X) is X
    M.forward = lambda self, x: (x, "class")  # type: ignore[method-assign]
    assert compiled(X) == (X, "class")


def test_wrapper_of_a_module_dies(strictly_enabled: None) -> None:
    """Only the OptimizedModule keeps its wrapper alive."""
    compiled = opened_module(Identity())
    gone = weakref.ref(compiled.forward)
    compiled.forward = lambda x: (x, "replaced")
    gc.collect()
    assert gone() is None
    assert compiled(X) == (X, "replaced")
    del compiled.forward
    gc.collect()
    assert outcome(compiled, X)[0] is NotImplementedError


def test_class_and_dict_replaced(strictly_enabled: None) -> None:
    class Other(Identity):
        def forward(self, x: Any) -> Any:
            return (x, "other")

    module = Identity()
    compiled = opened_module(module)
    module.__class__ = Other
    assert compiled(X) == (X, "other")
    module.__class__ = Identity
    log: list[str] = []
    replacement = dict(module.__dict__)
    replacement["_forward_hooks"] = {1: lambda *_: log.append("hook")}
    module.__dict__ = replacement
    compiled(X)
    assert log == ["hook"]


def test_type_patched(strictly_enabled: None) -> None:
    class M(Identity):
        pass

    compiled = opened_module(M())
    M.__call__ = lambda self, x: "called"  # type: ignore[assignment]
    # torch.compile bound the former __call__, so only what that one does counts.
    assert compiled(X) is X
    M._call_impl = lambda self, x: "implemented"  # type: ignore[assignment]
    assert compiled(X) == "implemented"


def test_module_compile(strictly_enabled: None) -> None:
    module, log = Identity(), []
    module.compile(backend="eager")
    for _ in range(5):
        assert module(X) is X
    assert _frame.has_door(module._compiled_call_impl)
    handle = module.register_forward_hook(lambda *_: log.append("hook"))
    module(X)
    handle.remove()
    assert log == ["hook"]
    assert module(X) is X


def test_copy_and_pickle(strictly_enabled: None) -> None:
    # Pickle stores a function by name; the name of a wrapper is that of what it wraps.
    expected = outcome(pickle.dumps, torch.compile(module_level, backend="eager"))
    compiled = opened(module_level, 1)
    assert copy.copy(compiled) is compiled
    assert copy.deepcopy(compiled) is compiled
    assert copy.deepcopy([compiled])[0] is compiled
    assert outcome(pickle.dumps, compiled)[0] == expected[0]
    module = opened_module(Identity())
    twin = copy.deepcopy(module)
    assert type(twin) is type(module)
    assert torch.equal(twin(X), X)


def test_looks_like_a_function(strictly_enabled: None) -> None:
    def f(x: Any, y: int = 2) -> Any:
        "Documented."
        return x

    compiled = opened(f, 1)
    assert isinstance(compiled, types.FunctionType)
    assert inspect.isfunction(compiled)
    assert inspect.signature(compiled) == inspect.signature(f)
    assert compiled.__name__ == "f"
    assert compiled.__doc__ == "Documented."
    assert compiled.__wrapped__ is f
    assert weakref.ref(compiled)() is compiled
    compiled.attribute = 1
    assert vars(compiled)["attribute"] == 1
    assert type(compiled).__name__ == "function"


def test_callers_compiled_before_and_after(fresh: None) -> None:
    """On 3.11 a door changes a function's type, which guards of its callers could see."""

    def run() -> tuple[list[Any], dict[str, int]]:
        torch._dynamo.reset()
        reset_compilations()

        def f(x: Any) -> Any:
            return x

        compiled = torch.compile(f, backend="eager")
        before = torch.compile(lambda x: compiled(x) + 1, backend="eager", fullgraph=True)
        results = [before(X)]
        results += [compiled(X) for _ in range(5)]
        results += [before(X), before(X)]
        after = torch.compile(lambda x: compiled(x) + 2, backend="eager", fullgraph=True)
        results += [after(X), after(X), compiled(X), before(X)]
        return results, compilations()

    expected, stock = run()
    with trident.enable():
        actual, ours = run()
    assert all(map(torch.equal, actual, expected))
    assert ours == stock


def test_disable_restores(fresh: None) -> None:
    optimized = type(torch.compile(Identity(), backend="eager"))
    call = optimized.__dict__["__call__"]
    setter = torch._C._dynamo.eval_frame.set_eval_frame
    with trident.enable():
        compiled, module = opened(module_level, 1), opened_module(Identity())
        assert _frame.n_doors() >= 2
    assert type(compiled) is types.FunctionType
    assert _frame.n_doors() == 0
    assert not _frame.installed()
    assert optimized.__dict__["__call__"] is call
    assert torch._C._dynamo.eval_frame.set_eval_frame is setter
    assert compiled(3) == 3
    assert module(X) is X
    with trident.enable():
        for _ in range(3):
            assert compiled(3) == 3
        assert _frame.has_door(compiled)


def test_nesting(fresh: None) -> None:
    trident.enable()
    with trident.enable():
        assert trident.is_enabled()
        trident.disable()
        assert trident.is_enabled()
    assert trident.is_enabled()
    trident.disable()
    assert not trident.is_enabled()
    trident.disable()
    context = trident.enable()
    with pytest.raises(ZeroDivisionError), context:
        _ = 1 / 0
    assert not trident.is_enabled()
    with pytest.raises(TypeError, match="unexpected keyword"):
        trident.enable(colour="red")  # type: ignore[call-arg]
    assert not trident.is_enabled()


def test_switched_inside_compiled_code(fresh: None) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        trident.enable()
        torch._dynamo.graph_break()
        y = y * 2
        trident.disable()
        return y - 1

    compiled = torch.compile(body, backend="eager")
    for _ in range(5):
        assert torch.equal(compiled(X), (X + 1) * 2 - 1)
    assert not trident.is_enabled()

    def backend(gm: Any, inputs: Any) -> Any:
        trident.enable()
        return gm.forward

    other = torch.compile(lambda x: x - 3, backend=backend)
    for _ in range(4):
        assert torch.equal(other(X), X - 3)
    trident.disable()


def test_compiled_before_enable_becomes_native(fresh: None) -> None:
    compiled = torch.compile(lambda x: x * 5, backend="eager")
    compiled(X)
    with trident.enable():
        reset_compilations()
        assert torch.equal(compiled(X), X * 5)
        assert trident.stats().run_code == 1
        assert compilations()["graphs"] == 0


def test_reset_option(fresh: None) -> None:
    compiled = torch.compile(lambda x: x * 6, backend="eager")
    compiled(X)
    with trident.enable(reset=True):
        reset_compilations()
        compiled(X)
        compiled(X)
        assert compilations()["graphs"] == 1


def test_back_off_and_return(strictly_enabled: None) -> None:
    def f(x: torch.Tensor, n: float) -> torch.Tensor:
        return x + n

    compiled = torch.compile(f, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(X, True)
        compiled(X, True)
        assert _frame.is_hooked(f.__code__)
        for _ in range(100):
            compiled(X, False)  # over the limit: stock runs it eagerly
        misses = frame_stats("f").misses
        assert misses == 64  # the others went to stock unseen
        compiled(X, False)
        assert frame_stats("f").misses == misses
    torch._dynamo.reset()
    for _ in range(3):
        assert torch.equal(compiled(X, True), X + True)
    assert _frame.is_hooked(f.__code__)


def test_doors_die_with_their_functions(strictly_enabled: None) -> None:
    def make() -> weakref.ref[Any]:
        def f(x: Any) -> Any:
            return x

        compiled = opened(f, 1)
        compiled.myself = compiled  # a cycle
        return weakref.ref(compiled)

    before = _frame.n_doors()
    references = [make() for _ in range(50)]
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in references] == [None] * 50
    assert _frame.n_doors() == before


def test_doors_while_another_thread_compiles(strictly_enabled: None) -> None:
    compiled = opened(module_level, 1)
    stop, wrong = threading.Event(), []

    def call() -> None:
        while not stop.is_set():
            if compiled(7) != 7:
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(5):
        assert torch.equal(torch.compile(lambda x, i=i: x + i, backend="eager")(X), X + i)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_explain(strictly_enabled: None) -> None:
    graph = torch.compile(lambda x: x + 1, backend="eager")
    graph(X)
    graph(X)
    explanation = trident.explain(graph, ir=True)
    (frame,) = explanation.frames
    (spec,) = frame.specializations
    assert spec.guards_native
    assert spec.n_guards > 3
    assert not spec.plan_native
    assert "not one of the backends" in str(spec.program_reason)
    assert "scm." in spec.ir["scm"]
    assert "check_tensor" in spec.ir["guards"]
    assert "guards: native" in str(explanation)
    module = opened_module(Identity())
    assert "answered natively" in str(trident.explain(module))
    assert "answered natively" in str(trident.explain(Identity.forward))
    assert "Nothing was compiled" in str(trident.explain(test_arguments))
    for garbage in (3, "text", None, int):
        with pytest.raises(TridentError, match="takes a function"):
            trident.explain(garbage)


def test_breakpoint_of_the_bytecode_debugger(strictly_enabled: None, monkeypatch: Any) -> None:
    """Stock starts the debugger when it runs such code; so it must be stock that runs it."""
    debugger = pytest.importorskip("torch._dynamo.bytecode_debugger")
    prompts: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or "c")

    @torch.compile(backend="eager", fullgraph=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        debugger.breakpoint()
        return y * 2

    for calls in range(1, 5):
        assert torch.equal(f(X), (X + 1) * 2)
        assert len(prompts) >= calls
    assert "breakpoint" in str(trident.explain(f))
    assert trident.stats().run_code == 0


def test_explain_resume_functions(strictly_enabled: None) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    compiled = torch.compile(broken, backend="eager")
    for _ in range(3):
        compiled(X)
    frames = trident.explain(compiled).frames
    assert len(frames) == 2
    assert all(frame.run_code == 2 for frame in frames)


def test_stats(strictly_enabled: None) -> None:
    compiled = opened(module_level, 1)
    trident.reset_stats()
    assert trident.stats().hits == 0
    compiled(1)
    stats = trident.stats()
    assert stats.hits == 1
    assert stats.as_dict()["frames"][0]["name"] == "module_level"
    assert "1 hits" in str(stats)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="doors change the type on 3.11 only")
def test_type_is_plain_while_compiling(strictly_enabled: None) -> None:
    compiled, seen = opened(module_level, 1), []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(type(compiled))
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(X)
    assert seen == [types.FunctionType]
    assert type(compiled) is not types.FunctionType
