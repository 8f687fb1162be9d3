"""Users' Triton kernels in compiled functions: bit for bit as in eager, and launched natively."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.conftest import outcome
from tests.memory import grows
from tests.test_equality import assert_same
from tests.triton_cpu import triton_cpu

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
tc = pytest.importorskip("tests.triton_cpu")

__all__ = ["triton_cpu"]

INTEGERS = [0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**40 + 1]
FLOATS = [0.0, -0.0, 1.0, 0.1, -1e-45, 1e300, float("inf"), float("nan")]


@pytest.fixture(autouse=True)
def _fresh(fresh: None, triton_cpu: Any) -> None:
    """Dynamo as after import, and a driver without a GPU."""


# ---- what the tests compare ----


def _plain(value: Any) -> Any:
    """An argument of a launch, without its address; what matters of that is the alignment."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if hasattr(value, "address"):
        return "pointer", value.dtype, value.address % 16
    return type(value), repr(value)


def _run(f: Callable[..., Any], given: Any) -> tuple[Any, list[Any], list[str]]:
    """The result, the inputs afterwards and their versions; the launches, and how they were."""
    inputs = copy.deepcopy(given)
    tensors = [x for x in inputs if torch.is_tensor(x) and not x.is_inference()]
    versions = [x._version for x in tensors]
    tc.launches.clear()
    result = f(*inputs)
    found = [
        (name, grid, {k: _plain(v) for k, v in arguments.items()})
        for name, grid, arguments, _ in tc.launches
    ]
    hows = [how for *_, how in tc.launches]
    tc.launches.clear()
    bumps = [x._version - before for x, before in zip(tensors, versions, strict=True)]
    return (result, inputs, bumps), found, hows


def check(
    f: Callable[..., Any], *cases: Any, native: bool = True, calls: int = 4, **options: Any
) -> Any:
    """For each of `cases`, arguments: `calls` calls of the compiled function are as in eager, with
    the same launches, and from the third on they are native or all through Triton."""
    compiled = torch.compile(f, backend="trident", **options)
    with trident.enable():
        for number, case in enumerate(cases):
            compare(compiled, f, case, native, calls, f"case {number}")
    return compiled


def compare(
    compiled: Any,
    f: Any,
    case: Any,
    native: bool = True,
    calls: int = 4,
    what: str = "result",
    learned: int = 2,
) -> None:
    _run(f, case)  # an autotuner tunes
    expected, launched, _ = _run(f, case)
    for call in range(calls):
        found, launches, hows = _run(compiled, case)
        assert_same(found, expected, f"{what}, call {call}")
        if call >= learned:
            assert launches == launched, (what, call)
            assert hows == ["native" if native else "python"] * len(launched), (what, call)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Not ones, but no two alike; and no view, which Dynamo distinguishes from what is none."""
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) - n / 3).to(dtype).reshape(shape).clone()


def blocks(n: Any) -> Any:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


# ---- kernels ----


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = at < n
    tl.store(out + at, tl.load(x + at, mask=m) + tl.load(y + at, mask=m), mask=m)


def add(x: Any, y: Any) -> Any:
    out = torch.empty_like(x)
    add_kernel[blocks(x.numel())](x, y, out, x.numel(), BLOCK=64)
    return out


@triton.jit
def plus_kernel(x, out, a, n, BLOCK: tl.constexpr):
    """Of an integer: it is passed, or a constant."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + a, mask=at < n)


def plus(x: Any, a: Any) -> Any:
    out = torch.empty_like(x)
    plus_kernel[(1,)](x, out, a, x.numel(), BLOCK=16)
    return out


@triton.jit
def scale_kernel(x, out, s, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * s, mask=at < n)


def scale(x: Any, s: Any) -> Any:
    out = torch.empty_like(x)
    scale_kernel[(1,)](x, out, s, x.numel(), BLOCK=16)
    return out


# ---- where Trident is enabled ----


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_before_it_is_enabled(grad: bool) -> None:
    """And the other way round: the same function serves both, and without it Triton launches."""
    compiled = torch.compile(add, backend="trident")
    with torch.set_grad_enabled(grad):
        compare(compiled, add, (ones(100), ones(100)), native=False, learned=0)
        with trident.enable():
            compare(compiled, add, (ones(100), ones(100)))
            compare(compiled, add, (ones(101), ones(101)))
        for n in (101, 102):
            compare(compiled, add, (ones(n), ones(n)), native=False, learned=0)
        with trident.enable():
            compare(compiled, add, (ones(102), ones(102)), learned=1)


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        check(add, (ones(100), ones(100)), (ones(50), ones(50)))


# ---- arguments ----


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_sizes(dynamic: bool | None) -> None:
    """Of sizes 0 and 1, too; several blocks."""
    cases = [(ones(n), ones(n)) for n in (100, 64, 129, 1, 0, 4096)]
    check(add, *cases, dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.uint8])
def test_dtypes(dtype: torch.dtype) -> None:
    check(add, (ones(100, dtype=dtype), ones(100, dtype=dtype)))


@pytest.mark.parametrize("value", INTEGERS)
def test_static_integers(value: int) -> None:
    check(plus, (ones(9, dtype=torch.int64), value), dynamic=False)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**63, 2**64 - 1])
def test_constants_of_64_bits(value: int) -> None:
    def f(x: Any) -> Any:
        return plus(x, value)

    check(f, (ones(9, dtype=torch.int64),), dynamic=False)


@pytest.mark.parametrize("dynamic", [None, True])
def test_dynamic_integers(dynamic: bool | None) -> None:
    """One program: its variants depend on the width, on being 1 and on divisibility by 16."""
    x = ones(9, dtype=torch.int64)
    check(plus, *((x, value) for value in (*INTEGERS, 18, 2**40 + 2, 17)), dynamic=dynamic)


def test_computed_integers() -> None:
    """Dynamo specializes an input that is 1; what is computed from inputs may become so."""

    def f(x: Any, a: int) -> Any:
        out = torch.empty_like(x)
        plus_kernel[(1,)](x, out, a - 4, x.numel(), BLOCK=16)
        return out

    x = ones(9, dtype=torch.int64)
    check(f, *((x, a) for a in (4, 5, 6, 20, 36, 7, 5, 4)), dynamic=True)


@pytest.mark.parametrize("value", FLOATS)
def test_static_floats(value: float) -> None:
    """As in eager they are passed with 32 bits."""
    # Triton's launcher makes an infinity of what does not fit; Trident leaves that one to it.
    check(scale, (ones(9), value), native=value != 1e300, dynamic=False)


def test_dynamic_floats() -> None:
    check(scale, *((ones(9), value) for value in (0.3, 0.7, *FLOATS)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_computed_floats(dtype: torch.dtype) -> None:
    """Trident's programs compute integers only: Dynamo's code runs such a graph."""

    def f(x: Any, s: float) -> Any:
        return scale(x, s * 2 + 0.1), scale(x, x.size(0) / 3)

    cases = [(ones(n, dtype=dtype), s) for n, s in ((9, 0.3), (10, 0.7), (11, 1.5))]
    check(f, *cases, native=False, dynamic=True)


@pytest.mark.parametrize("value", [True, False])
def test_booleans(value: bool) -> None:
    @triton.jit
    def kernel(x, out, flag, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n)
        tl.store(out + at, tl.where(flag, v, -v), mask=at < n)

    def f(x: Any, flag: bool) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, flag, x.numel(), BLOCK=16)
        return out

    check(f, (ones(9), value), (ones(9), not value))


@triton.jit
def optional_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    if y is not None:
        v += tl.load(y + at, mask=at < n)
    tl.store(out + at, v, mask=at < n)


def test_none() -> None:
    def f(x: Any, y: Any) -> Any:
        out = torch.empty_like(x)
        optional_kernel[(1,)](x, y, out, x.numel(), 16)
        return out

    check(f, (ones(9), None), (ones(9), ones(9)), (ones(8), None))


@pytest.mark.parametrize("mode", ["double", "negate"])
@pytest.mark.parametrize("by", [3, 2.5, True])
def test_constexprs(mode: str, by: Any) -> None:
    @triton.jit
    def kernel(x, out, n, MODE: tl.constexpr, BY: tl.constexpr, SHAPE: tl.constexpr):
        at = tl.arange(0, SHAPE[1])
        v = tl.load(x + at, mask=at < n)
        if MODE == "double":  # noqa: SIM108
            v = v * 2
        else:
            v = -v
        tl.store(out + at, v * BY + SHAPE[0], mask=at < n)

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, x.numel(), MODE=mode, BY=by, SHAPE=(3, 16))
        return out

    check(f, (ones(9),))


