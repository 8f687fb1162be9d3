"""A traced graph to ``scm.program``: every operator in order, with explicit releases.

A call's arguments are one object of the side list, :class:`Call`: what the operator's schema asks
for, in its order, with :class:`Slot` for operands: tensors, and integers that are computed. Each
tensor is released after its last use, where eager's interpreter would drop it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch_mlir import ir

from trident import _frame
from trident.capture import triton
from trident.capture.graph import (
    AUTOCAST_CACHES,
    RECORDS_GRADIENTS,
    Line,
    Meta,
    given_by,
    line_of,
)
from trident.codegen.dialect import Emitter
from trident.codegen.integers import Integers, is_float
from trident.errors import UnsupportedGraph
from trident.texts import safe_text


@dataclasses.dataclass(slots=True, frozen=True)
class Slot:
    """The operand number `index` of a call: among its tensors, or its integers."""

    index: int
    is_integer: bool = False


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Operands:
    """The operands of a step, as they are added: tensors, and integers that are computed."""

    tensors: list[ir.Value] = dataclasses.field(default_factory=list)
    integers: list[ir.Value] = dataclasses.field(default_factory=list)

    def tensor(self, value: ir.Value) -> Slot:
        self.tensors.append(value)
        return Slot(len(self.tensors) - 1)

    def integer(self, value: ir.Value) -> Slot:
        self.integers.append(value)
        return Slot(len(self.integers) - 1, is_integer=True)


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Call:
    """An operator call: per argument of the schema (kind, value) with kinds "constant", "default",
    "tensor" (a Slot), "number" (as a tensor: the number, and a dtype if not its own), "tensors" and
    "optional_tensors" (lists of Slots, or None), "computed" (a Slot of an integer, or a list of
    these and ints); per return of the schema the number of tensors of a list, None for one tensor,
    or NO_TENSOR. `is_factory`: called below autograd, as torch's Python bindings call it.
    `by_overload`: stock calls it through torch.ops, from which warnings do not go to Python."""

    operator: Any
    arguments: list[tuple[str, Any]]
    returns: list[int | None]
    line: Line
    is_factory: bool
    by_overload: bool = False

    def text(self) -> str:
        """The arguments that are not the schema's defaults."""
        schema = self.operator._schema.arguments
        parts = []
        for argument, (kind, value) in zip(schema, self.arguments, strict=True):
            if kind != "default":
                shown = _shown(value)
                parts.append(f"{argument.name}={shown}" if argument.kwarg_only else shown)
        return ", ".join(parts)


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class LaunchCall:
    """A launch of a Triton kernel, which varies in `arguments`; `grids` are ints, or Slots of
    integers. `bind` makes what launches it, given the arguments' kinds and the grids."""

    arguments: tuple[Slot, ...]
    grids: tuple[tuple[int | Slot, ...], ...]
    bind: Callable[[tuple[str, ...], tuple[triton.Grid, ...]], triton.Launch]
    line: Line


def _shown(value: Any) -> str:
    if isinstance(value, Slot):
        return f"{'integer' if value.is_integer else 'operand'} {value.index}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return safe_text(value)


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Inference:
    """What a program for a graph of AOTAutograd's does beside its steps: see ``Around`` in
    capture/inductor.py; here inputs are the program's, in their order. `names` are the globals of
    Inductor's code, in `file`: for warnings. Stock copies those of the inputs `aligned` that are
    not."""

    without_autocast: bool
    mutated: list[int]
    epilogue: Any
    epilogue_inputs: list[int]
    n_results: int
    names: dict[str, Any]
    file: str
    aligned: list[int]


