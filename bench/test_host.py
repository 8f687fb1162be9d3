"""What a graph costs as a native host program: against eager, and stock Dynamo's eager backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import Config, Decoder, make_cache, make_prompt
from torch import Tensor, nn

import trident
from bench.compare import Comparison, Variant, interleave
from trident.control import runtime

Record = Callable[..., None]


def compare(f: Callable[..., Any], inputs: tuple[Any, ...], **options: Any) -> Comparison:
    """Eager, stock's eager backend and ours, in turns; ours is checked to run natively."""
    stock, ours = torch.compile(f, backend="eager"), torch.compile(f, backend="trident")
    expected = f(*inputs)
    assert torch.equal(stock(*inputs), expected)
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
    keep(record, comparison, target=6, eager_target=1.5)


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
    keep(record, comparison, eager_target=2.3)


@devices
def test_host_decoder(benchmark: Any, record: Record, device: str) -> None:
    """One step of a small 28-layer decoder."""
    config = Config(layers=28, dim=32, heads=2, kv_heads=1, hidden=32, vocabulary=64, length=64)
    model = Decoder(config).eval().to(device)
    tokens, cache = make_prompt(config, device)[:, :1], make_cache(config, device)
    positions = torch.arange(1, device=device)
    with torch.no_grad():
        comparison = compare(model, (tokens, positions, cache), round_s=0.1)
        benchmark(model, tokens, positions, cache)
    (entry,) = runtime.module_of(Decoder.forward.__code__).entries[:1]
    assert entry.built is not None
    keep(record, comparison, operators=entry.built.n_operators, build_ms=entry.built.build_s * 1e3)


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


def test_host_build(benchmark: Any, record: Record) -> None:
    """Seconds to trace and to build chains of 100, 1,000 and 3,000 operators."""
    from trident.capture import graph

    traced: dict[int, float] = {}
    built: dict[int, float] = {}
    trace = graph._trace
    for n in (100, 1000, 3000):

        def function(x: Tensor, n: int = n) -> Tensor:
            for _ in range(n // 2):
                x = torch.relu(x + 1)
            return x

        torch._dynamo.reset()
        seconds = [0.0]

        def timed(module: Any, seconds: list[float] = seconds) -> Any:
            start = time.perf_counter()
            traced = trace(module)
            seconds[0] += time.perf_counter() - start
            return traced

        graph._trace = timed
        try:
            with trident.enable():
                compiled = torch.compile(function, backend="trident")
                for _ in range(3):
                    compiled(torch.ones(4))
        finally:
            graph._trace = trace
        (entry,) = runtime.module_of(function.__code__).entries
        assert entry.built is not None
        assert entry.built.n_operators == n
        traced[n], built[n] = seconds[0], entry.built.build_s
    benchmark(lambda: None)
    record(None, traced_s=traced, built_s=built, target=3)
