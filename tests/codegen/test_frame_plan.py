"""Symbolic evaluation of straight-line bytecode."""

from __future__ import annotations

import dis
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

import trident.codegen.frame_plan as frame_plan
from trident.codegen.frame_plan import (
    Argument,
    Constant,
    Container,
    GraphCall,
    analyze,
    framelocals_names,
)
from trident.errors import TridentError, UnsupportedPlan

ROOT = pathlib.Path(__file__).parents[2]


def show(code: CodeType) -> str:
    def text(expression: object) -> str:
        match expression:
            case Argument():
                return f"{'free ' if expression.is_free else ''}{expression.name}"
            case Constant():
                return repr(expression.value)
            case Container():
                start, end = {"tuple": "()", "list": "[]", "dict": "{}"}[expression.kind]
                return start + " ".join(text(item) for item in expression.items) + end
        raise AssertionError(expression)

    return text(analyze(code, framelocals_names(code)).result)


def closure(captured: Any) -> Callable[..., Any]:
    def inner(a):
        return a, captured

    return inner


def captures_argument(a):
    return a, lambda: a


def assigns(x):
    y = x
    x = 1
    return y, x


def shares(x):
    t = (x, 2)
    return t, t


def unpacks(x, y):
    y, x = x, y
    return x


def conditional(x, c):
    if c:
        y = x
    return y


def guarded(x):
    try:
        return x
    finally:
        x = None


async def coroutine(x):
    return x


def generator(x):
    yield x


def calls(x):
    return x()


def reads_global():
    return ROOT


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: None, "None"),
        (lambda x: x, "x"),
        (lambda x, y: (y, (x, "s"), None), "(y (x 's') None)"),
        (lambda *a, k=3, **kw: (a, k, kw), "(a k kw)"),
        (lambda x, /, y, *, z: (z, y, x), "(z y x)"),
        (lambda x: (), "()"),
        (lambda x: (1, 2), "(1, 2)"),
        (lambda x: [x, [1]], "[x [1]]"),
        (lambda x: {"a": x, 2: [x]}, "{'a' x 2 [x]}"),
        (assigns, "(x 1)"),
        (shares, "((x 2) (x 2))"),
        (unpacks, "y"),
        (closure(1), "(a free captured)"),
    ],
)
def test_result(function: Callable[..., Any], expected: str) -> None:
    assert show(function.__code__) == expected


def test_a_tuple_used_twice_is_one_tuple() -> None:
    result = analyze(shares.__code__, ("x", "t")).result
    assert isinstance(result, Container)
    assert result.items[0] is result.items[1]


def test_unused_loads_are_kept() -> None:
    # The interpreter would raise for an unbound one, so the plan must look at it too.
    code = unused_load().__code__
    assert [load.name for load in analyze(code, framelocals_names(code)).loaded] == ["captured"]


def unused_load() -> Callable[..., Any]:
    captured = 1

    def inner():
        x = captured  # noqa: F841

    return inner


def test_arguments_are_found_by_name_in_the_users_frame() -> None:
    plan = analyze((lambda y: y).__code__, ("x", "y"))
    assert isinstance(plan.result, Argument)
    assert plan.result.index == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (calls, r"calls \(.*test_frame_plan.py:\d+\): instruction (PRECALL|CALL|PUSH_NULL)"),
        (reads_global, "instruction LOAD_GLOBAL ROOT"),
        (conditional, "instruction (POP_JUMP|TO_BOOL)"),
        (guarded, "it handles exceptions"),
        (coroutine, "instruction RETURN_GENERATOR|handles exceptions"),
        (generator, "instruction RETURN_GENERATOR|handles exceptions"),
        (captures_argument, "instruction (MAKE_FUNCTION|LOAD_FAST)"),
        (lambda x: {x: 1}, "a key is no plain constant"),
        (lambda x: x[0], "instruction BINARY_SUBSCR"),
        (lambda x: x + 1, r"instruction BINARY_OP \+"),
        (lambda x: x.y, "instruction LOAD_ATTR y"),
    ],
)
def test_invalid(function: Callable[..., Any], message: str) -> None:
    code = function.__code__
    with pytest.raises(UnsupportedPlan, match=message):
        analyze(code, framelocals_names(code))


def test_invalid_unknown_local() -> None:
    with pytest.raises(UnsupportedPlan, match="'x' is not a local of the user's frame"):
        analyze((lambda x: x).__code__, ("y",))


