"""Host programs with dynamic shapes: sizes and ints are computed natively, as in eager.

What is compared: results and inputs with eager, bit for bit; results, compilations and guards with
stock's ``backend="eager"``; and that the second round of calls was native.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.decorators import mark_unbacked
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import trident
from tests.conftest import compilations, outcome, reset_compilations
from tests.host_checks import hits
from tests.test_dispatch_lifetime import assert_flat
from tests.test_equality import assert_same
from tests.test_host_programs import native_programs
from trident.capture import graph

Function = Callable[..., Any]
Call = Callable[[], Sequence[Any]]


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def tensors(*shapes: tuple[int, ...]) -> list[Call]:
    """A call with one tensor of each shape."""
    return [lambda shape=shape: (tensor(*shape),) for shape in shapes]


def ints(*numbers: Any) -> list[Call]:
    """A call with a tensor and each number."""
    return [lambda number=number: (tensor(4, 6), number) for number in numbers]


@contextlib.contextmanager
def settings(**values: Any) -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64, **values):
        yield


def rounds(f: Function, calls: Sequence[Call]) -> list[Any]:
    """Results and inputs afterwards of the first and of the second round of `calls`."""
    found = []
    for _ in range(2):
        for call in calls:
            arguments = call()
            torch.manual_seed(0)
            found.append((outcome(f, *arguments), [*arguments]))
    return found


def tree_of_guards(f: Function) -> list[str]:
    """Dynamo's guards of each entry (the last hit is first there), without addresses and numbers of
    globals."""
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(f.__code__)
    numbers = r"\d{9,}|0x[0-9a-f]+|___\d+"
    return sorted(re.sub(numbers, "#", str(entry.guard_manager)) for entry in entries)


def check(
    f: Function,
    calls: Sequence[Call],
    *,
    dynamic: bool | None = None,
    native: bool = True,
    stock: Sequence[int] = (),
    as_eager: bool = True,
) -> list[Any]:
    """`f` does the same in eager, in stock and in Trident, where the second round is native but for
    the calls at the positions `stock`; returns what it does."""
    with settings():
        expected = rounds(f, calls)
        torch._dynamo.reset()
        reset_compilations()
        by_stock = rounds(torch.compile(f, backend="eager", dynamic=dynamic), calls)
        compiled, guards = compilations(), tree_of_guards(f)
        torch._dynamo.reset()
        reset_compilations()
        with trident.enable():
            g = torch.compile(f, backend="trident", dynamic=dynamic)
            found = rounds(g, calls)
            assert compilations() == compiled
            assert tree_of_guards(f) == guards
            assert_same(found, by_stock)
            if as_eager:
                assert_same(found, expected)
            assert native_programs(f.__name__), trident.explain(g)
            for position, call in enumerate(calls):
                before = sum(hits(f.__name__))
                outcome(g, *call())
                served = sum(hits(f.__name__)) - before
                assert served == (native and position not in stock), (
                    position,
                    str(trident.explain(g)),
                )
    return found


# ---- sizes ----

SIZES: dict[str, Function] = {}
SHAPES = tensors((4, 6), (5, 6), (7, 3), (64, 8), (8, 2))
SMALL_SHAPES = tensors((4, 6), (5, 6), (1, 6), (0, 6), (7, 3), (64, 8))


def sized(f: Function) -> Function:
    SIZES[f.__name__] = f
    return f


@sized
def sizes_as_results(x: Any) -> Any:
    return {"a": x + 1, "n": x.size(0), "m": [x.size(1) + 1, (x.shape,)], "k": 3}, x.stride()


@sized
def reshaped(x: Any) -> Any:
    return x.reshape(-1), x.view(x.size(0) * x.size(1)), x.view(x.size(1), -1), x.numel()


@sized
def made(x: Any) -> Any:
    n, m = x.shape
    rows = torch.arange(n), torch.arange(1, n + 1, 2), torch.full((m,), n), torch.ones(x.shape)
    return *rows, x.new_zeros(m + 1, 2), torch.eye(n), torch.linspace(0, 1, n), torch.zeros(n, m)


@sized
def made_by_chance(x: Any) -> Any:
    n, m = x.shape
    return torch.randn(n, 2), torch.rand_like(x), torch.randint(0, m, (n,)), F.dropout(x, 0.5)


@sized
def scalars(x: Any) -> Any:
    n, m = x.shape
    y = x * n, x + n, x - m, x / x.numel(), n - x, torch.add(x, x, alpha=n), n**x
    return *y, torch.clamp(x, min=-n, max=m), torch.rsub(x, n), F.leaky_relu(x, n), x.sum() // n


@sized
def scalars_and_dtypes(x: Any) -> Any:
    n, m = x.shape
    i = x.to(torch.int32)
    y = i * n, i / m, i % m, i + n, i << m, i == n, x.where(x > 0, n), x.bool() * n, x.half() * n
    return *y, torch.where(x > 0, n, m), torch.where(x > 0, n, 1.5), i.fill_(n), i


@sized
def scalars_for_several(x: Any) -> Any:
    n, m = x.shape
    y = torch.lerp(x, x, n), F.threshold(x, n, m), torch.sub(x, x, alpha=-n)
    return *y, F.elu(x, alpha=n), torch.full_like(x, n), x.masked_fill(x > 0, n), x.norm(p=n)


@sized
def divisions_of_negatives(x: Any) -> Any:
    n, m = x.shape
    y = torch.full((2,), -n // 3), torch.full((2,), -n % 3), x * (-n // m), x[: -(-n // 4)]
    return *y, (2 - n) // m, (2 - n) % m, -(-n // 4), (n + 3) // 4 * 4


@sized
def smaller_and_larger(x: Any) -> Any:
    n, m = x.shape
    return x * max(n, 3), x * min(n, m, 4), max(n, m), n**2 + n**3, n * (n + 1) // 2


@sized
def cut(x: Any) -> Any:
    n = x.size(0) // 2
    y = x[:n], x[n:], x[-1:], x[x.size(0) - n :], x[::2], x.narrow(0, 0, n), x.unbind(1)
    return (
        *y,
        x.chunk(2, 0),
        x.split(1, 0)[0],
        torch.tensor_split(x, 2),
        x.view(-1)[n:],
        x[1:].sum(),
    )


@sized
def strided(x: Any) -> Any:
    n, m = x.shape
    y = x.as_strided((m, n), (1, m)), x.t().reshape(-1), x.expand(2, *x.shape)
    return *y, x.t().contiguous(), x[None].expand(3, -1, -1).reshape(-1, m), x.t().stride(), x + 1


@sized
def padded(x: Any) -> Any:
    n = x.size(0)
    y = F.pad(x, (1, 2)), F.pad(x, (0, n % 3)), F.pad(x, (0, 0, 0, -n % 4)), x.roll(n - 1, 0)
    return *y, torch.cat([x, x]), torch.stack([x, x], 1), x.repeat(2, n % 3 + 1), x.flip(0)


@sized
def convolved(x: Any) -> Any:
    n, m = x.shape
    y = F.conv1d(x.view(n, 1, -1), torch.ones(4, 1, 2)), F.max_pool1d(x, 2)
    y += F.interpolate(x[None], scale_factor=2.0), F.interpolate(x[None], size=n + 1)
    return *y, F.conv2d(x.expand(1, 2, n, m), torch.ones(2, 2, 2, 2), padding=1)


@sized
def normalized(x: Any) -> Any:
    n, m = x.shape
    y = F.group_norm(x.view(n, 1, -1), 1), F.layer_norm(x, (m,)), F.softmax(x, 0)
    return *y, F.normalize(x), F.instance_norm(x.view(1, n, -1))


@sized
def attended(x: Any) -> Any:
    q = x.view(1, 1, *x.shape)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True), torch.bmm(x[None], x.t()[None])
    return *y, torch.einsum("ij,kj->ik", x, x), torch.tril(torch.ones(x.size(0), x.size(0)))


@sized
def indexed(x: Any) -> Any:
    i = torch.arange(x.size(0) - 1, -1, -1)
    y = x[i], x[i, 0], x[:, None][i, :, i % x.size(1)], x.gather(0, i[:, None])
    return *y, torch.zeros(x.size(0)).index_put((i,), x[:, 0], accumulate=True)


@sized
def changed_in_place(x: Any) -> Any:
    n, m = x.shape
    y = x.clone()
    y[0] = n
    y[:, 1] += m
    y.view(-1)[y.numel() // 2 :].mul_(n)
    x.mul_(n)
    return y, y.sum()


@pytest.mark.parametrize("name", SIZES)
def test_sizes(fresh: None, name: str) -> None:
    check(SIZES[name], SHAPES, dynamic=True)


@pytest.mark.parametrize(
    "name",
    [
        *("sizes_as_results", "reshaped", "scalars", "divisions_of_negatives", "strided"),
        "changed_in_place",
    ],
)
def test_automatic_sizes(fresh: None, name: str) -> None:
    """Dynamic once a size has changed; 0 and 1 have specializations of their own."""
    check(SIZES[name], SHAPES if name == "changed_in_place" else SMALL_SHAPES)


def marked(mark: Function, *, transposed: bool = False) -> list[Call]:
    def call(n: int) -> list[Any]:
        x = tensor(6, n).t() if transposed else tensor(n, 6)
        mark(x, 0)
        return [x]

    return [lambda n=n: call(n) for n in (4, 5, 2, 1, 0, 9)]


def of_marked(x: Any) -> Any:
    return x * x.size(0), x.sum(0), x.shape, torch.zeros(x.size(0) * 2), x.expand(2, *x.shape)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "mark", [torch._dynamo.maybe_mark_dynamic, torch._dynamo.mark_static, mark_unbacked]
)
def test_marked_sizes(fresh: None, mark: Any, transposed: bool) -> None:
    # An unbacked size has assertions in the graph, which are not native.
    check(of_marked, marked(mark, transposed=transposed), native=mark is not mark_unbacked)


def test_marked_dynamic(fresh: None) -> None:
    """A size that is marked so and has the value 0 or 1 is an error: not tried here."""
    check(of_marked, [marked(torch._dynamo.mark_dynamic)[i] for i in (0, 1, 2, 5)])


def two_tensors(x: Any, y: Any) -> Any:
    n, m, k = x.size(0), x.size(1), y.size(1)
    return x @ y, n + k, torch.cat([x.view(-1), y.view(-1)]), n * m * k, torch.zeros(n, k) * m


@pytest.mark.parametrize("dynamic", [True, None])
def test_several_symbols_and_equal_ones(fresh: None, dynamic: Any) -> None:
    """Sizes that are equal at first have one symbol (duck shaping), until they differ."""
    shapes = ((4, 6, 4), (5, 6, 5), (5, 7, 5), (5, 7, 6), (7, 7, 7), (3, 2, 9), (6, 6, 5))
    calls = [lambda s=s: (tensor(s[0], s[1]), tensor(s[1], s[2])) for s in shapes]
    check(two_tensors, calls, dynamic=dynamic)


def of_any_strides(x: Any) -> Any:
    return x + 1, x.stride(0) * 2, x.stride(), x * x.stride(1), x.reshape(-1)


def view_kinds() -> list[Call]:
    kinds: list[Callable[[int, int], Any]] = [
        lambda a, b: tensor(a, b).t(),
        lambda a, b: tensor(2 * a, 2 * b)[::2, ::2],
        lambda a, b: tensor(a + 1, b)[1:],
        lambda a, b: tensor(1, b).expand(a, b),
        lambda a, b: tensor(3, a * b)[1].view(a, b),
    ]
    sizes = ((4, 6), (6, 4), (5, 7), (9, 3))
    return [lambda k=k, s=s: (k(*s),) for s in sizes for k in kinds]


def test_strides_and_offsets(fresh: None) -> None:
    check(of_any_strides, view_kinds(), dynamic=True)


@dataclasses.dataclass
class Holder:
    x: torch.Tensor


def of_others(a: Any, holder: Any, list_: Any) -> Any:
    y = a * holder.x.size(0) + list_[0].size(1)
    return y, list_[0].stride(0), holder.x.shape, holder.x.storage_offset()


@pytest.mark.parametrize("dynamic", [True, None])
def test_tensors_that_are_no_inputs(fresh: None, dynamic: Any) -> None:
    """Only their sizes are used: the graph has ints as inputs, which the plan fetches."""

    def call(n: int, m: int) -> list[Any]:
        return [tensor(3), Holder(tensor(n + 1, m)[1:]), [tensor(m, n)]]

    sizes = ((4, 6), (5, 6), (5, 7), (8, 9), (3, 2), (7, 7))
    check(of_others, [lambda s=s: call(*s) for s in sizes], dynamic=dynamic)


# ---- ints ----

INTS: dict[str, Function] = {}
MINUS_HALF = -(2**62)  # the smallest number that a c10::SymInt holds as it is
HUGE = (2**31, 2**62 - 1, 2**62, 2**62 + 1, 2**63 - 1)
HUGE_NEGATIVE = (-(2**31), MINUS_HALF, MINUS_HALF - 1, -(2**63))


class MyInt(int):
    pass


def with_int(f: Function) -> Function:
    INTS[f.__name__] = f
    return f


@with_int
def int_as_result(x: Any, n: Any) -> Any:
    return x + 1, n + 1, n * 2 - 3, {"n": -n}, [5 - n]


@with_int
def int_scalars(x: Any, n: Any) -> Any:
    return x + n, x * n, n - x, x.eq(n), torch.where(x > 0, n, -n), torch.full((2,), n), n


@with_int
def int_divided(x: Any, n: Any) -> Any:
    return x + 1, n // 3, n % 3, -n // 4, -n % 4, n // -3, n % -3


@with_int
def int_polynomials(x: Any, n: Any) -> Any:
    m = n * 3 + 1
    return x + m, m, m * m - n, (m + n) // (n * n + 1), (m % 7) * (n % 5), n**3


@with_int
def int_filled(x: Any, n: Any) -> Any:
    y = torch.zeros(3, dtype=torch.int64)
    y.fill_(n)
    y[0] = n
    return y.clone(), y.add_(n), torch.tensor(n), x.new_full((1,), n), torch.scalar_tensor(n)


@with_int
def int_and_integers(x: Any, n: Any) -> Any:
    i = (x * 10).to(torch.int32)
    return i + n, i * n, i.clamp(max=n), i // (n * n + 1), torch.add(i, i, alpha=n)


@with_int
def int_and_size(x: Any, n: Any) -> Any:
    return x.roll(n, 0), min(n, 2, x.size(0)), max(n, x.size(1)), n * x.numel() - x.stride(0)


@with_int
def int_modulo_size(x: Any, n: Any) -> Any:
    return x.expand(2, 4, 6)[n % 2], x[n % x.size(0) :], x.sum(n % 2), x.view(-1)[: n % 7]


@pytest.mark.parametrize("name", INTS)
def test_small_ints(fresh: None, name: str) -> None:
    check(INTS[name], ints(3, 4, 5, 6, -1, -7, -8, 9, 100))


@pytest.mark.parametrize("name", [n for n in INTS if n != "int_polynomials"])
@pytest.mark.parametrize("numbers", [HUGE, HUGE_NEGATIVE])
def test_huge_ints(fresh: None, name: str, numbers: Any) -> None:
    """What leaves 64 bits is left to stock, which computes with Python's ints."""
    with settings():
        calls = [*ints(3, 4, 5), *ints(*numbers)]
        f = INTS[name]
        reset_compilations()
        expected = rounds(torch.compile(f, backend="eager"), calls)
        compiled = compilations()
        torch._dynamo.reset()
        reset_compilations()
        with trident.enable():
            g = torch.compile(f, backend="trident")
            found = rounds(g, calls)
            assert compilations() == compiled
            for (result, _), (theirs, _) in zip(found, expected, strict=True):
                if isinstance(theirs, tuple) and theirs and isinstance(theirs[0], type):
                    assert result[0] is theirs[0]  # the message has addresses in it
                    assert result[1].split("\n")[0] == theirs[1].split("\n")[0]
                else:
                    assert_same(result, theirs)
            before = sum(hits(name))
            g(*ints(5)[0]())
            assert sum(hits(name)) == before + 1


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63) - 1, True, False, MyInt(5), 7.5, None])
def test_no_plain_ints(fresh: None, number: Any) -> None:
    """The program is for ints of 64 bits; a bool, a float or a subclass is another specialization,
    and so are the ints at which Dynamo compiles again."""
    with settings():
        calls = [*ints(3, 4, 5), *ints(number)]
        f = int_scalars
        expected = rounds(torch.compile(f, backend="eager"), calls)
        torch._dynamo.reset()
        with trident.enable():
            g = torch.compile(f, backend="trident")
            assert_same(rounds(g, calls), expected)
            before = hits(f.__name__)[0]
            g(*calls[2]())
            (frame,) = trident.explain(g).frames
            # torch 2.11 gives up the frame for an int subclass.
            assert hits(f.__name__)[0] == before + 1 or frame.skipped


