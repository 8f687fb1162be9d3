from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from trident.capture import dynamo
from trident.errors import TridentError

ROOT = Path(__file__).resolve().parents[2]


def test_compile_wrappers() -> None:
    def f(x: Any) -> Any:
        return x

    compiled = torch.compile(f, backend="eager", fullgraph=True)
    assert dynamo.is_compile_wrapper(compiled)
    assert not dynamo.is_compile_wrapper(f)
    assert not dynamo.is_compile_wrapper(torch._dynamo.disable(f))
    assert not dynamo.is_compile_wrapper(torch.nn.Linear(1, 1))
    assert dynamo.wrapper_target(compiled) is f
    context = dynamo.wrapper_context(compiled)
    assert context.fullgraph is True
    assert callable(context.callback)
    assert dynamo.has_plain_hooks(context)
    dynamic = torch.compile(f, backend="eager", dynamic=True)
    assert not dynamo.has_plain_hooks(dynamo.wrapper_context(dynamic))
    assert dynamo.isolate_id_of(context) == -1
    assert compiled.__code__ in dynamo.wrapper_codes()
    with pytest.raises(TridentError, match=r"not a function returned by torch\.compile"):
        dynamo.wrapper_target(f)


def test_compiled_modules() -> None:
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert type(compiled) is dynamo.optimized_module()


def test_backends() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        return graph

    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Raises:
        def __eq__(self, other: object) -> bool:
            raise ValueError

        __hash__ = None  # type: ignore[assignment]

    compiled = torch.compile(lambda x: x, backend=backend)
    found = dynamo.backend_of(dynamo.wrapper_context(compiled).callback)
    assert getattr(found, "compiler_fn", found) is backend
    again = torch.compile(lambda x: x + 1, backend=backend)
    other = dynamo.backend_of(dynamo.wrapper_context(again).callback)
    assert dynamo.backend_matches(found, other)
    assert dynamo.backend_of(False) is False
    assert dynamo.backend_matches(backend, backend)
    assert not dynamo.backend_matches(backend, test_backends)
    assert dynamo.backend_matches(Equal(), Equal())
    assert not dynamo.backend_matches(Equal(), backend)
    assert not dynamo.backend_matches(Raises(), Raises())


def test_stance() -> None:
    slot, name = dynamo.stance_slot()
    default = dynamo.default_stance()
    assert default is slot[name]
    with torch.compiler.set_stance("force_eager"):
        assert slot[name] is not default
        assert dynamo.default_stance() is None
    assert slot[name] is default


def test_tracing_flags() -> None:
    tracing, tracing_name = dynamo.fx_tracing_slot()
    exporting, exporting_name = dynamo.exporting_slot()
    seen = []

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            seen.append((tracing[tracing_name], exporting[exporting_name]))
            return x + 1

    fx.symbolic_trace(Module())
    assert seen == [(True, False)]
    assert (tracing[tracing_name], exporting[exporting_name]) == (False, False)


def test_framelocals() -> None:
    def f(a: Any, *rest: Any, b: Any = 1, **kw: Any) -> Any:
        c = a
        return c, rest, b, kw

    assert dynamo.framelocals(f.__code__)[:4] == f.__code__.co_varnames[:4]


def test_nothing_is_missing_here() -> None:
    assert dynamo.missing() == []


def test_all_missing_names_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._dynamo.eval_frame, "_stance")
    monkeypatch.delattr(torch._dynamo.eval_frame._TorchDynamoContext, "__call__")
    with pytest.raises(TridentError) as caught:
        dynamo.require()
    text = str(caught.value)
    assert "torch._dynamo.eval_frame._stance" in text
    assert "compile_wrapper" in text
    assert "supports torch 2.11 to 2.15" in text


# Dynamo's internals may be touched here and nowhere else.
PRIVATE = re.compile(r"torch\._C\._dynamo|torch\._dynamo|torch\._inductor|_dynamo\s+import")
ALLOWED = ("trident/capture/", "tests/", "bench/", "examples/", "docs/")
# The one contact of native code.
ALLOWED_FILES = ("trident/runtime/dynamo_api.h", "trident/runtime/dynamo_api.cpp")


def _code_lines(path: Path) -> list[str]:
    """The lines of a Python or Cython source without comments and docstrings."""
    text = path.read_text()
    text = re.sub(r'"""[\s\S]*?"""', "", text)
    text = re.sub(r"/\*[\s\S]*?\*/|//.*", "", text) if path.suffix in (".h", ".cpp") else text
    return [line.split("#")[0] for line in text.splitlines()]


def test_internals_are_touched_in_one_package() -> None:
    suffixes = {".py", ".pyx", ".pxd", ".pyi", ".h"}
    strays = []
    for path in sorted((ROOT / "trident").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in suffixes or name.startswith(ALLOWED) or name in ALLOWED_FILES:
            continue
        strays += [f"{name}: {line.strip()}" for line in _code_lines(path) if PRIVATE.search(line)]
    assert strays == [], "move these to trident/capture/dynamo.py"
