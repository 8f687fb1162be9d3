"""What guards fetched is handed to the plan, and free variables are stored: all is as in stock.

A scenario gets what compiles a function (or nothing, for eager), and returns what is compared.
Those of `FETCHED` replace what guards fetch between calls, or in them; those of `CELLS` have
``nonlocal`` statements. With each is how many of its calls are native.
"""

from __future__ import annotations

import collections
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.conftest import compilations, outcome, reset_compilations
from tests.host_checks import hits
from tests.test_dispatch_lifetime import assert_flat
from tests.test_equality import assert_same

Compile = Callable[[Any], Any]
Scenario = Callable[[Compile], Any]


def t(n: int = 3, times: float = 1) -> torch.Tensor:
    return torch.arange(1.0, n + 1) * times


class Thing:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


FETCHED: dict[str, tuple[Scenario, int]] = {}
CELLS: dict[str, tuple[Scenario, int]] = {}
# Stock itself differs from eager there.
NOT_AS_EAGER: set[str] = set()


def scenario(table: dict[str, tuple[Scenario, int]], native: int, as_eager: bool = True) -> Any:
    def add(f: Scenario) -> Scenario:
        table[f.__name__] = f, native
        if not as_eager:
            NOT_AS_EAGER.add(f.__name__)
        return f

    return add


# torch 2.11's shortcut by dict tags may skip a check of aliases that fails; ours is never skipped.
@torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False)
def run(name: str, f: Scenario, native: int) -> None:
    expected = f(lambda g: g)
    reset_compilations()
    by_stock = f(lambda g: torch.compile(g, backend="eager"))
    compiled = compilations()
    torch._dynamo.reset()
    reset_compilations()
    with trident.enable():
        found = f(lambda g: torch.compile(g, backend="trident"))
        assert_same(found, by_stock)
        assert compilations() == compiled
        if name not in NOT_AS_EAGER:
            assert_same(found, expected)
        stats = trident.stats()
        assert stats.hits + stats.raised == native, stats


