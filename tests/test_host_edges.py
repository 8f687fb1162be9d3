"""Edges of host programs: floats that are inputs, numbers converted beforehand, graphs that
Dynamo's code calls, and when plans drop what they own. All is as in stock, bit for bit.

A scenario gets what compiles a function, and returns what is compared.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import trident
from tests.conftest import compilations, outcome, reset_compilations
from tests.states import registry
from tests.test_dispatch_lifetime import assert_flat
from tests.test_equality import assert_same

Compile = Callable[[Any], Any]
Scenario = Callable[[Compile], Any]


def same_as_stock(scenario: Scenario, *, at_least: int = 0, dynamic: Any = None) -> Any:
    """`scenario` gives the same under Trident as in stock, with as many compilations; at least so
    many calls are native. Returns what it gave."""
    torch._dynamo.reset()
    reset_compilations()
    expected = scenario(lambda f: torch.compile(f, backend="eager", dynamic=dynamic))
    by_stock = compilations()
    torch._dynamo.reset()
    reset_compilations()
    trident.reset_stats()
    with trident.enable():
        found = scenario(lambda f: torch.compile(f, backend="trident", dynamic=dynamic))
        compiled = compilations()
        stats = trident.stats()
    assert_same(found, expected)
    assert compiled == by_stock
    assert stats.hits + stats.raised >= at_least, stats
    return found


# ---- floats that are inputs ----


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n = math.prod(shape)
    x = torch.arange(1, n + 1).reshape(shape) % 7
    return x.to(dtype) if not dtype.is_floating_point else ((x - 3) * 0.37).to(dtype)


FLOATS, of_floats = registry()


@of_floats
def arithmetic(x: Any, k: Any) -> Any:
    return x + k, x - k, k - x, x * k, x / k, k / x


@of_floats
def powers(x: Any, k: Any) -> Any:
    return x**k, k**x


@of_floats
def remainders(x: Any, k: Any) -> Any:
    return x // k, x % k, torch.fmod(x, k)


@of_floats
def as_alpha(x: Any, k: Any) -> Any:
    return torch.add(x, x, alpha=k), torch.sub(x, x, alpha=k)


@of_floats
def as_value_and_beta(x: Any, k: Any) -> Any:
    m = x.reshape(1, -1)
    return torch.addcmul(x, x, x, value=k), torch.addmm(m, m[:, :1], m, beta=k, alpha=k)


@of_floats
def as_bounds(x: Any, k: Any) -> Any:
    return x.clamp(min=k), x.clamp(max=k), torch.clamp(x, k, k)


@of_floats
def filled(x: Any, k: Any) -> Any:
    return x.clone().fill_(k), x.masked_fill(x > 0, k), torch.where(x > 0, x, k)


@of_floats
def made(x: Any, k: Any) -> Any:
    return torch.full((3,), k), torch.full_like(x, k), x.new_full((2,), k), torch.tensor(1.0) * k


@of_floats
def tensor_of(x: Any, k: Any) -> Any:
    return torch.tensor(k) + x, torch.as_tensor(k)


@of_floats
def in_place(x: Any, k: Any) -> Any:
    y = x.clone()
    y += k
    y *= k
    y.div_(k)
    y[0] = k
    return y.add_(y, alpha=k)


@of_floats
def compared(x: Any, k: Any) -> Any:
    return x < k, x == k, torch.isclose(x, x + 1e-6, rtol=k)


@of_floats
def returned(x: Any, k: Any) -> Any:
    return x * k, k


@of_floats
def computed(x: Any, k: Any) -> Any:
    return x * (k * 2 + 1), x + -k


@of_floats
def branched(x: Any, k: Any) -> Any:
    return x * k if k > 0 else x - k


@of_floats
def used_as_tensor_too(x: Any, k: Any) -> Any:
    return torch.tensor(k, dtype=torch.float64) + x * k, [k], {"k": k}


@of_floats
def activations(x: Any, k: Any) -> Any:
    return F.leaky_relu(x, k), F.elu(x, k), F.softplus(x, k), F.threshold(x, k, k)


@of_floats
def normed(x: Any, k: Any) -> Any:
    return F.normalize(x.reshape(1, -1), eps=k), F.layer_norm(x, x.shape, eps=k)


@of_floats
def distances(x: Any, k: Any) -> Any:
    return torch.dist(x, x + 1, p=k), torch.norm(x, p=k), torch.cdist(x[None], x[None] + 1, p=k)


@of_floats
def lerped(x: Any, k: Any) -> Any:
    return torch.lerp(x, x + 1, k), torch.nan_to_num(x / 0, nan=k, posinf=k)


@of_floats
def random(x: Any, k: Any) -> Any:
    torch.manual_seed(1)
    return F.dropout(x, k), x.clone().normal_(k, 1), x.clone().uniform_(-k, k)


@of_floats
def counted(x: Any, k: Any) -> Any:
    return torch.arange(0, k), torch.linspace(0, k, 4), torch.histc(x, 3, min=-k, max=k)


NUMBERS_GIVEN = [1.5, 2.5, 3, math.nan, 5e-324, np.float64(1.25), 0.1]


@pytest.mark.parametrize("name", FLOATS)
def test_floats(fresh: None, name: str) -> None:
    """Odd floats, and what is no float, between ordinary ones."""
    f = FLOATS[name]

    def scenario(compile_: Compile) -> Any:
        g = compile_(f)
        return [outcome(g, t(6), k) for k in NUMBERS_GIVEN]

    same_as_stock(scenario)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str
)
def test_floats_and_dtypes(fresh: None, dtype: torch.dtype) -> None:
    def f(x: Any, k: Any) -> Any:
        return x * k, x + k, x / k, k - x

    def scenario(compile_: Compile) -> Any:
        g = compile_(f)
        return [outcome(g, t(5, dtype=dtype), k) for k in (1.5, 2.5, 0.1, 1e30, 1e-5)]

    same_as_stock(scenario, at_least=2 if dtype.is_floating_point else 0)


def branches_on_it(x: Any, k: Any) -> Any:
    return x * k if k == 0 else x + k


def specialized_by_operator(x: Any, k: Any) -> Any:
    return torch.nan_to_num(x / 0, posinf=k)


@pytest.mark.parametrize("f", [branches_on_it, specialized_by_operator])
def test_negative_zero(fresh: None, f: Any) -> None:
    """The guard is ``k == 0.0``, which -0.0 passes, and stock's graph takes the item."""

    def scenario(compile_: Compile) -> Any:
        g = compile_(f)
        return [g(t(3).abs(), k) for k in (1.5, 2.5, 0.0, -0.0, 0.0, -0.0)]

    same_as_stock(scenario)


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "layer_norm": (lambda: torch.nn.LayerNorm(6), "eps"),
    "dropout": (lambda: torch.nn.Dropout(0.3), "p"),
    "group_norm": (lambda: torch.nn.GroupNorm(2, 6), "eps"),
    "batch_norm": (lambda: torch.nn.BatchNorm1d(6), "momentum"),
    "batch_norm_average": (lambda: torch.nn.BatchNorm1d(6, momentum=None), "eps"),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", MODULES)
