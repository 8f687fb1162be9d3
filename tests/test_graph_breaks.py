"""Frames around graph breaks run natively, and nobody who looks can tell: results, tracebacks to
the caret, the stack that a called function sees, warnings, what Dynamo compiles below."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trident
from tests.conftest import compilations, reset_compilations
from tests.test_equality import assert_same

pytestmark = pytest.mark.usefixtures("fresh")
FAILS = [False]
SEEN: list[Any] = []


def stack(frame: FrameType | None) -> list[tuple[str, int, bool]]:
    """From `frame` to the test's own call: names, lines, and whether the globals are this module's.
    How a compiled function is entered is left out: a door does without Dynamo's wrapper."""
    rows = []
    while frame is not None and frame.f_code is not calls.__code__:
        code = frame.f_code
        if "torch" not in code.co_filename or code.co_name == "_fn":
            rows.append((code.co_name, frame.f_lineno, frame.f_globals is globals()))
        frame = frame.f_back
    return rows


@torch.compiler.disable
def look(*args: Any, **kwargs: Any) -> Any:
    SEEN.append((stack(sys._getframe(1)), len(args), sorted(kwargs)))
    if FAILS[0]:
        raise ValueError("it fails")
    return args[0] if args else next(iter(kwargs.values()))


@torch.compiler.disable
def warn(x: Any) -> Any:
    warnings.warn("careful", stacklevel=3)
    return x


@torch.compiler.disable
def log(x: Any) -> Any:
    logging.getLogger("tests.graph_breaks").warning("seen", stacklevel=3)
    return x


@torch.compiler.disable
def grow(items: list[Any]) -> list[Any]:
    items.append(items[0] + 1)
    return items


@torch.compiler.disable
def nothing() -> None:
    SEEN.append("nothing")


