"""The rest of what Trident takes from TorchDynamo's private interface, one function per thing.

Checked with torch 2.13; each docstring names the releases that have what it uses in that form.
"""

from __future__ import annotations

import inspect
import json
import sys
from contextvars import ContextVar
from importlib.metadata import EntryPoint
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.backends.registry
import torch._dynamo.convert_frame
import torch._dynamo.eval_frame
import torch._dynamo.guards
import torch.compiler
import torch.fx._symbolic_trace

from trident.errors import TridentError

_REQUIRED: tuple[tuple[str, str], ...] = (
    ("torch._dynamo.guards", "CheckFunctionManager"),
    ("torch._dynamo.guards", "GuardManagerWrapper"),
    ("torch._dynamo.guards", "GuardBuilder"),
    ("torch._dynamo.convert_frame", "CatchErrorsWrapper"),
    ("torch._dynamo.eval_frame", "_TorchDynamoContext"),
    ("torch._dynamo.eval_frame", "OptimizedModule"),
    ("torch._dynamo.eval_frame", "DynamoStance"),
    ("torch._dynamo.eval_frame", "_stance"),
    ("torch._dynamo.config", "recompile_limit"),
    ("torch._dynamo.config", "accumulated_recompile_limit"),
    ("torch._dynamo.types", "FrameAction"),
    ("torch._dynamo.types", "FrameExecStrategy"),
    ("torch._C._dynamo.guards", "GuardManager"),
    ("torch._C._dynamo.guards", "RootGuardManager"),
    ("torch._C._dynamo.guards", "DictGuardManager"),
    ("torch._C._dynamo.guards", "dict_version"),
    ("torch._C._dynamo.eval_frame", "_debug_get_cache_entry_list"),
    ("torch._C._dynamo.eval_frame", "code_framelocals_names"),
    ("torch._C._dynamo.eval_frame", "set_code_exec_strategy"),
    ("torch.fx._symbolic_trace", "_is_fx_tracing_flag"),
    ("torch.compiler", "_is_exporting_flag"),
)
_REQUIRED_METHODS: tuple[tuple[str, str, str], ...] = (
    ("torch._C._dynamo.guards", "GuardManager", "get_leaf_guards"),
    ("torch._C._dynamo.guards", "GuardManager", "get_accessors"),
    ("torch._C._dynamo.guards", "GuardManager", "get_child_managers"),
    ("torch._C._dynamo.guards", "GuardManager", "get_source"),
    ("torch._C._dynamo.guards", "RootGuardManager", "get_epilogue_lambda_guards"),
    ("torch._C._dynamo.guards", "RootGuardManager", "add_epilogue_lambda_guard"),
    ("torch._C._dynamo.guards", "DictGuardManager", "get_key_value_managers"),
    ("torch._dynamo.guards", "GuardManagerWrapper", "check"),
)


def missing() -> list[str]:
    """Dotted names that Trident needs and this torch lacks."""
    found: list[str] = []
    for module, *path in (*_REQUIRED, *_REQUIRED_METHODS):
        value: Any = torch
        for name in [*module.split(".")[1:], *path]:
            value = getattr(value, name, found)
            if value is found:
                found.append(".".join([module, *path]))
                break
    return found


def require() -> None:
    """Raises TridentError if this torch lacks anything that Trident needs."""
    lacking = missing()
    if not _wrapper_codes():
        lacking.append("torch._dynamo.eval_frame._TorchDynamoContext.__call__'s compile_wrapper")
    if lacking:
        raise TridentError(
            f"torch {torch.__version__} lacks {', '.join(lacking)}: Trident supports torch 2.11 to"
            " 2.15; install one of them, or run without Trident (TRIDENT_DISABLE=1)"
        )


def guards_c() -> ModuleType:
    """The C++ guard classes (2.11 to 2.15)."""
    return torch._C._dynamo.guards


def overlapping_tensors() -> Any:
    """``compute_overlapping_tensors(tensors, symbolic)``: the indices of tensors that may share
    memory with another one. STORAGE_OVERLAPPING guards compute the same, not symbolically."""
    return guards_c().compute_overlapping_tensors


def guards_py() -> ModuleType:
    """The Python side of guards (2.11 to 2.15)."""
    return torch._dynamo.guards


