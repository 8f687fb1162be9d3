"""Triton's kernels launched by native programs on a GPU: stock's bits, errors, streams and memory.

Not here, as Dynamo refuses it (torch 2.11, ``TritonHOPifier``): ``num_ctas=`` in a launch (a Config
may have it), ``triton.heuristics`` without an autotuner around it, ``triton.set_allocator`` in the
compiled function, an autotuner's own ``pre_hook`` and ``post_hook``, and tuples of tensors.
"""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from triton.tools.tensor_descriptor import TensorDescriptor

import trident
from tests.conftest import outcome
from tests.memory import grows
from tests.test_equality import assert_same
from tests.test_host_programs import native_programs
from trident.capture.triton import InductorLaunch, UserLaunch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
DEVICE = "cuda"
BACKENDS = ["trident", "inductor"]
CALLS = 4
both = pytest.mark.parametrize("backend", BACKENDS)
# Inductor takes its time for each specialization: one program for all.
variants = pytest.mark.parametrize(
    ("backend", "dynamic"), [("trident", False), ("trident", True), ("inductor", True)]
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")

# The launches that went through Triton's, or Inductor's, own code, while Trident was enabled.
by_python: list[str] = []


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    by_python.clear()
    for kind in (UserLaunch, InductorLaunch):

        def call(self: Any, values: Any, rows: Any, original: Any = kind.__call__) -> Any:
            by_python.append(type(self).__name__)
            return original(self, values, rows)

        monkeypatch.setattr(kind, "__call__", call)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype)


def hits(f: Any) -> int:
    return sum(frame.hits for frame in trident.explain(f).frames)


def assert_native(f: Any) -> None:
    explanation = trident.explain(f)
    specs = [spec for frame in explanation.frames for spec in frame.specializations]
    native = [spec.plan_native and spec.program_native for spec in specs]
    assert native, explanation
    assert all(native), str(explanation)


def observed(f: Any, arguments: Any) -> Any:
    """The result, the arguments afterwards, and the generator's state."""
    torch.manual_seed(0)
    return f(*arguments), list(arguments), torch.cuda.get_rng_state()


def check(
    f: Any,
    make: Callable[[int], Any],
    backend: str,
    *,
    calls: int = CALLS,
    native: bool = True,
    by_triton: bool = False,
    extra: Callable[[], Any] = lambda: None,
    **options: Any,
) -> Any:
    """Calls with the arguments ``make(0)``, ``make(1)``, … are as stock's; under the backend
    "trident" also as eager's. `native`: from the second time on all of them are hits, and launches
    are native unless `by_triton`. The first time stock compiles and tunes, and is not compared."""

    def rounds(g: Any) -> list[Any]:
        return [(observed(g, make(i)), extra()) for i in range(calls)]

    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend, **options)
    try:
        rounds(compiled)
    except torch._inductor.exc.InductorError as error:
        if "xreplace" not in str(error):
            raise
        pytest.skip("this torch's Inductor does not compile an int that is a constant of a kernel")
    expected = rounds(compiled)
    if backend == "trident":
        rounds(f)
        assert_same(expected, rounds(f))
    with trident.enable():
        assert_same(rounds(compiled), expected)
        before, n_by_python = hits(compiled), len(by_python)
        assert_same(rounds(compiled), expected)
        if native:
            assert_native(compiled)
            assert hits(compiled) == before + calls, str(trident.explain(compiled))
            assert (len(by_python) > n_by_python) == by_triton, by_python[n_by_python:]
    return compiled


def settled(f: Any, *arguments: Any, backend: str, **options: Any) -> Any:
    """`f` compiled, and called until its program launches natively. (Trident is enabled.)"""
    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend, **options)
    for _ in range(4):
        compiled(*arguments)
    assert_native(compiled)
    before, n_by_python = hits(compiled), len(by_python)
    compiled(*arguments)
    assert (hits(compiled), len(by_python)) == (before + 1, n_by_python)
    return compiled


# Arguments


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(out + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)


