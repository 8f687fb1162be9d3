"""Shape guards as steps decide what Dynamo's Python function decides, or leave it to that."""

from __future__ import annotations

import colorsys  # noqa: F401  (for a guard to look at)
import dataclasses
import itertools
import math
import random
import sys
import types
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo import guards, mark_dynamic

from tests.codegen.golden import check_golden
from tests.codegen.trees import NAMES, imported, leaf, tree
from trident import capture
from trident.capture.tree import Specialization
from trident.codegen.import_shapes import shape_program
from trident.codegen.lower_guards import GuardTable, lower_guards
from trident.codegen.pipeline import build

_frame = pytest.importorskip("trident._frame")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def written(*conditions: str) -> tuple[Any, str]:
    """The function that Dynamo writes for `conditions`, and its source."""
    closure = {**guards.SYMPY_INTERP, **guards._get_closure_vars()}
    source = guards.build_guard_function(list(conditions), ", ".join(closure))[1]
    made: dict[str, Any] = {}
    exec(source, {"G": {"g": 3, "table": {"n": [4, 5]}}}, made)
    return made["___make_guard_fn"](*closure.values()), source


class Checked:
    """A lambda and its steps; `calls` counts how often the steps left it to the lambda."""

    def __init__(self, function: Any, source: str, names: tuple[str, ...] = NAMES) -> None:
        self.function, self.calls, self.names = function, 0, names
        guard = leaf("LAMBDA_GUARD", "shapes", fn=function, source=source)
        table = lower_guards(imported(tree(epilogue=[guard])))
        assert [row.op for row in table.rows][-1] == "check_shapes"
        self.native = native_of(table, self)

    def __call__(self, scope: dict[str, Any]) -> bool:
        self.calls += 1
        return self.function(scope)

    def agrees(self, /, **scope: Any) -> bool:
        """The verdict of the steps, which must be the lambda's."""
        verdict = self.native.check(tuple(scope.get(name, NotImplemented) for name in self.names))
        assert verdict == truth(self.function, scope), scope
        return verdict


def native_of(table: GuardTable, instead: Any) -> Any:
    """The table as a native program, that calls `instead` where it would call Dynamo's function."""
    rows = [
        row._replace(obj=(instead or row.obj[0], *row.obj[1:])) if row.op == "check_shapes" else row
        for row in table.rows
    ]
    native = _frame.NativeSpecialization(table.framelocals)
    native.set_guards(rows, table.n_registers)
    return native


def truth(function: Any, scope: dict[str, Any]) -> bool:
    """As Dynamo takes it: what raises does not hold."""
    try:
        return bool(function(scope))
    except Exception:
        return False


class Int(int):
    """An int whose comparisons are its own."""

    def __lt__(self, other: object) -> bool:
        return True

    def __gt__(self, other: object) -> bool:
        return True


INTS = (0, 1, -1, 2, 3, -3, 7, -8, 64, 2**31, 2**53, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**63)
FLOATS = (0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e300, -7.25, math.inf, -math.inf, math.nan)
OTHERS = (True, False, Int(5), "3", None, np.float64(1.5), np.int64(2), 2**100)
VALUES: tuple[Any, ...] = (*INTS, *FLOATS, 2.0**53, 2.0**63, *OTHERS)
A, B = "L['x']", "L['y']"
BINARY = [
    *(
        f"{A} {op} {B} {test}"
        for op in ("+", "-", "*", "/", "//", "%")
        for test in ("== 1", "> 0", "< 2.5")
    ),
    *(f"{A} {op} {B}" for op in ("<", "<=", ">", ">=", "==", "!=")),
    *(f"{A} {op} {B} > 2" for op in ("&", "|", "^", "<<", ">>")),
    *(f"{A} // {B} * {B} + {A} % {B} == {A}", f"-{A} % {B} != -1", f"{A} % {B} == 2"),
    *(f"max({A}, {B}) == {A}", f"min({A}, {B}, 3) == {B}", f"max({A}, {B}) / 2 > min({B}, {A})"),
    *(f"1 < {A} <= {B}", f"not {A} < {B}", f"{A} > 1 and {B} > 1", f"{A} > 1 or {B} > 1"),
    *(f"({A} > 1) == ({B} > 1)", f"{A} or {B}", f"not ({A} and not {B})"),
    *(f"1.0 / ({A} // {B}) > 0", f"{A} // {B} == -0.0", f"1 / math.floor({A} / {B}) > 0"),
]
UNARY = [
    *(f"-{A} < 3", f"abs({A}) == 3", f"abs({A}) > 2.4"),
    *(f"math.{f}({A}) == 2" for f in ("floor", "ceil", "trunc")),
    *(f"math.{f}({A}) > -3" for f in ("floor", "ceil", "trunc")),
    *(f"round({A}) == 2", f"round({A}) <= -2", f"not math.isnan({A})"),
    *(f"torch.sym_float({A}) > 2.4", f"torch._sym_sqrt(torch.sym_float({A})) > 1.2"),
    *(f"math.sqrt({A}) < 2", f"float({A}) == 9007199254740992.0"),
    *(f"{A} ** {n} > 0.9" for n in (1, 2, 3, 0.5, 2.0)),
    *(f"2 ** {A} > 7", f"1.5 ** {A} > 7", f"(-2) ** {A} > 3", f"{A} * {A} * {A} > 2**62"),
    *(f"{A} < math.inf", f"{A} > -inf", f"{A} != {2**63 - 1}", f"{A} >= {-(2**63)}"),
    *(f"{A} == G['g']", f"{A} < G['table']['n'][1]"),
]


