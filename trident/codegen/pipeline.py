"""The stages of a build, in order: ``scm`` (guards and plan), ``guards`` (table), ``llvm`` (plan).

What is not supported never raises here: its reason is recorded in :class:`Built`, and that part
stays stock. Anything else that goes wrong is a bug of Trident and does raise.
"""

from __future__ import annotations

import dataclasses
import time
from types import CodeType

from torch_mlir import ir

from trident.capture.tree import Specialization
from trident.codegen import jit
from trident.codegen.dialect import Emitter, Program, session
from trident.codegen.frame_plan import analyze, framelocals_names
from trident.codegen.import_guards import import_guards
from trident.codegen.lower_guards import GuardTable, lower_guards
from trident.codegen.lower_plan import ENTRY, emit_plan, lower_plan
from trident.errors import TridentError, UnsupportedGuard, UnsupportedPlan

STAGES = ("scm", "guards", "llvm")


@dataclasses.dataclass(slots=True, eq=False)
class Built:
    """What was made of one specialization, or of a frame that Dynamo skips.

    `table` is None and `guards_reason` says why if the specialization must stay stock (both are
    None for a skipped frame, which has no guards). `plan_address` is the address of the native
    frame plan (see ``lower_plan.py``), valid while `plan` lives; 0 means RUN_CODE, and
    `plan_reason` says why. `plan_locals` are the frame locals that the plan loads, by index; a
    NULL among them makes it raise (see there). `counts` is the number of rows per operation,
    `build_s` the time that the build took, in seconds.
    """

    table: GuardTable | None = None
    guards_reason: str | None = None
    plan: jit.JitCode | None = None
    plan_address: int = 0
    plan_reason: str | None = None
    plan_locals: tuple[int, ...] = ()
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    build_s: float = 0.0
    _program: Program | None = None
    _llvm: ir.Module | None = None

    def ir(self, stage: str) -> str:
        """The text of a stage of :data:`STAGES`; raises TridentError for any other name."""
        if stage not in STAGES:
            raise TridentError(f"no stage {stage!r}; there are {', '.join(STAGES)}")
        if stage == "scm" and self._program is not None:
            return self._program.text()
        if stage == "guards" and self.table is not None:
            return self.table.text()
        if stage == "llvm" and self._llvm is not None:
            with session():
                return str(self._llvm)
        reason = self.plan_reason if stage == "llvm" else self.guards_reason
        return f"// none: {reason or 'the frame has no guards'}\n"


def build(specialization: Specialization) -> Built:
    """Compile the guards and, where it has a native form, the frame plan of `specialization`."""
    start = time.perf_counter()
    built = Built()
    code = specialization.code
    with session():
        emitter = Emitter(code.co_name, framelocals_names(code))
        try:
            import_guards(specialization.tree, emitter)
        except UnsupportedGuard as error:
            built.guards_reason = str(error)
            built.plan_reason = _NO_GUARDS
        else:
            _emit_plan(built, emitter, specialization.compiled_code)
            emitter.program.verify()
            built._program = emitter.program
            _lower_guards(built, emitter.program)
            if built.table is not None:
                _lower_plan(built, emitter.program)
    built.build_s = time.perf_counter() - start
    return built


def build_skipped(code: CodeType) -> Built:
    """Compile the frame plan of `code`, a frame that Dynamo runs as it is, without guards."""
    start = time.perf_counter()
    built = Built()
    with session():
        emitter = Emitter(code.co_name, framelocals_names(code))
        emitter.effect(emitter.guards, "pass", [])
        _emit_plan(built, emitter, code)
        emitter.program.verify()
        built._program = emitter.program
        _lower_plan(built, emitter.program)
    built.build_s = time.perf_counter() - start
    return built


def _emit_plan(built: Built, emitter: Emitter, code: CodeType) -> None:
    try:
        plan = analyze(code, emitter.program.framelocals())
    except UnsupportedPlan as error:
        built.plan_reason = str(error)
        emitter.run_code(built.plan_reason)
    else:
        built.plan_locals = tuple(sorted(load.index for load in plan.loaded))
        emit_plan(plan, emitter)


def _lower_guards(built: Built, program: Program) -> None:
    try:
        built.table = lower_guards(program)
    except UnsupportedGuard as error:
        built.guards_reason = str(error)
        built.plan_reason = _NO_GUARDS
        built.plan_locals = ()
    else:
        built.counts = built.table.counts()


def _lower_plan(built: Built, program: Program) -> None:
    if built.plan_reason is not None:
        return
    try:
        native = lower_plan(program)
    except UnsupportedPlan as error:
        built.plan_reason = str(error)
        built.plan_locals = ()
        return
    built.plan = jit.compile(native.module, native.symbols, native.keepalive)
    built.plan_address = built.plan.address(ENTRY)
    built._llvm = native.module


_NO_GUARDS = "the guards have no native form"
