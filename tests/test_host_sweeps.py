"""Sweeps over sizes: 0, 1, 2, odd and large ones, dynamic in three ways.

Each function gives eager's bits for every size, with as many compilations as stock's
``backend="eager"``, and is native for every size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.decorators import mark_dynamic, maybe_mark_dynamic

from tests.test_host_shapes import check, tensor

SIZES = (0, 1, 2, 3, 7, 64, 1000)
Function = Callable[[Any], Any]

SWEPT: dict[str, tuple[Function, tuple[int, ...]]] = {}


def swept(sizes: tuple[int, ...] = SIZES) -> Callable[[Function], Function]:
    """A function of a tensor of n rows of six, for these n."""

    def note(f: Function) -> Function:
        SWEPT[f.__name__] = f, sizes
        return f

    return note


@swept()
def views(x: Any) -> Any:
    n = x.shape[0]
    return x.view(6, n), x.view(-1), x.view(n, 2, 3).transpose(0, 2), x.t(), x[None].squeeze(0)


@swept()
def reshapes(x: Any) -> Any:
    n = x.shape[0]
    return x.t().reshape(n * 6), x.reshape(2 * n, 3), x.flatten(), x.unflatten(1, (2, 3))


@swept()
def slices(x: Any) -> Any:
    n = x.shape[0]
    return x[1:], x[: n // 2], x[::2], x[-2:], x.narrow(0, n // 3, n // 2), x[n // 2 :, 1:-1]


@swept()
def concatenations(x: Any) -> Any:
    return torch.cat([x, x[:1], x * 2]), torch.stack([x, x], 1), torch.hstack([x, x])


@swept()
def chunks(x: Any) -> Any:
    return x.chunk(2, 1), torch.tensor_split(x, 3, 1), x.t().split([1, 2, 3]), x.unbind(1)


@swept()
def ranges(x: Any) -> Any:
    n = x.shape[0]
    return torch.arange(n), torch.arange(1, 2 * n + 2, 2), torch.arange(n, -1, -1)


@swept()
def factories(x: Any) -> Any:
    n = x.shape[0]
    return x.new_zeros(n, n // 2), torch.ones(n + 1), torch.full((n,), n), torch.eye(n % 10 + 1)


@swept()
def random_numbers(x: Any) -> Any:
    return torch.rand(x.shape[0], 2), torch.randn_like(x), F.dropout(x, 0.5)


@swept()
def reductions(x: Any) -> Any:
    return x.sum(), x.sum(0), x.mean(1), x.prod(1), x.amax(1), x.norm(dim=1), x.cumsum(0)


@swept()
def averages(x: Any) -> Any:
    return x.sum() / (x.shape[0] + 1), x * (1 / 8), x.sum(0) * x.numel(), x.var(1)


@swept()
def arguments_of_reductions(x: Any) -> Any:
    return x.argmax(1), x.max(1), x.sort(0), x.argsort(1), x.median(1)


@swept()
def matrices(x: Any) -> Any:
    return x @ x.t(), x.t() @ x, torch.mv(x, x.sum(0)), torch.addmm(x, x, x.t() @ x)


@swept()
def batches(x: Any) -> Any:
    y = x.view(-1, 2, 3)
    return (
        torch.bmm(y, y.mT),
        torch.einsum("bij,bkj->bik", y, y),
        torch.matmul(y, x[0:1].view(-1, 3, 2)),
    )


@swept(sizes=(1, 2, 3, 7, 64, 1000))
def convolutions(x: Any) -> Any:
    w = torch.ones(4, 6, 3)
    y = x.t()[None]
    return F.conv1d(y, w, padding=1), F.conv1d(y, w, stride=2, padding=2), F.avg_pool1d(y, 1)


@swept()
def embeddings(x: Any) -> Any:
    i = torch.arange(x.shape[0]) % 6
    return F.embedding(i, x.t() @ x), F.one_hot(i, 6), F.embedding(i.view(-1, 1), torch.eye(6))


@swept(sizes=(1, 2, 3, 7, 64, 1000))
def interpolations(x: Any) -> Any:
    y = x.t()[None]
    return F.interpolate(y, size=5), F.interpolate(y, size=x.shape[0] * 2, mode="linear")


@swept()
def indices(x: Any) -> Any:
    i = torch.arange(x.shape[0]).flip(0)
    return x[i], x[i, i % 6], x.index_select(0, i), x.gather(0, i[:, None].expand(-1, 6)), x.take(i)


@swept()
def writes(x: Any) -> Any:
    y = x.clone()
    y[1:] = 2.0
    y[:, 0] += y[:, 1]
    x.mul_(2)[: x.shape[0] // 2].zero_()
    return y.index_fill(1, torch.tensor([2]), 7.0), torch.zeros_like(x).copy_(y)


@swept(sizes=(1, 2, 3, 7, 64, 1000))
def paddings(x: Any) -> Any:
    return F.pad(x, (1, 2)), F.pad(x, (0, 0, 1, 3), value=2.5), F.pad(x[None], (1, 1), "replicate")


@swept()
def expansions(x: Any) -> Any:
    n = x.shape[0]
    return (
        x[:, None].expand(-1, 3, -1),
        x[:, :1].expand(n, 4),
        x.repeat(2, 1),
        x.sum(0).expand(n, 6),
    )


@swept()
def broadcasts(x: Any) -> Any:
    return x + x[:, :1], x * x.sum(0), torch.where(x > 0, x, -x), torch.maximum(x, x.mean(1, True))


@swept(sizes=(2, 3, 7, 64, 1000))
def largest(x: Any) -> Any:
    n = x.shape[0]
    return x.topk(2, 0), x.topk(n // 2 + 1, 0), x.kthvalue(n // 2 + 1, 0), x.t().topk(n - 1)


@swept()
def normalizations(x: Any) -> Any:
    return F.layer_norm(x, (6,)), F.softmax(x, 1), F.log_softmax(x, 0), F.normalize(x)


@swept()
def activations(x: Any) -> Any:
    return F.gelu(x), F.silu(x), x.sigmoid().tanh(), F.softplus(x), F.leaky_relu(x), F.glu(x, 1)


@swept()
def attentions(x: Any) -> Any:
    q = x.view(1, -1, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


@swept()
def numbers(x: Any) -> Any:
    n, m = x.shape
    return x + n, x * (n + m), x.clamp(max=n - 3), x.roll(n // 2, 0), n * m, n // 3, n % 4, x.shape


@swept()
def memory(x: Any) -> Any:
    y = x[:, None, :, None].contiguous(memory_format=torch.channels_last)
    return y, x.t().contiguous(), torch.as_strided(x, (x.shape[0], 2), (6, 1)), x.clone().t()


@swept()
def masks(x: Any) -> Any:
    n = x.shape[0]
    mask = torch.arange(n)[:, None] >= torch.arange(6)
    return x.masked_fill(mask, -1.0), x.tril(), torch.triu(x, 1), mask.sum(), mask.any(1)


@swept()
def diagonals(x: Any) -> Any:
    return (
        x.diagonal(),
        x.flip(0, 1),
        torch.diag_embed(x[:, :2]),
        x.unfold(1, 3, 2),
        x.movedim(0, 1),
    )


@swept()
def losses(x: Any) -> Any:
    target = torch.arange(x.shape[0]) % 6
    return F.cross_entropy(x, target, reduction="none"), F.mse_loss(x, x * 2), F.l1_loss(x, -x)


@swept()
def dtypes(x: Any) -> Any:
    return (
        x.double().sum(),
        x.to(torch.bfloat16) * 2,
        (x * 10).long() // 3,
        x > x.shape[0],
        x.bool(),
    )


def marked(size: int) -> list[Any]:
    x = tensor(size, 6)
    # 0 and 1 are always specialized, of which `mark_dynamic` complains.
    (mark_dynamic if size > 1 else maybe_mark_dynamic)(x, 0)
    return [x]


def plain(size: int) -> list[Any]:
    return [tensor(size, 6)]


@pytest.mark.parametrize("way", ["marked", "automatic", "dynamic"])
@pytest.mark.parametrize("name", SWEPT)
def test_sizes(fresh: None, name: str, way: str) -> None:
    f, sizes = SWEPT[name]
    make = marked if way == "marked" else plain
    calls = [lambda size=size: make(size) for size in sizes]
    check(f, calls, dynamic=True if way == "dynamic" else None)


def views_of_both_sizes(x: Any) -> Any:
    n, m = x.shape
    return x.view(m, n), x.view(n, 2, 3)


def test_asked_in_other_words(fresh: None) -> None:
    """Dynamo asks whether m equals n, then finds that m is 6; the trace would ask whether n is 6,
    of which no guard says anything: stock."""
    calls = [lambda size=size: plain(size) for size in (2, 3, 7)]
    check(views_of_both_sizes, calls, dynamic=True, native=False)