# Python would compute these exactly, however long it takes.
SMALL = [value for value in VALUES if not (isinstance(value, int) and abs(value) > 64)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("condition", BINARY)
def test_operators_of_two(condition: str) -> None:
    checked = Checked(*written(condition))
    values = SMALL if "<<" in condition or "* L" in condition else VALUES
    for x, y in itertools.product(values, values):
        checked.agrees(x=x, y=y)
    assert checked.calls < 0.95 * len(values) ** 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("condition", UNARY)
def test_operators_of_one(condition: str) -> None:
    checked = Checked(*written(condition))
    values = SMALL if f"** {A}" in condition else VALUES
    assert {checked.agrees(x=x) for x in values} == {True, False}
    assert checked.calls < 0.9 * len(values)


def test_plain_numbers_need_no_python() -> None:
    checked = Checked(*written(f"{A} // {B} > 2", f"{A} % 3 == 1 and {A} * 0.5 < 1e6"))
    for x, y in itertools.product((-70, 10, 40, 2**40, True), (-9, -1, 1, 2.5, 13)):
        checked.agrees(x=x, y=y)
    assert checked.calls == 0


def test_the_first_condition_that_fails_decides() -> None:
    checked = Checked(*written(f"{A} > 0", f"{B} // {A} > 0", f"{A} < 5 or {B} % ({A} - 7) == 0"))
    assert not checked.agrees(x=0, y=1)
    assert checked.agrees(x=1, y=1)
    assert checked.calls == 0
    assert not checked.agrees(x=7, y=7)  # ZeroDivisionError
    assert checked.calls == 1


def test_tensors() -> None:
    conditions = (f"{A}.size()[0] >= 2", f"{A}.size()[1] * 2 == {A}.stride()[0] * 2")
    checked = Checked(*written(*conditions, f"{A}.storage_offset() % 2 == 0"))
    base = torch.ones(8, 4)
    assert checked.agrees(x=base)
    assert not checked.agrees(x=base.t())
    assert not checked.agrees(x=base[:1])
    assert checked.agrees(x=torch.nn.Parameter(base))
    assert checked.agrees(x=base.view(-1)[2:10].view(2, 4))
    assert not checked.agrees(x=base.view(-1)[3:11].view(2, 4))
    assert checked.calls == 0


def test_tensors_that_are_left_to_python() -> None:
    class Own(torch.Tensor):
        def size(self) -> Any:  # type: ignore[override]
            return (9, 9)

    class Attributes(torch.Tensor):
        def __getattribute__(self, name: str) -> Any:
            return (lambda: (9, 9)) if name == "size" else super().__getattribute__(name)

    checked = Checked(*written(f"{A}.size()[1] == 9"))
    shadowed = torch.ones(2, 3)
    shadowed.size = lambda: (9, 9)  # type: ignore[method-assign,assignment]
    other = type("Other", (), {"size": torch.Tensor.size})()
    for x in (torch.ones(2), torch.ones(2, 3).to_sparse(), 5, None, other, shadowed):
        checked.agrees(x=x)
    with torch._C.DisableTorchFunctionSubclass():
        for kind in (Own, Attributes):
            assert checked.agrees(x=torch.ones(2, 3).as_subclass(kind))
    assert checked.calls == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "size", lambda self: (9, 9), raising=False)
        assert checked.agrees(x=torch.ones(2, 3))
    assert not checked.agrees(x=torch.ones(2, 3))
    assert checked.calls == 9