def test_dtypes_as_constexprs() -> None:
    @triton.jit
    def kernel(x, out, n, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n).to(DTYPE).to(tl.float32), mask=at < n)

    def f(x: Any) -> Any:
        out, other = torch.empty_like(x), torch.empty_like(x)
        kernel[(1,)](x, out, x.numel(), DTYPE=tl.float16, BLOCK=16)
        kernel[(1,)](x, other, x.numel(), DTYPE=tl.int32, BLOCK=16)
        return out, other

    check(f, (ones(9) / 7,))


def test_a_constexpr_that_is_a_size() -> None:
    """Dynamo specializes on it."""

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        add_kernel[(1,)](x, x, out, x.numel(), BLOCK=x.size(0))
        return out

    check(f, *((ones(n),) for n in (16, 32, 64)), dynamic=True)


def test_tuples() -> None:
    """Their items are parameters, but for those that are specialized away."""

    @triton.jit
    def kernel(x, out, pair, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        m = at < pair[0]
        tl.store(out + at, tl.load(x + at, mask=m) * pair[1] + pair[2] + pair[3][0], mask=m)

    def f(x: Any) -> Any:
        out = torch.zeros_like(x)
        kernel[(1,)](x, out, (7, 2.5, 1, (16, 3)), BLOCK=16)
        return out

    check(f, (ones(9),))


def test_tuples_of_tensors() -> None:
    @triton.jit
    def kernel(pair, out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        m = at < n
        tl.store(out + at, tl.load(pair[0] + at, mask=m) - tl.load(pair[1] + at, mask=m), mask=m)

    def f(x: Any, y: Any) -> Any:
        out = torch.zeros_like(x)
        kernel[(1,)]((x, y), out, x.numel(), BLOCK=16)
        return out

    case = (ones(9), ones(9) * 2)
    stock = outcome(torch.compile(f, backend="eager"), *case)
    if isinstance(stock, torch.Tensor):
        check(f, case, native=False)
    else:
        with trident.enable():
            torch._dynamo.reset()
            assert outcome(torch.compile(f, backend="trident"), *case)[0] is stock[0]


@triton.jit
def transpose_kernel(x, out, n, k, sx0, sx1, so0, so1, N: tl.constexpr):
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    m = (i < n) & (j < k)
    tl.store(out + j * so0 + i * so1, tl.load(x + i * sx0 + j * sx1, mask=m), mask=m)


def transpose(x: Any) -> Any:
    out = torch.empty(x.size(1), x.size(0))
    transpose_kernel[(1, 1)](x, out, *x.shape, *x.stride(), *out.stride(), N=16)
    return out


@pytest.mark.parametrize("dynamic", [None, True])
def test_strides(dynamic: bool | None) -> None:
    shapes = [(4, 5), (8, 16), (16, 3), (7, 1), (1, 7)]
    cases = [(ones(*shape),) for shape in shapes]
    check(transpose, *cases, (ones(6, 4).t(),), (ones(12, 14)[::2, 1::3],), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, True])
def test_offsets(dynamic: bool | None) -> None:
    """A misaligned address has its own variant, of the same program."""

    def f(x: Any, y: Any, k: int) -> Any:
        z = add(x[k:], y[: x.size(0) - k])
        add_kernel[(1,)](z, y[3:], x[1:], 5, BLOCK=8)
        return z, x[4:]

    cases = [(ones(40), ones(40), k) for k in (1, 2, 3, 4, 8)]
    check(f, *cases, (ones(41)[1:], ones(40), 4), (ones(40), ones(44)[4:], 3), dynamic=dynamic)


def test_inputs_of_other_alignment() -> None:
    """Dynamo has no guard on it."""
    compiled = torch.compile(add, backend="trident")
    with trident.enable():
        cases = [(ones(48), ones(48)), (ones(49)[1:], ones(48)), (ones(48), ones(49)[1:])]
        compare(compiled, add, cases[0])
        for case in cases[1:]:
            compare(compiled, add, case, learned=1)
        for case in cases:
            compare(compiled, add, case, learned=0)


def test_keywords_in_another_order() -> None:
    def f(x: Any, y: Any) -> Any:
        out = torch.empty_like(x)
        add_kernel[(2,)](BLOCK=64, n=x.numel(), out=out, y=y, x=x)
        add_kernel[(2,)](out, y, BLOCK=64, n=50, out=out)
        return out

    check(f, (ones(100), ones(100)))


def test_defaults() -> None:
    @triton.jit
    def kernel(x, out, n=9, a=3, s=0.5, flag=True, z=None, pair=(2, 16), BLOCK: tl.constexpr = 16):
        at = tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n) * s + a + pair[0] * pair[1]
        if z is not None:
            v += tl.load(z + at, mask=at < n)
        tl.store(out + at, tl.where(flag, v, -v), mask=at < n)

    def f(x: Any) -> Any:
        outs = [torch.zeros_like(x) for _ in range(4)]
        kernel[(1,)](x, outs[0])
        kernel[(1,)](x, outs[1], x.numel(), flag=False)
        kernel[(1,)](x, outs[2], s=2.5, a=1)
        kernel[(1,)](x, outs[3], z=x, n=4, BLOCK=32)
        return outs

    check(f, (ones(9),), (ones(12),))


def test_the_same_tensor_twice() -> None:
    def f(x: Any) -> Any:
        add_kernel[(1,)](x, x, x, x.numel(), BLOCK=64)
        return x

    check(f, (ones(40),), (ones(41),))


def test_aliases() -> None:
    """Views of each other, one of which is written."""

    def f(x: Any, y: Any) -> Any:
        v = x.view(-1)[2:]
        add_kernel[(1,)](v, y, v, 8, BLOCK=8)
        add_kernel[(1,)](x, x[:1], y, 4, BLOCK=4)
        return x, v, y * 1, x.t()

    base = ones(20)
    check(f, (ones(4, 5), ones(20)), (base[:16].view(4, 4), base[4:]), (base.view(4, 5), base))


