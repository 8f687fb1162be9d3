"""Host programs whose operators raise, warn, or are Python's own: all is as in eager."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import trident
from tests.host_checks import assert_as_eager, compiled, hits, outcome, thread_state
from tests.test_equality import assert_same
from tests.test_host_programs import native_programs
from tests.test_lifetime import in_thread

HERE = __file__


# ---- operators that raise for some values ----


def good_index() -> list[Any]:
    return [torch.arange(16.0).view(4, 4), torch.tensor([1, 2])]


def bad_index() -> list[Any]:
    return [torch.arange(16.0).view(4, 4), torch.tensor([1, 9])]


def raises_first(x: Any, i: Any) -> Any:
    a = F.embedding(i, x)
    x.add_(1)
    return a.sum()


def raises_in_the_middle(x: Any, i: Any) -> Any:
    x.add_(1)
    with torch.no_grad():
        a = F.embedding(i, x)
    x.mul_(2)
    return a.sum()


def raises_last(x: Any, i: Any) -> Any:
    x.add_(1)
    with torch.no_grad(), torch.enable_grad():
        x.view(-1)[3:5].mul_(3)
    return x.index_select(0, i)


def gathers(x: Any, i: Any) -> Any:
    return x.mul_(2).gather(0, i.view(2, 1))


def indexes(x: Any, i: Any) -> Any:
    x[0] = 7
    y = x[i]
    x[1] = 8
    return y


def scatters(x: Any, i: Any) -> Any:
    x.add_(1)
    x.scatter_(1, i.view(1, 2), 5.0)
    return x.add_(1)


def takes(x: Any, i: Any) -> Any:
    return torch.take(x.neg_(), i * 3)


def one_hot_loss(x: Any, i: Any) -> Any:
    x.exp_()
    return F.cross_entropy(x[:2], i), torch.rand(2)


def index_add(x: Any, i: Any) -> Any:
    a = torch.rand(2, 4)
    x.index_add_(0, i, a)
    return x, torch.rand(2)


@pytest.mark.parametrize(
    "f",
    [
        *(raises_first, raises_in_the_middle, raises_last, gathers, indexes, scatters, takes),
        *(one_hot_loss, index_add),
    ],
)
def test_index_out_of_range(enabled: None, f: Any) -> None:
    found = assert_as_eager(f, good_index, bad_index, bad_index)
    assert [x.error is not None for x in found] == [False, True, True, False]


def singular() -> list[Any]:
    return [torch.zeros(3, 3)]


def regular() -> list[Any]:
    return [torch.eye(3) * 2]


def inverts(x: Any) -> Any:
    x.add_(0)
    y = torch.linalg.inv(x)
    x.add_(1)
    return y


def factorizes(x: Any) -> Any:
    return torch.linalg.cholesky(x - 0.5) @ x


def solves(x: Any) -> Any:
    return torch.linalg.solve(x, x[0]), x.add_(1)


def draws(x: Any) -> Any:
    a = torch.rand(3)
    b = torch.multinomial(x, 1)
    return a, b, torch.rand(3)


def asserts(x: Any) -> Any:
    x.add_(0)
    torch._assert_async(x.sum() > 0, "nothing there")
    return x + 1


def bernoulli(x: Any) -> Any:
    return torch.bernoulli(x - 1.5 * x.sum())


@pytest.mark.parametrize("f", [inverts, factorizes, solves, draws])
def test_bad_values(enabled: None, f: Any) -> None:
    found = assert_as_eager(f, regular, singular)
    assert found[1].error is not None


def test_assert_async(enabled: None) -> None:
    found = assert_as_eager(asserts, regular, singular)
    assert found[1].error is not None


def test_nans_are_no_probabilities(enabled: None) -> None:
    def nan() -> list[Any]:
        return [torch.full((3, 3), float("nan"))]

    assert assert_as_eager(draws, regular, nan)[1].error is not None


def inner_of_three(x: Any, i: Any) -> Any:
    return F.embedding(i, x)


def middle_of_three(x: Any, i: Any) -> Any:
    return inner_of_three(x, i) + 1


def outer_of_three(x: Any, i: Any) -> Any:
    return middle_of_three(x, i) * 2


def test_traceback_of_inlined_functions(enabled: None) -> None:
    """The innermost line of the user's is there; the functions that were inlined have none."""
    g = compiled(outer_of_three, good_index)
    with pytest.raises(IndexError) as info:
        g(*bad_index())
    entries = traceback.extract_tb(info.tb)
    last = [e for e in entries if e.filename == HERE][-1]
    assert (last.name, last.line) == ("inner_of_three", "return F.embedding(i, x)")


