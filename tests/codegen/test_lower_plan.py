"""Frame plans to LLVM and to native code, called through ctypes."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.codegen.golden import check_golden
from trident.codegen import dialect, jit, lower_plan
from trident.codegen.frame_plan import framelocals_names
from trident.codegen.pipeline import Built, build_skipped
from trident.errors import TridentError, UnsupportedPlan

NATIVE = ctypes.PYFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 4)


class Native:
    """The native plan of `function`, callable with the values of its frame's locals."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.names = framelocals_names(function.__code__)
        self.built = build_skipped(function.__code__)
        assert self.built.plan_reason is None
        self.call = NATIVE(self.built.plan_address)

    def __call__(self, **values: Any) -> Any:
        array = (ctypes.c_void_p * max(1, len(self.names)))()
        for index, name in enumerate(self.names):
            if name in values:
                array[index] = id(values[name])
        result = ctypes.py_object()
        status = self.call(ctypes.addressof(array), ctypes.addressof(result), None, None)
        assert status == lower_plan.HIT
        value = result.value  # takes its own reference
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))
        return value


def test_llvm() -> None:
    check_golden(
        build_skipped((lambda x, y: (y, (x, None))).__code__).ir("llvm"),
        r"""
    module {
      llvm.func @plan(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: !llvm.ptr, %arg3: !llvm.ptr) -> i32 {
        %0 = llvm.mlir.constant(2 : i64) : i64
        %1 = llvm.alloca %0 x !llvm.ptr : (i64) -> !llvm.ptr
        %2 = llvm.getelementptr %arg0[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
        %3 = llvm.load %2 : !llvm.ptr -> !llvm.ptr
        %4 = llvm.mlir.zero : !llvm.ptr
        %5 = llvm.icmp "eq" %3, %4 : !llvm.ptr
        llvm.cond_br %5, ^bb8, ^bb1
      ^bb1:  // pred: ^bb0
        %6 = llvm.getelementptr %arg0[0] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
        %7 = llvm.load %6 : !llvm.ptr -> !llvm.ptr
        %8 = llvm.mlir.zero : !llvm.ptr
        %9 = llvm.icmp "eq" %7, %8 : !llvm.ptr
        llvm.cond_br %9, ^bb7, ^bb2
      ^bb2:  // pred: ^bb1
        %10 = llvm.mlir.addressof @object_0 : !llvm.ptr
        %11 = llvm.mlir.constant(2 : i64) : i64
        %12 = llvm.call @PyTuple_Pack(%11, %7, %10) vararg(!llvm.func<ptr (i64, ...)>) : (i64, !llvm.ptr, !llvm.ptr) -> !llvm.ptr
        %13 = llvm.mlir.zero : !llvm.ptr
        %14 = llvm.icmp "eq" %12, %13 : !llvm.ptr
        llvm.cond_br %14, ^bb6, ^bb3
      ^bb3:  // pred: ^bb2
        %15 = llvm.getelementptr %1[0] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
        llvm.store %12, %15 : !llvm.ptr, !llvm.ptr
        %16 = llvm.mlir.constant(2 : i64) : i64
        %17 = llvm.call @PyTuple_Pack(%16, %3, %12) vararg(!llvm.func<ptr (i64, ...)>) : (i64, !llvm.ptr, !llvm.ptr) -> !llvm.ptr
        %18 = llvm.mlir.zero : !llvm.ptr
        %19 = llvm.icmp "eq" %17, %18 : !llvm.ptr
        llvm.cond_br %19, ^bb5, ^bb4
      ^bb4:  // pred: ^bb3
        %20 = llvm.getelementptr %1[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
        llvm.store %17, %20 : !llvm.ptr, !llvm.ptr
        %21 = llvm.getelementptr %1[0] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
        %22 = llvm.mlir.constant(1 : i64) : i64
        llvm.call @trident_release(%21, %22) : (!llvm.ptr, i64) -> ()
        llvm.call @Py_IncRef(%17) : (!llvm.ptr) -> ()
        llvm.store %17, %arg1 : !llvm.ptr, !llvm.ptr
        %23 = llvm.mlir.constant(0 : i32) : i32
        %24 = llvm.mlir.constant(2 : i64) : i64
        llvm.br ^bb9(%23, %24 : i32, i64)
      ^bb5:  // pred: ^bb3
        %25 = llvm.mlir.constant(1 : i32) : i32
        %26 = llvm.mlir.constant(1 : i64) : i64
        llvm.br ^bb9(%25, %26 : i32, i64)
      ^bb6:  // pred: ^bb2
        %27 = llvm.mlir.constant(1 : i32) : i32
        %28 = llvm.mlir.constant(0 : i64) : i64
        llvm.br ^bb9(%27, %28 : i32, i64)
      ^bb7:  // pred: ^bb1
        %29 = llvm.mlir.addressof @UnboundLocalError : !llvm.ptr
        %30 = llvm.mlir.addressof @unbound_0 : !llvm.ptr
        llvm.call @PyErr_SetObject(%29, %30) : (!llvm.ptr, !llvm.ptr) -> ()
        %31 = llvm.mlir.constant(1 : i32) : i32
        %32 = llvm.mlir.constant(0 : i64) : i64
        llvm.br ^bb9(%31, %32 : i32, i64)
      ^bb8:  // pred: ^bb0
        %33 = llvm.mlir.addressof @UnboundLocalError : !llvm.ptr
        %34 = llvm.mlir.addressof @unbound_1 : !llvm.ptr
        llvm.call @PyErr_SetObject(%33, %34) : (!llvm.ptr, !llvm.ptr) -> ()
        %35 = llvm.mlir.constant(1 : i32) : i32
        %36 = llvm.mlir.constant(0 : i64) : i64
        llvm.br ^bb9(%35, %36 : i32, i64)
      ^bb9(%37: i32, %38: i64):  // 5 preds: ^bb4, ^bb5, ^bb6, ^bb7, ^bb8
        llvm.call @trident_release(%1, %38) : (!llvm.ptr, i64) -> ()
        llvm.return %37 : i32
      }
      llvm.func @trident_release(!llvm.ptr, i64)
      llvm.mlir.global external @UnboundLocalError() {addr_space = 0 : i32} : i8
      llvm.mlir.global external @unbound_1() {addr_space = 0 : i32} : i8
      llvm.func @PyErr_SetObject(!llvm.ptr, !llvm.ptr)
      llvm.mlir.global external @unbound_0() {addr_space = 0 : i32} : i8
      llvm.mlir.global external @object_0() {addr_space = 0 : i32} : i8
      llvm.func @PyTuple_Pack(i64, ...) -> !llvm.ptr
      llvm.func @Py_IncRef(!llvm.ptr)
      llvm.func @__address_of_plan() -> !llvm.ptr {
        %0 = llvm.mlir.addressof @plan : !llvm.ptr
        llvm.return %0 : !llvm.ptr
      }
    }
    """,  # noqa: E501
    )


