"""A part of PyTorch's own operator samples; ``make test-ops`` runs them all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's own samples need it")

import trident
from tests.op_samples import Sample, function_of, op_db, outcome, run, samples

EVERY = 10


@pytest.mark.slow
def test_samples(fresh: None) -> None:
    report = run(samples(every=EVERY, first=3, most=1))
    assert not report.wrong, report.text()
    assert report.counts["native"] > 100, report.text()
    assert report.native_share >= 0.95, report.text()


def error_inputs() -> list[Any]:
    found = []
    for number, op in enumerate(op for op in op_db if op.error_inputs_func is not None):
        if number % EVERY == 3:
            found += [(op, index, error) for index, error in enumerate(op.error_inputs("cpu"))]
    return found


@pytest.mark.slow
def test_errors(fresh: None) -> None:
    """Operators refuse what they refuse in stock, with the same words."""
    compared = 0
    for op, index, error in error_inputs():
        sample = Sample(op, torch.float32, index, error.sample_input, False)
        f = function_of(sample)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._dynamo.reset()
            stock = outcome(torch.compile(f, backend="eager"), sample).result
            torch._dynamo.reset()
            with trident.enable():
                compiled = torch.compile(f, backend="trident")
                for _ in range(3):
                    found = outcome(compiled, sample).result
                    assert type(found) is type(stock), sample.name
                    if isinstance(stock, BaseException):
                        compared += 1
                        assert _first_line(found) == _first_line(stock), sample.name
    assert compared > 30


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