def divides_by_it(x: Any, n: Any) -> Any:
    return x + 1, 17 // n, 17 % n, -17 // n, -17 % n


def test_divisors(fresh: None) -> None:
    """Zero raises as in Python; -1, by which the smallest number cannot be divided, is stock's."""
    numbers = (3, 4, 5, -1, -7, 0, 100, 2**62)
    check(divides_by_it, ints(*numbers), stock=[numbers.index(n) for n in (-1, 0)])


def not_native_yet(x: Any, n: Any) -> Any:
    return x + 1, abs(n), n / 2, n * 1.5, n > 3


def test_other_numbers(fresh: None) -> None:
    """Floats, bools and absolute values that are computed are not native, and exact."""
    check(not_native_yet, ints(3, 4, 5, -7), native=False)


def of_list(x: Any, sizes: Any) -> Any:
    return x.view(sizes), x.sum() * sizes[0], sizes


def test_list_of_ints(fresh: None) -> None:
    found = check(
        of_list,
        [lambda s=s: (tensor(12), list(s)) for s in ((3, 4), (4, 3), (2, 6), (12, 2), (5, 5))],
        native=True,
        stock=(3, 4),
        as_eager=False,  # Dynamo's own error is of another type
    )
    assert found[4][0][0] is not None


@pytest.mark.parametrize("number", [2**31, 2**40 + 1])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: torch.as_tensor(n),
        lambda x, n: torch.as_tensor(n, dtype=torch.float64) + x,
        lambda x, n: torch.as_tensor([n, 1]),
        lambda x, n: torch.asarray(n),
    ],
)
def test_as_tensor_of_an_int(enabled: None, f: Any, number: int) -> None:
    g = torch.compile(f, backend="trident", dynamic=True)
    for _ in range(3):
        assert_same(g(tensor(2), number), f(tensor(2), number))