@dataclasses.dataclass(slots=True, frozen=True)
class Signature:
    """The positions of those inputs of the graph that the program takes, in their order; and for
    each output of the graph its position among the program's, which are tensors, then integers."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    inference: Inference | None = None


def import_graph(module: torch.fx.GraphModule, emitter: Emitter) -> Signature:
    """Append a ``scm.program`` for the traced `module`.

    Raises UnsupportedGraph, naming the node, for what has no native form.
    """
    nodes = list(module.graph.nodes)
    emitter.start_program(sum(node.op == "placeholder" for node in nodes))
    importer = _Importer(module, emitter, _last_uses(nodes))
    importer.add_inputs([node for node in nodes if node.op == "placeholder"])
    for node in sorted(nodes, key=_constants_first):
        importer.add(node)
    return Signature(tuple(importer.inputs), tuple(importer.outputs))


def _constants_first(node: torch.fx.Node) -> bool:
    return node.op != "get_attr"


def _last_uses(nodes: list[torch.fx.Node]) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Per node those whose value is not used after it. The same item taken twice is one value."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    first: dict[Any, torch.fx.Node] = {}
    for node in nodes:
        last[_one_per_item(node, first)] = node
        for used in node.all_input_nodes:
            last[_one_per_item(used, first)] = node
    result: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node, user in last.items():
        result.setdefault(user, []).append(node)
    return result


def _one_per_item(node: torch.fx.Node, first: dict[Any, torch.fx.Node]) -> torch.fx.Node:
    return first.setdefault(node.args, node) if node.target is operator.getitem else node


def emit_call(emitter: Emitter, call: Call, operands: Operands) -> list[Any]:
    """Append `call`; per return of its schema a tensor, or the list of those that it returns."""
    line = call.line
    counts = [0 if count == NO_TENSOR else 1 if count is None else count for count in call.returns]
    results = emitter.step(
        "operator",
        operands.tensors,
        integers=operands.integers,
        results=sum(counts),
        operator=str(call.operator),
        object=emitter.program.objects.add(call, call.text()),
        label=emitter.label(f"{line.file}:{line.line} in {line.function}"),
    )
    made = iter(results)
    return [
        None
        if count == NO_TENSOR
        else next(made)
        if count is None
        else [next(made) for _ in range(count)]
        for count in call.returns
    ]


NO_TENSOR = -1  # what an operator returns there is dropped


def emit_launch(emitter: Emitter, call: LaunchCall, kernel: Any, operands: Operands) -> None:
    """Append `call`."""
    name = getattr(getattr(kernel, "fn", None), "__name__", "kernel")
    emitter.step(
        "launch",
        operands.tensors,
        integers=operands.integers,
        object=emitter.program.objects.add(call, f"{name}{call.grids[0]}"),
        label=emitter.label(f"{call.line.file}:{call.line.line} in {call.line.function}"),
    )


class _Importer:
    def __init__(
        self,
        module: torch.fx.GraphModule,
        emitter: Emitter,
        last_uses: dict[torch.fx.Node, list[torch.fx.Node]],
    ) -> None:
        self.module = module
        self.emitter = emitter
        self.outputs: list[int] = []
        self._last_uses = last_uses
        # A node's tensors: one, or those of an operator that returns several, by position.
        self._tensors: dict[torch.fx.Node, ir.Value | list[Any]] = {}
        self.inputs: list[int] = []
        self._integers = Integers(emitter)
        self._n_regions = 0
        self._caches = iter(module.meta.get(AUTOCAST_CACHES, ()))

    def add_inputs(self, nodes: list[torch.fx.Node]) -> None:
        """The inputs, and all integers: nothing has happened when these turn out not to fit."""
        for position, node in enumerate(nodes):
            if isinstance(given_by(node), Meta):
                (value,) = self.emitter.step("input", results=1, index=len(self.inputs))
                self.inputs.append(position)
                self._tensors[node] = value
        for node in nodes:
            shape = given_by(node)
            if isinstance(shape, Meta):
                value = self._tensor(node)
                for name, numbers in (("size", shape.sizes), ("stride", shape.strides)):
                    for index, number in enumerate(numbers):
                        self._integers.bind(number, name, [value], index)
        used = [
            sympy.sympify(given_by(number))
            for node in self.module.graph.nodes
            if not _is_number(node)
            for number in node.all_input_nodes
            if _is_number(number)
        ]
        symbols = set().union(*(number.free_symbols for number in used))
        for position, node in enumerate(nodes):
            # Of a number that is no size of an input that the graph has, too.
            number = given_by(node)
            kind = "float_input" if is_float(number) else "integer_input"
            if number in symbols and self._integers.bind(number, kind, [], len(self.inputs)):
                self.inputs.append(position)
        for number in used:
            self._integers.value(number)

    def add(self, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            return
        if _is_number(node):
            overload = node.target if isinstance(node.target, torch._ops.OpOverload) else None
            if overload is not None and not overload._schema.name.startswith("aten::sym_"):
                raise UnsupportedGraph(f"{node.target} returns a number")
        elif node.op == "get_attr":
            self._tensors[node] = self._constant(node)
        elif node.op == "output":
            self._output(node)
            return
        elif triton.is_launch(node.target):
            self._launch(node)
        elif node.op == "call_function" and node.target in _FUNCTIONS:
            _FUNCTIONS[node.target](self, node)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            self._call(node, node.target)
        else:
            raise UnsupportedGraph(f"{node.op} {node.target} has no native form")
        self._release(node)

    def _release(self, user: torch.fx.Node) -> None:
        # Inputs belong to the caller, and what an operator returned in a list to its items.
        for node in self._last_uses.get(user, ()):
            value = self._tensors.get(node)
            if isinstance(value, ir.Value) and node.op == "call_function":
                self.emitter.step("release", [value])

    def _constant(self, node: torch.fx.Node) -> ir.Value:
        tensor = getattr(self.module, str(node.target), None)
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or not isinstance(tensor, torch.Tensor) or tensor.requires_grad:
            raise UnsupportedGraph(f"its constant {node.target} is no plain tensor")
        index = self.emitter.program.objects.add(tensor, f"tensor {tuple(tensor.shape)}")
        (value,) = self.emitter.step("constant_tensor", results=1, object=index)
        return value

    def _output(self, node: torch.fx.Node) -> None:
        (outputs,) = node.args
        if self._n_regions:
            raise UnsupportedGraph("it does not leave an autocast region that it entered")
        if not isinstance(outputs, (tuple, list)):
            raise UnsupportedGraph("its output is no tuple")
        integers = [value for value in outputs if _is_integer(value)]
        tensors = [value for value in outputs if not _is_integer(value)]
        if any(is_float(given_by(value)) for value in integers if isinstance(value, torch.fx.Node)):
            raise UnsupportedGraph("a float is an output")
        self.emitter.step(
            "yield",
            list(map(self._tensor, tensors)),
            integers=list(map(self._integer, integers)),
            nones=0,
        )
        places = {False: iter(range(len(tensors))), True: iter(range(len(tensors), len(outputs)))}
        self.outputs = [next(places[_is_integer(value)]) for value in outputs]

    def _integer(self, value: Any) -> ir.Value:
        return self._integers.value(given_by(value) if isinstance(value, torch.fx.Node) else value)

    def _tensor(self, value: Any) -> ir.Value:
        if _is_number(value) and value not in self._tensors:
            # What eager's bindings make of a number.
            (self._tensors[value],) = self.emitter.step("number", [self._integer(value)], results=1)
        tensor = self._tensors.get(value) if isinstance(value, torch.fx.Node) else None
        if not isinstance(tensor, ir.Value):
            raise UnsupportedGraph(f"{safe_text(value)} is used where a tensor belongs")
        return tensor

    def _call(self, node: torch.fx.Node, target: Any) -> None:
        schema = target._schema
        operands = Operands()

        def slot(value: Any, *, number: bool = False) -> Slot:
            if number:
                return operands.integer(self._integer(value))
            return operands.tensor(self._tensor(value))

        arguments = [
            _argument(target, argument, node, position, slot)
            for position, argument in enumerate(schema.arguments)
        ]
        counts = self._returns(node, schema)
        line = line_of(node)
        call = Call(target, arguments, counts, line, _is_factory(node, target))
        items = emit_call(self.emitter, call, operands)
        self._tensors[node] = items[0] if len(items) == 1 else items

    def _returns(self, node: torch.fx.Node, schema: Any) -> list[int | None]:
        counts: list[int | None] = []
        for position, result in enumerate(schema.returns):
            kind = str(result.type)
            if kind not in ("Tensor", "List[Tensor]"):
                raise UnsupportedGraph(f"{node.target} returns {kind}")
            value = given_by(node)
            value = value if len(schema.returns) == 1 else value[position]
            counts.append(None if kind == "Tensor" else len(value))
        return counts

    def _launch(self, node: torch.fx.Node) -> None:
        """A call of a user's kernel: torch._higher_order_ops.triton_kernel_wrap."""
        kernel, constants = triton.described_by(node.kwargs)
        operands = Operands()
        varying: dict[str, Slot] = {}
        fixed: dict[str, Any] = {}
        passed: Any = node.kwargs["kwargs"]
        for name, value in passed.items():
            if not _has_node(value):
                fixed[name] = value
            elif _is_number(value):
                varying[name] = operands.integer(self._integer(value))
            else:
                varying[name] = operands.tensor(self._tensor(value))
        grids: Any = node.kwargs["grid"]
        if not all(grids):
            raise UnsupportedGraph("the grid of a kernel has no sizes")
        stock = triton.stock_of(node.kwargs, fixed)
        if _has_node(list(stock["tma_descriptor_metadata"].values())):
            raise UnsupportedGraph("a tensor descriptor has sizes that are computed")

        def size(value: Any) -> int | Slot:
            return value if type(value) is int else operands.integer(self._integer(value))

        def bind(kinds: tuple[str, ...], grids: tuple[triton.Grid, ...]) -> triton.Launch:
            names = tuple(varying)
            return triton.UserLaunch(kernel, names, kinds, {**constants, **fixed}, grids, stock)

        sizes = tuple(tuple(map(size, (*grid, 1, 1)[:3])) for grid in grids)
        call = LaunchCall(tuple(varying.values()), sizes, bind, line_of(node))
        emit_launch(self.emitter, call, kernel, operands)

    def getitem(self, node: torch.fx.Node) -> None:
        """One of the tensors that an operator returned."""
        source, index = node.args
        items = self._tensors.get(source) if isinstance(source, torch.fx.Node) else None
        if not isinstance(items, list) or not isinstance(index, int):
            raise UnsupportedGraph(f"{node.name} takes an item of something else than a result")
        self._tensors[node] = items[index]

    def enter_autocast(self, node: torch.fx.Node) -> None:
        """torch.amp.autocast_mode._enter_autocast, as the tracer records it: nothing left open."""
        device, dtype, enabled, _ = node.args
        cache = next(self._caches)
        self._n_regions += 1
        self.emitter.step(
            "autocast_enter",
            device=_frame.enum_number(torch.device(str(device))) & 255,
            dtype=_frame.enum_number(dtype),
            enabled=int(bool(enabled)),
            cache=-1 if cache is None else int(cache),
        )

    def exit_autocast(self, node: torch.fx.Node) -> None:
        """torch.amp.autocast_mode._exit_autocast"""
        self._n_regions -= 1
        if self._n_regions < 0:
            raise UnsupportedGraph("it leaves an autocast region that it did not enter")
        self.emitter.step("autocast_exit")

    def set_grad_mode(self, node: torch.fx.Node) -> None:
        """torch._C._set_grad_enabled"""
        self.emitter.step("grad_mode", enabled=int(bool(node.args[0])))


