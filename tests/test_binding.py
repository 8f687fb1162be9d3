"""Arguments at a door: bound as CPython binds them, or left to stock, which then raises."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trident
from tests.conftest import frame_stats, outcome
from trident import _frame

X = torch.arange(4.0)


def open_door(compiled: Any, *args: Any, **kwargs: Any) -> None:
    for _ in range(4):
        compiled(*args, **kwargs)
    assert _frame.has_door(getattr(compiled, "_compiled_call_impl", None) or compiled)


def doors_only(compiled: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Opens the door of `compiled`, and takes the hook away: each hit from now on is the door's."""
    open_door(compiled, *args, **kwargs)
    _frame.unhook(function.__code__)
    return compiled


def opened(function: Any, *args: Any, **kwargs: Any) -> Any:
    return doors_only(torch.compile(function, backend="eager"), function, *args, **kwargs)


def hits(function: Any) -> int:
    return int(frame_stats(function.__name__).hits)


# ---- every kind of signature against every kind of call ----


def make_function(rng: random.Random, path: Path, first: str = "") -> Any:
    """Returns all of its arguments; with a random signature. Dynamo wants to see its source."""
    only, plain, keyword = (["abc", "def", "ghi"][i][: rng.randrange(4)] for i in range(3))
    rest, more = rng.random() < 0.5, rng.random() < 0.5
    n_positional = len(only) + len(plain)
    n_defaults = rng.randrange(n_positional + 1)
    parts, i = [], 0
    for group in (only, plain):
        for letter in group:
            default = f"='default {letter}'" if i >= n_positional - n_defaults else ""
            parts.append(letter + default)
            i += 1
        if group is only and only:
            parts.append("/")
    if first:
        parts.insert(0, first)
    if rest or keyword:
        parts.append("*rest" if rest else "*")
    for letter in keyword:
        parts.append(letter + (f"='default {letter}'" if rng.random() < 0.5 else ""))
    if more:
        parts.append("**more")
    names = [*first.split(), *only, *plain, *keyword, *["rest"] * rest, *["more"] * more]
    namespace: dict[str, Any] = {}
    values = "".join(f"{n}, " for n in names)
    source = f"def {path.stem}({', '.join(parts)}):\n    return ({values})"
    path.write_text(source)
    exec(compile(source, str(path), "exec"), namespace)
    return namespace[path.stem]


def make_call(rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(object() for _ in range(rng.choice((0, 1, 2, 3, 3, 4, 5, 6, 7))))
    names = rng.sample("abcdefghiz", rng.randrange(6))
    return args, {name: object() for name in names}


def valid_call(function: Any, rng: random.Random, skip: int) -> tuple[Any, dict[str, Any]]:
    """A call that `function` accepts, without its first `skip` parameters."""
    code = function.__code__
    names = code.co_varnames[skip : code.co_argcount]
    n = rng.randrange(max(code.co_posonlyargcount - skip, 0), len(names) + 1)
    keywords = [*names[n:], *code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]]
    rng.shuffle(keywords)
    return tuple(object() for _ in range(n)), {name: object() for name in keywords}


def compare(rng: random.Random, function: Any, compiled: Any, plain: Any, skip: int) -> None:
    """`compiled` has a door to `function`; `plain` is called with the same arguments uncompiled.
    With `skip` parameters bound already."""
    before, accepted = hits(function), 0
    for i in range(40):
        args, kwargs = make_call(rng) if i % 3 else valid_call(function, rng, skip)
        expected = outcome(plain, *args, **kwargs)
        assert outcome(compiled, *args, **kwargs) == expected, (args, kwargs)
        accepted += expected[:1] != (TypeError,)
    assert accepted > 10
    assert hits(function) - before == accepted


