"""The same results, exceptions and compilations as stock, for every example and backend."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import trident
from tests.conftest import compilations, reset_compilations
from tests.examples import EXAMPLES

# Stock has no native graphs: what ours must equal is "eager".
BACKENDS = {"eager": "eager", "trident": "eager", "aot_eager": "aot_eager", "inductor": "inductor"}


def assert_same(actual: Any, expected: Any, path: str = "result") -> None:
    """Bitwise equality of tensors (values, dtype, strides, requires_grad), in any container."""
    assert type(actual) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, path
        assert actual.shape == expected.shape, path
        assert actual.stride() == expected.stride(), path
        assert actual.requires_grad == expected.requires_grad, path
        same = torch.equal(
            actual.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8),
            expected.detach()
            .clone(memory_format=torch.contiguous_format)
            .view(-1)
            .view(torch.uint8),
        )
        assert same, f"{path}: {actual} != {expected}"
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), path
        for key, value in expected.items():
            assert_same(actual[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for i, value in enumerate(expected):
            assert_same(actual[i], value, f"{path}[{i}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(actual, field.name), getattr(expected, field.name), path)
    elif isinstance(expected, BaseException):
        assert str(actual) == str(expected), path
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(actual), path
    else:
        assert actual == expected, path


def run(name: str, backend: str) -> tuple[Any, dict[str, int]]:
    torch._dynamo.reset()
    reset_compilations()
    try:
        result = EXAMPLES[name](backend)
    except Exception as error:
        result = error
    return result, compilations()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_same_as_stock(fresh: None, monkeypatch: Any, name: str, backend: str) -> None:
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    expected, stock_compilations = run(name, BACKENDS[backend])
    with trident.enable():
        actual, trident_compilations = run(name, backend)
    assert_same(actual, expected)
    assert trident_compilations == stock_compilations


def test_examples_are_served(fresh: None) -> None:
    """The comparison above means something: most examples do run under Trident."""
    served, native = {}, {}
    for name in sorted(EXAMPLES):
        trident.reset_stats()
        with trident.enable():
            run(name, "trident")
            stats = trident.stats()
            served[name] = stats.hits + stats.run_code
            native[name] = stats.hits
    idle = [name for name, n in served.items() if n == 0]
    assert len(idle) <= 3, f"never served: {idle}"
    assert [name for name, n in native.items() if n == 0] == ["iterators"]