def test_names_that_mean_something_else_now(monkeypatch: pytest.MonkeyPatch) -> None:
    for condition, owner, name in (
        (f"max({A}, 2) == 5", "builtins", "max"),
        (f"math.floor({A}) == 5", math, "floor"),
        (f"torch.sym_float({A}) == 5", torch, "sym_float"),
    ):
        checked = Checked(*written(condition))
        assert not checked.agrees(x=3)
        where = __import__("builtins") if owner == "builtins" else owner
        monkeypatch.setattr(where, name, lambda *args: 5)
        assert checked.agrees(x=3)
        assert checked.calls == 1
        monkeypatch.undo()


def test_attributes_and_items() -> None:
    class Config:
        def __init__(self, n: Any) -> None:
            self.n, self.sizes = n, {"a": [1, n]}

        @property
        def twice(self) -> Any:
            return self.n * 2

    checked = Checked(*written(f"{A}.n > 2", f"{A}.sizes['a'][1] % 2 == 0", f"{A}.twice < 20"))
    verdicts = [checked.agrees(x=Config(n)) for n in (1, 4, 5, 12, 2.5, "a")]
    assert verdicts == [False, True, False, False, False, False]
    assert not checked.agrees(x=None)
    assert not checked.agrees()


def test_aliases() -> None:
    checked = Checked(*written(f"{A} is {B}", "L['self'][0] is not L['x']"))
    a, b = torch.ones(1), torch.ones(1)
    assert checked.agrees(x=a, y=a, self=[b])
    assert not checked.agrees(x=a, y=b, self=[b])
    assert not checked.agrees(x=a, y=a, self=[a])
    assert not checked.agrees(x=a, y=a, self=[])
    assert checked.calls == 0


@pytest.mark.parametrize(
    "condition",
    [
        f"{A}.count(1) == 1",
        f"len({A}) == 2",
        f"{A}[{B}] == 1",
        f"{A}.size()[-1] == 1",
        f"{A}.size(0) == 1",
        f"{A} == 'text'",
        f"{A} is None",
        f"{A} @ {B} == 1",
        f"~{A} == 1",  # warns for a bool
        f"math.cos({A}) < 1",
        f"[n for n in {A}] == []",
        f"{A} == {2**64}",
        f"(lambda: {A})() == 1",
        f"torch.numel({A}) == 1",
        f"___tuple_iterator_len({A}) == 1",
        f"(1 if {A} else 2) == 1",
        f"round({A}, 2) == 1",
        "L == 1",
    ],
)
def test_what_is_not_known_stays_a_call(condition: str) -> None:
    function, source = written(condition)
    assert shape_program(function, source) is None
    guard = leaf("LAMBDA_GUARD", "shapes", fn=function, source=source)
    rows = lower_guards(imported(tree(epilogue=[guard]))).rows
    assert [row.op for row in rows] == ["check_lambda_locals"]


def test_a_source_that_is_not_the_functions() -> None:
    function, source = written(f"{A} > 2")
    assert shape_program(function, source) is not None
    assert shape_program(function, source.replace("> 2", "> 3")) is None
    assert shape_program(function, "def guard(") is None
    assert shape_program(function, None) is None
    assert shape_program(len, source) is None


def test_steps_are_shown() -> None:
    function, source = written(f"{A}.size()[0] % 4 == 0")
    guard = leaf("LAMBDA_GUARD", "shapes", fn=function, source=source)
    program = imported(tree(epilogue=[guard]))
    check_golden(
        program.text(),
        r"""
    module {
      "scm.specialization"() ({
        %0 = "scm.local"() {index = 1 : i64, label = 0 : i64} : () -> !scm.object  // shapes
        "scm.check_shapes"(%0) {label = 0 : i64, object = 0 : i64} : (!scm.object) -> ()  // #0 = v0 = size 0 0; v1 = integer 4 0; v2 = modulo 0 1; v3 = integer 0 0; v4 = equal 2 3; v5 = require 4 0 | shapes
        "scm.pass"() : () -> ()
      }, {
        "scm.run_code"() {reason = "a test of guards"} : () -> ()
      }) {code = "frame", framelocals = ["self", "x", "y"]} : () -> ()
    }
    """,  # noqa: E501
    )


MALFORMED = [
    None,
    (len, (), ()),
    (len, (1,), (), ()),
    (len, (0,), (("nonsense", 0, 0),), ()),
    (len, (0,), (("object", 1, 0),), ()),
    (len, (0,), (("size", 0, -1),), ()),
    (len, (0,), (("add", 0, 0),), ()),
    (len, (0,), (("object", 0, 0), ("add", 0, 1)), ()),
    (len, (0,), (("integer", 2**63, 0),), ()),
    (len, (0,), (("integer", 1.0, 0),), ()),
    (len, (0,), (("real", 1, 0),), ()),
    (len, (0,), (("require", 0, 0),), ()),
    (len, (), (("integer", 1, 0),) * 3000, ()),
    (len, (), (), ((1, "a", None),)),
]