# ---- grids ----


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", ["one", "two", "three", "list", "meta", "symbol", "computed"])
def test_grids(kind: str, dynamic: bool | None) -> None:
    @triton.jit
    def kernel(out, BLOCK: tl.constexpr):
        i, j, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        number = (i * tl.num_programs(1) + j) * tl.num_programs(2) + k
        tl.store(out + number, number + BLOCK)

    def f(x: Any) -> Any:
        n, m = x.shape
        out = torch.zeros(n * m * 2)
        grid: Any = {
            "one": (3,),
            "two": (3, 2),
            "three": (2, 1, 4),
            "meta": lambda meta: (meta["BLOCK"] // 2, 2),
            "symbol": (n, m, 2),
            "computed": (triton.cdiv(n * m, 3), max(n - 1, 1)),
            "list": [3, 2],
        }[kind]
        kernel[grid](out, BLOCK=4)
        return out

    # Dynamo does not trace a call with a list.
    cases = [(ones(*shape),) for shape in ((3, 5), (4, 4), (2, 8))]
    check(f, *cases, native=kind != "list", dynamic=dynamic)


def test_empty_grids() -> None:
    """Nothing is launched; the variants of other sizes stay."""

    def f(x: Any, n: int) -> Any:
        out = torch.zeros_like(x)
        add_kernel[(n - 2, n - 2)](x, x, out, 40, BLOCK=64)
        return out

    x = ones(40)
    compiled = check(f, *((x, n) for n in (2, 3, 2, 3)), dynamic=True)
    with trident.enable():
        for _ in range(100):
            compiled(x, 2)
        compare(compiled, f, (x, 3), learned=0)


def test_empty_grids_keep_other_variants() -> None:
    """The same variant is not added again by each launch that goes through Triton."""

    def f(x: Any, n: int) -> Any:
        out = torch.zeros_like(x)
        plus_kernel[(n - 3,)](x, out, n, 9, BLOCK=16)
        return out

    x = ones(9)
    compiled = check(f, (x, 16), (x, 3), (x, 16), dynamic=True)
    with trident.enable():
        for _ in range(100):
            compiled(x, 3)
        compare(compiled, f, (x, 16), learned=0)


def test_empty_grids_leave_no_memory() -> None:
    def f(x: Any, n: int) -> Any:
        out = torch.zeros_like(x)
        add_kernel[(n - 2,)](x, x, out, 40, BLOCK=64)
        return out

    compiled = torch.compile(f, backend="trident", dynamic=True)
    x = ones(40)
    with trident.enable():
        assert grows(lambda: compiled(x, 2), 500) is None


@pytest.mark.parametrize("grid", [(2**31,), (2**16, 2**16), (2**31 - 1, 2)])
def test_grids_that_are_too_large(grid: Any, monkeypatch: Any) -> None:
    """Triton's launcher knows what to say."""
    ran = []

    def run(function: Any, grid: Any, packed: Any, how: str) -> None:
        ran.append((grid, how))
        raise RuntimeError("Triton Error [CUDA]: invalid argument")

    monkeypatch.setattr(tc._Function, "run", run)

    def f(x: Any, n: int) -> Any:
        add_kernel[(grid[0] + n - 2, *grid[1:])](x, x, x, 40, BLOCK=64)
        return x

    for backend in ("eager", "trident"):
        compiled = torch.compile(f, backend=backend, dynamic=True)
        with trident.enable():
            for _ in range(3):
                with pytest.raises(RuntimeError, match="invalid argument"):
                    compiled(ones(40), 2)
    assert len(ran) == 6
    assert {how for _, how in ran} == {"python"}


def test_a_grid_that_becomes_too_large(monkeypatch: Any) -> None:
    compiled = torch.compile(lambda x, n: _launches_so_many(x, n), backend="trident", dynamic=True)
    ran = []
    with trident.enable():
        for _ in range(4):
            compiled(ones(40), 2)
        assert tc.launches[-1][-1] == "native"
        monkeypatch.setattr(tc._Function, "run", lambda _, grid, packed, how: ran.append(how))
        compiled(ones(40), 2**31)
        compiled(ones(40), 2**20)
    assert ran == ["python", "native"]


def _launches_so_many(x: Any, n: int) -> Any:
    add_kernel[(n, 1)](x, x, torch.empty_like(x), 40, BLOCK=64)
    return x


# ---- options of kernels and launches ----


def test_options() -> None:
    def f(x: Any, y: Any) -> Any:
        out, other = torch.zeros_like(x), torch.zeros_like(x)
        add_kernel[blocks(x.numel())](x, y, out, x.numel(), BLOCK=64, num_warps=8)
        add_kernel[blocks(x.numel())](x, y, other, 70, BLOCK=32, num_warps=1, num_stages=2)
        return out, other

    check(f, (ones(100), ones(100)), (ones(90), ones(90)))
    assert [block for block, _, _ in tc.configs[-2:]] == [(256, 1, 1), (32, 1, 1)]


@pytest.mark.parametrize(
    ("options", "ids"),
    [({"launch_cooperative_grid": True}, [2]), ({"launch_pdl": True}, [6])],
    ids=["cooperative", "pdl"],
)
def test_attributes_of_launches(options: Any, ids: Any) -> None:
    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        add_kernel[blocks(x.numel())](x, x, out, x.numel(), BLOCK=64, **options)
        return out

    check(f, (ones(100),))
    assert tc.configs[-1][2] == ids


def test_clusters() -> None:
    @triton.autotune([triton.Config({"BLOCK": 64}, num_ctas=2)], key=[])
    @triton.jit
    def kernel(x, y, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        m = at < n
        tl.store(out + at, tl.load(x + at, mask=m) + tl.load(y + at, mask=m), mask=m)

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        kernel[blocks(x.numel())](x, x, out, x.numel())
        return out

    check(f, (ones(200),))
    assert tc.configs[-1][2] == [4, 5]


@pytest.mark.parametrize("option", ["do_not_specialize", "do_not_specialize_on_alignment"])
def test_not_specialized(option: str) -> None:
    @triton.jit(**{option: ["x", "a", "n"]})
    def kernel(x, out, a, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + a, mask=at < n)

    def f(x: Any, a: int) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, a - 1, x.numel(), BLOCK=16)
        return out

    x = ones(17, dtype=torch.int64)
    for dynamic in (False, True):
        cases = [(y, a) for a in (17, 2, 5, 2**40) for y in (x[:9], x[1:10])]
        for case in cases if not dynamic else [None]:
            check(f, *([case] if case else cases), dynamic=dynamic)


ANNOTATIONS = {
    "int64": (5, 17, 2**40, -3),
    "int32": (5, 17, -3),
    "uint32": (5, 17, 2**32 - 1),
    "uint64": (5, 17, 2**40),
    "float64": (0.3, 0.7, 1e300),
    "float32": (0.3, 0.7),
}


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("name", ANNOTATIONS)
def test_annotations(name: str, dynamic: bool | None) -> None:
    kernel = annotated(name)

    def f(x: Any, a: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, a, x.numel())
        return out

    dtype = torch.float64 if "float" in name else torch.int64
    check(f, *((ones(9, dtype=dtype), a) for a in ANNOTATIONS[name]), dynamic=dynamic)


@pytest.mark.parametrize(("name", "value"), [("float32", 3), ("float16", 0.3), ("int8", 5)])
def test_annotations_left_to_triton(name: str, value: Any) -> None:
    """An integer that is passed as a float, and types that Dynamo's numbers never have."""
    kernel = annotated(name)

    def f(x: Any, a: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, a, x.numel())
        return out

    x = ones(9, dtype=torch.float32 if "float" in name else torch.int64)
    for dynamic in (True,):
        check(f, (x, value), (x, value + 1), native=False, dynamic=dynamic)


def annotated(name: str) -> Any:
    """A kernel of `a`, of that type."""

    def kernel(x, out, a, n):
        at = tl.arange(0, 16)
        tl.store(out + at, tl.load(x + at, mask=at < n) + a, mask=at < n)

    kernel.__annotations__ = {"a": getattr(tl, name)}
    return triton.jit(kernel)


@pytest.mark.parametrize(
    "name",
    [
        "uint32",
        "uint64",
    ],
)
def test_a_negative_number_as_unsigned(name: str) -> None:
    """Triton's launcher raises."""
    kernel = annotated(name)

    def f(x: Any, a: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, a, x.numel())
        return out

    compiled = torch.compile(f, backend="trident", dynamic=True)
    x = ones(9, dtype=torch.int64)
    with trident.enable():
        compare(compiled, f, (x, 5))
        with pytest.raises(OverflowError):
            f(x, -3)
        with pytest.raises(OverflowError):
            compiled(x, -3)
        compare(compiled, f, (x, 7), learned=0)


def test_a_number_that_does_not_fit() -> None:
    """As Triton's launcher, the lowest bits are passed."""
    kernel = annotated("int32")

    def f(x: Any, a: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, a, x.numel())
        return out

    compiled = torch.compile(f, backend="trident", dynamic=True)
    x = ones(9, dtype=torch.int64)
    with trident.enable():
        compare(compiled, f, (x, 5))
        compare(compiled, f, (x, 2**40 + 3), native=False)
        compare(compiled, f, (x, 5), learned=0)


def test_options_named_as_parameters() -> None:
    @triton.jit
    def kernel(x, out, n, num_warps: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + num_warps, mask=at < n)

    tuned = triton.autotune([triton.Config({"BLOCK": 16}, num_warps=2)], key=[])(kernel)

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        tuned[(1,)](x, out, x.numel())
        return out

    check(f, (ones(9),))
    assert tc.configs[-1][0] == (64, 1, 1)


def test_run_and_helpers() -> None:
    """``kernel.run``; functions that a kernel calls."""

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        twice_kernel.run(x, out, x.numel(), BLOCK=16, grid=(1,), warmup=False)
        return out

    check(f, (ones(9),), (ones(10),))


def test_functions_as_arguments() -> None:
    """Dynamo does not trace them."""

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        applies_kernel[(1,)](x, out, x.numel(), FUNCTION=twice)
        return out

    check(f, (ones(9),), native=False)


@triton.jit
def twice(x):
    return x + x


@triton.jit
def twice_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, twice(tl.load(x + at, mask=at < n)), mask=at < n)


