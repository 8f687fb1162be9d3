"""Under the default backend the graph runs natively, with Inductor's kernels: bitwise as stock.

Each function is compiled once; what runs natively under Trident then runs through stock's wrappers.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

import trident
from tests.conftest import frame_stats
from tests.host_functions import FUNCTIONS, make_inputs
from tests.memory import grows
from tests.test_equality import assert_same
from tests.test_host_programs import native_programs, run
from trident.capture import inductor
from trident.control import runtime

ROOT = Path(__file__).resolve().parent.parent
# Inductor calls an operator that returns a list among other things.
NOT_NATIVE = {"a_tensor_and_a_list"}


def natively_and_stock(
    compiled: Callable[..., Any], make: Callable[[], Sequence[Any]], calls: int = 4
) -> tuple[list[Any], list[Any]]:
    """(result, inputs afterwards, what is between them, the generator's state) of calls under
    Trident, the first of which compiles, and of as many of the same code in stock."""

    def call() -> Any:
        torch.manual_seed(5)
        inputs = list(make())
        result = compiled(*inputs)
        tensors = [x for x in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(x)]
        plain = [x for x in inputs if torch.is_tensor(x)]
        between = [[_relation(a, b) for b in (*plain, *tensors)] for a in tensors]
        kept = [_kept(x) for x in (*tensors, *plain)]
        return result, inputs, between, kept, torch.get_rng_state()

    with trident.enable():
        ours = [call() for _ in range(calls)]
    return ours, [call() for _ in range(calls)]


def _relation(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, bool, bool]:
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return a is b, same, a._base is b and b is not None


def _kept(x: torch.Tensor) -> Any:
    """What a tensor is beside its values."""
    version = None if x.is_inference() else x._version
    return version, x.is_leaf, x.is_inference(), x._is_view(), vars(x)


def check(
    f: Callable[..., Any], make: Callable[[], Sequence[Any]], native: bool = True, **options: Any
) -> Any:
    """`f` is as in stock, and native or not; returns the compiled function."""
    compiled = torch.compile(f, **options)
    ours, stock = natively_and_stock(compiled, make)
    for number, (found, expected) in enumerate(zip(ours[1:], stock[1:], strict=True)):
        assert_same(found, expected, f"call {number + 1}")
    name = f.__name__ if hasattr(f, "__name__") else "forward"
    assert set(native_programs(name)) == {native}, trident.explain(compiled)
    return compiled


@pytest.fixture(autouse=True)
def _fresh(fresh: None) -> None:
    """Dynamo as after import; gradients are on."""


# ---- the functions of the other backend ----


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_as_stock(name: str) -> None:
    check(FUNCTIONS[name], make_inputs, native=name not in NOT_NATIVE)


@pytest.mark.parametrize("name", ["matrices", "linear_and_norms", "indexing", "outputs_alias"])
def test_same_as_stock_with_dynamic_shapes(name: str) -> None:
    f = FUNCTIONS[name]
    compiled = check(f, make_inputs, dynamic=True)
    generator = torch.Generator().manual_seed(8)

    def other() -> list[torch.Tensor]:
        return [torch.randn(s, generator=generator) for s in ((9, 6), (9, 6), (6, 6))]

    state = generator.get_state()
    with trident.enable(), torch.no_grad():
        ours = compiled(*other())
    generator.set_state(state)
    with torch.no_grad():
        assert_same(ours, compiled(*other()))


# ---- what graphs do ----


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return torch.arange(n).reshape(shape).to(dtype) / (n if dtype.is_floating_point else 1)


def test_constants_and_buffers_reused() -> None:
    table = torch.arange(12.0)

    def f(x: Any, w: Any) -> Any:
        y = torch.mm(x, w).relu()
        z = torch.mm(y, w).relu()
        return torch.mm(z, w) + torch.tensor([1.0, 2.0, 3.0, 4.0]), z.sum() + table[2:4].sum()

    check(f, lambda: (ones(4, 4), ones(4, 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_dtypes(dtype: torch.dtype) -> None:
    def f(x: Any, y: Any) -> Any:
        return x * y + 1, x.sum(), (x > y).any(), x.to(torch.float32).mean(0)

    check(f, lambda: (ones(4, 6, dtype=dtype), ones(4, 6, dtype=dtype) + 1))


def test_views_of_views_and_inputs_returned() -> None:
    def f(x: Any, y: Any) -> Any:
        y.add_(1)
        z = x.t()[1:3]
        return z, z.reshape(-1), x.view(-1)[3:], y, (x + 1).unsqueeze(0).expand(3, -1, -1)

    check(f, lambda: (ones(4, 6), ones(3)))


def test_outputs_alias_each_other() -> None:
    def f(x: Any) -> Any:
        y = x + 1
        return y, y.view(-1), y[1:], y

    check(f, lambda: (ones(4, 6),))


def test_metadata_of_inputs() -> None:
    """Dynamo ends a graph where it changes; all pieces do the same."""

    def f(x: Any, y: Any) -> Any:
        x.transpose_(0, 1)
        x.mul_(2)
        y.unsqueeze_(0)
        return x + 1

    compiled = torch.compile(f)
    ours, stock = natively_and_stock(compiled, lambda: (ones(4, 6), ones(3)))
    assert_same(ours[1:], stock[1:])


@pytest.mark.parametrize("grad_mode", [False, True])
def test_mutated_leaves(grad_mode: bool) -> None:
    """Their version advances, once, where autograd is to see it."""

    def f(x: Any) -> Any:
        with torch.no_grad():
            x.mul_(2)
        return x.detach() + 1

    with torch.set_grad_enabled(grad_mode):
        check(f, lambda: (ones(4).requires_grad_(),))


def test_views_of_one_tensor_mutated() -> None:
    """Inputs that share memory are one to AOTAutograd: that stays stock."""

    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        return y * 2

    def make() -> tuple[torch.Tensor, ...]:
        base = ones(6)
        return base[:3], base[1:4]

    check(f, make, native=False)


def test_inference_mode_and_its_tensors() -> None:
    def f(x: Any, y: Any) -> Any:
        y.add_(x)
        return x * 2, y.view(-1)

    with torch.inference_mode():
        check(f, lambda: (ones(4), ones(4)))


def test_parameters_without_grad_mode() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.calls.add_(1)
            return self.linear(x).relu(), self.calls

    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model)
    with torch.no_grad():
        with trident.enable():
            ours = [compiled(ones(2, 4))[0] for _ in range(4)]
        assert model.calls == 4
        stock = compiled(ones(2, 4))[0]
        assert model.calls == 5
    assert native_programs("forward") == [True]
    for found in ours:
        assert_same(found, stock)


def test_gradients_on_but_none_required() -> None:
    """The graph runs with gradients off, and leaves the mode as it was."""

    def f(x: Any) -> Any:
        return torch.mm(x, x) * 2

    check(f, lambda: (ones(4, 4),))
    assert torch.is_grad_enabled()


def test_autocast() -> None:
    def f(x: Any, w: Any) -> Any:
        return F.linear(x, w), (x + 1).to(torch.float64)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(f, lambda: (ones(4, 4), ones(4, 4)))
        assert torch.is_autocast_enabled("cpu")


def test_conv_and_batch_norm_in_eval() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)).eval()

    def f(x: Any) -> Any:
        return model(x)

    with torch.no_grad():
        check(f, lambda: (ones(1, 2, 8, 8),))


@pytest.mark.parametrize("dynamic", [None, True])
def test_attention(dynamic: bool | None) -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    check(f, lambda: (ones(1, 2, 8, 16), ones(1, 2, 8, 16), ones(1, 2, 8, 16)), dynamic=dynamic)


def test_sorting_and_scattering() -> None:
    def f(x: Any, i: Any) -> Any:
        values, order = torch.sort(x, dim=1)
        top = torch.topk(x, 2)
        y = x.index_put((i,), values[:2], accumulate=True)
        return values, order, top.values, top.indices, y.scatter_add(0, order[:1], x[:1])

    check(f, lambda: (ones(4, 4).sin(), torch.tensor([1, 1])))


def test_embedding_bag_and_counts() -> None:
    def f(i: Any, w: Any) -> Any:
        return F.embedding(i, w), F.embedding_bag(i[None], w), torch.bincount(i, minlength=5)

    with torch.no_grad():
        compiled = torch.compile(f)
        ours, stock = natively_and_stock(compiled, lambda: (torch.tensor([1, 0, 3]), ones(5, 4)))
    assert_same(ours[1:], stock[1:])


@pytest.mark.parametrize("fallback", [False, True])
def test_random_numbers(fallback: bool) -> None:
    def f(x: Any) -> Any:
        return F.dropout(x, 0.5), torch.rand_like(x), torch.randn(3), torch.randint(5, (2,))

    with torch._inductor.config.patch(fallback_random=fallback):
        check(f, lambda: (ones(4, 6),))


@torch.library.custom_op("trident_tests::noted", mutates_args=("x",))
def noted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 3


@noted.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(y)


def test_custom_operators() -> None:
    def f(x: Any, y: Any) -> Any:
        z = noted(x, y + 1)
        return z * 2, x + 1

    check(f, lambda: (ones(4), ones(4)))


def in_branches(x: Any, w: Any) -> Any:
    y = torch.mm(x, w)

    def positive(y: Any, w: Any) -> Any:
        return torch.mm(y, w) + 1, torch.cond(y.max() > 8, torch.sin, torch.cos, (y,))

    z, u = torch.cond(y.sum() > 0, positive, lambda y, w: (y - 1, y * w), (y, w))
    return z * 2, u, y


@torch.compiler.nested_compile_region
def region(x: Any, w: Any) -> Any:
    return torch.relu(torch.mm(x, w)) + 1


def in_regions(x: Any, w: Any) -> Any:
    return region(region(x, w), w) * 2


@pytest.mark.parametrize("f", [in_branches, in_regions])
@pytest.mark.parametrize("dynamic", [None, True])
def test_subgraphs(f: Any, dynamic: bool | None) -> None:
    """Of ``torch.cond`` one branch runs; a nested region's code is there once."""
    factors = [1.0, -1.0, 5.0, 1.0, -1.0, 5.0]

    def make() -> Any:
        factor = factors[0]
        factors.append(factors.pop(0))
        return ones(4, 4) * factor, ones(4, 4)

    with torch.no_grad():
        compiled = torch.compile(f, dynamic=dynamic)
        ours, stock = natively_and_stock(compiled, make, calls=len(factors))
    assert_same(ours[1:], stock[1:])
    assert set(native_programs(f.__name__)) == {True}


def test_errors_in_branches() -> None:
    table = ones(3)

    def f(x: Any, i: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x, i: table[i] * x, lambda x, i: table[i] - x, (x, i))

    compiled = torch.compile(f)
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    with torch.no_grad():
        for x in (ones(2), -ones(2)):
            compiled(x, good)
            with pytest.raises(RuntimeError) as expected:
                compiled(x, bad)
            with trident.enable():
                for _ in range(2):
                    compiled(x, good)
                with pytest.raises(RuntimeError) as found:
                    compiled(x, bad)
            assert str(found.value) == str(expected.value)
    assert native_programs("f") == [True]


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Inductor's kernels end the process there, in stock as well"
)
def test_division_by_zero_in_a_kernel() -> None:
    def f(x: Any, y: Any) -> Any:
        return torch.div(x, y, rounding_mode="floor") + 1

    compiled = torch.compile(f)
    x, good, bad = (torch.tensor([8, 9, n]) for n in (1, 2, 0))
    compiled(x, good)
    expected = _raised(compiled, x, bad)
    with trident.enable():
        for _ in range(3):
            compiled(x, good)
        assert _raised(compiled, x, bad) == expected
    assert native_programs("f") == [True]


