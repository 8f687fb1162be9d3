"""Frame plans: :class:`~trident.codegen.frame_plan.Plan` to `scm`, and `scm` to LLVM.

The native function is ``int32 plan(PyObject *const *locals, PyObject **result, PyObject *const
*fetched, PyObject *closure)``. `locals` are the frame's locals by index, `fetched` what the guards
hand over (the operands of ``scm.pass``), `closure` is the function's; all borrowed. It returns

    HIT (0)     a new reference is in ``*result``
    RAISED (1)  a Python error is set
    STOCK (2)   nothing has happened, and stock is to run the frame

and must be called with the GIL held, by a caller that holds the locals. What it owns, the objects
that it fetches and makes, is in an array; each is dropped after its last use, as the interpreter's
stack would drop it (so a destructor runs before the next effect), and on the one way out what is
left. What the guards hand over is dropped after its last use, too, by setting it to NULL. The
result has a reference of its own.

A free variable whose cell is empty arrives as NULL. The plan then raises what the interpreter
raises, but without the frame's line in the traceback: a caller that wants that line runs the frame
as bytecode when one of ``Built.plan_locals`` is NULL.

Constants are declared as external variables that *are* the objects: their addresses reach the
linker as symbols, never the text. Rules are registered per operation, take ``(context, op,
operands)`` and return the operation's value, if it has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import llvm

from trident import _frame
from trident.capture.dynamo import skip_frames_of
from trident.codegen.dialect import PLAN_EFFECTS, Emitter, ObjectTable, Program, session
from trident.codegen.frame_plan import (
    Argument,
    Constant,
    Container,
    Expression,
    GraphCall,
    Output,
    Plan,
    Step,
)
from trident.codegen.import_graph import Signature
from trident.codegen.jit import c_api
from trident.codegen.registry import register
from trident.errors import UnsupportedPlan

HIT, RAISED, STOCK = 0, 1, 2
_RELEASE, _RELEASE_TYPE = "trident_release", "!llvm.func<void (ptr, i64)>"
ENTRY = "plan"
_NO_GRAPH = Signature()
# Steps that only read a property of a tensor, on which nobody depends but who uses the value.
_PROPERTIES = ("get_size", "get_stride", "get_storage_offset")


def emit_plan(
    plan: Plan,
    emitter: Emitter,
    signature: Signature = _NO_GRAPH,
    fetched: dict[str, ir.Value] | None = None,
) -> list[ir.Value]:
    """Fill the plan of `emitter`'s program with `plan`, whose graph has this `signature`.

    `fetched` is what guards have fetched already, by the text of the expression; returns those of
    it that the plan uses, in the order of its arguments.
    """
    fetched = fetched or {}
    handed: list[ir.Value] = []
    point, objects = emitter.plan, emitter.program.objects

    def used_by(step: Step | GraphCall) -> tuple[Expression, ...]:
        if isinstance(step, GraphCall):
            return tuple(step.values[position] for position in signature.inputs)
        return step.values

    def emit_load(load: Argument) -> ir.Value:
        name = "free_variable" if load.is_free else "argument"
        return emitter.value(point, name, [], index=load.index)

    # First what may raise, in the frame's order: then nothing has been made yet.
    values: dict[int, ir.Value] = {id(load): emit_load(load) for load in plan.loaded}
    outputs: list[ir.Value] = []
    paths: dict[int, str] = {}
    reused: set[int] = set()

    def emit(expression: Expression) -> ir.Value:
        value = values.get(id(expression))
        if value is None:
            if isinstance(expression, Constant):
                value = emitter.value(point, "constant", [], object=objects.add(expression.value))
            elif isinstance(expression, Argument):
                value = emit_load(expression)
            elif isinstance(expression, Step) and id(expression) in reused:
                handed.append(fetched[paths[id(expression)]])
                value = emitter.plan_argument()
            elif isinstance(expression, Output):
                value = outputs[signature.outputs[expression.index]]
            elif isinstance(expression, Container):
                items = [emit(item) for item in expression.items]
                value = emitter.value(point, expression.kind, items)
            else:
                raise UnsupportedPlan(f"{plan.code_name}: a step is used before it happens")
            values[id(expression)] = value
        return value

    used: set[int] = set()

    def use(values: Iterable[Expression]) -> None:
        for value in values:
            used.add(id(value))
            if isinstance(value, Container):
                use(value.items)

    for step in plan.steps:
        use(used_by(step))
    use([plan.result])
    reusable = True  # what guards fetched is still what the expression gives
    for step in plan.steps:
        path = _path(step, paths)
        if path is not None:
            paths[id(step)] = path
        if reusable and path in fetched:
            reused.add(id(step))
            continue
        if isinstance(step, GraphCall):
            reusable = False
            operands = [emit(value) for value in used_by(step)]
            outputs = emitter.run_program(operands, len(signature.outputs))
            continue
        reusable = reusable and step.kind in _PROPERTIES  # others may run Python
        if step.kind in _PROPERTIES and id(step) not in used:
            continue  # the program has it from the tensor
        operands = [emit(value) for value in step.values]
        named = {} if step.constant is None else {"object": objects.add(step.constant)}
        if step.at is not None:
            named["at"] = objects.add(step.at())
        if step.kind in PLAN_EFFECTS:
            emitter.effect(point, step.kind, operands, **named)
        else:
            # The FETCHES of guards have the name "call" already.
            name = "call_function" if step.kind == "call" else step.kind
            values[id(step)] = emitter.value(point, name, operands, **named)
    emitter.effect(point, "return", [emit(plan.result)])
    return handed


def _path(step: Expression, paths: dict[int, str]) -> str | None:
    """The expression that `step` is, as Dynamo spells it, given those of the steps before."""
    if isinstance(step, Argument):
        return f"L[{step.name!r}]"
    if not isinstance(step, Step):
        return None
    if step.kind == "get_global":
        return f"G[{step.constant!r}]"
    if step.kind not in ("get_attr", "get_item"):
        return None
    owner = step.values[0]
    above = _path(owner, paths) if isinstance(owner, Argument) else paths.get(id(owner))
    if above is None:
        return None
    if step.kind == "get_attr":
        return f"{above}.{step.constant}"
    key = step.values[1]
    if not isinstance(key, Constant) or type(key.value) not in (str, int):
        return None
    return f"{above}[{key.value!r}]"


@dataclasses.dataclass(slots=True, eq=False)
class NativePlan:
    """An LLVM module with the function ``plan``; `symbols` to link, `keepalive` to keep."""

    module: ir.Module
    symbols: dict[str, int]
    keepalive: list[Any]


def lower_plan(
    program: Program, native_program: int = 0, globals_: dict[str, Any] | None = None
) -> NativePlan:
    """The native function of the plan of `program`.

    `native_program` is the address of the host program that it runs, `globals_` where it fetches
    globals. Raises UnsupportedPlan if the plan is ``scm.run_code`` or an operation has no rule.
    """
    with session():
        context = Context(program.objects, program.framelocals(), native_program, globals_)
        block = program.block("plan")
        values: dict[ir.Value, ir.Value] = {
            argument: context.fetched(argument.arg_number) for argument in block.arguments
        }
        operations = [view.operation for view in block]
        dropped = _last_uses(block, operations)
        for op in operations:
            rule = PLAN_RULES.get(op.name)
            if rule is None:
                raise UnsupportedPlan(
                    f"{op.name} has no lowering to LLVM; Dynamo's own code runs instead "
                    "(add a rule to trident/codegen/lower_plan.py)"
                )
            made = rule(context, op, [values[operand] for operand in op.operands])
            if made is not None:
                results = made if isinstance(made, list) else [made]
                values.update(zip(op.results, results, strict=True))
            if op is not operations[-1]:
                context.drop([values[value] for value in dropped.get(op, ())])
        return NativePlan(context.module, context.symbols, context.keepalive)


def _last_uses(
    block: ir.Block, operations: list[ir.Operation]
) -> dict[ir.Operation, list[ir.Value]]:
    """Per operation the values that nothing uses after it."""
    last: dict[ir.Value, ir.Operation] = dict.fromkeys(block.arguments, operations[0])
    for op in operations:
        last.update(dict.fromkeys(op.results, op))
        last.update(dict.fromkeys(op.operands, op))
    result: dict[ir.Operation, list[ir.Value]] = {}
    for value, op in last.items():
        result.setdefault(op, []).append(value)
    return result


class Context:
    """Builds the function: rules append to its current block."""

    __slots__ = (
        "_exit",
        "_external",
        "_fetched",
        "_framelocals",
        "_objects",
        "_owned",
        "_size",
        "_slots",
        "_types",
        "block",
        "entry",
        "globals",
        "keepalive",
        "module",
        "native_program",
        "symbols",
    )

    def __init__(
        self,
        objects: ObjectTable,
        framelocals: tuple[str, ...],
        native_program: int,
        globals_: dict[str, Any] | None,
    ) -> None:
        self._objects = objects
        self.native_program = native_program
        self.globals = globals_
        self._framelocals = framelocals
        self._types = {
            text: ir.Type.parse(text)
            for text in (
                "i8",
                "i32",
                "i64",
                "!llvm.ptr",
                "!llvm.func<i32 (ptr, ptr, ptr, ptr)>",
                "!llvm.func<void (ptr)>",
                "!llvm.func<void (ptr, i64)>",
                "!llvm.func<void (ptr, ptr)>",
                "!llvm.func<ptr (i64, ...)>",
                "!llvm.func<ptr (ptr, ptr, ptr)>",
                "!llvm.func<ptr (ptr, i64)>",
                "!llvm.func<ptr (ptr, ptr, i64)>",
                "!llvm.func<ptr (ptr, ptr, i64, ptr)>",
                "!llvm.func<i32 (ptr, ptr, ptr)>",
            )
        }
        self._external = ir.Attribute.parse("#llvm.linkage<external>")
        self.module = ir.Module.create()
        self.symbols: dict[str, int] = {}
        self.keepalive: list[Any] = []
        function = self._declare(ENTRY, "!llvm.func<i32 (ptr, ptr, ptr, ptr)>")
        pointer, status = self.kind("!llvm.ptr"), self.kind("i32")
        self.entry = self.block = function.regions[0].blocks.append(*[pointer] * 4)
        # The slots of what it owns, and of what the guards hand over; the number of the former.
        self._slots: dict[ir.Value, int] = {}
        self._fetched: dict[ir.Value, int] = {}
        self._size = self.integer("i64", 1)
        with ir.InsertionPoint(self.block):
            self._owned = llvm.AllocaOp(pointer, self._size, pointer).result
        # Drops as many of these as its second argument says, and returns the first one.
        self._exit = function.regions[0].blocks.append(status, self.kind("i64"))
        entry, self.block = self.block, self._exit
        self._call(_RELEASE, _RELEASE_TYPE, [self._owned, self._exit.arguments[1]])
        with ir.InsertionPoint(self._exit):
            llvm.ReturnOp(arg=self._exit.arguments[0])
        self.block = entry

    def kind(self, text: str) -> ir.Type:
        """The type spelt `text`."""
        return self._types[text]

    def integer(self, text: str, value: int) -> ir.Value:
        """A constant of the type spelt `text`."""
        with ir.InsertionPoint(self.block):
            return llvm.ConstantOp(
                self.kind(text), ir.IntegerAttr.get(self.kind(text), value)
            ).result

    def local(self, index: int, error: type[Exception], message: str) -> ir.Value:
        """The local at `index`, borrowed; where it is NULL, `error` with `message` of its name."""
        if not 0 <= index < len(self._framelocals):
            raise UnsupportedPlan(f"no local {index} among {self._framelocals}")
        pointer = self.kind("!llvm.ptr")
        no_flags = ir.IntegerAttr.get(self.kind("i32"), 0)
        with ir.InsertionPoint(self.block):
            slot = llvm.GEPOp(pointer, self.entry.arguments[0], [], [index], pointer, no_flags)
            value = llvm.LoadOp(pointer, slot.result).result
        unbound = self._leave_if_null(value)
        after, self.block = self.block, unbound
        operands = [
            self._external_object(error.__name__, error),
            self._external_object(f"unbound_{index}", message.format(self._framelocals[index])),
        ]
        self._call("PyErr_SetObject", "!llvm.func<void (ptr, ptr)>", operands)
        self.leave(RAISED)
        self.block = after
        return value

    def fetched(self, index: int) -> ir.Value:
        """What the guards hand over at `index`, borrowed until it is dropped."""
        with ir.InsertionPoint(self.block):
            slot = self._element(self.entry.arguments[2], index)
            value = llvm.LoadOp(self.kind("!llvm.ptr"), slot).result
        self._fetched[value] = index
        return value

    def closure(self) -> ir.Value:
        """The closure of the function, borrowed."""
        return self.entry.arguments[3]

    def object(self, index: int) -> ir.Value:
        """The constant object `index` of the side list, borrowed."""
        return self._external_object(f"object_{index}", self._objects[index])

    def at(self, op: ir.Operation) -> ir.Value:
        """The function, in the plan's globals, that does `op` in a frame, or a null pointer."""
        if "at" not in op.attributes:
            return self.null()
        index = op.attributes["at"].value
        if self.globals is None:
            raise UnsupportedPlan("the globals of the function are not known")
        code = self._objects[index]
        skip_frames_of(code, and_below=False)
        return self._external_object(f"at_{index}", FunctionType(code, self.globals))

    def new_tuple(self, items: Sequence[ir.Value]) -> ir.Value:
        """A new tuple of `items`, owned by the function."""
        size = self.integer("i64", len(items))
        return self.own(self._call("PyTuple_Pack", "!llvm.func<ptr (i64, ...)>", [size, *items]))

    def call(self, name: str, signature: str, operands: list[ir.Value]) -> ir.Value:
        """What the function `name` returns, a new reference or NULL with an error set."""
        return self.own(self._call(name, signature, operands))

    def effect(self, name: str, operands: list[ir.Value]) -> None:
        """Call the function `name`, which returns -1 with an error set, or 0."""
        status = self._status(name, operands)
        self._leave_unless_zero(status, self.integer("i32", RAISED))

    def null(self) -> ir.Value:
        """The null pointer."""
        with ir.InsertionPoint(self.block):
            return llvm.ZeroOp(self.kind("!llvm.ptr")).result

    def array(self, items: Sequence[ir.Value]) -> ir.Value:
        """An array of `items` on the stack."""
        array = self.space(len(items))
        for position, item in enumerate(items):
            with ir.InsertionPoint(self.block):
                llvm.StoreOp(item, self._element(array, position))
        return array

    def space(self, n: int) -> ir.Value:
        """Room for `n` pointers on the stack."""
        pointer = self.kind("!llvm.ptr")
        size = self.integer("i64", max(n, 1))
        with ir.InsertionPoint(self.block):
            return llvm.AllocaOp(pointer, size, pointer).result

    def _element(self, array: ir.Value, position: int) -> ir.Value:
        pointer = self.kind("!llvm.ptr")
        no_flags = ir.IntegerAttr.get(self.kind("i32"), 0)
        return llvm.GEPOp(pointer, array, [], [position], pointer, no_flags).result

    def run_program(self, inputs: Sequence[ir.Value], n_outputs: int) -> list[ir.Value]:
        """The outputs of the host program, owned by the function."""
        outputs = self.space(n_outputs)
        program = self.address("host_program", self.native_program)
        operands = [program, self.array(inputs), outputs]
        return self.status_call("trident_program_run", operands, outputs, n_outputs)

    def get(self, name: str, *operands: ir.Value) -> ir.Value:
        """What the function `name` finds, or stock runs the frame."""
        out = self.space(1)
        return self.status_call(name, [*operands, out], out, 1)[0]

    def status_call(
        self, name: str, operands: list[ir.Value], outputs: ir.Value, n_outputs: int
    ) -> list[ir.Value]:
        """Call the function `name`, which returns a status and puts its results into `outputs`;
        these, owned by the function."""
        status = self._status(name, operands)
        self._leave_unless_zero(status, status)
        values = []
        for position in range(n_outputs):
            with ir.InsertionPoint(self.block):
                slot = self._element(outputs, position)
                values.append(llvm.LoadOp(self.kind("!llvm.ptr"), slot).result)
        for value in values:
            self._keep(value)
        return values

    def _status(self, name: str, operands: list[ir.Value]) -> ir.Value:
        """What the function `name` of three or four pointers returns, an i32."""
        pointers = ", ".join(["ptr"] * len(operands))
        return self._call(name, f"!llvm.func<i32 ({pointers})>", operands, self.kind("i32"))

    def _leave_unless_zero(self, value: ir.Value, status: ir.Value) -> None:
        """Go on in a new block if the i32 `value` is 0; else release all and return `status`."""
        zero, after = self.integer("i32", HIT), self.block.create_after()
        with ir.InsertionPoint(self.block):
            equal = ir.IntegerAttr.get(self.kind("i64"), 0)
            is_zero = llvm.ICmpOp(equal, value, zero).result
            arguments = [status, self._n_owned()]
            llvm.CondBrOp(is_zero, [], arguments, after, self._exit)
        self.block = after

    def leave_unless_same(self, value: ir.Value, expected: ir.Value) -> None:
        """Go on if the two are the same object; else stock is to run the frame."""
        stock, after = self.integer("i32", STOCK), self.block.create_after()
        with ir.InsertionPoint(self.block):
            equal = ir.IntegerAttr.get(self.kind("i64"), 0)
            is_same = llvm.ICmpOp(equal, value, expected).result
            llvm.CondBrOp(is_same, [], [stock, self._n_owned()], after, self._exit)
        self.block = after

    def own(self, made: ir.Value) -> ir.Value:
        """`made`, a new reference that the function owns; where it is NULL, an error is set."""
        failed = self._leave_if_null(made)
        after, self.block = self.block, failed
        self.leave(RAISED)
        self.block = after
        self._keep(made)
        return made

    def _keep(self, value: ir.Value) -> None:
        """Own `value`."""
        slot = self._slots[value] = len(self._slots)
        count = ir.IntegerAttr.get(self.kind("i64"), len(self._slots))
        self._size.owner.attributes["value"] = count
        with ir.InsertionPoint(self.block):
            llvm.StoreOp(value, self._element(self._owned, slot))

    def _n_owned(self) -> ir.Value:
        return self.integer("i64", len(self._slots))

    def drop(self, values: Sequence[ir.Value]) -> None:
        """Drop those of `values` that the function owns, or that the guards handed over."""
        for array, slots in (
            (self._owned, self._slots),
            (self.entry.arguments[2], self._fetched),
        ):
            places = sorted(slots[value] for value in values if value in slots)
            while places:
                first, n = places[0], 1
                while n < len(places) and places[n] == first + n:
                    n += 1
                with ir.InsertionPoint(self.block):
                    start = self._element(array, first)
                self._call(_RELEASE, _RELEASE_TYPE, [start, self.integer("i64", n)])
                places = places[n:]

    def finish(self, value: ir.Value) -> None:
        """Return `value` as a hit."""
        self._call("Py_IncRef", "!llvm.func<void (ptr)>", [value])
        with ir.InsertionPoint(self.block):
            llvm.StoreOp(value, self.entry.arguments[1])
        self.leave(HIT)

    def leave(self, status: int) -> None:
        """End the current block: drop what is owned, and return `status`."""
        arguments = [self.integer("i32", status), self._n_owned()]
        with ir.InsertionPoint(self.block):
            llvm.BrOp(arguments, self._exit)

    def _external_object(self, name: str, value: Any) -> ir.Value:
        if name not in self.symbols:
            self.keepalive.append(value)
        return self.address(name, id(value))

    def address(self, name: str, value: int) -> ir.Value:
        """The address `value`, linked as the symbol `name`."""
        if name not in self.symbols:
            self.symbols[name] = value
            with ir.InsertionPoint(self.module.body):
                llvm.GlobalOp(self.kind("i8"), name, self._external)
        with ir.InsertionPoint(self.block):
            return llvm.AddressOfOp(self.kind("!llvm.ptr"), name).result

    def _leave_if_null(self, value: ir.Value) -> ir.Block:
        """Go on in a new block unless `value` is NULL; returns the block for that case."""
        after = self.block.create_after()
        if_null = after.create_after()
        with ir.InsertionPoint(self.block):
            null = llvm.ZeroOp(self.kind("!llvm.ptr")).result
            equal = ir.IntegerAttr.get(self.kind("i64"), 0)
            is_null = llvm.ICmpOp(equal, value, null).result
            llvm.CondBrOp(is_null, [], [], if_null, after)
        self.block = after
        return if_null

    def _declare(self, name: str, signature: str) -> ir.OpView:
        with ir.InsertionPoint(self.module.body):
            kind = ir.TypeAttr.get(self.kind(signature))
            return llvm.LLVMFuncOp(name, kind, linkage=self._external)

    def _call(
        self,
        name: str,
        signature: str,
        operands: list[ir.Value],
        result: ir.Type | None = None,
    ) -> ir.Value | None:
        if name not in self.symbols:
            ours = name.startswith("trident_")
            self.symbols[name] = _frame.program_function(name) if ours else c_api(name)
            self._declare(name, signature)
        variadic = "..." in signature
        if result is None and signature.startswith("!llvm.func<ptr"):
            result = self.kind("!llvm.ptr")
        with ir.InsertionPoint(self.block):
            return llvm.CallOp(
                result,
                operands,
                [],
                [],
                callee=name,
                var_callee_type=ir.TypeAttr.get(self.kind(signature)) if variadic else None,
            ).result