def convert_frame() -> ModuleType:
    """The module of CatchErrorsWrapper, Dynamo's callback (2.11 to 2.15)."""
    return torch._dynamo.convert_frame


def framelocals(code: CodeType) -> tuple[str, ...]:
    """Names of the slots of a frame's locals as Dynamo's guards number them (2.11 to 2.15)."""
    return tuple(torch._C._dynamo.eval_frame.code_framelocals_names(code))


def cache_entries(code: CodeType) -> list[Any]:
    """All cache entries of `code`, the invalidated ones included (2.11 to 2.15)."""
    return torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)


def compiled_codes() -> list[CodeType]:
    """The live code objects that Dynamo looked at since its last reset (2.11 to 2.15)."""
    seen = getattr(getattr(convert_frame(), "input_codes", None), "seen", ())
    return [code for reference in list(seen) if (code := reference()) is not None]


def source_code(compiled_code: CodeType) -> CodeType | None:
    """The user's code of a code object that Dynamo made (2.11 to 2.15)."""
    return convert_frame().orig_code_map.get(compiled_code)


def skip_frames_of(code: CodeType, *, and_below: bool = True) -> None:
    """Dynamo never looks at frames of `code` nor, unless told otherwise, at what they call (2.11 to
    2.15).

    For our own functions that Dynamo calls back while its frame hook is active.
    """
    types = torch._dynamo.types
    below = types.FrameAction.SKIP if and_below else types.FrameAction.DEFAULT
    skip = types.FrameExecStrategy(types.FrameAction.SKIP, below)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(code, skip)


def is_skip(result: Any) -> bool:
    """Whether Dynamo's verdict on a frame (a ConvertFrameReturn) is to run all frames of its code
    as they are, without asking again (2.11 to 2.15)."""
    strategy = getattr(result, "frame_exec_strategy", None)
    return (
        strategy is not None
        and getattr(result, "guarded_code", None) is None
        and bool(getattr(result, "apply_to_code", False))
        and strategy.cur_action == torch._dynamo.types.FrameAction.SKIP
    )


def in_foreign_mode() -> bool:
    """Whether this thread is inside a dispatch mode that compiled code must notice.

    Inside such a mode Dynamo reads key sets differently (2.13 to 2.15); an older release without
    the flag is asked for its mode stack only.
    """
    module = torch.utils._python_dispatch
    flag = getattr(module, "is_in_any_mode_without_ignore_compile_internals", None)
    if flag is not None and flag():
        return True
    modes = module._get_current_dispatch_mode_stack()
    return any(not _ignores_compile_internals(mode) for mode in modes)


def _ignores_compile_internals(mode: Any) -> bool:
    method = getattr(type(mode), "ignore_compile_internals", None)
    return method is not None and bool(method())


_codes: frozenset[int] | None = None


def _wrapper_codes() -> list[CodeType]:
    call = vars(torch._dynamo.eval_frame._TorchDynamoContext).get("__call__")
    consts = getattr(getattr(call, "__code__", None), "co_consts", ())
    both = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return [
        const
        for const in consts
        if isinstance(const, CodeType)
        and const.co_name in ("compile_wrapper", "_fn")
        and const.co_flags & both == both
        and {"fn", "self"} <= set(const.co_freevars)
    ]


def wrapper_codes() -> frozenset[CodeType]:
    """The code objects of functions that ``torch.compile`` returns (2.11 to 2.15)."""
    return frozenset(_wrapper_codes())


def is_compile_wrapper(fn: Any) -> bool:
    """Whether `fn` is a function that ``torch.compile`` returned (2.11 to 2.15)."""
    global _codes
    if not isinstance(fn, FunctionType):
        return False
    if _codes is None:
        _codes = frozenset(map(id, _wrapper_codes()))
    # By identity: an equal code object elsewhere has other free variables.
    return id(fn.__code__) in _codes


def _free_variable(fn: FunctionType, name: str) -> Any:
    if not is_compile_wrapper(fn):
        raise TridentError(f"{fn!r} is not a function returned by torch.compile")
    index = fn.__code__.co_freevars.index(name)
    return (fn.__closure__ or ())[index].cell_contents


def wrapper_target(fn: FunctionType) -> Any:
    """The user's callable behind a compile wrapper (2.11 to 2.15)."""
    return _free_variable(fn, "fn")


