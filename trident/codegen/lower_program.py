"""Host programs: ``scm.program`` to a table of operator calls, and to LLVM.

The native function is ``void program(ProgramState *)`` of ``runtime/program.h``: it calls the
functions declared there, one per step. Each tensor has a slot: the inputs first, then constants,
then what operators return. A result that nothing uses gets none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import llvm

from trident import _frame
from trident.codegen.dialect import Program, session
from trident.codegen.import_graph import Call, Slot
from trident.codegen.registry import register
from trident.errors import UnsupportedGraph

PROGRAM_ENTRY = "program"


@dataclasses.dataclass(slots=True, eq=False)
class ProgramTable:
    """What a ``_frame.NativeProgram`` is made of, and `steps`: (runtime function, its integers)."""

    n_inputs: int
    n_slots: int
    outputs: list[int]
    constants: list[Any]
    calls: list[tuple[str, str, list[tuple[str, Any]], list[Any]]]
    lines: list[tuple[str, str, int]]
    steps: list[tuple[str, tuple[int, ...]]]


def lower_program(program: Program) -> ProgramTable:
    """The table of the ``scm.program`` of `program`; UnsupportedGraph for a step without a rule."""
    with session():
        block = program.program_block
        if block is None:
            raise UnsupportedGraph("there is no scm.program")
        context = _Context(program)
        for view in block:
            op = view.operation
            rule = PROGRAM_RULES.get(op.name)
            if rule is None:
                raise UnsupportedGraph(f"{op.name} has no rule in trident/codegen/lower_program.py")
            rule(context, op)
        return context.table()


def emit_program(table: ProgramTable, module: ir.Module) -> dict[str, int]:
    """Add the function of `table` to an LLVM module; returns the addresses of what it calls."""
    with session():
        pointer, i32 = ir.Type.parse("!llvm.ptr"), ir.IntegerType.get_signless(32)
        external = ir.Attribute.parse("#llvm.linkage<external>")
        symbols: dict[str, int] = {}

        def declare(name: str, n_integers: int) -> llvm.LLVMFuncOp:
            arguments = ", ".join(["ptr"] + ["i32"] * n_integers)
            kind = ir.TypeAttr.get(ir.Type.parse(f"!llvm.func<void ({arguments})>"))
            with ir.InsertionPoint(module.body):
                return llvm.LLVMFuncOp(name, kind, linkage=external)

        function = declare(PROGRAM_ENTRY, 0)
        # Exceptions of operators pass through it to the runtime.
        function.attributes["passthrough"] = ir.Attribute.parse('[["uwtable", "2"]]')
        block = function.regions[0].blocks.append(pointer)
        constants: dict[int, ir.Value] = {}
        for name, integers in table.steps:
            if name not in symbols:
                symbols[name] = _frame.program_function(name)
                declare(name, len(integers))
            for value in integers:
                if value not in constants:
                    with ir.InsertionPoint.at_block_begin(block):
                        constants[value] = llvm.ConstantOp(
                            i32, ir.IntegerAttr.get(i32, value)
                        ).result
            with ir.InsertionPoint(block):
                operands = [block.arguments[0], *(constants[value] for value in integers)]
                llvm.CallOp(None, operands, [], [], callee=name)
        with ir.InsertionPoint(block):
            llvm.ReturnOp()
        return symbols


def make_native(table: ProgramTable, globals_: dict[str, Any], file: str) -> Any:
    """The ``_frame.NativeProgram`` of `table`. `globals_` and `file` are those of the user's
    function, for the warnings that its operators give."""
    native = _frame.NativeProgram(table.n_inputs, table.n_slots, globals_, file)
    for tensor in table.constants:
        native.add_constant(tensor)
    for call in table.calls:
        native.add_call(*call)
    native.finish(table.outputs, table.lines)
    return native


class _Context:
    def __init__(self, program: Program) -> None:
        self.objects = program.objects
        self.slots: dict[ir.Value, int] = {}
        self.n_inputs = 0
        self.n_slots = 0
        self.outputs: list[int] = []
        self.constants: list[Any] = []
        self.calls: list[tuple[str, str, list[tuple[str, Any]], list[Any]]] = []
        self.lines: list[tuple[str, str, int]] = []
        self.steps: list[tuple[str, tuple[int, ...]]] = []

    def new_slot(self, value: ir.Value) -> int:
        slot = self.slots[value] = self.n_slots
        self.n_slots += 1
        return slot

    def table(self) -> ProgramTable:
        return ProgramTable(
            self.n_inputs,
            self.n_slots,
            self.outputs,
            self.constants,
            self.calls,
            self.lines,
            self.steps,
        )


PROGRAM_RULES: dict[str, Any] = {}


def program_rule(*names: str) -> Any:
    """Registers the rule for the steps ``scm.<name>``."""
    return register(PROGRAM_RULES, *(f"scm.{name}" for name in names))


@program_rule("input")
def lower_input(context: _Context, op: ir.Operation) -> None:
    context.new_slot(op.results[0])
    context.n_inputs += 1


@program_rule("constant_tensor")
def lower_constant_tensor(context: _Context, op: ir.Operation) -> None:
    if context.n_slots != context.n_inputs + len(context.constants):
        raise UnsupportedGraph("a constant tensor comes after an operator")
    context.new_slot(op.results[0])
    context.constants.append(context.objects[op.attributes["object"].value])


@program_rule("operator")
def lower_call(context: _Context, op: ir.Operation) -> None:
    call: Call = context.objects[op.attributes["object"].value]
    operands = [context.slots[operand] for operand in op.operands]

    def slots(value: Any) -> Any:
        if isinstance(value, Slot):
            return operands[value.index]
        return [slots(item) for item in value] if isinstance(value, list) else value

    arguments = [
        (kind, value if kind in ("constant", "default") else slots(value))
        for kind, value in call.arguments
    ]
    made = [context.new_slot(r) if any(True for _ in r.uses) else None for r in op.results]
    results: list[Any] = []
    for count in call.returns:
        results.append(made.pop(0) if count is None else [made.pop(0) for _ in range(count)])
    name, overload = call.operator._schema.name, call.operator._schema.overload_name
    context.calls.append((name, overload, arguments, results))
    context.lines.append((call.line.file, call.line.function, call.line.line))
    step = len(context.lines) - 1
    context.steps.append(("trident_program_call", (len(context.calls) - 1, step)))


@program_rule("release")
def lower_release(context: _Context, op: ir.Operation) -> None:
    slot = context.slots.get(op.operands[0])
    if slot is not None:
        context.steps.append(("trident_program_release", (slot,)))


@program_rule("grad_mode")
def lower_grad_mode(context: _Context, op: ir.Operation) -> None:
    context.steps.append(("trident_program_grad_mode", (op.attributes["enabled"].value,)))


@program_rule("yield")
def lower_yield(context: _Context, op: ir.Operation) -> None:
    context.outputs = [context.slots[operand] for operand in op.operands]