@triton.jit
def applies_kernel(x, out, n, FUNCTION: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(out + at, FUNCTION(tl.load(x + at, mask=at < n)), mask=at < n)


# ---- autotuners ----


def tuned_kernel(configs: Any = None, key: Any = ("n",), **options: Any) -> Any:
    """What adds 1, and the tuned block's size to the element after those."""
    if configs is None:
        configs = [triton.Config({"BLOCK": b}, num_warps=b // 32) for b in (32, 64, 128)]

    @triton.autotune(configs=configs, key=list(key), **options)
    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        m = at < n
        tl.store(out + at, tl.load(x + at, mask=m) + 1, mask=m)
        tl.store(out + n, BLOCK)

    return kernel


def user_of(kernel: Any) -> Any:
    def f(x: Any) -> Any:
        n = x.numel() - 1
        out = torch.zeros_like(x)
        kernel[blocks(n)](x, out, n)
        return out

    return f


@pytest.mark.parametrize("dynamic", [None, True])
def test_autotuned(dynamic: bool | None) -> None:
    """Grids depend on the configuration; so does the choice (the fewest programs) on `n`."""
    kernel = tuned_kernel()
    f = user_of(kernel)
    compiled = torch.compile(f, backend="trident", dynamic=dynamic)
    with trident.enable():
        for n in (20, 50, 100, 300, 50, 20):
            compare(compiled, f, (ones(n),))
            best = kernel.best_config
            kernel.best_config = None
            compiled(ones(n))
            assert kernel.best_config is best
            assert kernel.best_config is kernel.cache[n - 1, "torch.float32", "torch.float32"]


def test_a_new_key_is_tuned() -> None:
    """By the compiled function, with as many launches as in eager."""
    kernels = [tuned_kernel() for _ in range(2)]
    f = user_of(kernels[0])
    compiled = torch.compile(user_of(kernels[1]), backend="trident", dynamic=True)
    with trident.enable():
        for n in (20, 50, 50, 20, 100, 101, 101, 100):
            expected, _, hows = _run(f, (ones(n),))
            found, _, ours = _run(compiled, (ones(n),))
            assert_same(found, expected)
            assert len(ours) == len(hows), n
            assert str(kernels[0].best_config) == str(kernels[1].best_config)
        assert ours == ["native"]
    assert [*map(str, kernels[0].cache)] == [*map(str, kernels[1].cache)]


def test_a_choice_in_the_cache_that_changes() -> None:
    kernel = tuned_kernel()
    f = user_of(kernel)
    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        compare(compiled, f, (ones(100),))
        (key,) = kernel.cache
        kernel.cache[key] = kernel.configs[0]
        expected = f(ones(100))
        assert expected[-1] == 32
        assert_same(compiled(ones(100)), expected)


def test_a_cache_that_is_cleared() -> None:
    """Then stock tunes again."""
    kernel = tuned_kernel()
    f = user_of(kernel)
    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        compare(compiled, f, (ones(100),))
        kernel.cache.clear()
        _, _, hows = _run(compiled, (ones(100),))
        assert len(hows) == 4
        assert len(kernel.cache) == 1
        kernel.cache = {}
        assert len(_run(compiled, (ones(100),))[2]) == 4


@pytest.mark.parametrize("change", ["kwargs", "num_warps", "configs"])
def test_configurations_that_change(change: str) -> None:
    """There is one: stock reads it at each launch."""
    kernel = tuned_kernel([triton.Config({"BLOCK": 64}, num_warps=2)])
    compiled = torch.compile(user_of(kernel), backend="trident")
    stock = torch.compile(user_of(kernel), backend="eager")
    with trident.enable():
        for _ in range(3):
            compiled(ones(100))
        assert tc.launches[-1][-1] == "native"
        stock(ones(100))
        if change == "kwargs":
            kernel.configs[0].kwargs["BLOCK"] = 128
        elif change == "num_warps":
            kernel.configs[0].num_warps = 4
        else:
            kernel.configs[0] = triton.Config({"BLOCK": 128}, num_warps=2)
        expected = outcome(stock, ones(100))
        assert_same(outcome(compiled, ones(100)), expected)
        if change == "num_warps":
            assert tc.launches[-1][-1] == "python" or tc.configs[-1][0] == (128, 1, 1)


def test_tensors_that_tuning_resets() -> None:
    """Each trial adds; nothing of that may be left."""
    configs = [triton.Config({"BLOCK": b}) for b in (32, 64)]

    def make(**options: Any) -> Any:
        @triton.autotune(configs=configs, key=["n"], **options)
        @triton.jit
        def kernel(x, out, n, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            m = at < n
            v = tl.load(out + at, mask=m) + tl.load(x + at, mask=m)
            tl.store(out + at, v, mask=m)

        return kernel

    cases = [(ones(n), ones(n)) for n in (50, 50, 50, 60, 60, 50)]
    for options in ({"reset_to_zero": ["out"]}, {"restore_value": ["out"]}):
        results = []
        for compiles in (False, True):
            kernel = make(**options)

            def f(x: Any, out: Any, kernel: Any = kernel) -> Any:
                kernel[blocks(x.numel())](x, out, x.numel())
                return out

            called = torch.compile(f, backend="trident", dynamic=True) if compiles else f
            with trident.enable():
                results.append([_run(called, case) for case in cases])
        expected, found = results
        assert_same([result for result, _, _ in found], [result for result, _, _ in expected])
        assert [launches for _, launches, _ in found] == [launches for _, launches, _ in expected]
        hows = [hows[-1] for _, _, hows in found]
        assert hows[2:] == ["native", "python", "native", "native"]


def test_hooks_of_configurations() -> None:
    """Dynamo does not trace them: eager's code launches."""
    seen: list[int] = []
    config = triton.Config({"BLOCK": 64}, pre_hook=lambda given: seen.append(len(given)))
    kernel = tuned_kernel([config])
    f = user_of(kernel)
    check(f, (ones(50),), native=False)
    assert len(seen) == 6
    assert len(set(seen)) == 1


def test_a_hook_of_a_configuration_that_is_added() -> None:
    """After it was compiled, stock's launches call it."""
    kernel = tuned_kernel([triton.Config({"BLOCK": 64})])
    f = user_of(kernel)
    seen: list[Any] = []
    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        compare(compiled, f, (ones(50),))
        kernel.configs[0].pre_hook = lambda given: seen.append(len(given))
        for _ in range(3):
            compiled(ones(50))
    assert len(seen) == 3


def test_keyed_by_a_tensor() -> None:
    """Triton tunes for each tensor object, which hardly anybody wants; but stock does it, too."""
    found = []
    for backend in (None, "trident"):
        f = user_of(tuned_kernel(key=["x"]))
        called = torch.compile(f, backend=backend, dynamic=True) if backend else f
        inputs = [ones(40) for _ in range(5)]
        with trident.enable():
            found.append([len(_run(called, (x,))[2]) for x in inputs])
    assert found[1] == found[0]


def test_keyed_by_a_float_and_a_constant() -> None:
    configs = [triton.Config({"BLOCK": b}) for b in (16, 32)]

    @triton.autotune(configs=configs, key=["s", "n"])
    @triton.jit
    def kernel(x, out, s, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) * s + BLOCK, mask=at < n)

    def f(x: Any, s: float) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, s, 9)
        return out

    cases = [(ones(9), s) for s in (0.5, 0.75, -0.0, 0.0, 0.5)]
    check(f, *cases)
    assert {key[0] for key in kernel.cache} == {0.5, 0.75, 0.0}


def test_pruned_configurations() -> None:
    def prune(configs: Any, named: Any, **options: Any) -> Any:
        return [c for c in configs if c.kwargs["BLOCK"] > 32][:1]

    kernel = tuned_kernel(prune_configs_by={"early_config_prune": prune})
    check(user_of(kernel), (ones(100),), (ones(101),))


def test_heuristics() -> None:
    @triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["n"])})
    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + BLOCK, mask=at < n)

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, x.numel())
        return out

    check(f, *((ones(n),) for n in (10, 20, 50)))
    check(f, *((ones(n),) for n in (10, 20, 50)), dynamic=True)


