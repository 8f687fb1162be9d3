"""The `scm` dialect: what a specialization checks and what its frame does, as MLIR.

One ``scm.specialization`` holds two regions of one block each. ``guards`` is straight-line:
fetches produce ``!scm.object`` values, checks consume them, any of them that fails means that the
guards fail, and ``scm.pass`` ends it, whose operands are the arguments of ``plan``. ``plan`` builds
the frame's result out of these and the frame's arguments and ends in ``scm.return``, or is
``scm.run_code`` when Dynamo's own code object has to run. A graph is a ``scm.program`` beside it, a
host program: its steps in order, on ``!scm.tensor`` values. What it computes of sizes are
``!scm.int`` values of 64 bits, all before the first operator.

Python objects cannot be MLIR attributes, and addresses would make text differ from run to run. So
an attribute ``object``, ``type`` or ``id`` is an index into a side list (:class:`ObjectTable`) and
``label`` one into a list of strings; :meth:`Program.text` prints both as comments. The text parses
back, and lowers again when it needs no objects.

The dialect is defined in Python through IRDL. Measured for 3,500 operations on a 2-core machine:
``ir.Operation.create`` 3-4 µs each (the generated constructors 20-26 µs, so :class:`Emitter` does
not use them), verification of the module 4-5 ms, reading an operation back 1-3 µs. Unregistered
operations would save nothing. One context serves the process: a new one costs 10-15 ms. It is
single-threaded, so that a fork leaves no dead thread pool behind, and :func:`session` lets one
thread in at a time. Attributes are never freed by MLIR; ours are small integers and the names of
functions and variables, so a context does not grow without bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir._mlir_libs import _mlir
from torch_mlir.dialects import ext

from trident.errors import TridentError
from trident.texts import safe_text

# Attributes of an operation that index the side list of objects.
OBJECT_ATTRIBUTES = ("object", "type", "id")

# Fetches that start from the frame itself, and their attributes.
ROOT_FETCHES: dict[str, tuple[str, ...]] = {
    "local": ("index",),
    "globals": ("object",),
}
# Fetches from a value.
FETCHES: dict[str, tuple[str, ...]] = {
    "getattr": ("object",),
    "generic_getattr": ("object",),
    "generic_dict": (),
    "getitem": ("object",),
    "dict_item": ("object",),
    "list_item": ("index",),
    "tuple_item": ("index",),
    "set_item": ("index",),
    "tuple_iterator_item": ("index",),
    "dict_key": ("index",),
    "dict_value": ("index",),
    "type": (),
    "type_dict": (),
    "type_mro": (),
    "func_defaults": (),
    "func_kwdefaults": (),
    "closure": (),
    "code": (),
    "grad": (),
    "tensor_size": ("index",),
    "tensor_stride": ("index",),
    "tensor_storage_offset": (),
    "weakref_call": (),
    "global_weakref": ("object",),
    "call_no_args": (),
    "call": ("object",),
}
# Checks of the frame's surroundings.
ROOT_CHECKS: dict[str, tuple[str, ...]] = {
    "check_default_device": ("object",),
    "check_dual_level": ("level",),
    "check_function_modes": ("object",),
    "check_global_state": ("object",),
    "check_lambda_locals": ("object",),
    "check_lambda_no_args": ("object",),
    "check_saved_tensor_hooks": ("object", "ids_are_none"),
}
# Checks of a value.
CHECKS: dict[str, tuple[str, ...]] = {
    "check_type": ("type",),
    "check_id": ("id",),
    "check_none": (),
    "check_not_none": (),
    "check_true": (),
    "check_false": (),
    "check_equals": ("object",),
    "check_length": ("length",),
    "check_dict_length": ("length",),
    "check_dict": ("type", "length"),
    "check_tuple_iterator": ("length", "type"),
    "check_range_iterator": ("object", "type"),
    "check_mapping_keys": ("object",),
    "check_no_attr": ("object",),
    "check_dict_contains": ("contains", "object"),
    "check_set_contains": ("contains", "object"),
    "check_float_nan": (),
    "check_complex_nan": (),
    "check_dict_version": ("tag",),
    "check_dispatch_keys": ("object",),
    "check_tensor": ("object",),
    "check_lambda": ("object",),
    "check_leaf": ("object",),
}
# Checks of any number of values.
RELATIONS: dict[str, tuple[str, ...]] = {
    "check_no_alias": (),
    "check_overlap": ("overlapping", "object"),
    "check_shapes": ("object",),
    "check_symbolic_shapes": ("integers", "object"),
}
GUARD_OPS = (*ROOT_FETCHES, *FETCHES, *ROOT_CHECKS, *CHECKS, "check_same", *RELATIONS)
# Steps of a plan that fetch or make an object, or have an effect, and their attributes.
PLAN_STEPS: dict[str, tuple[str, ...]] = {
    "get_attr": ("object",),
    "get_item": (),
    "get_global": ("object",),
    "get_size": ("object",),
    "get_stride": ("object",),
    "get_storage_offset": (),
    "as_number": ("object",),
    "tuple": (),
    "list": (),
    "dict": (),
    "call_function": (),
}
# Steps of a plan that only have an effect.
PLAN_EFFECTS: dict[str, tuple[str, ...]] = {
    "store_attr": ("object",),
    "store_item": (),
    "store_global": ("object",),
    "store_cell": ("object",),
}
# Steps of a program that compute an integer of two.
# The last ones send the call to stock unless they hold.
INTEGER_STEPS = (
    *("add", "multiply", "floor_divide", "modulo", "minimum", "maximum"),
    *("require_less", "require_less_equal", "require_equal", "require_different"),
)
PLAN_OPS = (
    *("argument", "free_variable", "constant", "return", "run_code", "run_program"),
    *PLAN_STEPS,
    *PLAN_EFFECTS,
)


class Scm(ext.Dialect, name="scm"):  # type: ignore[call-arg]
    """The dialect; its operations are defined below, from the tables above."""


class ObjectType(Scm.Type, name="object"):  # type: ignore[call-arg,name-defined]
    """``!scm.object``: a Python object."""


class TensorType(Scm.Type, name="tensor"):  # type: ignore[call-arg,name-defined]
    """``!scm.tensor``: a tensor of a host program, which operators may change in place."""


class IntegerType(Scm.Type, name="int"):  # type: ignore[call-arg,name-defined]
    """``!scm.int``: a number that a host program computes of sizes; or the bits of a float."""


def _define(name: str, fields: dict[str, Any], *, terminator: bool = False) -> None:
    keywords = {"name": name, "traits": [ir.IsTerminatorTrait] if terminator else []}
    body = {"__annotations__": fields, "__module__": __name__}
    types.new_class(name, (Scm.Operation,), keywords, lambda namespace: namespace.update(body))


def _define_operations() -> None:
    value, result = ext.Operand[ObjectType], {"result": ext.Result[ObjectType]}
    integer = ir.IntegerAttr
    label = {"label": integer}
    for table, operands, results in (
        (ROOT_FETCHES, {}, result),
        (FETCHES, {"value": value}, result),
        (ROOT_CHECKS, {}, {}),
        (CHECKS, {"value": value}, {}),
    ):
        for name, attributes in table.items():
            _define(name, {**operands, **dict.fromkeys(attributes, integer), **label, **results})
    _define("check_same", {"value": value, "other": value, **label})
    _define("argument", {"index": integer, **result})
    _define("free_variable", {"index": integer, **result})
    _define("constant", {"object": integer, **result})
    values = {"values": Sequence[value]}  # type: ignore[valid-type]
    for name, attributes in RELATIONS.items():
        _define(name, {**values, **dict.fromkeys(attributes, integer), **label})
    _define("pass", values, terminator=True)
    for name, attributes in PLAN_STEPS.items():
        _define(name, {**values, **dict.fromkeys(attributes, integer), **result})
    for name, attributes in PLAN_EFFECTS.items():
        _define(name, {**values, **dict.fromkeys(attributes, integer)})
    outputs = {"outputs": Sequence[ext.Result[ObjectType]]}
    _define("run_program", {**values, **outputs})
    _define("return", {"value": value}, terminator=True)
    _define("run_code", {"reason": ir.StringAttr}, terminator=True)
    tensor = ext.Operand[TensorType]
    number = ext.Operand[IntegerType]
    operands = {"tensors": Sequence[tensor], "integers": Sequence[number]}  # type: ignore[valid-type]
    computed = {"result": ext.Result[IntegerType]}
    _define("input", {"index": integer, "result": ext.Result[TensorType]})
    _define("constant_tensor", {"object": integer, "result": ext.Result[TensorType]})
    _define("integer_input", {"index": integer, **computed})
    _define("float_input", {"index": integer, **computed})
    _define("size", {"tensor": tensor, "index": integer, **computed})
    _define("stride", {"tensor": tensor, "index": integer, **computed})
    _define("integer", {"value": integer, **computed})
    for name in INTEGER_STEPS:
        _define(name, {"first": number, "second": number, **computed})
    _define("number", {"value": number, "result": ext.Result[TensorType]})
    made = {"results": Sequence[ext.Result[TensorType]]}
    _define("operator", {**operands, "name": ir.StringAttr, "object": integer, **label, **made})
    _define("release", {"tensor": tensor})
    # The object says what the operands are: LaunchCall.
    _define("launch", {**operands, "object": integer, **label})
    # Of Inductor's wrappers; the object says what the integers are: Layout, Check, KernelCall.
    _define("empty_strided", {**operands, "object": integer, **made})
    _define("reinterpret", {**operands, "object": integer, **made})
    _define("check", {**operands, "object": integer, **label})
    _define("kernel", {**operands, "object": integer, **label})
    _define("device_enter", {"index": integer})
    _define("device_exit", {})
    branches = {"then": ext.Region, "otherwise": ext.Region}
    _define("branch", {"condition": tensor, **label, **made, **branches})
    _define("give", {"tensors": Sequence[tensor]}, terminator=True)  # type: ignore[valid-type]
    _define("grad_mode", {"enabled": integer})
    fields = dict.fromkeys(("device", "dtype", "enabled", "cache"), integer)
    _define("autocast_enter", fields)
    _define("autocast_exit", {})
    _define("yield", {**operands, "nones": integer}, terminator=True)
    _define("program", {"inputs": integer, "body": ext.Region})
    _define(
        "specialization",
        {
            "code": ir.StringAttr,
            "framelocals": ir.ArrayAttr,
            "guards": ext.Region,
            "plan": ext.Region,
        },
    )


_define_operations()

_lock = threading.RLock()


def _new_lock_after_fork() -> None:
    # Another thread of the parent may have been building; it does not exist in the child.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock_after_fork)


@functools.cache
def _context() -> ir.Context:
    _mlir.globals.append_dialect_search_prefix("trident.codegen.mlir_dialects")
    context = ir.Context()
    context.enable_multithreading(False)
    with context:
        Scm.load()
    return context


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Everything that touches MLIR runs inside: the process's context, one thread at a time."""
    with _lock, _context(), ir.Location.unknown():
        yield


