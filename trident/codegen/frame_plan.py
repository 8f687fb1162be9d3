"""What a frame does around its graph: fetch inputs, build the result, replay effects.

:func:`analyze` evaluates a code object symbolically. The bytecode must be straight-line and use
the instructions listed here only; everything else raises :class:`UnsupportedPlan` that names the
instruction. Nothing has an effect before the graph is called: until then a plan may be abandoned.

Pure standard library, for CPython 3.11 to 3.13: no torch, no MLIR.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import keyword
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any, Protocol

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
class Known:
    """An object that Dynamo put into the globals for its own code, or an attribute of one. It does
    not change, and is never a result."""

    value: Any


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Null:
    """What the interpreter pushes beside a callable."""


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Cell:
    """A cell itself, not what it holds; never a result."""


@dataclasses.dataclass(slots=True, eq=False)
class Container:
    """A new tuple, list or dict (`kind`); of a dict, `items` are keys and values in turn. It is
    made once, however often it is used, with what it holds when it is used first. Dynamo keeps what
    a graph break leaves on the stack in lists of lists, most of which are never used."""

    kind: str
    items: list[Expression]


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Step:
    """What happens at its place in the order of the code. `kind`: "get_attr" (`constant` is the
    name), "get_item" (of a value and a key), "get_global" (`constant` is the name), "get_size" and
    "get_stride" (of a tensor; `constant` is the dimension), "get_storage_offset" (of a tensor),
    "as_number" (of a function, which is to be `constant`, and a float that it would turn into a
    tensor for the graph),
    "call" (of a function and arguments), and for the effect "store_attr" (on an object, of a value;
    `constant` is the name), "store_item" (on a container, of a key and a value), "store_global" (of
    a value; `constant` is the name) and "store_cell" (of a value; `constant` is the number of the
    free variable)."""

    kind: str
    values: tuple[Expression, ...]
    constant: Any = None
    # The code of a function that does it in a frame at the user's place: see `_Frame.here`.
    at: Callable[[], CodeType] | None = None


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class GraphCall:
    """The call of Dynamo's graph; `function` is the global."""

    function: Any
    values: tuple[Expression, ...]


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Output:
    """An output of the graph."""

    call: GraphCall
    index: int


Expression = Argument | Constant | Known | Null | Cell | Container | Step | GraphCall | Output


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Plan:
    """The frame's `result`. `loaded`: what must be bound, whether or not the result needs it.
    `steps` happen in their order, then the containers are made that are needed. `may_call`: a step
    may run Python code of the user's, which Dynamo is to see. `n_outputs`: the graph must have that
    many outputs, if it is given."""

    result: Expression
    loaded: tuple[Argument, ...]
    steps: tuple[Step | GraphCall, ...]
    code_name: str
    may_call: bool = False
    n_outputs: int | None = None

    @property
    def uses_globals(self) -> bool:
        """Does it mean something else in a function with other globals?"""
        kinds = ("get_global", "store_global")
        return any(isinstance(s, GraphCall) or s.kind in kinds or s.at for s in self.steps)

    @property
    def call(self) -> GraphCall | None:
        """The call of the graph, if there is one."""
        calls = [step for step in self.steps if isinstance(step, GraphCall)]
        return calls[0] if calls else None


class Globals(Protocol):
    """What is known of the globals of Dynamo's code."""

    def graph(self, name: str) -> Any:
        """The function of the graph that the global `name` is, or None."""

    def helpers(self, name: str) -> Any:
        """The module of Dynamo's own helper functions that the global `name` is, or None."""

    def is_helper(self, function: Any) -> bool:
        """May a plan call this function of that module?"""

    def property_step(self, function: Any) -> str | None:
        """The kind of the :class:`Step` that this function of that module is, if it reads a
        property of a tensor."""

    def value(self, name: str) -> Any:
        """What the global `name` is now, or None."""

    def makes_tensor(self, function: Any) -> bool:
        """Is it torch's function that turns a float into a tensor for a graph?"""

    def is_profiling(self, function: Any) -> bool:
        """Does this function of that module nothing unless a profiler is on?"""


def framelocals_names(code: CodeType) -> tuple[str, ...]:
    """Names of the frame's fast locals by index: variables, cells, free variables."""
    cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + cells + code.co_freevars


