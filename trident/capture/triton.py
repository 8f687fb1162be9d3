"""Triton's kernels in graphs: what a launch passes, and what Triton compiled for it.

A launch that has not been seen yet goes through Triton itself, ``kernel[grid](…)`` as stock's code
calls it, which compiles, tunes and launches. What it ran becomes a variant: the driver's function
and how its arguments are packed. Where anything about it is not known here, there is no variant,
and every such launch goes through Triton.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import os
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
from torch.autograd import profiler as autograd_profiler

from trident import _frame
from trident.capture.patching import Patches
from trident.errors import UnsupportedGraph

# The positions of LaunchParameter's types in runtime/launch.h.
_POINTER, _I32, _U32, _I64, _U64, _F32, _F64, _CONSTANT, _SCRATCH = range(9)
_ROWS = {"i32": _I32, "u32": _U32, "i64": _I64, "u64": _U64}
_REALS = {"fp32": _F32, "f32": _F32, "fp64": _F64}
# How struct packs what Triton's launcher converts a constant to.
_FORMATS = {
    "i1": "<b",
    "i8": "<b",
    "i16": "<h",
    "i32": "<i",
    "i64": "<q",
    "u1": "<B",
    "u8": "<B",
    "u16": "<H",
    "u32": "<I",
    "u64": "<Q",
    "fp32": "<f",
    "f32": "<f",
    "fp64": "<d",
}
# Above it, CUDA asks for an attribute that Triton sets.
_MOST_SHARED = 228 * 1024

Fact = tuple[Any, Any, Any]


@dataclasses.dataclass(slots=True, frozen=True)
class Row:
    """An integer of the program, by its number."""

    number: int


Number = int | Row
Grid = tuple[Number, Number, Number]


def is_launch(target: Any) -> bool:
    """Is `target`, of a node of Dynamo's graph, the launch of a user's kernel?"""
    module = sys.modules.get("torch._higher_order_ops.triton_kernel_wrap")
    return module is not None and target is module.triton_kernel_wrapper_mutation


def described_by(given: Any) -> tuple[Any, dict[str, Any]]:
    """The kernel and the constant arguments of a launch, from the keyword arguments of its node."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

    constants = table.get_constant_args(given["constant_args_idx"])
    return table.get_kernel(given["kernel_idx"]), dict(constants)


