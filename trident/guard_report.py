"""The guard program in words: what kind each guard is, and why a call missed.

A miss is told from the row that failed and from the snapshot of what it looked at, which the
runtime made at the miss (``runtime/snapshot.h``). Nothing here runs code of the user's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from trident.texts import safe_text

if TYPE_CHECKING:
    from trident.codegen.lower_guards import GuardTable, Row

NATIVE, REMEMBERED, CALLED_BACK = "native", "remembered", "called back"

# Rows that call a Python function or a guard object of Dynamo's each time.
_CALLBACKS = frozenset(
    {
        *("call", "check_lambda", "check_lambda_locals", "check_lambda_no_args", "check_leaf"),
        "check_overlap",
    }
)
_MAX_TEXT = 300


@dataclasses.dataclass(frozen=True)
class GuardReport:
    """One guard of a specialization. `kind` is "native" (checked at each call; looking up an
    attribute or comparing objects may run the user's code, as in Dynamo), "remembered" (implied
    by versions of dicts and types, at the last call that it was asked in) or "called back"
    (Dynamo's own Python function or guard object). `source` and `check` are Dynamo's text;
    `user_line` is the line that needs the guard, if Dynamo says it."""

    row: int
    kind: str
    operation: str
    source: str
    check: str
    user_line: str | None

    @property
    def text(self) -> str:
        """Source, check and line."""
        line = f"  # {self.user_line}" if self.user_line else ""
        where = f"{self.source}: " if self.source and self.source not in self.check else ""
        return f"{_short(where + self.check)}{line}"

    def __str__(self) -> str:
        return f"{self.row:4} {self.kind:11} {self.text}"


@dataclasses.dataclass(frozen=True)
class MissReport:
    """Why a specialization did not serve the last call that missed: its first guard that failed.

    `subject` is what was looked at ("size of x at dimension 0"), `expected` and `got` are short
    texts; `guard` is Dynamo's text and `source` its source, `user_line` the line that needs the
    guard, if Dynamo says it. `row` is the guard's row, -1 if no guard failed."""

    row: int
    subject: str
    expected: str
    got: str
    source: str
    guard: str
    user_line: str | None

    def __str__(self) -> str:
        line = f"  # {self.user_line}" if self.user_line else ""
        if self.row < 0:
            return self.subject
        return f"{self.subject}: expected {self.expected}, got {self.got}{line}"


def guard_reports(table: GuardTable, remembered: Iterable[int]) -> list[GuardReport]:
    """The guards of `table` in order; its fetches only if they call Dynamo's Python functions."""
    covered = set(remembered)
    reports = []
    for number, row in enumerate(table.rows):
        kind = REMEMBERED if number in covered else NATIVE
        if _calls_back(row):
            kind = CALLED_BACK
        elif row.dst >= 0:
            continue
        source, check, line = split_label(table.labels[row.label])
        reports.append(GuardReport(number, kind, row.op, source, check, line))
    return reports


def _calls_back(row: Row) -> bool:
    return row.op in _CALLBACKS or (row.op == "check_saved_tensor_hooks" and row.a == 0)


_COMMENT = re.compile(r"\s+# ")


def split_label(label: str) -> tuple[str, str, str | None]:
    """(Dynamo's source, its check, the user's line or None) of a row's label. The source "L" alone
    is that of the frame's surroundings and given as ""."""
    source, colon, rest = label.partition(": ")
    if not colon or "#" in source or (" " in source and "[" not in source):
        source, rest = "", label
    check, *comments = _COMMENT.split(rest, maxsplit=1)
    line = comments[0].strip() if comments else None
    if line is not None:
        line = re.sub(r"\s*\((?:HINT: |user code shown is ).*", "", line, flags=re.DOTALL)
        line = _COMMENT.sub("  # ", line)
    return ("" if source == "L" else source), check.strip(), line or None


def plain_source(source: str) -> str:
    """Dynamo's source as a user writes it: ``L['x'].y`` is ``x.y``."""
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source)


def miss_report(
    table: GuardTable, number: int, got: Any, conditions: Callable[[str], list[str]]
) -> MissReport:
    """The words for row `number` of `table`, which failed, and the snapshot `got` of what it looked
    at. `conditions` gives the single conditions of a check of the locals, by its label."""
    if number < 0:
        why = "not asked, or passed: compiled for another backend or scope, or a name is unbound"
        return MissReport(number, f"no guard failed ({why})", "", "", "", "", None)
    row = table.rows[number]
    source, check, line = split_label(table.labels[row.label])
    name = plain_source(source)
    if row.dst >= 0:
        words = name or row.op, "to be there", _missing(row, got)
    elif row.op in ("check_lambda_locals", "check_shapes"):
        words = _condition_words(conditions(table.labels[row.label]) or [check], got)
    else:
        words = _WORDS.get(row.op, _other_words)(row, name, check, got)
    subject, expected, found = (_short(text) for text in words)
    return MissReport(number, subject, expected, found, source, check, line)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


