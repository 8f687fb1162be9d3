"""A driver for Triton without a GPU: kernels are compiled for an H100 and run by the interpreter.

Triton's own launches and those of Trident's programs end in the same place, :func:`_run`, with the
grid and the arguments as the driver would get them: packed, without what was specialized away.
"""

import ctypes
import struct
import sys
import threading

import numpy as np
import pytest
import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.runtime import _allocation, driver
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.runtime.jit import JITFunction

from trident.capture import triton as capture

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
_FORMATS = {
    "i1": "<?",
    "u1": "<?",
    "i8": "<b",
    "i16": "<h",
    "i32": "<i",
    "i64": "<q",
    "u8": "<B",
    "u16": "<H",
    "u32": "<I",
    "u64": "<Q",
    "fp16": "<e",
    "fp32": "<f",
    "fp64": "<d",
}
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
# What ran: (name of the kernel, grid, its arguments, "native" or "python"), since it was cleared.
launches = []
# The addresses of scratch memory that kernels got.
scratch = []
# What the driver is to answer next: CUresult.
errors = []
_functions = []
_lock = threading.RLock()  # the interpreter patches triton.language


def _pack(kind, value):
    """As Triton's C launcher converts it: narrow integers lose bits, floats may become infinite."""
    form = _FORMATS[kind]
    if kind in ("fp32", "f32", "fp64"):
        return struct.pack("<d", value) if kind == "fp64" else bytes(ctypes.c_float(value))
    if kind == "fp16":
        return np.float16(value).tobytes()
    if kind in ("u8", "u16", "u32", "u64") and value < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if not -(2**63) <= value < 2 ** (64 if kind == "u64" else 63):
        raise OverflowError("Python int too large to convert to C long")
    return int(value).to_bytes(16, "little", signed=True)[: struct.calcsize(form)]


class _Pointer:
    def __init__(self, address, dtype):
        self.address, self.dtype = address, dtype

    def data_ptr(self):
        return self.address


class _OnPointers(GridExecutor):
    def _init_args_hst(self, arguments, keywords):
        return arguments, keywords

    def _restore_args_dev(self, *arguments):
        pass


def _flat(kinds):
    """(path, type) of the parameters of a signature; tuples are their items."""
    for path, kind in kinds:
        if isinstance(kind, tuple):
            yield from _flat([((*path, i), k) for i, k in enumerate(kind)])
        else:
            yield path, kind


def _interpreted(function, *arguments, **keywords):
    """The call of a function in a kernel."""
    return InterpretedFunction(function.fn)(*arguments, **keywords)


class _Function:
    """What the driver's handle of a kernel stands for."""

    def __init__(self, source, metadata):
        names = source.fn.arg_names
        self.name, self.names, self.shared = source.fn.__name__, names, metadata.shared
        self.scratch = (
            metadata.global_scratch_size * metadata.num_ctas,
            metadata.global_scratch_align,
        )
        self.function = InterpretedFunction(source.fn.fn)
        kinds = [((i,), source.signature[name]) for i, name in enumerate(names)]
        self.parameters = list(_flat(kinds))
        self.constants = dict(source.constants)

    def run(self, grid, packed, how):
        """`packed`: the bytes of each parameter that is no constant."""
        values, words = {}, iter(packed)
        for path, kind in self.parameters:
            if kind == "constexpr":
                values[path] = self.constants[path]
            elif kind.startswith("*"):
                address = struct.unpack("<Q", next(words)[:8])[0]
                values[path] = _Pointer(address, _DTYPES[kind[1:].removeprefix("k")])
            else:
                form = _FORMATS[kind]
                (values[path],) = struct.unpack(form, next(words)[: struct.calcsize(form)])
                if type(values[path]) is bool and _TRITON < (3, 7):  # its interpreter takes none
                    values[path] = int(values[path])
        arguments = [self._argument(values, (i,)) for i in range(len(self.names))]
        launches.append((self.name, grid, dict(zip(self.names, arguments, strict=True)), how))
        with _lock, pytest.MonkeyPatch.context() as patched:
            patched.setattr(JITFunction, "__call__", _interpreted)
            fn = self.function.rewrite()
            _OnPointers(fn, self.names, grid)(*arguments)

    def _argument(self, values, path):
        if path in values:
            return values[path]
        n = max(p[len(path)] for p in values if p[: len(path)] == path) + 1
        return tuple(self._argument(values, (*path, i)) for i in range(n))