def test_invalid_unbound_local() -> None:
    # return y, with y a plain local that nothing assigns
    code = (lambda x: x).__code__
    load = bytes([dis.opmap["LOAD_FAST"], 1])
    code = code.replace(
        co_nlocals=2,
        co_varnames=("x", "y"),
        co_code=code.co_code.replace(bytes([dis.opmap["LOAD_FAST"], 0]), load),
    )
    with pytest.raises(UnsupportedPlan, match="'y' may be unbound"):
        analyze(code, framelocals_names(code))


def test_invalid_duplicate_rule() -> None:
    with pytest.raises(TridentError, match="two rules for POP_TOP: lines"):
        frame_plan._rule("POP_TOP")(lambda frame, instruction: None)


@pytest.mark.parametrize(
    "function", [assigns, closure(1), captures_argument, generator, test_result, lambda *a, **k: 0]
)
def test_framelocals_names_are_the_interpreters(function: Callable[..., Any]) -> None:
    code = function.__code__
    names = framelocals_names(code)
    assert names == tuple(code._varname_from_oparg(i) for i in range(len(names)))
    eval_frame = pytest.importorskip("torch._C._dynamo.eval_frame")
    assert names == tuple(eval_frame.code_framelocals_names(code))


OTHER_PYTHONS = [
    path
    for version in ("3.11", "3.12", "3.13")
    for path in sorted(pathlib.Path("/root/.pyenv/versions").glob(f"{version}.*/bin/python"))
]

SCRIPT = """
import sys, types
package = types.ModuleType("trident")
package.__path__ = [sys.argv[1]]
sys.modules["trident"] = package
from trident.codegen.frame_plan import *
from trident.codegen.frame_plan import UnsupportedPlan

def text(e):
    if isinstance(e, Argument):
        return e.name
    return repr(e.value) if isinstance(e, Constant) else tuple(text(i) for i in e.items)

def show(f):
    code = f.__code__
    names = framelocals_names(code)
    assert names == tuple(code._varname_from_oparg(i) for i in range(len(names))), names
    try:
        return text(analyze(code, names).result)
    except UnsupportedPlan as error:
        return str(error).split(": ", 1)[1].split()[1]

def local(x, y):
    a = x
    b = y
    return b, a, a

def free():
    c = 1
    def inner(a): return a, c
    return inner

def cell(a):
    def inner(): return a
    return a

def maybe(x):
    if x: y = 1
    return y

def gone(x):
    y = x
    del y
    return x

def pair(x, y):
    x, y = y, x
    return x, y

assert show(lambda: None) == "None"
assert show(lambda x, y: (x, y, (y, 1, "s"), x)) == ("x", "y", ("y", "1", "'s'"), "x")
assert show(local) == ("y", "x", "x")
assert show(free()) == ("a", "c")
assert show(lambda x: x()) in ("PRECALL", "PUSH_NULL", "CALL"), show(lambda x: x())
assert show(cell) in ("MAKE_FUNCTION", "LOAD_FAST"), show(cell)
assert show(maybe) in ("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_IF_FALSE", "TO_BOOL"), show(maybe)
assert show(gone) == "x", show(gone)
assert show(pair) in ("SWAP", ("y", "x")), show(pair)
assert show(lambda x: [y for y in x]) not in ((), None)
assert "torch" not in sys.modules and "torch_mlir" not in sys.modules
print("ok", sys.version_info[:2])
"""


