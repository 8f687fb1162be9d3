"""Switching Trident on and off, and keeping the SCMs in step with Dynamo's cache.

One :class:`Runtime` per process listens to what Dynamo compiles (from `import trident` on), owns
the SCMs, and while enabled lets the eval-frame hook and the doors use them.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import os
import sys
import threading
import weakref
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

import torch

from trident import _frame, capture, settings
from trident.capture import Specialization, dynamo
from trident.errors import TridentError
from trident.scm import SpecializationCacheModule
from trident.texts import safe_text

# A frame that Dynamo skips and whose code is longer than this (bytes) does more than return an
# argument, a constant or a tuple of them: not worth analysing.
_MAX_SKIPPED_CODE_BYTES = 128


class Runtime:
    """The SCMs of this process, and the switch. See `capture.Listener` for the events."""

    def __init__(self) -> None:
        self.modules: dict[int, SpecializationCacheModule] = {}
        self.enabled = False
        self.failures: list[str] = []
        self._lock = threading.RLock()
        self._ready = False
        self._code_references: dict[int, weakref.ref[CodeType]] = {}
        self._callbacks: dict[int, weakref.ref[Any]] = {}
        self._undoored: weakref.WeakSet[Any] = weakref.WeakSet()

    # ---- events from Dynamo ----

    def specialization_added(self, spec: Specialization) -> None:
        self._keep_undoored(spec)
        if self.enabled:
            self._module_for(spec.code).add(spec)
            self._hook(spec.code)
            _frame.clear_refusals()

    def specialization_removed(self, spec: Specialization) -> None:
        module = self.modules.get(spec.code_id)
        if module is not None:
            module.remove(spec)

    def frame_skipped(self, code: CodeType) -> None:
        if self.enabled and _may_be_trivial(code):
            self._module_for(code).skip()
            self._hook(code)

    def compile_started(self) -> None:
        _frame.suspend_doors()
        if _limits.used:
            _limits.apply()

    def compile_finished(self, code: CodeType | None) -> None:
        _frame.resume_doors()

    def after_fork_in_child(self) -> None:
        """The forking thread is alone here: what others held, or had begun, they never end."""
        self._lock = threading.RLock()
        _frame.after_fork_in_child()

    def _keep_undoored(self, spec: Specialization) -> None:
        """A guard looks at these functions; on 3.11 a door changes their type."""
        for function in capture.guarded_functions(spec):
            self._undoored.add(function)
            if self.enabled:
                _frame.close_door(function)

    # ---- SCMs ----

    def _module_for(self, code: CodeType) -> SpecializationCacheModule:
        key = id(code)
        module = self.modules.get(key)
        if module is None:
            module = self.modules[key] = SpecializationCacheModule(code)
            died = functools.partial(self._code_died, key)
            self._code_references[key] = weakref.ref(code, died)
        return module

    def _code_died(self, key: int, _reference: Any) -> None:
        _frame.unhook_address(key)
        self._code_references.pop(key, None)
        module = self.modules.pop(key, None)
        if module is not None:
            module.native.kill()

    def _hook(self, code: CodeType) -> None:
        self.modules[id(code)].native.hook(code)

    def module_of(self, code: CodeType) -> SpecializationCacheModule:
        """The SCM of a code object with what Dynamo compiled for it so far (for `explain`)."""
        module = self._module_for(code)
        known = {id(entry.spec) for entry in module.entries}
        for spec in reversed(capture.specializations_of(code)):
            if id(spec) not in known:
                module.add(spec)
        if self.is_skipped(code) and not module.entries and _may_be_trivial(code):
            module.skips = True
        return module

    def is_skipped(self, code: CodeType) -> bool:
        """Does Dynamo run these frames as they are? A reset, unseen by capture, ends that."""
        return capture.is_skipped(code) and (not self._ready or _is_skipped(code))

    def is_over_limit(self, code: CodeType) -> bool:
        """Does Dynamo compile no more for this frame, as it was compiled too often?"""
        return self._ready and (_frame.dynamo_record(code) or ("default",))[0] == "run_only"

    # ---- the switch ----

    def start(self) -> None:
        """Enables hook and doors, for what was recorded before as well."""
        with self._lock:
            if self.enabled:
                return
            self._prepare()
            _frame.strict(settings.strict())
            self.enabled = True
            for spec in capture.live_specializations():
                code = self._live_code(spec)
                if code is not None:
                    self._hook_recorded(code)
            for code in capture.skipped_codes():
                if _may_be_trivial(code):
                    self._module_for(code).skip()
                    self._hook(code)
            if sys.version_info < (3, 12):
                self._hook_not_recorded()
            _frame.patch_modules(dynamo.optimized_module())
            _frame.install()

    def _hook_not_recorded(self) -> None:
        """Guards from before our import may look at functions, whose type a door changes on 3.11:
        Dynamo's own lookup for these frames is to see the former type."""
        for code in capture.unrecorded_codes():
            self._module_for(code).native.set_sees_functions()
            self._hook(code)

    def _hook_recorded(self, code: CodeType) -> None:
        module = self.module_of(code)
        module.native.set_stale(True)
        self._hook(code)

    @staticmethod
    def _live_code(spec: Specialization) -> CodeType | None:
        try:
            return spec.code if spec.alive else None
        except ReferenceError:
            return None

    def stop(self) -> None:
        """Takes hook and doors away; SCMs stay, for the next time."""
        with self._lock:
            if not self.enabled:
                return
            self.enabled = False
            _frame.uninstall()
            _frame.unpatch_modules()
            _frame.close_doors()
            for module in list(self.modules.values()):
                code = module.code
                if code is not None:
                    _frame.unhook(code)

    def _prepare(self) -> None:
        if self._ready:
            return
        missing = _frame.resolve_dynamo(*dynamo.eval_frame_functions())
        if missing is None and not _frame.find_dynamo_extra(dynamo.code_with_record()):
            missing = "Dynamo's record of a code object"
        if missing is not None:
            raise TridentError(
                f"torch {torch.__version__} lacks {missing}: Trident supports torch 2.11 to 2.15; "
                "install one of them, or run without Trident (TRIDENT_DISABLE=1)"
            )
        wrapper = dynamo.wrapper_code()
        module_py = torch.nn.modules.module
        stance_dict, stance_name = dynamo.stance_slot()
        stance = dynamo.default_stance() or object()  # the one in force may be another
        flags: list[Any] = [(stance_dict, stance_name, stance, dynamo.is_default_stance)]
        for slot in (dynamo.fx_tracing_slot(), dynamo.exporting_slot()):
            flags.append((*slot, False, None))
        _frame.initialize(
            wrapper_code=wrapper,
            target_cell=wrapper.co_freevars.index("fn"),
            callback_cell=wrapper.co_freevars.index("callback"),
            find_door=self.find_door,
            strict_check=strict_check,
            hook_names=_MODULE_HOOKS,
            global_hooks=vars(module_py),
            global_hook_names=tuple(n for n in vars(module_py) if _is_global_hook(n)),
            module_codes=tuple(
                function.__code__
                for function in (
                    torch.nn.Module.__call__,
                    torch.nn.Module._call_impl,
                    dynamo.optimized_module().__call__,
                )
                if isinstance(function, FunctionType)
            ),
            flags=flags,
            backend_matcher=self.backend_matches,
            device_dict=vars(torch.utils._device),
            forward_ad=torch.autograd.forward_ad,
            python_kernels=dynamo.python_kernels(),
            knows_global_state=dynamo.knows_global_state(),
        )
        # What the garbage collector may call in a compiled region must not be compiled itself.
        for function in (Runtime._code_died, Runtime._callback_died, dynamo.is_default_stance):
            dynamo.skip_frames_of(function.__code__)
        atexit.register(self._at_exit)
        self._ready = True

    def _at_exit(self) -> None:
        """No event may reach Python code whose module globals are gone already."""
        self.stop()
        capture.set_listener(None)
        self._code_references.clear()
        self._callbacks.clear()

    # ---- questions of the native side ----

    def backend_matches(self, backend: Any, callback: Any) -> bool:
        """Does this Dynamo callback use the backend that compiled? Asked once per pair."""
        key = id(callback)
        if key not in self._callbacks:
            died = functools.partial(self._callback_died, key)
            self._callbacks[key] = weakref.ref(callback, died)
        return dynamo.backend_matches(backend, dynamo.backend_of(callback))

    def _callback_died(self, key: int, _reference: Any) -> None:
        self._callbacks.pop(key, None)
        _frame.callback_died()

    def find_door(self, wrapper: Any, outer: Any, module: SpecializationCacheModule) -> None:
        """A frame was served natively inside `wrapper`: put a door on what the user calls."""
        if not self.enabled or wrapper in self._undoored:
            _frame.refuse_door(wrapper)
            return
        context, target = dynamo.wrapper_context(wrapper), dynamo.wrapper_target(wrapper)
        options: dict[str, Any] = {
            "isolate_id": dynamo.isolate_id_of(context),
            "fullgraph": bool(getattr(context, "fullgraph", False)),
        }
        shape = _door_shape(wrapper, target, outer, module.code)
        if shape is not None:
            callable_, options["checks"], options["is_module"] = shape
            if not _frame.has_door(callable_):
                _frame.open_door(callable_, wrapper, target, module.native, **options)
        if shape is None or options["is_module"]:
            _frame.refuse_door(wrapper)


