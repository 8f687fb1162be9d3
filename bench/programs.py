"""Call-heavy pure-Python programs, and how deep recursion goes: what an eval-frame hook would tax.

Run as a module it prints, as JSON, the median nanoseconds of each program in a process of its own:

    python -m bench.programs never      # trident is not even imported
    python -m bench.programs after      # after enable(), compiled calls, and disable()
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable


def fibonacci(n: int = 15) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def leaf(a: int, b: int) -> int:
    return a + b


def middle(a: int) -> int:
    return leaf(a, 1) + leaf(a, 2)


def nested(n: int = 400) -> int:
    return sum(middle(i) + middle(i + 1) for i in range(n))


class Vector:
    __slots__ = ("x", "y")

    def __init__(self, x: float, y: float) -> None:
        self.x, self.y = x, y

    def __add__(self, other: Vector) -> Vector:
        return Vector(self.x + other.x, self.y + other.y)

    @property
    def squared(self) -> float:
        return self.dot(self)

    def dot(self, other: Vector) -> float:
        return self.x * other.x + self.y * other.y


def objects(n: int = 300) -> float:
    position, total = Vector(0, 0), 0.0
    for i in range(n):
        position = position + Vector(i, 1)
        total += position.squared
    return total


PROGRAMS: dict[str, Callable[[], object]] = {
    "recursive calls": fibonacci,
    "nested calls": nested,
    "objects and properties": objects,
}


def depth_of_recursion(limit: int = 5000) -> int:
    """How many Python calls deep a recursion gets under `limit`, from the caller's depth on."""
    deepest = 0

    def descend(level: int) -> None:
        nonlocal deepest
        deepest = level
        descend(level + 1)

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with contextlib.suppress(RecursionError):
            descend(0)
    finally:
        sys.setrecursionlimit(before)
    return deepest


def use_trident_and_stop() -> None:
    import torch

    import trident

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with trident.enable():
        compiled = torch.compile(double, backend="eager")
        for _ in range(5):
            compiled(torch.ones(3))


def medians_ns(rounds: int = 1000) -> dict[str, float]:
    samples: dict[str, list[int]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            started = time.perf_counter_ns()
            program()
            samples[name].append(time.perf_counter_ns() - started)
    return {name: statistics.median(values) for name, values in samples.items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["after"]:
        use_trident_and_stop()
    else:
        import torch
    print(json.dumps(medians_ns()))