def doubled_if_even(x, out, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    if EVEN:
        v = v * 2
    tl.store(out + at, v, mask=at < n)


def caller_of(kernel: Any) -> Any:
    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        kernel[blocks(x.numel())](x, out, x.numel())
        return out

    return f


tunes_by_size = triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"])


def test_autotuned_heuristics() -> None:
    decides = triton.heuristics({"EVEN": lambda given: given["BLOCK"] == 64})
    f = caller_of(tunes_by_size(decides(triton.jit(doubled_if_even))))
    check(f, *((ones(n),) for n in (50, 60, 100)))
    check(f, *((ones(n),) for n in (50, 60, 100)), dynamic=True)


def test_heuristics_over_an_autotuner() -> None:
    decides = triton.heuristics({"EVEN": lambda given: given["n"] % 2 == 0})
    f = caller_of(decides(tunes_by_size(triton.jit(doubled_if_even))))
    check(f, *((ones(n),) for n in (50, 61, 100)))


# ---- graphs ----


def test_kernels_between_operators() -> None:
    kernel = tuned_kernel()

    def f(x: Any, y: Any) -> Any:
        a = torch.relu(x) @ y
        out = torch.zeros_like(a)
        add_kernel[blocks(a.numel())](a, x, out, a.numel(), BLOCK=32)
        out.add_(1).t().mul_(2)
        tuned = torch.zeros(a.numel() + 1)
        kernel[blocks(a.numel())](out, tuned, a.numel())
        z = torch.cat([tuned[:-1].view_as(x), x]).sum(0)
        y.copy_(out)
        scale_kernel[(1,)](z, z, 0.5, z.numel(), BLOCK=8)
        return z, out.softmax(-1), y[1], None, 3

    check(f, (ones(8, 8), ones(8, 8) / 9))
    check(f, (ones(8, 8), ones(8, 8) / 9), (ones(6, 6), ones(6, 6) / 9), dynamic=True)


def test_versions() -> None:
    """Kernels write without autograd's knowledge, operators do not."""

    def f(x: Any, y: Any) -> Any:
        add_kernel[(1,)](x, y, x, x.numel(), BLOCK=64)
        y.mul_(2)
        return x[1:]

    check(f, (ones(40), ones(40)))


def test_training() -> None:
    """A kernel's results have no gradient, unless a Function says what it is."""

    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, y: Any) -> Any:
            return add(x, y)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return scale(grad.contiguous(), 0.5), scale(grad.contiguous(), 2.0)

    def f(x: Any, y: Any) -> Any:
        return add(x, y) * y

    def g(x: Any, y: Any) -> Any:
        return Added.apply(x * 2, y) * y

    def trained(function: Any) -> Any:
        def call(x: Any, y: Any) -> Any:
            result = function(x, y)
            result.sum().backward()
            return result, x.grad, y.grad

        return call

    for function in (f, g):
        case = (ones(9).requires_grad_(), (ones(9) * 3).requires_grad_())
        compiled = torch.compile(function, backend="trident")
        with trident.enable():
            expected = _run(trained(function), case)
            for _ in range(4):
                found = _run(trained(compiled), case)
                assert_same(found[0], expected[0])
                assert found[1] == expected[1]
        torch._dynamo.reset()


_add_op: list[Any] = []


def test_operators_of_kernels() -> None:
    """What torch.library.triton_op makes runs as any operator."""
    if not _add_op:

        @torch.library.triton_op("trident_triton::add", mutates_args={})
        def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            n = x.numel()
            torch.library.wrap_triton(add_kernel)[blocks(n)](x, y, out, n, BLOCK=64)
            return out

        _add_op.append(added)
    op = _add_op[0]

    def f(x: Any, y: Any) -> Any:
        return op(torch.relu(x), y) + 1

    check(f, (ones(40), ones(40)), (ones(100), ones(100)), native=False)


def test_graph_breaks() -> None:
    def f(x: Any, y: Any) -> Any:
        z = add(x, y)
        torch._dynamo.graph_break()
        return add(z, y)

    check(f, (ones(40), ones(40)), (ones(50), ones(50)))


def test_many_variants() -> None:
    """More than are kept: those that were used last stay."""
    kernel = tuned_kernel([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})])
    f = user_of(kernel)
    compiled = torch.compile(f, backend="trident", dynamic=True)
    with trident.enable():
        for n in range(40, 110):
            compiled(ones(n))
        compare(compiled, f, (ones(109),), learned=0)
        compare(compiled, f, (ones(40),), learned=1)


def test_leaves() -> None:
    """A kernel writes what requires a gradient, which no operator could."""

    def f(x: Any, y: Any) -> Any:
        add_kernel[(1,)](x, y, x, x.numel(), BLOCK=64)
        return y * 2

    check(f, (ones(40).requires_grad_(), ones(40)))
    with torch.no_grad():
        check(f, (ones(40).requires_grad_(), ones(40).requires_grad_()))


_kept = torch.zeros(40)


def test_tensors_of_the_module() -> None:
    """A global, and a parameter and a buffer."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(40))
            self.register_buffer("total", torch.zeros(40))

        def forward(self, x: Any) -> Any:
            add_kernel[(1,)](self.total, x, self.total, x.numel(), BLOCK=64)
            add_kernel[(1,)](_kept, x, _kept, x.numel(), BLOCK=64)
            return add(x, self.weight.detach()), self.total.clone(), _kept.clone()

    model = Model()

    def f(x: Any) -> Any:
        model.total.zero_()
        _kept.zero_()
        return model(x)

    check(f, (ones(40),), (ones(40).flip(0),))


def test_scalars() -> None:
    """Tensors without dimensions, and an operator's result that is a number."""

    def f(x: Any, y: Any) -> Any:
        total = x.sum()
        add_kernel[(1,)](total, y, total, 1, BLOCK=1)
        return total, total + 1

    check(f, (ones(40), torch.tensor(3.0)))


