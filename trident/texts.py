"""Texts of objects of the user's, for messages, IR and reports."""

from __future__ import annotations

from typing import Any

_type_name = type.__dict__["__name__"].__get__


def safe_text(value: Any, depth: int = 2) -> str:
    """A short text of `value` that never runs user code: other than builtins, its type's name."""
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() <= 128 else f"int of {value.bit_length()} bits"
    if kind in (str, bytes):
        return repr(value) if len(value) <= 60 else repr(value[:60]) + "..."
    if kind in (tuple, list) and depth:
        items = ", ".join(safe_text(item, depth - 1) for item in value[:8])
        more = ", ..." if len(value) > 8 else ("," if kind is tuple and len(value) == 1 else "")
        return f"({items}{more})" if kind is tuple else f"[{items}{more}]"
    if issubclass(kind, type):
        return f"type {_type_name(value)}"
    return f"<{_type_name(kind)}>"
