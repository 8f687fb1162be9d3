"""Host programs on a GPU: eager's bits, on the current stream and device. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trident
from tests.conftest import frame_stats
from tests.host_functions import FUNCTIONS, TRAINED
from tests.test_equality import assert_same
from tests.test_host_programs import native_programs, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def on_gpu(f: Callable[..., Any], requires_grad: bool = False) -> list[Any]:
    return run(f, requires_grad, device="cuda")


def expected_of(f: Callable[..., Any], requires_grad: bool = False) -> list[Any]:
    try:
        return on_gpu(f, requires_grad)
    except RuntimeError as error:
        pytest.skip(f"the function is for CPU tensors only: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_as_eager(enabled: None, name: str) -> None:
    f = FUNCTIONS[name]
    expected = expected_of(f)
    assert_same(on_gpu(torch.compile(f, backend="trident")), expected)
    assert native_programs(name) == [True]


@pytest.mark.parametrize("name", TRAINED)
def test_trained_as_eager(enabled: None, name: str) -> None:
    f = TRAINED[name]
    expected = expected_of(f, requires_grad=True)
    assert_same(on_gpu(torch.compile(f, backend="trident"), requires_grad=True), expected)
    assert native_programs(name) == [True]


def block(x: Any, w: Any) -> Any:
    h = F.layer_norm(x @ w, w.shape[:1])
    return F.softmax(h, -1), F.scaled_dot_product_attention(h, h, h)


def native(f: Callable[..., Any], *inputs: Any) -> Any:
    """`f` compiled, and called until its host program is in use."""
    compiled = torch.compile(f, backend="trident")
    for _ in range(3):
        compiled(*inputs)
    assert native_programs(f.__name__) == [True]
    return compiled


def make() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 64, 64, device="cuda"), torch.randn(64, 64, device="cuda")


def test_capture_into_a_cuda_graph(enabled: None) -> None:
    """It can only be captured if all its kernels are on the current stream."""
    x, w = make()
    f = native(block, x, w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        f(x, w)
    torch.cuda.current_stream().wait_stream(side)
    before = frame_stats("block").hits
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = f(x, w)
    assert frame_stats("block").hits == before + 1
    x.normal_()
    graph.replay()
    assert_same(captured, block(x, w))


def test_two_streams(enabled: None) -> None:
    x, w = make()
    f = native(block, x, w)
    expected = block(x, w)
    torch.cuda.synchronize()
    results = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            results.append(f(x, w))
    torch.cuda.synchronize()
    for result in results:
        assert_same(result, expected)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")


def across(x: Any, w: Any) -> Any:
    y = (x @ w).relu()
    z = y.to("cuda:1") * 2
    return y + 1, z.sum(0), (z @ z.transpose(1, 2)).to("cuda:0")


@two_gpus
def test_several_devices_in_one_graph(enabled: None) -> None:
    inputs = make()
    f = native(across, *inputs)
    before = frame_stats("across").hits
    assert_same(f(*inputs), across(*inputs))
    assert frame_stats("across").hits == before + 1
    assert torch.cuda.current_device() == 0


@two_gpus
def test_tensors_of_another_device(enabled: None) -> None:
    inputs = [x.to("cuda:1") for x in make()]
    f = native(block, *inputs)
    assert torch.cuda.current_device() == 0
    before = frame_stats("block").hits
    assert_same(f(*inputs), block(*inputs))
    assert frame_stats("block").hits == before + 1
    assert torch.cuda.current_device() == 0


def test_autocast_and_half_precision(enabled: None) -> None:
    def autocast(x: Any, w: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            h = F.gelu(x @ w)
        return h, h.float() @ w

    x, w = make()
    f = native(autocast, x, w)
    assert_same(f(x, w), autocast(x, w))
    assert not torch.is_autocast_enabled("cuda")


def test_dynamic_batch(enabled: None) -> None:
    def pooled(x: Any, w: Any) -> Any:
        return (
            (x @ w).sum(0) / x.shape[0],
            torch.arange(x.shape[0], device=x.device),
            x.shape[0] + 1,
        )

    _, w = make()
    f = torch.compile(pooled, backend="trident", dynamic=True)
    for n in (4, 5, 7, 8, 2, 33):
        x = torch.randn(n, 64, device="cuda")
        assert_same(f(x, w), pooled(x, w))
    assert frame_stats("pooled").hits >= 4
    assert native_programs("pooled") == [True]


def test_out_of_memory(enabled: None) -> None:
    def large(x: Any) -> Any:
        return x.expand(1 << 20, 1 << 20, -1).contiguous().sum()

    def small(x: Any) -> Any:
        return x.expand(4, 4, -1).contiguous().sum()

    x = torch.ones(64, device="cuda")
    assert torch.equal(native(small, x)(x), small(x))
    f = torch.compile(large, backend="trident")
    for _ in range(4):
        before = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            f(x)
        assert torch.cuda.memory_allocated() == before


def test_module_and_peak_memory(enabled: None) -> None:
    """Temporaries are freed where eager frees them."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda().requires_grad_(False)
    x = torch.randn(4096, 512, device="cuda")
    compiled = torch.compile(model, backend="trident")
    for _ in range(3):
        assert torch.equal(compiled(x), model(x))

    def peak(f: Callable[..., Any]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        f(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    trident.reset_stats()
    assert peak(compiled) <= peak(model)
    assert trident.stats().hits == 1
