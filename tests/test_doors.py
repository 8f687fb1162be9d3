"""Whatever is done to a callable after its door opened: the same as stock.

See test_binding.py for arguments, test_doors_modules.py for modules, test_doors_callers.py for who
calls.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.conftest import frame_stats
from trident import _frame

X = torch.arange(4.0)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return normal(function(*args, **kwargs))
    except Exception as error:
        return type(error), str(error)


def normal(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad, type(value.grad_fn).__name__
    if isinstance(value, tuple):
        return tuple(normal(v) for v in value)
    return value


def opened(function: Callable[..., Any], *args: Any) -> Any:
    compiled = torch.compile(function, backend="eager")
    for _ in range(4):
        compiled(*args)
    assert _frame.has_door(compiled) == trident.is_enabled()
    return compiled


# ---- functions ----


def wrapper_like(compiled: Any) -> Any:
    """A function with other code that fits the closure of a compile wrapper."""
    names = compiled.__code__.co_freevars
    lines = [
        "def outer():",
        *(f"    {name} = 1" for name in names),
        "    def compile_wrapper(*args, **kwargs):",
        f"        {', '.join(names)}",
        "        return 'replaced'",
        "    return compile_wrapper",
    ]
    namespace: dict[str, Any] = {}
    exec("\n".join(lines), namespace)
    return namespace["outer"]()


def test_code_of_the_wrapper_replaced(strictly_enabled: None) -> None:
    compiled = opened(lambda x: (x, 1), 0)
    former = compiled.__code__
    compiled.__code__ = wrapper_like(compiled).__code__
    assert [compiled(0) for _ in range(3)] == ["replaced"] * 3
    compiled.__code__ = former
    assert compiled(0) == (0, 1)


@pytest.mark.parametrize("name", ["fn", "callback"])
def test_cell_of_the_wrapper_emptied(fresh: None, name: str) -> None:
    def run() -> list[Any]:
        torch._dynamo.reset()
        compiled = opened(lambda x: (x, 1), 0)
        cell = compiled.__closure__[compiled.__code__.co_freevars.index(name)]
        former = cell.cell_contents
        del cell.cell_contents
        results = [outcome(compiled, i) for i in range(3)]
        cell.cell_contents = former
        return [*results, outcome(compiled, 7)]

    expected = run()
    assert expected[0][0] is NameError
    with trident.enable():
        assert run() == expected


def test_target_of_the_wrapper_replaced(strictly_enabled: None) -> None:
    def f(x: Any) -> Any:
        return x

    def g(x: Any) -> Any:
        return (x, "g")

    compiled = opened(f, 0)
    cell = compiled.__closure__[compiled.__code__.co_freevars.index("fn")]
    for _ in range(3):
        for target, expected in ((g, (1, "g")), (f, 1), (len, TypeError), (None, TypeError)):
            cell.cell_contents = target
            for _ in range(3):
                result = outcome(compiled, 1)
                assert result == expected or result[0] is expected
    cell.cell_contents = f
    assert compiled(1) == 1


@torch.compile(backend="eager")
def decorated(x: Any) -> Any:
    "Documented."
    return (x, 1)


class Uses:
    """A compiled function in every place of a class."""

    @torch.compile(backend="eager")
    def method(self, x: Any) -> Any:
        return (self, x)

    @classmethod
    @torch.compile(backend="eager")
    def of_class(cls, x: Any) -> Any:
        return (cls, x)

    @staticmethod
    @torch.compile(backend="eager")
    def static(x: Any) -> Any:
        return (x,)

    @property
    @torch.compile(backend="eager")
    def value(self) -> Any:
        return (self,)

    @torch.compile(backend="eager")
    def __getitem__(self, x: Any) -> Any:
        return (self, x)

    @torch.compile(backend="eager")
    def __call__(self, x: Any, **more: Any) -> Any:
        return (self, x, more)

    @torch.compile(backend="eager")
    def __add__(self, x: Any) -> Any:
        return (self, x)

    @torch.compile(backend="eager")
    def __enter__(self) -> Any:
        return self

    @torch.compile(backend="eager")
    def __exit__(self, *args: Any) -> Any:
        return None

    twice = functools.partialmethod(method, "partial")


def test_in_every_place_of_a_class(strictly_enabled: None) -> None:
    uses = Uses()
    names = ("method", "of_class", "static", "value", "__getitem__", "__call__", "__add__")
    for i in range(8):
        assert uses.method(i) == (uses, i)
        assert Uses.method(uses, x=i) == (uses, i)
        assert uses.of_class(i) == (Uses, i)
        assert Uses.of_class(i) == (Uses, i)
        assert uses.static(i) == (i,)
        assert uses.value == (uses,)
        assert uses[i] == (uses, i)
        assert uses(i, y=2) == (uses, i, {"y": 2})
        assert uses + i == (uses, i)
        with uses as entered:
            assert entered is uses
        assert uses.twice() == (uses, "partial")
        assert list(map(uses.method, [1, 2])) == [(uses, 1), (uses, 2)]
        assert sorted([2, 1], key=Uses.static) == [1, 2]
    for name in names:
        assert frame_stats(name).hits >= 5, name


# What is told of a function, by anything that a program may ask.
QUESTIONS: tuple[Callable[[Any], Any], ...] = (
    repr,
    inspect.signature,
    inspect.isfunction,
    inspect.isroutine,
    inspect.getsource,
    inspect.getdoc,
    inspect.unwrap,
    inspect.getfullargspec,
    inspect.iscoroutinefunction,
    callable,
    hash,
    lambda f: f == f,
    lambda f: type(f).__name__,
    lambda f: isinstance(f, types.FunctionType),
    lambda f: isinstance(f, (types.MethodType, type, str)),
    lambda f: f.__get__(1),
    lambda f: f.__get__(None, int) is f,
    lambda f: types.MethodType(f, 3)(),
    lambda f: (f.__module__, f.__name__, f.__qualname__, f.__doc__, f.__annotations__),
    lambda f: sorted(vars(f)),
    lambda f: f.__class__.__mro__[-1],
    lambda f: setattr(f, "__class__", int),
    lambda f: setattr(f, "__dict__", 1),
    lambda f: setattr(f, "__code__", 1),
    lambda f: delattr(f, "nothing"),
    lambda f: f.nothing,
    lambda f: f + 1,
    lambda f: functools.wraps(f)(lambda: 0).__wrapped__ is f,
    lambda f: weakref.ref(f)() is f,
    lambda f: weakref.proxy(f)(2),
    lambda f: copy.copy(f) is f,
    lambda f: copy.deepcopy({"f": [f, f]})["f"][1] is f,
    lambda f: copy.deepcopy(functools.partial(f, 1))(),
    lambda f: [pickle.loads(pickle.dumps(f, p)) is f for p in range(6)],
    lambda f: [pickle.dumps(f, p) for p in range(6)],
    lambda f: pickle.dumps([f, {"f": f}]),
    lambda f: python_pickle(f),
    lambda f: gc.is_tracked(f),
)


def python_pickle(value: Any) -> bytes:
    file = io.BytesIO()
    pickle._Pickler(file, 4).dump(value)  # type: ignore[attr-defined]
    return file.getvalue()


@pytest.mark.parametrize("i", range(len(QUESTIONS)))
def test_questions(fresh: None, i: int) -> None:
    def local(x: Any) -> Any:
        return (x, 1)

    functions = [decorated, torch.compile(local, backend="eager"), vars(Uses)["method"]]
    expected = [outcome(QUESTIONS[i], f) for f in functions]
    with trident.enable():
        for _ in range(4):
            decorated(X)
            functions[1](X)
            Uses().method(X)
        assert all(_frame.has_door(f) for f in functions)
        assert [outcome(QUESTIONS[i], f) for f in functions] == expected
    assert [type(f) for f in functions] == [types.FunctionType] * 3
    assert [outcome(QUESTIONS[i], f) for f in functions] == expected


# ---- life and death ----


def test_many_doors_in_cycles(strictly_enabled: None) -> None:
    def make(i: int) -> Any:
        def in_cycle(x: Any) -> Any:
            return (x, i)

        compiled = torch.compile(in_cycle, backend="eager")
        compiled.myself = [compiled]
        return compiled

    before = _frame.n_doors()
    compiled = make(0)
    for _ in range(3):
        compiled(1)
    for k in range(4):
        functions = [make(i) for i in range(5000)]
        for i, f in enumerate(functions):
            assert f(k) == (k, i)
            assert f(k) == (k, i)
        assert _frame.n_doors() - before == 5001
        assert all(f(i) == (i, i) for i, f in enumerate(functions[::7]) if i == 0)
        del functions, f
        gc.collect()
        assert _frame.n_doors() - before == 1
    assert compiled(5) == (5, 0)


def test_resurrected(strictly_enabled: None) -> None:
    class Keeper:
        def __init__(self, kept: Any) -> None:
            self.kept = kept

        def __del__(self) -> None:
            saved.append(self.kept)

    def make() -> Any:
        def f(x: Any) -> Any:
            return (x, "f")

        compiled = opened(f, 1)
        compiled.keeper = Keeper(compiled)
        return compiled

    saved: list[Any] = []
    make()
    gc.collect()
    (compiled,) = saved
    assert type(compiled) is types.FunctionType
    assert not _frame.has_door(compiled)
    for i in range(4):
        assert compiled(i) == (i, "f")
    assert _frame.has_door(compiled)


def test_models_with_doors_are_freed(strictly_enabled: None) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    def make(in_place: bool) -> list[weakref.ref[Any]]:
        model = Model()
        if in_place:
            model.compile(backend="eager")
        called: Any = model if in_place else torch.compile(model, backend="eager")
        called.reference_to_itself = [called, model]
        for _ in range(5):
            assert called(X) is X
        assert _frame.has_door(model._compiled_call_impl if in_place else called)
        return [weakref.ref(model), weakref.ref(called)]

    before = _frame.n_doors()
    references = [r for i in range(40) for r in make(i % 2 == 0)]
    gc.collect()
    assert [r() for r in references] == [None] * 80
    assert _frame.n_doors() == before


def test_door_that_always_misses_closes_and_returns(strictly_enabled: None) -> None:
    def f(x: Any) -> Any:
        return (x, 1)

    compiled = opened(f, 0)
    expected = outcome(f)
    for _ in range(100):
        assert outcome(compiled) == expected
    assert not _frame.has_door(compiled)
    assert type(compiled) is types.FunctionType
    for i in range(5):
        assert compiled(i) == (i, 1)  # by the hook
    assert not _frame.has_door(compiled)
    torch.compile(lambda x: x + 1, backend="eager")(X)
    for i in range(3):
        assert compiled(i) == (i, 1)
    assert _frame.has_door(compiled)
