"""The Specialization Cache Module of one frame, seen from Python: what it holds and how it grows.

An SCM is made when Dynamo compiles (or skips) a code object, and built at the frame's next call: a
one-shot frame costs nothing. Each specialization is built once, on its own; adding the n-th touches
no other. When Dynamo ends a cache entry, its native twin is retired in the same instant.
"""

from __future__ import annotations

import threading
import time
import weakref
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from trident import _frame, capture, settings
from trident.capture import Specialization, dynamo
from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.codegen.pipeline import Built


class Entry:
    """One specialization in an SCM. `native` is None until it is built, and stays None if `reason`
    says why it must stay with stock Dynamo."""

    def __init__(self, spec: Specialization) -> None:
        self.spec = spec
        self.native: _frame.NativeSpecialization | None = None
        self.built: Built | None = None
        self.reason: str | None = None
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller, who builds: if two threads made a native twin each, the end
        of the cache entry could reach one of them only."""
        return self._claimed.acquire(blocking=False)

    @property
    def hits(self) -> int:
        """Calls that this specialization served, natively or with Dynamo's code."""
        return 0 if self.native is None else self.native.hits

    def build(self) -> None:
        """Makes the native twin, or notes why there is none. Under TRIDENT_STRICT, a failure of
        Trident's own (not an unsupported guard) raises TridentError."""
        if self.spec.tree.problems:
            self.reason = "; ".join(self.spec.tree.problems)
            return
        if dynamo.has_breakpoint(self.spec.compiled_code):
            self.reason = "it has a breakpoint for Dynamo's bytecode debugger"
            return
        try:
            from trident.codegen import pipeline  # heavy, and lacking where torch-mlir does

            self.built = pipeline.build(self.spec)
            self._make_native(self.built)
        except Exception as error:
            self.reason = f"internal failure: {type(error).__name__}: {error}"
            if settings.strict():
                raise TridentError(
                    f"specialization {self.spec.compile_id} of {self.spec.code.co_name} "
                    f"({self.spec.code.co_filename}:{self.spec.code.co_firstlineno}) could not be "
                    f"built: {error}. Without TRIDENT_STRICT it would stay with stock Dynamo."
                ) from error

    def _make_native(self, built: Built) -> None:
        if built.table is None:
            self.reason = built.guards_reason or "its guards have no native form"
            return
        native = _frame.NativeSpecialization(built.table.framelocals)
        try:
            native.set_guards(built.table.rows, built.table.n_registers, built.table.fetched)
        except (ValueError, TypeError) as error:
            self.reason = f"its guards have no native form here: {error}"
            if "unknown guard operation" in str(error):
                raise
            return
        spec = self.spec
        native.set_origin(
            spec.compiled_code, spec.backend, spec.isolate_id, spec.trace_annotation or ""
        )
        # The handle lives as long as the native twin: the plan's code, and the strict check's spec.
        handle = (spec, built.code, built.program, built.globals)
        native.set_plan(built.plan_address, handle, built.plan_locals)
        if built.program is not None:
            native.set_program(built.program)
        if built.uses_globals and built.globals is not None:
            native.set_scope(built.globals, built.program is not None, built.may_call)
        if spec.alive:
            self.native = native

    def retire(self) -> None:
        """No further call is served by this specialization."""
        if self.native is not None:
            self.native.retire()


def _sees_functions(spec: Specialization) -> bool:
    """Whether a guard may ask for the exact type of a function, which a door changes on 3.11."""
    return bool(spec.tree.problems) or any(
        leaf.kind == "TYPE_MATCH" and leaf.payload["type_id"] == id(FunctionType)
        for leaf in spec.tree.leaves()
    )


class SpecializationCacheModule:
    """All specializations of one code object behind one native entry."""

    def __init__(self, code: CodeType) -> None:
        self._code = weakref.ref(code)
        self.name = code.co_name
        self.filename = code.co_filename
        self.firstlineno = code.co_firstlineno
        self.entries: list[Entry] = []  # newest first
        self.skipped: Built | None = None
        self.native_skipped: _frame.NativeSpecialization | None = None  # its plan
        self.skips = False
        self.build_s = 0.0
        self.native = _frame.NativeScm(code, self)

    @property
    def code(self) -> CodeType | None:
        """The user's code, None once it is gone."""
        return self._code()

    def add(self, spec: Specialization) -> None:
        """A new cache entry: built at the next call."""
        self.skips = False
        self.entries = [Entry(spec), *self.entries]
        if _sees_functions(spec):
            self.native.set_sees_functions()
        self.native.set_stale(True)

    def remove(self, spec: Specialization) -> None:
        """Dynamo ended the cache entry. May run inside the garbage collector: takes no lock."""
        for entry in self.entries:
            if entry.spec is spec:
                entry.retire()
        self.entries = [entry for entry in self.entries if entry.spec is not spec]
        self._publish()

    def skip(self) -> None:
        """Dynamo runs this frame as it is, without guards."""
        self.skips = True
        self.native.set_stale(True)

    def build(self) -> None:
        """Builds what is new and lets the native entry see it."""
        start = time.perf_counter()
        try:
            for entry in self.entries:
                if entry.claim():
                    entry.build()
            code = self.code
            if self.skips and self.skipped is None and code is not None:
                self._build_skipped(code)
        finally:
            self.build_s += time.perf_counter() - start
            self._publish()

    def _build_skipped(self, code: CodeType) -> None:
        try:
            from trident.codegen import pipeline

            self.skipped = pipeline.build_skipped(code)
        except Exception:
            if settings.strict():
                raise
            self.skips = False  # runs as it is, as without Trident
            return
        if self.skipped.plan_address:
            native = _frame.NativeSpecialization(capture.dynamo.framelocals(code))
            native.set_plan(self.skipped.plan_address, self.skipped.code, self.skipped.plan_locals)
            self.native.set_skipped(native)
            self.native_skipped = native

    def _publish(self) -> None:
        live = [e.native for e in self.entries if e.native is not None and e.spec.alive]
        self.native.set_specializations(live)

    @property
    def is_useful(self) -> bool:
        """Whether any call can ever be served here: something is native, or waits to be built."""
        waiting = any(e.built is None and e.reason is None for e in self.entries)
        native = any(e.native is not None for e in self.entries)
        return waiting or native or (self.skips and (self.skipped is None or self.has_skip_plan))

    @property
    def has_skip_plan(self) -> bool:
        return self.skipped is not None and self.skipped.plan_address != 0
