"""Higher-order operators have no native form: graphs with them run as in stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import trident
from tests.test_equality import assert_same


def condition(x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,)) + 1


def loop(x: Any) -> Any:
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2 + 1), (start, x))


def scanned(x: Any) -> Any:
    return scan(lambda carry, y: (carry + y, carry * 2 + 0), torch.zeros(3), x, dim=0)


def scanned_associatively(x: Any) -> Any:
    return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


def mapped(x: Any) -> Any:
    return map_rows(lambda y: y.relu() + 1, x)


def attention(x: Any) -> Any:
    q = x.view(1, 1, 4, 3)
    return flex_attention(q, q, q)


def checkpointed(x: Any) -> Any:
    return checkpoint(lambda y: (y * 2).relu(), x, use_reentrant=False)


def batched(x: Any) -> Any:
    return torch.vmap(lambda y: y.sin() * 2)(x)


def gradient(x: Any) -> Any:
    return torch.func.grad(lambda y: (y**2).sum())(x)


FUNCTIONS = [condition, loop, scanned, scanned_associatively, mapped, attention, checkpointed]
FUNCTIONS += [batched, gradient]


@pytest.mark.parametrize("f", FUNCTIONS)
def test_same_as_stock(enabled: None, f: Any) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 3), -torch.rand(4, 3), torch.rand(4, 3)]

    def results(backend: str) -> list[Any]:
        torch._dynamo.reset()
        compiled = torch.compile(f, backend=backend)
        return [[_pytree.tree_leaves(compiled(x)) for x in inputs] for _ in range(3)]

    expected = results("eager")
    assert_same(results("trident"), expected)
    assert "host program: stock" in str(trident.explain(f))
