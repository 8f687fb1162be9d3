"""Host time of Triton's kernels on a GPU: user-written ones, Inductor's, and whole models.

Everything in turns, in one process: eager, ``torch.compile`` as it is, with the C++ wrapper, with
CUDA graphs, and under Trident with either backend. The floor is a C loop that allocates and calls
the driver. Whole models need ``transformers``, the layers of Liger ``liger_kernel``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trident
from bench.compare import Comparison, Variant, interleave

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

Record = Callable[..., None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
N = 1000


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = tl.load(x_ptr + at, mask=mask) + tl.load(y_ptr + at, mask=mask)
    tl.store(out_ptr + at, total, mask=mask)


tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512}, num_warps=8)], key=["n"]
)(add_kernel)

_MANY = [f"a{i}" for i in range(14)], [f"s{i}" for i in range(14)]
_SOURCE = f"""
import triton
import triton.language as tl

@triton.jit
def many_kernel({", ".join(_MANY[0] + _MANY[1])}, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = tl.load(a0 + at, mask=mask) * s0
""" + "".join(f"    total += tl.load(a{i} + at, mask=mask) * s{i}\n" for i in range(1, 14))
_SOURCE += "    tl.store(out_ptr + at, total, mask=mask)\n"


def one(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
    return out


def three(x: Tensor, y: Tensor) -> Tensor:
    first, second, third = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    add_kernel[grid](x, y, first, x.numel(), BLOCK=256)
    first = torch.relu(first)
    add_kernel[grid](first, y, second, x.numel(), BLOCK=256)
    second = second * 2
    add_kernel[grid](second, x, third, x.numel(), BLOCK=256)
    return third


def tuned(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tuned_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out


def small(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y) * 2


@contextlib.contextmanager
def idle() -> Iterator[None]:
    """A turn starts with an empty queue."""
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    with idle(), trident.enable():
        yield


def twin(f: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`f` with a code of its own, so that Dynamo keeps its entries apart."""
    code = f.__code__.replace(co_name=f"{f.__name__}_{name}")
    return FunctionType(code, f.__globals__, code.co_name, f.__defaults__, f.__closure__)


_COMPILED: dict[str, dict[str, Any]] = {
    "stock": {},
    "cpp_wrapper": {"options": {"cpp_wrapper": True}},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "Trident": {},
    "Trident backend": {"backend": "trident"},
}


def compare(
    f: Callable[..., Any],
    inputs: tuple[Any, ...],
    names: tuple[str, ...] = tuple(_COMPILED),
    dynamic: bool = False,
    round_s: float = 0.003,
    copy: Callable[[Any, str], Any] = twin,
) -> Comparison:
    """Eager and `names` of _COMPILED, in turns; ours is checked to be native and equal to stock."""
    variants = {"eager": Variant("f(*x)", {"f": f, "x": inputs}, idle)}
    expected = f(*inputs)
    for name in names:
        options = dict(_COMPILED[name])
        if dynamic:
            options["dynamic"] = True
        compiled = torch.compile(copy(f, name.replace(" ", "_").replace("-", "_")), **options)
        context = enabled if name.startswith("Trident") else idle
        with context():
            for _ in range(5):
                found = compiled(*inputs)
            torch.testing.assert_close(found, expected)
            if context is enabled:
                trident.reset_stats()
                for _ in range(5):
                    compiled(*inputs)
                stats = trident.stats()
                assert (stats.hits > 0, stats.run_code) == (True, 0), name
        variants[name] = Variant("f(*x)", {"f": compiled, "x": inputs}, context)
    return interleave(variants, rounds=75, round_s=round_s)


def keep(record: Record, comparison: Comparison, **figures: Any) -> None:
    ratios = {
        f"{name} / Trident": comparison.ratio(name, "Trident")
        for name in comparison.timings
        if name != "Trident"
    }
    record(comparison, ratios=ratios, **figures)


_FLOOR = """
#include <stdint.h>
#include <time.h>
typedef unsigned u;
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}
typedef int (*launch_t)(void *, u, u, u, u, u, u, u, void *, void **, void **);
typedef int (*empty_t)(int64_t, const int64_t *, const int64_t *, int, int, int, void **);
typedef int (*delete_t)(void *);
double launches(launch_t launch, void *function, u grid, u block, u shared, void *stream,
                void **values, int n) {
  double start = now();
  for (int i = 0; i < n; i++) launch(function, grid, 1, 1, block, 1, 1, shared, stream, values, 0);
  return (now() - start) / n;
}
double allocations(empty_t empty, delete_t drop, int64_t size, int n) {
  int64_t stride = 1;
  void *made;
  double start = now();
  for (int i = 0; i < n; i++) { empty(1, &size, &stride, 6, 1, 0, &made); drop(made); }
  return (now() - start) / n;
}
"""


def floor(folder: Path, x: Tensor, y: Tensor) -> dict[str, float]:
    """ns of ``cuLaunchKernel`` of the add kernel, and of an allocation by torch's C interface."""
    source, library = folder / "floor.c", folder / "floor.so"
    source.write_text(_FLOOR)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    c, cuda = ctypes.CDLL(str(library)), ctypes.CDLL("libcuda.so.1")
    torch_c = ctypes.CDLL("libtorch_cpu.so")
    for name in ("launches", "allocations"):
        getattr(c, name).restype = ctypes.c_double
    out = torch.empty_like(x)
    compiled = add_kernel[(4,)](x, y, out, N, BLOCK=256)
    words = [ctypes.c_uint64(v) for v in (x.data_ptr(), y.data_ptr(), out.data_ptr(), N, 0, 0)]
    pointers = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
    stream = torch.cuda.current_stream().cuda_stream
    launches, allocations = [], []
    for _ in range(75):
        torch.cuda.synchronize()
        launches.append(
            c.launches(
                cuda.cuLaunchKernel,
                ctypes.c_void_p(compiled.function),
                *(4, 32 * compiled.metadata.num_warps, compiled.metadata.shared),
                *(ctypes.c_void_p(stream), pointers, 500),
            )
        )
        torch.cuda.synchronize()
        empty, drop = torch_c.aoti_torch_empty_strided, torch_c.aoti_torch_delete_tensor_object
        allocations.append(c.allocations(empty, drop, ctypes.c_int64(N), 500))
    return {
        "launch_ns": statistics.median(launches),
        "allocation_ns": statistics.median(allocations),
    }


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """A machine that was just lent is slow for its first seconds."""
    x, y = vectors()
    end = time.perf_counter() + 5
    while time.perf_counter() < end:
        for _ in range(500):
            one(x, y)
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(N, device="cuda"), torch.randn(N, device="cuda")


def test_triton_one_kernel(benchmark: Any, record: Record, tmp_path: Path) -> None:
    """One kernel and its allocation, beside the driver's and the allocator's own time."""
    x, y = vectors()
    before = floor(tmp_path, x, y)
    comparison = compare(one, (x, y))
    after = floor(tmp_path, x, y)
    least = {name: min(before[name], after[name]) for name in before}
    benchmark(one, x, y)
    ours = {n: comparison.timings[n].median_ns for n in ("Trident", "Trident backend")}
    ratios = {name: ns / sum(least.values()) for name, ns in ours.items()}
    keep(record, comparison, **least, floor_ratios=ratios, floor_target=1.25)


def test_triton_three_kernels(benchmark: Any, record: Record) -> None:
    """Three kernels and two ATen operators."""
    inputs = vectors()
    keep(record, compare(three, inputs))
    benchmark(three, *inputs)


def test_triton_many_arguments(benchmark: Any, record: Record, tmp_path: Path) -> None:
    """A kernel with thirty arguments: tensors and numbers."""
    import importlib.util

    path = tmp_path / "many_kernel.py"
    path.write_text(_SOURCE)
    spec = importlib.util.spec_from_file_location("many_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = module.many_kernel
    tensors = [torch.randn(N, device="cuda") for _ in range(14)]

    def many(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[(4,)](*tensors, *range(2, 16), out, x.numel(), BLOCK=256)
        return out

    keep(record, compare(many, (tensors[0],)))
    benchmark(many, tensors[0])


def test_triton_autotuned(benchmark: Any, record: Record) -> None:
    """An autotuned kernel, whose grid depends on its configuration."""
    inputs = vectors()
    keep(record, compare(tuned, inputs))
    benchmark(tuned, *inputs)


def test_triton_dynamic_grid(benchmark: Any, record: Record) -> None:
    """Sizes, and with them the grid, are symbolic."""
    inputs = vectors()
    keep(record, compare(one, inputs, dynamic=True))
    benchmark(one, *inputs)


def test_triton_inductor_small_graph(benchmark: Any, record: Record) -> None:
    """``relu(x + y) * 2``: one kernel of Inductor's."""
    inputs = vectors()
    keep(record, compare(small, inputs))
    benchmark(small, *inputs)


def test_triton_inductor_mlp(benchmark: Any, record: Record) -> None:
    """Eight layers of Linear(64, 64) and ReLU."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers).cuda()

    def mlp(x: Tensor) -> Any:
        return model(x)

    inputs = (torch.randn(8, 64, device="cuda"),)
    keep(record, compare(mlp, inputs))
    benchmark(mlp, *inputs)


def test_triton_liger_layer(benchmark: Any, record: Record) -> None:
    """Liger's RMSNorm, RoPE and SwiGLU, as one decoder layer calls them."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers import LigerRMSNorm
    from liger_kernel.transformers.functional import liger_rope, liger_swiglu

    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    norms = [LigerRMSNorm(1024).to(**make), LigerRMSNorm(1024).to(**make)]
    q, k = torch.randn(1, 16, 1, 128, **make), torch.randn(1, 8, 1, 128, **make)
    cos, sin = torch.randn(1, 1, 128, **make), torch.randn(1, 1, 128, **make)
    gate, up = torch.randn(1, 1, 3072, **make), torch.randn(1, 1, 3072, **make)

    def layer(x: Tensor) -> Any:
        h = norms[0](x)
        a, b = liger_rope(q.clone(), k.clone(), cos, sin)
        return norms[1](h + x), a, b, liger_swiglu(gate, up)

    x = torch.randn(1, 1, 1024, **make)
    keep(record, compare(layer, (x,), names=("stock", "Trident"), round_s=0.01))
    benchmark(layer, x)


def _qwen3() -> tuple[Any, Any, Callable[[Any], Callable[[], Any]]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    prompt = torch.randint(0, 1000, (1, 8), device="cuda")
    cache = transformers.StaticCache(config=config, max_cache_len=256)
    model(input_ids=prompt, past_key_values=cache, cache_position=torch.arange(8, device="cuda"))
    token = torch.randint(0, 1000, (1, 1), device="cuda")
    place = torch.tensor([8], device="cuda")

    def step(run: Any) -> Callable[[], Any]:
        positions = place[None]

        def call() -> Any:
            return run(
                input_ids=token,
                past_key_values=cache,
                cache_position=place,
                position_ids=positions,
            ).logits

        return call

    return model, cache, step


def _milliseconds(cache: Any, calls: dict[str, tuple[Callable[[], Any], Any]]) -> dict[str, float]:
    """ms a step, in turns: the median over rounds of ten steps, until the GPU is done. (The cache
    counts the steps.)"""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(9):
        for name, (call, context) in calls.items():
            with context():
                cache.reset()
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(10):
                    call()
                torch.cuda.synchronize()
                rounds[name].append((time.perf_counter() - start) * 100)
    return {name: statistics.median(ms) for name, ms in rounds.items()}


def _decode(liger: bool) -> dict[str, Any]:
    if liger:
        pytest.importorskip("liger_kernel")
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False, cross_entropy=False)
    model, cache, step = _qwen3()
    eager = step(model)

    def first(call: Callable[[], Any]) -> Any:
        cache.reset()
        return call()

    expected = first(eager)
    compiled = step(torch.compile(model))
    for _ in range(3):
        stock = first(compiled)
    with trident.enable():
        for _ in range(6):
            ours = first(compiled)
        trident.reset_stats()
        first(compiled)
        stats = trident.stats()
        text = str(trident.explain(model)) + str(trident.stats())
    equal = torch.equal(ours, stock)
    calls = {
        "eager": (eager, contextlib.nullcontext),
        "stock": (compiled, contextlib.nullcontext),
        "Trident": (compiled, trident.enable),
    }
    if path := os.environ.get("BENCH_EXPLAIN"):
        name = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split()[0]
        Path(f"{path}-{name}").write_text(text)
    return {
        "ms": _milliseconds(cache, calls),
        "equal_to_stock": equal,
        "largest_difference_to_eager": (ours - expected).abs().max().item(),
        "hits": stats.hits,
        "run_code": stats.run_code,
        "misses": stats.misses,
    }


def test_triton_qwen3_decode(benchmark: Any, record: Record) -> None:
    """A decode step of a Qwen3-0.6B-shaped model: random weights, bf16, a static cache."""
    figures = _decode(liger=False)
    benchmark(lambda: None)
    record(**figures, target_ms=4)


def test_triton_qwen3_liger_decode(benchmark: Any, record: Record) -> None:
    """The same with Liger's RMSNorm, RoPE and SwiGLU. (It patches transformers: a last test.)"""
    figures = _decode(liger=True)
    benchmark(lambda: None)
    record(**figures)


def test_triton_qwen3_liger_decode_all_specialized(benchmark: Any, record: Record) -> None:
    """And with a recompile limit above 28: one frame has a specialization per layer, 20 of which
    run as plain Python under Dynamo's limit of 8."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        figures = _decode(liger=True)
    benchmark(lambda: None)
    record(**figures)
