"""Inductor's generated wrapper to ``scm.program``: its statements, one by one.

The function ``call(args)`` is straight-line Python: it takes the inputs out of the list, checks
their layout, allocates buffers, calls kernels and operators, and returns. A name is what the live
module holds, known by identity; sizes are Python's own expressions over the inputs that are ints. A
statement that is not known here raises UnsupportedGraph, which leaves the graph to stock.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch_mlir import ir

from trident.capture import triton
from trident.capture.graph import Line
from trident.capture.inductor import Kernel, Wrapper, host_functions, operator_of
from trident.codegen.dialect import Emitter
from trident.codegen.import_graph import (
    NO_TENSOR,
    Call,
    Inference,
    LaunchCall,
    Operands,
    Signature,
    Slot,
    emit_call,
    emit_launch,
)
from trident.errors import UnsupportedGraph
from trident.texts import safe_text


@dataclasses.dataclass(slots=True, frozen=True)
class Layout:
    """Sizes, then as many strides, then perhaps an offset: ints, or Slots of integers. `dtype`: of
    a tensor that is allocated, on the current CUDA device if `on_cuda`."""

    numbers: tuple[int | Slot, ...]
    dtype: torch.dtype | None = None
    on_cuda: bool = False


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Check:
    """A tensor must have `layout`, or an address that is a multiple of `alignment` bytes;
    `function` says so where it has not, given `name` unless that is None."""

    layout: Layout | None
    alignment: int
    function: Any
    name: str | None
    line: Line


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class KernelCall:
    """A call of `kernel`; `arguments` are Slots and ints."""

    kernel: Kernel
    arguments: tuple[int | Slot, ...]
    line: Line


def import_wrapper(wrapper: Wrapper, emitter: Emitter) -> Signature:
    """Append a ``scm.program`` for what Inductor made of a graph.

    Raises UnsupportedGraph, naming the statement, for what has no native form.
    """
    importer = _Importer(wrapper, emitter)
    importer.run()
    around = wrapper.around
    places = {position: place for place, position in enumerate(importer.inputs)}
    aligned = {places.get(position) for position in (*wrapper.aligned, *importer.aligned)}
    missing = [p for p in (*around.mutated, *around.epilogue_inputs) if p not in places]
    if missing:
        raise UnsupportedGraph(
            f"AOTAutograd uses its input {missing[0]}, which the program does not"
        )
    outputs = tuple(importer.outputs)
    epilogue = around.epilogue
    if epilogue is None and len(outputs) != around.n_results:
        raise UnsupportedGraph(f"it returns {len(outputs)} values of {around.n_results}")
    if epilogue is not None:
        if outputs != tuple(range(len(outputs))):
            epilogue = _in_order(epilogue, outputs)
        outputs = tuple(range(around.n_results))
    inference = Inference(
        around.without_autocast,
        [places[position] for position in around.mutated],
        epilogue,
        [places[position] for position in around.epilogue_inputs],
        around.n_results,
        wrapper.names,
        wrapper.file,
        sorted(place for place in aligned if place is not None),
    )
    return Signature(tuple(importer.inputs), outputs, inference)


def _in_order(
    epilogue: Callable[[list[Any], list[Any]], list[Any]], places: tuple[int, ...]
) -> Callable[[list[Any], list[Any]], list[Any]]:
    """`epilogue`, for a program whose outputs are the graph's in another order: at `places`."""

    def in_order(inputs: list[Any], outputs: list[Any]) -> list[Any]:
        return epilogue(inputs, [outputs[place] for place in places])

    return in_order


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class _Dimensions:
    """The sizes or strides of an input: `step` is "size" or "stride"."""

    step: str
    tensor: ir.Value


@dataclasses.dataclass(slots=True, frozen=True)
class _Stream:
    """The current stream of a CUDA device."""

    device: int