def test_floats_of_modules(fresh: None, name: str, dynamic: Any) -> None:
    """Trained, in eval mode, and with the attribute changed."""
    make, attribute = MODULES[name]

    def scenario(compile_: Compile) -> Any:
        torch.manual_seed(0)
        module, found = make(), []
        g = compile_(module)
        for i in range(7):
            module.train(i not in (2, 3))
            if i > 3:
                setattr(module, attribute, getattr(module, attribute) * 0.9)
            x = torch.randn(4, 6, requires_grad=True)
            y = g(x)
            y.sum().backward()
            found.append((y, x.grad, list(module.buffers()), torch.get_rng_state()))
        return found

    same_as_stock(scenario, dynamic=dynamic)


ITEMS, of_items = registry()


@of_items
def negated_view(compile_: Compile) -> Any:
    """Its memory holds the number with the other sign."""
    g = compile_(lambda x, v: x * v.item())
    v = torch.imag(torch.tensor(1 + 2j, dtype=torch.complex128).conj())
    return [g(t(3), v) for _ in range(4)]


@of_items
def changed_through_an_alias(compile_: Compile) -> Any:
    """The item is taken after the graph has added 1 to it."""
    g, found = compile_(lambda base, v: (base.add_(1), base * v.item())[1]), []
    for _ in range(4):
        base = torch.arange(1.0, 4, dtype=torch.float64)
        found.append(g(base, base[0]))
    return found


