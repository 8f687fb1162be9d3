"""Direct calls of operators: what every one of them is passed, and returns, arrives.

A dispatch mode notes the arguments of each call and makes up results, so that operators of any
device, with any arguments, can be called: by JIT'd code directly, by it through the boxed
dispatcher, and from Python.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch_mlir import ir

from tests.test_equality import assert_same
from trident import _frame
from trident.codegen import jit
from trident.codegen.abi import _RULES, Constants, Integer, _signatures, direct_call
from trident.codegen.dialect import session
from trident.codegen.lower_program import (
    PROGRAM_ENTRY,
    ProgramTable,
    _boxed,
    emit_program,
    make_native,
)

# Dynamo breaks the graph at storages, and passes streams by number to operators of its own. (It
# breaks at generators, too, so an optional one is only ever None: see `test_never_in_a_graph`.)
# Named dimensions are in torch 2.11 only; Dynamo breaks at named tensors.
NAMED = {"at::Dimname", "c10::ArrayRef<at::Dimname>", "std::optional<c10::ArrayRef<at::Dimname> >"}
WITHOUT_RULE = {"c10::Storage", "c10::Stream", *NAMED}
OPERATORS = sorted(_signatures())
PER_PROGRAM = 48
N_INPUTS = 40


def test_every_type_has_a_rule() -> None:
    assert len(OPERATORS) > 2500
    kinds = {kind for _, parameters in _signatures().values() for kind in parameters}
    assert kinds - _RULES.keys() == WITHOUT_RULE & kinds


INTEGERS, REALS = (5, -7, 2**40, 0), (1.5, -0.0, 3.25)
SCALARS = (2.5, -7, True, 1 + 2j)
LISTED = [7, 2.5, True, 3 - 1j]
# Per C++ type the values to pass in turn; "tensor" and the like get slots.
VALUES: dict[str, tuple[Any, ...]] = {
    "long": INTEGERS,
    "c10::SymInt": INTEGERS,
    "signed char": (3, -1, 0),
    "bool": (True, False),
    "double": REALS,
    "c10::Scalar const&": SCALARS,
    "std::optional<c10::Scalar> const&": (*SCALARS, None),
    "c10::ArrayRef<c10::Scalar>": (LISTED, [], LISTED[:1]),
    "std::optional<long>": (*INTEGERS, None),
    "std::optional<c10::SymInt>": (*INTEGERS, None),
    "std::optional<double>": (*REALS, None),
    "std::optional<bool>": (True, False, None),
    "std::optional<c10::ArrayRef<double> >": ([1.5, 2.5], [], None),
    "std::optional<at::Generator>": (None,),
    "c10::ScalarType": (torch.float64, torch.bool),
    "std::optional<c10::ScalarType>": (torch.complex64, None, torch.uint8),
    "std::optional<c10::Layout>": (torch.sparse_coo, None, torch.strided),
    "c10::MemoryFormat": (torch.channels_last, torch.contiguous_format),
    "std::optional<c10::MemoryFormat>": (torch.channels_last, None, torch.contiguous_format),
    "c10::Device": (torch.device("meta"), torch.device("cpu", 0)),
    "std::optional<c10::Device>": (torch.device("cuda", 3), None, torch.device("cpu")),
    "c10::Layout": (torch.sparse_csr, torch.strided),
    "std::basic_string_view<char, std::char_traits<char> >": ("mean", "", "µ"),
    "std::optional<std::basic_string_view<char, std::char_traits<char> > >": ("tanh", None, ""),
}
for kind in ("long", "c10::SymInt"):
    VALUES[f"c10::ArrayRef<{kind}>"] = ([3, -4, 2**40], [], [1])
    VALUES[f"c10::OptionalArrayRef<{kind}>"] = ([3, -4, 2**40], None, [])
for n in (2, 3, 4):
    VALUES[f"std::array<bool, {n}ul>"] = (
        [True, False, True, True][:n],
        [False, True, False, True][:n],
    )
TENSORS = {
    "at::Tensor const&": ("tensor",),
    "at::Tensor&": ("tensor",),
    "std::optional<at::Tensor> const&": ("tensor", "none"),
    "c10::ArrayRef<at::Tensor>": ("tensors", "no tensors"),
    "c10::IListRef<at::Tensor> const&": ("tensors", "no tensors"),
    "c10::List<std::optional<at::Tensor> > const&": ("optional_tensors",),
}


@dataclasses.dataclass
class Call:
    """A call of an operator with slots and constants, and the same from Python."""

    operator: Any
    arguments: list[tuple[str, Any]]
    values: list[Any]
    results: list[Any]

    @property
    def returns_lists_among_others(self) -> bool:
        return len(self.results) > 1 and any(isinstance(result, list) for result in self.results)


class Noting(TorchDispatchMode):
    """Notes every call, and returns what its schema promises."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.returned: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        passed = dict(zip((a.name for a in schema.arguments), args, strict=False))
        passed.update(kwargs or {})
        self.calls.append((func, args, kwargs))
        results = [self._result(returned, schema, passed) for returned in schema.returns]
        self.returned += _pytree.tree_leaves(results)
        return results[0] if len(results) == 1 else tuple(results) or None

    def _result(self, returned: Any, schema: Any, passed: dict[str, Any]) -> Any:
        if returned.alias_info is not None and returned.alias_info.is_write:
            for argument in schema.arguments:
                alias = argument.alias_info
                if alias is not None and alias.before_set == returned.alias_info.before_set:
                    return passed[argument.name]
        made = [torch.empty(0) for _ in range(2)]
        return made if str(returned.type) == "List[Tensor]" else made[0]


