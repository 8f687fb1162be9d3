"""What a trace of Dynamo's graph does not show of a call: Python code that runs each time, states
that it reads, and how torch's Python bindings call operators. All is as in stock."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.backends import opt_einsum

import trident
from tests.conftest import outcome
from tests.states import registry
from tests.test_equality import assert_same
from tests.test_host_edges import same_as_stock, t
from trident.codegen.import_graph import FACTORIES

Compile = Callable[[Any], Any]
COUNT = [0]


def leaf(*shape: int) -> torch.Tensor:
    return t(*shape).requires_grad_()


# ---- Python code in the graph ----


@torch.compiler.allow_in_graph
def counting(x: Any) -> Any:
    COUNT[0] += 1
    return x * COUNT[0]


@torch._dynamo.nonstrict_trace
def counting_in_any_container(x: Any) -> Any:
    COUNT[0] += 1
    return {"y": [x * COUNT[0]]}


@torch.compiler.allow_in_graph
class Tripled(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        COUNT[0] += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 3


@torch.compiler.allow_in_graph
def tripled(x: Any) -> Any:
    return Tripled.apply(x) + 1


PYTHON, of_python = registry()


@of_python
def allowed(x: Any) -> Any:
    return counting(x) + 1


@of_python
def traced_by_others(x: Any) -> Any:
    return counting_in_any_container(x)["y"][0] + 1


@of_python
def allowed_autograd_function(x: Any) -> Any:
    return Tripled.apply(x) + 1


@of_python
def autograd_function_within_it(x: Any) -> Any:
    return tripled(x) * 2


@of_python
def gradients_in_the_graph(x: Any) -> Any:
    y = x * x
    return torch.autograd.grad(y.sum(), x, retain_graph=True)[0], y


@of_python
def gradients_of_gradients(x: Any) -> Any:
    (once,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return once * x


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("requires_grad", [True, False])
@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_python_in_the_graph(fresh: None, name: str, requires_grad: bool) -> None:
    """How often it ran does not count: compiling runs it more than once."""

    def attempt(compile_: Compile) -> Any:
        g, found = compile_(PYTHON[name]), []
        for call in range(5):
            COUNT[0] = call
            x = t(3).requires_grad_(requires_grad)
            y = outcome(g, x)
            results = [y] if isinstance(y, torch.Tensor) else list(y)
            names = [r.grad_fn and r.grad_fn.name() for r in results if isinstance(r, torch.Tensor)]
            if any(names):
                results[0 if names[0] else 1].sum().backward()
            ran = COUNT[0] - call if call > 1 else None
            found.append((y if call else None, names, x.grad, ran))
        return found

    same_as_stock(attempt)


def changed_below_no_grad(x: Any) -> Any:
    with torch.no_grad():
        y = x[1:]
        y.add_(1)
    return y


def changed_after_splitting(x: Any) -> Any:
    y = x * 1
    a, _ = y.split(2)
    y.add_(1)
    return a


@pytest.mark.parametrize("f", [changed_below_no_grad, changed_after_splitting])
def test_views_without_gradients(fresh: None, f: Any) -> None:
    """Asking for the ``grad_fn`` of such a view raises."""

    def attempt(compile_: Compile) -> Any:
        g = compile_(f)
        results = [g(leaf(4)) for _ in range(4)]
        return [(y.detach(), y.requires_grad, y._version) for y in results]

    same_as_stock(attempt, at_least=3)


def test_torch_function_mode(fresh: None) -> None:
    """Stock's graph calls torch's functions below the mode, once more than Dynamo traced it."""

    class Doubled(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            y = function(*args, **(kwargs or {}))
            return y * 2 if function is torch.add else y

    def attempt(compile_: Compile) -> Any:
        g, found = compile_(lambda x: torch.add(x, 1)), []
        for inside in (False, True, True, True, False, False, True):
            if inside:
                with Doubled():
                    found.append(g(t(3)))
            else:
                found.append(g(t(3)))
        return found

    same_as_stock(attempt, at_least=1)


def test_einsum_with_opt_einsum(fresh: None, monkeypatch: Any) -> None:
    """Its order of contraction is chosen for each call."""

    class Library:
        def contract_path(self, *args: Any, **kwargs: Any) -> Any:
            return [(1, 2), (0, 1)], None

    def attempt(compile_: Compile) -> Any:
        g = compile_(lambda x: torch.einsum("ij,jk,kl->il", x, x, x))
        found = []
        for enabled in (True, True, True, False, True, False):
            monkeypatch.setattr(opt_einsum, "enabled", enabled)
            found.append(g(torch.linspace(0.1, 1.7, 2304).reshape(48, 48)))
        assert not torch.equal(found[4], found[5])
        return found

    monkeypatch.setattr(opt_einsum, "get_opt_einsum", Library)
    monkeypatch.setattr(opt_einsum, "is_available", lambda: True)
    same_as_stock(attempt)


# ---- factories ----


def made(x: Any) -> Any:
    return (
        *(torch.arange(3), torch.arange(0, 1, 0.5), torch.ones(2), torch.zeros(2), torch.eye(2, 3)),
        *(torch.full((2,), 1.5), torch.linspace(0, 1, 3), torch.logspace(0, 1, 3)),
        *(torch.full_like(x, 2), torch.ones_like(x), torch.zeros_like(x), torch.empty(0)),
        *(torch.tril_indices(2, 2), torch.triu_indices(2, 2), torch.scalar_tensor(3)),
        *(torch.hann_window(4), torch.hamming_window(4), torch.blackman_window(4)),
        *(torch.bartlett_window(4), torch.kaiser_window(4), torch.fft.fftfreq(4)),
        *(torch.fft.rfftfreq(4), torch.signal.windows.gaussian(4), torch.vander(x)),
        *(x.new_ones(2), x.new_zeros(2), x.new_full((2,), 3), torch.tensor([1, 2])),
        torch.nn.functional.one_hot(x.long().abs(), 9),
    )


def made_at_random(x: Any) -> Any:
    return (
        *(torch.rand(2), torch.randn(2), torch.randint(5, (2,)), torch.randint(1, 5, (2,))),
        *(torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 3), torch.randperm(4)),
        *(torch.normal(0.0, 1.0, (2,)), torch.normal(x, 1.0), torch.normal(x, x.abs())),
        *(torch.normal(0.5, x.abs()), torch.bernoulli(x.sigmoid())),
    )


def made_by_overloads(x: Any) -> Any:
    aten = torch.ops.aten
    return (
        *(aten.ones([2]), aten.ones.default([2]), aten.rand([2]), aten.full([2], 1.5)),
        *(aten.arange(3), aten.eye(2), aten.zeros_like(x), aten.hann_window(4)),
    )


def made_in_regions(x: Any) -> Any:
    with torch.no_grad():
        a = torch.ones(2)
    with torch.autocast("cpu", torch.bfloat16):
        b = torch.full((2, 2), 0.5) @ torch.ones(2, 2)
    return a, b, x * torch.ones(3), torch.ones(3).mul_(x.detach()).add_(1)


@pytest.mark.parametrize("f", [made, made_at_random, made_by_overloads, made_in_regions])
@pytest.mark.parametrize("dynamic", [None, True])
def test_versions_of_new_tensors(fresh: None, f: Any, dynamic: Any) -> None:
    """torch's Python bindings fill new tensors below autograd; ``torch.ops`` does not."""

    def attempt(compile_: Compile) -> Any:
        g, found = compile_(f), []
        for call in range(4):
            torch.manual_seed(call)
            results = g(leaf(3))
            found.append((list(results), [y._version for y in results]))
        return found

    found = same_as_stock(attempt, at_least=2, dynamic=dynamic)
    torch.manual_seed(3)
    assert found[-1][1] == [y._version for y in f(leaf(3))]