class _Several:
    """What an operator returned: a tuple, or a list, of tensors."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class _Importer:
    def __init__(self, wrapper: Wrapper, emitter: Emitter) -> None:
        self.wrapper = wrapper
        self.emitter = emitter
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.aligned: list[int] = []  # inputs that it copies where they are not
        self._devices: list[int] = []  # of the regions that it is in
        self._known = host_functions()
        # What each local name is: a tensor, an integer (both values of the program), _Several.
        self._locals: dict[str, Any] = {}
        self._constants: dict[str, ir.Value] = {}
        self._returned = False
        self._depth = 0
        self._has_run = False  # a kernel or an operator, so far

    # Statements

    def run(self) -> None:
        statements = list(self.wrapper.body)
        names = _unpacked(statements, self.wrapper.parameter)
        nodes = [node for statement in statements for node in ast.walk(statement)]
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        numbers = self._numbers(nodes)
        self.emitter.start_program(len(names))
        around = self.wrapper.around
        wanted = {*around.mutated, *around.epilogue_inputs}
        for position, name in enumerate(names):
            if name not in numbers and (name in used or position in wanted):
                (value,) = self.emitter.step("input", results=1, index=len(self.inputs))
                self.inputs.append(position)
                self._locals[name] = value
        for position, name in enumerate(names):
            if name in numbers:
                self._locals[name] = self.emitter.integer_step(
                    "integer_input", [], index=len(self.inputs)
                )
                self.inputs.append(position)
        for statement in statements:
            try:
                self._statement(statement)
            except UnsupportedGraph as error:
                text = ast.unparse(statement).splitlines()[0]
                text = text if len(text) < 200 else text[:197] + "..."
                raise UnsupportedGraph(f"{error} (Inductor: {safe_text(text)})") from None
        if not self._returned:
            raise UnsupportedGraph("it does not return")

    def _numbers(self, nodes: list[ast.AST]) -> set[str]:
        """The names that are ints, by what they are used for. (The program asks what its inputs
        are: a name that is missed here, or wrong, leaves the call to stock.)"""
        found: set[str] = set()
        aliases: dict[str, str] = {}
        returned = {id(node.value) for node in nodes if isinstance(node, ast.Return)}
        for node in nodes:
            if id(node) in returned:
                continue
            match node:
                case ast.BinOp() | ast.UnaryOp() | ast.Tuple(ctx=ast.Load()):
                    found |= {n.id for n in ast.iter_child_nodes(node) if isinstance(n, ast.Name)}
                case ast.Call(func=ast.Name(id=name), args=arguments):
                    types = self.wrapper.kernel_types.get(name, ())
                    for argument, kind in zip(arguments, types, strict=False):
                        if isinstance(argument, ast.Name) and not kind.endswith("*"):
                            found.add(argument.id)
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=source)):
                    aliases[target] = source
        symbols = {name for name in aliases if name in found or _SYMBOL.fullmatch(name)}
        return found | {aliases[name] for name in symbols}

    def _statement(self, statement: ast.stmt) -> None:
        if self._returned:
            raise UnsupportedGraph("it goes on after its return")
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                made = self._expression(value)
                self._drop(name)
                self._locals[name] = made
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=ast.Call() as call):
                self._call(call)  # an operator's results without a user are released at once
            case ast.Delete(targets=targets) if all(isinstance(t, ast.Name) for t in targets):
                for target in targets:
                    self._drop(target.id)  # type: ignore[attr-defined]
            case ast.Return(value=ast.Tuple(elts=elements)):
                self._return(elements)
            case ast.If(
                test=ast.UnaryOp(op=ast.Not(), operand=condition),
                body=[ast.Raise(cause=None)],
                orelse=[],
            ):
                self._require(condition)
            case ast.If(
                test=ast.Call(
                    func=ast.Attribute(value=condition, attr="item"), args=[], keywords=[]
                ),
                body=body,
                orelse=orelse,
            ) if orelse:
                self._branch(statement, self._tensor(condition), [body, orelse])
            case ast.With(
                items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=None)], body=body
            ):
                self._region(call, body)
            case ast.Pass():
                pass
            case _:
                raise UnsupportedGraph("a statement that is not known")

    def _region(self, call: ast.Call, body: list[ast.stmt]) -> None:
        """Statements with a CUDA device as the current one."""
        index = self._device_of(call)
        if self._known.get(self._function(call.func)) != "device_guard" or index is None:
            raise UnsupportedGraph("a region that is not known")
        self.emitter.step("device_enter", index=index)
        self._devices.append(index)
        for statement in body:
            self._statement(statement)
        if not self._returned:
            self.emitter.step("device_exit")
        self._devices.pop()

    def _device_of(self, call: ast.Call) -> int | None:
        """The index of the device that is the only argument of a call; None for other calls."""
        index = self._expression(call.args[0]) if len(call.args) == 1 else None
        is_device = type(index) is int and index >= 0 and not call.keywords
        return index if is_device else None

    def _require(self, condition: ast.expr) -> None:
        """Stock runs the graph, and raises, where this does not hold of the inputs' sizes."""
        match condition:
            case ast.BoolOp(op=ast.And(), values=conditions):
                for part in conditions:
                    self._require(part)
            case ast.Compare(left=left, ops=operations, comparators=others):
                for operation, right in zip(operations, others, strict=True):
                    if type(operation) not in _REQUIRED:
                        raise UnsupportedGraph("a condition that is not known")
                    name, swapped = _REQUIRED[type(operation)]
                    values = [self._integer(self._expression(node)) for node in (left, right)]
                    self.emitter.integer_step(name, values[::-1] if swapped else values)
                    left = right
            case _:
                raise UnsupportedGraph("a condition that is not known")

    def _branch(
        self, statement: ast.stmt, condition: ir.Value, bodies: list[list[ast.stmt]]
    ) -> None:
        """Of two subgraphs one runs; what both put into one name is what comes out."""
        before, kept = self._locals, set(self._locals)
        label = self.emitter.label(f"{self.wrapper.file}:{statement.lineno}")
        outside = self.emitter.body
        first, second = map(self._given_by_subgraphs, bodies)
        counts = {name: n for name, n in first.items() if second.get(name) == n}
        results, points = self.emitter.branch(condition, sum(counts.values()), label)
        for body, point in zip(bodies, points, strict=True):
            self._locals, self.emitter.body = dict(before), point
            for inner in body:
                self._statement(inner)
            given = [tensor for name in counts for tensor in _tensors(self._locals.get(name))]
            if len(given) != len(results):
                raise UnsupportedGraph("branches that give different things")
            self.emitter.step("give", given)
            kept &= set(self._locals)
        self.emitter.body = outside
        # What else a branch put into a name is not known afterwards.
        kept -= {name for body in bodies for name in _assigned(body)}
        self._locals = {name: value for name, value in before.items() if name in kept}
        made = iter(results)
        for name, count in counts.items():
            self._locals[name] = _Several([next(made) for _ in range(count)])

    def _given_by_subgraphs(self, body: list[ast.stmt]) -> dict[str, int]:
        """The names that a subgraph's results are put into, and how many these are."""
        found: dict[str, int] = {}
        for statement in body:
            match statement:
                case ast.Assign(
                    targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=function))
                ) if (definition := self.wrapper.subgraph(function)) is not None:
                    returned = definition.body[-1]
                    if isinstance(returned, ast.Return):
                        found[name] = len(_elements(returned))
        return found

    def _subgraph(self, definition: ast.FunctionDef, node: ast.Call) -> Any:
        """A function of the module, called with one list, which it clears: its statements."""
        parameters = definition.args.args
        if len(parameters) != 1 or len(node.args) != 1 or node.keywords:
            raise UnsupportedGraph("a subgraph with other arguments")
        values = self._expression(node.args[0])
        if not isinstance(values, list):
            raise UnsupportedGraph("a subgraph whose arguments are no list")
        if self._depth >= _DEEPEST:
            raise UnsupportedGraph(f"subgraphs nested {_DEEPEST} deep")
        statements = list(definition.body)
        names = _unpacked(statements, parameters[0].arg)
        if len(names) != len(values):
            raise UnsupportedGraph("a subgraph with another number of arguments")
        outside = self._locals
        if isinstance(node.args[0], ast.Name):  # the list is empty from here on
            outside[node.args[0].id] = []
        # What is outside stays alive, under names that no statement has.
        kept = {f"{self._depth} {name}": value for name, value in outside.items()}
        self._locals = {**kept, **dict(zip(names, values, strict=True))}
        self._depth += 1
        for statement in statements[:-1]:
            self._statement(statement)
        match statements[-1:]:
            case [ast.Return(value=ast.Tuple(elts=elements))]:
                returned = [self._expression(element) for element in elements]
            case _:
                raise UnsupportedGraph("a subgraph that returns in a way that is not known")
        self._depth -= 1
        inside, self._locals = self._locals, outside
        # Its names are gone; what it returns, and what is outside, is not.
        self._locals["subgraph's results"] = _Several(returned)
        for name in set(inside) - set(kept):
            self._forget(inside[name])
        return self._locals.pop("subgraph's results")

    def _drop(self, name: str) -> None:
        """`name` is deleted, or another thing from now on; inputs belong to the caller."""
        former = self._locals.pop(name, None)
        if former is not None:
            self._forget(former)

    def _forget(self, value: Any) -> None:
        """Releases the tensors of `value` to which no name refers any more."""
        for tensor in _tensors(value):
            named = any(tensor in _tensors(v) for v in self._locals.values())
            made = ("scm.operator", "scm.empty_strided", "scm.reinterpret")
            if not named and _step_of(tensor) in made:
                self.emitter.step("release", [tensor])

    def _return(self, elements: list[ast.expr]) -> None:
        values = [self._expression(element) for element in elements]
        kinds = [_output_kind(value) for value in values]
        for _ in self._devices:
            self.emitter.step("device_exit")
        # The program's outputs are tensors, then integers, then Nones.
        order = sorted(range(len(values)), key=kinds.__getitem__)
        self.emitter.step(
            "yield",
            [values[i] for i in order if kinds[i] == _TENSOR],
            integers=[self._integer(values[i]) for i in order if kinds[i] == _INTEGER],
            nones=kinds.count(_NONE),
        )
        self.outputs = [order.index(i) for i in range(len(values))]
        self._returned = True

    # Expressions

    def _expression(self, node: ast.expr) -> Any:
        """A value of the program, _Several, or what a constant expression is."""
        match node:
            case ast.Name(id=name) if name in self._locals:
                return self._locals[name]
            case ast.Call():
                found = self._constant_call(node)
                return self._call(node) if found is _NOTHING else found
            case ast.Subscript(value=value, slice=ast.Constant(value=int(index))):
                source = self._expression(value)
                items = source.items if isinstance(source, _Several) else source
                if isinstance(items, list) and index < len(items):
                    if items[index] is _DROPPED:
                        raise UnsupportedGraph("a number that an operator returns")
                    return items[index]
                if isinstance(source, _Dimensions) and index >= 0:
                    return self.emitter.integer_step(source.step, [source.tensor], index=index)
                raise UnsupportedGraph("an item of something else than an operator's results")
            case ast.Tuple(elts=elements):
                return tuple(map(self._expression, elements))
            case ast.List(elts=elements):
                return list(map(self._expression, elements))
            case ast.BinOp(left=left, op=operation, right=right):
                return self._binary(operation, self._expression(left), self._expression(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._expression(operand)
                return self._binary(ast.Mult(), value, -1) if _is_value(value) else -value
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._global(name)
            case ast.Attribute(value=value, attr=name):
                owner = self._expression(value)
                if _has_value(owner):
                    raise UnsupportedGraph(f"the attribute {name} of what it computes")
                return _attribute(owner, name)
            case _:
                raise UnsupportedGraph("an expression that is not known")

    def _global(self, name: str) -> Any:
        names = self.wrapper.names
        if name in names:
            value = names[name]
            if type(value) in (torch.Tensor, torch.nn.Parameter):
                return self._constant_tensor(name, value)
            return value
        builtins = names.get("__builtins__")
        known = builtins if isinstance(builtins, dict) else vars(builtins)
        if name not in known:
            raise UnsupportedGraph(f"the name {name} is not known")
        return known[name]

    def _constant_tensor(self, name: str, tensor: torch.Tensor) -> ir.Value:
        if name not in self._constants:
            index = self.emitter.program.objects.add(tensor, f"tensor {tuple(tensor.shape)}")
            (value,) = self.emitter.step("constant_tensor", results=1, object=index)
            self._constants[name] = value
        return self._constants[name]

    def _binary(self, operation: ast.operator, left: Any, right: Any) -> Any:
        if not _is_value(left) and not _is_value(right):
            return _fold(operation, left, right)
        name = _BINARY.get(type(operation))
        if isinstance(operation, ast.Sub):
            right, name = self._binary(ast.Mult(), right, -1), "add"
        if name is None:
            raise UnsupportedGraph("arithmetic that is not known")
        return self.emitter.integer_step(name, [self._integer(left), self._integer(right)])

    def _integer(self, value: Any) -> ir.Value:
        if _is_value(value) and _is_integer(value):
            return value
        if type(value) is int and -(2**62) < value < 2**63:
            return self.emitter.integer_step("integer", [], value=value)
        raise UnsupportedGraph("something else than an int where an int belongs")

    def _tensor(self, node: ast.expr) -> ir.Value:
        value = self._expression(node)
        if _is_value(value) and not _is_integer(value):
            return value
        raise UnsupportedGraph("something else than a tensor where a tensor belongs")

    def _constant_call(self, node: ast.Call) -> Any:
        """What a call is that only makes a constant: of a device, or a float."""
        try:
            function = self._function(node.func)
        except UnsupportedGraph:
            return _NOTHING
        if function not in (torch.device, float):
            return _NOTHING
        arguments = [self._expression(a) for a in node.args]
        named = {str(k.arg): self._expression(k.value) for k in node.keywords}
        if any(map(_has_value, [*arguments, *named.values()])):
            raise UnsupportedGraph("a constant of something that it computes")
        return function(*arguments, **named)

    # Calls

    def _function(self, node: ast.expr) -> Any:
        """The object that is called."""
        match node:
            case ast.Name(id=name) if name not in self._locals:
                return self._global(name)
            case ast.Attribute(value=value, attr=name):
                return _attribute(self._function(value), name)
            case _:
                raise UnsupportedGraph("a call of something that it computes")

    def _call(self, node: ast.Call) -> Any:
        if any(isinstance(a, ast.Starred) for a in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise UnsupportedGraph("a call with starred arguments")
        if isinstance(node.func, ast.Name) and node.func.id not in self._locals:
            kernel = self.wrapper.kernel(node.func.id)
            if kernel is not None:
                self._kernel(kernel, node)
                return None
            subgraph = self.wrapper.subgraph(node.func.id)
            if subgraph is not None:
                return self._subgraph(subgraph, node)
        match node.func:
            case ast.Attribute(value=ast.Name(id=owner), attr="copy_") if owner in self._locals:
                return self._operator(torch.ops.aten.copy_.default, node, node.func.value)
            case ast.Attribute(value=ast.Name(id=owner), attr="zero_") if owner in self._locals:
                return self._operator(torch.ops.aten.zero_.default, node, node.func.value)
            case ast.Attribute(value=ast.Name(id=owner), attr="run") if owner not in self._locals:
                launched = triton.inductor_kernel(owner, self._global(owner))
                if launched is not None:
                    return self._launch(launched, node)
            case ast.Attribute(value=ast.Name(id=owner), attr="size" | "stride" as step) if (
                owner in self._locals and not node.args and not node.keywords
            ):
                return self._dimensions(step, self._tensor(node.func.value))
        function = self._function(node.func)
        try:
            kind = self._known.get(function)
        except TypeError:
            kind = None
        if kind in _CALLS:
            return _CALLS[kind](self, node, function)
        if function in (max, min) and not node.keywords and len(node.args) > 1:
            values = [self._expression(argument) for argument in node.args]
            if not any(map(_is_value, values)):
                return function(values)
            name = "maximum" if function is max else "minimum"
            result = self._integer(values[0])
            for value in values[1:]:
                result = self.emitter.integer_step(name, [result, self._integer(value)])
            return result
        names = [keyword.arg for keyword in node.keywords]
        operator = operator_of(function, "out" in names)
        if operator is None:
            raise UnsupportedGraph("a call of a function that is not known")
        by_overload = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        return self._operator(operator, node, by_overload=by_overload)

    def _dimensions(self, step: str, tensor: ir.Value) -> _Dimensions:
        # Integers are computed before anything else, when an input is as it was passed.
        if _step_of(tensor) != "scm.input" or self._has_run:
            raise UnsupportedGraph(f"the {step} of a tensor that it computes")
        return _Dimensions(step, tensor)

    def _line(self, node: ast.AST) -> Line:
        return Line(self.wrapper.file, "call", getattr(node, "lineno", 0))

    def _kernel(self, kernel: Kernel, node: ast.Call) -> None:
        self._has_run = True
        if len(node.args) != len(kernel.types) or node.keywords:
            raise UnsupportedGraph(f"a kernel takes {len(kernel.types)} arguments")
        operands = Operands()
        arguments: list[int | Slot] = []
        for argument, kind in zip(node.args, kernel.types, strict=True):
            kind = kind.replace("const ", "").strip()
            if kind.endswith("*"):
                arguments.append(operands.tensor(self._tensor(argument)))
                continue
            value = self._expression(argument)
            if kind != "int64_t":
                raise UnsupportedGraph(f"a kernel takes a {kind}")
            arguments.append(self._number(value, operands))
        line = self._line(node)
        call = KernelCall(kernel, tuple(arguments), line)
        self.emitter.step(
            "kernel",
            operands.tensors,
            integers=operands.integers,
            object=self.emitter.program.objects.add(call, kernel.name),
            label=self.emitter.label(f"{line.file}:{line.line}"),
        )

    def _layout(
        self, nodes: list[ast.expr], dtype: torch.dtype | None = None
    ) -> tuple[Layout, list[ir.Value]]:
        """Of sizes, strides and perhaps an offset; and the integers that its Slots are."""
        operands = Operands()
        numbers: list[int | Slot] = []
        lengths: list[int] = []
        for node in nodes:
            value = self._expression(node)
            values = value if isinstance(value, (tuple, list)) else (value,)
            lengths.append(len(values))
            numbers += [self._number(number, operands) for number in values]
        if lengths[0] != lengths[1]:
            raise UnsupportedGraph("a layout with more sizes or strides than the other")
        return Layout(tuple(numbers), dtype), operands.integers

    def _number(self, value: Any, operands: Operands) -> int | Slot:
        """An int as it is, or the Slot of one that is computed."""
        if type(value) is int and -(2**63) <= value < 2**63:
            return value
        return operands.integer(self._integer(value))

    def empty_strided(self, node: ast.Call, function: Any) -> ir.Value:
        if len(node.args) != 3 or node.keywords:
            raise UnsupportedGraph("an allocation with other arguments")
        dtype = self._expression(node.args[2])
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedGraph("an allocation without a dtype")
        layout, integers = self._layout(node.args[:2], dtype)
        on_cuda = function.__name__ == "_empty_strided_cuda"
        layout = dataclasses.replace(layout, on_cuda=on_cuda)
        index = self.emitter.program.objects.add(layout, f"{dtype}")
        (made,) = self.emitter.step("empty_strided", [], integers=integers, results=1, object=index)
        return made

    def align(self, node: ast.Call, function: Any) -> ir.Value:
        """An input, or a copy that is aligned: this is left to stock."""
        tensor = self._tensor(node.args[0])
        if len(node.args) != 1 or node.keywords or _step_of(tensor) != "scm.input":
            raise UnsupportedGraph("it aligns something else than an input")
        self.aligned.append(self.inputs[tensor.owner.attributes["index"].value])
        return tensor

    def stream(self, node: ast.Call, function: Any) -> _Stream:
        index = self._device_of(node)
        if index is None or index not in self._devices[-1:]:
            raise UnsupportedGraph("the stream of another device")
        return _Stream(index)

    def set_device(self, node: ast.Call, function: Any) -> None:
        if self._device_of(node) not in self._devices[-1:]:
            raise UnsupportedGraph("it changes the device")

    def _launch(self, kernel: triton.InductorKernel, node: ast.Call) -> None:
        """``kernel.run(…, stream=stream0)``."""
        self._has_run = True
        given = [self._expression(argument) for argument in node.args]
        keywords = {k.arg: self._expression(k.value) for k in node.keywords}
        stream = keywords.pop("stream", None)
        known = isinstance(stream, _Stream) and stream.device in self._devices[-1:]
        if keywords or not known:
            raise UnsupportedGraph("a launch with other arguments")
        launcher = kernel.launcher
        if len(given) != len(launcher.names):
            raise UnsupportedGraph(f"{kernel.name} takes {len(launcher.names)} arguments")
        operands = Operands()
        slots: list[Slot] = []
        arguments: list[Any] = []
        for value in given:
            if not _is_value(value):
                arguments.append(value)
                continue
            arguments.append(triton.Varying(len(slots)))
            slots.append(operands.integer(value) if _is_integer(value) else operands.tensor(value))
        outside = self._locals
        self._locals = dict(zip(launcher.names, given, strict=True))
        try:
            for name, text in launcher.prefix:
                self._locals[name] = self._expression(ast.parse(text, mode="eval").body)
            sizes = [self._expression(ast.parse(t, mode="eval").body) for t in launcher.grid]
        finally:
            self._locals = outside
        grid = tuple(self._number(size, operands) for size in sizes)

        def bind(kinds: tuple[str, ...], grids: tuple[triton.Grid, ...]) -> triton.Launch:
            return triton.InductorLaunch(kernel, tuple(arguments), kinds, grids[0], stream.device)

        call = LaunchCall(tuple(slots), (grid,), bind, self._line(node))
        emit_launch(self.emitter, call, kernel.kernel, operands)

    def reinterpret(self, node: ast.Call, function: Any) -> ir.Value:
        if len(node.args) != 4 or node.keywords:
            raise UnsupportedGraph("a view with other arguments")
        source = self._tensor(node.args[0])
        layout, integers = self._layout(node.args[1:])
        index = self.emitter.program.objects.add(layout, "view")
        (made,) = self.emitter.step(
            "reinterpret", [source], integers=integers, results=1, object=index
        )
        if isinstance(node.args[0], ast.Call):  # a view of a view
            self._forget(source)
        return made

    def check_layout(self, node: ast.Call, function: Any) -> None:
        if len(node.args) not in (3, 4) or node.keywords:
            raise UnsupportedGraph("a check with other arguments")
        layout, integers = self._layout(node.args[1:3])
        self._check(node, function, layout, 0, integers, node.args[3:])

    def check_alignment(self, node: ast.Call, function: Any) -> None:
        alignment = self._expression(node.args[1]) if len(node.args) in (2, 3) else None
        if type(alignment) is not int or alignment <= 0 or node.keywords:
            raise UnsupportedGraph("a check with other arguments")
        self._check(node, function, None, alignment, [], node.args[2:])

    def _check(
        self,
        node: ast.Call,
        function: Any,
        layout: Layout | None,
        alignment: int,
        integers: list[ir.Value],
        rest: list[ast.expr],
    ) -> None:
        name = self._expression(rest[0]) if rest else None
        if name is not None and type(name) is not str:
            raise UnsupportedGraph("a check with a name that is no text")
        check = Check(layout, alignment, function, name, self._line(node))
        self.emitter.step(
            "check",
            [self._tensor(node.args[0])],
            integers=integers,
            object=self.emitter.program.objects.add(check, name or "check"),
            label=self.emitter.label(f"{check.line.file}:{check.line.line}"),
        )

    def _operator(
        self, operator: Any, node: ast.Call, *owner: ast.expr, by_overload: bool = False
    ) -> Any:
        """`owner`: the tensor whose method it is."""
        self._has_run = True
        schema = operator._schema
        given: dict[str, ast.expr] = {str(k.arg): k.value for k in node.keywords}
        positional = [a for a in schema.arguments if not a.kwarg_only]
        values = [*owner, *node.args]
        if len(values) > len(positional):
            raise UnsupportedGraph(f"{operator} with {len(values)} arguments")
        for argument, value in zip(positional, values, strict=False):
            if argument.name in given:
                raise UnsupportedGraph(f"{operator} gets its argument {argument.name} twice")
            given[argument.name] = value
        operands = Operands()
        arguments = [
            self._argument(operator, a, given.pop(a.name, None), operands) for a in schema.arguments
        ]
        if given:
            raise UnsupportedGraph(f"{operator} has no argument {next(iter(given))}")
        returns: list[int | None] = []
        for result in schema.returns:
            if str(result.type) not in ("Tensor", "int"):
                raise UnsupportedGraph(f"{operator} returns {result.type}")
            returns.append(None if str(result.type) == "Tensor" else NO_TENSOR)
        line = self._line(node)
        call = Call(operator, arguments, returns, line, is_factory=False, by_overload=by_overload)
        items = emit_call(self.emitter, call, operands)
        items = [
            _DROPPED if count == NO_TENSOR else item
            for item, count in zip(items, returns, strict=True)
        ]
        if not items:
            return None
        if items == [_DROPPED]:
            raise UnsupportedGraph(f"{operator} returns a number")
        return items[0] if len(items) == 1 else _Several(items)

    def _argument(
        self,
        operator: Any,
        argument: Any,
        node: ast.expr | None,
        operands: Operands,
    ) -> tuple[str, Any]:
        if node is None:
            if not argument.has_default_value():
                raise UnsupportedGraph(f"{operator} lacks its argument {argument.name}")
            return "default", None
        value = self._expression(node)
        kind = str(argument.type)

        def operand(item: Any) -> Slot:
            if not _is_value(item) or _is_integer(item):
                raise UnsupportedGraph(f"{operator} gets no tensor as {argument.name}")
            return operands.tensor(item)

        def number(item: Any) -> Any:
            return operands.integer(self._integer(item)) if _is_value(item) else item

        if kind in ("Tensor", "Optional[Tensor]") and value is not None:
            if type(value) in (bool, int, float, complex):
                return "number", (value, None)
            return "tensor", operand(value)
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            if not isinstance(value, (list, tuple)):
                raise UnsupportedGraph(f"{operator} gets no list as {argument.name}")
            how = "tensors" if kind == "List[Tensor]" else "optional_tensors"
            return how, [None if item is None else operand(item) for item in value]
        if not _has_value(value):
            return "constant", list(value) if isinstance(value, tuple) else value
        if kind.removeprefix("Optional[").removesuffix("]") in ("int", "number"):
            return "computed", number(value)
        if "List[int]" in kind and isinstance(value, (list, tuple)):
            return "computed", [number(item) for item in value]
        raise UnsupportedGraph(f"{operator} computes its argument {argument.name} ({kind})")


_NOTHING: Any = object()
_DROPPED: Any = object()  # a number that an operator returns
_DEEPEST = 16
# The step, and whether its operands are the other way round.
_REQUIRED: dict[type[ast.cmpop], tuple[str, bool]] = {
    ast.Lt: ("require_less", False),
    ast.LtE: ("require_less_equal", False),
    ast.Gt: ("require_less", True),
    ast.GtE: ("require_less_equal", True),
    ast.Eq: ("require_equal", False),
    ast.NotEq: ("require_different", False),
}
_SYMBOL = re.compile(r"s\d+")  # as Inductor names the sizes that are inputs
_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Mult: "multiply",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "modulo",
}
_CALLS: dict[str, Callable[[_Importer, ast.Call, Any], Any]] = {
    "empty_strided": _Importer.empty_strided,
    "align": _Importer.align,
    "stream": _Importer.stream,
    "set_device": _Importer.set_device,
    "reinterpret": _Importer.reinterpret,
    "check_layout": _Importer.check_layout,
    "check_alignment": _Importer.check_alignment,
}


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise UnsupportedGraph(f"{safe_text(owner)} has no attribute {name}") from None


def _fold(operation: ast.operator, left: Any, right: Any) -> Any:
    """A constant expression of numbers; or ``[None] * 2``, say."""
    numbers = (int, float, complex)
    if isinstance(operation, ast.Mult) and isinstance(left, list) and type(right) is int:
        return left * right
    if type(left) not in numbers or type(right) not in numbers:
        raise UnsupportedGraph("arithmetic of something else than numbers")
    match operation:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv() if right != 0:
            return left // right
        case ast.Mod() if right != 0:
            return left % right
    raise UnsupportedGraph("arithmetic that is not known")


def _is_value(value: Any) -> bool:
    return isinstance(value, ir.Value)


def _is_integer(value: ir.Value) -> bool:
    return str(value.type) == "!scm.int"


def _step_of(tensor: ir.Value) -> str:
    """The name of the step that gives `tensor`."""
    owner = tensor.owner
    name: str = owner.name if isinstance(owner, ir.Operation) else owner.operation.name
    return name


_TENSOR, _INTEGER, _NONE = range(3)


def _output_kind(value: Any) -> int:
    if _is_value(value):
        return _INTEGER if _is_integer(value) else _TENSOR
    if type(value) is int:
        return _INTEGER
    if value is None:
        return _NONE
    raise UnsupportedGraph("it returns something else than tensors and ints")


def _has_value(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_value, value))
    return _is_value(value) or isinstance(value, (_Several, _Dimensions))


def _tensors(value: Any) -> list[ir.Value]:
    if isinstance(value, _Several):
        value = value.items
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if _is_value(value) and not _is_integer(value) else []


def _unpacked(statements: list[ast.stmt], parameter: str) -> list[str]:
    """Takes away what unpacks the list `parameter` and clears it; returns the names."""
    names: list[str] = []
    match statements[:1]:
        case [ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Name(id=source))] if (
            source == parameter and all(isinstance(t, ast.Name) for t in targets)
        ):
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            del statements[0]
    match statements[:1]:
        case [
            ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=source), attr="clear"), args=[])
            )
        ] if source == parameter:
            del statements[0]
    if any(parameter in _names(statement) for statement in statements):
        raise UnsupportedGraph("it takes its arguments in a way that is not known")
    return names


def _assigned(statements: list[ast.stmt]) -> list[str]:
    return [
        target.id
        for statement in statements
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]


def _elements(statement: ast.Return) -> list[ast.AST]:
    value = statement.value
    return list(value.elts) if isinstance(value, ast.Tuple) else []


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