def wrapper_context(fn: FunctionType) -> Any:
    """The _TorchDynamoContext behind a compile wrapper: callback, fullgraph, enter_exit_hooks and,
    from 2.12 on, _isolate_recompiles_id (2.11 to 2.15)."""
    return _free_variable(fn, "self")


def has_plain_hooks(context: Any) -> bool:
    """Whether a call through `context` has no ``enter_exit_hooks`` but the one that each
    ``torch.compile`` has, which counts generations of modules (2.11 to 2.15).

    Options such as ``dynamic=True`` and compiled autograd add hooks that change how a miss
    compiles, or what surrounds the call.
    """
    return all(_counts_generations(hook) for hook in context.enter_exit_hooks)


def _counts_generations(hook: Any) -> bool:
    # call_on_enter around OptimizeContext's own on_enter, which uses no free variable.
    cells: tuple[Any, ...] = getattr(hook, "__closure__", None) or ()
    names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    if names != ("on_enter",):
        return False
    init = torch._dynamo.eval_frame.OptimizeContext.__init__
    code = getattr(cells[0].cell_contents, "__code__", None)
    return (
        isinstance(code, CodeType)
        and any(code is const for const in init.__code__.co_consts)
        and "install_generation_tagging_init" in code.co_names
    )


def isolate_id_of(context: Any) -> int:
    """The recompilation scope of a _TorchDynamoContext; -1 is the shared one, also in releases
    without scopes."""
    return getattr(context, "_isolate_recompiles_id", -1)


def backend_of(callback: Any) -> Any:
    """The innermost backend, as C++ get_backend finds it for cache entries (2.11 to 2.15)."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def backend_matches(saved: Any, backend: Any) -> bool:
    """Whether an entry made with `saved` serves `backend`, as Dynamo's lookup decides: the same
    object, or of the same type and equal (2.11 to 2.15). Exceptions of ``==`` mean no."""
    if saved is backend:
        return True
    if type(saved) is not type(backend):
        return False
    try:
        return bool(saved == backend)
    except Exception:
        return False


def optimized_module() -> type:
    """The class of compiled modules (2.11 to 2.15)."""
    return torch._dynamo.eval_frame.OptimizedModule


def stance_slot() -> tuple[dict[str, Any], str]:
    """Where the current stance is: a module's dict and the key in it (2.11 to 2.15)."""
    return vars(torch._dynamo.eval_frame), "_stance"


def default_stance() -> Any:
    """The stance object in force if it is a default one, else None (2.11 to 2.15)."""
    stance = torch._dynamo.eval_frame._stance
    return stance if is_default_stance(stance) else None


def is_default_stance(stance: Any) -> bool:
    """Whether a stance object asks for nothing special. ``set_stance("default")`` makes new ones
    (2.11 to 2.15)."""
    return stance == torch._dynamo.eval_frame.DynamoStance()


def fx_tracing_slot() -> tuple[dict[str, Any], str]:
    """Where the flag is that ``fx.symbolic_trace`` is running (2.11 to 2.15)."""
    return vars(torch.fx._symbolic_trace), "_is_fx_tracing_flag"


def exporting_slot() -> tuple[dict[str, Any], str]:
    """Where the flag is that ``torch.export`` is running (2.11 to 2.15)."""
    return vars(torch.compiler), "_is_exporting_flag"


def guard_check(spec: Any, f_locals: dict[str, Any]) -> bool:
    """Dynamo's own verdict on a specialization's guards (2.11 to 2.15)."""
    return spec.guard_manager.check(f_locals)


def guard_check_verbose(spec: Any, f_locals: dict[str, Any]) -> str:
    """Why Dynamo's own guards of a specialization fail; empty if they pass (2.11 to 2.15)."""
    info = spec.guard_manager.check_verbose(f_locals)
    return "" if info.result else "; ".join(map(str, info.verbose_code_parts))


def wrapper_code() -> CodeType:
    """The code object of the functions that ``torch.compile`` returns (2.11 to 2.15)."""
    return _wrapper_codes()[0]


def name_backend(name: str, function: str) -> None:
    """Lets ``torch.compile(backend=name)`` find `function` ("module:name") also where the package's
    entry point is not installed, as in a checkout built in place (2.11 to 2.15)."""
    group = "torch_dynamo_backends"
    torch._dynamo.backends.registry._BACKENDS.setdefault(name, EntryPoint(name, function, group))