class _Launcher:
    def __init__(self, source, metadata):
        _functions.append(_Function(source, metadata))
        self.function = _functions[-1]
        self.number = len(_functions)

    @torch._dynamo.disable  # as what it stands for, it is no Python code
    def __call__(self, x, y, z, stream, function, packed, launch, enter, leave, *arguments):
        if enter is not None:
            enter(launch)
        size, align = self.function.scratch
        if size > 0:
            memory = _allocation._allocator.get()(x * y * z * size, align, stream)
            if not isinstance(memory, (int, type(None))) and not hasattr(memory, "data_ptr"):
                raise TypeError("Pointer argument must be either uint64 or have data_ptr method")
            scratch.append(memory.data_ptr() if hasattr(memory, "data_ptr") else memory or 0)
        flat = dict(_flatten([((i,), a) for i, a in enumerate(arguments)]))
        words = []
        for path, kind in self.function.parameters:
            if kind == "constexpr":
                continue
            value = flat[path]
            if kind.startswith("*"):
                address = value.data_ptr() if hasattr(value, "data_ptr") else value or 0
                words.append(struct.pack("<Q", address))
            else:
                words.append(_pack(kind, value))
        if x * y * z > 0:
            self.function.run((x, y, z), words, "python")
        if leave is not None:
            leave(launch)


def _flatten(items):
    for path, value in items:
        yield path, value
        if isinstance(value, tuple):
            yield from _flatten([((*path, i), v) for i, v in enumerate(value)])


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    ]


_SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(_Config),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
configs = []


@_SIGNATURE
def _launch(config, number, parameters, extra):
    if errors:
        return errors.pop()
    function = _functions[number - 1]
    n = sum(kind != "constexpr" for _, kind in function.parameters)
    packed = [ctypes.string_at(parameters[i], 8) for i in range(n)]
    if function.scratch[0] > 0:
        scratch.append(ctypes.c_uint64.from_address(parameters[n]).value)
    c = config.contents
    ids = [ctypes.c_int.from_address(c.attributes + 72 * i).value for i in range(c.n_attributes)]
    configs.append((tuple(c.block), c.shared, ids))
    grid = list(c.grid)
    if 4 in ids:  # the dimensions of clusters: the driver counts blocks, Triton's grid clusters
        grid[0] //= ctypes.c_uint.from_address(c.attributes + 72 * ids.index(4) + 8).value
    try:
        function.run(tuple(grid), packed, "native")
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 700
    return 0


class _Module:
    """What a kernel keeps loaded. It may outlive the fixture; no other driver is to unload it."""


if hasattr(CompiledKernel, "__del__"):  # since Triton 3.7

    def _unload(kernel, unload=CompiledKernel.__del__):
        if type(kernel.module) is not _Module:
            unload(kernel)

    CompiledKernel.__del__ = _unload


class _Utils:
    def load_binary(self, name, kernel, shared, device):
        return _Module(), len(_functions), 0, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class CpuDriver(DriverBase):
    launcher_cls = _Launcher

    def __init__(self):
        self.utils = _Utils()

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=0):
        return 0

    def get_device_interface(self):
        return torch.cpu

    def get_benchmarker(self):
        def bench(call, quantiles=None, **_):
            before = len(launches)
            call()
            # The more programs, the slower: always the same choice.
            n = float(np.prod(launches[-1][1])) if len(launches) > before else 0.0
            return [n] * len(quantiles or (0,))

        return bench

    def map_python_to_cpp_type(self, kind):
        return kind


capture.add_launcher(_Launcher, ctypes.cast(_launch, ctypes.c_void_p).value)


@pytest.fixture
def triton_cpu(monkeypatch):
    """Triton's kernels run on CPU tensors; gives this module."""
    # Not by reset_active(): without a GPU there is no driver to go back to, and that raises.
    monkeypatch.setattr(driver, "_active", CpuDriver())
    # Dynamo imports it where it is used.
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: True)
    launches.clear()
    configs.clear()
    errors.clear()
    scratch.clear()
    yield sys.modules[__name__]
    # Dynamo's table of kernels, too: what it has compiled does not run on another driver.
    torch._dynamo.reset()
    launches.clear()
    configs.clear()
    errors.clear()
    scratch.clear()


__all__ = ["CpuDriver", "configs", "errors", "launches", "scratch", "triton", "triton_cpu"]