def test_results() -> None:
    x, y = object(), [1]
    assert Native(lambda x: x)(x=x) is x
    assert Native(lambda: None)() is None
    assert Native(lambda: 1 << 40)() == 1 << 40
    assert Native(lambda: ())() == ()
    value = Native(lambda x, y: (y, (x, "s", None), y))(x=x, y=y)
    assert type(value) is tuple
    assert value[0] is y
    assert value[1] == (x, "s", None)
    assert value[2] is y


def test_constants_are_the_very_objects() -> None:
    function: Any = lambda: (1, ("long constant" * 20, 2.5))  # noqa: E731
    assert Native(function)() is function()
    [constant] = [c for c in function.__code__.co_consts if type(c) is tuple]
    assert Native(function)() is constant


def test_a_shared_tuple_is_one_object() -> None:
    def function(x: Any) -> Any:
        t = (x,)
        return t, t

    first, second = Native(function)(x=1)
    assert first is second


def test_free_variables() -> None:
    captured = object()
    assert Native(lambda a: (a, captured))(a=1, captured=captured) == (1, captured)


def test_an_empty_cell_raises_what_the_interpreter_raises() -> None:
    def outer() -> Callable[..., Any]:
        def inner(a: Any) -> Any:
            return (a, (a, a)), captured  # noqa: F821

        captured = 1
        del captured
        return inner

    inner = outer()
    with pytest.raises(NameError) as expected:
        inner(1)
    native = Native(inner)
    argument = object()
    before = sys.getrefcount(argument)
    try:
        native(a=argument)
    except NameError as error:
        raised = type(error), str(error)
    assert raised == (type(expected.value), str(expected.value))
    assert sys.getrefcount(argument) == before
    assert native.built.plan_locals == (0, 1)


def test_a_missing_argument_never_crashes() -> None:
    with pytest.raises(UnboundLocalError, match="cannot access local variable 'x'"):
        Native(lambda x: x)()