@triton.jit
def scale_kernel(x, out, scale, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(out + i, tl.load(x + i, mask=m) * scale, mask=m)


def added(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
    return out


@variants
def test_sizes(fresh: None, backend: str, dynamic: bool) -> None:
    """Under `dynamic` one program has variants: multiples of 16, and others."""
    sizes = (1000, 1001, 1024, 7)

    def make(i: int) -> Any:
        return randn(sizes[i], seed=i), randn(sizes[i], seed=9)

    check(added, make, backend, dynamic=dynamic)


@variants
def test_sizes_0_and_1(fresh: None, backend: str, dynamic: bool) -> None:
    """A grid of no programs is left to Triton, which does not launch."""
    sizes = (5, 0, 1, 0)

    def make(i: int) -> Any:
        return randn(sizes[i], seed=i), randn(sizes[i], seed=9)

    native = backend == "trident"
    check(added, make, backend, dynamic=dynamic, native=native, by_triton=True)


@triton.jit
def mixed_kernel(
    x, out, bias, n, scale, flag, sizes: tl.constexpr, mode: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    v = tl.load(x + i, mask=m) * scale
    if flag:
        v += 1.0
    if bias is not None:
        v += tl.load(bias + i, mask=m)
    if mode == "double":
        v *= 2.0
    v += sizes[0] * 10 + sizes[1]
    tl.store(out + i, v, mask=m)


def mixed(x: Any, bias: Any, scale: float, flag: bool, mode: str) -> Any:
    out = torch.empty_like(x)
    n = x.shape[0]
    mixed_kernel[(triton.cdiv(n, 128),)](
        x, out, bias, n, scale, flag, sizes=(2, 3), mode=mode, BLOCK=128
    )
    return out


@both
def test_kinds_of_constants(fresh: None, backend: str) -> None:
    """int, float, bool, None, a tuple and a str: constants of Dynamo's graph, whatever Triton
    passes to the kernel."""
    given = [(True, "double"), (False, "once"), (True, "once"), (False, "")]

    def make(i: int) -> Any:
        return randn(500, seed=i), None if i % 2 else randn(500, seed=9), 0.1, *given[i]

    check(mixed, make, backend)


@both
def test_floats(fresh: None, backend: str) -> None:
    """From the second one on they are symbols to Dynamo: doubles that a kernel takes as floats."""
    given = (0.5, 0.1, -3.0, 1e-8)

    def make(i: int) -> Any:
        return randn(500, seed=i), None, given[i], True, "once"

    check(mixed, make, backend, native=backend == "trident")


@triton.jit
def pair_kernel(x, out, pair, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(out + i, tl.load(x + i, mask=m) * pair[0] + pair[1] + pair[2], mask=m)


def with_tuple(x: Any) -> Any:
    out = torch.empty_like(x)
    pair_kernel[(4,)](x, out, (3, 0.5, 1), x.shape[0], BLOCK=128)
    return out


def test_tuple_of_numbers(fresh: None) -> None:
    """Its items are parameters one by one, and the 1 is none. (Inductor refuses a tuple that is no
    tl.constexpr.)"""
    check(with_tuple, lambda i: (randn(500, seed=i),), "trident")


@triton.jit
def strided_kernel(x, out, n, sx0, sx1, so0, so1, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * sx0 + i * sx1, mask=i < n)
    tl.store(out + row * so0 + i * so1, v + row, mask=i < n)


def strided(x: Any) -> Any:
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    rows, n = x.shape
    grid = (rows, triton.cdiv(n, 64))
    strided_kernel[grid](x, out, n, *x.stride(), *out.stride(), BLOCK=64)
    return out


@variants
def test_strides(fresh: None, backend: str, dynamic: bool) -> None:
    def make(i: int) -> Any:
        x = randn(48, 80, seed=i)
        return ([x, x.t(), x[::2, ::3], x[:, 16:]][i],)

    check(strided, make, backend, dynamic=dynamic)


@triton.jit
def many_kernel(
    out, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9,
    b0, b1, b2, b3, b4, b5, b6, b7, b8,
):  # fmt: skip
    v = tl.load(p0) + 2 * tl.load(p1) + 3 * tl.load(p2) + 4 * tl.load(p3) + 5 * tl.load(p4)
    v += 6 * tl.load(p5) + 7 * tl.load(p6) + 8 * tl.load(p7) + 9 * tl.load(p8) + 10 * tl.load(p9)
    a = a0 + 2 * a1 + 3 * a2 + 4 * a3 + 5 * a4 + 6 * a5 + 7 * a6 + 8 * a7 + 9 * a8 + 10 * a9
    b = b0 + 2 * b1 + 3 * b2 + 4 * b3 + 5 * b4 + 6 * b5 + 7 * b6 + 8 * b7 + 9 * b8
    tl.store(out, v + a)
    tl.store(out + 1, v + b)


def many(x: Any, ys: list[Any]) -> Any:
    out = torch.empty(2, device=x.device)
    n = x.shape[0]
    # n is 16 or 17 at times, the next numbers are 1 in some calls: each has its own class.
    many_kernel[(1,)](
        out, *ys, n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, n + 8, n + 9,
        n - 1, n * 16, 1, 16, 17, 2 * n, 3 * n, 4, 0,
    )  # fmt: skip
    return out


@variants
def test_30_arguments(fresh: None, backend: str, dynamic: bool) -> None:
    """More bits of a variant's key than a word has."""

    def make(i: int) -> Any:
        return randn(15 + i, seed=i), [randn(4, seed=10 * i + j) for j in range(10)]

    check(many, make, backend, dynamic=dynamic)


def interleaved(x: Any, w: Any) -> Any:
    a = torch.empty_like(x)
    n = x.numel()
    grid = (triton.cdiv(n, 256),)
    add_kernel[grid](x, w, a, n, BLOCK=256)
    b = (a.relu() @ w) * 2
    c = torch.empty_like(b)
    scale_kernel[grid](b, c, 0.25, n, BLOCK=256)
    d = c.sum(0)
    add_kernel[grid](c, a, b, n, BLOCK=256)
    return a, b.sin(), c + d, d


@both
def test_kernels_among_operators(fresh: None, backend: str) -> None:
    check(interleaved, lambda i: (randn(64, 64, seed=i), randn(64, 64, seed=9)), backend)


def in_place(x: Any, y: Any) -> Any:
    n = x.numel()
    scale_kernel[(4,)](x, x, 3.0, n, BLOCK=256)
    add_kernel[(4,)](x, x, x, n, BLOCK=256)
    add_kernel[(4,)](x, y, y, n, BLOCK=256)
    return x * 2


@both
def test_in_place_and_aliased(fresh: None, backend: str) -> None:
    check(in_place, lambda i: (randn(1000, seed=i), randn(1000, seed=9)), backend)


def test_one_tensor_as_two_arguments(fresh: None) -> None:
    def make(i: int) -> Any:
        x = randn(1000, seed=i)
        return x, x

    check(in_place, make, "trident")


def on_views(x: Any) -> Any:
    out = torch.empty(4, 64, device=x.device)
    add_kernel[(1,)](x[2:6], x.view(-1)[64:320], out.view(2, 128), 256, BLOCK=256)
    add_kernel[(1,)](x[0, 1:], x.view(-1)[3:], out[1, 5:], 50, BLOCK=256)
    return out


@both
def test_views(fresh: None, backend: str) -> None:
    check(on_views, lambda i: (randn(16, 64, seed=i),), backend)


@variants
def test_misaligned_after_aligned(fresh: None, backend: str, dynamic: bool) -> None:
    """A kernel that was compiled for aligned addresses may load 16 bytes at once. (Inductor copies
    such inputs, in stock's code.)"""

    def make(i: int) -> Any:
        first = (0, 1, 4, 3)[i]
        return randn(1008, seed=i)[first : first + 1000], randn(1000, seed=9)

    check(added, make, backend, dynamic=dynamic, native=backend == "trident")


@triton.jit
def multiply_kernel(out, number, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, i.to(tl.int64) * number)


def multiplied(x: Any, number: int) -> Any:
    out = torch.empty(32, dtype=torch.int64, device=x.device)
    multiply_kernel[(1,)](out, number, BLOCK=32)
    return out + x


NUMBERS = (17, 16, 1, 2**31, 2**40)


@both
@pytest.mark.parametrize("dynamic", [False, True])
def test_integers(fresh: None, backend: str, dynamic: bool) -> None:
    """1, multiples of 16 and what needs 64 bits make other kernels."""
    x = torch.ones(32, dtype=torch.int64, device=DEVICE)

    def f(x: Any, number: int) -> Any:
        return multiplied(x, number)

    if backend == "inductor" and dynamic:  # a kernel for numbers of 32 bits; stock may raise
        compiled = torch.compile(f, dynamic=True)
        expected = [[outcome(compiled, x, n) for n in NUMBERS] for _ in range(2)][1]
        with trident.enable():
            for _ in range(3):
                assert_same([outcome(compiled, x, n) for n in NUMBERS], expected)
        return
    check(f, lambda i: (x, NUMBERS[i]), backend, calls=5, dynamic=dynamic)


@triton.jit
def far_kernel(x, out, offset, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + offset + i))


def far(x: Any, offset: int) -> Any:
    out = torch.empty(128, dtype=x.dtype, device=x.device)
    far_kernel[(1,)](x, out, offset, BLOCK=128)
    return out


@pytest.mark.slow
@both
def test_offsets_beyond_32_bits(fresh: None, backend: str) -> None:
    x = torch.zeros(2**31 + 4096, dtype=torch.int8, device=DEVICE)
    x[-2048:] = torch.arange(2048, device=DEVICE).to(torch.int8)
    # This torch's Inductor does not compile an int that is a constant of a kernel.
    f = torch.compile(far, backend=backend, dynamic=backend == "inductor")
    offsets = [2**31 + 2048, 2**31 + 2064, 2**31 + 2049, 128]
    expected = [x[n : n + 128].clone() for n in offsets]
    assert_same([f(x, n) for n in offsets], expected)
    with trident.enable():
        for _ in range(3):
            assert_same([f(x, n) for n in offsets], expected)
        assert_native(f)


@pytest.mark.slow
def test_large_tensors_of_inductor(fresh: None) -> None:
    """Its kernels take 64-bit sizes there."""
    x = torch.zeros(2**31 + 4096, dtype=torch.int8, device=DEVICE)
    x[-1] = 5
    check(lambda x: (x + 1) * 2, lambda i: (x,), "inductor", calls=2)


# Grids


@triton.jit
def mark_kernel(x, out, BLOCK: tl.constexpr):
    x_size, y_size = tl.num_programs(0), tl.num_programs(1)
    number = tl.program_id(0) + x_size * (tl.program_id(1) + y_size * tl.program_id(2))
    i = number * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + number * 100)


def grid_1(x: Any) -> Any:
    out = torch.zeros_like(x)
    mark_kernel[(6,)](x, out, BLOCK=16)
    return out


def grid_2(x: Any) -> Any:
    out = torch.zeros_like(x)
    mark_kernel[(3, 2)](x, out, BLOCK=16)
    return out


def grid_3(x: Any) -> Any:
    out = torch.zeros_like(x)
    mark_kernel[(2, 1, 3)](x, out, BLOCK=16)
    return out


def grid_of_meta(x: Any) -> Any:
    out = torch.zeros_like(x)
    mark_kernel[lambda meta: (x.numel() // meta["BLOCK"] // 2, 2)](x, out, BLOCK=16)
    return out


def grid_of_sizes(x: Any) -> Any:
    out = torch.zeros_like(x)
    mark_kernel[(x.shape[0] // 32, 1, x.shape[0] // x.shape[0] + 1)](x, out, BLOCK=16)
    return out


@both
@pytest.mark.parametrize("f", [grid_1, grid_2, grid_3, grid_of_meta, grid_of_sizes])
def test_grids(fresh: None, backend: str, f: Any) -> None:
    dynamic = f in (grid_of_meta, grid_of_sizes)
    sizes = (96, 128, 160, 192) if dynamic else (96, 96, 96, 96)
    check(f, lambda i: (randn(sizes[i], seed=i),), backend, dynamic=dynamic)


@triton.jit
def count_kernel(out):
    tl.atomic_add(out, 1)


def counting(x: Any, n: int) -> Any:
    out = torch.zeros(1, dtype=torch.int32, device=x.device)
    count_kernel[(1, n)](out)
    return out + x


@both
@pytest.mark.parametrize("dynamic", [False, True])
def test_empty_and_too_large_grids(fresh: None, backend: str, dynamic: bool) -> None:
    """The second is an error of the driver's (at most 65,535), or of Python's conversion to an int;
    the next launch is as if nothing had been."""
    x = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    numbers = (2, 70_000, 3, 0, 2**31, 4)
    f = torch.compile(counting, backend=backend, dynamic=dynamic)
    reference = counting if backend == "trident" else f
    expected = [[outcome(reference, x, n) for n in numbers] for _ in range(2)][1]
    if backend == "trident":
        assert [type(e) is tuple for e in expected] == [n > 65_535 for n in numbers]
    for _ in range(2):
        assert_same([outcome(f, x, n) for n in numbers], expected)
    with trident.enable():
        for _ in range(CALLS):
            assert_same([outcome(f, x, n) for n in numbers], expected)
    torch.cuda.synchronize()


# Options of a launch


def with_warps(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    add_kernel[(8,)](x, y, out, x.numel(), BLOCK=128, num_warps=8, num_stages=2)
    add_kernel[(8,)](out, y, out, x.numel(), BLOCK=128, num_warps=1)
    return out


@both
def test_warps_and_stages(fresh: None, backend: str) -> None:
    check(with_warps, lambda i: (randn(1000, seed=i), randn(1000, seed=9)), backend)


cluster_kernel = triton.autotune([triton.Config({"BLOCK": 256}, num_ctas=2)], key=[])(add_kernel)
few_registers_kernel = triton.autotune([triton.Config({"BLOCK": 256}, maxnreg=32)], key=[])(
    add_kernel
)


def in_clusters(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    cluster_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out


def few_registers(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    few_registers_kernel[(4,)](x, y, out, x.numel())
    return out


@both
@pytest.mark.parametrize("f", [in_clusters, few_registers])
def test_options_of_a_config(fresh: None, backend: str, f: Any) -> None:
    """(What Inductor does with clusters is compared only.)"""
    native = backend == "trident" or f is few_registers
    check(f, lambda i: (randn(1000, seed=i), randn(1000, seed=9)), backend, native=native)


def register_option(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    add_kernel[(4,)](x, y, out, x.numel(), BLOCK=256, maxnreg=32)
    return out


def cooperative(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    add_kernel[(4,)](x, y, out, x.numel(), BLOCK=256, launch_cooperative_grid=True)
    return out


def programmatic(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    for _ in range(3):
        add_kernel[(4,)](x, y, out, x.numel(), BLOCK=256, launch_pdl=True)
    return out


@pytest.mark.parametrize("f", [register_option, cooperative, programmatic])
def test_options_of_a_launch(fresh: None, f: Any) -> None:
    """(Inductor drops them.)"""
    check(f, lambda i: (randn(1000, seed=i), randn(1000, seed=9)), "trident")


def cooperative_of(x: Any, out: Any, n: int) -> Any:
    count_kernel[(1, n)](out, launch_cooperative_grid=True)
    return out + x


def test_cooperative_grid_that_is_too_large(fresh: None) -> None:
    """The attribute is passed on: the driver refuses what cannot be resident at once."""
    x = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    f = torch.compile(cooperative_of, backend="trident", dynamic=True)

    def results(g: Any) -> Any:
        return [outcome(g, x, torch.zeros_like(x), n) for n in (2, 60_000, 3, 60_000)]

    expected = results(cooperative_of)
    assert [type(e) is tuple for e in expected] == [False, True, False, True]
    with trident.enable():
        for _ in range(CALLS):
            assert_same(results(f), expected)


# Autotuners

CONFIGS = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 256}, num_warps=8)]
tuned_kernel = triton.autotune(CONFIGS, key=["n"])(add_kernel)


def tuned(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    tuned_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out + 1


@variants
def test_autotuner(fresh: None, backend: str, dynamic: bool) -> None:
    """The choice is another for each number of the key; stock notes it in the autotuner."""
    sizes = (1000, 4096, 640, 1001)

    def make(i: int) -> Any:
        return randn(sizes[i], seed=i), randn(sizes[i], seed=9)

    def chosen() -> Any:
        return getattr(tuned_kernel, "best_config", None)

    check(tuned, make, backend, dynamic=dynamic, extra=chosen)


chosen_kernel = triton.autotune(CONFIGS, key=["n"])(add_kernel)


def as_chosen(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    chosen_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out


def test_best_config(fresh: None) -> None:
    """With the choices made beforehand: one configuration for even, the other for odd sizes."""
    floats = ("torch.float32",) * 3
    chosen_kernel.cache.update({(n, *floats): CONFIGS[n % 2] for n in (500, 501, 502, 503)})

    def make(i: int) -> Any:
        return randn(500 + i, seed=i), randn(500 + i, seed=9)

    f = check(as_chosen, make, "trident", dynamic=True, extra=lambda: chosen_kernel.best_config)
    with trident.enable():
        for i in (0, 1, 3, 2):
            f(*make(i))
            assert chosen_kernel.best_config is CONFIGS[i % 2]


@triton.autotune([triton.Config({}, num_warps=4)], key=[])
@triton.heuristics({"BLOCK": lambda args: 64 if args["n"] < 500 else 256})
@triton.jit
def heuristic_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(out + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m) * BLOCK, mask=m)


def heuristic(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)  # noqa: E731
    heuristic_kernel[grid](x, y, out, x.numel())
    return out


@both
def test_heuristics(fresh: None, backend: str) -> None:
    """Dynamo evaluates them, and makes an autotuner of its own."""
    sizes = (400, 1000, 400, 1000)

    def make(i: int) -> Any:
        return randn(sizes[i], seed=i), randn(sizes[i], seed=9)

    check(heuristic, make, backend, dynamic=False)


@triton.autotune(CONFIGS, key=["n"], reset_to_zero=["out"])
@triton.jit
def accumulate_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.atomic_add(out + i, tl.load(x + i, mask=m), mask=m)


@triton.autotune(CONFIGS, key=["n"], restore_value=["x"])
@triton.jit
def update_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(x + i, tl.load(x + i, mask=m) * 2 + 1, mask=m)


def accumulated(x: Any) -> Any:
    out = torch.ones_like(x)
    n = x.numel()
    accumulate_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out


def updated(x: Any) -> Any:
    n = x.numel()
    update_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    return x + 1


@both
@pytest.mark.parametrize("f", [accumulated, updated])
def test_reset_and_restore(fresh: None, backend: str, f: Any) -> None:
    """Both are for the time of tuning only."""
    check(f, lambda i: (randn(1000, seed=i),), backend)


def test_reset_while_it_tunes(fresh: None) -> None:
    """Tuning within a call of a native program: the first result lacks the ones, the next not."""
    x = randn(777)
    accumulate_kernel.cache.clear()
    expected = [accumulated(x) for _ in range(CALLS)]
    assert not torch.equal(expected[0], expected[1])
    with trident.enable():
        f = torch.compile(accumulated, backend="trident")
        f(x)
        accumulate_kernel.cache.clear()
        assert_same([f(x) for _ in range(CALLS)], expected)


def zero_out(arguments: Any) -> None:
    arguments["out"].zero_()


@triton.autotune([triton.Config({"BLOCK": 256}, pre_hook=zero_out)], key=[])
@triton.jit
def hooked_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.atomic_add(out + i, tl.load(x + i, mask=m), mask=m)


def hooked(x: Any) -> Any:
    out = torch.ones_like(x)
    hooked_kernel[(4,)](x, out, x.numel())
    return out


def test_pre_hook_of_a_config(fresh: None) -> None:
    """It runs for each launch: these go through Triton. (Dynamo takes it with this option only.)"""
    with torch._inductor.config.patch(unsafe_ignore_unsupported_triton_autotune_args=True):
        check(hooked, lambda i: (randn(1000, seed=i),), "trident", by_triton=True)


# Tensor descriptors and scratch memory


@triton.jit
def described_kernel(x, out, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    out.store([row, 0], x.load([row, 0]) * 2)


def described(x: Any) -> Any:
    out = torch.empty_like(x)
    source = TensorDescriptor.from_tensor(x, [32, 64])
    target = TensorDescriptor.from_tensor(out, [32, 64])
    described_kernel[(x.shape[0] // 32,)](source, target, ROWS=32)
    return out + 1


@both
def test_descriptors_of_the_host(fresh: None, backend: str) -> None:
    native = backend == "trident"
    check(described, lambda i: (randn(128, 64, seed=i),), backend, native=native, by_triton=True)


@triton.jit
def describing_kernel(x, out, n_rows, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    source = tl.make_tensor_descriptor(
        x, shape=[n_rows, n], strides=[n, 1], block_shape=[ROWS, COLUMNS]
    )
    target = tl.make_tensor_descriptor(
        out, shape=[n_rows, n], strides=[n, 1], block_shape=[ROWS, COLUMNS]
    )
    row = tl.program_id(0) * ROWS
    target.store([row, 0], source.load([row, 0]) * 2)


def describing(x: Any) -> Any:
    out = torch.empty_like(x)
    n_rows, n = x.shape
    describing_kernel[(n_rows // 32,)](x, out, n_rows, n, ROWS=32, COLUMNS=64)
    return out + 1


@pytest.fixture
def allocations() -> Iterator[list[int]]:
    """The sizes of scratch memory that Triton asks for."""
    from triton.runtime import _allocation

    sizes: list[int] = []

    def allocate(size: int, align: int, stream: int | None) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.int8, device=DEVICE)

    before = _allocation._allocator.get()
    triton.set_allocator(allocate)
    yield sizes
    triton.set_allocator(before)


@both
def test_descriptors_of_the_device(fresh: None, backend: str, allocations: list[int]) -> None:
    """They need scratch memory: the user's allocator gives it, or Inductor's, which replaces it."""

    def asked() -> list[int]:
        found = allocations[:]
        allocations.clear()
        return found

    check(describing, lambda i: (randn(128, 64, seed=i),), backend, extra=asked)
    if backend == "trident":
        describing(randn(128, 64))
        assert asked()


# Observers


@both
def test_launch_hooks(fresh: None, backend: str) -> None:
    """Hooks that are added after the program was built see what they see in stock."""
    x, y = randn(1000), randn(1000, seed=1)
    seen: list[str] = []
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook

    def note(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    def with_hooks(f: Any) -> list[str]:
        for hooks in (enter, leave):
            hooks.add(note)
        try:
            seen.clear()
            for _ in range(CALLS):
                assert_same(f(x, y), expected)
        finally:
            for hooks in (enter, leave):
                hooks.remove(note)
        return list(seen)

    expected = added(x, y)
    with trident.enable():
        f = settled(added, x, y, backend=backend)
    stock = with_hooks(f)
    assert backend == "inductor" or stock == ["add_kernel"] * 2 * CALLS
    with trident.enable():
        assert with_hooks(f) == stock
        before = hits(f)
        assert_same(f(x, y), expected)
        assert hits(f) == before + 1


# Streams, graphs, threads, devices


def combined(x: Any, w: Any) -> Any:
    out = torch.empty_like(x)
    add_kernel[(16,)](x, w, out, x.numel(), BLOCK=256)
    return (out @ w).relu() + 1, out


SLEEP = 100_000_000  # cycles: some 50 ms


@both
def test_order_on_a_stream(fresh: None, backend: str) -> None:
    """On the current stream, all is after what the stream is still busy with, and nobody waits. On
    another one the kernels would see the old values."""
    x, w = randn(64, 64), randn(64, 64, seed=1)
    values = [randn(64, 64, seed=i) for i in range(CALLS)]
    stream = torch.cuda.Stream()
    with trident.enable():
        f = settled(combined, x, w, backend=backend)
        expected = [f(value, w) for value in values]
        with torch.cuda.stream(stream):
            f(x, w)  # the matrix product has its workspace per stream
        torch.cuda.synchronize()
        before, n_by_python = hits(f), len(by_python)
        results = []
        for value in values:
            x.zero_()
            torch.cuda.synchronize()
            done = torch.cuda.Event()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP)
                x.copy_(value)
                results.append(f(x, w))
                done.record(stream)
            assert not done.query()
            done.synchronize()
        assert_same(results, expected)
        assert (hits(f), len(by_python)) == (before + CALLS, n_by_python)


@both
def test_capture_into_a_cuda_graph(fresh: None, backend: str) -> None:
    x, w = randn(64, 64), randn(64, 64, seed=1)
    with trident.enable():
        f = settled(combined, x, w, backend=backend)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            f(x, w)
        torch.cuda.current_stream().wait_stream(side)
        before, n_by_python = hits(f), len(by_python)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = f(x, w)
        assert (hits(f), len(by_python)) == (before + 1, n_by_python)
    for i in range(CALLS):
        x.copy_(randn(64, 64, seed=i))
        graph.replay()
        assert_same(captured, f(x, w))


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@both
def test_two_threads_on_two_streams(fresh: None, backend: str) -> None:
    w = randn(64, 64, seed=99)
    inputs = [[randn(64, 64, seed=50 * k + i) for i in range(40)] for k in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    barrier = threading.Barrier(2)
    with trident.enable():
        f = settled(combined, inputs[0][0], w, backend=backend)
        expected = [[f(x, w) for x in xs] for xs in inputs]
        torch.cuda.synchronize()

        def work(k: int) -> Any:
            barrier.wait(60)
            with torch.cuda.stream(streams[k]):
                torch.cuda._sleep(SLEEP // 10 * (1 + k))
                results = [f(x, w) for x in inputs[k]]
                streams[k].synchronize()
            return results

        before, n_by_python = hits(f), len(by_python)
        results = in_threads([lambda: work(0), lambda: work(1)])
        torch.cuda.synchronize()
        assert_same(results, expected)
        assert (hits(f), len(by_python)) == (before + 80, n_by_python)


@both
def test_thread_without_a_context(fresh: None, backend: str) -> None:
    """The first thing that a thread does with CUDA is such a launch."""
    x, y = randn(1000), randn(1000, seed=1)
    with trident.enable():
        f = settled(added, x, y, backend=backend)
        before = hits(f)
        for _ in range(CALLS):
            (result,) = in_threads([lambda: f(x, y)])
            assert_same(result, x + y)
        assert hits(f) == before + CALLS


@two_gpus
@both
def test_device(fresh: None, backend: str) -> None:
    """Kernels are loaded per device; nobody but Inductor's code changes the current one."""
    f = torch.compile(added, backend=backend)
    inputs = [[randn(1000, seed=i).to(device) for i in range(2)] for device in ("cuda:0", "cuda:1")]

    def calls() -> Any:
        found = []
        for device in (0, 1, 0, 1):
            with torch.cuda.device(device):
                found.append(f(*inputs[device]))
                assert torch.cuda.current_device() == device
        return found

    calls()
    expected = calls()
    with trident.enable():
        for _ in range(3):
            assert_same(calls(), expected)
        assert_native(f)
    assert torch.cuda.current_device() == 0


# Errors


@triton.jit
def too_much_shared_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, 128)
    k = tl.arange(0, BLOCK)
    total = tl.zeros((128, 128), tl.float32)
    for first in range(0, n, BLOCK):
        a = tl.load(x + i[:, None] * n + first + k[None, :])
        b = tl.load(y + (first + k)[:, None] * 128 + i[None, :])
        total += tl.dot(a, b)
    tl.store(out + i[:, None] * 128 + i[None, :], total)


def too_much_shared(x: Any) -> Any:
    out = torch.zeros(128, 128, device=x.device)
    n = x.shape[1]
    too_much_shared_kernel[(1,)](x, x.view(n, 128), out, n, BLOCK=64, num_stages=8)
    return out


@triton.jit
def unknown_name_kernel(x, out):
    tl.store(out, tl.load(x) + no_such_name)  # noqa: F821


def with_unknown_name(x: Any) -> Any:
    out = torch.empty_like(x)
    unknown_name_kernel[(1,)](x, out)
    return out


@triton.jit
def mask_kernel(x, out):
    tl.store(out, tl.load(x) & 7)


def masked(x: Any) -> Any:
    out = torch.empty_like(x)
    mask_kernel[(1,)](x, out)
    return out


def fill(kind: str) -> torch.Tensor:
    if kind == "float":
        return torch.ones(128, 1024, device=DEVICE)
    return torch.ones(128, 1024, dtype=torch.int32, device="cpu" if kind == "cpu" else DEVICE)


ERRORS = {
    "OutOfResources": (too_much_shared, ["float"] * 4),
    "CompilationError": (with_unknown_name, ["float"] * 4),
    "wrong dtype": (masked, ["int", "float", "int", "float"]),
    "CPU tensor": (masked, ["int", "cpu", "int", "cpu"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(fresh: None, name: str) -> None:
    """They are Triton's own, each time, and what comes after them is right. (Inductor raises such
    errors while it compiles.)"""
    f, kinds = ERRORS[name]
    inputs = [fill(kind) for kind in kinds]
    expected = [outcome(f, x) for x in inputs]
    good = [kind == "int" for kind in kinds]
    assert [isinstance(e, torch.Tensor) for e in expected] == good
    assert name in ("wrong dtype", "CPU tensor") or expected[0][0].__name__ == name
    compiled = torch.compile(f, backend="trident", dynamic=False)

    def differences(found: list[Any]) -> list[Any]:
        pairs = zip(found, expected, good, strict=True)
        same = [a[0, 0] == b[0, 0] if is_good else a == b for a, b, is_good in pairs]
        return [a for a, is_same in zip(found, same, strict=True) if not is_same]

    assert not differences([outcome(compiled, x) for x in inputs])
    with trident.enable():
        for _ in range(3):
            assert not differences([outcome(compiled, x) for x in inputs])


# The default backend


def relu2(x: Any, y: Any) -> Any:
    return torch.relu(x + y) * 2


def softmax(x: Any, w: Any) -> Any:
    return torch.softmax(x @ w, -1), x.sum(0)


def random(x: Any, y: Any) -> Any:
    return torch.rand_like(x) + y, torch.randn_like(y)


def dropout(x: Any, y: Any) -> Any:
    return F.dropout(x, 0.3, training=True) + y


def layer_norm(x: Any, y: Any) -> Any:
    return F.layer_norm(x, (64,), y[0], y[1]), x.var(0), x.argmax(-1)


def attention(q: Any, k: Any) -> Any:
    q, k = q.view(2, 2, 16, 64), k.view(2, 2, 16, 64)
    return F.scaled_dot_product_attention(q, k, k * 2, is_causal=True)


def conv2d(x: Any, w: Any) -> Any:
    return F.conv2d(x.view(1, 4, 32, 32), w.view(-1)[:288].view(8, 4, 3, 3), padding=1).relu()


def embedding(x: Any, y: Any) -> Any:
    indices = torch.arange(0, 64, 3, device=x.device)
    return F.embedding(indices, x) * 2 + y[: indices.shape[0]]


def cumsum_and_sort(x: Any, y: Any) -> Any:
    return x.cumsum(0), x.sort(-1), y.topk(3), y.cumsum(-1) + 1


def scatter(x: Any, y: Any) -> Any:
    indices = torch.arange(63, -1, -1, device=x.device)
    a = x.scatter(0, indices[:, None].expand(64, 64), y)
    b = torch.zeros_like(x).index_put((indices,), y + 1)
    return a, b, x.index_select(0, indices)


def changes_inputs(x: Any, y: Any) -> Any:
    x.add_(1)
    y[3:5].mul_(x[:2])
    return x * 2 + y


def reductions(x: Any, y: Any) -> Any:
    return x.sum(), (x * y).mean(0), y.amax(-1, keepdim=True), x.std(), (x > y).any()


def conditional(x: Any, y: Any) -> Any:
    return torch.cond(x[0, 0] > 0, lambda a, b: a.sin() + b, lambda a, b: a * b, (x, y))


DEFAULT = {
    f.__name__: f
    for f in (
        *(relu2, softmax, random, dropout, layer_norm, attention, conv2d, embedding),
        *(cumsum_and_sort, scatter, changes_inputs, reductions, conditional),
    )
}


def pair(i: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(64, 64, seed=i, dtype=dtype), randn(64, 64, seed=9 + i, dtype=dtype)


@pytest.mark.parametrize("name", DEFAULT)
def test_default_backend(fresh: None, name: str) -> None:
    check(DEFAULT[name], pair, "inductor")


@pytest.mark.parametrize("f", [attention, layer_norm, relu2])
def test_default_backend_in_bfloat16(fresh: None, f: Any) -> None:
    check(f, lambda i: pair(i, torch.bfloat16), "inductor")


@pytest.mark.parametrize("f", [relu2, softmax, reductions])
def test_dynamic_shapes(fresh: None, f: Any) -> None:
    """One program for all sizes."""
    sizes = (64, 33, 128, 7, 64)

    def make(i: int) -> Any:
        columns = 64 if f is softmax else sizes[i]
        rows = 64 if f is softmax else sizes[i]
        return randn(sizes[i], columns, seed=i), randn(rows, columns, seed=9)

    check(f, make, "inductor", calls=5, dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_misaligned_inputs(fresh: None, dynamic: bool) -> None:
    """Stock copies them; aligned ones are native again afterwards."""

    def make(i: int) -> Any:
        return randn(4097, seed=i)[i % 2 :][:4096], randn(4096, seed=9)

    f = check(relu2, make, "inductor", native=False, dynamic=dynamic)
    with trident.enable():
        before = hits(f)
        f(*make(0))
        assert hits(f) == before + 1


def test_mlp(fresh: None) -> None:
    layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())]
    torch.manual_seed(0)
    model = nn.Sequential(*layers).to(DEVICE).requires_grad_(False)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(randn(64, 64) / 8)

    def mlp(x: Any) -> Any:
        return model(x)

    check(mlp, lambda i: (randn(8, 64, seed=i),), "inductor")


def matmul_relu(x: Any, w: Any) -> Any:
    return torch.relu(x @ w)


def test_max_autotune(fresh: None) -> None:
    """A template of Inductor's, or an operator, whatever was the fastest."""
    mode = "max-autotune-no-cudagraphs"
    check(matmul_relu, pair, "inductor", native=False, mode=mode)


def test_cuda_graphs_of_inductor(fresh: None) -> None:
    """They stay with stock. (A result is overwritten by the next call.)"""
    f = torch.compile(matmul_relu, mode="reduce-overhead")
    inputs = [pair(i) for i in range(CALLS)]

    def results() -> Any:
        found = []
        for x, w in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            found.append(f(x, w).clone())
        return found

    results()
    expected = results()
    with trident.enable():
        for _ in range(3):
            assert_same(results(), expected)
        (frame,) = trident.explain(f).frames
        assert not any(spec.program_native for spec in frame.specializations), str(frame)


def test_tuned_by_coordinate_descent(fresh: None) -> None:
    """Its kernels choose once more at their first launch."""
    options = {"coordinate_descent_tuning": True}
    check(relu2, pair, "inductor", native=False, options=options)


class Layer(nn.Module):
    """One layer of a decoder that gets one token at a time; its cache has a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Any, position: Any, mask: Any, keys: Any, values: Any) -> Any:
        h = F.rms_norm(x, (64,))
        q, k, v = (t.view(-1, 4, 1, 16) for t in self.qkv(h).chunk(3, -1))
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.out(y.reshape(x.shape))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (64,)))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, token: Any, position: Any, caches: Any) -> Any:
        x = self.embedding(token)
        mask = (torch.arange(32, device=x.device) <= position).view(1, 1, 1, 32)
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            x = layer(x, position, mask, keys, values)
        return x @ self.embedding.weight.t()


@both
def test_decoding_with_a_static_cache(fresh: None, backend: str) -> None:
    """Five tokens, each the likeliest after the last; the caches are changed in place."""
    torch.manual_seed(0)
    model = Decoder().to(DEVICE, torch.bfloat16).requires_grad_(False)
    compiled = torch.compile(model, backend=backend)

    def generate() -> Any:
        zeros = torch.zeros(2, 2, 2, 4, 32, 16, dtype=torch.bfloat16, device=DEVICE)
        caches = [[zeros[i, 0].clone(), zeros[i, 1].clone()] for i in range(2)]
        token, found = torch.tensor([3, 5], device=DEVICE), []
        for step in range(5):
            logits = compiled(token, torch.tensor([step], device=DEVICE), caches)
            token = logits.argmax(-1)
            found.append((logits, token))
        return found, caches

    generate()
    expected = generate()
    with trident.enable():
        for _ in range(3):
            assert_same(generate(), expected)
        before = hits(compiled)
        generate()
        assert_native(compiled)
        assert hits(compiled) == before + 5


# Memory


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@both
@pytest.mark.parametrize("f", [added, tuned, relu2])
def test_launches_leave_nothing_behind(fresh: None, backend: str, f: Any) -> None:
    if backend == "trident" and f is relu2:
        pytest.skip("it has no kernel")
    x, y = randn(1000), randn(1000, seed=1)
    with trident.enable():
        compiled = settled(f, x, y, backend=backend)
        for _ in range(200):
            compiled(x, y)
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated(), resident()
        for _ in range(3000):
            compiled(x, y)
        torch.cuda.synchronize()
        gc.collect()
        assert torch.cuda.memory_allocated() == before[0]
        assert resident() - before[1] < 4 << 20
        assert grows(lambda: compiled(x, y)) is None


def test_launches_by_triton_leave_nothing_behind(fresh: None, allocations: list[int]) -> None:
    x = randn(128, 64)
    with trident.enable():
        compiled = torch.compile(describing, backend="trident")
        for _ in range(200):
            compiled(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), resident()
        for _ in range(1000):
            compiled(x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before[0]
        assert resident() - before[1] < 4 << 20


def test_errors_leave_nothing_behind(fresh: None) -> None:
    """What was allocated before the error is freed."""
    x = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with trident.enable():
        f = torch.compile(counting, backend="trident", dynamic=True)
        for n in (2, 70_000, 3):
            outcome(f, x, n)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(200):
            with pytest.raises(RuntimeError):
                f(x, 70_000)
        assert torch.cuda.memory_allocated() == before


@both
def test_specializations_are_forgotten(fresh: None, backend: str) -> None:
    """20 of them (8 of Inductor's, which take their time), and none after a reset."""

    def alive() -> int:
        gc.collect()
        kinds = (UserLaunch, InductorLaunch)
        return sum(type(o) in kinds for o in gc.get_objects())

    torch._dynamo.reset()
    n = 20 if backend == "trident" else 8
    before = alive()
    with trident.enable(recompile_limit=64):
        allocated = []
        for _ in range(2):
            f = torch.compile(added, backend=backend, dynamic=False)
            for _ in range(2):
                for size in range(100, 100 + n):
                    x, y = randn(size), randn(size, seed=1)
                    assert_same(f(x, y), x + y)
            assert native_programs("added") == [True] * n
            assert alive() >= before + n
            del f, x, y
            torch._dynamo.reset()
            assert native_programs("added") == []
            assert alive() == before
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
        assert allocated[0] == allocated[1]


# Last, as it leaves the driver recording launches.


@both
def test_profiler(fresh: None, backend: str) -> None:
    x, w = randn(64, 64), randn(64, 64, seed=1)

    def kernels(f: Any) -> Counter[str]:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(CALLS):
                assert_same(f(x, w), expected)
            torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        names = [e.name for e in profile.events() if e.device_type == cuda]
        notes = ("Torch-Compiled Region", "##", "Activity")
        return Counter(name for name in names if not name.startswith(notes))

    with trident.enable():
        f = settled(interleaved, x, w, backend=backend)
    expected = f(x, w)
    kernels(f)  # CUPTI is slow to start
    stock = kernels(f)
    if not stock:
        pytest.skip("the profiler sees no kernels here")
    with trident.enable():
        assert kernels(f) == stock
    assert sum(n for name, n in stock.items() if "add_kernel" in name) == 2 * CALLS
