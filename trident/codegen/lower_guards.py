"""`scm` guards to the guard table: one row per operation, in order.

A guard table is a straight-line program over registers: a row fetches into ``dst`` or checks, and
any row that fails means that the guards fail. Every SSA value has its own register. The native
evaluator (``trident/runtime``) defines what each row does.

Rules are registered per operation, by the decorator above each. They take ``(context, op)`` and
return the row.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_mlir import ir

from trident.codegen.dialect import ObjectTable, Program, Reference, session
from trident.codegen.registry import register
from trident.errors import TridentError, UnsupportedGuard
from trident.texts import safe_text


class Row(NamedTuple):
    """One step of a guard program.

    `dst` and `src` are registers or -1; the meaning of `a`, `b` and `obj` depends on `op`; `label`
    is an index into :attr:`GuardTable.labels`.
    """

    op: str
    dst: int
    src: int
    a: int
    b: int
    obj: Any
    label: int


@dataclasses.dataclass(slots=True, eq=False)
class GuardTable:
    """A guard program: `rows` over `n_registers` registers; `framelocals` names the locals; the
    plan gets the registers `fetched`."""

    rows: list[Row]
    n_registers: int
    labels: list[str]
    framelocals: tuple[str, ...]
    fetched: tuple[int, ...] = ()

    def counts(self) -> dict[str, int]:
        """Number of rows per operation, most frequent first."""
        return dict(collections.Counter(row.op for row in self.rows).most_common())

    def text(self) -> str:
        """One line per row, without addresses."""
        lines = [f"registers {self.n_registers}, locals ({', '.join(self.framelocals)})"]
        lines += [
            f"{number:4} {_row_text(row):52}  // {self.labels[row.label]}"
            for number, row in enumerate(self.rows)
        ]
        if self.fetched:
            lines.append(f"for the plan: {', '.join(f'r{register}' for register in self.fetched)}")
        return "\n".join(lines) + "\n"


# Operations whose row holds an address, and where.
_ADDRESS_FIELD = {
    "check_type": "a",
    "check_id": "a",
    "check_dict": "a",
    "check_tuple_iterator": "b",
    "check_range_iterator": "b",
    "check_symbolic_shapes": "b",
}
# Operations whose object says nothing that its label does not, or holds addresses.
_OPAQUE = (
    *("globals", "check_tensor", "check_dispatch_keys"),
    *("check_overlap", "check_shapes", "check_symbolic_shapes"),
)


def _row_text(row: Row) -> str:
    address = _ADDRESS_FIELD.get(row.op)
    parts = [f"{row.op}"]
    if row.src >= 0:
        parts.append(f"r{row.src}")
    for name in ("a", "b"):
        number = getattr(row, name)
        if name == address:
            parts.append(f"{name}=@")
        elif number:
            parts.append(f"{name}={number}")
    if row.op in _OPAQUE:
        parts.append("...")
    elif row.obj is not None:
        parts.append(safe_text(row.obj))
    text = " ".join(parts)
    return f"r{row.dst} = {text}" if row.dst >= 0 else text


class Context:
    """What rules read operations through."""

    __slots__ = ("_objects", "_registers")

    def __init__(self, objects: ObjectTable) -> None:
        self._objects = objects
        self._registers: dict[ir.Value, int] = {}

    @property
    def n_registers(self) -> int:
        """Number of registers given out so far."""
        return len(self._registers)

    def row(self, op: ir.Operation, *, a: int = 0, b: int = 0, obj: Any = None) -> Row:
        """The row of `op`: its first operand is ``src``, its result gets a new register."""
        operands, results = op.operands, op.results
        source = self._registers[operands[0]] if len(operands) else -1
        target = -1
        if len(results):
            target = self._registers[results[0]] = len(self._registers)
        return Row(op.name[4:], target, source, a, b, obj, self.integer(op, "label"))

    def register(self, value: ir.Value) -> int:
        """The register of `value`."""
        return self._registers[value]

    def integer(self, op: ir.Operation, name: str) -> int:
        """The integer attribute `name` of `op`."""
        number: int = op.attributes[name].value
        return number

    def object(self, op: ir.Operation) -> Any:
        """The object that attribute ``object`` of `op` stands for."""
        return self._objects[self.integer(op, "object")]

    def address(self, op: ir.Operation, name: str) -> int:
        """The address that attribute `name` of `op` stands for."""
        reference = self._objects[self.integer(op, name)]
        if type(reference) is not Reference:
            raise TridentError(f"{op.name}: attribute {name} does not name an address")
        return reference.address


RowRule = Callable[[Context, ir.Operation], Row]
ROW_RULES: dict[str, RowRule] = {}


def row_rule(*names: str) -> Callable[[RowRule], RowRule]:
    """Registers the rule for the operations ``scm.<name>``."""
    return register(ROW_RULES, *(f"scm.{name}" for name in names))


def lower_guards(program: Program) -> GuardTable:
    """The guard table of `program`, whose objects it shares.

    Raises UnsupportedGuard, naming the operation and what to do, if an operation has no rule.
    """
    with session():
        context = Context(program.objects)
        rows: list[Row] = []
        fetched: tuple[int, ...] = ()
        for view in program.block("guards"):
            op = view.operation
            rule = ROW_RULES.get(op.name)
            if rule is not None:
                rows.append(rule(context, op))
            elif op.name == "scm.pass":
                fetched = tuple(context.register(value) for value in op.operands)
            else:
                raise UnsupportedGuard(
                    f"{op.name} has no lowering to a row; the specialization stays with stock "
                    "Dynamo (add a rule to trident/codegen/lower_guards.py)"
                )
        framelocals = program.framelocals()
    labels = list(program.labels)
    labels += [
        f"label {n}" for n in range(len(labels), max((r.label + 1 for r in rows), default=0))
    ]
    return GuardTable(rows, context.n_registers, labels, framelocals, fetched)


@row_rule(
    "generic_dict",
    "type",
    "type_dict",
    "type_mro",
    "func_defaults",
    "func_kwdefaults",
    "closure",
    "code",
    "grad",
    "tensor_storage_offset",
    "weakref_call",
    "call_no_args",
    "check_none",
    "check_not_none",
    "check_true",
    "check_false",
    "check_float_nan",
    "check_complex_nan",
)
def lower_plain(context: Context, op: ir.Operation) -> Row:
    return context.row(op)


@row_rule(
    "globals",
    "getattr",
    "generic_getattr",
    "getitem",
    "dict_item",
    "global_weakref",
    "call",
    "check_equals",
    "check_mapping_keys",
    "check_no_attr",
    "check_default_device",
    "check_global_state",
    "check_function_modes",
    "check_dispatch_keys",
    "check_tensor",
    "check_lambda",
    "check_lambda_locals",
    "check_lambda_no_args",
    "check_leaf",
)
def lower_with_object(context: Context, op: ir.Operation) -> Row:
    return context.row(op, obj=context.object(op))


@row_rule(
    "local",
    "list_item",
    "tuple_item",
    "set_item",
    "tuple_iterator_item",
    "dict_key",
    "dict_value",
    "tensor_size",
    "tensor_stride",
)
def lower_with_index(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.integer(op, "index"))


@row_rule("check_length", "check_dict_length")
def lower_length(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.integer(op, "length"))


@row_rule("check_dual_level")
def lower_dual_level(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.integer(op, "level"))


@row_rule("check_dict_version")
def lower_dict_version(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.integer(op, "tag"))


@row_rule("check_type")
def lower_type(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.address(op, "type"))


@row_rule("check_id")
def lower_id(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.address(op, "id"))


@row_rule("check_dict")
def lower_dict(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.address(op, "type"), b=context.integer(op, "length"))


@row_rule("check_tuple_iterator")
def lower_tuple_iterator(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.integer(op, "length"), b=context.address(op, "type"))


@row_rule("check_range_iterator")
def lower_range_iterator(context: Context, op: ir.Operation) -> Row:
    return context.row(op, b=context.address(op, "type"), obj=context.object(op))


@row_rule("check_dict_contains", "check_set_contains")
def lower_contains(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.integer(op, "contains"), obj=context.object(op))


@row_rule("check_saved_tensor_hooks")
def lower_saved_tensor_hooks(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.integer(op, "ids_are_none"), obj=context.object(op))


@row_rule("check_same")
def lower_same(context: Context, op: ir.Operation) -> Row:
    return context.row(op, a=context.register(op.operands[1]))


@row_rule("check_no_alias")
def lower_no_alias(context: Context, op: ir.Operation) -> Row:
    registers = tuple(context.register(value) for value in op.operands)
    return context.row(op, obj=registers)._replace(src=-1)


@row_rule("check_overlap")
def lower_overlap(context: Context, op: ir.Operation) -> Row:
    relation = (tuple(context.register(value) for value in op.operands), context.object(op))
    return context.row(op, a=context.integer(op, "overlapping"), obj=relation)._replace(src=-1)


@row_rule("check_symbolic_shapes")
def lower_symbolic_shapes(context: Context, op: ir.Operation) -> Row:
    address, library = context.object(op)
    relation = (tuple(context.register(value) for value in op.operands), library)
    row = context.row(op, a=context.integer(op, "integers"), b=address, obj=relation)
    return row._replace(src=-1)


@row_rule("check_shapes")
def lower_shapes(context: Context, op: ir.Operation) -> Row:
    function, *rest = context.object(op)
    registers = tuple(context.register(value) for value in op.operands)
    return context.row(op, obj=(function, registers, *rest))._replace(src=-1)
