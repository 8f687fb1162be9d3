"""What Trident does and why: `stats`, `explain`, and the summary of ``python -m trident run``."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from trident import _frame, capture
from trident.capture import dynamo
from trident.control import runtime
from trident.errors import TridentError
from trident.guard_report import (
    CALLED_BACK,
    NATIVE,
    REMEMBERED,
    GuardReport,
    MissReport,
    guard_reports,
    miss_report,
)
from trident.scm import Entry, SpecializationCacheModule

if TYPE_CHECKING:
    from trident.codegen.pipeline import Built

_RESUME_PREFIX = "torch_dynamo_resume_in_"
# Hits that explain(measure=True) has timed.
_MEASURED_HITS = 1024
# Guards that the short text names.
_CALLBACKS_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class FrameStats:
    """Calls of one frame that reached Trident. `hits` ran natively, `run_code` had native guards
    and ran Dynamo's code, `misses` went to stock Dynamo, `raised` ended in an exception of native
    code."""

    name: str
    filename: str
    firstlineno: int
    hits: int
    misses: int
    raised: int
    run_code: int
    specializations: int
    build_s: float


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since the start or the last `reset_stats()`, per frame and in total; build time."""

    frames: list[FrameStats]

    @property
    def hits(self) -> int:
        return sum(frame.hits for frame in self.frames)

    @property
    def misses(self) -> int:
        return sum(frame.misses for frame in self.frames)

    @property
    def raised(self) -> int:
        return sum(frame.raised for frame in self.frames)

    @property
    def run_code(self) -> int:
        return sum(frame.run_code for frame in self.frames)

    @property
    def build_s(self) -> float:
        return sum(frame.build_s for frame in self.frames)

    def as_dict(self) -> dict[str, Any]:
        totals = {n: getattr(self, n) for n in ("hits", "misses", "raised", "run_code", "build_s")}
        return {**totals, "frames": [dataclasses.asdict(frame) for frame in self.frames]}

    def __str__(self) -> str:
        lines = [
            f"{self.hits} hits, {self.run_code} with Dynamo's code, {self.misses} misses, "
            f"{self.raised} raised, {self.build_s:.3f} s building"
        ]
        for f in self.frames:
            lines.append(
                f"  {f.name} ({f.filename}:{f.firstlineno}): {f.hits} hits, {f.run_code} with "
                f"Dynamo's code, {f.misses} misses, {f.specializations} specializations"
            )
        return "\n".join(lines)


def _frame_stats(module: SpecializationCacheModule) -> FrameStats:
    hits, misses, raised, run_code = module.native.counters
    return FrameStats(
        name=module.name,
        filename=module.filename,
        firstlineno=module.firstlineno,
        hits=hits,
        misses=misses,
        raised=raised,
        run_code=run_code,
        specializations=len(module.entries),
        build_s=module.build_s,
    )


def stats() -> Stats:
    """Counters per frame; frames whose code is gone are left out. Thread-safe."""
    frames = [_frame_stats(module) for module in list(runtime.modules.values())]
    seen = [f for f in frames if f.hits or f.misses or f.raised or f.run_code or f.specializations]
    return Stats(sorted(seen, key=lambda f: (f.filename, f.firstlineno, f.name)))