# ---- snapshots ----


def _text(got: Any) -> str:
    """A snapshot in words."""
    if got is None:
        return "something else"
    kind, *rest = got
    if kind == "value":
        return _value_text(rest[0])
    if kind == "type":
        return f"the class {rest[0]}"
    if kind == "tensor":
        return _tensor_text(got)
    if kind == "object":
        name, length = rest
        return f"a {name}" if length < 0 else f"a {name} of length {length}"
    return str(rest[0])


def _value_text(value: Any) -> str:
    # Devices and dtypes of torch, and builtins.
    return str(value) if type(value).__module__ == "torch" else safe_text(value)


def _tensor_text(got: Any) -> str:
    _, name, _, dtype, device, _, sizes, _ = got
    if dtype is None:
        return f"a {name}"
    return f"a {name} of {_dtype_text(dtype)} {_sizes_text(sizes)} on {device}"


def _dtype_text(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes_text(sizes: tuple[int | None, ...]) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in sizes)})"


def _type_text(got: Any) -> str:
    """The name of the type of what a snapshot is of."""
    if got is None:
        return "something else"
    kind, *rest = got
    if kind == "value":
        value = rest[0]
        return "None" if value is None else _class_name(type(value))
    return "type" if kind == "type" else str(rest[0])


def _class_name(kind: type) -> str:
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"


def _missing(row: Row, got: Any) -> str:
    if row.op == "local":
        return "an unbound name"
    if row.op in ("weakref_call", "global_weakref"):
        return "a dead weak reference, or none"
    owner = f" ({_text(got)} has it not)" if got is not None else ""
    return f"nothing{owner}"


# ---- words, by operation: (subject, expected, got) ----

Words = tuple[str, str, str]
WordRule: TypeAlias = "Callable[[Row, str, str, Any], Words]"


def _tensor_words(row: Row, name: str, check: str, got: Any) -> Words:
    from trident.codegen.import_guards import TENSOR_FIELDS  # loads MLIR

    expected = dict(zip(TENSOR_FIELDS, row.obj, strict=True))
    if got is None or got[0] != "tensor":
        return f"type of {name}", _tensor_type(check), _type_text(got)
    _, kind, type_id, dtype, device, requires_grad, sizes, strides = got
    if type_id != expected["type_id"]:
        return f"type of {name}", _tensor_type(check), kind
    if dtype is None:
        return f"kind of {name}", "a strided tensor without subclass", _tensor_text(got)
    if dtype != expected["dtype"]:
        return f"dtype of {name}", _dtype_text(expected["dtype"]), _dtype_text(dtype)
    where = _expected_device(check, expected["device_index"])
    if where is not None and where != str(device):
        return f"device of {name}", where, str(device)
    if requires_grad != expected["requires_grad"]:
        return f"requires_grad of {name}", str(expected["requires_grad"]), str(requires_grad)
    if len(sizes) != len(expected["sizes"]):
        return f"dimensions of {name}", str(len(expected["sizes"])), str(len(sizes))
    for what, wanted, found in (
        ("size", expected["sizes"], sizes),
        ("stride", expected["strides"], strides),
    ):
        for dimension, (a, b) in enumerate(zip(wanted, found, strict=False)):
            if a is not None and a != b:
                return f"{what} of {name} at dimension {dimension}", str(a), str(b)
    keys = re.search(r"DispatchKeySet\([^)]*\)", check)
    return f"dispatch keys of {name}", keys[0] if keys else "those when compiled", "others"


def _tensor_type(check: str) -> str:
    found = re.search(r"check_tensor\(.*?, (\w+), DispatchKeySet", check)
    return found[1] if found else "the tensor type when compiled"


def _expected_device(check: str, index: int) -> str | None:
    found = re.search(r"DispatchKeySet\((\w+)", check)
    if found is None or not re.fullmatch("CPU|CUDA|Meta|XPU|MPS|HPU", found[1]):
        return None
    return found[1].lower() if index < 0 else f"{found[1].lower()}:{index}"


_TYPE_IN_CHECK = re.compile(r"type=<class '([^']*)'>")


def _expected_type(check: str) -> str | None:
    found = _TYPE_IN_CHECK.search(check)
    return found[1] if found else None


def _type_words(row: Row, name: str, check: str, got: Any) -> Words:
    expected, found = _expected_type(check) or "the type when compiled", _type_text(got)
    if found == "None":
        return name, f"a {expected}", "None"
    return f"type of {name}", expected, f"another {found}" if found == expected else found


def _identity_words(row: Row, name: str, check: str, got: Any) -> Words:
    kind = _expected_type(check)
    expected = f"the {kind or 'object'} it was when compiled"
    if got is not None and got[0] == "type":
        return name, expected, f"the class {got[1]}"
    other = "another one" if kind is not None and _type_text(got) == kind else _text(got)
    return name, expected, other


def _constant_words(expected: str) -> WordRule:
    def words(row: Row, name: str, check: str, got: Any) -> Words:
        return name, expected, _text(got)

    return words