def in_the_middle(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    z = look(y)
    return z * w


def at_the_end(x: Tensor, w: Tensor) -> Any:
    y = x * w
    return look(y)


def at_the_start(x: Tensor, w: Tensor) -> Any:
    y = look(x)
    return y * w


def only_a_break(x: Tensor, w: Tensor) -> Any:
    return look(x)


def by_keywords(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    z = look(y, w, scale=3, other=(y, w))
    return z * w


def over_lines(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    z = look(
        y,
        other=w,
    )
    return z * w


def stars(x: Tensor, *rest: Any, **named: Any) -> Any:
    return look(x, *rest, **named)


def only_stars(*args: Any, **named: Any) -> Any:
    y = look(*args, **named)
    return y * 2


def twice(x: Tensor, w: Tensor) -> Any:
    a = look(x * 2)
    b = look(a + w, w)
    return a + b, w


def left_on_the_stack(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    return [y, w * 3, look(y), x + 1]


def within_an_expression(x: Tensor, w: Tensor) -> Any:
    return (x + w) * (look(x * w) - (w + 2) * look(w))


def mutated_list(x: Tensor, w: Tensor) -> Any:
    items = [x * 2, w]
    same = grow(items)
    return items[0] + items[-1], len(items), same is items


def without_a_value(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    nothing()
    return y * w


def no_tensors_after(x: Tensor, w: Tensor) -> Any:
    y = x + w
    z = look(y)
    return {"z": z, "n": 3}


def in_no_grad(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    with torch.no_grad():
        z = look(y)
        return z * w


def _part(x: Tensor, w: Tensor) -> Any:
    return look(x * w) + 1


def in_a_function_below(x: Tensor, w: Tensor) -> Any:
    return _part(x, w) * 2


def warned(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    z = warn(y)
    return z * w


def logged(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    z = log(y)
    return z * w


def _closure() -> Callable[..., Any]:
    scale = 3

    def closure(x: Tensor, w: Tensor) -> Any:
        y = x * scale
        return look(y) * w * scale

    return closure


def changed_cell() -> Callable[..., Any]:
    count = 0

    @torch.compiler.disable
    def change() -> None:
        nonlocal count
        count += 1

    def f(x: Tensor, w: Tensor) -> Any:
        y = x * 2
        change()
        return y * w, count

    return f


class Base(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Any:
        return look(x) + w


class Derived(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor, w: Tensor) -> Any:
        self.calls += 1
        y = super().forward(x * self.weight, w)
        return y * self.calls


class Outer(Base):
    """As transformers.modeling_layers: what is called comes from super, with the arguments as they
    are."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Outer(), Outer()])

    def forward(self, x: Tensor, w: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, w=w)
        return x


def odd_keywords(x: Tensor, w: Tensor) -> Any:
    """Written as source, the first would be another name, and the others are none."""
    y = x * 2
    return look(y, **{"\ufb01": 1, "fi": 2, "__debug__": 3, "class": 4, "a b": 5}) * w


def through_a_module(x: Tensor, w: Tensor) -> Any:
    y = look(x * 2)
    return module.look_at_it(y) * w


class Watched:
    """Who stores an attribute or an item is seen by it."""

    def __setattr__(self, name: str, value: Any) -> None:
        SEEN.append((name, stack(sys._getframe(1))))
        object.__setattr__(self, name, value)


watched, plain = Watched(), nn.Identity()


def stored(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    watched.last = y
    plain.last = y
    z = look(y)
    watched.last = z
    return z * w


def __getattr__(name: str) -> Any:
    if name != "look_at_it":
        raise AttributeError(name)
    SEEN.append((name, stack(sys._getframe(1))))
    return look


module = sys.modules[__name__]

CASES: dict[str, Callable[[], Callable[..., Any]]] = {
    f.__name__: functools.partial(lambda f: f, f)
    for f in (
        in_the_middle,
        at_the_end,
        at_the_start,
        only_a_break,
        by_keywords,
        over_lines,
        stars,
        only_stars,
        twice,
        left_on_the_stack,
        within_an_expression,
        mutated_list,
        without_a_value,
        no_tensors_after,
        in_no_grad,
        in_a_function_below,
        warned,
        logged,
        odd_keywords,
        through_a_module,
        stored,
    )
} | {
    "closure": _closure,
    "changed_cell": changed_cell,
    "super": Derived,
    "layers": Holder,
}
# Dynamo's code makes functions of them, or handles exceptions.
NOT_NATIVE = {"changed_cell", "in_no_grad", "closure", "odd_keywords", "stored"}


def text_of(error: BaseException) -> list[str]:
    """The traceback below the call, without the frames through which a door leads."""
    found = traceback.TracebackException.from_exception(error)
    rows = [
        (frame.filename, frame.lineno, frame.name, frame.colno, frame.end_colno, frame.line)
        for frame in found.stack
        if "torch" not in frame.filename or frame.name == "_fn"
    ]
    return [str(row) for row in rows[1:]] + [str(error)]


def calls(f: Callable[..., Any], n: int, *args: Any, **kwargs: Any) -> list[Any]:
    """What `n` calls give: results or tracebacks, what the functions called saw, warnings."""
    found: list[Any] = []
    for _ in range(n):
        SEEN.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result: Any = f(*args, **kwargs)
            except ValueError as error:
                result = text_of(error)
        lines = [(w.filename, w.lineno) for w in caught]
        found.append((result, list(SEEN), lines))
    return found


class Places(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SEEN.append((record.pathname, record.lineno, record.funcName))


def inputs(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, w = torch.arange(3.0) + 1, torch.arange(3.0) + 2
    if name in ("stars", "only_stars"):
        return (x, w, 5), {"scale": w}
    return (x, w), {}


@pytest.mark.parametrize("name", CASES)
def test_as_stock(name: str) -> None:
    handler = Places()
    logger = logging.getLogger("tests.graph_breaks")
    logger.addHandler(handler)
    args, kwargs = inputs(name)
    shown = []
    try:
        for is_ours in (False, True):
            torch._dynamo.reset()
            reset_compilations()
            f = torch.compile(CASES[name](), backend="trident")
            with trident.enable() if is_ours else torch.no_grad(), torch.no_grad():
                results = calls(f, 6, *args, **kwargs)
                trident.reset_stats()
                results += calls(f, 1, *args, **kwargs)
                stats = trident.stats()
                FAILS[0] = True
                results += calls(f, 2, *args, **kwargs)
                FAILS[0] = False
                results += calls(f, 2, *args, **kwargs)
            shown.append((results, compilations()))
    finally:
        FAILS[0] = False
        logger.removeHandler(handler)
    assert_same(shown[1], shown[0])
    assert stats.hits > 0
    if name not in NOT_NATIVE:
        assert stats.run_code == 0


def same_as_stock(f: Callable[..., Any], run: Callable[[Callable[..., Any]], Any]) -> None:
    """What `run` gives for the compiled `f`, and what Dynamo compiles for it."""
    shown = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        reset_compilations()
        c = torch.compile(f, backend="trident")
        with trident.enable() if is_ours else torch.no_grad(), torch.no_grad():
            results = run(c)
        shown.append((results, compilations()))
    assert_same(shown[1], shown[0])


def test_what_is_called_sees_dynamo_as_in_stock() -> None:
    """A callee's own compiled functions compile, and count, as they do in stock."""

    def inner(x: Tensor) -> Tensor:
        return x * 5

    compiled = torch.compile(inner, backend="trident")

    @torch.compiler.disable(recursive=False)
    def callee(x: Tensor) -> Any:
        return compiled(x) + helper(x)

    def helper(x: Tensor) -> Tensor:
        return x - 1

    def f(x: Tensor) -> Any:
        y = x * 2
        return callee(y) + 1

    same_as_stock(f, lambda c: [c(torch.ones(n)) for n in (3, 3, 3, 4, 4, 3, 5, 5)])


def test_what_is_called_may_change_what_is_compiled() -> None:
    """The next frames see a reset, another specialization and Trident's end, as they happen."""
    to_do: list[Callable[[], Any]] = []

    @torch.compiler.disable
    def act(x: Any) -> Any:
        if to_do:
            to_do.pop()()
        return x

    def f(x: Tensor, n: int) -> Any:
        y = act(x * n)
        return y + n

    with torch.no_grad():
        expected = {n: f(torch.ones(3), n) for n in range(5)}
        for action in ("reset", "disable", "specialize"):
            torch._dynamo.reset()
            c = torch.compile(f, backend="trident", dynamic=False)
            trident.enable()
            for n in (2, 2, 2, 2, 3, 3, 3):
                assert torch.equal(c(torch.ones(3), n), expected[n])
            actions = {
                "reset": torch._dynamo.reset,
                "disable": trident.disable,
                "specialize": functools.partial(c, torch.ones(3), 4),
            }
            to_do.append(actions[action])
            for n in (2, 3, 2):
                assert torch.equal(c(torch.ones(3), n), expected[n])
            while trident.is_enabled():
                trident.disable()


def test_dynamo_skips_what_a_frame_calls_if_it_is_told_to() -> None:
    def helper(x: Tensor) -> Tensor:
        return x + 3

    @torch.compiler.disable(recursive=False)
    def callee(x: Tensor) -> Any:
        return helper(x)

    def f(x: Tensor) -> Any:
        return callee(x * 2)

    def run(c: Callable[..., Any]) -> list[Any]:
        for _ in range(4):
            c(torch.ones(3))
        types = torch._dynamo.types
        strategy = types.FrameExecStrategy(types.FrameAction.DEFAULT, types.FrameAction.SKIP)
        torch._C._dynamo.eval_frame.set_code_exec_strategy(f.__code__, strategy)
        return [c(torch.ones(n)) for n in (3, 4, 5)]

    same_as_stock(f, run)


def _gone(x: Any) -> Any:
    return x


gone = torch.compiler.disable(_gone)
holder = nn.Identity()


@pytest.mark.parametrize("kind", ["global", "attribute", "item"])
def test_what_is_not_there_any_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callee takes away is missing at the user's line, also in the traceback."""
    to_do: list[Callable[[], Any]] = []
    table = {"gone": gone}
    monkeypatch.setattr(holder, "gone", gone, raising=False)
    this = globals()

    @torch.compiler.disable
    def act(x: Any) -> Any:
        for do in to_do:
            do()
        return x

    def by_global(x: Tensor) -> Any:
        y = act(x * 2)
        z = gone(y + 1)
        return z * 2

    def by_attribute(x: Tensor) -> Any:
        y = act(x * 2)
        z = holder.gone(y + 1)
        return z * 2

    def by_item(x: Tensor) -> Any:
        y = act(x * 2)
        z = table["gone"](y + 1)
        return z * 2

    f, do, back = {
        "global": (by_global, lambda: this.pop("gone"), lambda: this.update(gone=table["gone"])),
        "attribute": (
            by_attribute,
            lambda: delattr(holder, "gone"),
            lambda: setattr(holder, "gone", gone),
        ),
        "item": (by_item, lambda: table.pop("gone"), lambda: table.update(gone=gone)),
    }[kind]
    shown = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        c = torch.compile(f, backend="trident")
        with trident.enable() if is_ours else torch.no_grad(), torch.no_grad():
            for _ in range(5):
                c(torch.ones(3))
            to_do[:] = [do]
            try:
                c(torch.ones(3))
                shown.append("no error")
            except Exception as error:
                shown.append(text_of(error))
            to_do.clear()
            back()
            shown.append(c(torch.ones(3)))
    assert_same(shown[2:], shown[:2])
    assert shown[0] != "no error"