def analyze(code: CodeType, framelocals: tuple[str, ...], known: Globals | None = None) -> Plan:
    """The plan of `code`, a frame whose arguments arrive as the locals named `framelocals`.

    `code` may be the user's code, or what Dynamo made of it; then `known` tells of its globals.
    Raises UnsupportedPlan, naming the instruction, for anything but straight-line code that fetches
    arguments, free variables, attributes, items and globals, calls at most one graph, then Dynamo's
    own helpers, and returns what it has, or tuples, lists and dicts of that.
    """
    if code.co_exceptiontable:
        raise UnsupportedPlan(f"{_place(code)}: it handles exceptions")
    frame = _Frame(code, framelocals, known)
    for instruction in _straightened(frame):
        rule = _RULES.get(instruction.opname)
        if rule is None:
            raise frame.unsupported(instruction)
        result = rule(frame, instruction)
        if result is not None:
            frame.check_value(instruction, result)
            loaded = tuple(frame.arguments.values())
            return Plan(
                result, loaded, tuple(frame.steps), code.co_name, frame.may_call, frame.n_outputs
            )
    raise UnsupportedPlan(f"{_place(code)}: it does not return")


def _straightened(frame: _Frame) -> Iterator[dis.Instruction]:
    """The instructions in the order in which they run: a loop over the items of a dict that the
    code just made, as Dynamo writes for a dict of a class of the user's, is unrolled."""
    found = [i for i in dis.get_instructions(frame.code) if i.opname not in _IGNORED]
    places = {instruction.offset: place for place, instruction in enumerate(found)}
    place = 0
    while place < len(found):
        instruction = found[place]
        place += 1
        if instruction.opname != "GET_ITER":
            yield instruction
            continue
        call = frame.pop(instruction)
        items = _items_of(call)
        loop = found[place]
        end = places.get(loop.argval) if loop.opname == "FOR_ITER" else None
        back = None if end is None else found[end - 1]
        if items is None or back is None or end is None or back.opname != "JUMP_BACKWARD":
            raise frame.unsupported(instruction)
        body = found[place + 1 : end - 1]
        if back.argval != loop.offset or any(i.opcode in dis.hasjrel for i in body):
            raise frame.unsupported(instruction)
        for pair in items:
            frame.stack.append(pair)
            yield from body
        (method,) = call.values  # type: ignore[union-attr]
        (owner,) = method.values  # type: ignore[union-attr]
        if any(owner in step.values for step in frame.steps if step is not method):
            raise frame.unsupported(instruction, "the dict may change meanwhile")
        place = end + (found[end].opname == "END_FOR") * (2 if sys.version_info >= (3, 13) else 1)


def _items_of(expression: Expression) -> list[Container] | None:
    """The pairs of a new dict, if `expression` is the call of its method ``items``."""
    if not isinstance(expression, Step) or expression.kind != "call":
        return None
    (method, *rest) = expression.values
    if (
        rest
        or not isinstance(method, Step)
        or (method.kind, method.constant)
        != (
            "get_attr",
            "items",
        )
    ):
        return None
    (owner,) = method.values
    if not isinstance(owner, Container) or owner.kind != "dict":
        return None
    keys, values = owner.items[::2], owner.items[1::2]
    if len({key.value for key in keys if isinstance(key, Constant)}) != len(keys):
        return None
    return [Container("tuple", list(pair)) for pair in zip(keys, values, strict=True)]