def stock_of(given: Any, fixed: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of stock's launch, without a grid and with those arguments of the
    kernel that are `fixed`."""
    names = ("kernel_idx", "constant_args_idx", "tma_descriptor_metadata")
    return {**{name: given[name] for name in names}, "kwargs": fixed}


class Launch(Protocol):
    """What launches a kernel from Python: see ``NativeProgram.add_launch``."""

    @property
    def autotuner(self) -> Any: ...
    @property
    def keyed_by_value(self) -> tuple[bool, ...]: ...
    @property
    def only(self) -> tuple[Any, ...] | None: ...
    def facts(self) -> Iterator[Fact]: ...
    def __call__(self, values: list[Any], rows: list[int]) -> tuple[Any, ...] | None: ...


def use_driver() -> None:
    """Makes launches native for the driver that Triton uses; raises UnsupportedGraph if Trident
    knows none for it."""
    from triton.runtime import driver

    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher in _functions:
        _frame.launch_through(_functions[launcher])
        return
    if getattr(launcher, "__module__", None) != "triton.backends.nvidia.driver":
        raise UnsupportedGraph("Triton uses a driver that Trident has no launcher for")
    try:
        _frame.launch_on_cuda()
    except RuntimeError as error:
        raise UnsupportedGraph(str(error)) from None


# The C functions that stand for a driver, by the launcher class of Triton's driver for it.
_functions: dict[Any, int] = {}


def add_launcher(launcher: type, address: int) -> None:
    """The C function at `address`, with the signature of cuLaunchKernelEx, launches what Triton
    launches by `launcher`: on the CPU, without streams. (The tests have such a driver.)"""
    _functions[launcher] = address


def knob_facts() -> Iterator[Fact]:
    """What of Triton's settings a launch depends on, now: see ``NativeProgram.add_fact``."""
    from triton import knobs
    from triton.runtime import driver

    for name, value in vars(driver).items():
        yield vars(driver), name, value
    for owner, name in (
        *((knobs.runtime, name) for name in _RUNTIME_KNOBS),
        *((knobs.compilation, name) for name in _COMPILATION_KNOBS),
    ):
        yield vars(owner), name, vars(owner).get(name, NotImplemented)
        kind = vars(type(owner)).get(name)
        if isinstance(kind, knobs.env_base):
            values = vars(os.environ)["_data"]
            key = kind.key.encode()
            yield values, key, values.get(key, NotImplemented)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(knobs.runtime, name)
        if hook is None:
            continue
        if type(hook) is not knobs.HookChain:
            raise UnsupportedGraph("Triton has launch hooks of a kind that is not known")
        yield hook.calls, None, None
        yield vars(hook), "calls", hook.calls


_RUNTIME_KNOBS = (
    *("debug", "launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook"),
    *("interpret", "override_arch"),
)
_COMPILATION_KNOBS = ("instrumentation_mode", "fpsan_homomorphic_casts")


@dataclasses.dataclass(slots=True, eq=False)
class UserLaunch:
    """A launch of `kernel` of the user's, a ``JITFunction`` or an ``Autotuner`` of one: of the
    arguments `names`, which vary, and of `constants`; on one of `grids`, one per configuration of
    an autotuner. `kinds`: for each of `names` "tensor", "integer" or "real". `stock`: what
    :func:`stock_of` returns."""

    kernel: Any
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    constants: dict[str, Any]
    grids: tuple[Grid, ...]
    stock: dict[str, Any]
    _kept: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def only(self) -> None:
        """There are many variants."""

    @property
    def autotuner(self) -> Any:
        return None if _is_plain(self.kernel) else self.kernel

    def _named_kinds(self) -> Iterator[tuple[str, str]]:
        return zip(self.names, self.kinds, strict=True)

    @property
    def keyed_by_value(self) -> tuple[bool, ...]:
        keys = () if self.autotuner is None else self.kernel.keys
        return tuple(name in keys for name in self.names)

    def facts(self) -> Iterator[Fact]:
        """What a native launch depends on; raises UnsupportedGraph for a kernel that Trident does
        not know how to launch."""
        from triton.runtime.autotuner import Autotuner

        yield from knob_facts()
        jit = self.kernel
        if not _is_plain(jit):
            if type(jit) is not Autotuner or not _is_plain(jit.fn):
                raise UnsupportedGraph(f"its kernel is a {type(jit).__name__}")
            yield from self._facts_of_autotuner()
            jit = jit.fn
        yield from _methods(type(jit), "run", "__getitem__")
        yield vars(jit), "run", NotImplemented
        for name in ("pre_run_hooks", "debug", "device_caches"):
            yield vars(jit), name, vars(jit)[name]
        yield jit.pre_run_hooks, None, None
        for device, cache in jit.device_caches.items():
            yield jit.device_caches, device, cache
            yield cache[0], None, None
        for (name, _), (value, names) in jit.used_global_vals.items():
            if name not in names or names[name] != value:
                raise UnsupportedGraph(
                    f"the global {name} has changed since its kernel was compiled"
                )
            yield from _value_facts(names, name)

    def _facts_of_autotuner(self) -> Iterator[Fact]:
        tuner = self.kernel
        if any(name in tuner.keys for name, kind in self._named_kinds() if kind == "tensor"):
            raise UnsupportedGraph("its kernel is tuned for every tensor")
        if type(tuner.keys) is not list or type(tuner.configs) is not list:
            raise UnsupportedGraph("its autotuner's keys or configurations are no lists")
        yield from _methods(type(tuner), "run", "__getitem__")
        yield vars(tuner), "run", NotImplemented
        for name in ("fn", "cache", "configs", "keys"):
            yield vars(tuner), name, vars(tuner)[name]
        yield tuner.cache, None, None
        for items in (tuner.configs, tuner.keys):
            for number, item in enumerate(items):
                yield items, number, item
            yield items, len(items), NotImplemented
        for config in tuner.configs:
            for name, value in vars(config).items():
                yield vars(config), name, value
            for name, value in config.kwargs.items():
                yield config.kwargs, name, value
            yield config.kwargs, None, len(config.kwargs)

    def __call__(self, values: list[Any], rows: list[int]) -> tuple[Any, ...] | None:
        """Launches as stock does; returns a variant for launches like this one (see launch.h)."""
        grids = [tuple(rows[n.number] if isinstance(n, Row) else n for n in g) for g in self.grids]
        varying = dict(zip(self.names, values, strict=True))
        if self.stock["tma_descriptor_metadata"]:  # stock's function makes descriptors of tensors
            from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

            kwargs = {**self.stock["kwargs"], **varying}
            triton_kernel_wrapper_mutation(**{**self.stock, "grid": grids, "kwargs": kwargs})
            return None
        given = {**varying, **self.constants}
        grid = grids[0] if len(grids) == 1 else _grid_function(self.kernel, grids)
        # As stock orders them.
        arguments, rest = [], dict(given)
        for name in self.kernel.arg_names:
            if name not in rest:
                break
            arguments.append(rest.pop(name))
        compiled = self.kernel[grid](*arguments, **rest)
        if self.autotuner is None:
            return self._variant(compiled, None, [])
        tuner = self.kernel
        if len(tuner.configs) == 1:
            return self._variant(compiled, tuner.configs[0], [])
        # As `Autotuner.run` makes it. (`best_config` may be another thread's choice by now.)
        key = [given[name] for name in tuner.keys if name in given]
        ordered = [*arguments, *rest.values()]
        key += [str(value.dtype) for value in ordered if hasattr(value, "dtype")]
        config = tuner.cache.get(tuple(key))
        facts = [(tuner.cache, tuple(key), config)]
        return None if config is None else self._variant(compiled, config, facts)

    def _variant(self, compiled: Any, config: Any, facts: list[Fact]) -> tuple[Any, ...] | None:
        number, jit = 0, self.kernel
        if config is not None:
            jit = jit.fn
            if config.pre_hook is not None:
                return None
            if len(self.grids) > 1:
                numbers = [(i,) for i in range(len(self.grids))]
                (number,) = _grid_function(self.kernel, numbers)(config.all_kwargs())
        varying = {name: (i, kind) for i, (name, kind) in enumerate(self._named_kinds())}
        defaults = {p.name: p.default for p in jit.params if p.has_default}
        chosen = {} if config is None else config.kwargs
        signature = getattr(getattr(compiled, "src", None), "signature", None)
        if not isinstance(signature, dict):
            return None
        constants = {**defaults, **chosen, **self.constants}
        parameters = _parameters(signature.items(), varying, constants)
        found = variant(compiled, parameters, self.grids[number], config)
        if found is None:
            return None
        self._kept.update({id(compiled): compiled, id(config): config})
        return (*found, facts)


def _methods(kind: type, *names: str) -> Iterator[Fact]:
    """That nobody replaces these methods of a class (or of one that it has them from)."""
    for name in names:
        for owner in kind.__mro__:
            # The dict behind the proxy.
            attributes = next(d for d in gc.get_referents(vars(owner)) if isinstance(d, dict))
            yield attributes, name, attributes.get(name, NotImplemented)
            if name in attributes:
                break


def _value_facts(names: dict[str, Any], name: str) -> Iterator[Fact]:
    """That a global is what it is: one of those that Triton takes."""
    from triton.language import constexpr

    value = names[name]
    yield names, name, value
    if type(value) is constexpr:
        yield from _value_facts(vars(value), "value")
    elif type(value) not in (int, float, str, bool, type(None)):
        raise UnsupportedGraph(f"its kernel uses the global {name}, a {type(value).__name__}")


def _is_plain(kernel: Any) -> bool:
    from triton.runtime.jit import JITFunction

    return type(kernel) is JITFunction


def _grid_function(kernel: Any, grids: list[Any]) -> Callable[[dict[str, Any]], Any]:
    """As stock's launch makes it: the grid of a configuration."""
    from torch._inductor.codegen.wrapper import user_defined_kernel_grid_fn_code

    name, code = user_defined_kernel_grid_fn_code(kernel.fn.__name__, kernel.configs, grids)
    names: dict[str, Any] = {}
    exec(code, names)
    function: Callable[[dict[str, Any]], Any] = names[name]
    return function


def _varying(kind: str, signature: Any) -> int | None:
    """The type of the parameter that an argument of this kind is passed as."""
    if not isinstance(signature, str):
        return None
    if kind == "tensor":
        return _POINTER if signature.startswith("*") else None
    return (_ROWS if kind == "integer" else _REALS).get(signature)


def _parameters(
    passed: Iterable[tuple[str, Any]],
    varying: dict[str, tuple[int, str]],
    constants: dict[str, Any],
) -> list[tuple[int, int, int]] | None:
    """The parameters for what is `passed`: names, and their types in Triton's signature. `varying`:
    by name the number of the argument and its kind. None if it is not known how."""
    found: list[tuple[int, int, int]] = []
    for name, type_ in passed:
        if type_ == "constexpr":
            continue
        made: list[tuple[int, int, int]] | None = None
        if name in varying:
            number, kind = varying[name]
            how = _varying(kind, type_)
            made = None if how is None else [(how, number, 0)]
        elif name in constants:
            made = constant(constants[name], type_)
        if made is None:
            return None
        found += made
    return found


def _sizes(grid: Grid) -> list[tuple[bool, int]]:
    """As a variant has them."""
    return [(True, n.number) if isinstance(n, Row) else (False, n) for n in grid]


def constant(value: Any, kind: Any) -> list[tuple[int, int, int]] | None:
    """The parameters for a constant `value` of the type `kind` of Triton's signature, tuples one by
    one; None if it is not known how."""
    if isinstance(kind, tuple):
        if not isinstance(value, tuple) or len(value) != len(kind):
            return None
        made = [constant(v, k) for v, k in zip(value, kind, strict=True) if k != "constexpr"]
        return None if None in made else [item for items in made if items for item in items]
    if kind not in _FORMATS or type(value) not in (int, float, bool):
        return None
    if (kind in _REALS and type(value) is not float) or (
        kind not in _REALS and type(value) is float
    ):
        return None
    try:
        packed = struct.pack(_FORMATS[kind], value)
    except (struct.error, OverflowError):
        return None
    return [(_CONSTANT, -1, int.from_bytes(packed, "little"))]


def _triton_allocates(size: int, align: int, stream: int) -> Any:
    """Scratch memory of `size` bytes, as Triton's launcher gets it: from the user's allocator."""
    from triton.runtime import _allocation

    return _allocation._allocator.get()(size, align, stream)


def variant(
    compiled: Any,
    parameters: list[tuple[int, int, int]] | None,
    grid: Grid,
    config: Any,
    allocate: Callable[..., Any] = _triton_allocates,
) -> tuple[Any, ...] | None:
    """What launches ``CompiledKernel`` `compiled`: see ``launch_add_variant`` in runtime/launch.h.
    None for one that Trident leaves to Triton: with unknown parameters, tensor descriptors or
    instrumentation."""
    metadata = getattr(compiled, "metadata", None)
    launcher = type(getattr(compiled, "_run", None))
    known = launcher in _functions or launcher.__module__ == "triton.backends.nvidia.driver"
    if parameters is None or metadata is None or not known or compiled.function is None:
        return None
    if getattr(metadata, "profile_scratch_size", 0):
        return None
    if getattr(metadata, "tensordesc_meta", None) or metadata.shared > _MOST_SHARED:
        return None
    if getattr(metadata, "instrumentation_mode", ""):
        return None
    if getattr(metadata, "warp_size", 32) != 32:
        return None
    size, scratch = getattr(metadata, "global_scratch_size", None), None
    if size is not None:
        parameters = [*parameters, (_SCRATCH if size else _CONSTANT, -1, 0)]
    if size:  # for each block
        scratch = size * metadata.num_ctas, metadata.global_scratch_align, allocate
    if hasattr(metadata, "profile_scratch_size"):
        parameters = [*parameters, (_CONSTANT, -1, 0)]
    return (
        compiled.function,
        32 * metadata.num_warps,
        metadata.shared,
        metadata.num_ctas,
        bool(getattr(metadata, "launch_cooperative_grid", False)),
        bool(getattr(metadata, "launch_pdl", False)),
        _sizes(grid),
        parameters,
        config,
        scratch,
    )


# Inductor's kernels


@dataclasses.dataclass(slots=True, frozen=True)
class Launcher:
    """A launcher that Inductor wrote: its parameters `names`, assignments, the three sizes of the
    grid, what it passes to the kernel (names, and texts of constants), and whose kernel it is."""

    names: tuple[str, ...]
    prefix: tuple[tuple[str, str], ...]
    grid: tuple[str, str, str]
    passed: tuple[str, ...]
    scope: dict[str, Any]


_launchers: weakref.WeakKeyDictionary[Any, Launcher] = weakref.WeakKeyDictionary()


def record_launchers(patches: Patches) -> None:
    """Notes the launchers that Inductor makes of Triton's kernels, from now on."""
    from torch._inductor.runtime import triton_heuristics as heuristics

    kind = getattr(heuristics, "CompileResult", None)
    original = None if kind is None else vars(kind).get("_gen_launcher_code")
    if not isinstance(original, FunctionType):
        return

    @functools.wraps(original)
    def record(self: Any, scope: Any, names: Any, passed: Any) -> Any:
        made = original(self, scope, names, passed)
        grid = heuristics.GridExpr.from_meta(self.inductor_meta, self.config)
        prefix = [tuple(map(str.strip, line.split("=", 1))) for line in grid.prefix]
        sizes = str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)
        if isinstance(made, FunctionType) and all(len(pair) == 2 for pair in prefix):
            pairs: Any = tuple(prefix)
            _launchers[made] = Launcher(tuple(names), pairs, sizes, tuple(passed), scope)
        return made

    patches.put(kind, "_gen_launcher_code", record)


