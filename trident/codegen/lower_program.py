"""Host programs: ``scm.program`` to a table of operator calls, and to LLVM.

The native function is ``void program(ProgramState *)`` of ``runtime/program.h``, which calls its
parts: one step after the other, they call functions declared there or an operator's own (see
``abi.py``). Each tensor has a slot: the inputs first, then constants, then what operators return. A
result that nothing uses is released at once. Integers are rows of a table, which the runtime
computes first; what uses one loads it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import llvm

from trident import _frame
from trident.capture import triton
from trident.capture.graph import Line
from trident.capture.inductor import Kernel
from trident.codegen.abi import Constants, DirectCall, Integer, Word, address, direct_call
from trident.codegen.dialect import INTEGER_STEPS, Program, session
from trident.codegen.import_graph import NO_TENSOR, Call, Inference, LaunchCall, Slot
from trident.codegen.import_wrapper import Check, KernelCall, Layout
from trident.codegen.registry import register
from trident.errors import UnsupportedGraph

PROGRAM_ENTRY = "program"
_MEMORY = "program_constants"
# LLVM takes quadratic time in the size of a function: a program is a row of them.
_STEPS_PER_FUNCTION = 64


Steps = list[tuple[str, tuple[Any, ...]]]


@dataclasses.dataclass(slots=True, eq=False)
class ProgramTable:
    """What a ``_frame.NativeProgram`` is made of, and `steps`: (runtime function, its integers),
    ("direct", (DirectCall, step)), ("kernel", (Kernel, its arguments, step)) or ("branch", (slot of
    the condition, the steps of either branch, step)). `memory` holds the constants of direct calls.
    """

    n_inputs: int
    n_slots: int
    outputs: list[tuple[str, int]]
    constants: list[tuple[int, Any, Any]]
    integers: list[tuple[str, int, int]]
    numbers: list[tuple[int, int]]
    calls: list[tuple[str, str, list[tuple[str, Any]], list[Any]]]
    lines: list[tuple[str, str, int, str]]
    steps: Steps
    memory: Constants
    cudnn: bool | None
    layouts: list[tuple[list[int], list[tuple[int, int]], int]]
    checks: list[tuple[int, int, Any, str | None]]
    launches: list[tuple[list[tuple[str, int, bool]], triton.Launch]] = dataclasses.field(
        default_factory=list
    )


def lower_program(program: Program) -> ProgramTable:
    """The table of the ``scm.program`` of `program`; UnsupportedGraph for a step without a rule."""
    with session():
        block = program.program_block
        if block is None:
            raise UnsupportedGraph("there is no scm.program")
        context = _Context(program)
        for view in block:
            context.lower(view.operation)
        return context.table()


def all_steps(steps: Steps) -> Steps:
    """`steps`, and those of their branches."""
    inner = [step for name, values in steps if name == "branch" for step in values[1]]
    return [*steps, *(found for branch in inner for found in all_steps(branch))]


def emit_program(table: ProgramTable, module: ir.Module) -> tuple[dict[str, int], Any]:
    """Add the function of `table` to an LLVM module; returns the addresses of what it refers to,
    and what keeps its constants alive."""
    with session():
        writer = _Writer(module)
        writer.function(PROGRAM_ENTRY, table.steps)
        return writer.finish(table.memory)


def _is_released_after(steps: Steps, number: int) -> bool:
    """Is that step a direct call after which a tensor is released? One call does both: fewer calls
    are compiled faster."""
    pair = [name for name, _ in steps[max(number, 0) : number + 2]]
    return pair == ["direct", "trident_program_release"]


@dataclasses.dataclass(slots=True)
class _Part:
    """The function that is being written: what it has loaded of the program's state."""

    block: ir.Block
    state: ir.Value = None
    slots: ir.Value = None
    step: ir.Value = None
    integers: ir.Value = None
    constants: dict[tuple[str, int], ir.Value] = dataclasses.field(default_factory=dict)
    memory: ir.Value | None = None