@pytest.mark.parametrize("python", OTHER_PYTHONS, ids=lambda path: path.parts[-3])
def test_under_other_interpreters_without_torch(python: pathlib.Path) -> None:
    done = subprocess.run(
        [python, "-c", SCRIPT, ROOT / "trident"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok")


assert sys.version_info >= (3, 11)


class _OneGraph:
    """Globals of which one is a graph."""

    def graph(self, name: str) -> Any:
        return len if name == "graph" else None

    def helpers(self, name: str) -> Any:
        return None

    def value(self, name: str) -> Any:
        return None

    def is_profiling(self, function: Any) -> bool:
        return False

    def property_step(self, function: Any) -> str | None:
        return None

    def is_helper(self, function: Any) -> bool:
        return False


def filled(x, outputs):
    (out,) = graph(x)  # noqa: F821
    for key, value in {"a": out, "b": x}.items():
        put(outputs, key, value)  # noqa: F821
    return outputs


def filled_from_another(x, outputs):
    (out,) = graph(x)  # noqa: F821
    for key, value in outputs.items():
        put(out, key, value)  # noqa: F821
    return outputs


def filled_twice(x, outputs):
    (out,) = graph(x)  # noqa: F821
    for key, value in {"a": out, "a": x}.items():  # noqa: F601
        put(outputs, key, value)  # noqa: F821
    return outputs


def filled_in_part(x, outputs):
    (out,) = graph(x)  # noqa: F821
    for key, value in {"a": out, "b": x}.items():
        if value:
            put(outputs, key, value)  # noqa: F821
    return outputs


def filled_by_itself(x, outputs):
    (out,) = graph(x)  # noqa: F821
    new = {"a": out, "b": x}
    for key, value in new.items():
        put(new, key, value)  # noqa: F821
    return outputs


def test_a_loop_over_a_new_dict_is_unrolled() -> None:
    """As Dynamo fills a dict of a class of the user's (the outputs of transformers)."""
    code = filled.__code__
    plan = analyze(code, framelocals_names(code), _OneGraph())  # type: ignore[arg-type]
    calls = [step.values[1:] for step in plan.steps[1:] if step.kind == "call"][1:]
    assert [(o.name, key.value) for o, key, _ in calls] == [("outputs", "a"), ("outputs", "b")]
    assert calls[1][2].name == "x"


@pytest.mark.parametrize("f", [filled_from_another, filled_twice, filled_in_part, filled_by_itself])
def test_other_loops_are_not(f: Any) -> None:
    with pytest.raises(UnsupportedPlan, match="GET_ITER"):
        analyze(f.__code__, framelocals_names(f.__code__), _OneGraph())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "place",
    [
        (7, 7, 4, 9),
        (3, 6, 0, 200),  # before the first line, over lines
        (900, 900, 1, 70),
        (7, 7, None, None),  # under -X no_debug_ranges
        (None, None, None, None),
    ],
)
def test_a_step_is_where_its_instruction_is(place: tuple[int | None, ...]) -> None:
    (call,) = (i for i in dis.get_instructions(_calling) if i.opname == "CALL")
    n = 2 * len(_calling.__code__.co_code)  # more than one entry
    table = frame_plan._line_table(5, call._replace(positions=dis.Positions(*place)), n // 2)
    code = _calling.__code__.replace(co_firstlineno=5, co_linetable=table)
    assert {*code.co_positions()} == {place}


def _calling(x: Any) -> Any:
    return repr(x)


def broken(x, other):
    (out,) = graph(x)  # noqa: F821
    kept = [[out, other], x]
    rest = kept[0][0:2]
    kept[0][0:1] = [call(out)]  # noqa: F821
    kept[1] = rest[1]
    del rest[-1]
    return kept, rest


def test_what_a_break_leaves_on_the_stack_is_known() -> None:
    code = broken.__code__
    plan = analyze(code, framelocals_names(code), _OneGraph())  # type: ignore[arg-type]
    graph_call, _, called = plan.steps
    kept, rest = plan.result.items  # type: ignore[union-attr]
    assert [step.kind for step in plan.steps[1:]] == ["get_global", "call"]
    assert kept.items[0].items[0] is called
    assert kept.items[1].name == kept.items[0].items[1].name == "other"
    assert [(item.call, item.index) for item in rest.items] == [(graph_call, 0)]


def read_after_use(x, other):
    (out,) = graph(x)  # noqa: F821
    items = [out, other]
    call(items)  # noqa: F821
    return items[0]


def splatted_after_use(x, other):
    (out,) = graph(x)  # noqa: F821
    items = [out, other]
    call(items)  # noqa: F821
    return call(*items)  # noqa: F821


def extended_after_use(x, other):
    (out,) = graph(x)  # noqa: F821
    items = [out, other]
    call(items)  # noqa: F821
    return [x, *items]


def unpacked_after_use(x, other):
    (out,) = graph(x)  # noqa: F821
    items = [out, other]
    call(items)  # noqa: F821
    _, b = items
    return b


def stored_after_use(x, other):
    (out,) = graph(x)  # noqa: F821
    items, new = [out, other], [x]
    call(items)  # noqa: F821
    new[0:1] = items
    return new


def named_after_use(x, other):
    (out,) = graph(x)  # noqa: F821
    named = {"a": out}
    call(named)  # noqa: F821
    return call(other, **named)  # noqa: F821


@pytest.mark.parametrize(
    "f",
    [
        *(read_after_use, splatted_after_use, extended_after_use, unpacked_after_use),
        *(stored_after_use, named_after_use),
    ],
)
def test_what_is_in_a_container_that_others_have_is_not_known(f: Any) -> None:
    try:
        plan = analyze(f.__code__, framelocals_names(f.__code__), _OneGraph())  # type: ignore[arg-type]
    except UnsupportedPlan:
        return
    last = plan.steps[-1]
    assert not isinstance(last, GraphCall)
    assert isinstance(last.values[-1], Container), "it is read when it is used"
