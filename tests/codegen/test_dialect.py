"""The dialect: text, reloading, the object table, and what the verifier catches."""

from __future__ import annotations

import pytest

from tests.codegen.golden import check_golden
from trident.codegen import dialect
from trident.codegen.dialect import Emitter, ObjectTable, Program, Reference, session
from trident.errors import TridentError
from trident.texts import safe_text


def small_program() -> Program:
    with session():
        emitter = Emitter("forward", ("self", "x"))
        program = emitter.program
        program.labels += ["L['x']: local", "L['x']: type is Tensor", "L['x']: not self"]
        me = emitter.value(emitter.guards, "local", [], index=0, label=0)
        x = emitter.value(emitter.guards, "local", [], index=1, label=0)
        kind = program.objects.add(Reference(1234), "type torch.Tensor")
        emitter.effect(emitter.guards, "check_type", [x], type=kind, label=1)
        emitter.effect(emitter.guards, "check_no_alias", [me, x], label=2)
        emitter.effect(emitter.guards, "pass", [])
        argument = emitter.value(emitter.plan, "argument", [], index=1)
        constant = emitter.value(emitter.plan, "constant", [], object=program.objects.add("a\nb"))
        result = emitter.value(emitter.plan, "tuple", [argument, constant])
        emitter.effect(emitter.plan, "return", [result])
    program.verify()
    return program


def test_text() -> None:
    check_golden(
        small_program().text(),
        r"""
    module {
      "scm.specialization"() ({
        %0 = "scm.local"() {index = 0 : i64, label = 0 : i64} : () -> !scm.object  // L['x']: local
        %1 = "scm.local"() {index = 1 : i64, label = 0 : i64} : () -> !scm.object  // L['x']: local
        "scm.check_type"(%1) {label = 1 : i64, type = 0 : i64} : (!scm.object) -> ()  // #0 = type torch.Tensor | L['x']: type is Tensor
        "scm.check_no_alias"(%0, %1) {label = 2 : i64} : (!scm.object, !scm.object) -> ()  // L['x']: not self
        "scm.pass"() : () -> ()
      }, {
        %0 = "scm.argument"() {index = 1 : i64} : () -> !scm.object
        %1 = "scm.constant"() {object = 1 : i64} : () -> !scm.object  // #1 = 'a\nb'
        %2 = "scm.tuple"(%0, %1) : (!scm.object, !scm.object) -> !scm.object
        "scm.return"(%2) : (!scm.object) -> ()
      }) {code = "forward", framelocals = ["self", "x"]} : () -> ()
    }
    """,  # noqa: E501
    )


def test_text_reloads_to_the_same_text() -> None:
    program = small_program()
    text = program.text()
    again = dialect.parse(text, program.objects, program.labels)
    assert again.text() == text
    assert again.framelocals() == ("self", "x")


def test_run_code_and_names_that_are_no_utf8() -> None:
    with session():
        emitter = Emitter("bad\udc80name", ("\udc81",))
        emitter.effect(emitter.guards, "pass", [])
        emitter.run_code("calls \udc82")
    emitter.program.verify()
    assert emitter.program.framelocals() == ("\\udc81",)
    assert "calls \\\\udc82" in emitter.program.text()


def test_every_operation_of_the_tables_exists() -> None:
    defined = {operation.OPERATION_NAME for operation in dialect.Scm.operations}
    named = {f"scm.{name}" for name in (*dialect.GUARD_OPS, *dialect.PLAN_OPS)}
    steps = {"input", "constant_tensor", "operator", "release", "grad_mode", "yield"}
    steps |= {"empty_strided", "reinterpret", "check", "kernel", "branch", "give"}
    steps |= {"launch", "device_enter", "device_exit"}
    steps |= {"autocast_enter", "autocast_exit", *dialect.INTEGER_STEPS}
    steps |= {"integer", "integer_input", "float_input", "size", "stride", "number"}
    assert defined == named | {
        *("scm.pass", "scm.specialization", "scm.program"),
        *(f"scm.{name}" for name in steps),
    }


def test_safe_text_runs_no_user_code() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> object:
            raise AssertionError("user code ran")

    class Loud(metaclass=Meta):
        def __repr__(self) -> str:
            raise AssertionError("user code ran")

    class LoudStr(str):
        def __repr__(self) -> str:
            raise AssertionError("user code ran")

    assert safe_text(object.__new__(Loud)) == "<Loud>"
    assert safe_text(Loud) == "type Loud"
    assert safe_text(LoudStr("x")) == "<LoudStr>"
    assert safe_text((1, "a", None, (2.5, [object()]))) == "(1, 'a', None, (2.5, <list>))"
    assert safe_text(("x",)) == "('x',)"
    assert safe_text(tuple(range(9))) == "(0, 1, 2, 3, 4, 5, 6, 7, ...)"
    assert safe_text("y" * 100) == repr("y" * 60) + "..."
    assert safe_text(1 << 100_000) == "int of 100001 bits"


def test_object_table_keeps_the_very_objects() -> None:
    table, value = ObjectTable(), object()
    assert table[table.add(value)] is value
    with pytest.raises(TridentError, match="object #1 but has 1 objects"):
        table[1]


def edited(old: str, new: str) -> str:
    text = small_program().text()
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("index = 0 : i64, ", "", 'attribute "index" is expected but not provided'),
        ('"scm.check_type"(%1)', '"scm.check_type"(%9)', "undeclared SSA value"),
        ('    "scm.pass"() : () -> ()\n', "", "block with no terminator"),
        ("type = 0 : i64", 'type = "Tensor"', "type"),
        ('"scm.local"', '"scm.lokal"', "scm.lokal"),
        ('"scm.specialization"', '"scm.nothing"', "scm.nothing"),
    ],
)
def test_broken_text_is_reported(old: str, new: str, message: str) -> None:
    with pytest.raises(TridentError, match=message):
        dialect.parse(edited(old, new))


def test_two_specializations_are_reported() -> None:
    body = small_program().text().removeprefix("module {\n").removesuffix("}\n")
    with pytest.raises(TridentError, match=r"expected one scm.specialization .*, found 2"):
        dialect.parse(f"module {{\n{body}{body}}}")


def test_verifier_reports_ir_broken_on_purpose() -> None:
    program = small_program()
    with session():
        operations = [view.operation for view in program.block("guards")]
        fetch, check = operations[1], operations[2]
        check.move_before(fetch)  # now it uses a value before its definition
    with pytest.raises(TridentError, match=r"(?s)invalid scm program: .*does not dominate.*check"):
        program.verify()