class _Writer:
    """Writes the function ``program``. Exceptions of operators pass through it to the runtime."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        self._types = {
            text: ir.Type.parse(text) for text in ("i8", "i32", "i64", "f64", "!llvm.ptr")
        }
        self._external = ir.Attribute.parse("#llvm.linkage<external>")
        self._no_flags = ir.IntegerAttr.get(self._types["i32"], 0)
        self._symbols: dict[str, int] = {}
        self._n_functions = 0
        self._has_memory = False
        self._part: _Part

    def finish(self, memory: Constants) -> tuple[dict[str, int], Any]:
        keepalive = None
        if self._has_memory:
            self._symbols[_MEMORY], keepalive = memory.freeze()
        return self._symbols, keepalive

    def function(self, name: str, steps: Steps) -> None:
        """The function `name`, which takes these steps, in parts."""
        parts = []
        for first in range(0, len(steps), _STEPS_PER_FUNCTION):
            self._n_functions += 1
            parts.append(f"{PROGRAM_ENTRY}_{self._n_functions}")
            self._start(parts[-1])
            for number in range(first, min(first + _STEPS_PER_FUNCTION, len(steps))):
                self._step_at(steps, number)
            with ir.InsertionPoint(self._part.block):
                llvm.ReturnOp()
        block = self._function(name)
        with ir.InsertionPoint(block):
            for part in parts:
                llvm.CallOp(None, [block.arguments[0]], [], [], callee=part)
            llvm.ReturnOp()

    def _step_at(self, steps: Steps, number: int) -> None:
        name, values = steps[number]
        if name == "kernel":
            self.kernel(*values)
        elif name == "branch":
            self.branch(*values)
        elif name == "direct":
            released = steps[number + 1][1][0] if _is_released_after(steps, number) else -1
            call, step = values
            self.direct(call, step, released)
        elif not _is_released_after(steps, number - 1):
            self.call(name, values)

    def branch(self, slot: int, branches: list[Steps], step: int) -> None:
        """Two functions of which one runs."""
        outside, names = self._part, []
        for steps in branches:
            self._n_functions += 1
            names.append(f"{PROGRAM_ENTRY}_{self._n_functions}")
            self.function(names[-1], steps)
        self._part = outside
        with ir.InsertionPoint(self._part.block):
            pointers = [llvm.AddressOfOp(self._types["!llvm.ptr"], name).result for name in names]
        self.call("trident_program_branch", (slot, step), *pointers)

    def _start(self, name: str) -> None:
        """Go on in a new function."""
        block = self._function(name)
        state, pointer = block.arguments[0], self._types["!llvm.ptr"]
        self._part = _Part(block)
        with ir.InsertionPoint(block):
            slots = llvm.LoadOp(pointer, state).result
            step = self._element(state, 1)
            integers = llvm.LoadOp(pointer, self._element(state, 2)).result
        self._part = dataclasses.replace(
            self._part, state=state, slots=slots, step=step, integers=integers
        )

    def _function(self, name: str) -> ir.Block:
        function = self._declare(name, "!llvm.func<void (ptr)>")
        attributes = '["noinline", ["uwtable", "2"]]'
        function.attributes["passthrough"] = ir.Attribute.parse(attributes)
        if name != PROGRAM_ENTRY:
            function.attributes["linkage"] = ir.Attribute.parse("#llvm.linkage<internal>")
        return function.regions[0].blocks.append(self._types["!llvm.ptr"])

    def call(
        self,
        name: str,
        integers: tuple[int, ...],
        *pointers: ir.Value,
        result: str | None = None,
    ) -> ir.Value | None:
        """A call of the runtime's function `name`: the state, `pointers`, then `integers`."""
        if name not in self._symbols:
            self._symbols[name] = _frame.program_function(name)
            arguments = ", ".join(["ptr"] * (1 + len(pointers)) + ["i32"] * len(integers))
            returned = "void" if result is None else result.removeprefix("!llvm.")
            self._declare(name, f"!llvm.func<{returned} ({arguments})>")
        numbers = [self._integer("i32", value) for value in integers]
        values = [self._part.state, *pointers, *numbers]
        with ir.InsertionPoint(self._part.block):
            made = None if result is None else self._types[result]
            return llvm.CallOp(made, values, [], [], callee=name).result

    def direct(self, call: DirectCall, step: int, released: int) -> None:
        """A call of an operator's own function, after which the slot `released` is (unless -1)."""
        with ir.InsertionPoint(self._part.block):
            llvm.StoreOp(self._integer("i64", step), self._part.step)
            result, values, kinds, attributes = self._result(call), [], [], []
            if result is not None:
                values.append(result)
                kinds.append("ptr")
                attributes.append("{}")
            for kind, value in call.arguments:
                if kind == "float":
                    values.append(self._float(value))
                    kinds.append("f64")
                    attributes.append("{}")
                elif kind == "real":
                    place = self._element(self._part.integers, value)
                    values.append(llvm.LoadOp(self._types["f64"], place).result)
                    kinds.append("f64")
                    attributes.append("{}")
                elif kind == "word":
                    values.append(self._word(value))
                    kinds.append("i64" if value[0] in ("int", "integer") else "ptr")
                    attributes.append("{}")
                else:
                    values.append(self._words(value))
                    kinds.append("ptr")
                    fields = ", ".join(["i64"] * len(value))
                    attributes.append(f"{{llvm.byval = !llvm.struct<({fields})>}}")
            argument_attributes = ir.Attribute.parse("[" + ", ".join(attributes) + "]")
            if call.symbol not in self._symbols:
                self._symbols[call.symbol] = address(call.symbol)
                signature = f"!llvm.func<void ({', '.join(kinds)})>"
                declared = self._declare(call.symbol, signature)
                declared.attributes["arg_attrs"] = argument_attributes
            done = llvm.CallOp(None, values, [], [], callee=call.symbol)
            done.attributes["arg_attrs"] = argument_attributes
            self._take(call, result)
        if any(value[0] == "list" for kind, value in call.arguments if kind == "word"):
            self.call("trident_program_drop_list", ())
        self.call("trident_program_after", (released,))

    def kernel(self, kernel: Kernel, arguments: list[tuple[str, Any]], step: int) -> None:
        """A call of a kernel of Inductor's: of where tensors' data are, and of numbers."""
        with ir.InsertionPoint(self._part.block):
            llvm.StoreOp(self._integer("i64", step), self._part.step)
            values, kinds = [], []
            for kind, value in arguments:
                if kind == "tensor":
                    values.append(self.call("trident_program_data", (value,), result="!llvm.ptr"))
                else:
                    values.append(self._word((kind, value)))
                kinds.append("ptr" if kind == "tensor" else "i64")
            symbol = f"kernel_{kernel.address:x}"
            if symbol not in self._symbols:
                self._symbols[symbol] = kernel.address
                self._declare(symbol, f"!llvm.func<void ({', '.join(kinds)})>")
            llvm.CallOp(None, values, [], [], callee=symbol)
        self.call("trident_program_after", (-1,))

    def _result(self, call: DirectCall) -> ir.Value | None:
        """Where the operator puts its result."""
        kind, value = call.result
        if kind == "slot":
            return self._element(self._part.slots, value)
        if kind in ("tuple", "aliases"):
            return self._space(len(value))
        return self._words([("int", 0)] * 3) if kind == "list" else None

    def _take(self, call: DirectCall, result: ir.Value | None) -> None:
        kind, value = call.result
        pointer = self._types["!llvm.ptr"]
        if kind == "tuple":
            for position, slot in enumerate(value):  # a tuple has its last element first
                element = self._element(result, len(value) - 1 - position)
                made = llvm.LoadOp(pointer, element).result
                llvm.StoreOp(made, self._element(self._part.slots, slot))
        elif kind == "list":
            self.call("trident_program_take", value, result)
        elif kind in ("alias", "aliases"):
            for pair in [value] if kind == "alias" else value:
                self.call("trident_program_alias", pair)

    def _word(self, word: Word) -> ir.Value:
        kind, value = word
        if kind == "int":
            return self._integer("i64", value)
        if kind == "slot":
            return self._element(self._part.slots, value)
        if kind == "integer":
            return llvm.LoadOp(self._types["i64"], self._element(self._part.integers, value)).result
        if kind == "list":
            return self.call("trident_program_list", (value,), result="!llvm.ptr")
        if kind == "tensor":
            slot = self._element(self._part.slots, value)
            return llvm.LoadOp(self._types["!llvm.ptr"], slot).result
        if kind == "constant":
            flags = self._no_flags
            pointer, i8 = self._types["!llvm.ptr"], self._types["i8"]
            return llvm.GEPOp(pointer, self._constant_memory(), [], [value], i8, flags).result
        return self._words(value)

    def _words(self, words: list[Word]) -> ir.Value:
        """These words, on the stack."""
        made = [self._word(word) for word in words]
        space = self._space(len(words))
        for position, value in enumerate(made):
            llvm.StoreOp(value, self._element(space, position))
        return space

    def _space(self, n: int) -> ir.Value:
        pointer = self._types["!llvm.ptr"]
        words, size = self._types["i64"], self._integer("i64", n)
        return llvm.AllocaOp(pointer, size, words, alignment=16).result  # as a c10::Scalar needs

    def _element(self, array: ir.Value | None, position: int) -> ir.Value:
        pointer, i64 = self._types["!llvm.ptr"], self._types["i64"]
        return llvm.GEPOp(pointer, array, [], [position], i64, self._no_flags).result

    def _constant_memory(self) -> ir.Value:
        if not self._has_memory:
            self._has_memory = True
            with ir.InsertionPoint(self._module.body):
                llvm.GlobalOp(self._types["i8"], _MEMORY, self._external)
        if self._part.memory is None:
            with ir.InsertionPoint.at_block_begin(self._part.block):
                self._part.memory = llvm.AddressOfOp(self._types["!llvm.ptr"], _MEMORY).result
        return self._part.memory

    def _integer(self, kind: str, value: int) -> ir.Value:
        if (kind, value) not in self._part.constants:
            attribute = ir.IntegerAttr.get(self._types[kind], value)
            with ir.InsertionPoint.at_block_begin(self._part.block):
                made = llvm.ConstantOp(self._types[kind], attribute).result
            self._part.constants[kind, value] = made
        return self._part.constants[kind, value]

    def _float(self, value: float) -> ir.Value:
        attribute = ir.FloatAttr.get(self._types["f64"], value)
        return llvm.ConstantOp(self._types["f64"], attribute).result

    def _declare(self, name: str, signature: str) -> llvm.LLVMFuncOp:
        kind = ir.TypeAttr.get(ir.Type.parse(signature))
        with ir.InsertionPoint(self._module.body):
            return llvm.LLVMFuncOp(name, kind, linkage=self._external)