@pytest.mark.parametrize("payload", MALFORMED)
def test_malformed_programs_are_rejected(payload: Any) -> None:
    from trident.codegen.lower_guards import Row

    native = _frame.NativeSpecialization(NAMES)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        native.set_guards([Row("check_shapes", -1, -1, 0, 0, payload, 0)], 1)


# Real functions: compiled with dynamic shapes, then called in random environments.


def products(x: Any, y: Any) -> Any:
    return x + 1 if x.shape[0] * y.shape[1] > 20 and (x.shape[0] + y.shape[0]) % 2 == 0 else x


def divisible(x: Any, y: Any) -> Any:
    return x.view(2, -1).sum() if x.shape[0] // 3 < y.shape[1] else x.t() + 1


def numbers(x: Any, n: Any, s: Any) -> Any:
    if (n * 2 - 3 > x.shape[0] and s * x.shape[1] > 2.5) or n // 4 == x.shape[1] % 3:
        return x * n * s
    return x + n


def scaled(x: Any, s: Any) -> Any:
    k = int(x.shape[0] * s)
    return x[:k] if k > 3 else x + round(s * 2)


def config(x: Any, c: Any) -> Any:
    if c["a"][0] // 3 > x.shape[0] or -c["a"][1] % 5 == 1:
        return x + c["a"][0]
    return x * c["a"][1] + abs(c["a"][1] - 7)


def extremes(x: Any, n: Any, m: Any) -> Any:
    if max(x.shape[0], n) % 3 == min(m, 5) or n**2 > x.shape[1] or (n + 1) / 2 > m:
        return x + 1
    return x - 1


def joined(x: Any, y: Any) -> Any:
    return torch.cat([x, y]).view(-1, 2) + x.transpose(0, 1).contiguous().sum()


def bounded(x: Any, y: Any) -> Any:
    return x.sum() + y.sum()


def tensors(rng: random.Random) -> torch.Tensor:
    rows, columns = rng.choice((0, 1, 2, 3, 4, 6, 8, 9, 16)), rng.choice((0, 1, 2, 3, 4, 6, 7))
    made = torch.empty(rows * 2 + 2, columns * 2)
    return rng.choice((made[:rows, :columns].clone(), made[:rows, :columns], made.t(), made))


def integers(rng: random.Random) -> Any:
    some = (rng.randint(-40, 40), rng.randint(2, 20), rng.randint(-(2**63), 2**63 - 1), 2**64)
    return rng.choices((*some, True, 3.5), (6, 12, 1, 1, 1, 1))[0]


def floats(rng: random.Random) -> Any:
    some = (rng.uniform(-3, 3), rng.uniform(0, 2), math.nan, math.inf, 2, 1e300, 0.5)
    return rng.choices(some, (6, 12, 1, 1, 1, 1, 2))[0]


def nested(rng: random.Random) -> Any:
    return {"a": [integers(rng), integers(rng)]}


Made = Callable[[random.Random], Any]
ones = torch.ones
FUNCTIONS: list[tuple[Any, tuple[Made, ...], list[tuple[Any, ...]]]] = [
    (products, (tensors, tensors), [(ones(8, 3), ones(4, 7)), (ones(5, 3), ones(9, 6))]),
    (divisible, (tensors, tensors), [(ones(8, 6), ones(4, 7))]),
    (numbers, (tensors, integers, floats), [(ones(8, 6), 9, 1.5), (ones(4, 3), 4, 0.1)]),
    (scaled, (tensors, floats), [(ones(16, 3), 0.5), (ones(4, 3), 0.25)]),
    (config, (tensors, nested), [(ones(3, 4), {"a": [17, 2]}), (ones(9, 4), {"a": [3, 9]})]),
    (extremes, (tensors, integers, integers), [(ones(4, 3), 9, 4), (ones(9, 3), -5, 7)]),
    (joined, (tensors, tensors), [(ones(4, 6), ones(3, 6))]),
]


def compiled(function: Any, args: tuple[Any, ...], **options: Any) -> Specialization:
    torch._dynamo.reset()
    torch.compile(function, backend="eager", **options)(*args)
    [specialization] = capture.specializations_of(function.__code__)
    return specialization