# ---- what changes after it was compiled ----


def test_launch_hooks() -> None:
    """They see every launch, once there are any; and are no longer called once they are removed."""
    compiled = torch.compile(add, backend="trident")
    seen: list[str] = []

    def enter(_: Any) -> None:
        seen.append("enter")

    def leave(_: Any) -> None:
        seen.append("leave")

    with trident.enable():
        compare(compiled, add, (ones(40), ones(40)))
        triton.knobs.runtime.launch_enter_hook.add(enter)
        triton.knobs.runtime.launch_exit_hook.add(leave)
        try:
            for n in range(1, 4):
                assert_same(compiled(ones(40), ones(40)), ones(40) * 2)
                assert seen == ["enter", "leave"] * n
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(enter)
            triton.knobs.runtime.launch_exit_hook.remove(leave)
        seen.clear()
        compare(compiled, add, (ones(40), ones(40)), learned=0)
    assert not seen


def test_launch_hooks_that_are_there() -> None:
    seen: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        check(add, (ones(40), ones(40)), native=False)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 6


def test_launch_hooks_that_are_replaced(monkeypatch: Any) -> None:
    compiled = torch.compile(add, backend="trident")
    seen: list[Any] = []
    with trident.enable():
        compare(compiled, add, (ones(40), ones(40)))
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", seen.append)
        for _ in range(3):
            compiled(ones(40), ones(40))
    assert len(seen) == 3


def fresh_add() -> tuple[Any, Any]:
    """A kernel of one's own, which may be changed, and a function that calls it."""

    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, x.numel(), BLOCK=16)
        return out

    return kernel, f


@pytest.mark.parametrize("kind", ["launch", "kernel"])
def test_hooks_that_are_removed(kind: str) -> None:
    """What was compiled while they were there becomes native."""
    kernel, f = fresh_add()
    compiled = torch.compile(f, backend="trident")

    def hook(*_: Any, **__: Any) -> None: ...

    with trident.enable():
        if kind == "launch":
            triton.knobs.runtime.launch_enter_hook.add(hook)
        else:
            kernel.add_pre_run_hook(hook)
        try:
            for _ in range(3):
                compiled(ones(9))
        finally:
            if kind == "launch":
                triton.knobs.runtime.launch_enter_hook.remove(hook)
            else:
                kernel.pre_run_hooks.clear()
        compare(compiled, f, (ones(9),))


def test_hooks_before_kernels() -> None:
    kernel, f = fresh_add()
    compiled = torch.compile(f, backend="trident")
    seen: list[int] = []
    with trident.enable():
        compare(compiled, f, (ones(9),))
        kernel.add_pre_run_hook(lambda *given, **options: seen.append(len(given)))
        for n in range(1, 4):
            assert_same(compiled(ones(9)), ones(9) + 1)
            assert len(seen) == n
        kernel.pre_run_hooks.clear()
        compare(compiled, f, (ones(9),), learned=0)


def test_a_kernel_whose_run_is_replaced() -> None:
    kernel, f = fresh_add()
    compiled = torch.compile(f, backend="trident")
    seen: list[Any] = []
    with trident.enable():
        compare(compiled, f, (ones(9),))
        run = kernel.run

        def replaced(*given: Any, **options: Any) -> Any:
            seen.append(options["grid"])
            return run(*given, **options)

        kernel.run = replaced
        for _ in range(3):
            assert_same(compiled(ones(9)), ones(9) + 1)
        del kernel.run
    assert len(seen) == 3


def test_a_class_whose_run_is_replaced(monkeypatch: Any) -> None:
    """As a profiler may do it, for all kernels."""
    kernel, f = fresh_add()
    compiled = torch.compile(f, backend="trident")
    seen: list[Any] = []
    with trident.enable():
        compare(compiled, f, (ones(9),))
        run = type(kernel).run

        def replaced(*given: Any, **options: Any) -> Any:
            seen.append(options["grid"])
            return run(*given, **options)

        monkeypatch.setattr(type(kernel), "run", replaced)
        for _ in range(3):
            assert_same(compiled(ones(9)), ones(9) + 1)
    assert len(seen) == 3


def test_hooks_inside_hooks() -> None:
    """A hook calls the compiled function."""
    _, f = fresh_add()
    compiled = torch.compile(f, backend="trident")
    seen: list[Any] = []

    def hook(_: Any) -> None:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
        seen.append(compiled(ones(9)))

    with trident.enable():
        compare(compiled, f, (ones(9),))
        triton.knobs.runtime.launch_enter_hook.add(hook)
        assert_same(compiled(ones(9)), ones(9) + 1)
        compare(compiled, f, (ones(9),), learned=0)
    assert_same(seen, [ones(9) + 1])


def test_debug() -> None:
    """Another option of Triton's, or of the kernel: stock compiles again."""
    kernel, f = fresh_add()
    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        compare(compiled, f, (ones(9),))
        caches = kernel.device_caches[0][0]
        n = len(caches)
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.debug = True
            assert_same(compiled(ones(9)), ones(9) + 1)
            assert len(caches) == n + 1
        compare(compiled, f, (ones(9),), learned=0)
        kernel.debug = True
        assert _run(compiled, (ones(9),))[2] == ["python"]
        kernel.debug = None
        compare(compiled, f, (ones(9),), learned=0)


GLOBAL = tl.constexpr(3)


@triton.jit
def global_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + GLOBAL, mask=at < n)


def test_a_global_that_changes(monkeypatch: Any) -> None:
    """Triton raises; what was compiled before is used again once it is as before."""

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        global_kernel[(1,)](x, out, x.numel(), BLOCK=16)
        return out

    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        compare(compiled, f, (ones(9),))
        with monkeypatch.context() as changed:
            changed.setitem(globals(), "GLOBAL", tl.constexpr(4))
            expected = outcome(f, ones(9))
            assert expected[0] is RuntimeError
            assert outcome(compiled, ones(9)) == expected
            assert outcome(compiled, ones(9)) == expected
        compare(compiled, f, (ones(9),), learned=0)


def test_a_global_that_changes_early(monkeypatch: Any) -> None:
    """Before there was any native launch; and one that has not been compiled by eager's code."""

    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) - GLOBAL, mask=at < n)

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, x.numel(), BLOCK=16)
        return out

    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        for n in range(4):
            assert_same(compiled(ones(9)), ones(9) - 3)
            with monkeypatch.context() as changed:
                changed.setitem(globals(), "GLOBAL", tl.constexpr(4))
                expected = outcome(f, ones(9))
                assert expected[0] is RuntimeError
                assert outcome(compiled, ones(9)) == expected, n


def test_caches_that_are_cleared() -> None:
    """Stock compiles again."""
    kernel, f = fresh_add()
    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        compare(compiled, f, (ones(9),))
        kernel.device_caches[0][0].clear()
        assert _run(compiled, (ones(9),))[2] == ["python"]
        assert len(kernel.device_caches[0][0]) == 1
        kernel.device_caches.clear()
        assert _run(compiled, (ones(9),))[2] == ["python"]
        assert len(kernel.device_caches) == 1
        assert_same(compiled(ones(9)), ones(9) + 1)


def test_caches_that_are_cleared_before_any_eager_launch() -> None:
    kernel, f = fresh_add()
    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        for _ in range(4):
            compiled(ones(9))
        assert tc.launches[-1][-1] == "native"
        kernel.device_caches.clear()
        assert _run(compiled, (ones(9),))[2] == ["python"]
        assert len(kernel.device_caches) == 1


# ---- errors ----