def _raised(f: Callable[..., Any], *inputs: Any) -> tuple[type, str] | None:
    try:
        f(*inputs)
    except Exception as error:
        return type(error), str(error)
    return None


# ---- shapes and specializations ----


def test_conditions_on_sizes() -> None:
    """Stock raises where a condition of the user's does not hold."""

    def f(x: Any, y: Any) -> Any:
        torch._check(x.size(0) * 2 < 40)
        return torch.mm(x, y) * 2

    compiled = torch.compile(f, dynamic=True)
    with trident.enable():
        for n in (3, 4, 5, 6):
            compiled(ones(n, 4), ones(4, n))
        ours = compiled(ones(7, 4), ones(4, 7))
        too_large = _raised(compiled, ones(21, 4), ones(4, 21))
    assert_same(ours, compiled(ones(7, 4), ones(4, 7)))
    assert too_large == _raised(compiled, ones(21, 4), ones(4, 21))


def test_sizes_are_computed_natively() -> None:
    def f(x: Any, n: int) -> Any:
        y = x.reshape(-1)[: x.size(0) * 2]
        return torch.mm(x, x.t()), y.reshape(2, -1) * n, x.new_zeros(x.size(0) // 2, n % 3 + 1)

    compiled = torch.compile(f, dynamic=True)
    expected: dict[Any, Any] = {}
    sizes = [(4, 5, 7), (6, 3, 7), (8, 9, 8), (10, 5, 5)]
    with trident.enable():
        for a, b, n in (*sizes, *sizes):
            expected[a, b, n] = compiled(ones(a, b), n)
        hits = frame_stats("f").hits
        for a, b, n in sizes:
            assert_same(compiled(ones(a, b), n), expected[a, b, n])
        assert frame_stats("f").hits == hits + len(sizes)
    for a, b, n in sizes:
        assert_same(compiled(ones(a, b), n), expected[a, b, n])
    assert set(native_programs("f")) == {True}


def test_sizes_are_marked_for_the_next_graph() -> None:
    """Outputs with dynamic sizes say so to Dynamo, as stock's do: a test of what is on them."""

    def f(x: Any) -> Any:
        return x + 1, x.t()

    compiled = check(f, lambda: (ones(4, 6),), dynamic=True)
    with trident.enable():
        assert any("dynamic" in name for name in vars(compiled(ones(4, 6))[0]))


def test_several_specializations() -> None:
    def f(x: Any, flag: bool) -> Any:
        return x * 2 if flag else x - 1

    compiled = torch.compile(f, dynamic=False)
    cases = [(ones(3), True), (ones(3), False), (ones(4), True), (ones(3).double(), True)]
    with trident.enable():
        for case in cases * 3:
            compiled(*case)
        ours = [compiled(*case) for case in cases]
        assert native_programs("f") == [True] * 4
        assert frame_stats("f").misses <= 2 * len(cases)
    assert_same(ours, [compiled(*case) for case in cases])


def test_pieces_call_their_programs() -> None:
    """Where Dynamo's code runs the frame, the graph is native still, while Trident is enabled."""

    def in_pieces(x: Any) -> Any:
        y = torch.relu(x) + 1
        with torch.no_grad():
            torch._dynamo.graph_break()
            return y * 2, y

    compiled = torch.compile(in_pieces)
    ours, stock = natively_and_stock(compiled, lambda: (ones(4, 4) - 0.5,))
    assert_same(ours, stock)
    assert "called by Dynamo's code object" in str(trident.explain(compiled))


def test_a_stock_check_of_strides_raises() -> None:
    """What Inductor asserts of an operator's result is asserted: the operator lies about it."""

    @torch.library.custom_op("trident_tests::strided", mutates_args=())
    def strided(x: torch.Tensor) -> torch.Tensor:
        return x.t().clone() if int(x[0, 0]) else x.t().contiguous().t().clone().t().contiguous()

    @strided.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x.t()).contiguous()

    def f(x: Any) -> Any:
        return strided(x) + 1

    compiled = torch.compile(f)
    good, bad = torch.zeros(2, 3), torch.ones(2, 3)
    compiled(good)
    expected = _raised(compiled, bad)
    with trident.enable():
        for _ in range(4):
            compiled(good)
        assert _raised(compiled, bad) == expected
        assert_same(compiled(good), torch.ones(3, 2))


