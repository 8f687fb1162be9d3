"""Dynamo's function of shape guards as one ``scm.check_shapes``: steps on numbers.

The function is a row of assignments and of ``if not (condition): return False`` over ``L``, the
frame's locals, and ``G``, the globals. What it reads becomes rows that do the same as Python does
(``getattr``, ``getitem``); sizes, strides and storage offsets, all arithmetic and all conditions
become steps (``runtime/shape_guards.cpp``), which know when they would differ from Python and then
let the function be called. The same holds for its guards on aliases (``a is b``).

Steps are computed whether or not Python's ``and`` and ``or`` would get there: they have no effects,
and one that raises in Python leaves the decision to the function. An expression that is not known
here leaves the whole function to a call, as do functions whose source was not recorded.
"""

from __future__ import annotations

import ast
import builtins
import math
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trident.capture import guard_source

if TYPE_CHECKING:
    from torch_mlir import ir

    from trident.codegen.import_guards import Context

Step = tuple[str, Any, int]
# How to come to an object: kind, the path that it starts from (-1: the frame), key.
Path = tuple[str, int, Any]
_RANGE = range(-(2**63), 2**63)
_MAX_STEPS = 2000


class Unknown(Exception):
    """An expression without native form."""


class ShapeProgram(NamedTuple):
    """Numbers and conditions in steps over `operands`, which are paths; `names` are dicts, keys and
    values (None: no such key) that the function's own names must still mean."""

    paths: list[Path]
    operands: list[int]
    steps: list[Step]
    names: list[tuple[dict[str, Any], str, Any]]

    def text(self) -> str:
        """The steps, a short line each."""
        lines = [f"v{n} = {name} {a} {b}" for n, (name, a, b) in enumerate(self.steps)]
        return "; ".join(lines)


# Values of expressions. A number is known by its step.
class _Number(NamedTuple):
    step: int


class _Object(NamedTuple):
    path: int


class _Method(NamedTuple):
    """A size, stride or storage_offset of an object that should be a tensor."""

    path: int
    name: str


class _Dims(NamedTuple):
    """What such a method returns."""

    path: int
    name: str


class _Function(NamedTuple):
    value: Any


_METHODS = ("size", "stride", "storage_offset")
_BINARY = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "modulo",
    ast.Pow: "power",
    ast.BitAnd: "bit_and",
    ast.BitOr: "bit_or",
    ast.BitXor: "bit_xor",
    ast.LShift: "shift_left",
    ast.RShift: "shift_right",
}
# Name of the step, and whether the operands change places.
_COMPARISONS = {
    ast.Lt: ("less", False),
    ast.LtE: ("less_equal", False),
    ast.Gt: ("less", True),
    ast.GtE: ("less_equal", True),
    ast.Eq: ("equal", False),
    ast.NotEq: ("not_equal", False),
}
# The functions that guards call, of which torch's are what they were when Trident was imported; all
# do with an exact int, bool or float what the step of that name does.
_FUNCTIONS: dict[Any, str] = {
    math.floor: "floor",
    math.ceil: "ceiling",
    math.trunc: "truncate",
    math.isnan: "is_nan",
    math.sqrt: "square_root",
    builtins.abs: "absolute",
    builtins.round: "round",
    builtins.float: "to_real",
    torch.sym_float: "to_real",
    torch.sym_sqrt: "square_root",  # also called torch._sym_sqrt
}
_FOLDS: dict[Any, str] = {builtins.max: "maximum", builtins.min: "minimum"}


def shape_program(function: Any, source: str | None) -> ShapeProgram | None:
    """What `function` decides, or None if that has no native form."""
    tree = None if source is None else guard_source.definition(function, source)
    if tree is None:
        return None
    try:
        return _Lowering(function).run(tree)
    except (Unknown, RecursionError):
        return None