def test_autograd_after_a_factory_that_raises(fresh: None) -> None:
    """What is below autograd ends with the error."""

    def attempt(compile_: Compile) -> Any:
        g = compile_(lambda x, n: torch.full((n - 5,), 1.0) + x)
        found = []
        for n in (8, 8, 8, 7, 6, 4, 6, 4):
            w = leaf(1)
            y = outcome(g, w, n)
            v = w * 2
            found.append((y, v.requires_grad, v.add_(1)._version))
        return found

    same_as_stock(attempt, at_least=1, dynamic=True)


def test_names_of_factories() -> None:
    include = Path(torch.__file__).parent / "include/torch/csrc/autograd/generated"
    text = (include / "variable_factories.h").read_text()
    names = set(re.findall(r"^inline at::Tensor (\w+?)(?:_symint)?\(", text, re.MULTILINE))
    unused = {"tensor", "from_blob", "empty_quantized"}  # not in graphs as operators, or no strided
    wanted = {n for n in names if not n.startswith(("_", "sparse_"))} - unused
    assert wanted == FACTORIES


def test_explained(fresh: None) -> None:
    with trident.enable():
        g = torch.compile(allowed, backend="trident")
        for _ in range(3):
            g(t(3))
        assert "Python code runs for each call" in str(trident.explain(g))
    assert_same(COUNT[:0], [])