def test_errors_of_kernels_and_operators() -> None:
    def f(w: Any, i: Any) -> Any:
        return F.embedding(i, w) + 1

    compiled = torch.compile(f)
    w, good, bad = ones(5, 4), torch.tensor([1]), torch.tensor([7])
    with torch.no_grad():
        compiled(w, good)
        with pytest.raises(RuntimeError) as expected:
            compiled(w, bad)
        with trident.enable():
            for _ in range(3):
                compiled(w, good)
            with pytest.raises(RuntimeError) as found:
                compiled(w, bad)
            assert frame_stats("f").raised == 1
            assert torch.is_grad_enabled() is False
            compiled(w, good)
    assert str(found.value) == str(expected.value)


# ---- what is not native ----


def test_training_is_stocks() -> None:
    def f(x: Any) -> Any:
        return (x * 2).sum()

    x = ones(4).requires_grad_()
    compiled = torch.compile(f)
    with trident.enable():
        for _ in range(3):
            compiled(x).backward()
    assert_same(x.grad, torch.full((4,), 6.0))
    assert native_programs("f") == [False]
    assert "AOTAutograd runs it through" in str(trident.explain(compiled))


def test_an_unknown_statement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = inductor.host_functions()
    monkeypatch.setattr(
        "trident.codegen.import_wrapper.host_functions",
        lambda: {f: kind for f, kind in known.items() if kind != "empty_strided"},
    )

    def f(x: Any) -> Any:
        return x * 2 + 1

    compiled = check(f, lambda: (ones(4),), native=False)
    assert "a call of a function that is not known (Inductor: 'buf0 = " in str(
        trident.explain(compiled)
    )