def make_native(
    table: ProgramTable, globals_: dict[str, Any], file: str, inference: Inference | None = None
) -> Any:
    """The ``_frame.NativeProgram`` of `table`. `globals_` and `file` are those of the user's
    function, for the warnings that its operators give."""
    native = _frame.NativeProgram(table.n_inputs, table.n_slots, globals_, file)
    for slot, value, dtype in table.constants:
        native.add_constant(slot, value, dtype)
    for row in table.integers:
        native.add_integer(*row)
    for slot, integer in table.numbers:
        native.add_number(slot, integer)
    for slots in table.memory.lists:
        native.add_list(slots)
    for call in table.calls:
        native.add_call(*call)
    for layout in table.layouts:
        native.add_layout(*layout)
    for check in table.checks:
        native.add_check(*check)
    _add_launches(native, table)
    native.finish(table.outputs, table.lines, table.cudnn)
    if inference is not None:
        native.set_inference(
            inference.without_autocast,
            inference.mutated,
            inference.epilogue,
            inference.epilogue_inputs,
            inference.n_results,
            _is_small(table),
            inference.aligned,
        )
    return native


def _add_launches(native: Any, table: ProgramTable) -> None:
    names = {name for name, _ in all_steps(table.steps)}
    if not names & {"trident_program_launch", "trident_program_empty_cuda"}:
        return
    if table.launches:
        triton.use_driver()
    for arguments, launch in table.launches:
        native.add_launch(arguments, launch, launch.autotuner, launch.only)
        for fact in launch.facts():
            native.add_fact(*fact)
    allocator = triton.cuda_allocator() if "trident_program_empty_cuda" in names else 0
    launches = (launch for _, launch in table.launches)
    native.set_launches(allocator, *triton.allocator_set_by_stock(launches))


