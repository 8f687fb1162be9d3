"""Differential test of guards: after random changes, native verdicts equal those of Dynamo's tree.

    python -m tests.guard_differential --seed 1 --mutations 100000

Each world (see guard_worlds) is a frame with several specializations and ways to call it. A step
changes something that the frame can reach, undoes the last change, or calls the compiled frame;
then every live specialization is checked for every way to call. Verdicts are compared with

* the *exact* one, Dynamo's ``check_verbose``, which looks at everything,
* the *quick* one, Dynamo's ``check``, which stock's lookup uses and which takes shortcuts: it does
  not look again below dicts whose version it knows.

A native yes where either says no is a failure, as is a native no where the exact one says yes, but
for :data:`STRICTER`. Where only the quick one says yes, Trident is right to say no.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import logging
import os
import random
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

import trident
from tests import guard_mutations, guard_mutations_torch  # noqa: F401 (registers its mutations)
from tests.guard_mutations import FINAL, RULES, Reached, Undo, candidates
from tests.guard_worlds import Binding, World
from trident.capture import dynamo
from trident.control import runtime
from trident.errors import TridentError
from trident.scm import Entry

STEPS = 100  # of one world
MAX_SPECIALIZATIONS = 6
MAX_OPEN = 4  # changes that are not undone yet
# After these only their undo may come: torch crashes later if a parameter's data is set inside.
ALONE = frozenset({"functorch_level"})

# Where a native no beside an exact yes is known and allowed: a row's operation -> the changes of
# which one must be open, and why.
STRICTER = {
    # hasattr raises then; stock decides, and takes the attribute for absent.
    "check_no_attr": (
        ("class_special", "class_add"),
        "__getattr__ or a property raises no AttributeError",
    ),
}


class Disagreement(NamedTuple):
    """What went wrong; `signature` is the same for the same mistake in a shorter run."""

    signature: str
    text: str


class Verdicts(NamedTuple):
    native: bool
    quick: bool | None  # None: it raised
    exact: bool | None
    row: str  # the operation of the row that failed
    label: str


class Counts:
    """What happened, over all worlds."""

    def __init__(self) -> None:
        self.mutations: collections.Counter[str] = collections.Counter()
        self.raised: collections.Counter[str] = collections.Counter()
        self.verdicts: collections.Counter[str] = collections.Counter()
        self.flips: collections.Counter[str] = collections.Counter()
        self.shortcuts: collections.Counter[str] = collections.Counter()
        self.stricter: collections.Counter[str] = collections.Counter()
        self.failed_rows: collections.Counter[str] = collections.Counter()
        self.rows: collections.Counter[str] = collections.Counter()
        self.stock: collections.Counter[str] = collections.Counter()
        self.other: collections.Counter[str] = collections.Counter()

    def report(self) -> str:
        lines = [f"{sum(self.mutations.values())} mutations"]
        for name, count in sorted(self.mutations.items()):
            lines.append(f"  {name:32} {count:7} ({self.flips[name]} changed a verdict)")
        for name in ("verdicts", "failed_rows", "rows", "shortcuts", "stricter", "stock", "other"):
            lines.append(f"{name}: {dict(getattr(self, name).most_common())}")
        return "\n".join(lines)


class Run:
    """One world and its steps. `disagreements` is what was found."""

    def __init__(self, seed: int, counts: Counts) -> None:
        torch._dynamo.reset()
        self.world = World(seed)
        self.counts = counts
        self.open: list[tuple[str, Undo]] = []
        self.log: list[str] = []
        self.disagreements: list[Disagreement] = []
        self.former: dict[tuple[int, int], bool] = {}
        self.seen: set[int] = set()
        self.undo_chance = 0.5
        self.last = "start"

    # ---- what is compared ----

    def entries(self) -> list[Entry]:
        module = runtime.modules.get(id(self.world.code))
        return [] if module is None else [e for e in module.entries if e.spec.alive and e.native]

    def build(self) -> None:
        """Builds what Dynamo compiled lately, as the frame's next call would."""
        module = runtime.modules.get(id(self.world.code))
        if module is None:
            return
        module.build()
        for entry in module.entries:
            if id(entry.spec) in self.seen:
                continue
            self.seen.add(id(entry.spec))
            if entry.native is None:
                self.counts.stock[str(entry.reason)[:90]] += 1
            elif entry.built is not None and entry.built.table is not None:
                self.counts.rows.update(entry.built.table.counts())
                rows = entry.built.table.rows
                self.world.guarded |= {row.obj for row in rows if type(row.obj) in (str, int)}

    def values(self, binding: Binding) -> dict[str, Any] | None:
        return self.world.f_locals(binding)

    def verdicts(self, entry: Entry, values: dict[str, Any]) -> Verdicts | None:
        native, spec = entry.native, entry.spec
        assert native is not None
        row = tuple(values.get(name, NotImplemented) for name in native.framelocals)
        first = native.check(row)
        operation, label = ("", "") if first else self._row(entry)
        quick = _verdict(lambda: dynamo.guard_check(spec, values))
        exact = _verdict(lambda: not dynamo.guard_check_verbose(spec, values))
        again = native.check(row)
        if not spec.alive:  # a guard's own Python ended it
            return None
        if first != again:
            self.found(f"unstable {operation}", f"{entry.spec}: {first}, then {again}")
        return Verdicts(first, quick, exact, operation, label)

    def _row(self, entry: Entry) -> tuple[str, str]:
        table = entry.built and entry.built.table
        assert entry.native is not None
        assert table is not None
        row = table.rows[entry.native.last_failed]
        return row.op, table.labels[row.label]

    def compare(self) -> dict[int, bool]:
        """Compares all verdicts; returns the native ones by entry: does any binding pass?"""
        flipped = False
        result: dict[int, bool] = {}
        for number, binding in enumerate(self.world.bindings):
            values = self.values(binding)
            if values is None:
                continue
            for entry in self.entries():
                found = self.verdicts(entry, values)
                if found is None:
                    continue
                self.judge(entry, found)
                key = (id(entry.spec), number)
                flipped |= self.former.get(key, found.native) != found.native
                self.former[key] = found.native
                result[id(entry)] = found.native or result.get(id(entry), False)
        self.counts.flips[self.last] += flipped
        return result

    def judge(self, entry: Entry, found: Verdicts) -> None:
        native, quick, exact, row, label = found
        self.counts.verdicts[f"native {native}, quick {quick}, exact {exact}"] += 1
        if not native:
            self.counts.failed_rows[row] += 1
        where = f"{entry.spec}: native {native}, quick {quick}, exact {exact}: {row}: {label}"
        if native and not (quick and exact):
            values = self.values(self.world.bindings[0])
            why = dynamo.guard_check_verbose(entry.spec, values) if values else ""
            self.found(f"unsound {why[:60]}", f"{where} {why}")
        elif not native and exact:
            changes, why = STRICTER.get(row, ((), ""))
            if any(name in changes for name, _ in self.open):
                self.counts.stricter[f"{row}: {why}"] += 1
            else:
                self.found(f"stricter {row}", where)
        elif quick and not native:
            self.counts.shortcuts[f"{row} after {self.last}"] += 1

    def found(self, signature: str, text: str) -> None:
        self.disagreements.append(Disagreement(signature, text))

    # ---- steps ----

    def step(self, seed: int) -> None:
        rng = random.Random(seed)
        choice = rng.random()
        self.last = "none"
        if choice < 0.12 or not self.entries():
            self.call(rng)
        elif self.open and (
            choice < self.undo_chance or len(self.open) >= MAX_OPEN or self.open[-1][0] in ALONE
        ):
            self.undo()
        else:
            self.mutate(rng)
        passes = any(self.compare().values())
        self.undo_chance = 0.45 if passes else 0.8

    def call(self, rng: random.Random) -> None:
        """Calls the frame; what served it must have had passing guards."""
        binding = rng.choice(self.world.bindings)
        if any(name == "functorch_level" for name, _ in self.open):
            return
        values = self.values(binding)
        passing = {}
        if values is not None:
            entries = self.entries()
            passing = {id(e): v.native for e in entries if (v := self.verdicts(e, values))}
        if not any(passing.values()) and passing:
            surroundings_changed = any(name in _names_by_target("Env") for name, _ in self.open)
            rare = surroundings_changed and rng.random() < 0.8
            if rare or len(passing) >= MAX_SPECIALIZATIONS:
                return
        before = [(entry, entry.hits) for entry in self.entries()]
        self.log.append("call")
        self.counts.other["calls"] += 1
        try:
            self.world.call(binding)
        except TridentError as error:
            self.found("strict", str(error))
        except Exception as error:
            self.counts.other[f"calls that raised {type(error).__name__}"] += 1
        served = [entry for entry, hits in before if entry.hits > hits]
        self.counts.other["calls served"] += bool(served)
        if values is not None and any(not passing.get(id(e), True) for e in served):
            self.found("served", "a specialization served a call that its guards reject")
        self.build()

    def undo(self) -> None:
        name, undo = self.open.pop()
        self.last = f"undo {name}"
        self.log.append(self.last)
        self.counts.mutations[name] += 1
        try:
            undo()
        except Exception as error:
            self.counts.raised[f"undo {name}: {type(error).__name__}: {error}"[:120]] += 1

    def mutate(self, rng: random.Random) -> None:
        reached = Reached(self.world)
        for _ in range(20):
            name = rng.choice(_names_by_target(rng.choice(_TARGETS)))
            targets = candidates(reached, RULES[name])
            if targets:
                break
        else:
            return
        while name in FINAL and self.open:
            self.undo()
        slots = [t for t in targets if isinstance(t, guard_mutations.Slot)]
        guarded = [t for t in slots if type(t.key) in (str, int) and t.key in self.world.guarded]
        target = rng.choice(guarded if guarded and rng.random() < 0.6 else targets)
        del targets, slots, guarded, reached
        text = f"{name} of {_describe(target)}"
        self.last = name
        try:
            undo = RULES[name].apply(rng, self.world, target)
        except Exception as error:
            self.counts.raised[f"{name}: {type(error).__name__}"] += 1
            return
        self.log.append(text)
        self.counts.mutations[name] += 1
        self.open.append((name, undo))

    def finish(self) -> None:
        log = list(self.log)
        while self.open:
            self.undo()
        self.log = log


