"""How JIT'd code calls an operator's C++ function ``at::_ops::<name>::call`` directly.

libtorch exports one such function per operator; setup.py lists their symbols and demangled
signatures. :func:`direct_call` turns the arguments of a call into what the x86-64 System V ABI asks
for: tensors as pointers to their slots, numbers in registers, constant lists and scalars in memory
that the program owns. What `runtime/abi.cpp` asserts is assumed here. A type that is not in
:data:`_RULES` makes the call a boxed one, which is exact as well and slower.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import torch

from trident import _frame
from trident.codegen.registry import register

# What a machine word of a call is made of.
#   ("int", value)        an integer
#   ("integer", row)      an integer that the program computed
#   ("constant", offset)  the address of a constant of the program
#   ("slot", slot)        the address of a slot
#   ("tensor", slot)      the pointer that the slot holds
#   ("memory", words)     the address of these words, made anew on the stack for each call
#   ("list", index)       the address of a c10::List of optional tensors, made anew for each call
Word = tuple[str, Any]


@dataclasses.dataclass(slots=True, frozen=True)
class Integer:
    """What row `row` of the program's integers gives; or the float whose bits these are."""

    row: int
    is_float: bool = False


_INTEGER_REGISTERS, _FLOAT_REGISTERS = 6, 8


@dataclasses.dataclass(slots=True)
class DirectCall:
    """A call of `symbol`. `arguments`: ("word", Word), ("float", value), ("real", row): a float
    that is an input, or ("by_value", words): an aggregate in memory. `result`: "none", "slot" (its
    slot), "alias" (slots to and from), "tuple" (the slots by position) or "list" (first slot and
    number)."""

    symbol: str
    arguments: list[tuple[str, Any]]
    result: tuple[str, Any]


class Constants:
    """The memory of a program's constants, and the slots (-1: None) of its `lists`."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []
        self._bytes = bytearray()
        self._offsets: dict[bytes, int] = {}

    def add(self, data: bytes) -> int:
        """The offset of `data`, 16-byte aligned."""
        offset = self._offsets.get(data)
        if offset is None:
            self._bytes += bytes(-len(self._bytes) % 16)
            offset = self._offsets[data] = len(self._bytes)
            self._bytes += data
        return offset

    def freeze(self) -> tuple[int, Any]:
        """(address, what keeps it alive)."""
        buffer = ctypes.create_string_buffer(len(self._bytes) + 32)
        address = ctypes.addressof(buffer)
        address += -address % 16
        ctypes.memmove(address, bytes(self._bytes), len(self._bytes))
        return address, buffer


@functools.cache
def _signatures() -> dict[str, tuple[str, list[str]]]:
    """Per function of ``at::_ops``: its symbol and the C++ types of its parameters."""
    path = pathlib.Path(_frame.__file__).with_name("_operators.txt")
    problem, _ = _frame.operator_abi()
    if problem is not None or not path.exists():
        return {}
    result = {}
    for line in path.read_text().splitlines():
        symbol, _, text = line.partition("\t")
        name, _, parameters = text.removeprefix("at::_ops::").partition("::call(")
        if parameters:
            result[name] = symbol, _split(parameters.removesuffix(")"))
    return result


def _split(parameters: str) -> list[str]:
    result, depth, start = [], 0, 0
    for position, char in enumerate(parameters):
        depth += (char in "<(") - (char in ">)")
        if char == "," and depth == 0:
            result.append(parameters[start:position].strip())
            start = position + 1
    last = parameters[start:].strip()
    return [*result, last] if last else result


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)


def address(symbol: str) -> int:
    """The address of an operator's function."""
    return ctypes.cast(getattr(_library(), symbol), ctypes.c_void_p).value or 0