def reset_stats() -> None:
    """Sets all counters and build times to zero."""
    for module in list(runtime.modules.values()):
        module.native.reset_counters()
        module.build_s = 0.0


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over the last `calls` calls of a specialization that were timed (at most 31), in ns:
    choosing it (its guards, and those tried before), the frame plan without the host program, the
    host program. None for what the calls had not: a skipped frame has no guards, Dynamo's code is
    no frame plan. `at_ns` is the monotonic clock at the latest of them."""

    guard_ns: float | None
    plan_ns: float | None
    host_ns: float | None
    calls: int
    at_ns: int

    def __str__(self) -> str:
        parts = (
            ("guards", self.guard_ns),
            ("frame plan", self.plan_ns),
            ("host program", self.host_ns),
        )
        times = ", ".join(f"{part} {ns:,.0f} ns" for part, ns in parts if ns is not None)
        return f"{times} (medians of {self.calls} timed calls)"


class _Timed:
    """`guard_ns`, `plan_ns` and `host_ns` of `timing`: see `Timing`; None if nothing was timed."""

    timing: Timing | None

    @property
    def guard_ns(self) -> float | None:
        return None if self.timing is None else self.timing.guard_ns

    @property
    def plan_ns(self) -> float | None:
        return None if self.timing is None else self.timing.plan_ns

    @property
    def host_ns(self) -> float | None:
        return None if self.timing is None else self.timing.host_ns


@dataclasses.dataclass(frozen=True)
class SpecializationReport(_Timed):
    """One specialization: whether its guards, frame plan and host program are native; if not, why.

    `guards` counts guard rows by operation, `guard_kinds` by kind (see `GuardReport`); `callbacks`
    are the guards that call Dynamo back, `guard_program` all guards, in order, if asked for.
    `last_miss` says why it did not serve the last call of the frame that missed; None if it did not
    exist then, or none missed. `timing` is there if asked for; `ir` maps a stage to its text."""

    compile_id: str
    guards_native: bool
    guards_reason: str | None
    n_guards: int
    guards: dict[str, int]
    plan_native: bool
    plan_reason: str | None
    program_native: bool
    program_reason: str | None
    hits: int
    ir: dict[str, str]
    guard_kinds: dict[str, int]
    callbacks: list[GuardReport]
    guard_program: list[GuardReport]
    last_miss: MissReport | None
    timing: Timing | None


@dataclasses.dataclass(frozen=True)
class FrameReport(_Timed):
    """One frame: its specializations, and what Trident does not know of it.

    `over_limit`: Dynamo compiles no more for it; `passes` is the number of calls that now go to
    stock unseen, as too many in a row missed. `timing` is that of the specialization (or of the
    plan of a skipped frame) that was timed last."""

    name: str
    filename: str
    firstlineno: int
    specializations: list[SpecializationReport]
    skipped: bool
    skipped_plan_native: bool
    skipped_reason: str | None
    not_recorded: list[str]
    hooked: bool
    hits: int
    misses: int
    run_code: int
    over_limit: bool
    passes: int
    measured: bool
    timing: Timing | None


def _latest(timings: Iterable[Timing | None]) -> Timing | None:
    found = [timing for timing in timings if timing is not None]
    return max(found, key=lambda timing: timing.at_ns, default=None)


@dataclasses.dataclass(frozen=True)
class Explanation(_Timed):
    """The frames behind a compiled function or module. `str()` gives a readable text.

    `guard_ns`, `plan_ns` and `host_ns` are those of the frame that was timed last."""

    frames: list[FrameReport]

    @property
    def timing(self) -> Timing | None:  # type: ignore[override]
        return _latest(frame.timing for frame in self.frames)

    def __str__(self) -> str:
        if not self.frames:
            return "Nothing was compiled yet: call it first."
        return "\n".join(line for frame in self.frames for line in _frame_lines(frame))


def _frame_lines(frame: FrameReport) -> Iterator[str]:
    yield (
        f"{frame.name} ({frame.filename}:{frame.firstlineno}): {frame.hits} hits, "
        f"{frame.run_code} with Dynamo's code, {frame.misses} misses"
        + ("" if frame.hooked else "; left to stock now (not enabled, or it always missed)")
    )
    if frame.over_limit:
        rest = f"; too many missed: the next {frame.passes} calls, too" if frame.passes else ""
        yield (
            "  over Dynamo's recompile limit (see trident.enable(recompile_limit=...)): calls that "
            f"match none of these specializations run as plain Python{rest}"
        )
    if frame.measured and frame.timing is None:
        yield "  nothing was timed yet: call it, with Trident enabled, and explain once more"
    for spec in frame.specializations:
        yield from _specialization_lines(spec)
    if frame.skipped and frame.timing is not None:
        yield f"  a call: {frame.timing}"
    if frame.skipped:
        state = "answered natively" if frame.skipped_plan_native else "runs as plain Python"
        reason = f": {frame.skipped_reason}" if frame.skipped_reason else ""
        yield f"  no graph: Dynamo runs the frame as it is; {state}{reason}"
    for compile_id in frame.not_recorded:
        yield (
            f"  [{compile_id}] {capture.NOT_RECORDED}: stays with stock Dynamo; "
            "trident.enable(reset=True) compiles it again"
        )


def _specialization_lines(spec: SpecializationReport) -> Iterator[str]:
    yield f"  [{spec.compile_id}] {spec.hits} hits"
    if spec.guards_native:
        counts = ", ".join(f"{n} {kind}" for kind, n in spec.guard_kinds.items() if n)
        yield f"    guards: native, {spec.n_guards} checks ({counts})"
        if not spec.guard_program:
            for guard in spec.callbacks[:_CALLBACKS_SHOWN]:
                yield f"      {guard.kind}: {guard.text}"
            if len(spec.callbacks) > _CALLBACKS_SHOWN:
                yield f"      and {len(spec.callbacks) - _CALLBACKS_SHOWN} more called back"
        for guard in spec.guard_program:
            yield f"      {guard}"
    else:
        yield f"    guards: stock: {spec.guards_reason}"
    for part, native, reason in (
        ("frame plan", spec.plan_native, spec.plan_reason),
        ("host program", spec.program_native, spec.program_reason),
    ):
        note = f" ({reason})" if native and reason else ""
        yield f"    {part}: {f'native{note}' if native else f'stock: {reason}'}"
    if spec.timing is not None:
        yield f"    a call: {spec.timing}"
    if spec.last_miss is not None:
        yield f"    the last miss: {spec.last_miss}"
    for stage, text in spec.ir.items():
        yield f"    --- {stage} ---"
        yield from (f"    {line}" for line in text.rstrip().splitlines())


def explain(
    f_or_module: Any, ir: bool = False, *, guards: bool = False, measure: bool = False
) -> Explanation:
    """Says, per frame and specialization, what runs natively, what does not, and exactly why; and
    why the last call that missed did.

    Args:
        f_or_module: a function, method or module, compiled or not (then what was compiled of it).
        ir: also give the IR of each stage of each specialization.
        guards: also give all guards of each specialization, with Dynamo's source and the user's
            line, and whether each is native, remembered or called back.
        measure: also give the times of guards, frame plan and host program, in nanoseconds, of
            calls that were timed: the first hits and then one in 1024. From here on the next
            1024 hits of each frame are, so calling it and explaining once more gives the times
            of these calls. Nothing is run here, and no argument is kept.

    Raises:
        TridentError: the argument is not something that `torch.compile` could have compiled.
    """
    codes = list(dict.fromkeys(_with_resumes(_codes_of(f_or_module))))
    reports = [_explain_frame(code, _Request(ir, guards, measure)) for code in codes]
    known = [r for r in reports if r.specializations or r.skipped or r.not_recorded]
    return Explanation(known)


def _codes_of(f: Any) -> list[CodeType]:
    while True:
        if isinstance(f, dynamo.optimized_module()):
            f = vars(f)["_modules"]["_orig_mod"]
        elif dynamo.is_compile_wrapper(f):
            f = dynamo.wrapper_target(f)
        elif isinstance(f, MethodType) and not _calls_module(f):
            f = f.__func__
        else:
            break
    if isinstance(f, MethodType):
        f = f.__self__
    if isinstance(f, torch.nn.Module):
        return [code for module in f.modules() for code in _forward_codes(module)]
    if isinstance(f, FunctionType):
        return [f.__code__]
    raise TridentError(
        f"explain() takes a function, a method or an nn.Module, not {type(f).__name__}"
    )


def _calls_module(method: MethodType) -> bool:
    calls = (torch.nn.Module.__call__, torch.nn.Module._call_impl)
    return isinstance(method.__self__, torch.nn.Module) and method.__func__ in calls


def _forward_codes(module: torch.nn.Module) -> Iterator[CodeType]:
    """The code of its class's forward, and of its own if it has one; each perhaps compiled."""
    forwards: tuple[Any, ...] = (type(module).forward, vars(module).get("forward"))
    for forward in forwards:
        while dynamo.is_compile_wrapper(forward) or isinstance(forward, MethodType):
            if isinstance(forward, MethodType):
                forward = None if _calls_module(forward) else forward.__func__
            else:
                forward = dynamo.wrapper_target(forward)
        if isinstance(forward, FunctionType):
            yield forward.__code__


