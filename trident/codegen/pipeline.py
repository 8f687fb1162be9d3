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

from trident import _frame
from trident.capture import dynamo, inductor
from trident.capture.graph import TracedGraph, of_callable
from trident.capture.tree import Specialization
from trident.codegen import jit
from trident.codegen.dialect import Emitter, Program, session
from trident.codegen.frame_plan import analyze, framelocals_names
from trident.codegen.import_graph import Inference, Signature, import_graph
from trident.codegen.import_guards import import_guards
from trident.codegen.import_wrapper import import_wrapper
from trident.codegen.lower_guards import GuardTable, lower_guards
from trident.codegen.lower_plan import ENTRY, NativePlan, emit_plan, lower_plan
from trident.codegen.lower_program import (
    PROGRAM_ENTRY,
    ProgramTable,
    all_steps,
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
    frame plan (see ``lower_plan.py``), valid while `code` lives; 0 means RUN_CODE, and
    `plan_reason` says why. `plan_locals` are the frame locals that the plan loads, by index; a
    NULL among them makes it raise (see there). `counts` is the number of rows per operation,
    `build_s` the time that the build took, in seconds. `has_graph`: the frame runs a graph; then
    `program` is its native host program, or None and `program_reason` says why; it has
    `n_operators` calls of operators, those of `boxed` through the boxed dispatcher, and `n_kernels`
    of kernels: Inductor's, or Triton's. Where there is no plan, Dynamo's code calls the program. A
    plan that `may_call` code of the user's runs where Dynamo sees that code; one that
    `uses_globals` (a graph is one) is for functions with the globals `globals` only.
    """

    table: GuardTable | None = None
    guards_reason: str | None = None
    code: jit.JitCode | None = None
    plan_address: int = 0
    plan_reason: str | None = None
    plan_locals: tuple[int, ...] = ()
    has_graph: bool = False
    program: Any = None
    program_reason: str | None = None
    may_call: bool = False
    uses_globals: bool = False
    n_operators: int = 0
    n_kernels: int = 0
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
        known = self.guards_reason is None or self.program is not None
        if stage == "scm" and self._program is not None and known:
            return self._program.text()
        if stage == "guards" and self.table is not None:
            return self.table.text()
        if stage == "llvm" and self._llvm is not None:
            with session():
                return str(self._llvm)
        reason = self.plan_reason if stage == "llvm" else self.guards_reason
        return f"// none: {reason or 'the frame has no guards'}\n"


def build(specialization: Specialization) -> Built:
    """Compile the guards and, where they have a native form, the frame plan of `specialization` and
    the host program of its graph."""
    start = time.perf_counter()
    built = Built(globals=dynamo.globals_of(specialization))
    known = None if built.globals is None else _DynamoGlobals(built.globals)
    code, compiled_code = specialization.code, specialization.compiled_code
    graph = None if known is None else _find_graph(built, known, compiled_code)
    with session():
        emitter = Emitter(code.co_name, framelocals_names(code))
        fetched: dict[str, ir.Value] = {}
        try:
            fetched = import_guards(specialization.tree, emitter)
        except UnsupportedGuard as error:
            built.guards_reason = str(error)
            emitter = Emitter(code.co_name, framelocals_names(code))
        signature = None if graph is None else _import_graph(built, emitter, graph)
        _emit_plan(built, emitter, compiled_code, known, fetched, signature)
        emitter.program.verify()
        built._program = emitter.program
        if built.guards_reason is None:
            _lower_guards(built, emitter.program)
        _lower(built, emitter.program, code.co_filename, signature)
    if graph is not None and signature is not None and built.program is not None:
        graph.native = _frame.NativeGraph(built.program, signature.inputs, signature.outputs)
        if isinstance(graph, inductor.Wrapper) and not built.plan_address and known is not None:
            known.call_natively(compiled_code, graph)
    built.build_s = time.perf_counter() - start
    return built


def build_skipped(code: CodeType) -> Built:
    """Compile the frame plan of `code`, a frame that Dynamo runs as it is, without guards."""
    start = time.perf_counter()
    built = Built()
    with session():
        emitter = Emitter(code.co_name, framelocals_names(code))
        _emit_plan(built, emitter, code, None, {}, None)
        emitter.program.verify()
        built._program = emitter.program
        _lower(built, emitter.program, code.co_filename)
    built.build_s = time.perf_counter() - start
    return built


class _DynamoGlobals:
    """What a plan may know of the globals of Dynamo's code."""

    def __init__(self, globals_: dict[str, Any]) -> None:
        self._globals = globals_

    def graph(self, name: str) -> Any:
        return self._globals.get(name) if name.startswith("__compiled_fn_") else None

    def call_natively(self, code: CodeType, wrapper: inductor.Wrapper) -> None:
        """Dynamo's `code`, which is not native around its graph, calls the graph's program."""
        from trident.control import is_enabled

        for name in code.co_names:
            function = self.graph(name)
            if function is not None:
                self._globals[name] = inductor.runner(function, wrapper, is_enabled)

    def helpers(self, name: str) -> Any:
        found = self._globals.get(name) if name.startswith("__import_") else None
        return found if found is dynamo.utils() else None

    def is_helper(self, function: Any) -> bool:
        return dynamo.is_helper(function)

    def property_step(self, function: Any) -> str | None:
        return dynamo.property_step(function)

    def value(self, name: str) -> Any:
        return self._globals.get(name)

    def makes_tensor(self, function: Any) -> bool:
        return dynamo.makes_tensor(function)

    def is_profiling(self, function: Any) -> bool:
        return dynamo.is_profiling_helper(function)


Graph = TracedGraph | inductor.Wrapper


def _find_graph(built: Built, known: _DynamoGlobals, code: CodeType) -> Graph | None:
    """The graph that Dynamo's code calls: traced, or as Inductor's wrapper."""
    functions = [known.graph(name) for name in code.co_names if known.graph(name) is not None]
    if not functions:
        return None
    built.has_graph = True
    graph: Graph | None = None
    if len(functions) == 1:
        try:
            graph = of_callable(functions[0]) or inductor.of_callable(functions[0])
        except UnsupportedGraph as error:
            built.program_reason = str(error)
            return None
    if graph is None:
        built.program_reason = 'the graph is not one of the backends "trident" and "inductor"'
    elif isinstance(graph, TracedGraph) and graph.module is None:
        built.program_reason = graph.reason
        return None
    return graph


def _import_graph(built: Built, emitter: Emitter, graph: Graph) -> Signature | None:
    """Adds the host program of the graph."""
    try:
        if isinstance(graph, inductor.Wrapper):
            return import_wrapper(graph, emitter)
        assert graph.module is not None
        return import_graph(graph.module, emitter)
    except UnsupportedGraph as error:
        emitter.drop_program()
        built.program_reason = str(error)
        return None


def _emit_plan(
    built: Built,
    emitter: Emitter,
    code: CodeType,
    known: _DynamoGlobals | None,
    fetched: dict[str, ir.Value],
    signature: Signature | None,
) -> None:
    """Adds the plan, and ends the guards with what they hand over to it."""
    handed: list[ir.Value] = []
    try:
        if built.guards_reason is not None:
            raise UnsupportedPlan(_NO_GUARDS)
        plan = analyze(code, emitter.program.framelocals(), known)
        if plan.call is not None and signature is None:
            raise UnsupportedPlan(f"the graph has no host program: {built.program_reason}")
        if signature is not None and plan.n_outputs not in (None, len(signature.outputs)):
            raise UnsupportedPlan(f"the graph has {len(signature.outputs)} outputs")
    except UnsupportedPlan as error:
        built.plan_reason = str(error)
        emitter.run_code(built.plan_reason)
    else:
        built.plan_locals = tuple(sorted(load.index for load in plan.loaded))
        built.may_call = plan.may_call
        built.uses_globals = plan.uses_globals
        handed = emit_plan(plan, emitter, signature or Signature(), fetched)
    emitter.effect(emitter.guards, "pass", handed)


def _lower_guards(built: Built, program: Program) -> None:
    try:
        built.table = lower_guards(program)
    except UnsupportedGuard as error:
        built.guards_reason = str(error)
        built.plan_reason = _NO_GUARDS
        built.plan_locals = ()
    else:
        built.counts = built.table.counts()


def _lower(built: Built, program: Program, file: str, signature: Signature | None = None) -> None:
    """Makes native code of the plan and the host program, where there are any."""
    inference = None if signature is None else signature.inference
    table = _lower_program(built, program, file, inference)
    address = 0 if table is None else built.program.address
    with session():
        native = NativePlan(ir.Module.create(), {}, [])
    try:
        if built.plan_reason is None:
            native = lower_plan(program, address, built.globals)
    except UnsupportedPlan as error:
        built.plan_reason = str(error)
        built.plan_locals = ()
    if table is not None:
        more, memory = emit_program(table, native.module)
        native.symbols.update(more)
        native.keepalive.append(memory)
    if built.plan_reason is None or table is not None:
        built.code = jit.compile(native.module, native.symbols, native.keepalive)
        built._llvm = native.module
    if built.code is not None and built.plan_reason is None:
        built.plan_address = built.code.address(ENTRY)
    if built.code is not None and table is not None:
        built.program.set_function(built.code.address(PROGRAM_ENTRY), built.code)


def _lower_program(
    built: Built, program: Program, file: str, inference: Inference | None
) -> ProgramTable | None:
    if program.program_block is None or built.globals is None:
        return None
    try:
        table = lower_program(program)
        names = built.globals
        if inference is not None:
            names, file = inference.names, inference.file
        built.program = make_native(table, names, file, inference)
    except UnsupportedGraph as error:
        built.program_reason = str(error)
        if built.plan_reason is None:
            built.plan_reason = f"the graph has no host program: {error}"
            built.plan_locals = ()
        return None
    kinds = [name for name, _ in all_steps(table.steps)]
    built.n_operators = kinds.count("direct") + kinds.count("trident_program_call")
    built.n_kernels = kinds.count("kernel") + kinds.count("trident_program_launch")
    built.boxed = tuple(sorted({f"{c[0]}.{c[1]}".rstrip(".") for c in table.calls}))
    return table


_NO_GUARDS = "the guards have no native form"
