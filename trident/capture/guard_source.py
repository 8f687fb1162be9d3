"""The Python source of the functions that Dynamo writes for guards.

Dynamo joins the expressions of its shape guards (and of guards on aliases) into one function, whose
source it executes and drops. The recorder keeps it; what is read of it here is believed only if
compiling it gives the function's very code.
"""

from __future__ import annotations
import __future__

import ast
import functools
import operator
from types import CodeType, FunctionType
from typing import Any

_FEATURES = functools.reduce(
    operator.or_,
    (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names),
)


def definition(function: Any, source: str) -> ast.FunctionDef | None:
    """The definition of `function` in `source`, or None if `source` is not what it was made of."""
    if type(function) is not FunctionType:
        return None
    code = function.__code__
    try:
        module = ast.parse(source)
        flags = code.co_flags & _FEATURES
        compiled = compile(source, code.co_filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if code not in list(_codes(compiled)):
        return None
    found = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name
    ]
    return found[0] if len(found) == 1 else None


def _codes(code: CodeType) -> list[CodeType]:
    """`code` and all code objects in it."""
    found = [code]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += _codes(constant)
    return found


def cells(function: FunctionType) -> dict[str, Any]:
    """What the free variables of `function` hold."""
    closure = function.__closure__ or ()
    pairs = zip(function.__code__.co_freevars, closure, strict=True)
    return {name: cell.cell_contents for name, cell in pairs}