class _Frame:
    """The symbolic state: value stack and locals. Locals are keyed by their fast index."""

    def __init__(self, code: CodeType, framelocals: tuple[str, ...], known: Globals | None) -> None:
        self.code = code
        self.known = known
        self.steps: list[Step | GraphCall] = []
        self.framelocals = framelocals
        self.freevars = code.co_freevars
        self.names = framelocals_names(code)
        self.stack: list[Expression] = []
        self.arguments: dict[int, Argument] = {}
        self.assigned: dict[int, Expression] = {}
        self.cells: set[int] = set()
        self.called = False  # the graph; what was fetched may be abandoned until then
        self.may_call = False
        self.n_outputs: int | None = None
        self.keywords: tuple[str, ...] = ()  # of the next call
        self._used: set[int] = set()  # containers that exist already at some step
        self.n_arguments = code.co_argcount + code.co_kwonlyargcount
        self.n_arguments += bool(code.co_flags & inspect.CO_VARARGS)
        self.n_arguments += bool(code.co_flags & inspect.CO_VARKEYWORDS)

    def load(self, instruction: dis.Instruction, index: int, *, through_cell: bool) -> Expression:
        free = index >= len(self.names) - len(self.code.co_freevars)
        if not 0 <= index < len(self.names) or through_cell != (free or index in self.cells):
            raise self.unsupported(instruction)  # the cell itself, not what it holds
        name = self.names[index]
        if free and self.may_call:
            raise self.unsupported(instruction, f"{name!r} may have changed meanwhile")
        if index in self.assigned:
            return self.assigned[index]
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

    def pop_value(self, instruction: dis.Instruction) -> Expression:
        """What is on top of the stack, which must be an object of the user's."""
        value = self.pop(instruction)
        self.check_value(instruction, value)
        return value

    def pop_many(self, instruction: dis.Instruction, n: int) -> list[Expression]:
        """The topmost `n` values, the last one on top."""
        return [self.pop(instruction) for _ in range(n)][::-1]

    def pop_constant(self, instruction: dis.Instruction) -> Any:
        """The constant on top of the stack."""
        value = self.pop(instruction)
        if not isinstance(value, Constant):
            raise self.unsupported(instruction, "it is not of constants")
        return value.value

    def check_value(self, instruction: dis.Instruction, value: Expression) -> None:
        if isinstance(value, (Known, Null, Cell, GraphCall)):
            raise self.unsupported(instruction, "what it uses is not an object of the user's")
        if isinstance(value, Container):
            for item in value.items:
                self.check_value(instruction, item)

    def add(self, step: Step | GraphCall) -> None:
        """Append a step, and push its value."""
        self._use(step.values)
        self.steps.append(step)
        self.stack.append(step)

    def add_effect(self, instruction: dis.Instruction, step: Step) -> None:
        """Append a step without a value."""
        if self.known is None or not self.called:
            raise self.unsupported(instruction, "an effect before the graph")
        self.may_call = True
        self._use(step.values)
        self.steps.append(step)

    def _use(self, values: Iterable[Expression]) -> None:
        for value in values:
            if isinstance(value, Container):
                self._used.add(id(value))
                self._use(value.items)

    def is_used(self, container: Container) -> bool:
        return id(container) in self._used

    def is_open(self, value: Expression) -> bool:
        """Is it a list that nothing has used yet?"""
        return isinstance(value, Container) and value.kind == "list" and not self.is_used(value)

    def known_items(self, value: Expression) -> list[Expression] | None:
        """What is in a tuple, or in a list that nothing has used yet: nobody has changed it."""
        if isinstance(value, Container) and (value.kind == "tuple" or self.is_open(value)):
            return value.items
        return None

    def items(self, instruction: dis.Instruction, value: Expression) -> list[Expression]:
        """The same; raises UnsupportedPlan where it is not known."""
        items = self.known_items(value)
        if items is None:
            raise self.unsupported(instruction, "what is in it is not known")
        return items

    def here(
        self, instruction: dis.Instruction, parameters: str, body: str, *names: str
    ) -> Callable[[], CodeType] | None:
        """Makes the code of a function that does what `body` says of `names`. For whoever looks at
        the stack (a traceback, a warning's ``stacklevel``, logging) it is the frame at
        `instruction`; what it does not have are the locals. None in the user's own code, and where
        a name is none and stock can still run the frame."""
        if self.known is None or not (self.called or all(map(_is_name, names))):
            return None
        for name in names:
            if not _is_name(name):
                raise self.unsupported(instruction, f"{name!r} is no plain name")
        code = self.code

        def make() -> CodeType:
            text = f"def f({parameters}): {body.format(*names)}"
            module = compile(text, code.co_filename, "exec")
            (made,) = (value for value in module.co_consts if isinstance(value, CodeType))
            return made.replace(
                co_name=code.co_name,
                co_qualname=code.co_qualname,
                co_firstlineno=code.co_firstlineno,
                co_linetable=_line_table(code.co_firstlineno, instruction, len(made.co_code) // 2),
            )

        return make

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
_IGNORED = frozenset({"RESUME", "NOP", "COPY_FREE_VARS", "CACHE", "EXTENDED_ARG", "PRECALL"})

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


@_rule("BUILD_TUPLE", "BUILD_LIST")
def _build_sequence(frame: _Frame, instruction: dis.Instruction) -> None:
    kind = instruction.opname.removeprefix("BUILD_").lower()
    frame.stack.append(Container(kind, frame.pop_many(instruction, _argument(instruction))))


@_rule("BUILD_MAP")
def _build_map(frame: _Frame, instruction: dis.Instruction) -> None:
    items = frame.pop_many(instruction, 2 * _argument(instruction))
    _add_dict(frame, instruction, items)


@_rule("BUILD_CONST_KEY_MAP")
def _build_const_key_map(frame: _Frame, instruction: dis.Instruction) -> None:
    keys, n = frame.pop_value(instruction), _argument(instruction)
    values = frame.pop_many(instruction, n)
    if not isinstance(keys, Constant) or len(keys.value) != n:
        raise frame.unsupported(instruction)
    pairs = zip(map(Constant, keys.value), values, strict=True)
    _add_dict(frame, instruction, [item for pair in pairs for item in pair])


def _add_dict(frame: _Frame, instruction: dis.Instruction, items: list[Expression]) -> None:
    for key in items[::2]:
        # Others may have a __hash__ or __eq__ of their own, which would run at another time.
        if not isinstance(key, Constant) or type(key.value) not in (str, int, bool, type(None)):
            raise frame.unsupported(instruction, "a key is no plain constant")
    frame.stack.append(Container("dict", items))


@_rule("LIST_EXTEND")
def _list_extend(frame: _Frame, instruction: dis.Instruction) -> None:
    added, target = frame.pop(instruction), _list_below(frame, instruction)
    target.items.extend(frame.items(instruction, added))


@_rule("LIST_APPEND")
def _list_append(frame: _Frame, instruction: dis.Instruction) -> None:
    added, target = frame.pop(instruction), _list_below(frame, instruction)
    target.items.append(added)


def _list_below(frame: _Frame, instruction: dis.Instruction) -> Container:
    depth = _argument(instruction)
    target = frame.stack[-depth] if 0 < depth <= len(frame.stack) else Null()
    if not isinstance(target, Container) or not frame.is_open(target):
        raise frame.unsupported(instruction)
    return target


@_rule("PUSH_NULL")
def _push_null(frame: _Frame, instruction: dis.Instruction) -> None:
    frame.stack.append(Null())


@_rule("LOAD_GLOBAL")
def _load_global(frame: _Frame, instruction: dis.Instruction) -> None:
    name, null = instruction.argval, bool(_argument(instruction) & 1)
    if null and sys.version_info < (3, 13):
        frame.stack.append(Null())
    known = frame.known
    if known is None:
        raise frame.unsupported(instruction)
    graph, helpers = known.graph(name), known.helpers(name)
    if graph is not None or helpers is not None:
        frame.stack.append(Known(helpers if graph is None else graph))
    else:
        at = frame.here(instruction, "", "return {}", name)
        frame.add(Step("get_global", (), name, at))
    if null and sys.version_info >= (3, 13):
        frame.stack.append(Null())


@_rule("LOAD_ATTR")
def _load_attr(frame: _Frame, instruction: dis.Instruction) -> None:
    name = frame.code.co_names[_argument(instruction) >> (sys.version_info >= (3, 12))]
    method = sys.version_info >= (3, 12) and bool(_argument(instruction) & 1)
    owner = frame.pop(instruction)
    if isinstance(owner, Known) and isinstance(owner.value, ModuleType) and not method:
        frame.stack.append(Known(getattr(owner.value, name)))
        return
    _add_attribute(frame, instruction, owner, name, method)


@_rule("LOAD_METHOD")
def _load_method(frame: _Frame, instruction: dis.Instruction) -> None:
    name = frame.code.co_names[_argument(instruction)]
    _add_attribute(frame, instruction, frame.pop(instruction), name, True)


def _add_attribute(
    frame: _Frame, instruction: dis.Instruction, owner: Expression, name: str, method: bool
) -> None:
    frame.check_value(instruction, owner)
    if frame.known is None:
        raise frame.unsupported(instruction)
    if method and sys.version_info < (3, 13):
        frame.stack.append(Null())
    frame.may_call |= frame.called  # too late to leave it to stock
    at = frame.here(instruction, "o", "return o.{}", name)
    frame.add(Step("get_attr", (owner,), name, at))
    if method and sys.version_info >= (3, 13):
        frame.stack.append(Null())


@_rule("STORE_DEREF")
def _store_deref(frame: _Frame, instruction: dis.Instruction) -> None:
    index, first = _argument(instruction), len(frame.names) - len(frame.code.co_freevars)
    if index < first:
        raise frame.unsupported(instruction, "a cell of the frame's own")
    name = frame.names[index]
    if name not in frame.freevars:
        raise frame.unsupported(instruction, f"{name!r} is no free variable of the user's code")
    value, number = frame.pop_value(instruction), frame.freevars.index(name)
    frame.add_effect(instruction, Step("store_cell", (value,), number))


@_rule("STORE_ATTR")
def _store_attr(frame: _Frame, instruction: dis.Instruction) -> None:
    name = frame.code.co_names[_argument(instruction)]
    owner, value = frame.pop_value(instruction), frame.pop_value(instruction)
    at = frame.here(instruction, "o, v", "o.{} = v", name)
    frame.add_effect(instruction, Step("store_attr", (owner, value), name, at))


@_rule("STORE_SUBSCR")
def _store_subscr(frame: _Frame, instruction: dis.Instruction) -> None:
    key, target, value = (frame.pop(instruction) for _ in range(3))
    _store_item(frame, instruction, target, key, value)


@_rule("STORE_SLICE")
def _store_slice(frame: _Frame, instruction: dis.Instruction) -> None:
    key, target, value = (_slice(frame, instruction, 2), *(frame.pop(instruction) for _ in "ab"))
    _store_item(frame, instruction, target, key, value)


def _store_item(
    frame: _Frame,
    instruction: dis.Instruction,
    target: Expression,
    key: Expression,
    value: Expression,
) -> None:
    if frame.is_open(target) and isinstance(target, Container) and isinstance(key, Constant):
        if type(key.value) is slice and key.value.step in (None, 1):
            target.items[key.value] = frame.items(instruction, value)
            return
        if type(key.value) is int and -len(target.items) <= key.value < len(target.items):
            target.items[key.value] = value
            return
    for used in (target, key, value):
        frame.check_value(instruction, used)
    at = frame.here(instruction, "o, k, v", "o[k] = v")
    frame.add_effect(instruction, Step("store_item", (target, key, value), None, at))


@_rule("DELETE_SUBSCR")
def _delete_subscr(frame: _Frame, instruction: dis.Instruction) -> None:
    key, target = frame.pop_constant(instruction), frame.pop(instruction)
    if (
        not isinstance(target, Container)
        or not frame.is_open(target)
        or type(key) is not int
        or not -len(target.items) <= key < len(target.items)
    ):
        raise frame.unsupported(instruction, "an item of an object of the user's")
    del target.items[key]


@_rule("STORE_GLOBAL")
def _store_global(frame: _Frame, instruction: dis.Instruction) -> None:
    value = frame.pop_value(instruction)
    frame.add_effect(instruction, Step("store_global", (value,), instruction.argval))


@_rule("BUILD_SLICE")
def _build_slice(frame: _Frame, instruction: dis.Instruction) -> None:
    frame.stack.append(_slice(frame, instruction, _argument(instruction)))


def _slice(frame: _Frame, instruction: dis.Instruction, n: int) -> Constant:
    """The slice of the topmost `n` constants."""
    return Constant(slice(*[frame.pop_constant(instruction) for _ in range(n)][::-1]))


@_rule("BINARY_SUBSCR")
def _binary_subscr(frame: _Frame, instruction: dis.Instruction) -> None:
    key, owner = frame.pop_value(instruction), frame.pop(instruction)
    _get_item(frame, instruction, owner, key)


@_rule("BINARY_SLICE")
def _binary_slice(frame: _Frame, instruction: dis.Instruction) -> None:
    key = _slice(frame, instruction, 2)
    _get_item(frame, instruction, frame.pop(instruction), key)


def _get_item(
    frame: _Frame, instruction: dis.Instruction, owner: Expression, key: Expression
) -> None:
    if isinstance(owner, GraphCall) and isinstance(key, Constant) and type(key.value) is int:
        frame.stack.append(Output(owner, key.value))
        return
    items = frame.known_items(owner)
    if isinstance(owner, Container) and items is not None and isinstance(key, Constant):
        if type(key.value) is slice:
            frame.stack.append(Container(owner.kind, items[key.value]))
            return
        if type(key.value) is int and -len(items) <= key.value < len(items):
            frame.stack.append(items[key.value])
            return
    frame.check_value(instruction, owner)
    if frame.known is None or isinstance(owner, Container):
        raise frame.unsupported(instruction)
    frame.may_call |= frame.called
    at = frame.here(instruction, "o, k", "return o[k]")
    frame.add(Step("get_item", (owner, key), None, at))


@_rule("UNPACK_SEQUENCE")
def _unpack_sequence(frame: _Frame, instruction: dis.Instruction) -> None:
    sequence, n = frame.pop(instruction), _argument(instruction)
    if isinstance(sequence, GraphCall):
        frame.n_outputs = n
        frame.stack += [Output(sequence, index) for index in reversed(range(n))]
        return
    items = frame.items(instruction, sequence)
    if len(items) != n:
        raise frame.unsupported(instruction)
    frame.stack += reversed(items)


@_rule("COPY")
def _copy(frame: _Frame, instruction: dis.Instruction) -> None:
    depth = _argument(instruction)
    if not 0 < depth <= len(frame.stack):
        raise frame.unsupported(instruction, "the value stack is too short")
    frame.stack.append(frame.stack[-depth])


@_rule("DELETE_FAST")
def _delete_fast(frame: _Frame, instruction: dis.Instruction) -> None:
    if frame.assigned.pop(_argument(instruction), None) is None:
        raise frame.unsupported(instruction, "an argument of the frame")


@_rule("LOAD_CLOSURE")
def _load_closure(frame: _Frame, instruction: dis.Instruction) -> None:
    frame.stack.append(Cell())


@_rule("KW_NAMES")  # before CALL, until 3.12
def _kw_names(frame: _Frame, instruction: dis.Instruction) -> None:
    frame.keywords = frame.code.co_consts[_argument(instruction)]


@_rule("CALL")
def _call(frame: _Frame, instruction: dis.Instruction) -> None:
    keywords, frame.keywords = frame.keywords, ()
    _add_call(frame, instruction, *_arguments(frame, instruction, keywords))


@_rule("CALL_KW")  # since 3.13
def _call_kw(frame: _Frame, instruction: dis.Instruction) -> None:
    keywords = frame.pop_constant(instruction)
    _add_call(frame, instruction, *_arguments(frame, instruction, keywords))


def _arguments(
    frame: _Frame, instruction: dis.Instruction, keywords: tuple[str, ...]
) -> tuple[list[Expression], list[str]]:
    arguments = frame.pop_many(instruction, _argument(instruction))
    named = [_named(frame, instruction, name) for name in keywords]
    return arguments, [""] * (len(arguments) - len(named)) + named


def _named(frame: _Frame, instruction: dis.Instruction, name: Any) -> str:
    if not _is_name(name):
        raise frame.unsupported(instruction, f"{name!r} is no plain name")
    return f"{name}="


def _is_name(name: Any) -> bool:
    """Can it be written? Other names would be normalized, or mean something."""
    if type(name) is not str or not name.isascii() or not name.isidentifier():
        return False
    return not keyword.iskeyword(name) and name != "__debug__"


@_rule("CALL_FUNCTION_EX")
def _call_function_ex(frame: _Frame, instruction: dis.Instruction) -> None:
    named = frame.pop(instruction) if _argument(instruction) & 1 else Container("dict", [])
    positional = frame.pop(instruction)
    if isinstance(positional, Constant) and type(positional.value) is tuple:
        positional = Container("tuple", [Constant(value) for value in positional.value])
    arguments, forms = [positional], ["*"]
    if isinstance(positional, Container):
        arguments = frame.items(instruction, positional)[:]
        forms = [""] * len(arguments)
    if isinstance(named, Container) and named.kind == "dict" and not frame.is_used(named):
        names = [key.value for key in named.items[::2] if isinstance(key, Constant)]
        if len({*names}) != len(named.items) // 2:
            raise frame.unsupported(instruction, "its keywords are not known")
        arguments += named.items[1::2]
        forms += [_named(frame, instruction, name) for name in names]
    else:
        arguments.append(named)
        forms.append("**")
    _add_call(frame, instruction, arguments, forms)


def _add_call(
    frame: _Frame, instruction: dis.Instruction, arguments: list[Expression], forms: list[str]
) -> None:
    """The call of what is on top of the stack. `forms`: what is written before each argument."""
    pair = [frame.pop(instruction), frame.pop(instruction)]
    functions = [item for item in pair if not isinstance(item, Null)]
    if len(functions) != 1 or frame.known is None:
        raise frame.unsupported(instruction, "what it calls is not known")
    if not isinstance(functions[0], Known):
        for value in (functions[0], *arguments):
            frame.check_value(instruction, value)
        if not frame.called:
            function = _what_is(functions[0], frame.known)
            if len(arguments) == 1 and function is not None and frame.known.makes_tensor(function):
                frame.add(Step("as_number", (functions[0], *arguments), function))
                return
            frame.called = True  # from here on; a graph after it has no native form
        frame.may_call = True
        places = [f"a{i}" for i in range(len(forms))]
        written = [form + place for form, place in zip(forms, places, strict=True)]
        body = f"return f({', '.join(written)})"
        at = frame.here(instruction, ", ".join(["f", *places]), body)
        frame.add(Step("call", (functions[0], *arguments), None, at))
        return
    function = functions[0].value
    if any(forms):
        raise frame.unsupported(instruction, "a helper that is called by keywords")
    if frame.known.is_profiling(function):
        frame.stack.append(Known(None))
        return
    for argument in arguments:
        frame.check_value(instruction, argument)
    step = frame.known.property_step(function)
    if step is not None:
        tensor, *dimension = arguments
        numbers = [d.value for d in dimension if isinstance(d, Constant)]
        if len(numbers) != len(dimension) or not all(type(n) is int and n >= 0 for n in numbers):
            raise frame.unsupported(instruction, "a dimension that is no constant")
        frame.add(Step(step, (tensor,), *numbers))
    elif frame.known.is_helper(function):
        if not frame.called:
            raise frame.unsupported(instruction, "a helper that is called before the graph")
        frame.add(Step("call", (Constant(function), *arguments)))
    elif frame.called or isinstance(function, ModuleType):
        raise frame.unsupported(instruction, "what it calls is not known")
    else:
        frame.called = True
        frame.add(GraphCall(function, tuple(arguments)))


def _line_table(first_line: int, instruction: dis.Instruction, n: int) -> bytes:
    """The table of `n` code units that are all at the place of `instruction` (CPython's
    Objects/locations.md)."""
    at = instruction.positions
    if at is None or at.lineno is None:
        entries = [bytes([0x80 | 15 << 3 | size - 1]) for size in _in_eights(n)]
        return b"".join(entries)
    delta = at.lineno - first_line
    table = b""
    for size in _in_eights(n):
        line = _number(delta << 1 if delta >= 0 else -delta << 1 | 1)
        if at.end_lineno is None or at.col_offset is None or at.end_col_offset is None:
            table += bytes([0x80 | 13 << 3 | size - 1]) + line
        else:
            numbers = (at.end_lineno - at.lineno, at.col_offset + 1, at.end_col_offset + 1)
            table += bytes([0x80 | 14 << 3 | size - 1]) + line + b"".join(map(_number, numbers))
        delta = 0
    return table


def _in_eights(n: int) -> list[int]:
    return [min(8, n - done) for done in range(0, n, 8)]


def _number(value: int) -> bytes:
    """Six bits a byte, the lowest first, with a bit for those that are not the last."""
    groups = [value >> shift & 63 for shift in range(0, max(value.bit_length(), 1), 6)]
    return bytes([group | 64 for group in groups[:-1]] + groups[-1:])


def _what_is(expression: Expression, known: Globals) -> Any:
    """The attribute of a global that `expression` fetches, as it is now; or None."""
    if not isinstance(expression, Step):
        return None
    if expression.kind == "get_global":
        return known.value(expression.constant)
    owner = _what_is(expression.values[0], known) if expression.kind == "get_attr" else None
    # Not by getattr: a module may have a __getattr__.
    return vars(owner).get(expression.constant) if isinstance(owner, ModuleType) else None


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
