"""What Trident does and why: `stats`, `explain`, and the summary of ``python -m trident run``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from trident import _frame, capture
from trident.capture import dynamo
from trident.control import runtime
from trident.errors import TridentError
from trident.scm import Entry, SpecializationCacheModule

if TYPE_CHECKING:
    from trident.codegen.pipeline import Built

_RESUME_PREFIX = "torch_dynamo_resume_in_"


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
class SpecializationReport:
    """One specialization: whether its guards, frame plan and host program are native; if not, why.

    `guards` counts guard rows by operation; `ir` maps a stage to its text if asked for."""

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


@dataclasses.dataclass(frozen=True)
class FrameReport:
    """One frame: its specializations, and what Trident does not know of it."""

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


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The frames behind a compiled function or module. `str()` gives a readable text."""

    frames: list[FrameReport]

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
    for spec in frame.specializations:
        yield from _specialization_lines(spec)
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
    counts = ", ".join(f"{n} {op}" for op, n in sorted(spec.guards.items()))
    if spec.guards_native:
        yield f"    guards: native, {spec.n_guards} checks ({counts})"
    else:
        yield f"    guards: stock: {spec.guards_reason}"
    for part, native, reason in (
        ("frame plan", spec.plan_native, spec.plan_reason),
        ("host program", spec.program_native, spec.program_reason),
    ):
        note = f" ({reason})" if native and reason else ""
        yield f"    {part}: {f'native{note}' if native else f'stock: {reason}'}"
    for stage, text in spec.ir.items():
        yield f"    --- {stage} ---"
        yield from (f"    {line}" for line in text.rstrip().splitlines())


def explain(f_or_module: Any, ir: bool = False) -> Explanation:
    """Says, per frame and specialization, what runs natively, what does not, and exactly why.

    Args:
        f_or_module: a function, method or module, compiled or not (then what was compiled of it).
        ir: also give the IR of each stage of each specialization.

    Raises:
        TridentError: the argument is not something that `torch.compile` could have compiled.
    """
    codes = list(dict.fromkeys(_with_resumes(_codes_of(f_or_module))))
    reports = [_explain_frame(code, ir) for code in codes]
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


def _explain_frame(code: CodeType, ir: bool) -> FrameReport:
    module = runtime.module_of(code)
    module.build()
    hits, misses, _raised, run_code = module.native.counters
    skipped = runtime.is_skipped(code)
    return FrameReport(
        name=module.name,
        filename=module.filename,
        firstlineno=module.firstlineno,
        specializations=[_explain_entry(entry, ir) for entry in module.entries],
        skipped=skipped,
        skipped_plan_native=skipped and module.has_skip_plan,
        skipped_reason=None if module.skipped is None else module.skipped.plan_reason,
        not_recorded=capture.entries_of(code),
        hooked=_frame.is_hooked(code),
        hits=hits,
        misses=misses,
        run_code=run_code,
    )


def _explain_entry(entry: Entry, ir: bool) -> SpecializationReport:
    built, native = entry.built, entry.native is not None
    plan_native = native and built is not None and built.plan_address != 0
    plan_reason = entry.reason if not native else (built.plan_reason if built else None)
    checks = {} if built is None else {o: n for o, n in built.counts.items() if "check" in o}
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
        ir={} if not ir or built is None else {s: built.ir(s) for s in _stages()},
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
        return f"{built.n_operators} operators{boxed}{caller}"
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