@pytest.mark.parametrize("seed", range(30))
def test_functions(strictly_enabled: None, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    function = make_function(rng, tmp_path / f"function_{seed}.py")
    args, kwargs = valid_call(function, rng, 0)
    compare(rng, function, opened(function, *args, **kwargs), function, 0)


@pytest.mark.parametrize("seed", range(15))
def test_bound_methods(strictly_enabled: None, tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    function = make_function(rng, tmp_path / f"method_{seed}.py", "self")
    method = type("Owner", (), {"method": function})().method
    args, kwargs = valid_call(function, rng, 1)
    compiled = doors_only(torch.compile(method, backend="eager"), function, *args, **kwargs)
    compare(rng, function, compiled, method, 1)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_modules(strictly_enabled: None, tmp_path: Path, seed: int, in_place: bool) -> None:
    """`OptimizedModule` gets its keywords as a dict, `module.compile()` as names."""
    rng = random.Random(200 + seed)
    function = make_function(rng, tmp_path / f"forward_{seed}_{in_place}.py", "self")
    kind = type("Owner", (torch.nn.Module,), {"forward": function})
    plain, module = kind(), kind()
    compiled: Any = module
    if in_place:
        module.compile(backend="eager")
    else:
        compiled = torch.compile(module, backend="eager")
    args, kwargs = valid_call(function, rng, 1)
    doors_only(compiled, function, *args, **kwargs)

    def call_plain(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        return (module, *result[1:])

    compare(rng, function, compiled, call_plain, 1)


# ---- keywords ----


class Name(str):
    __slots__ = ()


class Odd(str):
    """Equal to nothing, whatever its text says."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return False


def keyword_calls() -> Iterator[dict[Any, Any]]:
    yield {"a": 1}
    yield {"".join(["lo", "ng_name"]): 1}  # equal to the parameter's name, not identical
    yield {Name("a"): 1}
    yield {Name("z"): 1}
    yield {Odd("a"): 1}
    yield {"a": 1, Odd("a"): 2}
    yield {"\udc80": 1}
    yield {"": 1}
    yield {3: 1}
    yield {None: 1}
    yield {"self": 1, "args": 2, "kwargs": 3, "fn": 4, "callback": 5}


def expected_texts(value: Any) -> Any:
    """Exact, also in the keys' types."""
    if isinstance(value, dict):
        return [(type(k), str(k), v) for k, v in value.items()]
    if isinstance(value, tuple):
        return tuple(expected_texts(v) for v in value)
    return value


def keyword_outcomes(call: Callable[..., Any]) -> list[Any]:
    results: list[Any] = []
    for kwargs, args in itertools.product(keyword_calls(), ((), (0,))):
        try:
            results.append(expected_texts(call(*args, **kwargs)))
        except Exception as error:
            results.append((type(error), str(error)))
    return results


@pytest.mark.parametrize("through", ["function", "module", "partial", "method-wrapper"])
def test_odd_keywords(fresh: None, through: str) -> None:
    """Compared with stock, since a wrapper's `**kwargs` normalises some of them."""

    def f(a: Any = 0, long_name: Any = 0, **more: Any) -> Any:
        return (a, long_name, more)

    class M(torch.nn.Module):
        def forward(self, a: Any = 0, long_name: Any = 0, **more: Any) -> Any:
            return (a, long_name, more)

    def run() -> list[Any]:
        torch._dynamo.reset()
        compiled: Any = torch.compile(M() if through == "module" else f, backend="eager")
        for _ in range(4):
            compiled(1)
        assert _frame.has_door(compiled) == trident.is_enabled()
        if through == "partial":
            compiled = functools.partial(compiled)
        if through == "method-wrapper":
            compiled = compiled.__call__
        return keyword_outcomes(compiled)

    expected = run()
    with trident.enable():
        assert run() == expected


def test_extra_dicts_and_tuples_are_the_calls_own(strictly_enabled: None) -> None:
    def f(*rest: Any, **more: Any) -> Any:
        return (rest, more)

    compiled = opened(f, 1, z=2)
    given = {"z": [3]}
    first, second = compiled(1, **given), compiled(1, **given)
    assert first == second == ((1,), given)
    assert first[1] is not second[1]
    assert first[1] is not given
    assert first[1]["z"] is given["z"]
    first[1]["z2"] = 1
    assert compiled(1, **given) == second
    assert compiled() == ((), {})
    assert hits(f) >= 5


def test_positional_only_names_in_keywords(strictly_enabled: None) -> None:
    def f(a: Any, /, **more: Any) -> Any:
        return (a, more)

    def g(a: Any = 0, /, b: Any = 1) -> Any:
        return (a, b)

    compiled = opened(f, 1)
    assert compiled(1, a=2) == (1, {"a": 2})
    assert outcome(compiled, a=2) == outcome(f, a=2)
    other = opened(g)
    assert outcome(other, a=2) == outcome(g, a=2)
    assert other(b=3) == (0, 3)


# ---- defaults ----


def test_defaults_replaced_in_every_way(strictly_enabled: None) -> None:
    def f(a: Any, b: Any = "b", *, c: Any = "c", d: Any = "d") -> Any:
        return (a, b, c, d)

    compiled = opened(f, 1)
    choices: list[tuple[Any, Any]] = list(
        itertools.product(
            [None, (), ("B",), ("A", "B"), ("too", "A", "B"), (None,)],
            [None, {}, {"c": 1}, {"c": 1, "d": 2}, {"c": 1, "d": 2, "e": 3}, {Name("c"): 1, 5: 6}],
        )
    )
    before, accepted = hits(f), 0
    for defaults, kwdefaults in choices:
        f.__defaults__, f.__kwdefaults__ = defaults, kwdefaults
        for args, kwargs in (((), {}), ((1,), {}), ((1, 2), {}), ((1,), {"d": 4}), ((1, 2, 3), {})):
            expected = outcome(f, *args, **kwargs)
            assert outcome(compiled, *args, **kwargs) == expected
            accepted += expected[0] is not TypeError
    assert accepted == 40
    assert hits(f) - before == accepted


def test_keyword_default_deleted_while_another_remains(strictly_enabled: None) -> None:
    def f(*, c: Any = "c", d: Any = "d") -> Any:
        return (c, d)

    compiled = opened(f)
    defaults = f.__kwdefaults__
    assert defaults is not None
    for change in ("pop", "set", "clear"):
        if change == "pop":
            del defaults["c"]
        elif change == "set":
            defaults["c"] = [change]
        else:
            defaults.clear()
        for kwargs in ({}, {"c": 1}, {"d": 1}, {"c": 1, "d": 2}):
            assert outcome(compiled, **kwargs) == outcome(f, **kwargs)


def test_a_default_that_dies_with_the_call(strictly_enabled: None) -> None:
    """The function's defaults are replaced by the value's own finalizer."""

    class Last:
        def __del__(self) -> None:
            f.__defaults__ = (None,)

    def f(a: Any = None) -> Any:
        return (a, a)

    compiled = opened(f)
    for _ in range(100):
        f.__defaults__ = (Last(),)
        result = compiled()
        f.__defaults__ = ("next",)
        assert type(result[0]) is Last
        del result
        assert f.__defaults__ == (None,)


# ---- closures ----


def test_cells_rebound_emptied_and_shared(strictly_enabled: None) -> None:
    x: Any = "x"
    y: Any = "y"

    def f(a: Any) -> Any:
        return (a, x, y)

    def empty() -> None:
        nonlocal y
        del y

    compiled = opened(f, 0)
    before = hits(f)
    for value in (1, None, [2], compiled, f, X):
        x = value
        result = compiled(3)
        assert result[0] == 3
        assert result[1] is value
    assert hits(f) - before == 6
    empty()
    for _ in range(3):
        expected = outcome(f, 0)
        assert expected[0] is NameError
        assert outcome(compiled, 0) == expected
    y = compiled
    assert compiled(0) == (0, X, compiled)


def test_an_argument_that_an_inner_function_captures(strictly_enabled: None) -> None:
    def f(a: Any, b: Any = 2) -> Any:
        def inner() -> Any:
            return b

        return inner if a else (a, b)

    compiled = torch.compile(f, backend="eager")
    for _ in range(5):
        assert compiled(0) == (0, 2)
        assert compiled(0, b=5) == (0, 5)
        assert compiled(1, b=7)() == 7


def test_one_wrapper_per_closure(strictly_enabled: None) -> None:
    """Functions of one code object share the SCM, and nothing else."""

    def make(value: Any, default: Any) -> Any:
        def shared(a: Any, b: Any = default) -> Any:
            return (a, b, value)

        return shared

    functions = [make(object(), object()) for _ in range(20)]
    compiled = [torch.compile(f, backend="eager") for f in functions]
    for g in compiled:
        open_door(g, 0)
    _frame.unhook(functions[0].__code__)
    before = hits(functions[0])
    for f, g in zip(functions, compiled, strict=True):
        assert g(1) == f(1)
        assert g(1, 2) == f(1, 2)
    assert hits(functions[0]) - before == 40


# ---- what the function is, changes ----


def replacements() -> Iterator[Any]:
    value = object()

    def longer(a: Any, b: Any = 1, c: Any = 2, *, d: Any = 3) -> Any:
        e = (a, b)
        return (e, c, d)

    def closed(a: Any) -> Any:
        return (a, value)

    yield lambda: None
    yield lambda a: (a, "other")
    yield lambda *a, **k: (a, k)
    yield longer
    yield closed


def test_code_replaced(strictly_enabled: None) -> None:
    def f(a: Any, b: Any = 1) -> Any:
        return (a, b)

    original = f.__code__
    compiled = opened(f, 0)
    for other in replacements():
        if other.__closure__:
            with pytest.raises(ValueError, match="free vars"):
                f.__code__ = other.__code__
            continue
        f.__code__ = other.__code__
        for _ in range(6):
            for args in ((), (1,), (1, 2), (1, 2, 3)):
                assert outcome(compiled, *args) == outcome(f, *args)
        f.__code__ = original
        for _ in range(6):
            assert compiled(5) == (5, 1)
            assert outcome(compiled) == outcome(f)


def test_bound_method_of_a_changed_owner(strictly_enabled: None) -> None:
    class A:
        def method(self, x: Any) -> Any:
            return (type(self).__name__, x, self)

        def plain(self, x: Any) -> Any:
            return (self, x)

    class B(A):
        def plain(self, x: Any) -> Any:
            return ("B", x)

    a = A()
    compiled = opened(a.plain, 1)
    bound = compiled.__wrapped__
    a.__class__ = B
    assert compiled(1) == (a, 1)  # as bound, whatever the class says now
    A.plain = A.method  # type: ignore[method-assign]
    assert compiled(1) == (a, 1)
    bound.__func__.__code__ = (lambda self, x: "new").__code__
    assert compiled(1) == "new"