class Parts(torch.nn.Module):
    """A parameter, a buffer, one module under two names, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(t())
        self.register_buffer("b", t())
        self.first = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(self.first.weight, 0.5)
        torch.nn.init.constant_(self.first.bias, 1)
        self.second = self.first
        self.tied = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x * self.w + self.b)) @ self.tied


@scenario(FETCHED, 21)
def parts_of_modules(compile_: Compile) -> Any:
    module = Parts()
    g = compile_(module)
    found = [g(t()) for _ in range(4)]

    def again() -> None:
        found.extend(g(t()) for _ in range(3))

    module.w = torch.nn.Parameter(t(times=2))
    again()
    module.b = t(times=3)
    again()
    module.w.data = t(times=5)
    again()
    module.first.weight = torch.nn.Parameter(torch.ones(3, 3))  # not tied any more
    again()
    module.second = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(module.second.weight, 0.25)
    torch.nn.init.constant_(module.second.bias, 2)
    again()
    module._parameters["w"] = torch.nn.Parameter(t(times=7))
    again()
    module.w.requires_grad_(False)
    again()
    del module.w
    found.append(outcome(g, t())[0])
    module.w = t()
    again()
    return found


@scenario(FETCHED, 8)
def hooks_that_replace(compile_: Compile) -> Any:
    """A forward pre-hook, which is no part of the frame, gives the module another parameter."""
    module = Parts()
    count = []

    def replace(module: Any, _: Any) -> None:
        count.append(1)
        module.w = torch.nn.Parameter(t(times=len(count)))

    inner = torch.nn.Sequential(module)
    g = compile_(module.forward)
    inner[0].forward = g
    module.register_forward_pre_hook(replace)
    return [inner(t()) for _ in range(9)]


@scenario(FETCHED, 20)
def items(compile_: Compile) -> Any:
    list_, tuple_ = [t(), t(times=2)], (t(), [t()])
    dict_: dict[Any, Any] = {"a": t(), 1: t(times=3), (2, 3): t(times=4), None: t()}
    named = collections.namedtuple("named", "x y")(t(), t(times=9))
    ordered = collections.OrderedDict(a=t(), b=t())
    default: Any = collections.defaultdict(t, a=t())

    def f(x: Any, l: Any, d: Any, p: Any, n: Any, o: Any, e: Any) -> Any:  # noqa: E741
        y = x + l[0] * l[-1] + d["a"] * d[1] + d[(2, 3)] + p[0] + p[1][0] + n.x + n.y
        return y + o["a"] + o["b"] + e["a"] + d[None]

    g, found = compile_(f), []

    def again(n: int = 2) -> None:
        found.extend(g(t(), list_, dict_, tuple_, named, ordered, default) for _ in range(n))

    again(4)
    list_[0] = t(times=10)
    again()
    list_[1] = list_[0]
    again()
    dict_["a"] = t(times=11)
    again()
    dict_[1] = t(times=12)
    again()
    dict_[2, 3] = t(times=13)
    again()
    tuple_[1][0] = t(times=14)
    again()
    ordered["a"] = t(times=15)
    ordered.move_to_end("a")
    again()
    default["a"] = t(times=15)
    again()
    named = named._replace(x=t(times=16))
    again()
    return found


class WithSlots:
    __slots__ = ("x", "y")


@scenario(FETCHED, 7)
def slots(compile_: Compile) -> Any:
    thing = WithSlots()
    thing.x, thing.y = t(), [t()]

    def f(x: Any, thing: Any) -> Any:
        return x + thing.x + thing.y[0]

    g = compile_(f)
    found = [g(t(), thing) for _ in range(4)]
    thing.x = t(times=3)
    found += [g(t(), thing) for _ in range(2)]
    thing.y = [t(times=7)]
    found += [g(t(), thing) for _ in range(2)]
    del thing.x
    return [*found, outcome(g, t(), thing)[0]]


class Doubled(dict[Any, Any]):
    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self, key) * 2


@scenario(FETCHED, 0)
def subclass_of_dict(compile_: Compile) -> Any:
    g = compile_(lambda x, d: x + d["a"])
    return [g(t(), Doubled(a=t(times=i))) for i in range(4)]


class WithGetattr(torch.nn.Module):
    """`__getattr__` of its own, and a property with the name that a parameter could have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(self.inner.bias, 1)
        self._w = torch.nn.Parameter(t())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    @property
    def w(self) -> Any:
        return self._parameters["_w"] * 2

    def forward(self, x: Any) -> Any:
        return x * self.w + self.bias


@scenario(FETCHED, 7)
def own_getattr(compile_: Compile) -> Any:
    module = WithGetattr()
    g = compile_(module)
    found = [g(t()) for _ in range(4)]
    module.inner.bias = torch.nn.Parameter(t())
    found += [g(t()) for _ in range(2)]
    module._w = torch.nn.Parameter(t(times=5))
    return found + [g(t()) for _ in range(2)]