def test_source_that_is_not_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper is believed only if its source gives the code that runs."""
    from torch._inductor.output_code import CompiledFxGraph

    original = CompiledFxGraph.post_compile

    def tamper(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.source_code = self.source_code.replace("(4, )", "(2, )")

    monkeypatch.setattr(CompiledFxGraph, "post_compile", tamper)

    def f(x: Any) -> Any:
        return x * 3 + 1

    compiled = check(f, lambda: (ones(4),), native=False)
    assert "Inductor's source is not what runs" in str(trident.explain(compiled))


def test_a_wrapper_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something between AOTAutograd and Inductor's code: it has to run."""
    from torch._inductor.output_code import CompiledFxGraph

    original, calls = CompiledFxGraph.post_compile, []

    def wrap(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        inner = self.current_callable

        def outer(inputs: Any) -> Any:
            calls.append(1)
            return inner(inputs)

        self.current_callable = outer

    monkeypatch.setattr(CompiledFxGraph, "post_compile", wrap)

    def f(x: Any) -> Any:
        return x * 4 + 1

    check(f, lambda: (ones(4),), native=False)
    assert len(calls) == 8


def test_cpp_wrapper_is_stocks() -> None:
    def f(x: Any) -> Any:
        return x * 5 + 1

    check(f, lambda: (ones(4),), native=False, options={"cpp_wrapper": True})


# ---- options and caches ----


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "reduce-overhead"},
        {"options": {"epilogue_fusion": False}},
        {"options": {"size_asserts": False}},
        {"options": {"alignment_asserts": True}},
        {"fullgraph": True},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    def f(x: Any, w: Any) -> Any:
        return torch.relu(torch.mm(x, w)) + 1, torch.mm(w, x).sum(1)

    check(f, lambda: (ones(8, 8), ones(8, 8)), **options)


