"""Calls where Inductor's graphs might differ from stock: inputs, states and errors at the edges."""

from __future__ import annotations

import contextlib
import gc
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config

import trident
from tests.conftest import frame_stats
from tests.test_equality import assert_same
from tests.test_host_programs import native_programs
from tests.test_inductor import check, natively_and_stock, ones
from trident.codegen import import_wrapper

Case = tuple[Callable[..., Any], Callable[[], Any]]


@pytest.fixture(autouse=True)
def _fresh(fresh: None) -> None:
    """Dynamo as after import; gradients are on."""


_library = torch.library.Library("trident_edges", "DEF")
# What the operator `act` does beside its result, and what it returns instead of that.
_action: list[Callable[[torch.Tensor], Any]] = []


def _act(x: torch.Tensor) -> Any:
    result = x + 1
    return _action.pop()(result) if _action else result


def _bump(x: torch.Tensor) -> None:
    x.add_(1)


def _operators() -> None:
    _library.define("act(Tensor x) -> Tensor")
    _library.define("two(Tensor x) -> (Tensor, Tensor)")
    _library.define("bump(Tensor(a!) x) -> ()")
    _library.define("numbers(Tensor x, float a, SymInt[] b, str c, bool d, Device? e) -> Tensor")
    _library.impl("act", _act, "CPU")
    _library.impl("two", lambda x: (x + 1, x * 2), "CPU")
    _library.impl("bump", _bump, "CPU")
    _library.impl("numbers", _numbers, "CPU")
    torch.library.register_fake("trident_edges::act", torch.empty_like, lib=_library)
    torch.library.register_fake(
        "trident_edges::two", lambda x: (torch.empty_like(x), torch.empty_like(x)), lib=_library
    )
    torch.library.register_fake("trident_edges::bump", lambda x: None, lib=_library)
    torch.library.register_fake(
        "trident_edges::numbers", lambda x, a, b, c, d, e: torch.empty_like(x), lib=_library
    )


def _numbers(x: torch.Tensor, a: float, b: list[int], c: str, d: bool, e: Any) -> torch.Tensor:
    seen = [a, *b, float(len(c)), float(d), float(e is None)]
    return x + torch.tensor(seen).nan_to_num(7.0).sum()


_operators()
ops = torch.ops.trident_edges


# ---- results ----


def _mutates_views(x: Any) -> Any:
    x[1:].mul_(2)
    x.t().add_(1)
    return x.view(-1)


def _mutates_several(x: Any, y: Any) -> Any:
    x.add_(y)
    y.copy_(x)
    return x, y, x.view(2, 2), y * 2


def _updates_a_cache(cache: Any, new: Any, at: Any) -> Any:
    cache.index_copy_(1, at, new)
    cache[:, :2] += 1
    return cache.view(-1)


def _sets_data(x: Any, y: Any) -> Any:
    x.data = y * 2
    return x + 1


def _custom(x: Any) -> Any:
    a, b = ops.two(x + 1)
    ops.bump(a)
    return a + b, ops.numbers(x, float("inf"), [x.size(0), -1], "hé", True, torch.device("cpu"))


def _three_views(y: Any) -> Any:
    return y.view(-1), y.t(), y[1:]


def _same_twice(x: Any) -> Any:
    y = x + 1
    return y, y, x, x, None, 3, 2.5, "s", [y, (x,)], {"a": y}


def _conjugated() -> Any:
    return (torch.complex(ones(4, 4), ones(4, 4)).conj(),)


def _twice(x: torch.Tensor) -> Any:
    return x, x


def _cache() -> Any:
    return ones(2, 8, 4), ones(2, 2, 4), torch.tensor([3, 5])