# What kernels do to so many elements takes less time than a switch of threads, and stock's wrappers
# keep the GIL in any case.
_SMALL = 1 << 14


def _is_small(table: ProgramTable) -> bool:
    """Does the program only call kernels, and are all tensors small whose sizes it has? (Those of
    inputs are among them unless the user's options take Inductor's checks away.)"""
    steps = [name for name, _ in all_steps(table.steps)]
    if (
        table.calls
        or table.launches
        or "direct" in steps
        or any(computed for _, computed, _ in table.layouts)
    ):
        return False
    sizes = [numbers[: len(numbers) // 2] for numbers, _, _ in table.layouts]
    return steps.count("kernel") * sum(map(math.prod, sizes)) < _SMALL


class _Context:
    def __init__(self, program: Program) -> None:
        self.objects = program.objects
        self.slots: dict[ir.Value, int] = {}
        self.integers: dict[ir.Value, int] = {}
        self.rows: list[tuple[str, int, int]] = []
        self.numbers: list[tuple[int, int]] = []
        self.n_inputs = 0
        self.n_slots = 0
        self.outputs: list[tuple[str, int]] = []
        self.constants: list[tuple[int, Any, Any]] = []
        self._numbers: dict[tuple[type, str, Any], int] = {}
        self.calls: list[tuple[str, str, list[tuple[str, Any]], list[Any]]] = []
        self.lines: list[tuple[str, str, int, str]] = []
        self.results: list[list[int]] = []  # the slots of the branches that it is in
        self.layouts: list[tuple[list[int], list[tuple[int, int]], int]] = []
        self._layouts: dict[Any, int] = {}
        self.checks: list[tuple[int, int, Any, str | None]] = []
        self.launches: list[tuple[list[tuple[str, int, bool]], triton.Launch]] = []
        self.steps: Steps = []
        self.memory = Constants()
        self.cudnn: bool | None = None

    def lower(self, op: ir.Operation) -> None:
        rule = PROGRAM_RULES.get(op.name)
        if rule is None:
            raise UnsupportedGraph(f"{op.name} has no rule in trident/codegen/lower_program.py")
        rule(self, op)

    def new_slot(self, value: ir.Value) -> int:
        slot = self.slots[value] = self.n_slots
        self.n_slots += 1
        return slot

    def new_integer(self, op: ir.Operation, a: int, b: int = 0) -> None:
        """The row of `op`."""
        self.integers[op.results[0]] = len(self.rows)
        self.rows.append((op.name.removeprefix("scm."), a, b))

    def place(self, value: ir.Value) -> int | Integer:
        """The slot of a tensor, or an integer."""
        row = self.integers.get(value)
        if row is None:
            return self.slots[value]
        return Integer(row, is_float=self.rows[row][0] == "float_input")

    def new_step(self, line: Line, caller: str = "bindings") -> int:
        """The number of a step that is at `line`; `caller`: see runtime/program.h."""
        self.lines.append((line.file, line.function, line.line, caller))
        return len(self.lines) - 1

    def new_layout(self, layout: Layout, op: ir.Operation) -> int:
        """The index of `layout`, whose integers are operands of `op`."""
        integers = [p for p in map(self.place, op.operands) if isinstance(p, Integer)]
        numbers: list[int] = []
        computed: list[tuple[int, int]] = []
        for position, number in enumerate(layout.numbers):
            if isinstance(number, Slot):
                computed.append((position, integers[number.index].row))
            numbers.append(0 if isinstance(number, Slot) else number)
        dtype = 0 if layout.dtype is None else _frame.enum_number(layout.dtype)
        key = tuple(numbers), tuple(computed), dtype
        if key not in self._layouts:
            self._layouts[key] = len(self.layouts)
            self.layouts.append((numbers, computed, dtype))
        return self._layouts[key]

    def number(self, value: Any, dtype: Any) -> int:
        """The slot of the tensor that eager's bindings make of a number, converted to `dtype`."""
        key = type(value), repr(value), dtype
        if key not in self._numbers:
            self._numbers[key] = self.n_slots
            self.constants.append((self.n_slots, value, dtype))
            self.n_slots += 1
        return self._numbers[key]

    def table(self) -> ProgramTable:
        return ProgramTable(
            self.n_inputs,
            self.n_slots,
            self.outputs,
            self.constants,
            self.rows,
            self.numbers,
            self.calls,
            self.lines,
            self.steps,
            self.memory,
            self.cudnn,
            self.layouts,
            self.checks,
            self.launches,
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
    slot = context.new_slot(op.results[0])
    context.constants.append((slot, context.objects[op.attributes["object"].value], None))


@program_rule("operator")
def lower_call(context: _Context, op: ir.Operation) -> None:
    call: Call = context.objects[op.attributes["object"].value]
    places = [context.place(operand) for operand in op.operands]
    integers = [place for place in places if isinstance(place, Integer)]

    def slots(value: Any) -> Any:
        if isinstance(value, Slot):
            return (integers if value.is_integer else places)[value.index]
        return [slots(item) for item in value] if isinstance(value, list) else value

    arguments: list[tuple[str, Any]] = []
    schema = call.operator._schema.arguments
    for (kind, value), argument in zip(call.arguments, schema, strict=True):
        if argument.name in ("cudnn_enabled", "cudnn_enable"):
            # torch's Python functions pass the flag as it is at the call.
            flag = argument.default_value if kind == "default" else value
            if context.cudnn not in (None, flag):
                raise UnsupportedGraph("its operators are passed different values for cuDNN")
            context.cudnn = flag
        if kind == "number":
            arguments.append(("tensor", context.number(*value)))
        else:
            plain = kind in ("constant", "default")
            arguments.append((kind, value if plain else slots(value)))
    uses = [any(True for _ in result.uses) for result in op.results]
    # A reference to an argument, which nobody looks at. (Several are a tuple, which needs space.)
    written = [r.alias_info and r.alias_info.is_write for r in call.operator._schema.returns]
    ignored = written == [True] and not any(uses)
    made = [] if ignored else [context.new_slot(result) for result in op.results]
    unused = [slot for slot, is_used in zip(made, uses, strict=False) if not is_used]
    results: list[Any] = []
    for count in () if ignored else call.returns:
        if count == NO_TENSOR:
            results.append(None)
        else:
            results.append(made.pop(0) if count is None else [made.pop(0) for _ in range(count)])
    step = context.new_step(call.line, "ops" if call.by_overload else "bindings")
    if call.is_factory:
        context.steps.append(("trident_program_below_autograd", (1,)))
    direct = None
    if NO_TENSOR not in call.returns:
        direct = direct_call(call.operator, arguments, results, context.memory)
    if direct is not None:
        context.steps.append(("direct", (direct, step)))
    else:
        name, overload = call.operator._schema.name, call.operator._schema.overload_name
        boxed = [
            (how, _boxed(value, argument) if how == "computed" else value)
            for (how, value), argument in zip(arguments, schema, strict=True)
        ]
        context.calls.append((name, overload, boxed, results or [None] * len(call.returns)))
        context.steps.append(("trident_program_call", (len(context.calls) - 1, step)))
    if call.is_factory:
        context.steps.append(("trident_program_below_autograd", (0,)))
    context.steps += [("trident_program_release", (slot,)) for slot in unused]


def _boxed(value: Any, argument: Any) -> tuple[bool, list[tuple[bool, int]]]:
    """(is it a list, its items: is it a row, the row or the number)."""
    if isinstance(value, list) and "List[int]" not in str(argument.type):
        raise UnsupportedGraph(f"{argument.name}, a list of computed numbers, cannot be boxed")
    items = value if isinstance(value, list) else [value]
    pairs = [(True, i.row) if isinstance(i, Integer) else (False, i) for i in items]
    return isinstance(value, list), pairs


def _object(context: _Context, op: ir.Operation) -> Any:
    return context.objects[op.attributes["object"].value]


@program_rule("empty_strided")
def lower_empty_strided(context: _Context, op: ir.Operation) -> None:
    layout = _object(context, op)
    name = "trident_program_empty_cuda" if layout.on_cuda else "trident_program_empty"
    values = context.new_slot(op.results[0]), context.new_layout(layout, op)
    context.steps.append((name, values))


@program_rule("device_enter")
def lower_device_enter(context: _Context, op: ir.Operation) -> None:
    context.steps.append(("trident_program_device_enter", (op.attributes["index"].value,)))


@program_rule("device_exit")
def lower_device_exit(context: _Context, op: ir.Operation) -> None:
    context.steps.append(("trident_program_device_exit", ()))


@program_rule("reinterpret")
def lower_reinterpret(context: _Context, op: ir.Operation) -> None:
    layout = context.new_layout(_object(context, op), op)
    source = context.slots[op.operands[0]]
    slot = context.new_slot(op.results[0])
    context.steps.append(("trident_program_reinterpret", (slot, source, layout)))


@program_rule("check")
def lower_check(context: _Context, op: ir.Operation) -> None:
    check: Check = _object(context, op)
    layout = -1 if check.layout is None else context.new_layout(check.layout, op)
    context.checks.append((layout, check.alignment, check.function, check.name))
    values = context.slots[op.operands[0]], len(context.checks) - 1, context.new_step(check.line)
    context.steps.append(("trident_program_check", values))


@program_rule("kernel")
def lower_kernel(context: _Context, op: ir.Operation) -> None:
    call: KernelCall = _object(context, op)
    places = [context.place(operand) for operand in op.operands]
    integers = [place for place in places if isinstance(place, Integer)]
    arguments: list[tuple[str, Any]] = []
    for value in call.arguments:
        if not isinstance(value, Slot):
            arguments.append(("int", value))
        elif value.is_integer:
            arguments.append(("integer", integers[value.index].row))
        else:
            arguments.append(("tensor", places[value.index]))
    step = context.new_step(call.line, "kernel")
    context.steps.append(("kernel", (call.kernel, arguments, step)))


@program_rule("launch")
def lower_launch(context: _Context, op: ir.Operation) -> None:
    call: LaunchCall = _object(context, op)
    places = [context.place(operand) for operand in op.operands]
    integers = [place for place in places if isinstance(place, Integer)]
    found = [(integers if slot.is_integer else places)[slot.index] for slot in call.arguments]
    kinds = tuple(map(_kind_of_argument, found))

    def size(number: int | Slot) -> triton.Number:
        return triton.Row(integers[number.index].row) if isinstance(number, Slot) else number

    grids = tuple(tuple(map(size, grid)) for grid in call.grids)
    launch = call.bind(kinds, grids)  # type: ignore[arg-type]
    numbers = [place.row if isinstance(place, Integer) else place for place in found]
    arguments = list(zip(kinds, numbers, launch.keyed_by_value, strict=True))
    context.launches.append((arguments, launch))
    step = context.new_step(call.line, "ops")
    context.steps.append(("trident_program_launch", (len(context.launches) - 1, step)))


def _kind_of_argument(place: int | Integer) -> str:
    if not isinstance(place, Integer):
        return "tensor"
    return "real" if place.is_float else "integer"


@program_rule("branch")
def lower_branch(context: _Context, op: ir.Operation) -> None:
    condition = context.slots[op.operands[0]]
    step = context.new_step(Line())
    context.results.append([context.new_slot(result) for result in op.results])
    outside, branches = context.steps, []
    for region in op.regions:
        context.steps = []
        for view in region.blocks[0]:
            context.lower(view.operation)
        branches.append(context.steps)
    context.steps = outside
    context.results.pop()
    context.steps.append(("branch", (condition, branches, step)))


@program_rule("give")
def lower_give(context: _Context, op: ir.Operation) -> None:
    for operand, slot in zip(op.operands, context.results[-1], strict=True):
        context.steps.append(("trident_program_alias", (slot, context.slots[operand])))
    for operand in op.operands:
        if operand.owner.parent == op.parent:  # made in this branch
            context.steps.append(("trident_program_release", (context.slots[operand],)))


@program_rule("release")
def lower_release(context: _Context, op: ir.Operation) -> None:
    slot = context.slots.get(op.operands[0])
    if slot is not None:
        context.steps.append(("trident_program_release", (slot,)))


@program_rule("grad_mode")
def lower_grad_mode(context: _Context, op: ir.Operation) -> None:
    context.steps.append(("trident_program_grad_mode", (op.attributes["enabled"].value,)))


@program_rule("autocast_enter")
def lower_autocast_enter(context: _Context, op: ir.Operation) -> None:
    names = ("device", "dtype", "enabled", "cache")
    values = tuple(op.attributes[name].value for name in names)
    context.steps.append(("trident_program_autocast_enter", values))


@program_rule("autocast_exit")
def lower_autocast_exit(context: _Context, op: ir.Operation) -> None:
    context.steps.append(("trident_program_autocast_exit", ()))


@program_rule("yield")
def lower_yield(context: _Context, op: ir.Operation) -> None:
    places = [context.place(operand) for operand in op.operands]
    context.outputs = [
        ("integer", place.row) if isinstance(place, Integer) else ("tensor", place)
        for place in places
    ]
    context.outputs += [("none", 0)] * op.attributes["nones"].value


@program_rule("integer")
def lower_integer(context: _Context, op: ir.Operation) -> None:
    context.new_integer(op, op.attributes["value"].value)


@program_rule("integer_input", "float_input")
def lower_integer_input(context: _Context, op: ir.Operation) -> None:
    context.new_integer(op, op.attributes["index"].value)


@program_rule("size", "stride")
def lower_size(context: _Context, op: ir.Operation) -> None:
    context.new_integer(op, context.slots[op.operands[0]], op.attributes["index"].value)


@program_rule(*INTEGER_STEPS)
def lower_integer_step(context: _Context, op: ir.Operation) -> None:
    context.new_integer(op, *(context.integers[operand] for operand in op.operands))


@program_rule("number")
def lower_number(context: _Context, op: ir.Operation) -> None:
    slot = context.new_slot(op.results[0])
    context.numbers.append((slot, context.integers[op.operands[0]]))