def direct_call(
    operator: Any,
    arguments: list[tuple[str, Any]],
    results: list[Any],
    constants: Constants,
) -> DirectCall | None:
    """The direct call of `operator`, or None if it must be boxed. `arguments` and `results` are as
    for ``_frame.NativeProgram.add_call``; the items of a list have neighbouring slots."""
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    if name == schema.name:
        return None
    found = _signatures().get(f"{name}_{schema.overload_name}" if schema.overload_name else name)
    if found is None or len(found[1]) != len(arguments):
        return None
    result = _result(schema, arguments, results)
    if result is None:
        return None
    packer = _Packer(constants, integers=0 if result[0] in ("none", "alias") else 1)
    for kind, (how, value), argument in zip(found[1], arguments, schema.arguments, strict=True):
        rule = _RULES.get(kind)
        if how == "default":
            value = argument.default_value
            how = "constant"
        if rule is None or not rule(packer, how, value):
            return None
    return DirectCall(found[0], packer.arguments, result)


def _result(
    schema: Any, arguments: list[tuple[str, Any]], results: list[Any]
) -> tuple[str, Any] | None:
    written = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
    if not results:
        return "none", None
    if len(results) == 1 and isinstance(results[0], list):
        return "list", (results[0][0] if results[0] else 0, len(results[0]))  # neighbouring slots
    if any(isinstance(result, list) for result in results):
        return None
    if not any(written):
        return ("slot", results[0]) if len(results) == 1 else ("tuple", results)
    if not all(written):
        return None
    sources = [_written_argument(schema, arguments, r.alias_info) for r in schema.returns]
    if None in sources:
        return None
    pairs = list(zip(results, sources, strict=True))
    return ("alias", pairs[0]) if len(pairs) == 1 else ("aliases", pairs)


def _written_argument(schema: Any, arguments: list[tuple[str, Any]], written: Any) -> int | None:
    """The slot of the argument that the operator writes to and returns."""
    for (how, value), argument in zip(arguments, schema.arguments, strict=True):
        alias = argument.alias_info
        if how == "tensor" and alias is not None and alias.before_set == written.before_set:
            return int(value)
    return None


class _Packer:
    """Assigns arguments to registers and memory, in order."""

    def __init__(self, constants: Constants, integers: int) -> None:
        self.constants = constants
        self.arguments: list[tuple[str, Any]] = []
        self._integers = integers
        self._floats = 0

    def word(self, word: Word) -> bool:
        self._integers += 1
        self.arguments.append(("word", word))
        return True

    def real(self, value: float) -> bool:
        self._floats += 1
        self.arguments.append(("float", value))
        return True

    def real_input(self, row: int) -> bool:
        self._floats += 1
        self.arguments.append(("real", row))
        return True

    def words(self, words: list[Word]) -> bool:
        """An aggregate: in as many registers, or in memory as a whole."""
        if len(words) > 2 or self._integers + len(words) > _INTEGER_REGISTERS:
            self.arguments.append(("by_value", words))
            return True
        for word in words:
            self.word(word)
        return True

    def real_and_word(self, value: float, word: int) -> bool:
        if self._integers >= _INTEGER_REGISTERS or self._floats >= _FLOAT_REGISTERS:
            bits = struct.unpack("<q", struct.pack("<d", value))[0]
            self.arguments.append(("by_value", [("int", bits), ("int", word)]))
            return True
        return self.real(value) and self.word(("int", word))

    def integers(self, values: Any) -> list[Word]:
        if any(isinstance(value, Integer) for value in values):
            return [("memory", [_integer_word(value) for value in values]), ("int", len(values))]
        data = struct.pack(f"<{len(values)}q", *values)
        return [("constant", self.constants.add(data or bytes(8))), ("int", len(values))]


def _integer_word(value: Any) -> Word:
    return ("integer", value.row) if isinstance(value, Integer) else ("int", int(value))


_Rule = Callable[[_Packer, str, Any], bool]
_RULES: dict[str, _Rule] = {}


def _rule(*kinds: str) -> Callable[[_Rule], _Rule]:
    return register(_RULES, *kinds)


def _is_int(value: Any) -> bool:
    return (isinstance(value, Integer) and not value.is_float) or _is_constant(value)


def _is_constant(value: Any) -> bool:
    # As a c10::SymInt holds them.
    return type(value) in (int, bool) and -(2**62) < value < 2**63


def _is_ints(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_int, value))


@_rule("at::Tensor const&", "at::Tensor&")
def _tensor(packer: _Packer, how: str, value: Any) -> bool:
    return how == "tensor" and packer.word(("slot", value))


