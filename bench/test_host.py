"""What a graph costs as a native host program: against eager, and stock Dynamo's eager backend."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decoder import Config, Decoder, make_cache, make_prompt
from torch import Tensor, nn

import trident
from bench.compare import Comparison, Variant, interleave
from trident.capture import graph
from trident.control import runtime

Record = Callable[..., None]


def compare(
    f: Callable[..., Any],
    inputs: tuple[Any, ...],
    more: dict[str, Variant] | None = None,
    backend: str = "trident",
    **options: Any,
) -> Comparison:
    """Eager, stock, ours and `more`, in turns; ours is checked to be native. Stock is its eager
    backend, or for Inductor the same compiled function."""
    ours = torch.compile(f, backend=backend)
    stock = torch.compile(f, backend="eager") if backend == "trident" else ours
    expected = stock(*inputs)
    with trident.enable():
        trident.reset_stats()
        for _ in range(20):
            assert torch.equal(ours(*inputs), expected)
        assert trident.stats().hits >= 19
        assert trident.stats().run_code == 0
    return interleave(
        {
            "eager": Variant("f(*x)", {"f": f, "x": inputs}),
            "stock": Variant("f(*x)", {"f": stock, "x": inputs}),
            "Trident": Variant("f(*x)", {"f": ours, "x": inputs}, trident.enable),
            **(more or {}),
        },
        **options,
    )


def keep(record: Record, comparison: Comparison, **figures: Any) -> None:
    record(
        comparison,
        ratio=comparison.ratio("stock", "Trident"),
        eager_ratio=comparison.ratio("eager", "Trident"),
        **figures,
    )


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]
)


@devices
def test_host_small_graph(benchmark: Any, record: Record, device: str) -> None:
    """Three small operators."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x + y) * 2

    inputs = torch.randn(16, device=device), torch.randn(16, device=device)
    comparison = compare(function, inputs)
    benchmark(function, *inputs)
    keep(record, comparison, **({"target": 6, "eager_target": 1.5} if device == "cpu" else {}))


@devices
def test_host_mlp(benchmark: Any, record: Record, device: str) -> None:
    """Eight layers of Linear(16, 16) and ReLU on one row, without gradients."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers).requires_grad_(False).to(device)

    def function(x: Tensor) -> Any:
        return model(x)

    inputs = (torch.randn(1, 16, device=device),)
    comparison = compare(function, inputs)
    benchmark(function, *inputs)
    keep(record, comparison, **({"eager_target": 2.3} if device == "cpu" else {}))


@contextlib.contextmanager
def timed_traces() -> Iterator[list[float]]:
    """Seconds of each trace inside."""
    trace, seconds = graph._trace, []

    def timed(module: Any) -> Any:
        start = time.perf_counter()
        traced = trace(module)
        seconds.append(time.perf_counter() - start)
        return traced

    graph._trace = timed
    try:
        yield seconds
    finally:
        graph._trace = trace


def timed(f: Callable[..., Any], *inputs: Any) -> float:
    start = time.perf_counter()
    f(*inputs)
    return time.perf_counter() - start


@devices
def test_host_decoder(benchmark: Any, record: Record, device: str) -> None:
    """One step of a small 28-layer decoder; and what compiling it takes."""
    config = Config(layers=28, dim=32, heads=2, kv_heads=1, hidden=32, vocabulary=64, length=64)
    model = Decoder(config).eval().to(device)
    tokens, cache = make_prompt(config, device)[:, :1], make_cache(config, device)
    inputs = tokens, torch.arange(1, device=device), cache
    compile_s, trace_s, build_s = [], [], []
    with torch.no_grad():
        for _ in range(4):
            torch._dynamo.reset()
            stock = timed(torch.compile(model, backend="eager"), *inputs)
            torch._dynamo.reset()
            with trident.enable(), timed_traces() as traces:
                ours = torch.compile(model, backend="trident")
                for _ in range(2):
                    ours(*inputs)
            (entry,) = runtime.module_of(Decoder.forward.__code__).entries[:1]
            built = entry.built
            assert built is not None
            compile_s.append(stock)
            trace_s.append(sum(traces))
            build_s.append(built.build_s)
            operators = built.n_operators
        torch._dynamo.reset()
        comparison = compare(model, inputs, round_s=0.1)
        benchmark(model, *inputs)
    # The first compilation of a process also imports what compiling needs.
    medians = (statistics.median(values[1:]) for values in (compile_s, trace_s, build_s))
    figures = dict(zip(("stock_compile_s", "trace_s", "build_s"), medians, strict=True))
    keep(record, comparison, operators=operators, **figures)


@devices
def test_host_training(benchmark: Any, record: Record, device: str) -> None:
    """Forward and backward of a small MLP."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    model.to(device)

    def function(x: Tensor) -> Any:
        return model(x).sum()

    x = torch.randn(1, 16, device=device)
    stock, ours = (torch.compile(function, backend=b) for b in ("eager", "trident"))
    for f in (stock, ours):
        f(x).backward()
    with trident.enable():
        for _ in range(10):
            ours(x).backward()
        assert trident.stats().hits > 0
    benchmark(function, x)
    comparison = interleave(
        {
            "eager": Variant("f(x).backward()", {"f": function, "x": x}),
            "stock": Variant("f(x).backward()", {"f": stock, "x": x}),
            "Trident": Variant("f(x).backward()", {"f": ours, "x": x}, trident.enable),
        }
    )
    keep(record, comparison)