NATIVE: dict[str, Case] = {
    "complex": (lambda x: (x * 2, x.abs(), x.real, x.mT @ x), _conjugated),
    "negated": (lambda x: x + 1, lambda: (_conjugated()[0].imag,)),
    "fft": (lambda x: (torch.fft.fft(x), torch.fft.rfft(x).abs()), lambda: (ones(4, 8),)),
    "cumulated": (lambda x: (x.cumsum(0), x.cummax(0), x.logcumsumexp(1)), lambda: (ones(5, 6),)),
    "scattered": (
        lambda x, i: (x.scatter_reduce(0, i, x, "amax"), x.index_add(0, i[:, 0], x)),
        lambda: (ones(3, 4), torch.tensor([[0, 1, 2, 2]] * 3)),
    ),
    "as_strided": (
        lambda x: (x.as_strided((2, 2), (1, 3), 1), x[1:].as_strided((2,), (2,)) + 1),
        lambda: (ones(4, 4),),
    ),
    "expanded": (
        lambda x: (x.expand(2, 3, 4), (x + 1).expand(2, 3, 4), x[:0], (x + 1)[:, :0]),
        lambda: (ones(3, 4),),
    ),
    "same_twice": (_same_twice, lambda: (ones(3),)),
    "empty": (lambda x: (x + 1, x.sum(), x.reshape(0)), lambda: (ones(0, 4),)),
    "no_dimensions": (lambda x, y: (x + y, x.expand(3)), lambda: (ones(), torch.tensor(3))),
    "overlapping": (lambda x: (x + 1, x.sum(0)), lambda: (ones(6).as_strided((4, 3), (1, 1)),)),
    "expanded_input": (lambda x: (x + 1, x.t()), lambda: (ones(3, 1).expand(3, 4),)),
    "offset": (lambda x: (x[:, 1:] + 1, x[:, 1:]), lambda: (ones(4, 9)[1:, 2:],)),
    "channels_last": (
        lambda x: (x + 1, F.max_pool2d(x, 2, return_indices=True)),
        lambda: (ones(2, 3, 4, 4).to(memory_format=torch.channels_last),),
    ),
    "other_dtype": (
        lambda x: (x.view(torch.int32), x.view(torch.uint8)[1:]),
        lambda: (ones(4, 4),),
    ),
    "float8": (lambda x: x.float() + 1, lambda: (ones(4, 4).to(torch.float8_e4m3fn),)),
    "lists": (
        lambda x: (torch.split(x, 2), torch.chunk(x + 1, 2), torch._foreach_add([x, x], 2.0)),
        lambda: (ones(4, 4),),
    ),
    "linalg": (lambda x: (torch.linalg.qr(x), torch.linalg.eigh(x @ x.T)), lambda: (ones(3, 3),)),
    "no_inputs": (lambda: torch.arange(5) * 2, lambda: ()),
    "mutates_views": (_mutates_views, lambda: (ones(4, 4),)),
    "mutates_several": (_mutates_several, lambda: (ones(4), ones(4))),
    "cache": (_updates_a_cache, _cache),
    "sets_data": (_sets_data, lambda: (ones(4), ones(4))),
    "one_input_twice": (lambda x, y: (x + y, x.view(-1), y), lambda: _twice(ones(3, 4))),
    "views_of_one": (lambda x: _three_views(x + 1), lambda: (ones(4, 4),)),
    "custom": (_custom, lambda: (ones(3, 4),)),
    "checked": (lambda x: (torch._assert_async((x >= 0).all()), x + 1)[1], lambda: (ones(4),)),
}
DYNAMIC: dict[str, Case] = {
    "integers": (
        lambda x, n: (x.new_zeros(x.size(0) // 2 + n % 3, max(n, 2)), x[:n], n + 1, -n, n // 3),
        lambda: (ones(8, 4), 5),
    ),
    "negative": (lambda x, n: (x[n:], x * n, n % 4, n // 4), lambda: (ones(8, 4), -5)),
    "floats": (lambda x, s: (x * s, x + s * 2, s), lambda: (ones(8, 4), 2.5)),
    "float_argument": (lambda x, s: x.clamp(max=s), lambda: (ones(8, 4), float("-inf"))),
    "shapes": (
        lambda x, y: (torch.cat([x, y]), x @ y.t(), F.pad(x, (1, 1)), x.unfold(0, 2, 1) + 0),
        lambda: (ones(8, 4), ones(5, 4)),
    ),
    "pooled": (lambda x: (F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 2)), lambda: (
        ones(1, 2, 8, 7),
    )),
    "random": (lambda x: (torch.rand_like(x), torch.randperm(x.size(0))), lambda: (ones(5, 4),)),
    "views": (lambda x: (*_three_views(x + 1), *_three_views(x)), lambda: (ones(4, 6),)),
    "integers_and_views": (
        lambda x, n: (n, x.t(), n * 2, None, x[:n], x.size(0), (x + 1).view(-1), 3, x),
        lambda: (ones(6, 4), 3),
    ),
    "large": (lambda x, n: x + n, lambda: (torch.arange(3), 2**62)),
    "custom": (_custom, lambda: (ones(3, 4),)),
}  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_native(name: str) -> None:
    f, make = NATIVE[name]
    with torch.no_grad():
        compiled = check(f, make)
    assert compiled is not None


@pytest.mark.parametrize("name", DYNAMIC)
def test_native_with_dynamic_shapes(name: str) -> None:
    f, make = DYNAMIC[name]
    check(f, make, dynamic=True)
    assert frame_stats("<lambda>" if f.__name__ == "<lambda>" else f.__name__).hits >= 3


STOCK: dict[str, Case] = {
    "loops": (
        lambda x: torch._higher_order_ops.while_loop(
            lambda x: x.sum() < 9, lambda x: (x + 1,), (x,)
        ),
        lambda: (ones(4),),
    ),
    "sizes_of_floats": (
        lambda x: F.interpolate(x, scale_factor=1.5),
        lambda: (ones(1, 2, 8, 7),),
    ),
    "lists_of_tensors": (lambda x: torch.histogramdd(x, bins=[2, 2]), lambda: (ones(4, 2),)),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock(name: str) -> None:
    f, make = STOCK[name]
    with torch.no_grad():
        check(f, make, native=False, dynamic=name == "sizes_of_floats")


def test_sizes_that_depend_on_data_are_stocks() -> None:
    def f(x: Any) -> Any:
        return x.nonzero() * 2, x[x > 0.5] + x.sum().item()

    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        check(f, lambda: (ones(6),), native=False)


@pytest.mark.parametrize(
    "name",
    ["memory_planning", "allow_buffer_reuse", "nan_asserts", "wrap_inductor_compiled_regions"],
)
def test_config(name: str) -> None:
    """Whatever Inductor's wrapper looks like."""

    def f(x: Any, w: Any) -> Any:
        return torch.relu(x @ w) + 1, (x @ w).sum(1)

    with config.patch({name: not getattr(config, name)}):
        compiled = torch.compile(f)
        ours, stock = natively_and_stock(compiled, lambda: (ones(8, 8), ones(8, 8)))
    assert_same(ours[1:], stock[1:])


def test_sizes_that_are_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code asks a tensor for its sizes."""
    original, n = import_wrapper._Importer._dimensions, []

    def dimensions(self: Any, step: str, tensor: Any) -> Any:
        n.append(step)
        return original(self, step, tensor)

    monkeypatch.setattr(import_wrapper._Importer, "_dimensions", dimensions)

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.kept = 0, [torch.zeros(3, 4)]

        def forward(self, x: Any) -> Any:
            self.calls += 1
            self.kept[0] = self.kept[0] + x
            return self.kept[0]

    model = Cache()
    compiled = torch.compile(model, dynamic=True)

    def calls() -> list[Any]:
        model.calls, model.kept = 0, [torch.zeros(3, 4)]
        return [compiled(torch.ones(3, 4)).clone() for _ in range(4)]

    with trident.enable(), torch.no_grad():
        calls()
        calls()
        ours = calls()
        assert "size" in n, "the test means nothing"
        assert set(native_programs("forward")) == {True}
    with torch.no_grad():
        assert_same(ours, calls())


# ---- floats that are inputs ----


def test_floats_change() -> None:
    """AOTAutograd's graph takes a float as a tensor, which the native frame does not make."""

    def f(x: Any, s: Any, t: Any) -> Any:
        return x * s + t, s * 2

    compiled = torch.compile(f, dynamic=True)
    values = [(1.5, 2.0), (2.5, -0.0), (-3.25, 1e300), (float("inf"), float("nan")), (1, 2.0)]
    with trident.enable():
        for s, t in values * 2:
            compiled(ones(4), s, t)
        hits = frame_stats("f").hits
        ours = [compiled(ones(4), s, t) for s, t in values]
        assert frame_stats("f").hits == hits + len(values)
    assert_same(ours, [compiled(ones(4), s, t) for s, t in values])


# ---- states of the thread, between calls ----


class _Names(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], Any]] = {
    "function_mode": _Names,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("cpu"),
    "threads": _threads,
    "deterministic": _deterministic,
    "eager": lambda: torch.compiler.set_stance("force_eager"),
    "forward_ad": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("name", STATES)
def test_states_between_calls(name: str) -> None:
    if name == "function_mode" and torch.__version__ < "2.13":
        pytest.skip("its guards fail on the frame they were made for, in stock")

    def f(x: Any, w: Any) -> Any:
        return torch.mm(torch.relu(x), w) + 1, x.t(), torch.randn(2) + x.sum()

    compiled = torch.compile(f)

    def calls() -> list[Any]:
        torch.manual_seed(3)
        found = []
        for _ in range(2):
            found.append(compiled(ones(4, 4), ones(4, 4)))
            with STATES[name]() as state:
                found.append(compiled(ones(4, 4), ones(4, 4)))
            found.append((getattr(state, "seen", None), torch.is_grad_enabled()))
        return found

    with trident.enable():
        calls()
        ours = calls()
    assert_same(ours, calls())


# ---- errors, warnings and signals ----


def _raise(error: BaseException) -> Callable[[Any], Any]:
    def action(result: Any) -> Any:
        raise error

    return action


def _raise_with_gradients_on(result: Any) -> Any:
    torch.set_grad_enabled(True)
    raise ValueError("on")


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "error": _raise(LookupError("bad")),
    "interrupt": _raise(KeyboardInterrupt()),
    "stop": _raise(StopIteration(3)),
    "gradients": _raise_with_gradients_on,
    "none": lambda result: None,
    "dtype": lambda result: result.double(),
    "strides": lambda result: result.t(),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_operators_that_fail(name: str) -> None:
    def f(x: Any, y: Any) -> Any:
        y.add_(1)
        return ops.act(torch.relu(x)) @ x, x.t()

    compiled = torch.compile(f)

    def attempt(action: Callable[[Any], Any] | None) -> Any:
        y = torch.zeros(2)
        _action[:] = [] if action is None else [action]
        try:
            result = compiled(ones(3, 4).t() @ ones(3, 4), y)
        except BaseException as error:
            result = (type(error), str(error))
        return result, y, torch.is_grad_enabled()

    def attempts() -> list[Any]:
        return [attempt(a) for a in (None, ACTIONS[name], None)]

    with trident.enable():
        attempts()
        ours = attempts()
        assert native_programs("f") == [True]
    assert_same(ours, attempts())


def test_interrupts_between_kernels() -> None:
    """What a signal handler raises after a kernel is no error of the kernel's."""

    def f(x: Any) -> Any:
        for _ in range(60):
            x = torch.mm(x, x).sin()
        return x

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt("stop")

    compiled, x = torch.compile(f), torch.ones(300, 300)
    former = signal.signal(signal.SIGALRM, handler)
    n = 0
    try:
        with trident.enable(), torch.no_grad():
            for _ in range(3):
                compiled(x)
            assert native_programs("f") == [True]
            for _ in range(20):
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                try:
                    compiled(x)
                except KeyboardInterrupt as error:
                    n += str(error) == "stop"
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert not torch.is_grad_enabled()
    finally:
        signal.signal(signal.SIGALRM, former)
    assert n > 10


@pytest.mark.parametrize("action", ["always", "default", "error"])
def test_warnings_of_operators_called_through_torch_ops(action: Any) -> None:
    """They do not reach Python there: they are printed by C++."""

    def f(x: Any) -> Any:
        return torch.std(x[:1], 0, correction=1), x * 2

    with config.patch(fallback_by_default=True):
        compiled = torch.compile(f)

        def calls() -> list[Any]:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter(action)
                results = [compiled(ones(4, 4)) for _ in range(3)]
            return [results, [str(w.message) for w in found]]

        with trident.enable():
            compiled(ones(4, 4))
            ours = calls()
            assert native_programs("f") == [True]
        assert_same(ours, calls())
    assert ours[1] == []


# ---- what a graph holds while it runs, and after ----


class _Holder:
    """Holds tensors that a graph reads."""

    def __init__(self) -> None:
        self.tensor = ones(2, 3)
        self.tensors = [ones(5)]

    def drop(self, result: torch.Tensor) -> torch.Tensor:
        self.tensor = ones(1)
        self.tensors.clear()
        gc.collect()
        return result


def test_inputs_that_an_operator_drops() -> None:
    """Nobody else holds them when outputs that alias them are made."""

    def f(x: Any, holder: Any) -> Any:
        y = ops.act(x)
        return holder.tensor.t(), y * 2, holder.tensor[1:], holder.tensors[0].view(-1)

    compiled = torch.compile(f)

    def calls() -> list[Any]:
        found = []
        for k in range(6):
            holder = _Holder()
            _action[:] = [holder.drop] if k > 2 else []
            result = compiled(ones(4), holder)
            others = [torch.full((2, 3), 9.0) for _ in range(50)]
            found.append([x.clone() for x in result])
            del others
        return found

    with trident.enable():
        calls()
        ours = calls()
        assert native_programs("f") == [True]
    assert_same(ours, calls())


@pytest.mark.parametrize("how", ["reset", "disable", "delete"])
def test_a_graph_that_is_dropped_while_it_runs(how: str) -> None:
    def make() -> Any:
        def f(x: Any) -> Any:
            y = ops.act(x)
            for _ in range(3):
                y = torch.mm(y, x).sin()
            return y, x.t()

        return torch.compile(f)

    held = [make()]

    def action(result: Any) -> Any:
        if how == "delete":
            held.clear()
        elif how == "disable":
            trident.disable()
        else:
            torch._dynamo.reset()
        gc.collect()
        other = torch.compile(lambda x: (x + 3, x.t()))
        for _ in range(3):
            other(ones(4, 4))
        return result

    with trident.enable():
        for _ in range(4):
            expected = held[0](ones(4, 4))
        assert native_programs("f") == [True]
        _action[:] = [action]
        assert_same(held.pop()(ones(4, 4)) if how == "delete" else held[0](ones(4, 4)), expected)


def test_a_graph_runs_inside_itself() -> None:
    def f(x: Any) -> Any:
        return ops.act(x) * 2, x.t()

    compiled = torch.compile(f)

    def nested(depth: int) -> list[Any]:
        found: list[Any] = []

        def action(result: Any) -> Any:
            found.extend(nested(depth - 1))
            return result

        _action[:] = [action] if depth else []
        return [compiled(ones(4, 4) * depth), *found]

    with trident.enable():
        nested(2)
        ours = nested(3)
        assert any(native_programs("f"))
    assert_same(ours, nested(3))


def test_more_slots_than_fit_on_the_stack() -> None:
    def f(x: Any) -> Any:
        for _ in range(530):
            x = ops.act(x)
        return x, x.t()

    check(f, lambda: (ones(2, 2),))


@pytest.mark.parametrize("how", ["reset", "delete"])
def test_nothing_is_kept(how: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("bias", torch.ones(4))

        def forward(self, x: Any) -> Any:
            return self.linear(x) + self.bias, self.bias.view(2, 2)

    model = Model()
    compiled = torch.compile(model)
    with trident.enable(), torch.no_grad():
        for _ in range(4):
            result = compiled(ones(4, 4))
        assert native_programs("forward") == [True]
        kept: list[Any] = [model, model.linear.weight, model.bias, *result]
        references = [weakref.ref(x) for x in kept]
        del kept, result, model, compiled
        if how == "reset":
            torch._dynamo.reset()
        gc.collect()
        assert [reference() for reference in references] == [None] * 5