class _Lowering:
    """One function. `variables` are its own, by name."""

    def __init__(self, function: FunctionType) -> None:
        self.cells = guard_source.cells(function)
        self.globals = function.__globals__
        untyped: Any = function  # typeshed's versions differ about __builtins__
        self.builtins = untyped.__builtins__
        self.variables: dict[str, Any] = {}
        self.program = ShapeProgram([], [], [], [])
        self._known: dict[Any, int] = {}

    def run(self, tree: ast.FunctionDef) -> ShapeProgram:
        if [argument.arg for argument in tree.args.args] != ["L"]:
            raise Unknown("arguments")
        *body, last = tree.body
        for statement in body:
            self.statement(statement)
        if not (isinstance(last, ast.Return) and _is_constant(last.value, True)):
            raise Unknown("no return True")
        if len(self.program.steps) > _MAX_STEPS:
            raise Unknown("too many steps")
        if not all(map(self.is_looked_up, self.variables.values())):
            raise Unknown("an attribute that is not used")
        return self.program

    def is_looked_up(self, value: Any) -> bool:
        """Does a step look up what `value` needs, so that it is missed where Python would?"""
        if not isinstance(value, _Method | _Dims):
            return True
        attribute = self._known.get(("path", "attr", value.path, str, value.name))
        used = value.path in self.program.operands and any(
            (name, first) == (value.name, self.operand(value.path))
            for name, first, _ in self.program.steps
        )
        return used or (isinstance(value, _Method) and attribute is not None)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if len(node.targets) != 1 or node.targets[0].id in ("L", *self.cells):
                raise Unknown("assignment")
            self.variables[node.targets[0].id] = self.value(node.value)
            return
        if not (isinstance(node, ast.If) and not node.orelse and len(node.body) == 1):
            raise Unknown(type(node).__name__)
        (leave,), test = node.body, node.test
        if not (isinstance(leave, ast.Return) and _is_constant(leave.value, False)):
            raise Unknown("no return False")
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            raise Unknown("condition")
        for condition in _conjuncts(test.operand):
            self.program.steps.append(("require", self.truth(condition), 0))

    def step(self, name: str, first: Any, second: int = 0) -> int:
        """The step `name`, made once."""
        key = (name, type(first), repr(first), second)
        if key not in self._known:
            self._known[key] = len(self.program.steps)
            self.program.steps.append((name, first, second))
        return self._known[key]

    def path(self, kind: str, parent: int, key: Any) -> _Object:
        entry = ("path", kind, parent, type(key), key)
        if entry not in self._known:
            self._known[entry] = len(self.program.paths)
            self.program.paths.append((kind, parent, key))
        return _Object(self._known[entry])

    def operand(self, path: int) -> int:
        if path not in self.program.operands:
            self.program.operands.append(path)
        return self.program.operands.index(path)

    def number(self, node: ast.expr) -> int:
        return self.as_number(self.value(node))

    def as_number(self, value: Any) -> int:
        if isinstance(value, _Method):  # an attribute of that name
            value = self.path("attr", value.path, value.name)
        if isinstance(value, _Object):
            return self.step("object", self.operand(value.path))
        if isinstance(value, _Number):
            return value.step
        raise Unknown(f"{type(value).__name__} as a number")

    def constant(self, value: Any) -> _Number:
        if type(value) is float:
            return _Number(self.step("real", value))
        if type(value) not in (int, bool) or value not in _RANGE:
            raise Unknown("constant")
        return _Number(self.step("integer", int(value)))

    def truth(self, node: ast.expr) -> int:
        """The step that tells whether `node` is true: a number that is not 0."""
        if isinstance(node, ast.BoolOp):
            name = "both" if isinstance(node.op, ast.And) else "either"
            return self.fold(name, [self.truth(operand) for operand in node.values])
        return self.number(node)

    def fold(self, name: str, steps: list[int]) -> int:
        result, *others = steps
        for step in others:
            result = self.step(name, result, step)
        return result

    def value(self, node: ast.expr) -> Any:
        rule = _RULES.get(type(node))
        if rule is None:
            raise Unknown(type(node).__name__)
        return rule(self, node)

    def name(self, node: ast.Name) -> Any:
        if node.id in self.variables:
            return self.variables[node.id]
        if node.id in self.cells:
            value = self.cells[node.id]
            return self.constant(value) if type(value) is float else _Function(value)
        if node.id == "L":
            return "L"
        if node.id == "G" and type(self.globals.get("G")) is dict:
            self.must_be(self.globals, "G", self.globals["G"])
            return "G"
        value = self.builtins.get(node.id)
        if node.id in self.globals or value is None:
            raise Unknown(node.id)
        self.must_be(self.globals, node.id, None)
        self.must_be(self.builtins, node.id, value)
        return _Function(value)

    def must_be(self, names: dict[str, Any], key: str, value: Any) -> None:
        entry = (names, key, value)
        if not any(a is names and b == key for a, b, _ in self.program.names):
            self.program.names.append(entry)

    def attribute(self, node: ast.Attribute) -> Any:
        value = self.value(node.value)
        if isinstance(value, _Object):
            if node.attr in _METHODS:
                return _Method(value.path, node.attr)
            return self.path("attr", value.path, node.attr)
        module = value.value if isinstance(value, _Function) else None
        if type(module) is not ModuleType or module not in (math, torch):
            raise Unknown(f"an attribute of a {type(value).__name__}")
        found = vars(module).get(node.attr)
        if found is None:
            raise Unknown(node.attr)
        self.must_be(vars(module), node.attr, found)
        return self.constant(found) if type(found) is float else _Function(found)

    def subscript(self, node: ast.Subscript) -> Any:
        value, key = self.value(node.value), node.slice
        if not isinstance(key, ast.Constant) or type(key.value) not in (int, str, bool):
            raise Unknown("a key that is computed")
        if isinstance(value, _Dims):
            if type(key.value) is not int or not 0 <= key.value < 1 << 16:
                raise Unknown("a dimension")
            return _Number(self.step(value.name, self.operand(value.path), key.value))
        if value in ("L", "G"):
            if type(key.value) is not str:
                raise Unknown("a name")
            return self.path("local" if value == "L" else "global", -1, key.value)
        if not isinstance(value, _Object):
            raise Unknown("a key")
        return self.path("item", value.path, key.value)

    def call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise Unknown("a call")
        if isinstance(function, _Method):
            if node.args:
                raise Unknown("an argument")
            if function.name == "storage_offset":
                return _Number(self.step(function.name, self.operand(function.path)))
            return _Dims(function.path, function.name)
        if not isinstance(function, _Function) or not _is_hashable_function(function.value):
            raise Unknown("a call")
        if function.value is builtins.__import__:
            return self.module(node.args)
        steps = [self.number(argument) for argument in node.args]
        if function.value in _FUNCTIONS and len(steps) == 1:
            return _Number(self.step(_FUNCTIONS[function.value], steps[0]))
        if function.value in _FOLDS and len(steps) >= 2:
            return _Number(self.fold(_FOLDS[function.value], steps))
        raise Unknown("a function")

    def module(self, arguments: list[ast.expr]) -> _Object:
        """``__import__("torch")``, as Dynamo spells a module that it imports: what is there."""
        match arguments:
            case [ast.Constant(value=str(name))] if "." not in name and name in sys.modules:
                return self.path("module", -1, name)
        raise Unknown("an import")

    def binary(self, node: ast.BinOp) -> Any:
        name = _BINARY.get(type(node.op))
        if name is None:
            raise Unknown(type(node.op).__name__)
        first = self.number(node.left)
        return _Number(self.step(name, first, self.number(node.right)))

    def unary(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return _Number(self.step("negation", self.truth(node.operand)))
        value = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return self.constant(-value)
        if not isinstance(node.op, ast.USub):
            raise Unknown(type(node.op).__name__)
        return _Number(self.step("negative", self.number(node.operand)))

    def compare(self, node: ast.Compare) -> Any:
        values = [self.value(operand) for operand in (node.left, *node.comparators)]
        pairs = zip(values, node.ops, values[1:], strict=False)
        return _Number(self.fold("both", [self.comparison(*pair) for pair in pairs]))

    def comparison(self, first: Any, op: ast.cmpop, second: Any) -> int:
        if isinstance(op, (ast.Is, ast.IsNot)):
            if not (isinstance(first, _Object) and isinstance(second, _Object)):
                raise Unknown("identity of what is no object")
            same = self.step("same", self.operand(first.path), self.operand(second.path))
            return same if isinstance(op, ast.Is) else self.step("negation", same)
        name, swapped = _COMPARISONS.get(type(op), ("", False))
        if not name:
            raise Unknown(type(op).__name__)
        steps = self.as_number(first), self.as_number(second)
        return self.step(name, *(steps[::-1] if swapped else steps))


_Rule = Callable[[_Lowering, Any], Any]
_RULES: dict[type, _Rule] = {
    ast.Constant: lambda lowering, node: lowering.constant(node.value),
    ast.Name: _Lowering.name,
    ast.Attribute: _Lowering.attribute,
    ast.Subscript: _Lowering.subscript,
    ast.Call: _Lowering.call,
    ast.BinOp: _Lowering.binary,
    ast.UnaryOp: _Lowering.unary,
    ast.Compare: _Lowering.compare,
}


def _conjuncts(node: ast.expr) -> list[ast.expr]:
    """What all must be true for `node` to be true, in Python's order."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return [part for value in node.values for part in _conjuncts(value)]
    return [node]


def _is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_hashable_function(value: Any) -> bool:
    return type(value) in (BuiltinFunctionType, FunctionType) or value is builtins.float


def import_shapes(context: Context, payload: dict[str, Any]) -> bool:
    """Appends what the function of `payload` decides, if that has a native form."""
    function = payload["fn"]
    program = shape_program(function, payload.get("source"))
    if program is None or not program.steps:
        return False
    names = context.framelocals
    if any(path[0] == "local" and names.count(path[2]) != 1 for path in program.paths):
        return False
    values: list[ir.Value] = []
    for path in program.paths:
        values.append(_fetch(context, function, values, path))
    entry = (function, tuple(program.steps), tuple(program.names))
    shapes = context.object(entry, program.text())
    context.check_all("check_shapes", [values[path] for path in program.operands], object=shapes)
    return True


def _fetch(context: Context, function: Any, values: list[ir.Value], path: Path) -> ir.Value:
    kind, parent, key = path
    if kind == "local":
        return context.fetch_root("local", None, index=context.framelocals.index(key))
    if kind == "global":
        scope = context.object(function.__globals__["G"], "globals")
        globals_ = context.fetch_root("globals", None, object=scope)
        return context.fetch("dict_item", globals_, object=context.object(key))
    if kind == "module":
        modules = context.fetch_root(
            "globals", None, object=context.object(sys.modules, "sys.modules")
        )
        return context.fetch("dict_item", modules, object=context.object(key))
    name = "getattr" if kind == "attr" else "getitem"
    return context.fetch(name, values[parent], object=context.object(key))