@_rule("std::optional<at::Tensor> const&")
def _optional_tensor(packer: _Packer, how: str, value: Any) -> bool:
    if how == "tensor":
        return packer.word(("memory", [("tensor", value), ("int", 1)]))
    return value is None and packer.word(("memory", [("int", 0), ("int", 0)]))


def _tensor_words(value: list[Any]) -> list[Word]:
    words = [("tensor", slot) for slot in value]
    return [("memory", words or [("int", 0)]), ("int", len(value))]


@_rule("c10::ArrayRef<at::Tensor>")
def _tensors(packer: _Packer, how: str, value: Any) -> bool:
    return how == "tensors" and packer.words(_tensor_words(value))


@_rule("c10::IListRef<at::Tensor> const&")
def _tensor_reference(packer: _Packer, how: str, value: Any) -> bool:
    _, tag = _frame.operator_abi()
    return how == "tensors" and packer.word(("memory", [*_tensor_words(value), ("int", tag)]))


@_rule("c10::List<std::optional<at::Tensor> > const&")
def _optional_tensors(packer: _Packer, how: str, value: Any) -> bool:
    if how != "optional_tensors":
        return False
    packer.constants.lists.append([-1 if slot is None else slot for slot in value])
    return packer.word(("list", len(packer.constants.lists) - 1))


@_rule("long")
def _long(packer: _Packer, how: str, value: Any) -> bool:
    return _is_int(value) and how != "tensor" and packer.word(_integer_word(value))


@_rule("bool")
def _bool(packer: _Packer, how: str, value: Any) -> bool:
    return type(value) is bool and packer.word(("int", int(value)))


@_rule("double")
def _double(packer: _Packer, how: str, value: Any) -> bool:
    if isinstance(value, Integer) and value.is_float:
        return packer.real_input(value.row)
    return type(value) in (int, float) and how == "constant" and packer.real(float(value))


@_rule("c10::SymInt")
def _symint(packer: _Packer, how: str, value: Any) -> bool:
    # By reference to a copy of ours, which the callee may empty.
    return _is_int(value) and how != "tensor" and packer.word(("memory", [_integer_word(value)]))