def _equal_words(row: Row, name: str, check: str, got: Any) -> Words:
    expected, found = _value_text(row.obj), _text(got)
    if got is not None and got[0] == "value" and type(got[1]) is not type(row.obj):
        found = f"{found}, a {_type_text(got)}"
    elif expected == found:
        found = f"another {found}"
    return name, expected, found


def _length_words(row: Row, name: str, check: str, got: Any) -> Words:
    length = row.b if row.op == "check_dict" else row.a
    kind = f"{_expected_type(check) or 'dict'} " if row.op == "check_dict" else ""
    if got is not None and got[0] == "object" and got[2] >= 0 and got[2] != length:
        return f"length of {name}", str(length), str(got[2])
    return name, f"a {kind}of length {length}".replace("a of", "one of"), _text(got)


def _contains_words(row: Row, name: str, check: str, got: Any) -> Words:
    key = safe_text(row.obj)
    wanted, found = ("", "not ") if row.a else ("not ", "")
    if got is not None and got[0] not in ("object", "tensor"):
        return name, f"{wanted}to contain {key}", _text(got)
    return f"{key} in {name}", f"{wanted}there", f"{found}there"


def _no_attribute_words(row: Row, name: str, check: str, got: Any) -> Words:
    names = ", ".join(map(str, row.obj))
    return f"attribute {names} of {name}", "none", "one (or an object that could have it)"


def _global_state_words(row: Row, name: str, check: str, got: Any) -> Words:
    changed = _text(got).strip() if got is not None else ""
    return f"global state {changed}".strip(), "as when compiled", "changed"


def _mode_words(row: Row, name: str, check: str, got: Any) -> Words:
    expected = ", ".join(safe_text(kind) for kind in row.obj or ()) or "none"
    return "torch function modes", expected, _text(got)


def _device_words(row: Row, name: str, check: str, got: Any) -> Words:
    return "default device", _value_text(row.obj), _text(got)


def _alias_words(row: Row, name: str, check: str, got: Any) -> Words:
    if row.op == "check_same":
        return check, "one object", "two"
    return check, "distinct objects", "one of them twice"


def _other_words(row: Row, name: str, check: str, got: Any) -> Words:
    return name or "the state of the thread", check, _text(got)


_WORDS: dict[str, WordRule] = {
    "check_tensor": _tensor_words,
    "check_type": _type_words,
    "check_id": _identity_words,
    "check_none": _constant_words("None"),
    "check_not_none": _constant_words("not None"),
    "check_true": _constant_words("True"),
    "check_false": _constant_words("False"),
    "check_float_nan": _constant_words("a float nan"),
    "check_complex_nan": _constant_words("a complex nan"),
    "check_equals": _equal_words,
    "check_length": _length_words,
    "check_dict_length": _length_words,
    "check_dict": _length_words,
    "check_dict_contains": _contains_words,
    "check_set_contains": _contains_words,
    "check_no_attr": _no_attribute_words,
    "check_global_state": _global_state_words,
    "check_function_modes": _mode_words,
    "check_default_device": _device_words,
    "check_no_alias": _alias_words,
    "check_same": _alias_words,
}


# ---- conditions over the locals (shape guards) ----


class _TensorStandIn:
    """Answers what Dynamo's shape conditions ask of a tensor."""

    def __init__(self, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._sizes, self._strides = sizes, strides

    def size(self) -> tuple[int, ...]:
        return self._sizes

    def stride(self) -> tuple[int, ...]:
        return self._strides


def _condition_words(conditions: list[str], got: Any) -> Words:
    """The first condition that these locals do not fulfil; all, where that cannot be told."""
    values = got[1] if got is not None and got[0] == "locals" else {}
    stand_ins = {name: found for name, v in values.items() if (found := _stand_in(v)) is not None}
    texts = [_COMMENT.split(condition, maxsplit=1)[0].strip() for condition in conditions]
    chosen = next((text for text in texts if _is_false(text, stand_ins)), " and ".join(texts))
    named = [name for name in values if f"L['{name}']" in chosen]
    found = ", ".join(f"{name}: {_text(values[name])}" for name in named)
    return f"a condition on {', '.join(named) or 'sizes'}", plain_source(chosen), found or "others"


def _stand_in(snapshot: Any) -> Any:
    kind = snapshot[0]
    if kind == "value" and type(snapshot[1]) in (bool, int, float):
        return snapshot[1]
    if kind == "tensor" and snapshot[6] is not None and snapshot[7] is not None:
        return _TensorStandIn(snapshot[6], snapshot[7])
    return None


def _is_false(condition: str, stand_ins: dict[str, Any]) -> bool:
    """Whether Dynamo's text of a condition, on stand-ins for the locals, is false; if it asks for
    more than these have, it is not known to be."""
    try:
        return not eval(condition, {"__builtins__": {}, "L": stand_ins})
    except Exception:
        return False