def test_error_keeps_its_context(enabled: None) -> None:
    g = compiled(raises_first, good_index)
    try:
        raise KeyError("outer")
    except KeyError as outer:
        with pytest.raises(IndexError) as info:
            g(*bad_index())
        assert info.value.__context__ is outer  # noqa: PT017


def test_error_below_states(enabled: None) -> None:
    """No state of the thread is changed by an error: not of grad mode, nor of regions outside."""

    def attempt(f: Any) -> Any:
        regions = [contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()]
        regions += [torch.autocast("cpu"), torch.enable_grad(), torch.set_grad_enabled(False)]
        found = []
        for region in regions:
            with region:
                found += [outcome(f, make()) for make in (good_index, bad_index) * 2]
                found.append(thread_state())
            found.append(thread_state())
        return found

    expected = attempt(raises_in_the_middle)
    actual = attempt(compiled(raises_in_the_middle, good_index))
    for a, b in zip(actual, expected, strict=True):
        if not isinstance(a, tuple):
            a.lines = b.lines = []
        assert_same(a, b)


def autocast_region(x: Any, i: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        a = x @ x
        b = F.embedding(i, x)
    return a, b


def test_error_in_autocast_region(enabled: None) -> None:
    """The thread's grad mode and autocast are as before, as in eager. (Stock's own code leaves them
    as they were at the error.)"""

    def attempt(f: Any) -> Any:
        for _ in range(3):
            f(*good_index())
        with pytest.raises(IndexError):
            f(*bad_index())
        return thread_state()

    expected = attempt(autocast_region)
    assert attempt(torch.compile(autocast_region, backend="trident")) == expected
    assert native_programs("autocast_region") == [True]


# ---- warnings ----


def one_row() -> list[Any]:
    return [torch.ones(1, 3)]


def warns(x: Any) -> Any:
    x.add_(1)
    a = x.std(dim=0)
    x.add_(1)
    b = x.var(dim=0)
    x.add_(1)
    return a, b


def warns_in_a_helper(x: Any) -> Any:
    return warns(x)[0] + F.dropout(x, 0.5, training=True)


@pytest.mark.parametrize("f", [warns, warns_in_a_helper])
@pytest.mark.parametrize("action", ["always", "error", "ignore", "default", "once", "module"])
def test_warnings(enabled: None, f: Any, action: str) -> None:
    found = assert_as_eager(f, one_row, one_row, one_row, action=action)
    if action == "error":
        assert found[0].error is not None
        assert found[0].inputs[0].tolist() == [[2.0] * 3]  # nothing after the operator ran
    if action == "always":
        assert len(found[0].warned) == 2


def test_warnings_once_per_location(enabled: None) -> None:
    """The filter "default" looks at the registry of the user's module, as do native calls."""
    g = compiled(warns, one_row)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warns(*one_row())
        n = len(caught)
        for _ in range(3):
            g(*one_row())
            warns(*one_row())
    assert (n, len(caught)) == (2, 2)


def test_warnings_of_one_module_only(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", module=__name__.replace(".", r"\."))
            f(*one_row())
        return [w.lineno for w in caught]

    expected = attempt(warns)
    assert len(expected) == 2
    assert attempt(compiled(warns, one_row)) == expected


def test_showwarning_raises(enabled: None, monkeypatch: Any) -> None:
    g = compiled(warns, one_row)

    def show(*args: Any) -> None:
        raise LookupError("from showwarning")

    def attempt(f: Any) -> Any:
        inputs = one_row()
        with warnings.catch_warnings(), pytest.raises(LookupError) as info:  # noqa: PT012
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", show)
            f(*inputs)
        return str(info.value), inputs

    assert_same(attempt(g), attempt(warns))


def warns_and_raises(x: Any, i: Any) -> Any:
    x.add_(1)
    return torch.ops.trident_failures.warn_and_raise(x, i)


@torch.library.custom_op("trident_failures::warn_and_raise", mutates_args={"x"})
def warn_and_raise(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    warnings.warn("from the operator", stacklevel=1)
    x.std(dim=0)
    if int(i.max()) > 4:
        raise ZeroDivisionError("from the operator", 5)
    x.mul_(2)
    return x.clone()


@warn_and_raise.register_fake
def _(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("action", ["always", "error", "ignore", "default"])
def test_operator_warns_and_raises(enabled: None, action: str) -> None:
    assert_as_eager(warns_and_raises, good_index, bad_index, action=action)


def transposes(x: Any) -> Any:
    return x[0, 0].T + 1, x.expand(2, 1, 3).T


def test_warn_always(enabled: None) -> None:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        assert_as_eager(transposes, one_row, one_row)
    finally:
        torch.set_warn_always(before)


def mse_of_other_sizes(x: Any) -> Any:
    return F.mse_loss(x, x[:, :1])


def softmax_without_dim(x: Any) -> Any:
    return F.softmax(x)


def copies_a_tensor(x: Any) -> Any:
    return torch.tensor(x.sum()), x.new_tensor(x)


PYTHON_WARNS = [mse_of_other_sizes, softmax_without_dim, copies_a_tensor]


# torch's Python functions that Dynamo puts into the graph as they are (and bindings like
# new_tensor) warn in each call; a trace keeps only their operators.
@pytest.mark.parametrize("f", PYTHON_WARNS)
def test_warnings_of_python_functions(enabled: None, f: Any) -> None:
    def messages(backend: str) -> Any:
        torch._dynamo.reset()
        g = torch.compile(f, backend=backend)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            for _ in range(3):
                g(*one_row())
            warnings.simplefilter("always")
            g(*one_row())
        return [(w.category, str(w.message)) for w in caught]

    expected = messages("eager")
    assert expected
    assert messages("trident") == expected


# The trace runs the graph once more: nobody is to hear of it.
@pytest.mark.parametrize("f", [mse_of_other_sizes, transposes])
def test_compiling_warns_as_often_as_stock(enabled: None, f: Any) -> None:
    def messages(backend: str) -> Any:
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.compile(f, backend=backend)(*one_row())
        return [(w.category, str(w.message)) for w in caught]

    torch.set_warn_always(True)
    try:
        assert messages("trident") == messages("eager")
    finally:
        torch.set_warn_always(False)


# ---- operators implemented in Python ----

LOG: list[Any] = []
ACTION: list[Callable[[], Any]] = []


@torch.library.custom_op("trident_failures::act", mutates_args=())
def act(x: torch.Tensor) -> torch.Tensor:
    """Does whatever the test wants, in the middle of the graph."""
    for action in list(ACTION):
        action()
    return x + 1


@act.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


act.register_autograd(lambda ctx, grad: grad * 3)


@contextlib.contextmanager
def acting(action: Callable[[], Any]) -> Iterator[None]:
    ACTION.append(action)
    try:
        yield
    finally:
        ACTION.remove(action)


def acts(x: Any) -> Any:
    x.add_(1)
    y = act(x * 2)
    x.mul_(2)
    return y + x


def floats() -> list[Any]:
    return [torch.arange(3.0)]


class Odd(Exception):
    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(a)
        self.b = b


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("a"), KeyError("k"), StopIteration(3), Odd(1, b=2), SystemExit(3)),
        *(KeyboardInterrupt(), GeneratorExit(), MemoryError(), RecursionError("deep")),
        *(torch.OutOfMemoryError("memory"), torch._C._LinAlgError("linear"), OSError(2, "no")),
        *(NotImplementedError(), BaseException("base"), UnicodeDecodeError("utf8", b"", 0, 1, "r")),
    ],
    ids=lambda e: type(e).__name__,
)
def test_python_operator_raises(enabled: None, error: BaseException) -> None:
    """The very exception object arrives, with its traceback and attributes."""
    g = compiled(acts, floats)

    def fail() -> None:
        raise error

    def attempt(f: Any) -> Any:
        inputs = floats()
        error.__traceback__ = None
        with acting(fail), pytest.raises(type(error)) as info:
            f(*inputs)
        assert info.value is error
        names = [e.name for e in traceback.extract_tb(info.tb) if e.filename == HERE]
        return inputs, [n for n in names if n != "attempt"], error.__cause__, error.__context__

    expected = attempt(acts)
    assert expected[1] == ["acts", "act", "fail"]
    before = hits("acts")
    assert_same(attempt(g), expected)
    assert hits("acts") == (before[0], before[1] + 1)
    assert_same(g(*floats()), acts(*floats()))


def other(x: Any) -> Any:
    return x.sin() + 1


def test_operator_calls_compiled_functions(enabled: None) -> None:
    g = compiled(acts, floats)
    inner, stock = torch.compile(other, backend="trident"), torch.compile(other, backend="eager")
    seen: list[Any] = []
    busy: list[bool] = []

    def call() -> None:
        if busy:
            return
        busy.append(True)
        x = torch.arange(4.0)
        seen.append((inner(x), stock(x), g(*floats())))
        busy.clear()

    def attempt(f: Any) -> Any:
        seen.clear()
        with acting(call):
            return f(*floats())

    expected = acts(*floats())
    for _ in range(4):
        assert_same(attempt(g), expected)
        assert_same(seen, [(*(other(torch.arange(4.0)),) * 2, expected)])


def test_operator_calls_itself_until_it_cannot(without_strict: None, enabled: None) -> None:
    """Recursion through the native code is stopped by Python as elsewhere."""
    g = compiled(acts, floats)
    with acting(lambda: g(*floats())), pytest.raises(RecursionError):
        g(*floats())
    assert_same(g(*floats()), acts(*floats()))


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad mode": (lambda: torch._C._set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_enabled("cpu", False),
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "generator": (lambda: torch.manual_seed(99), lambda: None),
    "filters": (lambda: warnings.simplefilter("error"), lambda: None),
}