@dataclasses.dataclass(slots=True, frozen=True)
class Reference:
    """An object known by its address only, so that it is not kept alive."""

    address: int


@dataclasses.dataclass(slots=True, eq=False)
class ObjectTable:
    """The Python objects of a program, by index, and the text that stands for each."""

    values: list[Any] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)

    def add(self, value: Any, text: str | None = None) -> int:
        """Append `value` and return its index; `text` defaults to :func:`safe_text`."""
        self.values.append(value)
        self.texts.append(safe_text(value) if text is None else text)
        return len(self.values) - 1

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self.values):
            raise TridentError(
                f"the program refers to object #{index} but has {len(self.values)} objects: "
                "text that needs objects lowers only together with its object table"
            )
        return self.values[index]


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """A module with one ``scm.specialization``, and the side lists that its attributes index."""

    module: ir.Module
    objects: ObjectTable
    labels: list[str]

    @property
    def specialization(self) -> ir.OpView:
        """The one ``scm.specialization``; raises TridentError if there is not exactly one."""
        found = [op for op in self.module.body if op.operation.name == "scm.specialization"]
        if len(found) != 1:
            raise TridentError(f"expected one scm.specialization in the module, found {len(found)}")
        return found[0]

    def block(self, region: str) -> ir.Block:
        """The block of the region "guards" or "plan"."""
        return self.specialization.operation.regions[("guards", "plan").index(region)].blocks[0]

    @property
    def program_block(self) -> ir.Block | None:
        """The block of the ``scm.program``, or None if there is none."""
        for op in self.module.body:
            if op.operation.name == "scm.program":
                return op.operation.regions[0].blocks[0]
        return None

    def framelocals(self) -> tuple[str, ...]:
        """The names that ``scm.local`` and ``scm.argument`` index."""
        return tuple(item.value for item in self.specialization.attributes["framelocals"])

    def verify(self) -> None:
        """Raise TridentError with MLIR's own diagnostics, their locations and the text."""
        with session():
            try:
                self.module.operation.verify()
            except ir.MLIRError as error:
                text = self.module.operation.get_asm(print_generic_op_form=True)
                raise TridentError(f"invalid scm program: {error}\nin\n{text}") from None

    def text(self) -> str:
        """The module's text; each line ends in a comment with the objects and label it names."""
        with session():
            lines = str(self.module).splitlines()
        return "\n".join(self._annotate(line) for line in lines) + "\n"

    def _annotate(self, line: str) -> str:
        notes = []
        for name, index in _SIDE_LIST.findall(line):
            items = self.labels if name == "label" else self.objects.texts
            if int(index) < len(items):
                text = _one_line(items[int(index)])
                notes.append(text if name == "label" else f"#{index} = {text}")
        # The label comes last: "label" sorts between "index" and "object" in MLIR's text.
        notes.sort(key=lambda note: not note.startswith("#"))
        return f"{line}  // {' | '.join(notes)}" if notes else line