@pytest.mark.parametrize("name", ITEMS)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_items_of_inputs(fresh: None, name: str) -> None:
    same_as_stock(ITEMS[name])


# ---- numbers beside CPU tensors ----

BESIDE = [0.1, 1e40, 2**24 + 1, math.nan]


def by_number(number: Any) -> Any:
    """Operators whose number may be converted, in several functions, as some raise."""

    def out_of_place(x: Any) -> Any:
        return x + number, x - number, x * number, x / number, torch.mul(number, x)

    def with_alpha(x: Any) -> Any:
        return torch.add(x, number, alpha=3), torch.sub(number, x, alpha=2)

    def in_place(x: Any) -> Any:
        y = x.clone()
        y += number
        y *= number
        return y.sub_(number).div_(number)

    return out_of_place, with_alpha, in_place


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.int64], ids=str
)
def test_numbers(fresh: None, dtype: torch.dtype) -> None:
    def scenario(compile_: Compile) -> Any:
        found = []
        for number in BESIDE:
            for f in by_number(number):
                torch._dynamo.reset()
                g = compile_(f)
                inputs = [t(7, dtype=dtype)] * 3 + [t(7, 2, dtype=dtype)[:, 0]] * 2
                found += [outcome(g, x) for x in inputs]
        return found

    same_as_stock(scenario, at_least=10)


BESIDE_IN, beside = registry()


@torch.compiler.allow_in_graph
def doubled_with_gradients(x: Any) -> Any:
    with torch.enable_grad():
        return x * 2


@beside
def saved_within_a_function_of_the_graph(compile_: Compile) -> Any:
    """Gradients are recorded where Dynamo's own graph does not show it."""
    w, found = t(3).requires_grad_(), []
    g = compile_(lambda x: doubled_with_gradients(x))
    with torch.no_grad():
        for _ in range(4):
            y = g(w)
            found.append((y, y.grad_fn._saved_other))
    return found


@beside
def saved_numbers(compile_: Compile) -> Any:
    """Autograd keeps the number, where users see it."""
    w, found = t(3).requires_grad_(), []
    g = compile_(lambda x: x * 2 * 0.1 / 3)
    for _ in range(4):
        node = g(w).grad_fn
        while hasattr(node, "_saved_other"):
            found.append(node._saved_other)
            node = node.next_functions[0][0]
    return found


@beside
def built_in_inference_mode(compile_: Compile) -> Any:
    """The second call builds what the first one compiled."""
    w, found = t(3).requires_grad_(), []
    g = compile_(lambda x: x * 2 + 0.5)
    for inference in (False, True, False, False):
        with torch.inference_mode(inference):
            y = g(w)
        if not inference:
            y.sum().backward()
        found.append((y.detach(), y.requires_grad, y.is_inference()))
    return found, w.grad


@beside
def dual_numbers(compile_: Compile) -> Any:
    """Forward-mode differentiation without functorch."""
    g = compile_(lambda x: x * 0.1 + 0.3)
    found = [(g(t(3)), None) for _ in range(3)]
    for _ in range(3):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(t(3), t(3) * 2)
            found.append(tuple(torch.autograd.forward_ad.unpack_dual(g(dual))))
    return found