def operator_of(name: str) -> Any:
    """The operator whose C++ function is called `name`; None for one that Python does not have."""
    for schema in SCHEMAS.get(name, ()):
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
        return getattr(packet, schema.overload_name or "default", None)
    return None


SCHEMAS: dict[str, list[Any]] = {}
for found in torch._C._jit_get_all_schemas():
    if found.name.startswith("aten::"):
        ending = f"_{found.overload_name}" if found.overload_name else ""
        SCHEMAS.setdefault(found.name.removeprefix("aten::") + ending, []).append(found)


class Programs:
    """Makes programs of calls, and runs them."""

    def __init__(self, inputs: list[Any], turn: int, computed: bool) -> None:
        self.inputs, self.turn, self.computed = inputs, turn, computed
        self.rows: list[tuple[str, int, int]] = []
        self.n_slots = N_INPUTS
        self._next = 0

    def call(self, name: str) -> Call | None:
        """A call with the values whose turn it is; None if the graph could not contain one."""
        operator, (_, kinds) = operator_of(name), _signatures()[name]
        if operator is None or WITHOUT_RULE & {*kinds}:
            return None
        returns = [str(returned.type) for returned in operator._schema.returns]
        if not set(returns) <= {"Tensor", "List[Tensor]"}:
            return None
        made = [self._argument(kind) for kind in kinds]
        results = [self._slot() if r == "Tensor" else [self._slot(), self._slot()] for r in returns]
        return Call(operator, [a for a, _ in made], [value for _, value in made], results)

    def _slot(self) -> int:
        self.n_slots += 1
        return self.n_slots - 1

    def _argument(self, kind: str) -> tuple[tuple[str, Any], Any]:
        self._next += 1
        if kind in TENSORS:
            how = TENSORS[kind][self.turn % len(TENSORS[kind])]
            slots = [self._next % N_INPUTS, (self._next + 1) % N_INPUTS]
            tensors = [self.inputs[slot] for slot in slots]
            self._next += 1
            return {
                "tensor": (("tensor", slots[0]), tensors[0]),
                "none": (("constant", None), None),
                "tensors": (("tensors", slots), tensors),
                "no tensors": (("tensors", []), []),
                "optional_tensors": (("optional_tensors", [slots[0], None]), [tensors[0], None]),
            }[how]
        values = VALUES[kind]
        value = values[(self.turn + self._next) % len(values)]
        row = self._computed(kind, value) if self.computed else None
        return (("constant", value) if row is None else ("computed", row)), value

    def _computed(self, kind: str, value: Any) -> Any:
        """The value as the program computes it, if it can."""
        if kind in ("signed char", "bool", "std::optional<bool>"):
            return None
        if (
            isinstance(value, list)
            and not {*map(type, value)} - {int, float}
            and "double" not in kind
        ):
            return [self._row(item) for item in value[:1]] + value[1:] if value else None
        whole = type(value) is int
        real = type(value) is float and kind in ("double", "c10::Scalar const&")
        return self._row(value) if whole or real else None

    def _row(self, value: int | float) -> Integer:
        if type(value) is int:
            self.rows.append(("integer", value, 0))
            return Integer(len(self.rows) - 1)
        self.inputs.append(value)
        self.rows.append(("float_input", len(self.inputs) - 1, 0))
        return Integer(len(self.rows) - 1, is_float=True)

    def run(self, calls: list[Call]) -> tuple[list[Any], list[Call]]:
        """The tensors that the calls return, and those that went through the boxed dispatcher."""
        memory, boxed_calls, table_calls, steps = Constants(), [], [], []
        for number, call in enumerate(calls):
            found = direct_call(call.operator, call.arguments, call.results, memory)
            if found is not None:
                steps.append(("direct", (found, number)))
                continue
            boxed_calls.append(call)
            schema = call.operator._schema
            boxed = [
                (how, _boxed(value, argument) if how == "computed" else value)
                for (how, value), argument in zip(call.arguments, schema.arguments, strict=True)
            ]
            table_calls.append((schema.name, schema.overload_name, boxed, call.results))
            steps.append(("trident_program_call", (len(table_calls) - 1, number)))
        slots = [slot for call in calls for slot in _pytree.tree_leaves(call.results)]
        table = ProgramTable(
            n_inputs=N_INPUTS,
            n_slots=self.n_slots,
            outputs=[("tensor", slot) for slot in slots],
            constants=[],
            integers=self.rows,
            numbers=[],
            calls=table_calls,
            lines=[("", "", 0, "bindings")] * len(calls),
            steps=steps,
            memory=memory,
            cudnn=None,
            layouts=[],
            checks=[],
        )
        native = make_native(table, {}, "")
        with session():
            module = ir.Module.create()
        symbols, keepalive = emit_program(table, module)
        code = jit.compile(module, symbols, keepalive)
        native.set_function(code.address(PROGRAM_ENTRY), code)
        return self._run(native, len(slots)), boxed_calls

    def _run(self, native: Any, n: int) -> list[Any]:
        prototype = ctypes.PYFUNCTYPE(
            ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.py_object), ctypes.c_void_p
        )
        made = (ctypes.c_void_p * (n + 1))()
        inputs = (ctypes.py_object * len(self.inputs))(*self.inputs)
        status = prototype(_frame.program_function("trident_program_run"))(
            native.address, inputs, ctypes.addressof(made)
        )
        assert status == 0
        results = [ctypes.cast(made[i], ctypes.py_object).value for i in range(n)]
        for i in range(n):
            ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(made[i]))
        return results


