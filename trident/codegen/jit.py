"""LLVM dialect to native code in this process.

Two facts of MLIR's execution engine shape this file. ``raw_lookup(f)`` returns a wrapper that
takes packed arguments, not `f`; so every function gets a companion that returns its address, and
that is called once. Loading libtorch as a shared library for symbol resolution costs 340 ms per
engine; so symbols are registered by address, and an engine costs 6-9 ms.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import llvm
from torch_mlir.execution_engine import ExecutionEngine

from trident.codegen.dialect import session
from trident.errors import TridentError

_ADDRESS_OF = "__address_of_"
_PackedFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class JitCode:
    """Native code and what it refers to. The code is unmapped when the last reference goes."""

    __slots__ = ("_addresses", "_engine", "_keepalive")

    def __init__(self, engine: ExecutionEngine, addresses: dict[str, int], keepalive: Any) -> None:
        self._engine = engine
        self._addresses = addresses
        self._keepalive = keepalive

    def address(self, name: str) -> int:
        """Address of the function `name`; raises TridentError if the module defines none."""
        if name not in self._addresses:
            raise TridentError(f"no function {name}; there are {', '.join(self._addresses)}")
        return self._addresses[name]


@functools.cache
def c_api(name: str) -> int:
    """Address of the function `name` of CPython's C API."""
    function = getattr(ctypes.pythonapi, name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def compile(llvm_module: ir.Module, symbols: dict[str, int], keepalive: Any = None) -> JitCode:
    """Compile `llvm_module`, to which the companions of its functions, but for internal ones, are
    added.

    `symbols` gives the addresses of the functions and globals that the module declares without
    defining; `keepalive` lives as long as the code. Raises TridentError for a declaration without
    address, and for a module that does not verify or compile.
    """
    with session():
        names = _add_companions(llvm_module)
        missing = sorted(_declared(llvm_module) - symbols.keys())
        if missing:
            raise TridentError(f"no address for the symbols {', '.join(missing)}")
        try:
            llvm_module.operation.verify()
            # Position-independent code reaches symbols at any distance from it.
            engine = ExecutionEngine(
                llvm_module, opt_level=2, enable_object_dump=False, enable_pic=True
            )
        except (ir.MLIRError, RuntimeError) as error:
            raise TridentError(f"cannot compile the module: {error}\nin\n{llvm_module}") from None
        for name, address in symbols.items():
            engine.raw_register_runtime(name, ctypes.c_void_p(address))
        engine.initialize()
        addresses = {name: _call_companion(engine, name) for name in names}
    return JitCode(engine, addresses, keepalive)


def _functions(module: ir.Module, *, defined: bool) -> list[str]:
    return [
        op.attributes["sym_name"].value
        for op in module.body
        if op.operation.name == "llvm.func"
        and bool(len(op.regions[0].blocks)) is defined
        and "internal" not in str(op.attributes["linkage"])
    ]


def _declared(module: ir.Module) -> set[str]:
    variables = {
        op.attributes["sym_name"].value
        for op in module.body
        if op.operation.name == "llvm.mlir.global" and "value" not in op.attributes
    }
    return variables | set(_functions(module, defined=False))


def _add_companions(module: ir.Module) -> list[str]:
    names = _functions(module, defined=True)
    pointer = ir.Type.parse("!llvm.ptr")
    signature = ir.TypeAttr.get(ir.Type.parse("!llvm.func<ptr ()>"))
    external = ir.Attribute.parse("#llvm.linkage<external>")
    for name in names:
        with ir.InsertionPoint(module.body):
            function = llvm.LLVMFuncOp(_ADDRESS_OF + name, signature, linkage=external)
        with ir.InsertionPoint(function.regions[0].blocks.append()):
            llvm.ReturnOp(arg=llvm.AddressOfOp(pointer, name).result)
    return names


def _call_companion(engine: ExecutionEngine, name: str) -> int:
    address = ctypes.c_void_p()
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    _PackedFunction(engine.raw_lookup(_ADDRESS_OF + name))(ctypes.addressof(packed))
    return address.value or 0
