"""The life of Dynamo's cache entries, as events.

Creation and end of an entry are seen at ``GuardManagerWrapper.cache_entry``: Dynamo's C++ sets it
when an entry is made, and to None when the entry is invalidated (an object that a guard knows by
its address died), reset, or destroyed with its code object. A data descriptor stands in for that
attribute; values stay in the instances' own dicts, where they were before.

The end of an entry can come anywhere: inside a weak reference's callback, the garbage collector, or
a C++ destructor that an exception must not leave. So the path of a removal takes no lock, and lets
nothing out (but a signal handler that raises in the few instructions outside the ``try`` of
``__set__`` would still end the process there: Dynamo's own assignment runs no Python code). It must
also not be compiled itself, see ``dynamo.skip_frames_of``.

What frames Dynamo looked at, and what it made of them, is seen around its callback,
``CatchErrorsWrapper.__call__``.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

from trident.capture import dynamo, recorder
from trident.capture.patching import Patches
from trident.capture.tree import Specialization

_MISSING: Any = object()

NOT_RECORDED = "compiled before trident was imported"


class Listener(Protocol):
    """Hears of everything here, in the thread where it happens.

    Listeners must be quick, must not compile, and must not raise: what they raise is kept in
    :func:`failures` and goes no further. ``specialization_removed`` may come inside the garbage
    collector: it must not wait for a lock that the same thread may hold.
    """

    def specialization_added(self, spec: Specialization) -> None: ...

    def specialization_removed(self, spec: Specialization) -> None:
        """`spec.alive` is False already; `spec.code` may be gone, `spec.code_id` is not."""

    def frame_skipped(self, code: CodeType) -> None:
        """Dynamo decided to run frames of `code` as they are, without guards, from now on."""

    def compile_started(self) -> None: ...

    def compile_finished(self, code: CodeType | None) -> None:
        """Ends the last ``compile_started`` of this thread. `code` was compiled (its
        specialization is added a moment later), or None: skipped, or an exception."""


_patches = Patches()
_listener: Listener | None = None
_failures: collections.deque[str] = collections.deque(maxlen=100)

# Live specializations. By id of the GuardManagerWrapper, which each holds, and by id of the code,
# which outlives its entries: both ids are unique while their keys are here.
_by_manager: dict[int, Specialization] = {}
_by_code: dict[int, list[Specialization]] = {}
# Codes whose frames Dynamo skips: id -> weak reference (code objects compare by value).
_skipped: dict[int, weakref.ref[CodeType]] = {}
# Codes that may have cache entries without a record: likewise.
_unrecorded: dict[int, weakref.ref[CodeType]] = {}


def set_listener(listener: Listener | None) -> None:
    """Makes `listener` hear all events from now on; None: nobody."""
    global _listener
    _listener = listener


def failures() -> list[str]:
    """What went wrong on our side lately (at most 100), as text."""
    return list(_failures)


def specializations_of(code: CodeType) -> list[Specialization]:
    """The live specializations of `code`, newest first."""
    return list(_by_code.get(id(code), ()))


def live_specializations() -> list[Specialization]:
    """All live specializations, oldest first."""
    return list(_by_manager.values())


def guarded_functions(spec: Specialization) -> list[Any]:
    """The functions made by ``torch.compile`` that a guard of `spec` looks at."""
    return [fn for reference in spec.tree.functions if (fn := reference()) is not None]


def is_skipped(code: CodeType) -> bool:
    """Whether Dynamo said that it will run frames of `code` as they are."""
    reference = _skipped.get(id(code))
    return reference is not None and reference() is code


def entries_of(code: CodeType) -> list[str]:
    """Compile ids of the live cache entries of `code` that were :data:`NOT_RECORDED`."""
    return [
        str(entry.compile_id)
        for entry in dynamo.cache_entries(code)
        if isinstance(entry.code, CodeType) and id(entry.guard_manager) not in _by_manager
    ]


def unrecorded_codes() -> list[CodeType]:
    """The codes that may have entries that were :data:`NOT_RECORDED`. Not from Dynamo's lists of
    entries, which another thread may be taking apart at this moment (a crash)."""
    codes = [reference() for reference in list(_unrecorded.values())]
    return [code for code in codes if code is not None]


def _tell(event: str, *args: Any) -> None:
    listener = _listener
    if listener is not None:
        try:
            getattr(listener, event)(*args)
        except BaseException as error:
            _failed(event, error)


def _failed(what: str, error: BaseException) -> None:
    _failures.append(f"{what}: {type(error).__name__}: {error}")


def _added(guard_manager: Any, entry: Any) -> None:
    tree = recorder.tree_of(guard_manager)
    if tree is None:
        _failures.append(f"entry {entry.compile_id} has no record")
        code = dynamo.source_code(entry.code)
        if code is not None:
            _note(_unrecorded, code)
        return
    code = tree.code
    spec = Specialization(
        code=code,
        compiled_code=entry.code,
        guard_manager=guard_manager,
        tree=tree,
        backend=entry.backend,
        compile_id=str(entry.compile_id),
        # Releases without scopes have one entry list, the shared one.
        isolate_id=getattr(entry, "isolate_recompiles_id", -1),
        trace_annotation=str(getattr(entry, "trace_annotation", "")),
    )
    former = _by_manager.get(id(guard_manager))
    if former is not None:
        _removed(guard_manager)
    _by_manager[id(guard_manager)] = spec
    _by_code.setdefault(id(code), []).insert(0, spec)
    _skipped.pop(id(code), None)
    _tell("specialization_added", spec)


def _removed(guard_manager: Any) -> None:
    spec = _by_manager.pop(id(guard_manager), None)
    if spec is None:
        return
    spec.alive = False
    specs = _by_code.get(spec.code_id)
    if specs is not None:
        # Not list.remove, which another thread's change could upset between look and removal.
        remaining = [other for other in specs if other is not spec]
        if remaining:
            _by_code[spec.code_id] = remaining
        else:
            _by_code.pop(spec.code_id, None)
    _tell("specialization_removed", spec)


class _CacheEntryAttribute:
    """``GuardManagerWrapper.cache_entry`` as before, and an event for each change."""

    name = "cache_entry"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        value = _MISSING if instance is None else instance.__dict__.get(self.name, _MISSING)
        if value is _MISSING:
            kind = owner if owner is not None else type(instance)
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{self.name}'")
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        # The event of an end comes first: from here on the ids in its guards mean nothing.
        try:
            if value is None:
                _removed(instance)
        except BaseException as error:
            _failed("removal", error)
        instance.__dict__[self.name] = value
        try:
            if value is not None:
                _added(instance, value)
        except BaseException as error:
            _failed("creation", error)

    def __delete__(self, instance: Any) -> None:
        if self.name not in instance.__dict__:
            raise AttributeError(self.name)
        self.__set__(instance, None)
        del instance.__dict__[self.name]


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        former = _enter()
        compiled = None
        try:
            result = original(self, frame, *args, **kwargs)
            compiled = _outcome(frame, result)
            return result
        finally:
            recorder.note_foreign_mode(former)
            _tell("compile_finished", compiled)

    return __call__


def _enter() -> bool:
    _tell("compile_started")
    try:
        return recorder.note_foreign_mode(dynamo.in_foreign_mode())
    except Exception as error:
        _failed("modes", error)
        return recorder.note_foreign_mode(True)


def _outcome(frame: Any, result: Any) -> CodeType | None:
    """The frame's code if it was compiled; tells the listener if it is to be skipped."""
    try:
        if getattr(result, "guarded_code", None) is not None:
            return frame.f_code
        if dynamo.is_skip(result):
            _note(_skipped, frame.f_code)
            _tell("frame_skipped", frame.f_code)
    except Exception as error:
        _failed("outcome", error)
    return None


