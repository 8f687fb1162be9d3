"""Records every benchmark's result, with commit, machine and versions, in bench/results/.

One file per test module; running a part of a module renews only that part, so each result carries
the environment that it was measured in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import environment
from bench.compare import Comparison

RESULTS = Path(__file__).resolve().parent / "results"
Record = Callable[..., None]


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    machine_info["trident"] = environment.describe()


@pytest.fixture(scope="session")
def described() -> dict[str, Any]:
    return environment.describe()


@pytest.fixture
def record(request: pytest.FixtureRequest, described: dict[str, Any], benchmark: Any) -> Record:
    """record(comparison, **figures): stores a result, for README's table and in pytest-benchmark's.

    pytest-benchmark times one thing at a time, which says little on a noisy machine: its record
    also gets the figures that were measured in turns, as `extra_info`.
    """

    def store(comparison: Comparison | None = None, **figures: Any) -> None:
        result: dict[str, Any] = {"environment": described, "figures": figures}
        if comparison is not None:
            result["timings"] = {name: asdict(t) for name, t in comparison.timings.items()}
        benchmark.extra_info.update(figures)
        path = RESULTS / f"{request.path.stem.removeprefix('test_')}.json"
        results = json.loads(path.read_text()) if path.exists() else {}
        results[request.node.name.removeprefix("test_")] = result
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")

    return store


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each benchmark compiles its own; nothing of it stays."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