_FUNCTIONS: dict[Any, Callable[[_Importer, torch.fx.Node], None]] = {
    operator.getitem: _Importer.getitem,
    torch._C._set_grad_enabled: _Importer.set_grad_mode,
    torch.amp.autocast_mode._enter_autocast: _Importer.enter_autocast,
    torch.amp.autocast_mode._exit_autocast: _Importer.exit_autocast,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(given_by(value), (sympy.Basic, int))


def _argument(
    target: Any, argument: Any, node: torch.fx.Node, position: int, slot: Callable[..., Slot]
) -> tuple[str, Any]:
    value: Any
    if argument.name in node.kwargs:
        value = node.kwargs[argument.name]
    elif not argument.kwarg_only and position < len(node.args):
        value = node.args[position]
    elif argument.has_default_value():
        return "default", None
    else:
        raise UnsupportedGraph(f"{target} lacks its argument {argument.name}")
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]") and value is not None:
        if type(value) in (bool, int, float, complex):
            return "number", (value, _dtype_of_number(target, node, value))
        return "tensor", slot(value)
    if kind == "List[Tensor]":
        return "tensors", [slot(item) for item in value]
    if kind == "List[Optional[Tensor]]":
        return "optional_tensors", [None if item is None else slot(item) for item in value]
    if not _has_node(value):
        return "constant", _plain(value)  # without FX's own kind of list
    kinds = ("int", "number")
    if isinstance(value, torch.fx.Node) and is_float(given_by(value)):
        kinds = ("float", "number")
    if kind.removeprefix("Optional[").removesuffix("]") in kinds:
        return "computed", slot(value, number=True)
    numbers = kind == "List[number]" and all(map(_is_plain_number, value))
    if numbers or ("List[int]" in kind and all(map(_is_integer, value))):
        items = [slot(i, number=True) if isinstance(i, torch.fx.Node) else i for i in value]
        return "computed", items
    raise UnsupportedGraph(f"{target} computes its argument {argument.name} ({kind})")