def test_freezing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()

    def f(x: Any) -> Any:
        return model(x)

    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(f)
        ours, stock = natively_and_stock(compiled, lambda: (ones(2, 8),))
    assert_same(ours[1:], stock[1:])


def test_no_more_is_compiled() -> None:
    """Inductor compiles as often, and as many kernels, with Trident as without."""

    def counts() -> Any:
        def f(x: Any, y: Any) -> Any:
            return torch.relu(x + y) * 7, x.sum(0)

        torch._dynamo.reset()
        counters.clear()
        metrics.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.compile(f, dynamic=False)
            for n in (3, 4, 3, 4, 3, 4):
                compiled(ones(n), ones(n))
        return (
            dict(counters["frames"]),
            dict(counters["inductor"]),
            dict(counters["aot_autograd"]),
            metrics.generated_kernel_count,
            metrics.cpp_outer_loop_fused_inner_counts,
        )

    stock = counts()
    with trident.enable():
        assert counts() == stock
    assert native_programs("f") == [True, True]


def test_warm_cache() -> None:
    """A graph that comes from Inductor's and AOTAutograd's caches is native, too."""

    def f(x: Any, y: Any) -> Any:
        return torch.sin(x + y) * 11, x.t()

    make = lambda: (ones(4, 5), ones(4, 5))  # noqa: E731
    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        check(f, make)
        torch._dynamo.reset()
        counters.clear()
        check(f, make)
        hits = counters["inductor"]["fxgraph_cache_hit"]
        hits += counters["aot_autograd"]["autograd_cache_hit"]
        assert hits > 0, counters