@scenario(FETCHED, 6, as_eager=False)
def class_attributes_that_hide(compile_: Compile) -> Any:
    """Dynamo looks into the module's `_parameters`: a property of that name comes too late."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(t())

        def forward(self, x: Any) -> Any:
            return x * self.w

    g = compile_(Module())
    found = [g(t()) for _ in range(4)]
    Module.w = property(lambda self: t(times=100))
    return found + [g(t()) for _ in range(3)]


@scenario(FETCHED, 5)
def replaced_in_the_call(compile_: Compile) -> Any:
    """The graph takes the old values; what is returned and stored are the new ones."""
    thing = Thing(x=t(), l=[t()], d={"a": t()})

    def f(x: Any, thing: Any) -> Any:
        y = thing.x + thing.l[0] + thing.d["a"] + x
        thing.x = thing.x + 1
        thing.l[0] = thing.l[0] * 2
        thing.d["a"] = thing.x - 1
        return y, thing.x, thing.l[0], thing.d

    g, found = compile_(f), []
    for _ in range(6):
        y, x, item, d = g(t(), thing)
        found.append((y, x, item, dict(d), x is thing.x, d is thing.d, item is thing.l[0]))
    return found


@scenario(FETCHED, 5)
def swapped_in_the_call(compile_: Compile) -> Any:
    thing = Thing(x=t(), y=t(times=2))

    def f(x: Any, thing: Any) -> Any:
        thing.x, thing.y = thing.y, thing.x
        return x + thing.x, thing.x, thing.y

    g = compile_(f)
    return [(*g(t(), thing), thing.x, thing.y) for _ in range(6)]


class Running(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", t())
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x: Any) -> Any:
        old = self.b
        self.b = self.b + 1
        return self.norm(x.view(1, 3).expand(2, 3)) + self.b + old, old


@scenario(FETCHED, 5)
def buffers_replaced_in_the_call(compile_: Compile) -> Any:
    module = Running()
    g, found = compile_(module), []
    for _ in range(6):
        y, old = g(t())
        found.append((y, old, module.b, module.norm.num_batches_tracked.clone()))
    return found


GLOBAL: Any = t()
GLOBAL_LIST: Any = [t()]


@scenario(FETCHED, 8)
def globals_replaced(compile_: Compile) -> Any:
    names = globals()
    names.update(GLOBAL=t(), GLOBAL_LIST=[t()])
    g = compile_(lambda x: x + GLOBAL + GLOBAL_LIST[0])
    found = [g(t()) for _ in range(4)]
    names["GLOBAL"] = t(times=2)
    found += [g(t()) for _ in range(2)]
    names["GLOBAL_LIST"] = [t(times=5)]
    found += [g(t()) for _ in range(2)]
    names["GLOBAL_LIST"][0] = names["GLOBAL"]
    found += [g(t()) for _ in range(2)]
    del names["GLOBAL"]
    found += [outcome(g, t())[0]]
    names["GLOBAL"] = t()
    return found


@scenario(FETCHED, 5)
def globals_stored(compile_: Compile) -> Any:
    globals()["GLOBAL"] = t()

    def f(x: Any) -> Any:
        global GLOBAL
        old = GLOBAL
        GLOBAL = GLOBAL + x
        return old, GLOBAL

    g = compile_(f)
    return [(*g(t()), GLOBAL) for _ in range(6)]


@scenario(FETCHED, 10)
def free_variables_replaced(compile_: Compile) -> Any:
    w, list_, module = t(), [t()], Parts()
    g = compile_(lambda x: module(x + w + list_[0]))  # noqa: F821 (it is deleted at the end)
    found = [g(t()) for _ in range(4)]
    w = t(times=2)
    found += [g(t()) for _ in range(2)]
    list_[0] = w
    found += [g(t()) for _ in range(2)]
    list_ = [t(times=9)]
    found += [g(t()) for _ in range(2)]
    module = Parts()
    found += [g(t()) for _ in range(2)]
    del w
    return [*found, outcome(g, t())]


def test_sizes_do_not_end_it(enabled: None) -> None:
    """A size is read before the parameters, and runs no Python: these come from the guards."""
    linear = torch.nn.Linear(3, 3)
    g = torch.compile(lambda x: linear(x * x.shape[0]), backend="trident", dynamic=True)
    for n in (4, 5, 7):
        x = torch.randn(n, 3)
        assert_same(g(x), linear(x * n))
    (frame,) = trident.explain(g, ir=True).frames
    (spec,) = frame.specializations
    assert spec.plan_native
    assert "get_attr" not in spec.ir["scm"].split("scm.pass")[1]


@pytest.mark.parametrize("name", FETCHED)
def test_fetched(fresh: None, name: str) -> None:
    run(name, *FETCHED[name])


def test_replaced_by_another_thread(enabled: None) -> None:
    """Each call sees one of the parameters as a whole."""
    module = torch.nn.Linear(3, 3, bias=False)
    g = torch.compile(lambda x: module(x), backend="trident")
    for _ in range(3):
        g(t())
    parameters = [torch.nn.Parameter(torch.full((3, 3), float(k))) for k in (1, 2, 3)]
    module.weight = parameters[0]
    stop = threading.Event()

    def replace() -> None:
        k = 0
        while not stop.is_set():
            module.weight = parameters[k % 3]
            k += 1

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        sums = {tuple(g(t()).tolist()) for _ in range(2000)}
    finally:
        stop.set()
        thread.join()
    assert sums <= {(6.0,) * 3, (12.0,) * 3, (18.0,) * 3}
    assert trident.stats().hits >= 2000


# ---- nonlocal ----


@scenario(CELLS, 5)
def counter(compile_: Compile) -> Any:
    n = 0

    def f(x: Any) -> Any:
        nonlocal n
        n = n + 1
        return x + 1

    g = compile_(f)
    return [(g(t()), n) for _ in range(7)]


@scenario(CELLS, 6)
def counter_in_use(compile_: Compile) -> Any:
    n = 0

    def f(x: Any) -> Any:
        nonlocal n
        n += 1
        return x * n

    g = compile_(f)
    return [(g(t()), n) for _ in range(8)]


@scenario(CELLS, 1)
def counter_beyond_64_bits(compile_: Compile) -> Any:
    """Then Dynamo compiles again, or Python computes."""
    n = 2**63 - 4

    def f(x: Any) -> Any:
        nonlocal n
        n += 1
        return x + 1

    g = compile_(f)
    return [(g(t()), n) for _ in range(8)]


@scenario(CELLS, 6)
def tensor_and_what_it_was(compile_: Compile) -> Any:
    """The old value had no other owner."""
    s = t()

    def f(x: Any) -> Any:
        nonlocal s
        old = s
        s = s * 2 + x
        return old, s, x + 1

    g, found = compile_(f), []
    for _ in range(7):
        old, new, y = g(t())
        found.append((old, new, y, new is s))
    return found


@scenario(CELLS, 6)
def old_value_alone(compile_: Compile) -> Any:
    s = t()

    def f(x: Any) -> Any:
        nonlocal s
        old = s
        s = x * 2
        return old

    g = compile_(f)
    return [g(t(times=i)) for i in range(7)]


@scenario(CELLS, 6)
def several_cells(compile_: Compile) -> Any:
    a, b, c, d, e = t(), t(times=2), None, None, None

    def f(x: Any) -> Any:
        nonlocal a, b, c, d, e
        a, b = b, a
        c, d, e = (a + x, b), "done", {"k": x * 2, "s": x.shape}
        return a * b

    g = compile_(f)
    return [(g(t()), a, b, c, d, e) for _ in range(7)]


@scenario(CELLS, 5)
def an_argument(compile_: Compile) -> Any:
    a = None

    def f(x: Any) -> Any:
        nonlocal a
        a = x
        return x + 1

    g, found = compile_(f), []
    for _ in range(6):
        x = t()
        found.append((g(x), a is x))
    return found


@scenario(CELLS, 8)
def shared_by_two_closures(compile_: Compile) -> Any:
    a = t()

    def f(x: Any) -> Any:
        nonlocal a
        a = a + x
        return a * 1

    def g(x: Any) -> Any:
        nonlocal a
        a = a * 2
        return a + x

    first, second = compile_(f), compile_(g)
    return [(first(t()), a, second(t()), a) for _ in range(5)]


def make(n: int) -> Any:
    s = t(times=n)

    def f(x: Any) -> Any:
        nonlocal s
        s = s + x
        return s * 2

    return f, lambda: s


@scenario(CELLS, 11)
def many_functions_of_one_code(compile_: Compile) -> Any:
    made = [(compile_(f), get) for f, get in map(make, range(3))]
    return [(g(t()), get()) for _ in range(4) for g, get in made]


@scenario(CELLS, 15)
def made_and_dropped(compile_: Compile) -> Any:
    found = []
    for n in range(8):
        f, get = make(n)
        g = compile_(f)
        found.append((g(t()), get(), g(t()), get()))
    return found


@scenario(CELLS, 11)
def made_in_a_generator(compile_: Compile) -> Any:
    def generate() -> Any:
        for n in range(6):
            s = t(times=n)

            def f(x: Any) -> Any:
                nonlocal s
                s = s + x
                return s

            yield compile_(f)(t()), s
            yield compile_(f)(t()), s

    return list(generate())


@scenario(CELLS, 5, as_eager=False)
def error_in_the_graph(compile_: Compile) -> Any:
    """Then nothing is stored; eager has stored what came before."""
    s, n = t(), 0

    def f(x: Any, i: Any) -> Any:
        nonlocal s, n
        n += 1
        s = x[i]
        return s + 1

    g = compile_(f)
    return [(outcome(g, t(), torch.tensor([k])), s, n) for k in (0, 1, 2, 9, 1, 9, 2)]


@scenario(CELLS, 5)
def empty_cell_is_filled(compile_: Compile) -> Any:
    s = t()

    def f(x: Any) -> Any:
        nonlocal s
        s = x * 2
        return x + 1

    g, found = compile_(f), []
    for i in range(6):
        if i > 2:
            del s
        found.append((g(t(times=i)), s))
    return found


@scenario(CELLS, 5)
def set_from_outside(compile_: Compile) -> Any:
    n = t()

    def f(x: Any) -> Any:
        nonlocal n
        n = n + x
        return x * 2

    g, found = compile_(f), []
    for i in range(6):
        f.__closure__[0].cell_contents = t(times=i)  # type: ignore[index]
        found.append((g(t()), n))
    return found


@scenario(CELLS, 4, as_eager=False)
def destructors_look(compile_: Compile) -> Any:
    """At both cells, when the old values are dropped."""
    log: list[Any] = []
    s, b = t(), t()

    @torch._dynamo.disable
    def look(name: str) -> None:
        log.append((name, s.tolist(), b.tolist()))

    def f(x: Any) -> Any:
        nonlocal s, b
        s = x * 2
        b = x * 3
        return x + 1

    g = compile_(f)
    for i in range(5):
        s, b = t(times=i), t(times=-i)
        for name, value in (("s", s), ("b", b)):
            weakref.finalize(value, look, name)
        del value
        g(t(times=i))
        log.append("returned")
    return log


@scenario(CELLS, 4, as_eager=False)
def destructor_stores(compile_: Compile) -> Any:
    log: list[Any] = []
    s = t()

    @torch._dynamo.disable
    def store() -> None:
        nonlocal s
        log.append(s.tolist())
        s = t(times=1000)

    def f(x: Any) -> Any:
        nonlocal s
        s = x * 2
        return x + 1, s

    g, found = compile_(f), []
    for i in range(5):
        s = t(times=i)
        weakref.finalize(s, store)
        found.append((g(t(times=i)), s))
    return found, log


class Raises:
    def __del__(self) -> None:
        raise ValueError("from the destructor")


def destructor_raises(compile_: Compile) -> Any:
    s: Any = None
    seen: list[str] = []

    def f(x: Any) -> Any:
        nonlocal s
        s = x * 2
        return x + 1

    g, found = compile_(f), []
    before, sys.unraisablehook = sys.unraisablehook, lambda u: seen.append(str(u.exc_value))
    try:
        for _ in range(5):
            s = Raises()
            found.append((g(t()), s))
    finally:
        sys.unraisablehook = before
    return found, seen


def test_destructor_raises(fresh: None) -> None:
    expected = destructor_raises(lambda g: g)
    with trident.enable():
        found = destructor_raises(lambda g: torch.compile(g, backend="trident"))
        assert_same(found, expected)
        assert hits("f")[0] == 4


@pytest.mark.parametrize("name", CELLS)
def test_cells(fresh: None, name: str) -> None:
    run(name, *CELLS[name])


def destructors_of(kind: str, compile_: Compile) -> Any:
    log: list[Any] = []
    thing, list_ = Thing(x=t(), y=t()), [t(), t()]

    @torch._dynamo.disable
    def look(name: str) -> None:
        log.append((name, thing.x.tolist(), thing.y.tolist(), list_[0].tolist(), list_[1].tolist()))

    def attributes(x: Any, thing: Any, list_: Any) -> Any:
        thing.x = thing.x * 2
        thing.y = thing.y * 3
        return x + 1

    def items(x: Any, thing: Any, list_: Any) -> Any:
        list_[0] = list_[0] * 2
        list_[1] = list_[1] * 3
        return x + 1

    g = compile_({"attributes": attributes, "items": items}[kind])
    for i in range(5):
        thing.x, thing.y, list_[0], list_[1] = t(times=i), t(times=-i), t(times=i), t(times=-i)
        values = (thing.x, thing.y) if kind == "attributes" else list_
        for name, value in zip("ab", values, strict=True):
            weakref.finalize(value, look, name)
        del value, values
        g(t(), thing, list_)
        log.append("returned")
    return log[-3:]


@pytest.mark.parametrize("kind", ["attributes", "items"])
def test_destructors_of_what_was_replaced(fresh: None, kind: str) -> None:
    expected = destructors_of(kind, lambda g: torch.compile(g, backend="eager"))
    torch._dynamo.reset()
    with trident.enable():
        found = destructors_of(kind, lambda g: torch.compile(g, backend="trident"))
        assert hits(kind)[0] == 4
        assert found == expected


def property_added_later(compile_: Compile) -> Any:
    class Thing2(Thing):
        pass

    calls: list[int] = []

    def get(self: Any) -> Any:
        calls.append(1)
        return t(times=100)

    thing = Thing2(x=t())

    def f(x: Any, thing: Any) -> Any:
        return x + thing.x

    g = compile_(f)
    found = [g(t(), thing) for _ in range(4)]
    Thing2.x = property(get)  # type: ignore[attr-defined]
    return found + [g(t(), thing) for _ in range(3)], len(calls) > 0


def test_property_added_later(fresh: None) -> None:
    """The guard of the attribute passes: both get what the property gives."""
    expected = property_added_later(lambda g: g)
    assert_same(property_added_later(lambda g: torch.compile(g, backend="eager")), expected)
    torch._dynamo.reset()
    with trident.enable():
        found = property_added_later(lambda g: torch.compile(g, backend="trident"))
        assert_same(found, expected)


def test_property_added_later_is_compiled(fresh: None) -> None:
    """In stock, Dynamo's callback is active where its code gets the property."""
    reset_compilations()
    property_added_later(lambda g: torch.compile(g, backend="eager"))
    compiled = compilations()
    torch._dynamo.reset()
    reset_compilations()
    with trident.enable():
        property_added_later(lambda g: torch.compile(g, backend="trident"))
    assert compilations() == compiled


# ---- memory ----


def of_a_cell() -> tuple[Any, list[Any]]:
    cell = t()

    def f(x: Any) -> Any:
        nonlocal cell
        old = cell
        cell = x * 2
        return old, x + 1

    return f, [t()]


def of_an_object() -> tuple[Any, list[Any]]:
    def f(x: Any, thing: Any) -> Any:
        thing.x = x + thing.x * 0
        thing.l[0] = thing.x + 1
        thing.d["k"] = x
        return thing.x + thing.l[1]

    return f, [t(), Thing(x=t(), l=[t(), t()], d={"k": t()})]


def of_a_module() -> tuple[Any, list[Any]]:
    module = Parts()

    def f(x: Any) -> Any:
        return module(x)

    return f, [t()]


@pytest.mark.parametrize("kind", [of_a_cell, of_an_object, of_a_module])
def test_memory_is_flat(enabled: None, kind: Any) -> None:
    f, arguments = kind()
    g = torch.compile(f, backend="trident")
    for _ in range(3):
        g(*arguments)
    before = hits("f")[0]
    assert_flat(lambda: g(*arguments), 20_000, *arguments)
    assert hits("f")[0] - before >= 20_000