# Their kernels on a CPU first convert a number to the dtype of the other operand, where that is one
# of _CONVERTED: a tensor of its own for every call. (For smaller dtypes they compute with the
# number as it was. `is_kernel_of_converting` in runtime/program.cpp names them, too.)
_CONVERTING = frozenset(
    f"{name}{in_place}" for name in ("add", "sub", "mul", "div") for in_place in ("", "_")
)
_CONVERTED = (torch.float32, torch.float64)


def _dtype_of_number(target: Any, node: torch.fx.Node, number: Any) -> torch.dtype | None:
    """The dtype to which the number can be converted beforehand, where autograd, which would keep
    the number, records nothing."""
    schema, result = target._schema, given_by(node)
    if schema.name.removeprefix("aten::") not in _CONVERTING or schema.overload_name != "Tensor":
        return None
    owner = node.graph.owning_module
    records = owner is None or owner.meta.get(RECORDS_GRADIENTS, True)
    if type(number) not in (int, float) or not isinstance(result, Meta) or records:
        return None
    metas = [given_by(used) for used in node.all_input_nodes]
    cpu = all(isinstance(meta, Meta) and meta.device.type == "cpu" for meta in metas)
    plain = cpu and len(metas) == 1 and metas[0].dtype == result.dtype in _CONVERTED
    return result.dtype if plain else None