@dataclasses.dataclass(slots=True, frozen=True)
class Varying:
    """An argument of a launch, by its number."""

    number: int


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class InductorKernel:
    """A kernel that Inductor's code runs: a ``CachingAutotuner`` that has chosen."""

    name: str
    kernel: Any
    launcher: Launcher


def inductor_kernel(name: str, kernel: Any) -> InductorKernel | None:
    """The kernel that the global `name` of Inductor's code is, or None for something else; raises
    UnsupportedGraph for one that Trident does not know how to launch."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    if not isinstance(kernel, CachingAutotuner):
        return None
    if type(kernel) is not CachingAutotuner or "run" in vars(kernel):
        raise UnsupportedGraph(f"{name} is a {type(kernel).__name__}")
    options = ("triton_interpret", "dump_launch_params", "dump_launch_tensors")
    if any(getattr(kernel, option, False) for option in options):
        raise UnsupportedGraph(f"{name} is interpreted, or shows its launches")
    if len(kernel.launchers) != 1:
        raise UnsupportedGraph(f"{name} has not been launched yet")
    (launcher,) = kernel.launchers
    made = _launchers.get(launcher)
    tunes = kernel.inductor_meta.get("coordinate_descent_tuning", False)
    if tunes and not getattr(launcher.config, "found_by_coordesc", False):
        raise UnsupportedGraph(f"{name} has not been tuned yet")
    if made is None or launcher.store_cubin:
        raise UnsupportedGraph(f"{name} has a launcher that is not known")
    if _fast(kernel) is None:
        raise UnsupportedGraph(f"{name} is not at its last launcher yet")
    return InductorKernel(name, kernel, made)


def _fast(kernel: Any) -> Any:
    """What torch 2.13 calls instead, once it has launched; NotImplemented where there is none."""
    return vars(kernel).get("_cached_launcher", NotImplemented)


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class InductorLaunch:
    """A launch of `kernel` with these arguments, of which those that vary have `kinds`, on `grid`,
    on the current stream of a CUDA `device`."""

    kernel: InductorKernel
    arguments: tuple[Any, ...]
    kinds: tuple[str, ...]
    grid: Grid
    device: int

    @property
    def autotuner(self) -> None:
        """It has chosen."""

    @property
    def keyed_by_value(self) -> tuple[bool, ...]:
        return (False,) * len(self.kinds)

    @property
    def only(self) -> tuple[Any, ...]:
        """Its variant; raises UnsupportedGraph if there is none."""
        found = self._compiled() if "bin" in self.kernel.launcher.scope else self._static()
        if found is None:
            raise UnsupportedGraph(f"{self.kernel.name} is launched in a way that is not known")
        return found

    def facts(self) -> Iterator[Fact]:
        kernel = self.kernel.kernel
        yield vars(autograd_profiler), "_is_profiler_enabled", False
        yield vars(kernel), "launchers", kernel.launchers
        yield vars(kernel), "_cached_launcher", _fast(kernel)
        yield vars(kernel), "run", NotImplemented
        yield from _methods(type(kernel), "run")
        if "bin" in self.kernel.launcher.scope:
            yield from knob_facts()

    def __call__(self, values: list[Any], rows: list[int]) -> None:
        given = [values[a.number] if isinstance(a, Varying) else a for a in self.arguments]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self.kernel.kernel.run(*given, stream=stream)

    def _parameters(self, passed: Sequence[str], types: Sequence[Any]) -> list[Any] | None:
        if len(passed) != len(types):
            return None
        given = dict(zip(self.kernel.launcher.names, self.arguments, strict=True))
        varying = {
            name: (value.number, self.kinds[value.number])
            for name, value in given.items()
            if isinstance(value, Varying)
        }
        return _parameters(zip(passed, types, strict=True), varying, given)

    def _static(self) -> tuple[Any, ...] | None:
        """torch.inductor's own launcher: ``StaticallyLaunchedCudaKernel``."""
        made = self.kernel.launcher
        kernel: Any = getattr(made.scope.get("runner"), "__self__", None)
        known = type(kernel).__name__ == "StaticallyLaunchedCudaKernel"
        if not known or made.passed[:4] != ("grid_0", "grid_1", "grid_2", "stream"):
            return None
        types = [_STATIC_TYPES.get(letter) for letter in kernel.arg_tys]
        parameters = self._parameters(made.passed[4:], types)
        if parameters is None or kernel.function is None:
            return None
        scratch = [kernel.has_global_scratch, kernel.has_profile_scratch]
        parameters += [(_CONSTANT, -1, 0)] * sum(scratch)
        threads = 32 * kernel.num_warps
        shape = (kernel.function, threads, kernel.shared, 1, False, False)
        return (*shape, _sizes(self.grid), parameters, None, None, [])

    def _compiled(self) -> tuple[Any, ...] | None:
        """Triton's own."""
        made = self.kernel.launcher
        compiled = made.scope["bin"]
        signature = getattr(getattr(compiled, "src", None), "signature", None)
        names = getattr(compiled.src.fn, "arg_names", None)
        start = ("grid_0", "grid_1", "grid_2", "stream", "function", "metadata")
        hooks = ("launch_enter_hook", "launch_exit_hook")
        if not isinstance(signature, dict) or list(signature) != names:
            return None
        if made.passed[:6] != start or made.passed[7:9] != hooks:
            return None
        from triton import knobs

        for name in hooks:  # the facts are about those of now
            if made.scope[name] not in (None, getattr(knobs.runtime, name)):
                return None
        # The seventh is for the hooks, of which there are none: see `knob_facts`.
        parameters = self._parameters(made.passed[9:], list(signature.values()))
        allocate = _allocate if _sets_allocator(self.kernel) else _triton_allocates
        found = variant(compiled, parameters, self.grid, None, allocate)
        return None if found is None else (*found, [])