_TARGETS = ["slots", "slots", "slots", "Env", "objects", "objects", "torch"]


@functools.cache
def _names_by_target(target: str) -> list[str]:
    """The mutations of slots, of the surroundings, of modules and tensors, of other objects."""
    slot = guard_mutations.Slot("cell", types.CellType(1), None)
    named = {name: _target_of(name, rule.accepts, slot) for name, rule in RULES.items()}
    return [name for name, found in named.items() if found == target]


def _target_of(name: str, accepts: Callable[[Any], bool], slot: Any) -> str:
    if accepts(guard_mutations.Env()):
        return "Env"
    if accepts(slot) or name in ("delete_attribute", "delete_item", "reuse_address"):
        return "slots"
    return "torch" if name.startswith(("tensor_", "module_")) else "objects"


def _verdict(question: Callable[[], bool]) -> bool | None:
    try:
        return bool(question())
    except Exception:
        return None


def _describe(target: Any) -> str:
    if isinstance(target, guard_mutations.Slot):
        return f"{target.kind} {target.key!r} of a {type(target.holder).__name__}"
    return target.__name__ if isinstance(target, type) else f"a {type(target).__name__}"


def run_world(seed: int, steps: list[int], counts: Counts) -> Run:
    """The world of `seed` after `steps`, or after the first that shows a disagreement."""
    run = Run(seed, counts)
    try:
        for _ in range(2):
            for binding in run.world.bindings:
                run.call(random.Random(len(run.log)))
                del binding
        run.compare()
        for number in steps:
            if run.disagreements:
                break
            run.step(number)
    finally:
        run.finish()
    return run