PlanRule = Callable[[Context, ir.Operation, list[ir.Value]], "ir.Value | list[ir.Value] | None"]
PLAN_RULES: dict[str, PlanRule] = {}


def plan_rule(*names: str) -> Callable[[PlanRule], PlanRule]:
    """Registers the rule for the operations ``scm.<name>``."""
    return register(PLAN_RULES, *(f"scm.{name}" for name in names))


@plan_rule("argument")
def lower_argument(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    index = op.attributes["index"].value
    return context.local(index, UnboundLocalError, _UNBOUND_LOCAL)


@plan_rule("free_variable")
def lower_free_variable(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    return context.local(op.attributes["index"].value, NameError, _UNBOUND_FREE_VARIABLE)


# The interpreter's own words (CPython 3.11 to 3.13).
_UNBOUND_LOCAL = "cannot access local variable '{}' where it is not associated with a value"
_UNBOUND_FREE_VARIABLE = (
    "cannot access free variable '{}' where it is not associated with a value in enclosing scope"
)


@plan_rule("constant")
def lower_constant(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    return context.object(op.attributes["object"].value)


@plan_rule("tuple")
def lower_tuple(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    return context.new_tuple(operands)


@plan_rule("list", "dict")
def lower_list_or_dict(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    function = f"trident_build_{op.name.removeprefix('scm.')}"
    n = context.integer("i64", len(operands))
    return context.call(function, "!llvm.func<ptr (ptr, i64)>", [context.array(operands), n])


@plan_rule("get_attr")
def lower_get_attr(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    name = context.object(op.attributes["object"].value)
    return context.get("trident_get_attr", context.at(op), operands[0], name)


@plan_rule("get_item")
def lower_get_item(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    return context.get("trident_get_item", context.at(op), *operands)


@plan_rule(*_PROPERTIES)
def lower_property(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    no_dimension = "object" not in op.attributes
    dimension = context.null() if no_dimension else context.object(op.attributes["object"].value)
    return context.get(f"trident_{op.name.removeprefix('scm.')}", operands[0], dimension)


@plan_rule("as_number")
def lower_as_number(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    function, value = operands
    expected = context.object(op.attributes["object"].value)
    context.leave_unless_same(function, expected)
    return value


@plan_rule("get_global")
def lower_get_global(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    if context.globals is None:
        raise UnsupportedPlan("the globals of the function are not known")
    # The caller keeps the dict alive: a function with other globals does not get here.
    globals_ = context.address("globals", id(context.globals))
    name = context.object(op.attributes["object"].value)
    signature = "!llvm.func<ptr (ptr, ptr, ptr)>"
    return context.call("trident_get_global", signature, [context.at(op), globals_, name])


@plan_rule("call_function")
def lower_call_function(context: Context, op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    if "at" in op.attributes:
        n = context.integer("i64", len(operands))
        signature = "!llvm.func<ptr (ptr, ptr, i64)>"
        return context.call("trident_call", signature, [context.at(op), context.array(operands), n])
    function, *arguments = operands
    n = context.integer("i64", len(arguments))
    no_keywords = context.null()
    signature = "!llvm.func<ptr (ptr, ptr, i64, ptr)>"
    values = [function, context.array(arguments), n, no_keywords]
    return context.call("PyObject_Vectorcall", signature, values)


@plan_rule("store_attr")
def lower_set_attr(context: Context, op: ir.Operation, operands: list[ir.Value]) -> None:
    owner, value = operands
    name = context.object(op.attributes["object"].value)
    context.effect("trident_store_attr", [context.at(op), owner, name, value])


@plan_rule("store_item")
def lower_set_item(context: Context, op: ir.Operation, operands: list[ir.Value]) -> None:
    context.effect("trident_store_item", [context.at(op), *operands])


@plan_rule("store_global")
def lower_set_global(context: Context, op: ir.Operation, operands: list[ir.Value]) -> None:
    if context.globals is None:
        raise UnsupportedPlan("the globals of the function are not known")
    globals_ = context.address("globals", id(context.globals))
    name = context.object(op.attributes["object"].value)
    context.effect("PyDict_SetItem", [globals_, name, *operands])


@plan_rule("store_cell")
def lower_set_cell(context: Context, op: ir.Operation, operands: list[ir.Value]) -> None:
    index = context.object(op.attributes["object"].value)
    context.effect("trident_store_cell", [context.closure(), index, *operands])


@plan_rule("run_program")
def lower_run_program(
    context: Context, op: ir.Operation, operands: list[ir.Value]
) -> list[ir.Value]:
    if context.native_program == 0:
        raise UnsupportedPlan("the graph has no host program")
    return context.run_program(operands, len(op.results))


@plan_rule("return")
def lower_return(context: Context, op: ir.Operation, operands: list[ir.Value]) -> None:
    context.finish(operands[0])


@plan_rule("run_code")
def reject_run_code(context: Context, op: ir.Operation, operands: list[ir.Value]) -> None:
    raise UnsupportedPlan(op.attributes["reason"].value)