@_rule("std::optional<c10::SymInt>")
def _optional_symint(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.word(("memory", [("int", 0), ("int", 0)]))
    return _is_int(value) and packer.word(("memory", [_integer_word(value), ("int", 1)]))


@_rule("std::optional<at::Generator>")
def _generator(packer: _Packer, how: str, value: Any) -> bool:
    return value is None and packer.word(("memory", [("int", 0), ("int", 0)]))


@_rule("c10::ArrayRef<long>", "c10::ArrayRef<c10::SymInt>")
def _integer_list(packer: _Packer, how: str, value: Any) -> bool:
    return how != "tensors" and _is_ints(value) and packer.words(packer.integers(value))


@_rule("c10::OptionalArrayRef<long>", "c10::OptionalArrayRef<c10::SymInt>")
def _optional_integer_list(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.words([("int", 0), ("int", 0), ("int", 0)])
    if _is_int(value):
        value = [value]  # a schema such as int[1]? takes a number for a list
    return _is_ints(value) and packer.words([*packer.integers(value), ("int", 1)])


@_rule("std::optional<c10::ArrayRef<double> >")
def _optional_float_list(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.words([("int", 0), ("int", 0), ("int", 0)])
    if not isinstance(value, (list, tuple)) or any(type(v) not in (int, float) for v in value):
        return False
    data = struct.pack(f"<{len(value)}d", *value)
    offset = packer.constants.add(data or bytes(8))
    return packer.words([("constant", offset), ("int", len(value)), ("int", 1)])


@_rule("c10::Scalar const&")
def _scalar(packer: _Packer, how: str, value: Any) -> bool:
    if isinstance(value, Integer):
        return packer.word(("memory", _scalar_words(value)))
    if how != "constant" or not _is_number(value):
        return False
    return packer.word(("constant", packer.constants.add(_frame.scalar_bytes(value, False))))


@_rule("std::optional<c10::Scalar> const&")
def _optional_scalar(packer: _Packer, how: str, value: Any) -> bool:
    if isinstance(value, Integer):
        return packer.word(("memory", [*_scalar_words(value), ("int", 1)]))
    if value is not None and not _is_number(value):
        return False
    return packer.word(("constant", packer.constants.add(_frame.scalar_bytes(value, True))))


@_rule("c10::ArrayRef<c10::Scalar>")
def _scalars(packer: _Packer, how: str, value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or how == "tensors":
        return False
    if not all(isinstance(item, Integer) or _is_number(item) for item in value):
        return False
    if any(isinstance(item, Integer) for item in value):
        words = [word for item in value for word in _scalar_words(item)]
        return packer.words([("memory", words), ("int", len(value))])
    data = b"".join(_frame.scalar_bytes(item, False) for item in value)
    return packer.words([("constant", packer.constants.add(data or bytes(8))), ("int", len(value))])


def _scalar_words(value: Any) -> list[Word]:
    """A c10::Scalar: its tag, a gap, and 16 bytes, of which an int or a float takes the first 8."""
    computed = isinstance(value, Integer)
    like = (0.0 if value.is_float else 0) if computed else value
    words: list[Word] = [("int", w) for w in struct.unpack("<4q", _frame.scalar_bytes(like, False))]
    if computed:
        words[2] = ("integer", value.row)
    return words


def _is_number(value: Any) -> bool:
    return _is_constant(value) or type(value) in (float, complex)


@_rule("std::optional<long>")
def _optional_long(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.words([("int", 0), ("int", 0)])
    return _is_int(value) and packer.words([_integer_word(value), ("int", 1)])


@_rule("std::optional<double>")
def _optional_double(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.real_and_word(0.0, 0)
    return type(value) in (int, float) and packer.real_and_word(float(value), 1)


@_rule("std::optional<bool>")
def _optional_bool(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.word(("int", 0))
    return type(value) is bool and packer.word(("int", int(value) | 1 << 8))


def _flags(kind: str, n: int) -> None:
    @_rule(kind)
    def rule(packer: _Packer, how: str, value: Any) -> bool:
        if not isinstance(value, (list, tuple)) or [type(item) for item in value] != [bool] * n:
            return False
        return packer.word(("int", int.from_bytes(bytes(value), "little")))


for _n in (2, 3, 4):
    _flags(f"std::array<bool, {_n}ul>", _n)


@_rule("signed char")
def _device_index(packer: _Packer, how: str, value: Any) -> bool:
    return type(value) is int and -128 <= value < 128 and packer.word(("int", value))


@_rule(
    "std::optional<c10::ScalarType>",
    "std::optional<c10::Layout>",
    "std::optional<c10::MemoryFormat>",
)
def _optional_enum(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.word(("int", 0))
    number = _enum_number(value)
    return number is not None and packer.word(("int", number | 1 << 8))


@_rule("c10::ScalarType", "c10::Layout", "c10::MemoryFormat", "c10::Device")
def _enum(packer: _Packer, how: str, value: Any) -> bool:
    number = _enum_number(value)
    return number is not None and packer.word(("int", number))


@_rule("std::optional<c10::Device>")
def _optional_device(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.word(("int", 0))
    number = _enum_number(value)
    return number is not None and packer.word(("int", number | 1 << 16))


def _enum_number(value: Any) -> int | None:
    if type(value) is int:  # a default of the schema
        return value
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.device)
    return _frame.enum_number(value) if isinstance(value, kinds) else None


@_rule("std::basic_string_view<char, std::char_traits<char> >")
def _string(packer: _Packer, how: str, value: Any) -> bool:
    if not isinstance(value, str):
        return False
    data = value.encode()
    return packer.words([("int", len(data)), ("constant", packer.constants.add(data + bytes(1)))])


@_rule("std::optional<std::basic_string_view<char, std::char_traits<char> > >")
def _optional_string(packer: _Packer, how: str, value: Any) -> bool:
    if value is None:
        return packer.words([("int", 0), ("int", 0), ("int", 0)])
    if not isinstance(value, str):
        return False
    data = value.encode()
    offset = packer.constants.add(data + bytes(1))
    return packer.words([("int", len(data)), ("constant", offset), ("int", 1)])