@pytest.mark.parametrize("n_errors", [1, 2])
def test_errors_of_the_driver(n_errors: int) -> None:
    """What it refuses is left to Triton, which launches or says why not."""

    def f(x: Any, y: Any) -> Any:
        return add(add(x, y), y)

    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        compare(compiled, f, (ones(40), ones(40)))
        tc.errors.extend([1] * n_errors)
        found, _, hows = _run(compiled, (ones(40), ones(40)))
        assert_same(found, _run(f, (ones(40), ones(40)))[0])
        assert hows == ["python"] * n_errors + ["native"] * (2 - n_errors)
        assert not tc.errors
        compare(compiled, f, (ones(40), ones(40)), learned=0)


def test_errors_of_the_compiler() -> None:
    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.dot(at, n), mask=at < n)

    def f(x: Any) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, x.numel(), BLOCK=16)
        return out

    stock = torch.compile(f, backend="eager")
    expected = [outcome(stock, ones(9)) for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        assert [outcome(compiled, ones(9)) for _ in range(3)] == expected
    assert issubclass(expected[0][0], Exception)


def test_an_error_of_a_later_variant() -> None:
    """The first kernel has been launched, and tuned, when the second does not compile."""
    kernel = tuned_kernel()

    @triton.jit
    def fails(x, out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        if x.dtype.element_ty == tl.float32:
            tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)
        else:
            tl.static_assert(False, "of no other type")

    def f(x: Any) -> Any:
        out = torch.zeros_like(x)
        kernel[blocks(8)](x, out, 8)
        fails[(1,)](x, out, x.numel(), BLOCK=16)
        return out

    compiled = torch.compile(f, backend="trident")
    stock = torch.compile(f, backend="eager")
    with trident.enable():
        compare(compiled, f, (ones(9),))
        x = ones(9, dtype=torch.float64)
        expected = outcome(stock, x)
        assert issubclass(expected[0], Exception)
        for _ in range(3):
            kernel.best_config = None
            assert outcome(compiled, x) == expected
            assert kernel.best_config is not None
        compare(compiled, f, (ones(9),), learned=0)


@pytest.mark.parametrize("kind", ["argument", "grid"])
def test_integers_that_overflow(kind: str) -> None:
    """Python's integers do not, but Triton takes none of more than 64 bits."""

    def f(x: Any, a: int) -> Any:
        out = torch.zeros_like(x)
        b = a * a
        plus_kernel[(b if kind == "grid" else 1,)](x, out, b if kind != "grid" else 1, 9, BLOCK=16)
        return out

    x = ones(9, dtype=torch.int64)
    stock = torch.compile(f, backend="eager", dynamic=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tc._Function, "run", lambda *_: None)
        expected = [outcome(stock, x, a) for a in (3, 3, 2**32, 2**40)]
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="trident", dynamic=True)
        with trident.enable():
            found = [outcome(compiled, x, a) for a in (3, 3, 2**32, 2**40)]
    assert_same(found, expected)


def test_wrong_arguments() -> None:
    def f(x: Any) -> Any:
        add_kernel[(1,)](x, x, out=x, BLOCK=16)
        return x

    def g(x: Any) -> Any:
        add_kernel[(1,)](x, x, x, 5, BLOCK=16, unknown=3)
        return x

    for function in (f, g):
        torch._dynamo.reset()
        stock = torch.compile(function, backend="eager")
        expected = [outcome(stock, ones(9)) for _ in range(3)]
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="trident")
        with trident.enable():
            found = [outcome(compiled, ones(9)) for _ in range(3)]
        assert [e[0] for e in found] == [e[0] for e in expected]
        assert found == expected


@triton.jit
def describing_kernel(x, out, n, BLOCK: tl.constexpr):
    """It needs scratch memory, for the descriptors that it makes."""
    source = tl.make_tensor_descriptor(x, [n, 16], [16, 1], [BLOCK, 16])
    target = tl.make_tensor_descriptor(out, [n, 16], [16, 1], [BLOCK, 16])
    row = tl.program_id(0) * BLOCK
    target.store([row, 0], source.load([row, 0]) + 1)


def described(x: Any) -> Any:
    out = torch.empty_like(x)
    describing_kernel[(triton.cdiv(x.size(0), 16),)](x, out, x.size(0), BLOCK=16)
    return out


class Bytes:
    """What an allocator may return: anything with an address."""

    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.int8)

    def data_ptr(self) -> int:
        return self.memory.data_ptr()


def _tensor(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8)


@pytest.mark.parametrize("make", [_tensor, Bytes, lambda size: None])
def test_scratch_memory(make: Any) -> None:
    """It is asked for at each launch as Triton does it: bytes for all blocks, alignment, stream;
    and is there until the launch is done."""
    from triton.runtime import _allocation

    asked: list[tuple[int, int, Any]] = []
    alive: list[weakref.ref[Any]] = []
    given: list[int] = []

    def allocate(size: int, align: int, stream: Any) -> Any:
        asked.append((size, align, stream))
        made = make(size)
        given.append(0 if made is None else made.data_ptr())
        if made is not None:
            alive.append(weakref.ref(made))
        return made

    before = _allocation._allocator.get()
    triton.set_allocator(allocate)
    try:
        check(described, (ones(16, 16),), (ones(48, 16),))
        torch._dynamo.reset()
        compiled = torch.compile(described, backend="trident")
        for x in (ones(16, 16), ones(48, 16)):
            asked.clear()
            described(x)
            expected = asked[:]
            assert len(expected) == 1
            with trident.enable():
                for _ in range(4):
                    asked.clear()
                    compiled(x)
                    assert asked == expected
        assert tc.scratch == given
    finally:
        triton.set_allocator(before)
    assert not any(reference() for reference in alive)


def test_allocators_that_fail() -> None:
    """Without an allocator Triton says that one is needed, each time; and the user's may raise."""
    from triton.runtime import _allocation

    def memory(size: int, align: int, stream: Any) -> Any:
        return _tensor(size)

    def full(size: int, align: int, stream: Any) -> Any:
        raise MemoryError("full")

    def wrong(size: int, align: int, stream: Any) -> Any:
        return "no memory"

    before = _allocation._allocator.get()
    x = ones(16, 16)
    compiled = torch.compile(described, backend="trident")
    try:
        triton.set_allocator(memory)
        with trident.enable():
            for _ in range(4):
                assert_same(compiled(x), described(x))
            for allocator in (full, before, wrong):
                triton.set_allocator(allocator)
                for _ in range(3):
                    assert outcome(compiled, x) == outcome(described, x)
            triton.set_allocator(memory)
            assert_same(compiled(x), described(x))
    finally:
        triton.set_allocator(before)


# ---- memory and threads ----


def test_no_memory_is_left(monkeypatch: Any) -> None:
    """Of 10,000 launches; and of those that go through Triton."""
    monkeypatch.setattr(tc._Function, "run", lambda *_: None)
    kernel = tuned_kernel()

    def f(x: Any, a: int, s: float) -> Any:
        n = x.numel() - 1
        out = torch.zeros_like(x)
        kernel[blocks(n)](x, out, n)
        plus_kernel[(1,)](x, out, a, n, BLOCK=16)
        scale_kernel[(1,)](x, out, s, n, BLOCK=16)
        return out

    monkeypatch.setattr(kernel, "cache", {})
    compiled = torch.compile(f, backend="trident", dynamic=True)
    kernel.cache[99, "torch.float32", "torch.float32"] = kernel.configs[1]
    x = ones(100)

    def call() -> None:
        compiled(x, 3, 0.5)
        compiled(x, 2**40, 0.25)
        n_native.append(len(tc.configs))
        del n_native[:-1]
        tc.configs.clear()

    n_native: list[int] = []
    with trident.enable():
        assert grows(call, 5000) is None
    assert n_native == [6]


