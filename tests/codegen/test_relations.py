"""Guards over several values: shared memory, and Dynamo's shape guards in C++."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch

from tests.codegen.trees import imported, leaf, local, node, tree
from trident import capture
from trident.capture import dynamo
from trident.capture.tree import Specialization
from trident.codegen.lower_guards import Row, lower_guards
from trident.codegen.pipeline import build

_frame = pytest.importorskip("trident._frame")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(function: Any, *args: Any, **options: Any) -> Specialization:
    torch.compile(function, backend="aot_eager", **options)(*args)
    [specialization] = capture.specializations_of(function.__code__)
    return specialization


class Pair:
    """Our verdict, which must be Dynamo's."""

    def __init__(self, specialization: Specialization, op: str) -> None:
        table = build(specialization).table
        assert table is not None
        assert op in table.counts()
        self.specialization, self.names = specialization, table.framelocals
        self.native = _frame.NativeSpecialization(table.framelocals)
        self.native.set_guards(table.rows, table.n_registers)

    def agrees(self, *values: Any) -> bool:
        scope = dict(zip(self.names, values, strict=False))
        more = (NotImplemented,) * (len(self.names) - len(values))
        verdict = self.native.check((*values, *more))
        assert verdict == capture.dynamo.guard_check(self.specialization, scope), scope
        return verdict


def two(p: torch.Tensor, q: torch.Tensor) -> Any:
    p.add_(1)
    return q * 2


def three(p: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> Any:
    p.add_(1)
    return q * 2 + r


def views(rng: random.Random, base: torch.Tensor) -> torch.Tensor:
    """A view of 3x2 elements."""
    start, stride = rng.randint(0, 12), rng.choice((2, 2, 3, 4, 8))
    return base.as_strided((3, 2), (stride, 1), start)


def test_overlap_of_two() -> None:
    base = torch.zeros(64)
    pair = Pair(compiled(two, base[:8], base[4:12], dynamic=True), "check_overlap")
    assert pair.agrees(base[:8], base[7:15])
    assert not pair.agrees(base[:8], base[8:16])
    assert not pair.agrees(base[:8], 5)
    verdicts = {pair.agrees(base[a : a + 8], base[b : b + 8]) for a in range(20) for b in range(20)}
    assert verdicts == {True, False}


def test_overlap_of_three() -> None:
    base, rng = torch.zeros(64), random.Random(7)
    # The first two share memory, the third shares none, though it is of the same storage.
    examples = [base.as_strided((3, 2), (8, 1), start) for start in (0, 1, 30)]
    pair = Pair(compiled(three, *examples, dynamic=True), "check_overlap")
    verdicts = [pair.agrees(*(views(rng, base) for _ in range(3))) for _ in range(2_000)]
    far = [pair.agrees(*(views(rng, base) for _ in range(2)), examples[2]) for _ in range(500)]
    assert True in far
    assert False in verdicts


def test_shapes_in_cpp() -> None:
    def function(x: Any, y: Any, n: Any) -> Any:
        if x.shape[0] * y.shape[1] > n * 3 and x.shape[1] // 2 != n % 5:
            return x.sum() + y.sum() + n
        return x * n

    rng = random.Random(3)
    with torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=True):
        specialization = compiled(function, torch.ones(8, 3), torch.ones(4, 7), 6, dynamic=True)
    kinds = {leaf.kind for leaf in specialization.tree.leaves()}
    if "SYMBOLIC_SHAPE_GUARD" not in kinds:
        pytest.skip("no C++ compiler")
    pair = Pair(specialization, "check_symbolic_shapes")
    assert pair.agrees(torch.ones(8, 3), torch.ones(4, 7), 6)
    verdicts = set()
    for _ in range(1_500):
        x, y = (torch.empty(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(2))
        n = rng.choice((rng.randint(-5, 30), rng.randint(-(2**40), 2**40), True, 2.5, "6"))
        verdicts.add(pair.agrees(x, y, n))
    assert verdicts == {True, False}


def test_an_int_beyond_64_bits_is_a_miss() -> None:
    library, seen = object(), []
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int8, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_double)
    )

    @kind
    def accepts(ints: Any, floats: Any) -> int:
        seen.append((ints[0], floats[0]))
        return 1

    address = ctypes.cast(accepts, ctypes.c_void_p).value
    numbers = {"n_int": 1, "n_float": 1, "address": address, "library": library}
    shapes = [
        leaf("SYMBOLIC_SHAPE_GUARD", "shapes", relation=library, position=i, **numbers)
        for i in range(2)
    ]
    guards = tree(
        local("y", node("indexed_manager", 1, "(1, y)", shapes[1])),
        local("x", node("indexed_manager", 0, "(0, x)", shapes[0])),
    )
    table = lower_guards(imported(guards))
    assert [row.op for row in table.rows] == ["local", "local", "check_symbolic_shapes"]
    assert "b=@" in table.text()
    native = _frame.NativeSpecialization(table.framelocals)
    native.set_guards(table.rows, table.n_registers)
    assert native.check((None, 5, 1.5))
    assert native.check((None, -(2**63), 0.0))
    assert not native.check((None, 2**63, 1.5))
    assert not native.check((None, 5.0, 1.5))
    assert not native.check((None, 5, 1))
    assert not native.check((None, None, None))
    assert seen == [(5, 1.5), (-(2**63), 0.0)]


def test_overlapping_tensors_come_first() -> None:
    relation = object()
    first = leaf("STORAGE_OVERLAPPING", "overlap", relation=relation, overlapping=False)
    second = leaf("STORAGE_OVERLAPPING", "overlap", relation=relation, overlapping=True)
    table = lower_guards(imported(tree(local("x", first), local("y", second))))
    assert table.rows[-1][:6] == (
        *("check_overlap", -1, -1, 1, 0),
        ((1, 0), dynamo.overlapping_tensors()),
    )


@pytest.mark.parametrize("payload", [None, 5, ((1,), len), ((-1,), len), (("a",), len), ((),)])
@pytest.mark.parametrize("op", ["check_overlap", "check_symbolic_shapes"])
def test_malformed_relations_are_rejected(op: str, payload: Any) -> None:
    native = _frame.NativeSpecialization(("x",))
    with pytest.raises((ValueError, TypeError)):
        native.set_guards([Row(op, -1, -1, 0, 0, payload, 0)], 1)
