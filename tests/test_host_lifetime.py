"""Host programs: gradients, modules, aliases, states switched between calls, and memory."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import trident
from tests.host_checks import compiled, hits
from tests.test_dispatch_lifetime import assert_flat
from tests.test_equality import assert_same
from tests.test_host_failures import act, acting, bad_index, good_index, raises_in_the_middle
from tests.test_host_programs import native_programs

CALLS = 100_000


def same_attempts(
    attempt: Callable[[Any], Any], f: Any, native: bool = True, backend: str | None = None
) -> None:
    """`attempt` gives the same with `f` compiled, thrice, as in eager or with stock's `backend`."""
    name = getattr(f, "__name__", "forward")
    torch.manual_seed(1)
    expected = [attempt(f if backend is None else torch.compile(f, backend=backend))]
    torch._dynamo.reset()
    g = torch.compile(f, backend="trident")
    attempt(g)
    for _ in range(2):
        torch.manual_seed(1)
        assert_same([attempt(g)], expected)
    assert any(native_programs(name)) == native, trident.explain(f)
    assert (hits(name)[0] > 0) == native, trident.explain(f)


# ---- training ----


def leaf(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator).requires_grad_()


def layers(x: Any, w: Any) -> Any:
    h = torch.tanh(x @ w) * x
    h[0] = w[0]
    h.view(-1)[2:4].mul_(2)
    return h.pow(2).sum(), h