@pytest.mark.parametrize("f", [lambda x, n: torch.as_tensor(n), lambda x, n: x.new_tensor([n])])
def test_tensors_of_small_ints(enabled: None, f: Any) -> None:
    g = torch.compile(f, backend="trident", dynamic=True)
    for number in (3, 4, -5, 3, 4, -5):
        assert_same(g(tensor(2), number), f(tensor(2), number))
    assert trident.stats().hits > 0


class Counter(torch.nn.Module):
    """An int that changes is guarded for its value at first, then dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [0]

    def forward(self, x: Any) -> Any:
        n = self.steps[0]
        return x * (n + 1) + n // 3, n


def test_int_of_a_module(enabled: None) -> None:
    module = Counter()
    g = torch.compile(module, backend="trident", dynamic=True)
    for n in (3, 4, 5, 8, -2, 2**40):
        module.steps[0] = n
        assert_same(g(tensor(3)), module(tensor(3)))
        assert_same(g(tensor(3)), module(tensor(3)))
    assert native_programs("forward")


# ---- through the dispatcher ----


@torch.library.custom_op("trident_tests::mixes", mutates_args=())
def mixes(x: torch.Tensor, n: int, many: list[int], maybe: int | None = None) -> torch.Tensor:
    return x * n + sum(many) * 10 + (maybe or 0) * 100


@mixes.register_fake
def _(x: Any, n: Any, many: Any, maybe: Any = None) -> Any:
    return torch.empty_like(x)


def calls_custom_operator(x: Any) -> Any:
    n, m = x.shape
    return mixes(x, n, [n, 3, m * 2], n - m), mixes(x, m // 2, []), mixes(x, 2**40 * n, [n], None)


def test_custom_operator(fresh: None) -> None:
    """What has no direct call gets its computed ints, and lists of them, in a box."""
    check(calls_custom_operator, SHAPES, dynamic=True)


# ---- training ----


def trained_chunks(x: Any, w: Any) -> Any:
    n = x.size(0)
    a, b = x.chunk(2, 1)
    z = torch.cat([a, b], 0).view(2 * n, -1).mean(0) * n
    return (z @ w[: z.size(0)]).pow(2).sum() / x.numel()


def trained_views(x: Any, w: Any) -> Any:
    n, m = x.shape
    y = F.pad(x, (1, 0)).pow(2)[: n // 2 + 1].cumsum(0) - x.expand(2, n, m).sum((0, 1)).sum()
    return (y[:, :m] @ w[:m]).sum() + (n - x).masked_fill(x > 0, n).sum() * m


def trained_norms(x: Any, w: Any) -> Any:
    n, m = x.shape
    h = F.group_norm(x.view(n, 2, -1), 2).view(n, m) @ w[:m, :m]
    q = h.view(n, 1, m).expand(n, 3, m)
    return F.scaled_dot_product_attention(q, q, q).mean() * n + F.layer_norm(h, (m,)).std()


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("f", [trained_chunks, trained_views, trained_norms])
def test_training(fresh: None, f: Any, dynamic: Any) -> None:
    shapes = ((4, 6), (5, 6), (2, 6), (9, 6), (3, 8))

    def attempt(g: Function) -> Any:
        found = []
        for shape in shapes * 2:
            x, w = tensor(*shape).requires_grad_(), tensor(9, 9).requires_grad_()
            loss = g(x, w)
            loss.backward()
            found.append((loss, x.grad, w.grad))
        return found

    expected = attempt(f)
    reset_compilations()
    attempt(torch.compile(f, backend="eager", dynamic=dynamic))
    compiled = compilations()
    torch._dynamo.reset()
    reset_compilations()
    with trident.enable():
        assert_same(attempt(torch.compile(f, backend="trident", dynamic=dynamic)), expected)
        assert compilations() == compiled
        assert all(native_programs(f.__name__))
        assert hits(f.__name__)[0] >= len(shapes)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)
        self.embedding, self.dropout = torch.nn.Embedding(10, 6), torch.nn.Dropout(0.3)
        self.group, self.convolution = torch.nn.GroupNorm(2, 6), torch.nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Any) -> Any:
        n = x.size(0)
        h = self.dropout(self.norm(self.linear(x)) + self.embedding(torch.arange(n) % 10))
        return (self.group(h) + self.convolution(h.unsqueeze(-1)).squeeze(-1)) * n


@pytest.mark.parametrize("dynamic", [None, True])
def test_training_a_module(fresh: None, dynamic: Any) -> None:
    """Ten steps with a batch of another size each. With ``dynamic=True`` the floats of modules (an
    epsilon, say) are inputs."""

    def attempt(backend: str | None) -> Any:
        torch.manual_seed(2)
        model = Block()
        g = model if backend is None else torch.compile(model, backend=backend, dynamic=dynamic)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for n in (4, 5, 2, 9, 7, 3, 4, 8, 6, 5):
            loss = g(tensor(n, 6)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses, list(model.parameters())

    expected = attempt(None)
    with trident.enable():
        assert_same(attempt("trident"), expected)
        assert set(native_programs("forward")) == {True}
        assert hits("forward")[0] == (8 if dynamic is None else 9)


# ---- what tracing leaves behind ----

_OF_SHAPE_ENV = (
    *("guards", "replacements", "var_to_range", "backed_var_to_val", "divisible"),
    *("deferred_runtime_asserts", "num_deferred_runtime_asserts", "axioms", "size_like"),
    *("unbacked_symint_counter", "unbacked_symfloat_counter", "source_to_var", "val_to_var"),
)


def state(shape_env: ShapeEnv) -> dict[str, Any]:
    def text(value: Any) -> Any:
        return sorted(map(str, value)) if isinstance(value, (set, dict)) else str(value)

    found = {name: getattr(shape_env, name, None) for name in _OF_SHAPE_ENV}
    return {name: text(value) for name, value in found.items()}


@pytest.fixture
def states(fresh: None, monkeypatch: Any) -> list[Any]:
    """Pairs of states of Dynamo's ShapeEnv, before and after each trace."""
    found: list[Any] = []
    trace = graph._trace

    def watched(module: torch.fx.GraphModule) -> Any:
        values = [node.meta.get("example_value") for node in module.graph.nodes]
        shape_envs = {id(e): e for e in (f.fake_mode.shape_env for f in graph._fakes(values))}
        before = list(map(state, shape_envs.values()))
        traced = trace(module)
        found.append((before, list(map(state, shape_envs.values()))))
        return traced

    monkeypatch.setattr(graph, "_trace", watched)
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("convolved", "normalized", "reshaped", "cut", "scalars", "strided", "indexed"),
        *("divisions_of_negatives", "attended"),
    ],
)
def test_tracing_adds_nothing(states: list[Any], name: str) -> None:
    f = torch.compile(SIZES[name], backend="trident", dynamic=True)
    for call in SHAPES[:4]:
        f(*call())
    assert states
    for before, after in states:
        assert before
        assert after == before