_PROCESS = """
    import sys, torch, trident
    from torch._dynamo.utils import counters
    from trident.control import runtime

    def f(x, w):
        return torch.relu(torch.mm(x, w) + 13), x.t()

    x, w = torch.arange(12.0).reshape(3, 4), torch.arange(16.0).reshape(4, 4)
    if sys.argv[2] == "load":
        torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read())
    compiled = torch.compile(f)
    with torch.no_grad():
        with trident.enable():
            ours = [compiled(x, w) for _ in range(4)][-1]
            hits = trident.stats().hits
            (entry,) = [e for m in runtime.modules.values() if m.name == "f" for e in m.entries]
            assert entry.built.program is not None, trident.explain(compiled)
        stock = compiled(x, w)
    assert hits >= 3, hits
    assert all(torch.equal(a, b) for a, b in zip(ours, stock))
    cached = counters["inductor"]["fxgraph_cache_hit"]
    cached += counters["aot_autograd"]["autograd_cache_hit"]
    print("cached" if cached else "compiled")
    if sys.argv[2] == "save":
        artifacts, _ = torch.compiler.save_cache_artifacts()
        open(sys.argv[1], "wb").write(artifacts)
"""


def _process(folder: Path, cache: str, what: str) -> str:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(_PROCESS))
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "artifacts"), what],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / cache),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_caches_of_other_processes(tmp_path: Path) -> None:
    """Cold; a second process with the same cache; a third that loads saved artifacts."""
    assert _process(tmp_path, "first", "save") == "compiled"
    assert _process(tmp_path, "first", "plain") == "cached"
    assert _process(tmp_path, "other", "load") == "cached"


# ---- threads, memory, observers ----


def test_threads() -> None:
    def f(x: Any, w: Any) -> Any:
        return torch.mm(torch.relu(x), w) + 17

    compiled = torch.compile(f)
    inputs = [(ones(8, 8) * k, ones(8, 8)) for k in range(4)]
    wrong: list[str] = []
    with torch.no_grad(), trident.enable():
        expected = [compiled(*i) for i in inputs]
        for i in inputs:
            compiled(*i)

        def work(k: int) -> None:
            with torch.no_grad():
                for _ in range(300):
                    if not torch.equal(compiled(*inputs[k]), expected[k]):
                        wrong.append(str(k))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_nothing_is_left_behind() -> None:
    def f(x: Any, w: Any) -> Any:
        y = torch.mm(x, w)
        return torch.topk(y, 2), x.t(), y.sum(), F.embedding(torch.tensor([1]), w)

    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(f, dynamic=dynamic)
        x, w = ones(4, 4), ones(4, 4)
        with torch.no_grad(), trident.enable():
            for _ in range(3):
                compiled(x, w)
            assert grows(functools.partial(compiled, x, w)) is None


def test_a_profiler_sees_stocks_ranges() -> None:
    def f(x: Any) -> Any:
        return torch.mm(x, x) * 19

    compiled = torch.compile(f)
    with torch.no_grad(), trident.enable():
        for _ in range(4):
            expected = compiled(ones(4, 4))
        with torch.profiler.profile() as profile:
            assert_same(compiled(ones(4, 4)), expected)
    assert any("Call CompiledFxGraph" in event.key for event in profile.key_averages())


def test_warnings_of_operators() -> None:
    def f(x: Any, out: Any) -> Any:
        return torch.mm(x, x), x + 1

    compiled = torch.compile(f)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with trident.enable():
            for _ in range(4):
                compiled(ones(4, 4), None)
    assert native_programs("f") == [True]


def test_results_do_not_depend_on_when_trident_was_enabled() -> None:
    """Compiled before it: known only if Trident was imported then, which it was."""

    def f(x: Any) -> Any:
        return x * 23 + 1

    compiled = torch.compile(f)
    expected = compiled(ones(4))
    with trident.enable():
        for _ in range(3):
            assert_same(compiled(ones(4)), expected)
        assert frame_stats("f").hits >= 1


def test_inputs_as_of_the_other_backend() -> None:
    """`run`, which the other backend is tested with, sees the same of both."""
    f = FUNCTIONS["outputs_alias"]
    compiled = torch.compile(f)
    with trident.enable():
        ours = run(compiled)
    assert_same(ours, run(compiled))
    assert runtime.modules