def environments(
    specialization: Specialization, makers: tuple[Made, ...], args: tuple[Any, ...], n: int
) -> tuple[int, int, int]:
    """Compares `n` verdicts; returns how many held, and how often Dynamo's function was called."""
    built = build(specialization)
    assert built.table is not None, built.guards_reason
    function = next(row.obj[0] for row in reversed(built.table.rows) if row.op == "check_shapes")
    calls = 0

    def counted(scope: dict[str, Any]) -> bool:
        nonlocal calls
        calls += 1
        return function(scope)

    names, rng, held = built.table.framelocals, random.Random(5), 0
    native, shapes = native_of(built.table, None), native_of(alone(built.table), counted)
    more = (NotImplemented,) * (len(names) - len(makers))
    for i in range(n):
        # Every third one is close to what was compiled, so that other guards pass.
        values = [maker(rng) for maker in makers]
        if i % 3 == 0:
            values[0] = torch.empty(rng.randint(1, 12), args[0].shape[1])
        scope = dict(zip(names, values, strict=False))
        verdict = native.check((*values, *more))
        assert verdict == capture.dynamo.guard_check(specialization, scope), scope
        assert shapes.check((*values, *more)) == truth(function, scope), scope
        held += verdict
    return held, calls, n


def alone(table: GuardTable) -> GuardTable:
    """The last shape guards without all others."""
    first = len(table.rows) - 1
    while table.rows[first - 1].dst >= 0:
        first -= 1
    return dataclasses.replace(table, rows=table.rows[first:])


@pytest.mark.parametrize("entry", FUNCTIONS, ids=lambda entry: entry[0].__name__)
def test_random_environments(entry: Any) -> None:
    function, makers, examples = entry
    for args in examples:
        specialization = compiled(function, args, dynamic=True)
        source = specialization.tree.root.epilogue[-1].payload["source"]
        if "= ___as_tensor(" in source:
            pytest.skip("this release makes a tensor of a float: not native")
        held, calls, n = environments(specialization, makers, args, 600)
        assert held > 0
        assert calls < n / 10  # the rest was decided natively


def test_marked_dimensions() -> None:
    x, y = torch.ones(8, 3), torch.ones(4, 3)
    mark_dynamic(x, 0, min=3, max=12)
    mark_dynamic(y, 0, min=2, max=100)
    specialization = compiled(bounded, (x, y))
    _, calls, _ = environments(specialization, (tensors, tensors), (x, y), 600)
    assert calls == 0


def test_modules_that_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is what is there at each call, whatever was there when the guards were built."""
    checked = Checked(*written(f"{A} is __import__('colorsys')", f"{A}.pi == 3"))
    one, other = types.ModuleType("colorsys"), types.ModuleType("colorsys")
    one.pi = other.pi = 3  # type: ignore[attr-defined]
    for module in (one, other):
        monkeypatch.setitem(sys.modules, "colorsys", module)
        assert [checked.agrees(x=x) for x in (one, other, math)].count(True) == 1
    assert checked.calls == 0
    monkeypatch.delitem(sys.modules, "colorsys")
    assert not checked.agrees(x=one)


def test_aliases_of_a_real_function() -> None:
    x, y = torch.ones(8, 3), torch.ones(8, 3)
    specialization = compiled(products, (x, x), dynamic=True)
    table = build(specialization).table
    assert table is not None
    assert "check_lambda_locals" not in table.counts()
    native = native_of(table, None)
    for pair in ((x, x), (y, y), (x, y), (x, torch.ones(3, 3)), (x, None)):
        scope = dict(zip(table.framelocals, pair, strict=True))
        assert native.check(pair) == capture.dynamo.guard_check(specialization, scope)
    assert native.check((y, y))
    assert not native.check((x, y))


def test_recorded_sources_are_believed() -> None:
    specialization = compiled(products, (torch.ones(8, 3), torch.ones(4, 7)), dynamic=True)
    [shapes] = specialization.tree.root.epilogue
    assert type(shapes.payload["fn"]) is FunctionType
    assert shape_program(shapes.payload["fn"], shapes.payload["source"]) is not None


def test_what_was_fetched_outlives_a_call_of_the_function() -> None:
    """The row and Dynamo's function run a property that drops what an earlier row fetched."""

    class Holder:
        @property
        def n(self) -> Any:
            kept.clear()
            return 2**64

    kept = [[torch.ones(2)]]
    alive = weakref.ref(kept[0][0])
    function, source = written(f"{A}[0][0].size()[0] == 2", f"{B}.n > 2")
    checked = Checked(function, source)
    # The function is called, as 2**64 is no 64-bit int, and finds no item any more.
    assert checked.native.check((NotImplemented, kept, Holder())) is False
    assert checked.calls == 1
    assert alive() is None
    assert truth(function, {"x": [[torch.ones(2)]], "y": Holder()})