def globals_of(spec: Any) -> dict[str, Any] | None:
    """The globals of the function that was compiled (2.11 to 2.15)."""
    scope = getattr(spec.guard_manager, "global_scope", None)
    found = scope.get("G") if isinstance(scope, dict) else None
    return found if type(found) is dict else None


def utils() -> ModuleType:
    """The module whose functions Dynamo's code calls (2.11 to 2.15)."""
    return torch._dynamo.utils


def is_helper(function: Any) -> bool:
    """Does Dynamo's code call this function of :func:`utils` for an effect that it replays, and
    does the function nothing else (2.11 to 2.15)?"""
    return function is getattr(utils(), "object_setattr_ignore_descriptor", None)


def property_step(function: Any) -> str | None:
    """The kind of plan step that this function of :func:`utils` is, if it only reads a property of
    a tensor (2.11 to 2.15)."""
    for name in ("size", "stride", "storage_offset"):
        if function is getattr(utils(), f"call_{name}", None):
            return f"get_{name}"
    return None


def knows_global_state() -> bool:
    """Does this torch's GlobalStateGuard compare what runtime/global_state.h compares, no more?"""
    return set(json.loads(guards_c().GlobalStateGuard().__getstate__())) == {
        *(
            "allow_bf16_reduce",
            "allow_fp16_reduce",
            "allow_tf32",
            "autocast_state",
            "default_dtype",
        ),
        *("deterministic_algorithms", "deterministic_algorithms_warn_only", "grad_mode"),
        *("num_threads", "torch_function", "torch_function_all_disabled"),
    }


def python_kernels() -> set[str]:
    """The kernels that were registered from Python, "namespace/operator/key" (2.11 to 2.15); a set
    with a name of aten, as if there were some, if this torch does not say."""
    found = getattr(torch.library, "_impls", None)
    return found if type(found) is set else {"aten/unknown"}


def makes_tensor(function: Any) -> bool:
    """Is it what Dynamo's code calls to turn a float into a tensor for the graph (2.11 to 2.15)?"""
    return function is getattr(torch, "_as_tensor_fullprec", None)


def is_profiling_helper(function: Any) -> bool:
    """Does this function of :func:`utils` only mark the time for a profiler (2.11 to 2.15)?"""
    names = ("record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit")
    return any(function is getattr(utils(), name, None) for name in names)


def has_breakpoint(compiled_code: CodeType) -> bool:
    """Does Dynamo start its bytecode debugger when this code runs (2.12 to 2.15)?"""
    debugger = sys.modules.get("torch._dynamo.bytecode_debugger")
    return debugger is not None and debugger.BREAKPOINT_MARKER in compiled_code.co_consts


def eval_frame_functions() -> tuple[Any, Any, Any]:
    """The C functions that set and get Dynamo's callback of this thread (2.11 to 2.15), and the one
    that sets the override of fullgraph callers (2.11, else None)."""
    module: Any = torch._C._dynamo.eval_frame
    override = getattr(module, "set_eval_frame_override", None)
    return module.set_eval_frame, module.get_eval_frame_callback, override


def code_with_record() -> CodeType:
    """A new code object that Dynamo keeps a record of, to find where it keeps it (2.11 to 2.15)."""
    code = compile("None", "<trident>", "eval")
    skip_frames_of(code)
    return code


RECOMPILE_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def recompile_limits() -> dict[str, int]:
    """How often Dynamo compiles a frame at most, for one object that it belongs to and for all
    (2.11 to 2.15). From 2.13 on (at least) a thread has values of its own once it sets some."""
    return {name: getattr(torch._dynamo.config, name) for name in RECOMPILE_LIMITS}


def set_recompile_limit(name: str, value: int) -> None:
    """Sets one of :func:`recompile_limits`, where the release has such values: for this thread."""
    setattr(torch._dynamo.config, name, value)


def has_config_per_thread() -> bool:
    """Whether what a thread sets in Dynamo's configuration is for that thread, or context, only."""
    entries = getattr(torch._dynamo.config, "_config", {})
    entry = entries.get(RECOMPILE_LIMITS[0])
    return isinstance(getattr(entry, "user_override", None), ContextVar)


def reset() -> None:
    """Drops everything that Dynamo compiled (2.11 to 2.15)."""
    torch._dynamo.reset()