def uses_state(x: Any, w: Any) -> Any:
    y = act(x * 2)
    z = y @ w + torch.rand(3)
    return z, z * w[0], torch.ones(2), x.view(1, 3).var(dim=0)


@pytest.mark.parametrize("name", STATES)
def test_operator_changes_state(enabled: None, name: str) -> None:
    """What runs after it, in the graph and outside, sees the new state, as in eager."""
    change, restore = STATES[name]

    def make() -> list[Any]:
        return [torch.arange(3.0), torch.eye(3, requires_grad=True)]

    stock = torch.compile(uses_state, backend="eager")
    stock(*make())
    g = torch.compile(uses_state, backend="trident")
    for _ in range(3):
        g(*make())
    found = []
    for f in (g, stock):
        torch.manual_seed(5)
        before = sum(hits("uses_state"))
        with acting(change):
            try:
                found.append((outcome(f, make()), torch.get_default_dtype(), thread_state()))
            finally:
                restore()
        if f is g:
            assert sum(hits("uses_state")) == before + 1
    for result, *_ in found:
        result.lines = []
        result.warned = [w[:2] for w in result.warned]  # stock: at the line of the compiled code
    assert_same(found[0], found[1])


def test_operator_disables_trident(fresh: None) -> None:
    trident.enable()
    g = compiled(acts, floats)

    def off() -> None:
        trident.disable()
        torch._dynamo.reset()

    with acting(off):
        assert_same(g(*floats()), acts(*floats()))
    assert_same(g(*floats()), acts(*floats()))


