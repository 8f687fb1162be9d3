"""trident/_frame.pyi says what the native module has, with the same parameter names."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from trident import _frame

SPECIAL = {"__init__", "__call__"}
STUB = ast.parse(Path(_frame.__file__).with_name("_frame.pyi").read_text())


def parameters(function: ast.FunctionDef) -> list[str]:
    args = function.args
    return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs) if a.arg != "self"]


def native_parameters(value: Any) -> list[str]:
    return [name for name in inspect.signature(value).parameters if name != "self"]


def test_functions() -> None:
    stubs = {n.name: n for n in STUB.body if isinstance(n, ast.FunctionDef)}
    module = {
        name: value
        for name, value in vars(_frame).items()
        if not name.startswith("_") and callable(value) and not isinstance(value, type)
    }
    assert set(stubs) == set(module)
    for name, value in module.items():
        assert parameters(stubs[name]) == native_parameters(value), name


def test_classes() -> None:
    for stub in (n for n in STUB.body if isinstance(n, ast.ClassDef)):
        native = getattr(_frame, stub.name)
        names = {n.name for n in stub.body if isinstance(n, ast.FunctionDef)} - SPECIAL
        assert names == {n for n in vars(native) if not n.startswith("_") and n != "framelocals"}, (
            stub.name
        )
        for method in (n for n in stub.body if isinstance(n, ast.FunctionDef)):
            if method.name not in SPECIAL and not method.decorator_list:
                actual = native_parameters(getattr(native, method.name))
                assert parameters(method) == actual, f"{stub.name}.{method.name}"