def _with_resumes(codes: list[CodeType]) -> Iterator[CodeType]:
    """These frames, and those that continue them after a graph break."""
    known = {id(code) for code in codes}
    yield from codes
    names = {(code.co_filename, code.co_name) for code in codes}
    for spec in capture.live_specializations():
        code = spec.code
        if id(code) in known or not code.co_name.startswith(_RESUME_PREFIX):
            continue
        origin = code.co_name[len(_RESUME_PREFIX) :].rsplit("_at_", 1)[0]
        if (code.co_filename, origin) in names:
            known.add(id(code))
            yield code


@dataclasses.dataclass(frozen=True)
class _Request:
    """What `explain` was asked for."""

    ir: bool
    guards: bool
    measure: bool


def _explain_frame(code: CodeType, request: _Request) -> FrameReport:
    module = runtime.module_of(code)
    module.build()
    number = module.native.noted_misses
    specializations = [_explain_entry(entry, request, number) for entry in module.entries]
    timings = [spec.timing for spec in specializations]
    if request.measure:
        module.native.measure(_MEASURED_HITS)
        timings.append(_timing(module.native_skipped))
    hits, misses, _raised, run_code = module.native.counters
    skipped = runtime.is_skipped(code)
    return FrameReport(
        name=module.name,
        filename=module.filename,
        firstlineno=module.firstlineno,
        specializations=specializations,
        skipped=skipped,
        skipped_plan_native=skipped and module.has_skip_plan,
        skipped_reason=None if module.skipped is None else module.skipped.plan_reason,
        not_recorded=capture.entries_of(code),
        hooked=_frame.is_hooked(code),
        hits=hits,
        misses=misses,
        run_code=run_code,
        over_limit=runtime.is_over_limit(code),
        passes=module.native.passes,
        measured=request.measure,
        timing=_latest(timings),
    )