_MODULE_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
)


def _is_global_hook(name: str) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks")


def _may_be_trivial(code: CodeType) -> bool:
    return len(code.co_code) <= _MAX_SKIPPED_CODE_BYTES and not code.co_names


def _door_shape(
    wrapper: Any, target: Any, outer: Any, code: CodeType | None
) -> tuple[Any, tuple[Any, ...], bool] | None:
    """(callable, module checks, is it an OptimizedModule?) of a door that leads to frames of
    `code`, or None if the way there does more than a door may skip."""
    if isinstance(target, FunctionType):
        return (wrapper, (), False) if target.__code__ is code else None
    if not isinstance(target, MethodType):
        return None
    owner, function = target.__self__, target.__func__
    if getattr(function, "__code__", None) is code:
        return wrapper, (), False
    if not isinstance(owner, torch.nn.Module) or not _calls_forward_plainly(owner, code):
        return None
    if not _is_skipped(torch.nn.Module._call_impl.__code__):
        return None
    if function is torch.nn.Module._call_impl:  # module.compile()
        return wrapper, ((type(owner), None, True),), False
    optimized = dynamo.optimized_module()
    plain = function is torch.nn.Module.__call__ and type(outer) is optimized
    plain = plain and _is_skipped(torch.nn.Module.__call__.__code__)
    if plain and vars(outer).get("forward") is wrapper:
        return outer, ((optimized, wrapper, False), (type(owner), None, False)), True
    return None


