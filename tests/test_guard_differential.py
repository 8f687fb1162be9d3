"""After each of 10,000 random changes, the native guards say what Dynamo's own tree says.

`python -m tests.guard_differential` runs longer and shows what it found; see there.
"""

from __future__ import annotations

import pytest

from tests.guard_differential import Counts, differential
from tests.guard_mutations import REUSED, RULES

MUTATIONS = 10_000


@pytest.fixture(scope="module")
def counts() -> Counts:
    found, reports = differential(seed=5, mutations=MUTATIONS)
    assert reports == []
    return found


def test_verdicts_agree(counts: Counts) -> None:
    assert sum(counts.mutations.values()) >= MUTATIONS


def test_the_changes_matter(counts: Counts) -> None:
    """Guards of many kinds passed and failed, in turns, for changes of nearly every kind."""
    answers = {"True": 0, "False": 0}
    for text, count in counts.verdicts.items():
        answers[text.split(",")[0].removeprefix("native ")] += count
    assert min(answers.values()) > 3_000
    assert sum(counts.flips.values()) > MUTATIONS / 20
    assert len(counts.failed_rows) >= 18
    assert len(counts.rows) >= 35
    assert len(set(RULES) - set(counts.mutations)) <= 4  # of objects that few worlds have
    assert REUSED[0] > 30
    assert counts.other["calls served"] > 300
