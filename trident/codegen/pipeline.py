"""The stages of a build, in order: ``scm`` (guards and plan), ``guards`` (table), ``llvm`` (plan).

What is not supported never raises here: its reason is recorded in :class:`Built`, and that part
stays stock. Anything else that goes wrong is a bug of Trident and does raise.
"""

from __future__ import annotations

import dataclasses
import time
from types import CodeType
from typing import Any

from torch_mlir import ir

from trident.capture import dynamo
from trident.capture.graph import of_callable
from trident.capture.tree import Specialization
from trident.codegen import jit
from trident.codegen.dialect import Emitter, Program, session
from trident.codegen.frame_plan import Plan, analyze, framelocals_names
from trident.codegen.import_graph import Signature, import_graph
from trident.codegen.import_guards import import_guards
from trident.codegen.lower_guards import GuardTable, lower_guards
from trident.codegen.lower_plan import ENTRY, emit_plan, lower_plan
from trident.codegen.lower_program import (
    PROGRAM_ENTRY,
    ProgramTable,
    emit_program,
    lower_program,
    make_native,
)
from trident.errors import TridentError, UnsupportedGraph, UnsupportedGuard, UnsupportedPlan

STAGES = ("scm", "guards", "llvm")


@dataclasses.dataclass(slots=True, eq=False)
class Built:
    """What was made of one specialization, or of a frame that Dynamo skips.

    `table` is None and `guards_reason` says why if the specialization must stay stock (both are
    None for a skipped frame, which has no guards). `plan_address` is the address of the native
    frame plan (see ``lower_plan.py``), valid while `plan` lives; 0 means RUN_CODE, and
    `plan_reason` says why. `plan_locals` are the frame locals that the plan loads, by index; a
    NULL among them makes it raise (see there). `counts` is the number of rows per operation,
    `build_s` the time that the build took, in seconds. `has_graph`: the frame runs a graph; then
    `program` is its native host program, or None and `program_reason` says why; it has
    `n_operators` calls of operators, those of `boxed` through the boxed dispatcher. A plan that
    `may_call` code of the user's runs where Dynamo sees that code; one that `uses_globals` (a graph
    is one) is for functions with the globals `globals` only.
    """

    table: GuardTable | None = None
    guards_reason: str | None = None
    plan: jit.JitCode | None = None
    plan_address: int = 0
    plan_reason: str | None = None
    plan_locals: tuple[int, ...] = ()
    has_graph: bool = False
    program: Any = None
    program_reason: str | None = None
    may_call: bool = False
    uses_globals: bool = False
    n_operators: int = 0
    boxed: tuple[str, ...] = ()
    globals: dict[str, Any] | None = None
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
            fetched = import_guards(specialization.tree, emitter)
        except UnsupportedGuard as error:
            built.guards_reason = str(error)
            built.plan_reason = _NO_GUARDS
        else:
            built.globals = dynamo.globals_of(specialization)
            known = None if built.globals is None else _DynamoGlobals(built.globals)
            _emit_plan(built, emitter, specialization.compiled_code, known, fetched)
            emitter.program.verify()
            built._program = emitter.program
            _lower_guards(built, emitter.program)
            if built.table is not None:
                _lower_plan(built, emitter.program, code.co_filename)
    built.build_s = time.perf_counter() - start
    return built


def build_skipped(code: CodeType) -> Built:
    """Compile the frame plan of `code`, a frame that Dynamo runs as it is, without guards."""
    start = time.perf_counter()
    built = Built()
    with session():
        emitter = Emitter(code.co_name, framelocals_names(code))
        _emit_plan(built, emitter, code, None, {})
        emitter.program.verify()
        built._program = emitter.program
        _lower_plan(built, emitter.program, code.co_filename)
    built.build_s = time.perf_counter() - start
    return built


class _DynamoGlobals:
    """What a plan may know of the globals of Dynamo's code."""

    def __init__(self, globals_: dict[str, Any]) -> None:
        self._globals = globals_

    def graph(self, name: str) -> Any:
        return self._globals.get(name) if name.startswith("__compiled_fn_") else None

    def helpers(self, name: str) -> Any:
        found = self._globals.get(name) if name.startswith("__import_") else None
        return found if found is dynamo.utils() else None

    def is_helper(self, function: Any) -> bool:
        return dynamo.is_helper(function)

    def property_step(self, function: Any) -> str | None:
        return dynamo.property_step(function)

    def is_profiling(self, function: Any) -> bool:
        return dynamo.is_profiling_helper(function)


def _emit_plan(
    built: Built,
    emitter: Emitter,
    code: CodeType,
    known: _DynamoGlobals | None,
    fetched: dict[str, ir.Value],
) -> None:
    """Adds the plan, and ends the guards with what they hand over to it."""
    handed: list[ir.Value] = []
    try:
        plan = analyze(code, emitter.program.framelocals(), known)
        signature = _import_graph(built, emitter, plan)
    except UnsupportedPlan as error:
        built.plan_reason = str(error)
        emitter.run_code(built.plan_reason)
    else:
        built.plan_locals = tuple(sorted(load.index for load in plan.loaded))
        built.may_call = plan.may_call
        built.uses_globals = plan.uses_globals
        handed = emit_plan(plan, emitter, signature, fetched)
    emitter.effect(emitter.guards, "pass", handed)


def _import_graph(built: Built, emitter: Emitter, plan: Plan) -> Signature:
    """Adds the host program of the plan's graph."""
    if plan.call is None:
        return Signature()
    built.has_graph = True
    graph = of_callable(plan.call.function)
    if graph is None:
        built.program_reason = 'the graph is not one of backend="trident"'
    elif graph.module is None:
        built.program_reason = graph.reason
    else:
        try:
            return import_graph(graph.module, emitter)
        except UnsupportedGraph as error:
            emitter.drop_program()
            built.program_reason = str(error)
    raise UnsupportedPlan(f"the graph has no host program: {built.program_reason}")


def _lower_guards(built: Built, program: Program) -> None:
    try:
        built.table = lower_guards(program)
    except UnsupportedGuard as error:
        built.guards_reason = str(error)
        built.plan_reason = built.program_reason = _NO_GUARDS
        built.plan_locals = ()
    else:
        built.counts = built.table.counts()


def _lower_plan(built: Built, program: Program, file: str) -> None:
    if built.plan_reason is not None:
        return
    table: ProgramTable | None = None
    address = 0
    try:
        if built.has_graph and built.globals is not None:
            table = lower_program(program)
            built.program = make_native(table, built.globals, file)
            built.n_operators = len(table.lines)
            built.boxed = tuple(sorted({f"{c[0]}.{c[1]}".rstrip(".") for c in table.calls}))
            address = built.program.address
        native = lower_plan(program, address, built.globals)
    except (UnsupportedPlan, UnsupportedGraph) as error:
        built.plan_reason = str(error)
        built.plan_locals = ()
        built.program = None
        return
    symbols = native.symbols
    if table is not None:
        more, memory = emit_program(table, native.module)
        symbols = {**symbols, **more}
        native.keepalive.append(memory)
    built.plan = jit.compile(native.module, symbols, native.keepalive)
    built.plan_address = built.plan.address(ENTRY)
    built._llvm = native.module
    if table is not None:
        built.program.set_function(built.plan.address(PROGRAM_ENTRY), built.plan)


_NO_GUARDS = "the guards have no native form"