def _calls_forward_plainly(module: torch.nn.Module, code: CodeType | None) -> bool:
    kind, base = type(module), torch.nn.Module
    plain = kind.__call__ is base.__call__ and kind._call_impl is base._call_impl
    plain = plain and kind.__getattribute__ is object.__getattribute__
    return plain and getattr(kind.forward, "__code__", None) is code


def _is_skipped(code: CodeType) -> bool:
    """Does Dynamo run these frames, which lie on the way, as they are?"""
    return (_frame.dynamo_record(code) or ("default",))[0] == "skip"


def strict_check(module: SpecializationCacheModule, handle: Any, values: tuple[Any, ...]) -> None:
    """TRIDENT_STRICT: raises TridentError if Dynamo's own guards reject what ours accepted."""
    spec = handle[0]
    names = dynamo.framelocals(spec.code)
    f_locals = {n: v for n, v in zip(names, values, strict=True) if v is not NotImplemented}
    if spec.alive and not dynamo.guard_check(spec, f_locals):
        raise TridentError(
            f"Trident accepted a call of {module.name} ({module.filename}:{module.firstlineno}) "
            f"for specialization {spec.compile_id} that Dynamo's own guards reject: "
            f"{dynamo.guard_check_verbose(spec, f_locals)}. Please report this."
        )


runtime = Runtime()


class Enabled:
    """What `enable()` returns: leave it as a context, or call `trident.disable()`.

    Entering it once more enables once more. `recompile_limit` is the one that it was given."""

    def __init__(self, recompile_limit: int | None = None) -> None:
        self.recompile_limit = recompile_limit
        self._entered = False

    def __enter__(self) -> Enabled:
        if self._entered:
            _begin(self)
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _end(self)