def test_no_memory_is_left_by_launches_through_triton(monkeypatch: Any) -> None:
    """Which there are forever where Trident knows no variant."""
    monkeypatch.setattr(tc._Function, "run", lambda *_: None)
    kernel = annotated("float32")

    def f(x: Any, a: int) -> Any:
        kernel[(1,)](x, x, a, 9)
        return x

    compiled = torch.compile(f, backend="trident", dynamic=True)
    x = ones(9)
    with trident.enable():
        assert grows(lambda: compiled(x, 3), 1000) is None


def test_no_memory_is_left_by_errors_of_the_driver(monkeypatch: Any) -> None:
    monkeypatch.setattr(tc._Function, "run", lambda *_: None)
    compiled = torch.compile(add, backend="trident")
    x = ones(40)

    def call() -> None:
        tc.errors.append(1)
        compiled(x, x)
        tc.configs.clear()

    with trident.enable():
        for _ in range(3):
            compiled(x, x)
        assert grows(call, 1000) is None


def test_threads() -> None:
    """Two at the same time, of several variants."""
    kernel = tuned_kernel()

    def f(x: Any, a: int) -> Any:
        n = x.numel() - 1
        out = torch.zeros_like(x)
        kernel[blocks(n)](x, out, n)
        plus_kernel[(1,)](x, out, a, 9, BLOCK=16)
        return out + x

    compiled = torch.compile(f, backend="trident", dynamic=True)
    cases = [(ones(n), a) for n in (40, 50, 100) for a in (3, 16, 2**31 + 1)]
    expected = [f(*case) for case in cases]
    failures: list[Any] = []
    with trident.enable():
        for case in cases * 3:
            compiled(*case)

        def work(order: int) -> None:
            try:
                for _ in range(10):
                    for case, result in [*zip(cases, expected, strict=True)][::order]:
                        assert_same(compiled(*case), result)
            except BaseException as error:
                failures.append(error)

        tc.launches.clear()
        threads = [threading.Thread(target=work, args=(order,)) for order in (1, -1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert {how for *_, how in tc.launches} == {"native"}


def test_threads_that_learn() -> None:
    """New variants are added by both."""
    x = ones(9, dtype=torch.int64)
    compiled = torch.compile(plus, backend="trident", dynamic=True)
    values = [17, 16, 2**40, 2**40 + 1, -3, -32]
    expected = [plus(x, value) for value in values]
    failures: list[Any] = []
    barrier = threading.Barrier(2)
    with trident.enable():
        for _ in range(3):
            compiled(x, 5)

        def work() -> None:
            try:
                barrier.wait()
                for _ in range(20):
                    for value, result in zip(values, expected, strict=True):
                        assert_same(compiled(x, value), result)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


# What a review found


def test_the_choice_of_another_thread(monkeypatch: Any) -> None:
    """While Triton launches here, another thread launches with another configuration."""
    kernel = tuned_kernel()
    compiled = torch.compile(user_of(kernel), backend="trident", dynamic=True)
    with trident.enable():
        for _ in range(3):
            compiled(ones(100))
        compiled(ones(20))
        for key in list(kernel.cache):
            kernel.cache[40, *key[1:]] = kernel.configs[0]
        compiled(ones(100))
        real, busy = tc._Function.run, []

        def run(self: Any, grid: Any, packed: Any, how: str) -> None:
            real(self, grid, packed, how)
            if how == "python" and not busy:
                busy.append(1)
                thread = threading.Thread(target=lambda: compiled(ones(100)))
                thread.start()
                thread.join()

        monkeypatch.setattr(tc._Function, "run", run)
        first = compiled(ones(41))
        assert torch.equal(compiled(ones(41)), first)


@pytest.mark.parametrize("change", ["kwargs", "configs", "keys"])
def test_configurations_that_grow(change: str) -> None:
    @triton.autotune([triton.Config({"BLOCK": 32})], key=["n"])
    @triton.jit
    def kernel(x, out, n, m, BLOCK: tl.constexpr, ADD: tl.constexpr = 1):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + ADD, mask=at < n)

    if change == "keys":
        kernel.configs.append(triton.Config({"BLOCK": 64}))

    def f(x: Any, m: int) -> Any:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, x.numel(), m)
        return out

    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        for _ in range(4):
            compiled(ones(10), 3)
        n_tuned = len(kernel.cache)
        if change == "kwargs":
            kernel.configs[0].kwargs["ADD"] = 5
        elif change == "configs":
            kernel.configs.append(triton.Config({"BLOCK": 16}))
        else:
            kernel.keys.append("m")
        found = compiled(ones(10), 3)
    assert len(kernel.cache) == n_tuned + (change != "kwargs")
    assert torch.equal(found, ones(10) + (5 if change == "kwargs" else 1))


def test_a_driver_that_is_replaced(monkeypatch: Any) -> None:
    """Stock asks it for the stream."""
    from triton.runtime import driver

    _, f = fresh_add()
    compiled, asked = torch.compile(f, backend="trident"), []

    class Other(tc.CpuDriver):
        def get_current_stream(self, device: int = 0) -> int:
            asked.append(device)
            return 0

    with trident.enable():
        for _ in range(4):
            compiled(ones(10))
        before = driver.active
        driver.set_active(Other())
        try:
            compiled(ones(10))
        finally:
            driver.set_active(before)
    assert asked == [0]


def test_an_item_method_that_a_class_gets(monkeypatch: Any) -> None:
    """``kernel[grid]`` is the base class's, until somebody gives the class one of its own."""
    kernel, f = fresh_add()
    compiled, grids = torch.compile(f, backend="trident"), []
    with trident.enable():
        for _ in range(4):
            compiled(ones(10))
        inherited = type(kernel).__getitem__

        def item(self: Any, grid: Any) -> Any:
            grids.append(grid)
            return inherited(self, grid)

        monkeypatch.setattr(type(kernel), "__getitem__", item, raising=False)
        compiled(ones(10))
    assert len(grids) == 1


def test_a_choice_that_an_operator_sees() -> None:
    """An operator of Python's after a launch sees what stock's launch leaves behind."""
    kernel, seen = tuned_kernel(), []

    @torch.library.custom_op("trident_tests::looks_at_the_choice", mutates_args=())
    def looks(x: torch.Tensor) -> torch.Tensor:
        seen.append(kernel.best_config.kwargs["BLOCK"])
        return x + 1

    looks.register_fake(lambda x: torch.empty_like(x))

    def f(x: Any) -> Any:
        n = x.numel() - 1
        out = torch.zeros_like(x)
        kernel[blocks(n)](x, out, n)
        return looks(out)

    compiled = torch.compile(f, backend="trident")
    with trident.enable():
        for _ in range(4):
            kernel.best_config = triton.Config({"BLOCK": 7})
            compiled(ones(10))
    assert 7 not in seen
    assert len(set(seen)) == 1


def test_descriptors_are_made_by_stock(monkeypatch: Any) -> None:
    """With what its own launch is called with: nothing is added to torch's tables of kernels.
    (Dynamo takes host-side descriptors only where there is CUDA.)"""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    from trident.capture.triton import Row, UserLaunch, stock_of

    calls = []
    monkeypatch.setattr(wrap, "triton_kernel_wrapper_mutation", lambda **given: calls.append(given))
    metadata = {"x": ("stable", ([16],))}
    node = {"kernel_idx": 4, "constant_args_idx": 5, "tma_descriptor_metadata": metadata, "grid": 1}
    launch = UserLaunch(
        None, ("x",), ("tensor",), {"n": 3}, ((Row(1), 2, 1),), stock_of(node, {"m": 2})
    )
    x = ones(3)
    assert launch([x], [0, 7]) is None
    kwargs = {"m": 2, "x": x}
    assert calls == [{**node, "grid": [(7, 2, 1)], "kwargs": kwargs}]