def test_tensor_hooks(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        log: list[Any] = []
        x, w = leaf(3, 3), leaf(3, 3)
        x.register_hook(lambda g: log.append(("x", g.clone())))
        w.register_hook(lambda g: g * 2)
        w.register_post_accumulate_grad_hook(lambda p: log.append(("w", p.grad.clone())))
        loss, h = f(x, w)
        h.register_hook(lambda g: log.append(("h", g.clone())))
        loss.register_hook(lambda g: log.append(("loss", g.clone())))
        loss.backward()
        return log, x.grad, w.grad

    same_attempts(attempt, layers)


def test_retain_graph_and_double_backward(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(3, 3), leaf(3, 3)
        loss, _ = f(x, w)
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        gx, gw = torch.autograd.grad(loss, (x, w), create_graph=True)
        (gx.pow(2).sum() + gw.sum()).backward()
        with pytest.raises(RuntimeError) as info:
            loss.backward()
        return first, gx, gw, x.grad, w.grad, str(info.value).split(".")[0]

    same_attempts(attempt, layers)


def graph_names(node: Any) -> list[Any]:
    return [
        (node.name(), [graph_names(n) if n is not None else None for n, _ in node.next_functions])
    ]


def test_autograd_graph(enabled: None) -> None:
    """The very nodes of eager's graph, and what the tensors say of themselves."""

    def attempt(f: Any) -> Any:
        loss, h = f(leaf(3, 3), leaf(3, 3))
        return graph_names(loss.grad_fn), h._version, h.is_leaf, loss.output_nr, h._is_view()

    same_attempts(attempt, layers)


def view_and_base(x: Any, w: Any) -> Any:
    y = x * 1
    v = y[1:]
    u = v.view(-1)
    return y, v, u, w.detach(), w[0], x.t()


def test_views_of_outputs(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(3, 3), leaf(3, 3)
        y, v, u, d, w0, t = f(x, w)
        bases = [[a._base is b for b in (y, x, w)] for a in (v, u, d, w0, t)]
        u.mul_(3)
        v[0].add_(1)
        (y.sum() * 2 + (w0 * t[0]).sum()).backward()
        return y, v, u, bases, x.grad, w.grad, d.requires_grad, v._version

    same_attempts(attempt, view_and_base)


def in_place_on_leaf_view(x: Any, w: Any) -> Any:
    with torch.no_grad():
        x.mul_(2)
        w[0] = 1
    return (x * w).sum()


def test_in_place_without_grad(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(3, 3), leaf(3, 3)
        loss = f(x, w)
        loss.backward()
        return loss, x, w, x.grad, w.grad, x._version, w._version

    same_attempts(attempt, in_place_on_leaf_view)


def leaf_error(x: Any, w: Any) -> Any:
    y = w.exp()
    y.add_(1)
    return y.sum() + x.sum()


def test_saved_tensor_was_changed(enabled: None) -> None:
    """exp's result was changed in place: the error of the backward pass is eager's."""

    def attempt(f: Any) -> Any:
        with pytest.raises(RuntimeError) as info:
            f(leaf(3), leaf(3)).backward()
        return str(info.value)

    same_attempts(attempt, leaf_error)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2 + ctx.saved_tensors[0] * 0


def with_function(x: Any, w: Any) -> Any:
    return (Double.apply(x * w) * w).sum()


# A trace would go into Dynamo's autograd_function_apply and record the operators of its forward,
# without the user's backward.
def test_autograd_function(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(3), leaf(3)
        f(x, w).backward()
        return x.grad, w.grad

    same_attempts(attempt, with_function, native=False)


def with_checkpoint(x: Any, w: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda a: (a @ w).tanh(), x, use_reentrant=False).sum()


def test_checkpoint_inside(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(3, 3), leaf(3, 3)
        f(x, w).backward()
        return x.grad, w.grad

    same_attempts(attempt, with_checkpoint, native=False)


def block(x: Any, w: Any) -> Any:
    h = torch.tanh(x @ w)
    return F.dropout((h * w).exp(), 0.5, training=True) * h


# The trace must not show its fake tensors to the caller's saved tensor hooks: non-reentrant
# checkpointing counts them.
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_outside(enabled: None, reentrant: bool) -> None:
    """Recomputation stops early by an exception that passes through the graph."""

    def attempt(f: Any) -> Any:
        x, w = leaf(3, 3), leaf(3, 3)
        y = torch.utils.checkpoint.checkpoint(f, x, w, use_reentrant=reentrant)
        y.sum().backward()
        return y, x.grad, w.grad

    g = torch.compile(block, backend="trident")
    for _ in range(3):
        torch.manual_seed(1)
        actual = attempt(g)
        torch.manual_seed(1)
        assert_same(actual, attempt(block))


def test_saved_tensor_hooks(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        log: list[Any] = []
        x, w = leaf(3, 3), leaf(3, 3)

        def pack(t: Any) -> Any:
            log.append(t.detach().clone())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss, _ = f(x, w)
        loss.backward()
        return log, x.grad, w.grad

    same_attempts(attempt, layers)


def test_compiling_packs_nothing(enabled: None) -> None:
    def attempt(backend: str) -> Any:
        torch._dynamo.reset()
        types: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: types.append(type(t)) or t, list):
            torch.compile(layers, backend=backend)(leaf(3, 3), leaf(3, 3))
        return types

    expected = attempt("eager")
    assert attempt("trident") == expected


def test_saved_tensor_hook_raises(enabled: None) -> None:
    g = compiled(layers, lambda: [leaf(3, 3), leaf(3, 3)])

    def pack(t: Any) -> Any:
        raise LookupError("pack")

    for f in (g, layers):
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with hooks, pytest.raises(LookupError, match="pack"):
            f(leaf(3, 3), leaf(3, 3))


def uses_act(x: Any, w: Any) -> Any:
    return (act(x * w) * w).sum()


def test_custom_backward(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(3), leaf(3)
        f(x, w).backward()
        return x.grad, w.grad

    same_attempts(attempt, uses_act)


def test_anomaly_mode(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(3, 3), leaf(3, 3)
        with torch.autograd.detect_anomaly(check_nan=True):
            loss, _ = f(x, w)
            with pytest.raises(RuntimeError) as info:
                (loss * float("nan")).backward()
        return str(info.value)

    same_attempts(attempt, layers)


def with_hook(x: Any, w: Any) -> Any:
    y = x * w
    y.register_hook(lambda g: g * 5)
    return y.sum()


# Dynamo's graph calls torch.ops.higher_order.register_hook, which a trace would execute and not
# record: the hook of an intermediate tensor would be lost.
def test_hook_in_the_graph(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(3), leaf(3)
        f(x, w).backward()
        return x.grad, w.grad

    same_attempts(attempt, with_hook, native=False, backend="eager")


# ---- state that the graph itself sets ----


def in_inference_mode(x: Any, w: Any) -> Any:
    with torch.inference_mode():
        y = x + 1
    with torch.inference_mode():
        z = y + 1
    return x * w, y, z


def with_sdpa_kernel(x: Any, w: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        q = (x @ w)[None, None]
        return F.scaled_dot_product_attention(q, q, q)


def without_saved_tensor_hooks(x: Any, w: Any) -> Any:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return act(x * w)


def deterministic(x: Any, w: Any) -> Any:
    torch.use_deterministic_algorithms(True)
    y = torch.empty(3)
    torch.use_deterministic_algorithms(False)
    return y, x + w


def sets_precision(x: Any, w: Any) -> Any:
    torch.set_float32_matmul_precision("medium")
    return x @ w


def saved_tensor_hooks_allowed() -> bool:
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return True
    except RuntimeError:
        return False


# A trace would execute, once, calls of functions that only set a state (_enter_inference_mode,
# _sdpa_kernel, _saved_tensors_hooks_disable, _set_deterministic_algorithms,
# set_float32_matmul_precision), and not record them.
@pytest.mark.parametrize(
    "f",
    [
        *(in_inference_mode, with_sdpa_kernel, without_saved_tensor_hooks, deterministic),
        sets_precision,
    ],
)
def test_state_set_in_the_graph(enabled: None, f: Any) -> None:
    def attempt(backend: str) -> Any:
        torch._dynamo.reset()
        g = torch.compile(f, backend=backend)
        found: list[Any] = []
        seen: list[bool] = []
        for _ in range(3):
            try:
                with acting(lambda: seen.append(saved_tensor_hooks_allowed())):
                    results = g(leaf(3, 3), leaf(3, 3))
                precision = torch.get_float32_matmul_precision()
            finally:
                torch.set_float32_matmul_precision("highest")
                torch.use_deterministic_algorithms(False)
            results = [results] if isinstance(results, torch.Tensor) else results
            flags = [(r.is_inference(), r.grad_fn and r.grad_fn.name()) for r in results]
            found.append((repr(list(results)), flags, seen[-1:], precision))
        return found

    expected = attempt("eager")
    assert attempt("trident") == expected


# ---- aliases and kinds of inputs ----


def combine(x: Any, y: Any) -> Any:
    x.add_(1)
    y.mul_(2)
    return x, x + y, y.view(-1), x


def plain(x: Any, y: Any) -> Any:
    return x + y, x * 2, y.sum(), x


def test_same_tensor_and_views(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        found = []
        a = torch.arange(12.0).view(3, 4)
        for make in (
            lambda: (a.clone(), a.clone()),
            lambda: (b := a.clone(), b),
            lambda: (b := a.clone(), b.view(3, 4)),
            lambda: (b := a.clone(), b.detach()),
            lambda: (b := a.clone(), b.data),
            lambda: (b := a.repeat(2, 1), b[1:4])[0:0] or (b[:3], b[1:4]),
        ):
            x, y = make()
            result = f(x, y)
            found.append((result, x, y, result[0] is x, result[3] is x, result[2]._base is y))
            found.append(result[2].untyped_storage().data_ptr() == y.untyped_storage().data_ptr())
        return found

    same_attempts(attempt, combine)


INPUTS: dict[str, Callable[[], Any]] = {
    "conj": lambda: torch.randn(2, 2, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(2, 2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "expanded": lambda: torch.randn(2, 1).expand(2, 2),
    "strided": lambda: torch.randn(4, 4)[::2, 1::2],
    "transposed": lambda: torch.randn(2, 2).t(),
    "empty": lambda: torch.randn(0, 2),
    "zero_dim": lambda: torch.randn(()),
    "parameter": lambda: torch.nn.Parameter(torch.randn(2, 2)),
    "buffer": lambda: torch.nn.Buffer(torch.randn(2, 2)),
    "leaf": lambda: torch.randn(2, 2).requires_grad_(),
    "no_leaf": lambda: torch.randn(2, 2).requires_grad_() * 1,
    "int": lambda: torch.randint(9, (2, 2)),
    "bool": lambda: torch.rand(2, 2) > 0.5,
    "double": lambda: torch.randn(2, 2, dtype=torch.float64),
    "half": lambda: torch.randn(2, 2).half(),
    "channels_last": lambda: torch.randn(1, 2, 2, 2).to(memory_format=torch.channels_last),
    "zerotensor": lambda: torch._efficientzerotensor((2, 2)),
    "meta": lambda: torch.randn(2, 2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(2, 2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(2)]),
    "mkldnn": lambda: torch.randn(2, 2).to_mkldnn(),
}


class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        LOGGED.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


LOGGED: list[str] = []
INPUTS["subclass"] = lambda: torch.randn(2, 2).as_subclass(Logged)


def describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flags = (value.layout, value.dtype, tuple(value.shape), value.is_conj(), value.is_neg())
        flags += (value.requires_grad, value.is_inference(), type(value).__name__)
        if value.device.type == "meta" or value.is_nested or value.is_quantized:
            return flags, str(value)
        value = value.to_dense() if value.layout is not torch.strided else value
        return flags, torch.view_as_real(value).tolist() if value.is_complex() else value.tolist()
    if isinstance(value, (tuple, list)):
        return [describe(v) for v in value]
    return value


def twice(x: Any) -> Any:
    return x * 2, x + x, x


def call(f: Any, x: Any) -> Any:
    try:
        return describe(f(x))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("first", [True, False])
def test_kinds_of_inputs(enabled: None, name: str, first: bool) -> None:
    """Compiled for that kind of input, or for plain tensors and only then called with it."""
    if name == "nested" and not first:
        pytest.skip("stock's own guard ends the process")
    g = torch.compile(twice, backend="trident")
    if not first:
        for _ in range(3):
            g(torch.randn(2, 2))
    for _ in range(3):
        torch.manual_seed(1)
        actual = call(g, INPUTS[name]())
        torch.manual_seed(1)
        expected = call(twice, INPUTS[name]())
        assert repr(actual) == repr(expected)
    x = torch.randn(2, 2)
    assert_same(g(x), twice(x))


def test_inference_tensors(enabled: None) -> None:
    with torch.inference_mode():
        inference = torch.randn(2, 2)

    def attempt(f: Any) -> Any:
        normal = torch.ones(2, 2)
        found = [describe(f(x)) for x in (normal, inference, normal)]
        with torch.inference_mode():
            found += [describe(f(x)) for x in (normal, inference, normal, torch.ones(2, 2))]
        return found + [describe(f(x)) for x in (inference, normal.clone().requires_grad_())]

    same_attempts(attempt, twice)


def test_requires_grad_switched(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, found = torch.ones(2, 2), []
        for requires in (False, True, True, False, True):
            x.requires_grad_(requires)
            a, b, c = f(x)
            found.append((a, b, c is x, a.requires_grad))
        with torch.no_grad():
            found.append((*f(x)[:2], True, False))
        return found

    same_attempts(attempt, twice)


def makes_constants(x: Any) -> Any:
    a = torch.tensor([1.0, 2.0])
    b = torch.tensor(3)
    a.add_(x)
    return a, b, torch.tensor([5, 6]), torch.zeros(2)


def test_constants_are_new_each_call(enabled: None) -> None:
    """What a call made is the caller's: changing it changes no later call."""

    def attempt(f: Any) -> Any:
        found = []
        for _ in range(3):
            results = f(torch.ones(2))
            found.append([r.clone() for r in results])
            for r in results:
                r.fill_(9)
        return found

    same_attempts(attempt, makes_constants)


# ---- modules ----


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.inner = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4))
        self.shared = self.first
        self.register_buffer("seen", torch.zeros(()))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        self.seen.add_(1)
        return self.inner(self.norm(self.first(x))) + self.dropout(self.shared(x))


def model(kind: type[torch.nn.Module] = Model) -> Any:
    torch.manual_seed(0)
    return kind()


def step(call: Any, owner: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(2)
    x = torch.randn(5, 4).to(dtype)
    result = call(x)
    result.sum().backward()
    gradients = [p.grad for p in owner.parameters()]
    owner.zero_grad(set_to_none=True)
    return result.detach(), gradients, {k: v.clone() for k, v in owner.state_dict().items()}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "eval": lambda m: m.eval(),
    "parameter": lambda m: setattr(m.first, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "parameter_in_place": lambda m: m.first.weight.data.fill_(0.5),
    "data": lambda m: setattr(m.first.weight, "data", torch.ones(4, 4)),
    "buffer": lambda m: m.register_buffer("seen", torch.full((), 9.0)),
    "load": lambda m: m.load_state_dict(Model().state_dict()),
    "load_assign": lambda m: m.load_state_dict(Model().state_dict(), assign=True),
    "double": lambda m: m.double(),
    "frozen": lambda m: m.first.requires_grad_(False),
    "unshared": lambda m: setattr(m, "shared", torch.nn.Linear(4, 4)),
    "hook": lambda m: m.first.register_forward_hook(lambda m, i, o: o * 2),
    "own_hook": lambda m: m.register_forward_pre_hook(lambda m, i: (i[0] + 1,)),
    "backward_hook": lambda m: m.norm.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
    "parameter_hook": lambda m: m.first.weight.register_hook(lambda g: g * 3),
    "inner": lambda m: m.inner.append(torch.nn.Tanh()),
    "momentum": lambda m: setattr(m.norm, "momentum", 0.9),
    "probability": lambda m: setattr(m.dropout, "p", 0.1),
    "forward": lambda m: setattr(m.first, "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_module_changed(enabled: None, name: str) -> None:
    def attempt(m: Any, f: Any) -> Any:
        found = [step(f, m) for _ in range(3)]
        torch.manual_seed(8)
        CHANGES[name](m)
        dtype = m.inner[1].weight.dtype
        return found + [step(f, m, dtype) for _ in range(3)]

    eager = model()
    expected = attempt(eager, torch.compile(eager, backend="eager"))  # hooks of parts: not guarded
    if name not in ("hook", "backward_hook"):
        uncompiled = model()
        assert_same(expected, attempt(uncompiled, uncompiled))
    torch._dynamo.reset()
    ours = model()
    assert_same(attempt(ours, torch.compile(ours, backend="trident")), expected)
    assert any(native_programs("forward")), trident.explain(ours)
    assert hits("forward")[0] >= 2


COUNTER = 0
TABLE: dict[str, Any] = {"scale": 2.0, "calls": []}


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.calls = torch.zeros((), dtype=torch.long)
        self.last: Any = None

    def forward(self, x: Any) -> Any:
        global COUNTER
        COUNTER += 1
        self.calls += 1
        self.last = x.detach() * 2
        y = (x @ self.weight) * TABLE["scale"]
        TABLE["calls"].append(y.detach())
        return y


def test_attributes_and_globals_written(enabled: None) -> None:
    global COUNTER

    def attempt(m: Any, f: Any) -> Any:
        global COUNTER
        COUNTER = 0
        TABLE["calls"].clear()
        found = []
        for scale in (2.0, 2.0, 2.0, 3.0, 3.0):
            TABLE["scale"] = scale
            found.append((step(f, m), COUNTER, m.calls.clone(), m.last, list(TABLE["calls"])))
        return found

    eager, ours = model(Counting), model(Counting)
    expected = attempt(eager, eager)
    assert_same(attempt(ours, torch.compile(ours, backend="trident")), expected)
    TABLE["calls"].clear()


def test_closures_and_nonlocal(enabled: None) -> None:
    def make(compile: Any) -> Any:
        count, scale = 0, torch.full((2,), 2.0)

        def reads(x: Any) -> Any:
            return x * scale

        def writes(x: Any) -> Any:
            nonlocal count
            count = count + 1
            return x * scale + count

        f, g = compile(reads), compile(writes)
        found = []
        for i in range(6):
            if i == 3:
                scale = torch.full((2,), 5.0)
            found.append((f(torch.ones(2)), g(torch.ones(2)), count))
        return found

    torch._dynamo.config.recompile_limit, limit = 16, torch._dynamo.config.recompile_limit
    try:
        actual = make(lambda f: torch.compile(f, backend="trident"))
    finally:
        torch._dynamo.config.recompile_limit = limit
    assert_same(actual, make(lambda f: f))
    assert native_programs("reads") == [True]


# ---- states switched between calls ----


def heavy(x: Any, w: Any) -> Any:
    q = x.view(1, 1, 4, 4)
    a = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return (x @ w).relu() + 1, a, torch.ones(2) * 0.5, F.linear(x, w), x.index_add(0, INDEX, w)


INDEX = torch.tensor([0, 1, 0, 1])


@contextlib.contextmanager
def set_and_reset(set: Any, value: Any, former: Any) -> Iterator[None]:
    set(value)
    try:
        yield
    finally:
        set(former)


class Log(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


REGIONS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast_half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
    "default_dtype": lambda: set_and_reset(torch.set_default_dtype, torch.float64, torch.float32),
    "default_device": lambda: torch.device("cpu"),
    "deterministic": lambda: set_and_reset(torch.use_deterministic_algorithms, True, False),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "precision": lambda: set_and_reset(torch.set_float32_matmul_precision, "medium", "highest"),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "function_mode": Log,
    "dispatch_mode": Dispatched,
    "threads": lambda: set_and_reset(torch.set_num_threads, 2, 1),
    "fill": lambda: set_and_reset(
        lambda v: setattr(torch.utils.deterministic, "fill_uninitialized_memory", v), False, True
    ),
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "view_replay": lambda: torch.autograd._force_original_view_tracking(True),
    "skip_function": torch._C.DisableTorchFunctionSubclass,
    "skip_all_functions": torch._C.DisableTorchFunction,
    "flush_denormal": lambda: set_and_reset(torch.set_flush_denormal, True, False),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("first", [True, False])
def test_state_switched(enabled: None, name: str, first: bool) -> None:
    """Compiled inside of the region or outside of it; and called in both, in turn."""

    def attempt(f: Any, called: Any) -> Any:
        found = []
        order = (True, False) if first else (False, True)
        for inside in (*order * 2, *order, *order):
            x, w = leaf(4, 4), leaf(4, 4)
            Dispatched.names = []
            with REGIONS[name]() if inside else contextlib.nullcontext():
                results = f(x, w)
                called()
            flags = [(r.grad_fn.name() if r.grad_fn else None, r.is_inference()) for r in results]
            gradients: Any = None
            if results[0].requires_grad:
                sum(r.float().sum() for r in results).backward()
                gradients = (x.grad, w.grad)
            found.append((list(results), flags, gradients, list(Dispatched.names)))
        return found

    expected = attempt(heavy, lambda: None)
    g = torch.compile(heavy, backend="trident")
    assert_same(attempt(g, lambda: None), expected)
    if name != "dispatch_mode":  # below one, Dynamo gives the frame up
        assert hits("heavy")[0] >= 2, trident.explain(g)


def test_profiler_sees_the_same_operators(enabled: None) -> None:
    def names(f: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            f(leaf(4, 4), leaf(4, 4))
        return [e.name for e in profile.events() if e.name.startswith("aten::")]

    stock = torch.compile(heavy, backend="eager")
    stock(leaf(4, 4), leaf(4, 4))
    expected = names(stock)
    torch._dynamo.reset()
    g = compiled(heavy, lambda: [leaf(4, 4), leaf(4, 4)])
    assert names(g) == expected
    g(leaf(4, 4), leaf(4, 4))
    assert names(g) == expected


def test_functorch(enabled: None) -> None:
    def attempt(f: Any) -> Any:
        x, w = leaf(4, 4).detach(), leaf(4, 4).detach()
        found = [f(x, w)[0]]
        found.append(torch.func.grad(lambda a: f(a, w)[0].sum())(x))
        found.append(torch.func.vmap(lambda a: f(a, w)[0])(torch.stack([x, w])))
        found.append(torch.func.jvp(lambda a: f(a, w)[0], (x,), (w,))[1])
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, w)
            found.append(torch.autograd.forward_ad.unpack_dual(f(dual, w)[0]).tangent)
        return [*found, f(x, w)[0]]

    g = compiled(smooth, lambda: [torch.ones(4, 4), torch.eye(4)])
    expected = attempt(smooth)
    for _ in range(3):
        assert_same(attempt(g), expected)


def smooth(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w) * x, x


def test_forward_mode_after_compiling(enabled: None) -> None:
    g = compiled(smooth, lambda: [torch.ones(2, 2), torch.eye(2)])
    for f in (smooth, g, g):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(2, 2), torch.eye(2))
            y = f(dual, torch.eye(2))[0]
            tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
        if f is smooth:
            expected = tangent
        assert_same(tangent, expected)


def test_explained_as_native(enabled: None) -> None:
    g = compiled(smooth, lambda: [torch.ones(2, 2), torch.eye(2)])
    text = str(trident.explain(g))
    assert "host program: native" in text
    assert "there is no graph" not in text


# ---- memory ----


def test_hits_are_flat(enabled: None) -> None:
    def f(x: Any, w: Any) -> Any:
        a, b = x.split(2)
        return {"a": a * w[0], "b": [b, (x, x @ w)]}

    x, w = torch.ones(4, 4), torch.eye(4)
    g = compiled(f, lambda: [x, w])
    before = hits("f")[0]
    assert_flat(lambda: g(x, w), CALLS, x, w, f, g)
    assert hits("f")[0] >= before + CALLS


def test_training_is_flat(enabled: None) -> None:
    owner = model()
    g = torch.compile(owner, backend="trident")
    for _ in range(3):
        step(g, owner)
    x = torch.randn(5, 4)

    def train() -> None:
        g(x).sum().backward()

    assert_flat(train, 3000, x, owner, owner.first.weight)
    assert hits("forward")[0] >= 3000


def test_errors_are_flat(enabled: None) -> None:
    g = compiled(raises_in_the_middle, good_index)
    x, i = bad_index()
    x.zero_()

    def fail() -> None:
        with contextlib.suppress(IndexError):
            g(x, i)

    before = hits("raises_in_the_middle")[1]
    assert_flat(fail, CALLS, x, i, IndexError, raises_in_the_middle.__code__)
    assert hits("raises_in_the_middle")[1] >= before + CALLS


def acts_once(x: Any) -> Any:
    return act(x * 2)


def test_python_errors_are_flat(enabled: None) -> None:
    x = torch.ones(3)
    g = compiled(acts_once, lambda: [x])
    error = ValueError("again")

    def fail() -> None:
        error.__traceback__ = None
        raise error

    def attempt() -> None:
        with contextlib.suppress(ValueError):
            g(x)
        error.__traceback__ = None

    with acting(fail):
        assert_flat(attempt, 3000, x, error, ValueError)


SEEN: list[Any] = []


@torch.library.custom_op("trident_failures::watch", mutates_args=())
def watch(x: torch.Tensor) -> torch.Tensor:
    SEEN.append((weakref.ref(x.untyped_storage()), [r() is not None for r in SEEN_STORAGES]))
    SEEN_STORAGES.append(weakref.ref(x.untyped_storage()))
    return x + 1


SEEN_STORAGES: list[Any] = []


@watch.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def chain(x: Any) -> Any:
    x = watch(x * 2)
    x = watch(x * 2)
    x = watch(x.view(-1) * 2)
    a, _ = x.chunk(2)
    return watch(watch(a + 1) + 1)


def test_temporaries_are_freed(enabled: None) -> None:
    """Of each operator's argument, whether it lives when the next ones run."""

    def attempt(f: Any) -> Any:
        SEEN.clear()
        SEEN_STORAGES.clear()
        f(torch.ones(4, 4))
        alive = [tuple(living) for _, living in SEEN]
        return alive, [r() is not None for r in SEEN_STORAGES]

    stock = torch.compile(chain, backend="eager")
    attempt(stock)
    expected = attempt(stock)
    torch._dynamo.reset()
    g = torch.compile(chain, backend="trident")
    for _ in range(3):
        actual = attempt(g)
    assert hits("chain")[0] > 0
    assert actual == expected
    assert not any(actual[1])


def test_results_die_with_their_owner(enabled: None) -> None:
    g = compiled(acts_once, lambda: [torch.ones(3)])
    x = torch.ones(3)
    result = g(x)
    dead = [weakref.ref(result), weakref.ref(x)]
    del result, x
    assert [r() for r in dead] == [None, None]


def test_model_dies(enabled: None) -> None:
    owner = model()
    g = torch.compile(owner, backend="trident")
    for _ in range(3):
        step(g, owner)
    assert hits("forward")[0] > 0
    dead = [weakref.ref(owner), weakref.ref(owner.first.weight)]
    del owner, g
    gc.collect()
    assert [r() for r in dead] == [None, None]
