"""Times variants of the same work in turns, and says how far apart they are.

Machines are noisy by up to a factor of two over seconds, so absolute times compare only inside one
process and one moment: every round runs each variant once, in rotating order. What counts is the
ratio: the median over rounds of the ratio within a round, which slow drifts leave alone.
"""

from __future__ import annotations

import gc
import statistics
import timeit
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

ROUND_S = 0.005  # a round of one variant lasts about this long, far above the timer's resolution
WARMUP_CALLS = 50


@dataclass(frozen=True)
class Variant:
    """A statement in its own timed loop (`timeit`), inside a context entered for each turn.

    The loop's code object is not shared between variants: CPython specializes call sites, and a
    shared one would keep changing its mind.
    """

    statement: str
    names: Mapping[str, Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    timer: timeit.Timer = field(init=False)

    def __post_init__(self) -> None:
        timer = timeit.Timer(self.statement, globals=dict(self.names))
        object.__setattr__(self, "timer", timer)

    @classmethod
    def of(cls, function: Callable[[], object], **options: Any) -> Variant:
        return cls("function()", {"function": function}, **options)


@dataclass(frozen=True)
class Timing:
    """Nanoseconds a call, over rounds: median and interquartile range."""

    median_ns: float
    iqr_ns: float
    rounds: int
    calls: int  # in each round

    @classmethod
    def of(cls, samples_ns: list[float], calls: int) -> Timing:
        low, median, high = statistics.quantiles(samples_ns, n=4, method="inclusive")
        return cls(median, high - low, len(samples_ns), calls)


@dataclass(frozen=True)
class Comparison:
    timings: dict[str, Timing]
    samples_ns: dict[str, list[float]]  # one a round

    def ratio(self, slow: str, fast: str) -> float:
        """How many times as long `slow` takes as `fast`: the median of the rounds' ratios."""
        pairs = zip(self.samples_ns[slow], self.samples_ns[fast], strict=True)
        return statistics.median(a / b for a, b in pairs)


def interleave(
    variants: Mapping[str, Variant | Callable[[], object]],
    rounds: int = 15,
    round_s: float = ROUND_S,
    warmup_calls: int = WARMUP_CALLS,
) -> Comparison:
    """Times all variants in turns; at least nine rounds, garbage collection off while timing."""
    if rounds < 9:
        raise ValueError(f"a median needs nine or more rounds, not {rounds}")
    named = {
        name: variant if isinstance(variant, Variant) else Variant.of(variant)
        for name, variant in variants.items()
    }
    calls = {name: _calls_per_round(v, round_s, warmup_calls) for name, v in named.items()}
    samples: dict[str, list[float]] = {name: [] for name in named}
    order = list(named)
    gc.collect()
    for _ in range(rounds):
        for name in order:
            samples[name].append(_turn(named[name], calls[name], warmup_calls))
        order.append(order.pop(0))
    return Comparison({name: Timing.of(samples[name], calls[name]) for name in named}, samples)


def compare_checks(
    dynamo_check: Callable[[Any], bool],
    given: Mapping[str, Any],
    native_check: Callable[[Any], bool],
    values: tuple[Any, ...],
    **options: Any,
) -> Comparison:
    """Times Dynamo's check of the locals `given` and ours of the same, `values`, in turns, each
    called from Python; both must pass."""
    assert dynamo_check(given)
    assert native_check(values)
    return interleave(
        {
            "stock": Variant("check(values)", {"check": dynamo_check, "values": given}),
            "Trident": Variant("check(values)", {"check": native_check, "values": values}),
        },
        **options,
    )


def _turn(variant: Variant, calls: int, warmup_calls: int) -> float:
    with variant.context():
        variant.timer.timeit(warmup_calls)  # caches and doors are this variant's again
        return variant.timer.timeit(calls) / calls * 1e9  # timeit turns the collector off


def _calls_per_round(variant: Variant, round_s: float, warmup_calls: int) -> int:
    with variant.context():
        variant.timer.timeit(warmup_calls)
        calls = 1
        while (elapsed := variant.timer.timeit(calls)) < round_s / 4:
            calls *= 4
    return max(1, round(calls * round_s / elapsed))