def test_running_out_of_memory_releases_what_was_made() -> None:
    testcapi = pytest.importorskip("_testcapi")
    native = Native(lambda x: ((x, x), ((x, (x, x)), x)))
    x = object()
    before = sys.getrefcount(x)
    gc.collect()
    # The tuples come from allocations; those of ctypes before the call succeed or raise too.
    for start in range(40):
        testcapi.set_nomemory(start, start + 1)
        try:
            native(x=x)
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
    gc.collect()
    assert sys.getrefcount(x) == before


def test_reference_counts_stay_flat() -> None:
    x, y, text = object(), object(), "constant-" + "x" * 50
    code = (lambda x, y: (y, (x, "?"), y)).__code__
    code = code.replace(co_consts=tuple(text if c == "?" else c for c in code.co_consts))
    native = Native(type(test_llvm)(code, {}))
    assert native(x=x, y=y) == (y, (x, text), y)

    def counts() -> tuple[int, ...]:
        return sys.getrefcount(x), sys.getrefcount(y), sys.getrefcount(text), sys.getrefcount(None)

    before, blocks = counts(), sys.getallocatedblocks()
    for _ in range(100_000):
        native(x=x, y=y)
    after = counts()
    assert all(abs(b - a) <= 2 for b, a in zip(before, after, strict=True)), (before, after)
    assert abs(sys.getallocatedblocks() - blocks) < 1_000


def test_results_are_tracked_by_the_collector() -> None:
    x: list[Any] = []
    assert gc.is_tracked(Native(lambda x: (x,))(x=x))


def test_code_objects_constants_live_as_long_as_the_native_code() -> None:
    class Marker:
        pass

    marker = Marker()
    code = (lambda: "?").__code__
    code = code.replace(co_consts=tuple(marker if c == "?" else c for c in code.co_consts))
    native = Native(type(test_llvm)(code, {}))
    before = sys.getrefcount(marker)
    del code
    assert native() is marker
    assert sys.getrefcount(marker) < before
    del native
    gc.collect()
    assert sys.getrefcount(marker) == 2


def parse_plan(plan: str) -> dialect.Program:
    return dialect.parse(
        f"""
        "scm.specialization"() ({{ "scm.pass"() : () -> () }}, {{ {plan} }})
            {{code = "f", framelocals = ["x"]}} : () -> ()
        """
    )


def test_text_written_by_hand_runs() -> None:
    program = parse_plan(
        """
        %x = "scm.argument"() {index = 0 : i64} : () -> !scm.object
        %t = "scm.tuple"(%x, %x) : (!scm.object, !scm.object) -> !scm.object
        "scm.return"(%t) : (!scm.object) -> ()
        """
    )
    native = lower_plan.lower_plan(program)
    code = jit.compile(native.module, native.symbols, native.keepalive)
    value, result = object(), ctypes.py_object()
    array = (ctypes.c_void_p * 1)(id(value))
    function = NATIVE(code.address("plan"))
    assert function(ctypes.addressof(array), ctypes.addressof(result), None, None) == 0
    assert result.value == (value, value)
    ctypes.pythonapi.Py_DecRef(result)


def test_run_code_has_no_native_form() -> None:
    with pytest.raises(UnsupportedPlan, match="it calls f"):
        lower_plan.lower_plan(parse_plan('"scm.run_code"() {reason = "it calls f"} : () -> ()'))


def test_an_index_out_of_range_is_reported() -> None:
    program = parse_plan(
        """
        %x = "scm.argument"() {index = 7 : i64} : () -> !scm.object
        "scm.return"(%x) : (!scm.object) -> ()
        """
    )
    with pytest.raises(UnsupportedPlan, match="no local 7 among"):
        lower_plan.lower_plan(program)


def test_missing_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(lower_plan.PLAN_RULES, "scm.return")
    built: Built = build_skipped((lambda x: x).__code__)
    assert (built.plan_address, built.plan_locals) == (0, ())
    assert built.plan_reason is not None
    assert built.plan_reason.startswith("scm.return has no lowering to LLVM; ")
    assert "trident/codegen/lower_plan.py" in built.plan_reason


def test_every_plan_operation_has_a_rule() -> None:
    assert set(lower_plan.PLAN_RULES) == {f"scm.{name}" for name in dialect.PLAN_OPS}


def test_duplicate_rule() -> None:
    with pytest.raises(TridentError, match=r"two rules for scm.tuple: .*py:\d+ and .*plan.py:\d+"):
        lower_plan.plan_rule("tuple")(lambda context, op, operands: None)
