"""LLVM modules to native code."""

from __future__ import annotations

import ctypes
import gc

import pytest
from torch_mlir import ir

from trident.codegen import jit
from trident.codegen.dialect import session
from trident.errors import TridentError

TEXT = """
llvm.func @next(i64) -> i64
llvm.func @twice(%x: i64) -> i64 {
  %y = llvm.call @next(%x) : (i64) -> i64
  %z = llvm.call @next(%y) : (i64) -> i64
  llvm.return %z : i64
}
llvm.func @zero() -> i64 {
  %z = llvm.mlir.constant(0 : i64) : i64
  llvm.return %z : i64
}
"""
UNARY = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def parsed(text: str) -> ir.Module:
    with session():
        return ir.Module.parse(text)


def test_functions_call_registered_symbols() -> None:
    callback = UNARY(lambda x: x + 1)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address
    code = jit.compile(parsed(TEXT), {"next": address}, callback)
    assert UNARY(code.address("twice"))(40) == 42
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(code.address("zero"))() == 0
    with pytest.raises(TridentError, match="no function thrice; there are twice, zero"):
        code.address("thrice")


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(TridentError, match="no address for the symbols next"):
        jit.compile(parsed(TEXT), {})


def test_a_module_that_does_not_verify_is_shown() -> None:
    module = parsed("llvm.func @f() { llvm.return }")
    with session(), ir.InsertionPoint(module.body):
        ir.Operation.create("scm.check_none")
    with pytest.raises(TridentError, match=r"(?s)cannot compile the module: .*check_none"):
        jit.compile(module, {})


def test_keepalive_ends_with_the_code() -> None:
    class Marker:
        pass

    marker = Marker()
    code = jit.compile(parsed("llvm.func @f() { llvm.return }"), {}, [marker])
    assert len(gc.get_referrers(marker)) > 0
    import weakref

    watch = weakref.ref(marker)
    del marker
    assert watch() is not None
    del code
    gc.collect()
    assert watch() is None


def test_c_api() -> None:
    function = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_ssize_t)(jit.c_api("PyTuple_New"))
    assert function(0) == ()
