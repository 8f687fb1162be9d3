"""What a frame does, when all it does is build its result out of its arguments and constants.

:func:`analyze` evaluates a code object symbolically. The bytecode must be straight-line and use
the instructions listed here only; everything else raises :class:`UnsupportedPlan` that names the
instruction. Such a frame runs no user code and has no effects, so a plan may be abandoned halfway.

Pure standard library, for CPython 3.11 to 3.13: no torch, no MLIR.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from trident.errors import TridentError, UnsupportedPlan


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Argument:
    """The frame local at `index` of the frame's locals: an argument or a free variable."""

    index: int
    name: str
    is_free: bool


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Constant:
    """A constant of the code object: the very object."""

    value: Any


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Tuple:
    """A new tuple. Used twice, it is the same object twice."""

    items: tuple[Expression, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Scratch:
    """A new list of the evaluation's own. Dynamo's code for a frame without a graph makes some and
    drops them; a result must not contain one."""

    items: list[Expression]


Expression = Argument | Constant | Tuple | Scratch


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Plan:
    """The frame's `result`. `loaded`: what must be bound, whether or not the result needs it."""

    result: Expression
    loaded: tuple[Argument, ...]
    code_name: str


def framelocals_names(code: CodeType) -> tuple[str, ...]:
    """Names of the frame's fast locals by index: variables, cells, free variables."""
    cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + cells + code.co_freevars


def analyze(code: CodeType, framelocals: tuple[str, ...]) -> Plan:
    """The plan of `code`, a frame whose arguments arrive as the locals named `framelocals`.

    `code` may be the user's code, or what Dynamo made of it. Raises UnsupportedPlan, naming the
    instruction, for anything but straight-line code that returns arguments, free variables,
    constants and tuples of them.
    """
    if code.co_exceptiontable:
        raise UnsupportedPlan(f"{_place(code)}: it handles exceptions")
    frame = _Frame(code, framelocals)
    for instruction in dis.get_instructions(code):
        if instruction.opname in _IGNORED:
            continue
        rule = _RULES.get(instruction.opname)
        if rule is None:
            raise frame.unsupported(instruction)
        result = rule(frame, instruction)
        if result is not None:
            if _has_scratch(result):
                raise frame.unsupported(instruction, "the result contains a list")
            return Plan(result, tuple(frame.arguments.values()), code.co_name)
    raise UnsupportedPlan(f"{_place(code)}: it does not return")


def _has_scratch(value: Expression) -> bool:
    if isinstance(value, Tuple):
        return any(map(_has_scratch, value.items))
    return isinstance(value, Scratch)


class _Frame:
    """The symbolic state: value stack and locals. Locals are keyed by their fast index."""

    def __init__(self, code: CodeType, framelocals: tuple[str, ...]) -> None:
        self.code = code
        self.framelocals = framelocals
        self.names = framelocals_names(code)
        self.stack: list[Expression] = []
        self.arguments: dict[int, Argument] = {}
        self.assigned: dict[int, Expression] = {}
        self.cells: set[int] = set()
        self.n_arguments = code.co_argcount + code.co_kwonlyargcount
        self.n_arguments += bool(code.co_flags & inspect.CO_VARARGS)
        self.n_arguments += bool(code.co_flags & inspect.CO_VARKEYWORDS)

    def load(self, instruction: dis.Instruction, index: int, *, through_cell: bool) -> Expression:
        free = index >= len(self.names) - len(self.code.co_freevars)
        if not 0 <= index < len(self.names) or through_cell != (free or index in self.cells):
            raise self.unsupported(instruction)  # the cell itself, not what it holds
        if index in self.assigned:
            return self.assigned[index]
        name = self.names[index]
        if not free and index >= self.n_arguments:
            raise self.unsupported(instruction, f"{name!r} may be unbound")
        if index not in self.arguments:
            if self.framelocals.count(name) != 1:
                raise self.unsupported(instruction, f"{name!r} is not a local of the user's frame")
            self.arguments[index] = Argument(self.framelocals.index(name), name, free)
        return self.arguments[index]

    def store(self, instruction: dis.Instruction, index: int) -> None:
        if index in self.cells:
            raise self.unsupported(instruction)
        self.assigned[index] = self.pop(instruction)

    def pop(self, instruction: dis.Instruction) -> Expression:
        if not self.stack:
            raise self.unsupported(instruction, "the value stack is empty")
        return self.stack.pop()

    def unsupported(self, instruction: dis.Instruction, why: str = "") -> UnsupportedPlan:
        text = f"{instruction.opname} {instruction.argrepr}".strip()
        reason = f" ({why})" if why else ""
        return UnsupportedPlan(
            f"{_place(self.code)}: instruction {text} at offset {instruction.offset} "
            f"has no native form{reason}"
        )


def _place(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


# Instructions without effect on the symbolic state.
_IGNORED = frozenset({"RESUME", "NOP", "COPY_FREE_VARS", "CACHE", "EXTENDED_ARG"})

_Rule = Callable[[_Frame, dis.Instruction], "Expression | None"]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def decorate(rule: _Rule) -> _Rule:
        for name in names:
            if name in _RULES:
                lines = [r.__code__.co_firstlineno for r in (_RULES[name], rule)]
                raise TridentError(f"two rules for {name}: lines {lines} of {__file__}")
            _RULES[name] = rule
        return rule

    return decorate


def _argument(instruction: dis.Instruction) -> int:
    return instruction.arg if instruction.arg is not None else -1


@_rule("LOAD_FAST", "LOAD_FAST_BORROW")
def _load_fast(frame: _Frame, instruction: dis.Instruction) -> None:
    index = _argument(instruction)
    frame.stack.append(frame.load(instruction, index, through_cell=False))


@_rule("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
def _load_fast_load_fast(frame: _Frame, instruction: dis.Instruction) -> None:
    pair = _argument(instruction)
    for index in (pair >> 4, pair & 15):
        frame.stack.append(frame.load(instruction, index, through_cell=False))


@_rule("LOAD_DEREF")
def _load_deref(frame: _Frame, instruction: dis.Instruction) -> None:
    index = _argument(instruction)
    frame.stack.append(frame.load(instruction, index, through_cell=True))


@_rule("LOAD_CONST", "LOAD_CONST_IMMORTAL")
def _load_const(frame: _Frame, instruction: dis.Instruction) -> None:
    frame.stack.append(Constant(frame.code.co_consts[_argument(instruction)]))


@_rule("STORE_FAST")
def _store_fast(frame: _Frame, instruction: dis.Instruction) -> None:
    frame.store(instruction, _argument(instruction))


@_rule("STORE_FAST_STORE_FAST")
def _store_fast_store_fast(frame: _Frame, instruction: dis.Instruction) -> None:
    pair = _argument(instruction)
    frame.store(instruction, pair >> 4)
    frame.store(instruction, pair & 15)


@_rule("STORE_FAST_LOAD_FAST")
def _store_fast_load_fast(frame: _Frame, instruction: dis.Instruction) -> None:
    pair = _argument(instruction)
    frame.store(instruction, pair >> 4)
    frame.stack.append(frame.load(instruction, pair & 15, through_cell=False))


@_rule("MAKE_CELL")
def _make_cell(frame: _Frame, instruction: dis.Instruction) -> None:
    # The cell holds the argument of that name; no closure can see it, as none is ever made here.
    frame.cells.add(_argument(instruction))


@_rule("BUILD_TUPLE")
def _build_tuple(frame: _Frame, instruction: dis.Instruction) -> None:
    items = [frame.pop(instruction) for _ in range(_argument(instruction))]
    frame.stack.append(Tuple(tuple(reversed(items))))


@_rule("BUILD_LIST")
def _build_list(frame: _Frame, instruction: dis.Instruction) -> None:
    items = [frame.pop(instruction) for _ in range(_argument(instruction))]
    frame.stack.append(Scratch(items[::-1]))


@_rule("LIST_EXTEND")
def _list_extend(frame: _Frame, instruction: dis.Instruction) -> None:
    added, depth = frame.pop(instruction), _argument(instruction)
    target = frame.stack[-depth] if 0 < depth <= len(frame.stack) else None
    if not isinstance(target, Scratch) or not isinstance(added, (Tuple, Scratch)):
        raise frame.unsupported(instruction)
    target.items.extend(added.items)


@_rule("SWAP")
def _swap(frame: _Frame, instruction: dis.Instruction) -> None:
    stack, depth = frame.stack, _argument(instruction)
    if not 2 <= depth <= len(stack):
        raise frame.unsupported(instruction, "the value stack is too short")
    stack[-1], stack[-depth] = stack[-depth], stack[-1]


@_rule("POP_TOP")
def _pop_top(frame: _Frame, instruction: dis.Instruction) -> None:
    frame.pop(instruction)


@_rule("RETURN_VALUE")
def _return_value(frame: _Frame, instruction: dis.Instruction) -> Expression:
    return frame.pop(instruction)


@_rule("RETURN_CONST")
def _return_const(frame: _Frame, instruction: dis.Instruction) -> Expression:
    return Constant(frame.code.co_consts[_argument(instruction)])