# ---- signals ----


STEPS = 40


def long_graph(x: Any, count: Any) -> Any:
    for _ in range(STEPS):
        x = (x @ x).tanh()
        count.add_(1)
    return x


@pytest.mark.parametrize("way", ["timer", "thread"])
def test_keyboard_interrupt(enabled: None, way: str) -> None:
    """It is raised between two operators of a graph, not only at its end."""

    def make() -> list[Any]:
        return [torch.rand(400, 400), torch.zeros(())]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    g = compiled(long_graph, make)
    start = time.perf_counter()
    g(*make())
    whole = time.perf_counter() - start
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        done = []
        for attempt in range(1, 9):  # where the machine is busy, a signal may come before or after
            x, count = make()
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                if way == "timer":
                    signal.setitimer(signal.ITIMER_REAL, whole / (1 + attempt))
                else:
                    later = whole / (1 + attempt)
                    threading.Timer(later, lambda: os.kill(os.getpid(), signal.SIGALRM)).start()
                g(x, count)
                time.sleep(5)
            done.append(int(count))
            if 0 < done[-1] < STEPS:
                break
        else:
            pytest.fail(f"never in the middle: {done}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    inputs = make()
    again = [t.clone() for t in inputs]
    assert_same(g(*inputs), long_graph(*again))


def test_signal_handler_that_returns(enabled: None) -> None:
    """A handler may itself call compiled functions, and the graph goes on."""

    def make() -> list[Any]:
        return [torch.eye(300), torch.zeros(())]

    g = compiled(long_graph, make)
    seen: list[Any] = []
    former = signal.signal(signal.SIGALRM, lambda *_: seen.append(g(*make())))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        result = g(*make())
        while not seen:
            time.sleep(0.001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert_same([result, seen[0]], [long_graph(*make())] * 2)


# ---- other threads in the middle of a call ----


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))
        self.bias = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return act(x * self.weight) * self.weight + self.bias