def steps_of(seed: int, n: int) -> list[int]:
    rng = random.Random(f"steps of {seed}")
    return [rng.getrandbits(32) for _ in range(n)]


def minimized(seed: int, steps: list[int], signature: str) -> tuple[list[int], Run]:
    """The fewest of `steps` found that still show `signature`, and their run."""
    best = run_world(seed, steps, Counts())
    size = max(1, len(steps) // 2)
    while size:
        start = 0
        while start < len(steps):
            shorter = steps[:start] + steps[start + size :]
            run = run_world(seed, shorter, Counts())
            if any(d.signature == signature for d in run.disagreements):
                steps, best = shorter, run
            else:
                start += size
        size //= 2
    return steps, best


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Trident strictly enabled, Dynamo fresh and ready for many specializations."""
    former = os.environ.get("TRIDENT_STRICT")
    os.environ["TRIDENT_STRICT"] = "1"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    limits = {"recompile_limit": 64, "accumulated_recompile_limit": 10_000}
    # Dynamo measures each new tree, after emptying the CPU's caches: most of a compilation's time.
    logging.disable(logging.CRITICAL)  # of compilations that fail, as many must
    unmeasured = mock.patch("torch._dynamo.guards.profile_guard_manager", return_value=0.0)
    try:
        with torch._dynamo.config.patch(limits), unmeasured, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with trident.enable():
                gc.collect()
                gc.freeze()  # each reset collects garbage
                yield
    finally:
        gc.unfreeze()
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
        os.environ.pop("TRIDENT_STRICT")
        if former is not None:
            os.environ["TRIDENT_STRICT"] = former
        torch._dynamo.reset()


def differential(
    seed: int, mutations: int, *, minutes: float = 1e9, verbose: bool = False
) -> tuple[Counts, list[str]]:
    """Runs worlds from `seed` on until there were so many mutations; returns what was counted, and
    per disagreement (each signature once) its shortest sequence as text."""
    counts, reports, known = Counts(), [], set()
    end = time.monotonic() + minutes * 60
    with surroundings():
        while sum(counts.mutations.values()) < mutations and time.monotonic() < end:
            steps = steps_of(seed, STEPS)
            run = run_world(seed, steps, counts)
            for disagreement in run.disagreements[:1]:
                if disagreement.signature not in known:
                    known.add(disagreement.signature)
                    reports.append(_report(seed, steps, disagreement))
                    if verbose:
                        print(reports[-1], flush=True)
            if verbose and seed % 25 == 0:
                done = sum(counts.mutations.values())
                print(f"seed {seed}: {done} mutations", flush=True)
            seed += 1
    return counts, reports


def _report(seed: int, steps: list[int], found: Disagreement) -> str:
    steps, run = minimized(seed, steps, found.signature)
    texts = [d.text for d in run.disagreements if d.signature == found.signature] or [found.text]
    lines = [f"== seed {seed}, steps {steps}: {found.signature}", run.world.source()]
    return "\n".join([*lines, *run.log, texts[0]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=1e9)
    options = parser.parse_args()
    start = time.monotonic()
    counts, reports = differential(
        options.seed, options.mutations, minutes=options.minutes, verbose=True
    )
    print(counts.report())
    print("raised:", dict(counts.raised.most_common(40)))
    print("really reused addresses:", guard_mutations.REUSED[0])
    print(f"{len(reports)} disagreements, {time.monotonic() - start:.0f} s")
    return len(reports)


if __name__ == "__main__":
    raise SystemExit(main())