_active: list[Enabled] = []
_active_lock = threading.RLock()


class _RecompileLimits:
    """Dynamo's recompile limits while an `enable(recompile_limit=...)` is in force.

    In newer torch releases a thread sees only what it has set itself, so each thread that compiles
    applies what holds at that moment, and so does a thread that enables or disables. A limit that
    somebody else has set meanwhile stays as it is."""

    def __init__(self) -> None:
        self.used = False  # ever
        per_thread = dynamo.has_config_per_thread()
        # What was set here: name -> (the former value, ours).
        self._set: contextvars.ContextVar[dict[str, tuple[int, int]]] | None = (
            contextvars.ContextVar("trident_recompile_limits") if per_thread else None
        )
        self._set_for_all: dict[str, tuple[int, int]] = {}

    def apply(self) -> None:
        """Gives this thread the limits of the latest `enable()` that has one; idempotent."""
        wanted = next((t.recompile_limit for t in reversed(_active) if t.recompile_limit), None)
        found = self._set_for_all if self._set is None else self._set.get({})
        fresh: dict[str, tuple[int, int]] = {}
        for name, current in dynamo.recompile_limits().items():
            former, ours = found.get(name, (current, current))
            if current != ours:
                if wanted is not None and self._value(name, wanted, former) == ours:
                    fresh[name] = former, ours  # somebody else's, while we want what we did
                    continue
                former = current
            value = former
            if wanted is not None:
                value = self._value(name, wanted, former)
                fresh[name] = former, value
            if value != current:
                dynamo.set_recompile_limit(name, value)
        if self._set is None:
            self._set_for_all = fresh
        else:
            self._set.set(fresh)

    @staticmethod
    def _value(name: str, wanted: int, former: int) -> int:
        return wanted if name == "recompile_limit" else max(wanted, former)


_limits = _RecompileLimits()


def _after_fork_in_child() -> None:
    global _active_lock
    _active_lock = threading.RLock()
    runtime.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def enable(*, reset: bool = False, recompile_limit: int | None = None) -> Enabled:
    """Lets calls of compiled functions enter their Specialization Cache Module, in all threads.

    Use it as a context manager, or as a plain call ended by `disable()`. It nests: Trident is on
    until every `enable()` has ended. With ``TRIDENT_DISABLE=1`` in the environment it does nothing.

    Args:
        reset: call ``torch._dynamo.reset()`` first, so that what was compiled before
            `import trident` is compiled again, recorded, and can become native.
        recompile_limit: how often Dynamo compiles a frame until this `enable()` ends, in all
            threads: its ``torch._dynamo.config.recompile_limit``, and with it
            ``accumulated_recompile_limit`` where that is lower. The latest one in force counts;
            ``torch.compile(recompile_limit=...)`` goes before. A frame that Dynamo has given up
            already stays so until ``torch._dynamo.reset()``. None: Dynamo's own.

    Raises:
        TridentError: `recompile_limit` is no int of at least 1, or this torch lacks something
            Trident needs; nothing is changed then.
    """
    if recompile_limit is not None and (type(recompile_limit) is not int or recompile_limit < 1):
        raise TridentError(
            "enable() takes as recompile_limit an int of at least 1, or None for Dynamo's own "
            f"limit, not {safe_text(recompile_limit)}"
        )
    token = Enabled(recompile_limit)
    _begin(token, reset)
    return token


def _begin(token: Enabled, reset: bool = False) -> None:
    if settings.disabled():
        return
    if not capture.is_installed():
        capture.install()
        capture.set_listener(runtime)
    if reset:
        dynamo.reset()
    with _active_lock:
        runtime.start()
        _active.append(token)
        if token.recompile_limit is not None:
            _limits.used = True
        if _limits.used:
            _limits.apply()


def disable() -> None:
    """Ends the latest `enable()` that is still in force; without one, does nothing."""
    with _active_lock:
        if _active:
            _end(_active[-1])


def _end(token: Enabled) -> None:
    with _active_lock:
        places = [place for place, other in enumerate(_active) if other is token]
        if places:
            del _active[places[-1]]
            if not _active:
                runtime.stop()
            if _limits.used:
                _limits.apply()


def is_enabled() -> bool:
    """Whether any `enable()` is in force."""
    return runtime.enabled
