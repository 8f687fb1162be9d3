"""Host programs: operators with unusual arguments and results, and custom operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.host_checks import assert_as_eager, compiled, hits
from tests.test_equality import assert_same
from trident.control import runtime

aten = torch.ops.aten
Inputs = Callable[[], list[Any]]


def boxed(name: str) -> tuple[str, ...]:
    """What the host program of the frame called `name` calls through the boxed dispatcher."""
    built = [
        entry.built
        for module in runtime.modules.values()
        if module.name == name
        for entry in module.entries
    ]
    (found,) = (each.boxed for each in built if each is not None)
    return found


# ---- arguments and results ----

DIRECT: list[tuple[Any, Inputs]] = []


def direct(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[Any], Any]:
    """A function of tensors of these shapes all of whose operators are called directly."""

    def make() -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(*s, generator=generator).mul_(3).to(dtype) for s in shapes]

    def note(f: Any) -> Any:
        DIRECT.append((f, make))
        return f

    return note


@direct((4,), (3, 2))
def lists_of_numbers(x: Any, y: Any) -> Any:
    a = torch._foreach_mul([x, y], [2, 0.5])
    b = torch._foreach_add([x, y], [True, -3])
    torch._foreach_sub_([x, y], [1.5, 2.5])
    return a, b, torch._foreach_addcdiv([x, y], [x, y], [y[0, 0], x[0]], [0.1, -2])


@direct((4,), dtype=torch.complex64)
def lists_of_complex_numbers(x: Any) -> Any:
    return torch._foreach_mul([x, x], [2 + 1j, -1j]), torch._foreach_pow([x], [0.5j])


@direct((5, 6))
def lists_of_spacings(x: Any) -> Any:
    return torch.gradient(x, spacing=[2, 0.5]), torch.gradient(x, spacing=3.0, dim=[1])


@direct((2, 3, 6), (4, 3, 3), (2, 4, 4))
def flags_of_three(x: Any, w: Any, grad: Any) -> Any:
    arguments = ([4], [1], [0], [1], False, [0], 1)
    of_input, of_weight, _ = aten.convolution_backward(grad, x, w, *arguments, [True, True, False])
    _, _, of_bias = aten.convolution_backward(grad, x, w, *arguments, [False, False, True])
    return of_input, of_weight, of_bias


@direct((2, 3, 4, 4), (2, 5, 5, 2), (2, 3, 5, 5))
def flags_of_two(x: Any, grid: Any, grad: Any) -> Any:
    return aten.grid_sampler_2d_backward(grad, x, grid, 0, 0, False, [True, False])


@direct((4, 3), (3,), (3,))
def several_outputs(x: Any, largest: Any, smallest: Any) -> Any:
    index = torch.empty(3, dtype=torch.int64)
    pair = torch.max(x, 0, out=(largest, index))
    aten.aminmax.out(x, dim=0, min=smallest, max=largest)
    return pair, index, largest + smallest


@direct((3, 3), (3, 3), (3,))
def three_outputs(x: Any, u: Any, s: Any) -> Any:
    v = torch.empty(3, 3)
    torch.linalg.svd(x, out=(u, s, v))
    return u, s, v.abs()


@pytest.mark.parametrize(("f", "make"), DIRECT, ids=lambda x: getattr(x, "__name__", ""))
def test_direct(enabled: None, f: Any, make: Any) -> None:
    assert_as_eager(f, make)
    assert boxed(f.__name__) == ()


def one_of_the_outputs_is_the_input(x: Any) -> Any:
    index = torch.zeros(4, dtype=torch.int64)
    torch.sort(x, out=(x, index))
    return x, index


def test_outputs_are_their_arguments(enabled: None) -> None:
    def make() -> list[Any]:
        return [torch.tensor([3.0, 1.0, 2.0, 0.0])]

    assert_as_eager(one_of_the_outputs_is_the_input, make)
    g = compiled(one_of_the_outputs_is_the_input, make)
    (x,) = make()
    assert g(x)[0] is x


def computed_numbers(x: Any, n: Any, scale: Any) -> Any:
    return (
        torch._foreach_mul([x, x], [n, 2.5]),
        torch._foreach_add([x, x], [scale, x.size(0) + n]),
        x.clamp(n, n + x.size(0)),
        torch.full((2,), scale),
    )


@torch._dynamo.config.patch(specialize_float=False)
def test_computed_numbers(enabled: None) -> None:
    def make(size: int, n: int, scale: float) -> Inputs:
        return lambda: [torch.arange(float(size)), n, scale]

    g = torch.compile(computed_numbers, backend="trident", dynamic=True)
    for inputs in (make(4, 5, 0.5), make(5, 7, 1.5), make(6, -3, -0.25), make(9, 2**40, 1e30)):
        for _ in range(3):
            trident.reset_stats()
            assert_same(g(*inputs()), computed_numbers(*inputs()))
    assert hits("computed_numbers") == (1, 0), trident.explain(g)
    assert boxed("computed_numbers") == ()


def a_tuple_with_a_list(x: Any) -> Any:
    return torch.histogramdd(x, [2, 3])


def several_lists(x: Any, y: Any) -> Any:
    numbers = {"weight_decay": 0.1, "momentum": 0.5, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    return aten._fused_sgd([x, y], [y, x], [x.clone(), y.clone()], **numbers, **flags)


@pytest.mark.parametrize("f", [a_tuple_with_a_list, several_lists])
def test_boxed(enabled: None, f: Any) -> None:
    """A vector inside a tuple is unpacked by the dispatcher."""
    inputs = [torch.randn(4, 2), torch.randn(4, 2)][: f.__code__.co_argcount]
    assert_as_eager(f, lambda: [x.clone() for x in inputs])
    assert len(boxed(f.__name__)) == 1


# ---- what no graph contains ----

GENERATOR = torch.Generator()


def draws_from_a_global(x: Any) -> Any:
    return x * 2 + torch.rand(4, generator=GENERATOR)


def draws_in_place(x: Any) -> Any:
    return x.clone().normal_(generator=GENERATOR) + 1


def shares_a_storage(x: Any) -> Any:
    return aten.set_.source_Storage(torch.empty(0), x.untyped_storage()) + 1


def counts_whether_equal(x: Any) -> Any:
    return x + torch.equal(x, x) + torch.is_nonzero(x[0])


def returns_a_number_among_tensors(x: Any) -> Any:
    y = x.view(2, 2)
    return aten._batch_norm_impl_index(y, None, None, None, None, True, 0.1, 1e-5, False)[:2]


@pytest.mark.parametrize(
    ("f", "operator"),
    [
        (draws_from_a_global, "rand"),
        (draws_in_place, "normal"),
        (shares_a_storage, "set_"),
        (counts_whether_equal, "equal"),
        (returns_a_number_among_tensors, "_batch_norm_impl_index"),
    ],
)
def test_never_in_a_program(enabled: None, f: Any, operator: str) -> None:
    """Dynamo breaks the graph there, or the operator is left to stock; results are eager's, also
    the generator's state."""

    def calls(g: Any) -> list[Any]:
        GENERATOR.manual_seed(3)
        found = [g(torch.arange(1.0, 5.0)) for _ in range(4)]
        return [*found, GENERATOR.get_state()]

    expected = calls(f)
    g = torch.compile(f, backend="trident")
    assert_same(calls(g), expected)
    specs = [spec for frame in trident.explain(g).frames for spec in frame.specializations]
    assert specs
    assert not any(f'"aten.{operator}' in spec.ir.get("scm", "") for spec in specs)


def records_a_stream(x: Any) -> Any:
    x.record_stream(torch.Stream("cpu"))
    return x + 1


def test_streams(enabled: None) -> None:
    """Dynamo passes the number of a stream to an operator of its own."""
    g = torch.compile(records_a_stream, backend="trident")
    for _ in range(4):
        with pytest.raises(NotImplementedError, match="record_stream"):
            g(torch.ones(2))
    assert "host program: stock" in str(trident.explain(g))
