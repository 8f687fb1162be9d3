"""What a graph costs through the default backend: Inductor's kernels, and whose host code."""

from __future__ import annotations

import ast
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import Config, Decoder, make_cache, make_prompt
from torch import Tensor, nn

import trident
from bench.compare import Variant
from bench.test_host import compare, keep
from trident.capture import inductor
from trident.control import runtime

Record = Callable[..., None]


LOOP = """
#include <torch/extension.h>
#include <ATen/EmptyTensor.h>
at::Tensor run(const at::Tensor &x, const at::Tensor &y, int64_t kernel) {
  at::Tensor out = at::detail::empty_strided_cpu({16}, {1}, at::kFloat);
  using Kernel = void (*)(const float *, const float *, float *);
  reinterpret_cast<Kernel>(kernel)(x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>());
  return out;
}
"""


def small(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y) * 2


def kernels_of(f: Callable[..., Any]) -> list[inductor.Kernel]:
    """The kernels that the graph of the compiled `f` calls."""
    (entry,) = runtime.module_of(f.__code__).entries
    names = [n for n in entry.spec.compiled_code.co_names if n.startswith("__compiled_fn_")]
    wrapper = inductor.of_callable(f.__globals__[names[0]])
    assert wrapper is not None
    called = [n.id for s in wrapper.body for n in ast.walk(s) if isinstance(n, ast.Name)]
    return [k for k in map(wrapper.kernel, dict.fromkeys(called)) if k is not None]


def test_inductor_small_graph(benchmark: Any, record: Record, tmp_path: Any) -> None:
    """Three small operators, one kernel; C++ that allocates and calls the same kernel."""
    from torch.utils.cpp_extension import is_ninja_available, load_inline

    inputs = torch.randn(16), torch.randn(16)
    with trident.enable():
        compiled = torch.compile(small)
        expected = next(compiled(*inputs) for _ in range(3))
    more = {}
    if is_ninja_available():
        loop = load_inline(
            "allocate_and_call", LOOP, functions=["run"], build_directory=str(tmp_path)
        )
        (kernel,) = kernels_of(small)
        assert torch.equal(loop.run(*inputs, kernel.address), expected)
        more["C++"] = Variant("f(*x, k)", {"f": loop.run, "x": inputs, "k": kernel.address})
    comparison = compare(small, inputs, more, "inductor")
    benchmark(small, *inputs)
    figures: dict[str, Any] = {"target": 20, "eager_target": 4}
    if more:
        figures |= {"loop_ratio": comparison.ratio("Trident", "C++"), "loop_target": 1.5}
    keep(record, comparison, **figures)


def test_inductor_mlp(benchmark: Any, record: Record) -> None:
    """Eight layers of Linear(16, 16) and ReLU on one row, without gradients."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers).requires_grad_(False)

    def function(x: Tensor) -> Any:
        return model(x)

    inputs = (torch.randn(1, 16),)
    comparison = compare(function, inputs, backend="inductor")
    benchmark(function, *inputs)
    keep(record, comparison)


def test_inductor_decoder(benchmark: Any, record: Record) -> None:
    """One step of a small 28-layer decoder."""
    config = Config(layers=28, dim=32, heads=2, kv_heads=1, hidden=32, vocabulary=64, length=64)
    model = Decoder(config).eval()
    tokens, cache = make_prompt(config, "cpu")[:, :1], make_cache(config, "cpu")
    inputs = tokens, torch.arange(1), cache
    with torch.no_grad():
        comparison = compare(model, inputs, backend="inductor", round_s=0.1)
        (entry,) = runtime.module_of(Decoder.forward.__code__).entries[:1]
        built = entry.built
        assert built is not None
        benchmark(model, *inputs)
    keep(record, comparison, operators=built.n_operators, kernels=built.n_kernels)


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_inductor_compile_time(benchmark: Any, record: Record, cache: str) -> None:
    """Seconds until a graph of 60 operators in several kernels and matrix products has been called
    twice, in stock and under Trident, in turns; cold: nothing comes from a cache."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.relu(torch.mm(x, w) + 1).softmax(-1) * 2 - x.mean()
        return x

    inputs = torch.randn(16, 16), torch.randn(16, 16)

    def seconds() -> float:
        torch._dynamo.reset()
        start = time.perf_counter()
        compiled = torch.compile(function)
        for _ in range(2):
            compiled(*inputs)
        return time.perf_counter() - start

    stock, ours = [], []
    with torch._inductor.config.patch(force_disable_caches=cache == "cold"):
        for _ in range(6):
            stock.append(seconds())
            with trident.enable():
                ours.append(seconds())
    benchmark(function, *inputs)
    pairs = zip(ours[1:], stock[1:], strict=True)
    record(
        ratio=statistics.median(a / b for a, b in pairs),
        target=1.15,
        stock_s=statistics.median(stock[1:]),
        trident_s=statistics.median(ours[1:]),
    )
