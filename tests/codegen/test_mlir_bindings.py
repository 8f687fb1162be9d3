"""The few things that Trident relies on in MLIR's Python bindings, one test each."""

from __future__ import annotations

import ctypes

import pytest
from torch_mlir import ir
from torch_mlir.dialects import llvm
from torch_mlir.execution_engine import ExecutionEngine

from trident.codegen import dialect


def test_context_without_threads_loads_the_dialect_once() -> None:
    with dialect.session():
        assert ir.Context.current.is_dialect_loaded("scm")
        assert ir.Context.current is dialect._context()
    with dialect.session(), dialect.session():
        pass  # nests in one thread


def test_operations_are_views_and_values_hash_by_identity() -> None:
    with dialect.session():
        emitter = dialect.Emitter("f", ("x",))
        value = emitter.value(emitter.guards, "local", [], index=0, label=0)
        emitter.effect(emitter.guards, "check_none", [value], label=0)
        emitter.effect(emitter.guards, "pass", [])
        fetch, check, _ = emitter.program.block("guards")
        assert fetch.operation.name == "scm.local"
        assert fetch.operation.attributes["index"].value == 0
        registers = {fetch.operation.results[0]: 7}
        assert registers[check.operation.operands[0]] == 7


def test_attributes_hold_64_signed_bits() -> None:
    with dialect.session():
        i64 = ir.IntegerType.get_signless(64)
        for number in (-(1 << 63), (1 << 63) - 1):
            assert ir.IntegerAttr.get(i64, number).value == number


def test_one_variadic_group_needs_no_segment_sizes() -> None:
    with dialect.session():
        emitter = dialect.Emitter("f", ())
        emitter.effect(emitter.guards, "pass", [])
        items = [emitter.value(emitter.plan, "constant", [], object=0) for _ in range(3)]
        for count in range(4):
            result = emitter.value(emitter.plan, "tuple", items[:count])
        emitter.effect(emitter.plan, "return", [result])
        emitter.program.verify()


def test_verification_failure_is_an_mlir_error() -> None:
    with dialect.session():
        ir.Operation.create("scm.check_none", attributes={}, ip=None)
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            ir.Operation.create("scm.check_none")
        with pytest.raises(ir.MLIRError, match=r"expects exactly 1 operands, but got 0|label"):
            module.operation.verify()


@pytest.mark.parametrize("address", [0x10, 0x1234_5678, 0x7FFF_FFFF_F000])
def test_registered_symbols_are_reached_at_any_distance(address: int) -> None:
    with dialect.session():
        module = ir.Module.parse(
            """
            llvm.mlir.global external @far() {addr_space = 0 : i32} : i8
            llvm.func @get() -> !llvm.ptr {
              %p = llvm.mlir.addressof @far : !llvm.ptr
              llvm.return %p : !llvm.ptr
            }
            """
        )
        engine = ExecutionEngine(module, opt_level=2, enable_object_dump=False, enable_pic=True)
        engine.raw_register_runtime("far", ctypes.c_void_p(address))
        engine.initialize()
        result = ctypes.c_void_p()
        packed = (ctypes.c_void_p * 1)(ctypes.addressof(result))
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.raw_lookup("get"))
        call(ctypes.addressof(packed))
        assert result.value == address


def test_llvm_builders_and_variadic_calls() -> None:
    with dialect.session():
        module = ir.Module.create()
        pointer = ir.Type.parse("!llvm.ptr")
        external = ir.Attribute.parse("#llvm.linkage<external>")
        variadic = ir.TypeAttr.get(ir.Type.parse("!llvm.func<ptr (i64, ...)>"))
        with ir.InsertionPoint(module.body):
            llvm.LLVMFuncOp("pack", variadic, linkage=external)
            signature = ir.TypeAttr.get(ir.Type.parse("!llvm.func<ptr (ptr)>"))
            function = llvm.LLVMFuncOp("f", signature, linkage=external)
        block = function.regions[0].blocks.append(pointer)
        with ir.InsertionPoint(block):
            i64 = ir.IntegerType.get_signless(64)
            one = llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, 1)).result
            call = llvm.CallOp(
                pointer,
                [one, block.arguments[0]],
                [],
                [],
                callee="pack",
                var_callee_type=variadic,
            )
            llvm.ReturnOp(arg=call.result)
        assert module.operation.verify()