_SIDE_LIST = re.compile(r"\b(object|type|id|label) = (\d+) : i64")


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def parse(text: str, objects: ObjectTable | None = None, labels: Sequence[str] = ()) -> Program:
    """Read a program back from :meth:`Program.text` (or from text written by hand).

    Raises TridentError if the text is no valid `scm` module with one ``scm.specialization``.
    """
    with session():
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise TridentError(f"cannot parse the scm program: {error}") from None
        program = Program(module, objects or ObjectTable(), list(labels))
        program.block("guards"), program.block("plan")
        return program


class Emitter:
    """Appends operations to a new program; use it inside :func:`session`.

    Values of attributes are Python integers; those of ``object``, ``type`` and ``id`` come from
    :meth:`ObjectTable.add`.
    """

    __slots__ = (
        *("_index_type", "_integer_type", "_integers", "_object_type", "_tensor_type"),
        *("body", "guards", "plan", "program"),
    )

    def __init__(self, code: str, framelocals: Sequence[str]) -> None:
        module = ir.Module.create()
        self.program = Program(module, ObjectTable(), [])
        attributes = {
            "code": ir.StringAttr.get(_encodable(code)),
            "framelocals": ir.ArrayAttr.get(
                [ir.StringAttr.get(_encodable(n)) for n in framelocals]
            ),
        }
        operation = ir.Operation.create(
            "scm.specialization",
            regions=2,
            attributes=attributes,
            ip=ir.InsertionPoint(module.body),
        )
        self.guards = ir.InsertionPoint(operation.regions[0].blocks.append())
        self.plan = ir.InsertionPoint(operation.regions[1].blocks.append())
        self.body: ir.InsertionPoint | None = None
        self._object_type = [ObjectType.get()]
        self._tensor_type = TensorType.get()
        self._integer_type = [IntegerType.get()]
        self._index_type = ir.IntegerType.get_signless(64)
        self._integers: dict[int, ir.Attribute] = {}

    def integer(self, value: int) -> ir.Attribute:
        """`value` as ``i64``."""
        attribute = self._integers.get(value)
        if attribute is None:
            attribute = self._integers[value] = ir.IntegerAttr.get(self._index_type, value)
        return attribute

    def value(
        self, point: ir.InsertionPoint, name: str, operands: Sequence[ir.Value], **attributes: int
    ) -> ir.Value:
        """Append an operation with a result at `point`, and return the result."""
        return ir.Operation.create(
            f"scm.{name}",
            results=self._object_type,
            operands=operands,
            attributes={key: self.integer(value) for key, value in attributes.items()},
            ip=point,
        ).results[0]

    def effect(
        self, point: ir.InsertionPoint, name: str, operands: Sequence[ir.Value], **attributes: int
    ) -> None:
        """Append an operation without result at `point`."""
        ir.Operation.create(
            f"scm.{name}",
            operands=operands,
            attributes={key: self.integer(value) for key, value in attributes.items()},
            ip=point,
        )

    def start_program(self, n_inputs: int) -> None:
        """Add a ``scm.program``; :attr:`body` is where its steps go."""
        operation = ir.Operation.create(
            "scm.program",
            regions=1,
            attributes={"inputs": self.integer(n_inputs)},
            ip=ir.InsertionPoint(self.program.module.body),
        )
        self.body = ir.InsertionPoint(operation.regions[0].blocks.append())

    def drop_program(self) -> None:
        """Take the ``scm.program`` away again."""
        for op in list(self.program.module.body):
            if op.operation.name == "scm.program":
                op.operation.erase()

    def step(
        self,
        name: str,
        operands: Sequence[ir.Value] = (),
        *,
        integers: Sequence[ir.Value] | None = None,
        results: int = 0,
        operator: str | None = None,
        **attributes: int,
    ) -> list[ir.Value]:
        """Append a step to the ``scm.program``, with that many tensors as results; `integers` for
        the steps that may have integers as operands, after the others."""
        fields: dict[str, Any] = {key: self.integer(value) for key, value in attributes.items()}
        if integers is not None:
            sizes = [len(operands), len(integers)]
            fields["operandSegmentSizes"] = ir.DenseI32ArrayAttr.get(sizes)
            operands = [*operands, *integers]
        if operator is not None:
            fields["name"] = ir.StringAttr.get(operator)
        operation = ir.Operation.create(
            f"scm.{name}",
            results=[self._tensor_type] * results,
            operands=operands,
            attributes=fields,
            ip=self.body,
        )
        return list(operation.results)

    def branch(
        self, condition: ir.Value, results: int, label: int
    ) -> tuple[list[ir.Value], list[ir.InsertionPoint]]:
        """Append a ``scm.branch``; returns its results, and where the steps of its branches go."""
        operation = ir.Operation.create(
            "scm.branch",
            results=[self._tensor_type] * results,
            operands=[condition],
            attributes={"label": self.integer(label)},
            regions=2,
            ip=self.body,
        )
        points = [ir.InsertionPoint(region.blocks.append()) for region in operation.regions]
        return list(operation.results), points

    def integer_step(self, name: str, operands: Sequence[ir.Value], **attributes: int) -> ir.Value:
        """Append a step to the ``scm.program`` whose result is an integer."""
        return ir.Operation.create(
            f"scm.{name}",
            results=self._integer_type,
            operands=operands,
            attributes={key: self.integer(value) for key, value in attributes.items()},
            ip=self.body,
        ).results[0]

    def plan_argument(self) -> ir.Value:
        """A new argument of the plan: what the next operand of ``scm.pass`` is."""
        return self.plan.block.add_argument(self._object_type[0], ir.Location.unknown())

    def run_program(self, operands: Sequence[ir.Value], n_outputs: int) -> list[ir.Value]:
        """Append ``scm.run_program`` to the plan; returns the outputs."""
        operation = ir.Operation.create(
            "scm.run_program",
            results=self._object_type * n_outputs,
            operands=operands,
            ip=self.plan,
        )
        return list(operation.results)

    def label(self, text: str) -> int:
        """The index of `text` among the labels, as an attribute ``label``."""
        self.program.labels.append(text)
        return len(self.program.labels) - 1

    def run_code(self, reason: str) -> None:
        """End the plan: Dynamo's own code object runs, for `reason`."""
        attributes = {"reason": ir.StringAttr.get(_encodable(reason))}
        ir.Operation.create("scm.run_code", attributes=attributes, ip=self.plan)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