# Triton's types for those of torch/csrc/inductor/static_launcher.
_STATIC_TYPES = {
    "O": "*",
    "b": "i8",
    "h": "i16",
    "i": "i32",
    "l": "i64",
    "B": "u8",
    "H": "u16",
    "I": "u32",
    "K": "u64",
    "f": "fp32",
    "d": "fp64",
}


def cuda_allocator() -> int:
    """The address of ``at::cuda::getCUDADeviceAllocator``; raises UnsupportedGraph if this torch
    has no such function."""
    try:
        function = ctypes.CDLL("libtorch_cuda.so")._ZN2at4cuda22getCUDADeviceAllocatorEv
    except (OSError, AttributeError):
        raise UnsupportedGraph("this torch has no getCUDADeviceAllocator that is known") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def allocator_set_by_stock(launches: Iterable[Launch]) -> tuple[Any, Any]:
    """Triton's context variable for its allocator with what stock's launches put into it, or
    (None, None) if they do not."""
    ours = [launch for launch in launches if isinstance(launch, InductorLaunch)]
    if not ours or not _sets_allocator(ours[0].kernel):
        return None, None
    from triton.runtime import _allocation

    return _allocation._allocator, _allocate


def _sets_allocator(kernel: InductorKernel) -> bool:
    return _fast(kernel.kernel) is NotImplemented


def _allocate(size: int, align: int, stream: int | None) -> torch.Tensor:
    """As ``CachingAutotuner.run`` has it."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