LOOP = """
#include <torch/extension.h>
at::Tensor small(const at::Tensor &x, const at::Tensor &y) { return at::relu(x + y) * 2; }
at::Tensor chain(at::Tensor x, const at::Tensor &y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x = at::relu(x + y);
  return x;
}
at::Tensor add(at::Tensor x, const at::Tensor &y) {
  for (int i = 0; i < 100; i++) x = x + y;
  return x;
}
at::Tensor mul(at::Tensor x, const at::Tensor &y) {
  for (int i = 0; i < 100; i++) x = x * y;
  return x;
}
at::Tensor add_relu_mul(at::Tensor x, const at::Tensor &y) {
  for (int i = 0; i < 33; i++) x = at::relu(x + y) * y;
  return x;
}
at::Tensor view(at::Tensor x, const at::Tensor &y) {
  for (int i = 0; i < 50; i++) x = x.view({4, 4}).view({16});
  return x;
}
at::Tensor slice(at::Tensor x, const at::Tensor &y) {
  for (int i = 0; i < 100; i++) x = x.slice(0, 1, INT64_MAX);
  return x;
}
"""


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same operators called by C++, without Dynamo or Python in between."""
    from torch.utils.cpp_extension import is_ninja_available, load_inline

    if not is_ninja_available():
        pytest.skip("torch builds extensions with ninja, which is not there")
    return load_inline(
        "loop",
        LOOP,
        functions=["small", "chain", "add", "mul", "add_relu_mul", "view", "slice"],
        extra_cflags=["-O2"],
        build_directory=str(tmp_path_factory.mktemp("loop")),
    )


def against_the_loop(f: Callable[..., Any], g: Callable[..., Any], *inputs: Any) -> Comparison:
    ours = torch.compile(f, backend="trident")
    with trident.enable():
        for _ in range(3):
            assert torch.equal(ours(*inputs), g(*inputs))
        assert trident.stats().hits > 0
    return interleave(
        {
            "C++": Variant("f(*x)", {"f": g, "x": inputs}),
            "Trident": Variant("f(*x)", {"f": ours, "x": inputs}, trident.enable),
        }
    )


def test_host_small_loop(benchmark: Any, record: Record, loop: Any) -> None:
    """Three small operators, against a C++ function that Python calls."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x + y) * 2

    inputs = torch.randn(16), torch.randn(16)
    comparison = against_the_loop(function, loop.small, *inputs)
    benchmark(function, *inputs)
    record(comparison, ratio=comparison.ratio("Trident", "C++"), target=1.25)


def test_host_chain_loop(benchmark: Any, record: Record, loop: Any) -> None:
    """1,000 small operators, against a loop in C++."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(500):
            x = torch.relu(x + y)
        return x

    def in_cpp(x: Tensor, y: Tensor) -> Any:
        return loop.chain(x, y, 500)

    inputs = torch.randn(16), torch.randn(16)
    comparison = against_the_loop(function, in_cpp, *inputs)
    benchmark(in_cpp, *inputs)
    record(comparison, ratio=comparison.ratio("Trident", "C++"), operators=1000)


def chain_of_add(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(100):
        x = x + y
    return x


def chain_of_mul(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(100):
        x = x * y
    return x


def chain_of_add_relu_mul(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(33):
        x = torch.relu(x + y) * y
    return x


def chain_of_view(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(50):
        x = x.view(4, 4).view(16)
    return x


def chain_of_slice(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(100):
        x = x[1:]
    return x


# Per chain: its number of operators, and how many times as fast as in eager it is to be.
CHAINS: dict[Callable[..., Any], tuple[int, float | None]] = {
    chain_of_add: (100, 1.3),
    chain_of_mul: (100, 1.3),
    chain_of_add_relu_mul: (99, None),
    chain_of_view: (100, 2),
    chain_of_slice: (100, 2),
}


@pytest.mark.parametrize("f", CHAINS, ids=lambda f: f.__name__.removeprefix("chain_of_"))
def test_host_operators(benchmark: Any, record: Record, loop: Any, f: Any) -> None:
    """A chain of 100 operators that give 16 floats: eager, stock, ours, and a loop in C++."""
    operators, eager_target = CHAINS[f]
    in_cpp = getattr(loop, f.__name__.removeprefix("chain_of_"))
    inputs = torch.rand(116 if f is chain_of_slice else 16), torch.rand(16)
    assert torch.equal(in_cpp(*inputs), f(*inputs))
    in_loop = {"C++": Variant("f(*x)", {"f": in_cpp, "x": inputs})}
    # Many turns of a call or two: other processes disturb few of them.
    comparison = compare(f, inputs, in_loop, rounds=101, round_s=0.0002)
    benchmark(f, *inputs)
    keep(
        record,
        comparison,
        operators=operators,
        eager_target=eager_target,
        loop_ratio=comparison.ratio("Trident", "C++"),
        loop_target=1.15,
    )


def test_host_build(benchmark: Any, record: Record) -> None:
    """Seconds to trace and to build chains of 100, 1,000 and 3,000 operators."""
    traced: dict[int, float] = {}
    built: dict[int, float] = {}
    for n in (100, 1000, 3000):

        def function(x: Tensor, n: int = n) -> Tensor:
            for _ in range(n // 2):
                x = torch.relu(x + 1)
            return x

        torch._dynamo.reset()
        with trident.enable(), timed_traces() as traces:
            compiled = torch.compile(function, backend="trident")
            for _ in range(3):
                compiled(torch.ones(4))
        (entry,) = runtime.module_of(function.__code__).entries
        assert entry.built is not None
        assert entry.built.n_operators == n
        traced[n], built[n] = sum(traces), entry.built.build_s
    benchmark(lambda: None)
    record(None, traced_s=traced, built_s=built, target=3)