@beside
def overridden_in_python(compile_: Compile) -> Any:
    """A kernel in Python gets the number as it was."""
    g, seen = compile_(lambda x: x * 0.1), []
    found = [g(t(3)) for _ in range(3)]
    library = torch.library.Library("aten", "IMPL")

    def kernel(x: Any, y: Any) -> Any:
        seen.append(y)
        return torch.add(x, x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("mul.Tensor", kernel, "CPU")
    try:
        found.append(g(t(3)))
    finally:
        library._destroy()
    return found, seen


@beside
def in_no_grad_regions(compile_: Compile) -> Any:
    def f(x: Any) -> Any:
        with torch.no_grad():
            x.mul_(0.5).add_(1)
            y = x * 2
        return y + x * 3

    w, g, found = t(3).requires_grad_(), compile_(f), []
    for _ in range(4):
        y = g(w)
        y.sum().backward()
        found.append((y, w.grad.clone(), w.detach().clone(), w._version))
    return found


@beside
def in_autocast_regions(compile_: Compile) -> Any:
    def f(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x) * 0.1, (x * 0.3) @ x

    g = compile_(f)
    return [g(t(3, 3)) for _ in range(4)]


@beside
def differentiated_twice(compile_: Compile) -> Any:
    g, found = compile_(lambda x: ((x * 2.5) ** 3 / 7).sum()), []
    for dtype in [torch.float32] * 3 + [torch.float64] * 3:
        w = t(3, dtype=dtype).requires_grad_()
        (once,) = torch.autograd.grad(g(w), w, create_graph=True)
        found.append((once, *torch.autograd.grad(once.sum(), w)))
    return found


@beside
def of_the_default_dtype(compile_: Compile) -> Any:
    g, found = compile_(lambda x, k: (x * 2 + 0.5, torch.full((2,), k), x.long() / k)), []
    try:
        for i, k in enumerate([1.5, 2.5, 3.5, 4.5] * 2):
            torch.set_default_dtype([torch.float32, torch.float64][i // 2 % 2])
            found.append(g(t(3), k))
    finally:
        torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize("name", BESIDE_IN)
def test_numbers_beside_tensors(fresh: None, name: str) -> None:
    same_as_stock(BESIDE_IN[name])


# ---- graphs that Dynamo's code calls ----

BREAKS, at_breaks = registry()


@at_breaks
def warnings_with_stacklevel(compile_: Compile) -> Any:
    def f(x: Any) -> Any:
        y = x * 2
        for level in (1, 2, 3):
            warnings.warn(f"level {level}", stacklevel=level)
        return y + 1

    g, found = compile_(f), []
    for _ in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = g(t(3))
        found.append((y, [(str(w.message), w.filename, w.lineno) for w in caught]))
    return found


@at_breaks
def logging_with_stacklevel(compile_: Compile) -> Any:
    seen = []

    class Handler(logging.Handler):
        def emit(self, record: Any) -> None:
            seen.append((record.getMessage(), record.filename, record.lineno, record.funcName))

    logger = logging.Logger("edges")
    logger.addHandler(Handler())

    def f(x: Any) -> Any:
        y = x * 2
        logger.warning("first")
        logger.warning("second", stacklevel=2)
        return y + 1

    g = compile_(f)
    return [g(t(3)) for _ in range(4)], seen


@at_breaks
def handled_exceptions(compile_: Compile) -> Any:
    events = []

    def f(x: Any, i: Any) -> Any:
        try:
            y = x * 2
            torch._dynamo.graph_break()
            z = y[i]
            torch._dynamo.graph_break()
        except IndexError as error:
            events.append(str(error))
            z = x
        finally:
            events.append("finally")
        return z + 1

    g = compile_(f)
    return [g(t(3), torch.tensor(i)) for i in (0, 1, 2, 9, 1, 9)], events


@at_breaks
def grad_mode_across_a_break(compile_: Compile) -> Any:
    def f(x: Any) -> Any:
        with torch.no_grad():
            y = x * 2
            torch._dynamo.graph_break()
            z = y * 3
        return z * x

    g, w = compile_(f), t(3).requires_grad_()
    return [g(w) for _ in range(4)], torch.is_grad_enabled()


@at_breaks
def recursion(compile_: Compile) -> Any:
    def f(x: Any, n: Any) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        return g(y + 1, n - 1) if n > 0 else y

    g = compile_(f)
    return [g(t(3), n) for n in (2, 2, 3, 3, 1, 2)]


@at_breaks
def generators(compile_: Compile) -> Any:
    def f(x: Any) -> Any:
        for i in range(3):
            yield x * i + 0.5

    g = compile_(f)
    return [list(g(t(3))) for _ in range(4)]


def broken(x: Any) -> Any:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 0.1


@at_breaks
def nested(compile_: Compile) -> Any:
    inner = compile_(lambda x: x * 2 + 1)

    def f(x: Any) -> Any:
        y = broken(x - 1)
        torch._dynamo.graph_break()
        return inner(y) / 3

    g = compile_(f)
    return [(g(t(3)), inner(t(3))) for _ in range(4)]


@at_breaks
def inference_mode_in_turn(compile_: Compile) -> Any:
    g, found = compile_(broken), []
    for i in range(8):
        with torch.inference_mode(i % 2 == 1):
            y = g(t(3))
        found.append((y.is_inference(), y.clone()))
    return found


@at_breaks
def reset_in_the_middle(compile_: Compile) -> Any:
    @torch._dynamo.disable
    def reset() -> None:
        torch._dynamo.reset()

    def f(x: Any) -> Any:
        y = x * 2
        reset()
        return y + 0.1

    g = compile_(f)
    return [g(t(3)) for _ in range(5)]


@at_breaks
def traced_and_profiled(compile_: Compile) -> Any:
    g, seen = compile_(broken), []
    found = [g(t(3)) for _ in range(3)]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            seen.append((event, frame.f_code.co_name, frame.f_lineno))
        return trace

    for install in (sys.settrace, sys.setprofile):
        install(trace)
        try:
            g(t(3))
        finally:
            install(None)
    return found, seen


@at_breaks
def cache_is_filled(compile_: Compile) -> Any:
    def f(x: Any, cache: Any) -> Any:
        cache[:, 1] = x
        torch._dynamo.graph_break()
        cache.mul_(2)
        return cache, cache, x, (), cache[0]

    g, found = compile_(f), []
    for _ in range(4):
        x, cache = t(3), torch.zeros(3, 3)
        a, b, same, empty, row = g(x, cache)
        found.append((a is cache, b is cache, same is x, empty, row._base is cache, cache))
    return found


@pytest.mark.parametrize("name", BREAKS)
def test_graph_breaks(fresh: None, name: str) -> None:
    same_as_stock(BREAKS[name])


def test_programs_run_at_breaks(enabled: None) -> None:
    g = torch.compile(broken, backend="trident")
    for _ in range(4):
        g(t(3))
    assert "host program: native (1 operators)" in str(trident.explain(g))
    assert trident.stats().hits >= 3
    assert trident.stats().run_code == 0


EVENTS: list[Callable[[], Any]] = []  # what is to happen at the next call of the fake function


@torch.library.custom_op("trident_edges::copy", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@copied.register_fake
def _(x: Any) -> Any:
    if EVENTS:
        EVENTS.pop(0)()
    return torch.empty_like(x)


def copies(x: Any) -> Any:
    return copied(x) * 2


@pytest.fixture
def fx_flag() -> Iterator[None]:
    """FX's flag, which is the process's, is as before."""
    yield
    EVENTS.clear()
    torch.fx._symbolic_trace._is_fx_tracing_flag = False
    torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER = None


def test_make_fx_of_another_thread(enabled: None, fx_flag: None) -> None:
    """It begins while Dynamo traces and ends while Trident does, which puts back what it saw."""
    inside, go = threading.Event(), threading.Event()
    traced: list[Any] = []

    def slow(x: Any) -> Any:
        inside.set()
        go.wait(10)
        return x + 1

    thread = threading.Thread(target=lambda: traced.append(make_fx(slow)(t(3))))
    EVENTS[:] = [lambda: (thread.start(), inside.wait(10)), lambda: (go.set(), thread.join())]
    g = torch.compile(copies, backend="trident")
    try:
        g(t(3))
    finally:
        go.set()
        thread.join()
    nodes = [node for node in traced[0].graph.nodes if node.op == "call_function"]
    assert all(node.meta["tensor_meta"] is not None for node in nodes)
    assert_same(g(t(3)), copies(t(3)))


def test_calls_of_another_thread(enabled: None, fx_flag: None) -> None:
    """A compiled function, called in another thread while Trident traces one in this thread."""
    other, found = torch.compile(lambda x: x + 1, backend="trident"), []
    other(t(3))

    def call() -> None:
        thread = threading.Thread(target=lambda: found.append(outcome(other, t(3))))
        thread.start()
        thread.join(10)

    EVENTS[:] = [call, call]
    torch.compile(copies, backend="trident")(t(3))
    assert_same(found, [t(3) + 1] * len(found))


def test_broken_functions_are_flat(enabled: None) -> None:
    g, x = torch.compile(broken, backend="trident"), t(3)
    for _ in range(3):
        g(x)
    assert_flat(lambda: g(x), 5000, x)


@pytest.mark.parametrize("breaks", [False, True])
def test_modules_die(enabled: None, breaks: bool) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            y = self.inner(x)
            return broken(y) if breaks else y * 2

    module = Module()
    references = [weakref.ref(module), weakref.ref(module.inner.weight)]
    g = torch.compile(module, backend="trident")
    for _ in range(4):
        g(t(3))
    del module, g
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# ---- destructors of what plans drop ----


class Thing:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def effects(x: Any, thing: Any, items: Any) -> Any:
    a, b = thing.x, thing.y
    thing.x = x * 2
    items[0] = thing.x + b
    thing.y = a + items[0]
    items[1] = x * 3
    thing.x = thing.y * 2
    return a, thing.x, items[0], b


DESTRUCTORS: dict[str, Callable[..., Any]] = {
    "looks": lambda g, thing, items: (dict(vars(thing)), list(items)),
    "calls": lambda g, thing, items: g(t(3), Thing(x=t(3), y=t(3)), [t(3), t(3)]),
    "resets": lambda g, thing, items: torch._dynamo.reset(),
    "clears_attributes": lambda g, thing, items: vars(thing).clear(),
    "clears_items": lambda g, thing, items: items.clear(),
    "replaces_attribute": lambda g, thing, items: vars(thing).update(x=t(3) * 100),
}


@pytest.mark.parametrize("name", DESTRUCTORS)
def test_destructors(fresh: None, name: str) -> None:
    """Of values that an effect replaces, while other effects are to come."""

    def scenario(compile_: Compile) -> Any:
        log: list[Any] = []
        thing, items, depth = Thing(), [t(3), t(3)], [0]
        g = compile_(effects)

        @torch._dynamo.disable
        def act() -> None:
            if depth[0] < 2:
                depth[0] += 1
                gc.collect(0)
                log.append(outcome(DESTRUCTORS[name], g, thing, items))
                depth[0] -= 1

        for i in range(5):
            vars(thing).update(x=t(3) * i, y=-t(3) * i)
            items[:] = [t(3) + i, t(3) - i]
            for value in (thing.x, thing.y, *items):
                weakref.finalize(value, act)
            del value
            log.append(outcome(g, t(3) * i, thing, items))
            log.append((dict(vars(thing)), list(items)))
        return log

    same_as_stock(scenario)


# ---- fetching attributes and items ----

CALLS: list[str] = []


class OfProperty:
    @property
    def x(self) -> Any:
        CALLS.append("property")
        return t(3)


class OfGetattr:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        CALLS.append(name)
        return t(3)


class OfGetattribute:
    def __init__(self) -> None:
        self.x = t(3)

    def __getattribute__(self, name: str) -> Any:
        CALLS.append(name)
        return object.__getattribute__(self, name)


class OfSlots:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = t(3)


class OfClass:
    x = t(3)


class Descriptor:
    def __get__(self, owner: Any, kind: Any) -> Any:
        CALLS.append("get")
        return t(3)

    def __set__(self, owner: Any, value: Any) -> None:
        CALLS.append("set")


class OfDescriptor:
    x = Descriptor()


@pytest.mark.parametrize(
    "kind", [OfProperty, OfGetattr, OfGetattribute, OfSlots, OfClass, OfDescriptor]
)
def test_attributes(fresh: None, kind: Any) -> None:
    """Fetched and returned, where that runs Python code and where not."""

    def f(x: Any, owner: Any) -> Any:
        return x + owner.x, owner.x

    def scenario(compile_: Compile) -> Any:
        g, owner = compile_(f), kind()
        return [outcome(g, t(3), owner) for _ in range(5)]

    same_as_stock(scenario)


class Dict(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        CALLS.append(key)
        return super().__getitem__(key)


def of_default(items: Any) -> Any:
    return defaultdict(list, items)


@pytest.mark.parametrize("make", [dict, Dict, MappingProxyType, OrderedDict, of_default])
def test_items(fresh: None, make: Any) -> None:
    def scenario(compile_: Compile) -> Any:
        g, owner = compile_(lambda x, d: (x + d["a"], d["a"])), make({"a": t(3)})
        return [outcome(g, t(3), owner) for _ in range(5)]

    same_as_stock(scenario)