# The functions of torch/csrc/autograd/generated/variable_factories.h: what torch's Python bindings
# call there is below autograd, so that filling the new tensor does not advance its version.
FACTORIES = frozenset(
    {
        *("arange", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted"),
        *("empty_strided", "eye", "fft_fftfreq", "fft_rfftfreq", "from_file", "full", "full_like"),
        *("hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal"),
        *("ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn"),
        *("randn_like", "randperm", "range", "scalar_tensor", "tril_indices", "triu_indices"),
        *("zeros", "zeros_like"),
    }
)


def _is_factory(node: torch.fx.Node, target: Any) -> bool:
    """Is it a function of these that was called as torch.<name>, not as torch.ops.aten.<name>? (Of
    those of ``normal``, only the one that takes sizes makes its tensor.)"""
    schema = target._schema
    if schema.name.removeprefix("aten::") not in FACTORIES or schema.is_mutable:
        return False
    if schema.name == "aten::normal" and schema.overload_name != "float_float":
        return False
    called = node.meta.get("source_fn_stack")
    kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    return not (called and isinstance(called[-1][1], kinds))


def _is_integer(value: Any) -> bool:
    return type(value) is int or _is_number(value)


def _is_plain_number(value: Any) -> bool:
    return type(value) in (bool, int, float, complex) or _is_number(value)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _has_node(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_node, value))
    return isinstance(value, (torch.fx.Node, torch.SymInt, torch.SymFloat, torch.SymBool))