def _timing(native: _frame.NativeSpecialization | None) -> Timing | None:
    at_ns, samples = (0, []) if native is None else native.samples
    if not samples:
        return None

    def median(part: int) -> float | None:
        found = [ns for sample in samples if (ns := sample[part]) is not None]
        return float(statistics.median(found)) if found else None

    return Timing(median(0), median(1), median(2), len(samples), at_ns)


def _last_miss(entry: Entry, number: int) -> MissReport | None:
    miss = None if entry.native is None else entry.native.miss
    if miss is None or miss[0] != number or entry.built is None or entry.built.table is None:
        return None

    def conditions(label: str) -> list[str]:
        leaves = entry.spec.tree.leaves()
        return next((leaf.parts for leaf in leaves if " and ".join(leaf.parts) in label), [])

    return miss_report(entry.built.table, miss[1], miss[2], conditions)


def _explain_entry(entry: Entry, request: _Request, miss_number: int) -> SpecializationReport:
    built, native = entry.built, entry.native is not None
    plan_native = native and built is not None and built.plan_address != 0
    plan_reason = entry.reason if not native else (built.plan_reason if built else None)
    checks = {} if built is None else {o: n for o, n in built.counts.items() if "check" in o}
    program: list[GuardReport] = []
    if built is not None and built.table is not None and entry.native is not None:
        program = guard_reports(built.table, entry.native.remembered)
    kinds = [guard.kind for guard in program]
    return SpecializationReport(
        compile_id=entry.spec.compile_id,
        guards_native=native,
        guards_reason=entry.reason,
        n_guards=sum(checks.values()),
        guards=checks,
        plan_native=plan_native,
        plan_reason=plan_reason,
        program_native=_has_program(built, plan_native),
        program_reason=_program_reason(built, plan_native),
        hits=entry.hits,
        ir={} if not request.ir or built is None else {s: built.ir(s) for s in _stages()},
        guard_kinds={kind: kinds.count(kind) for kind in (NATIVE, REMEMBERED, CALLED_BACK)},
        callbacks=[guard for guard in program if guard.kind == CALLED_BACK],
        guard_program=program if request.guards else [],
        last_miss=_last_miss(entry, miss_number),
        timing=_timing(entry.native) if request.measure else None,
    )


def _has_program(built: Built | None, plan_native: bool) -> bool:
    return built is not None and (
        built.program is not None or (plan_native and not built.has_graph)
    )


def _program_reason(built: Built | None, plan_native: bool) -> str:
    if built is not None and _has_program(built, plan_native):
        if not built.has_graph:
            return "there is no graph"
        boxed = f", {', '.join(built.boxed)} through the dispatcher" if built.boxed else ""
        caller = "" if plan_native else ", called by Dynamo's code object"
        kernels = f"{built.n_kernels} kernels, " if built.n_kernels else ""
        return f"{kernels}{built.n_operators} operators{boxed}{caller}"
    why = built.program_reason if built is not None and built.program_reason else None
    return f"{why}; Dynamo's code object runs it" if why else "Dynamo's code object runs it"


def _stages() -> tuple[str, ...]:
    from trident.codegen.pipeline import STAGES

    return STAGES


def summary() -> str:
    """The report at the end of ``python -m trident run``."""
    result = stats()
    specializations = sum(frame.specializations for frame in result.frames)
    served = result.hits + result.run_code
    return (
        f"trident: {served} of {served + result.misses} calls dispatched natively "
        f"({result.hits} fully native, {result.run_code} ran Dynamo's code), "
        f"{len(result.frames)} frames, {specializations} specializations, "
        f"{result.build_s:.2f} s building"
    )