def meanwhile(g: Callable[[], Any], action: Callable[[], Any]) -> Any:
    """What `g` returns in another thread, while `action` runs in the middle of its graph."""
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(20)

    with acting(wait):
        join = in_thread(g)
        try:
            assert inside.wait(20)
            action()
        finally:
            go_on.set()
        return join()


def test_parameters_swapped_meanwhile(enabled: None) -> None:
    model = Scale()
    g = torch.compile(model, backend="trident")
    x = torch.arange(3.0)
    for _ in range(3):
        expected = g(x)

    def swap() -> None:
        model.weight = torch.nn.Parameter(torch.zeros(3))
        model.bias = torch.nn.Parameter(torch.zeros(3))

    before = hits("forward")[0]
    assert_same(meanwhile(lambda: g(x), swap), expected)
    assert hits("forward")[0] == before + 1
    assert_same(g(x), model(x))


@pytest.mark.parametrize("what", ["reset", "delete", "disable", "fork"])
def test_ended_meanwhile(fresh: None, what: str) -> None:
    trident.enable()
    models = [Scale()]
    x = torch.arange(3.0)
    expected = models[0](x).detach()
    compiled_models = [torch.compile(models[0], backend="trident")]
    for _ in range(3):
        compiled_models[0](x)
    before = hits("forward")[0]

    def end() -> None:
        if what == "reset":
            torch._dynamo.reset()
        elif what == "delete":
            models.clear()
            compiled_models.clear()
            gc.collect()
        elif what == "fork":
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        else:
            trident.disable()

    def run() -> Any:
        return holder.pop()(x).detach()

    holder = list(compiled_models)
    assert_same(meanwhile(run, end), expected)
    if what in ("fork", "disable"):
        assert hits("forward")[0] == before + 1
    trident.disable()


def test_many_threads_at_once(enabled: None) -> None:
    """One specialization, several calls at once, some of which fail."""
    g = compiled(raises_in_the_middle, good_index)
    expected = [outcome(raises_in_the_middle, make()) for make in (good_index, bad_index)]

    def work() -> Any:
        found = []
        for _ in range(50):
            found.append([g(*good_index()), None])
            with pytest.raises(IndexError) as info:
                g(*bad_index())
            found[-1][1] = str(info.value)
            assert torch.is_grad_enabled()
        return found

    joins = [in_thread(work) for _ in range(4)]
    assert expected[1].error is not None
    for join in joins:
        assert_same(join(), [[expected[0].result, expected[1].error[1]]] * 50)