def from_python(call: Call) -> None:
    arguments = call.operator._schema.arguments
    pairs = list(zip(arguments, call.values, strict=True))
    positional = [value for argument, value in pairs if not argument.kwarg_only]
    call.operator(*positional, **{a.name: value for a, value in pairs if a.kwarg_only})


def chunks(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), PER_PROGRAM):
        yield names[start : start + PER_PROGRAM]


@pytest.mark.slow
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("turn", range(3))
def test_every_operator(enabled: None, turn: int, computed: bool) -> None:
    """The arguments of each operator arrive, and its results are in their slots."""
    n_calls = 0
    for names in chunks(OPERATORS[turn::3] if computed else OPERATORS):
        programs = Programs([torch.empty(i) for i in range(N_INPUTS)], turn, computed)
        calls = [call for name in names if (call := programs.call(name)) is not None]
        with torch._C._AutoDispatchBelowADInplaceOrView(), Noting() as expected:
            for call in calls:
                from_python(call)
        with torch._C._AutoDispatchBelowADInplaceOrView(), Noting() as noted:
            results, boxed = programs.run(calls)
        assert [call[0] for call in noted.calls] == [call.operator for call in calls]
        assert_same(noted.calls, expected.calls)
        assert [id(a) for a in results] == [id(a) for a in noted.returned]
        assert boxed == [call for call in calls if call.returns_lists_among_others]
        n_calls += len(calls)
    assert n_calls > 0.9 * len(OPERATORS) / (3 if computed else 1)
