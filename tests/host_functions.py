"""Functions for the host program tests: what models do, by kind. Each takes tensors made anew for
each call by `make_inputs` and returns what its caller compares with eager, bit for bit."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from tests.states import registry

FUNCTIONS, function = registry()
# For inputs that require gradients; the first result is a scalar loss.
TRAINED, trained = registry()


def make_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s, generator=generator) for s in ((4, 6), (4, 6), (6, 6))]


# ---- plain ----


@function
def arithmetic(x: Any, y: Any, w: Any) -> Any:
    return (x + y) * 2 - x / (y.abs() + 1) + 3 ** x.sigmoid()


@function
def matrices(x: Any, y: Any, w: Any) -> Any:
    return x @ w, torch.addmm(y, x, w, beta=0.5, alpha=2), torch.einsum("ij,kj->ik", x, y)


@function
def linear_and_norms(x: Any, y: Any, w: Any) -> Any:
    h = F.layer_norm(F.linear(x, w, w[0]), (6,), w[0], w[1])
    return F.gelu(h), F.silu(h), F.softmax(h, dim=-1), F.rms_norm(h, (6,))


@function
def reductions(x: Any, y: Any, w: Any) -> Any:
    return x.sum(), x.mean(dim=1, keepdim=True), x.amax(0), x.std(), x.norm(), x.argmax(), x.all()


@function
def several_results(x: Any, y: Any, w: Any) -> Any:
    values, indices = x.sort(dim=1, descending=True)
    top, where = x.topk(2)
    a, _, c = torch.chunk(y, 3, dim=1)
    low, high = torch.aminmax(w)
    return values, indices, top, where, c, a, low + high, torch.unbind(x)[2]


@function
def no_results(x: Any, y: Any, w: Any) -> Any:
    return torch.unbind(x[:0]), x + 1


@function
def item_taken_twice(x: Any, y: Any, w: Any) -> Any:
    parts = x.split(2)
    first = parts[0] + 1
    return first * parts[1], parts[0].sum() + parts[0].mean()


@function
def indexing(x: Any, y: Any, w: Any) -> Any:
    index = torch.tensor([2, 0, 1])
    return x[index], x[:, index], x[1], x[..., 1:4:2], x[None], x.gather(1, x.argsort(1))


@function
def a_tensor_and_a_list(x: Any, y: Any, w: Any) -> Any:
    return torch.histogramdd(x[:, :2].contiguous(), (2, 3))


@function
def where_and_masks(x: Any, y: Any, w: Any) -> Any:
    return torch.where(x > y, x, 0.0), x.masked_fill(y > 0, float("-inf")), x.clamp(min=-0.5, max=1)


@function
def types(x: Any, y: Any, w: Any) -> Any:
    return x.double() + 1, x.to(torch.bfloat16) @ w.bfloat16(), x > 0, (x * 10).int() // 3, x.half()


@function
def factories(x: Any, y: Any, w: Any) -> Any:
    a = torch.zeros(4, 6) + torch.ones_like(x) + torch.arange(6)
    return (
        a,
        torch.full((2,), 3.5),
        torch.eye(3),
        torch.empty(0),
        x.new_zeros(3),
        torch.linspace(0, 1, 5),
    )


@function
def constants(x: Any, y: Any, w: Any) -> Any:
    return x * torch.tensor([1.0, 2, 3, 4, 5, 6]), torch.tensor(3) + x, torch.tensor([True, False])


@function
def complex_numbers(x: Any, y: Any, w: Any) -> Any:
    z = torch.complex(x, y)
    return z.abs(), z.conj() * z, torch.view_as_real(z), torch.fft.fft(x), z.imag + 1


@function
def attention(x: Any, y: Any, w: Any) -> Any:
    q, k, v = (t.view(1, 2, 2, 6) for t in (x, y, x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@function
def convolutions(x: Any, y: Any, w: Any) -> Any:
    image = x.view(1, 1, 4, 6)
    h = F.conv2d(image, w[:3, :3].reshape(1, 1, 3, 3), padding=1)
    return (
        h,
        F.max_pool2d(h, 2),
        F.avg_pool2d(h, 2),
        F.interpolate(image, scale_factor=2.0),
        F.pad(h, (1, 1)),
    )


@function
def embeddings(x: Any, y: Any, w: Any) -> Any:
    index = torch.arange(4) % 3
    return F.embedding(index, w), F.one_hot(index, 4), torch.cat([x, y]), torch.stack([x, y], 1)


@function
def losses(x: Any, y: Any, w: Any) -> Any:
    target = torch.arange(4)
    return F.cross_entropy(x, target), F.mse_loss(x, y), F.smooth_l1_loss(x, y, reduction="none")


@function
def scatters(x: Any, y: Any, w: Any) -> Any:
    index = torch.zeros(4, 6, dtype=torch.long)
    a = torch.zeros(4, 6).scatter_add(0, index, x)
    return a, torch.index_add(x, 0, torch.tensor([1, 1]), y[:2]), x.index_put((index[0],), y[0])


@function
def batch_norm_in_training(x: Any, y: Any, w: Any) -> Any:
    mean, variance = w[0].clone(), w[1].abs()
    return F.batch_norm(x, mean, variance, training=True), mean, variance


# ---- views, in-place, aliases ----


@function
def views(x: Any, y: Any, w: Any) -> Any:
    a = x.view(2, 12)
    return (
        a,
        a.t(),
        x.transpose(0, 1)[1:3],
        x.expand(3, 4, 6),
        x.unfold(0, 2, 1),
        x.as_strided((2,), (3,)),
    )


@function
def in_place_on_inputs(x: Any, y: Any, w: Any) -> Any:
    x.add_(1)
    y[1:3] = 5
    y[0].mul_(2)
    w.t().copy_(torch.arange(36).view(6, 6))
    return x.relu_(), w.sum()


@function
def in_place_through_views(x: Any, y: Any, w: Any) -> Any:
    a = x + 1
    b = a.view(-1)
    b.add_(1)
    a[0].zero_()
    return a, b, b[3:5]


@function
def input_as_output(x: Any, y: Any, w: Any) -> Any:
    return x, y * 2, x, x.view(-1), F.dropout(y, 0.5, training=False)


@function
def outputs_alias(x: Any, y: Any, w: Any) -> Any:
    a = x * 2
    return a, a, a.view(-1), a[1]


@function
def out_arguments(x: Any, y: Any, w: Any) -> Any:
    a = torch.empty(4, 6)
    torch.add(x, y, out=a)
    return a, torch._foreach_mul([x, y], 2.0)


@function
def several_in_place_lists(x: Any, y: Any, w: Any) -> Any:
    torch._foreach_add_([x, y], 1)
    return x + y


# ---- random ----


@function
def random_numbers(x: Any, y: Any, w: Any) -> Any:
    a = F.dropout(x, 0.5, training=True) + torch.randn(4, 6) + torch.rand_like(x)
    return (
        a,
        torch.randint(0, 9, (3,)),
        torch.bernoulli(x.sigmoid()),
        torch.randperm(5),
        y.normal_(),
    )


# ---- regions ----


@function
def no_grad_region(x: Any, y: Any, w: Any) -> Any:
    with torch.no_grad():
        a = x * w[0]
    return a + y


@function
def inference_of_grad_mode(x: Any, y: Any, w: Any) -> Any:
    with torch.enable_grad(), torch.no_grad():
        a = x * 2
    with torch.set_grad_enabled(False):
        return a + 1, torch.is_grad_enabled()


@function
def autocast_region(x: Any, y: Any, w: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = x @ w
        with torch.autocast("cpu", enabled=False):
            b = x @ w
    return a, b, x @ w, torch.relu(a), a.float()


# ---- containers ----

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Result:
    value: Any
    more: Any = None


@function
def containers_out(x: Any, y: Any, w: Any) -> Any:
    return {"a": x + 1, "b": [x, (y * 2, None, 3)], 5: "text"}, [], (), True


@function
def containers_in_place(x: Any, y: Any, w: Any) -> Any:
    made = [x]
    made.append(y + 1)
    made.extend([w, 2])
    table = {"x": x}
    table["y"] = made[1] * 2
    return made, table, len(made)


@function
def named_tuple_out(x: Any, y: Any, w: Any) -> Any:
    return Pair(x + 1, y)


@function
def dataclass_out(x: Any, y: Any, w: Any) -> Any:
    return Result(x + 1, more=[y * 2])


COUNT = 0
LOG: list[Any] = []


@function
def global_store(x: Any, y: Any, w: Any) -> Any:
    global COUNT
    COUNT = (x + 1).ndim
    return x * 2


@function
def attribute_of_a_tensor(x: Any, y: Any, w: Any) -> Any:
    x.note = "text"
    return x * 2, x


@function
def list_of_a_global(x: Any, y: Any, w: Any) -> Any:
    LOG.clear()
    LOG.append(x * 2)
    return x + 1


@function
def dict_of_an_argument(x: Any, y: Any, w: Any, table: Any = {}) -> Any:  # noqa: B006
    table["x"] = x + 1
    return table["x"] * 2


# ---- training ----


@trained
def mlp(x: Any, y: Any, w: Any) -> Any:
    return F.mse_loss(torch.relu(x @ w) @ w.t(), y), x * 2


@trained
def views_and_in_place(x: Any, y: Any, w: Any) -> Any:
    a = x * 2
    a[1] = y[0]
    a.view(-1)[3:5].mul_(3)
    return (a @ w).sum(), a


@trained
def detached(x: Any, y: Any, w: Any) -> Any:
    with torch.no_grad():
        scale = w.norm()
    return (x * scale + y.detach()).pow(2).mean(), scale


@trained
def norms_and_dropout(x: Any, y: Any, w: Any) -> Any:
    h = F.dropout(F.layer_norm(x @ w, (6,)), 0.3, training=True)
    return F.cross_entropy(h + y, torch.arange(4)), h


@trained
def embedding_bag(x: Any, y: Any, w: Any) -> Any:
    h = F.embedding(torch.tensor([[0, 1], [2, 2]]), w).sum(1)
    return (h.sigmoid() * x[:2]).sum() + y.prod(), None


@trained
def in_autocast(x: Any, y: Any, w: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = torch.relu(x @ w) @ w
        return (h * y).float().pow(2).mean(), h


@trained
def integer_results(x: Any, y: Any, w: Any) -> Any:
    return (x * w[0]).max(dim=1).values.sum() + y.sort().values[0].sum(), x.argmax(), x > 0