def of_data(x: Any) -> Any:
    return x.nonzero(), x + 1


def number_of_data(x: Any) -> Any:
    return x * x.abs().sum().item()


@pytest.mark.parametrize("f", [of_data, number_of_data])
def test_tracing_data_dependent_operators(states: list[Any], f: Any) -> None:
    with settings(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        torch.compile(f, backend="trident", dynamic=True)(tensor(4, 6))
    for before, after in states:
        assert after == before


@pytest.mark.parametrize("f", [of_data, number_of_data])
@pytest.mark.parametrize("captured", [True, False])
def test_sizes_of_data(fresh: None, f: Any, captured: bool) -> None:
    """Not native, or a graph break: as stock in every way."""
    options = {"capture_scalar_outputs": captured, "capture_dynamic_output_shape_ops": captured}
    with settings(**options):
        expected = rounds(f, SHAPES)
        reset_compilations()
        rounds(torch.compile(f, backend="eager", dynamic=True), SHAPES)
        compiled = compilations()
        torch._dynamo.reset()
        reset_compilations()
        with trident.enable():
            found = rounds(torch.compile(f, backend="trident", dynamic=True), SHAPES)
        assert_same(found, expected)
        assert compilations() == compiled


# ---- lists of optional tensors ----

Index = tuple[torch.Tensor, torch.Tensor]


def index_cases() -> list[Call]:
    def pair(*rows: Any) -> Index:
        first, second = (torch.tensor(row) for row in rows)
        return first, second

    cases = [pair(*rows) for rows in (([1, 2], [0, 3]), ([3, 3], [3, 0]), ([-1, -4], [0, 1]))]
    bad = [pair(*rows) for rows in (([1, 9], [0, 3]), ([-5, 0], [1, 1]), ([0, 1], [0, 4]))]
    return [lambda c=c: (tensor(4, 4, 4), *c) for c in (*cases, *bad, cases[0])]


def index_reads(x: Any, i: Any, j: Any) -> Any:
    y = x[i, :, j], x[:, i], x[..., j], x[None, i], x[i, None, j], x[i, 1:3, j], x[i, j, i]
    return *y, torch.ops.aten.index(x, [None, i, None]), torch.ops.aten.index(x, [i, None, j])


def index_writes(x: Any, i: Any, j: Any) -> Any:
    y = x.clone()
    y[i, :, j] = 7.0
    y[:, i] += y[:, j]
    y.index_put_((i,), torch.ones(()), accumulate=True)
    return y, torch.index_put(x, (i, j), torch.tensor(2.0), accumulate=True)


def index_writes_input(x: Any, i: Any, j: Any) -> Any:
    x.index_put_((i,), torch.ones(()), accumulate=True)
    x[j] = x[i]
    return x.sum()


@pytest.mark.parametrize("f", [index_reads, index_writes, index_writes_input])
def test_indices(fresh: None, f: Any) -> None:
    found = check(f, index_cases())
    errors = [r for r, _ in found[:7] if isinstance(r, tuple) and isinstance(r[0], type)]
    assert len(errors) == 3


def masks(x: Any, mask: Any, value: Any) -> Any:
    y = x.clone()
    y[mask] = 0
    y[:, mask[0]] = 1.0
    put = torch.ops.aten.index_put
    return y, put(x, [mask], value), put(x, [None, None, mask[1, 1]], value)


def test_masks(fresh: None) -> None:
    def call(kind: int) -> list[Any]:
        x = tensor(4, 4, 4)
        return [x, [x > 0, x > 100, x < 100][kind], torch.tensor(3.0)]

    check(masks, [lambda k=k: call(k) for k in (0, 1, 2, 0)])


def grads_of_indices(x: Any, i: Any, j: Any) -> Any:
    return (x[i, :, j] * x[:, i, j].t()).sum() + x[None, i].pow(2).sum()


def test_gradients_of_indices(enabled: None) -> None:
    g = torch.compile(grads_of_indices, backend="trident")
    for call in [c for c in index_cases()[:3] for _ in range(2)]:
        x, i, j = call()
        y = x.clone().requires_grad_()
        x.requires_grad_()
        assert_same(g(x, i, j), grads_of_indices(y, i, j))
        (gx,) = torch.autograd.grad(g(x, i, j), x)
        (gy,) = torch.autograd.grad(grads_of_indices(y, i, j), y)
        assert_same(gx, gy)
    assert hits("grads_of_indices")[0] >= 8


# ---- memory ----


def all_kinds(x: Any, n: Any) -> Any:
    y = x * n, x.clamp(min=n), x.roll(n - 1, 0), torch.arange(x.size(0)), x.view(-1)[n:]
    return *y, x.shape, n * 2**40, F.pad(x, (0, n))


@pytest.mark.parametrize("bad", [False, True])
def test_memory_is_flat(enabled: None, bad: bool) -> None:
    """In 20,000 calls, which succeed or raise."""
    f, g = index_writes, torch.compile(index_writes, backend="trident")
    for call in index_cases()[:3]:
        g(*call())
    arguments = index_cases()[3 if bad else 0]()
    before = hits(f.__name__)
    assert_flat(lambda: outcome(g, *arguments), 20_000, *arguments)
    assert hits(f.__name__)[bad] - before[bad] >= 20_000


def test_memory_of_sizes_is_flat(enabled: None) -> None:
    g = torch.compile(all_kinds, backend="trident", dynamic=True)
    calls = [(tensor(n, 6), n) for n in (4, 5, 7)]
    for _ in range(3):
        for arguments in calls:
            g(*arguments)
    before = hits("all_kinds")[0]
    assert_flat(lambda: [g(*arguments) for arguments in calls], 7_000, *[x for x, _ in calls])
    assert hits("all_kinds")[0] - before >= 3 * 7_000