def _note(codes: dict[int, weakref.ref[CodeType]], code: CodeType) -> None:
    # The callback is C all the way: a Python function could itself be caught by Dynamo's hook.
    key = id(code)
    codes[key] = weakref.ref(code, functools.partial(codes.pop, key))


def install() -> None:
    """Starts to watch. Idempotent."""
    if _patches.active:
        return
    wrapper = dynamo.guards_py().GuardManagerWrapper
    catch = dynamo.convert_frame().CatchErrorsWrapper
    attribute = _CacheEntryAttribute
    for function in (attribute.__get__, attribute.__set__, attribute.__delete__):
        dynamo.skip_frames_of(function.__code__)
    try:
        _patches.put(wrapper, "cache_entry", attribute())
        _patches.put(catch, "__call__", _watched(catch.__call__))
    except BaseException:
        _patches.undo()
        raise
    for code in dynamo.compiled_codes():
        _note(_unrecorded, code)


def uninstall() -> None:
    """Stops watching. Without events no specialization can be trusted: all are removed."""
    for spec in live_specializations():
        _removed(spec.guard_manager)
    _patches.undo()
    _skipped.clear()
    _unrecorded.clear()


def skipped_codes() -> list[CodeType]:
    """The codes that Dynamo runs as they are (see :func:`is_skipped`)."""
    codes = [reference() for reference in list(_skipped.values())]
    return [code for code in codes if code is not None]
