"""Guards to rows: every operation has one rule; text written by hand lowers too."""

from __future__ import annotations

import pytest

from tests.codegen.golden import check_golden
from tests.codegen.trees import imported, leaf, local, tree
from trident.codegen import dialect, lower_guards
from trident.codegen.lower_guards import Row, row_rule
from trident.errors import TridentError, UnsupportedGuard

BY_HAND = """
module {
  "scm.specialization"() ({
    %x = "scm.local"() {index = 1 : i64, label = 0 : i64} : () -> !scm.object
    %y = "scm.local"() {index = 0 : i64, label = 1 : i64} : () -> !scm.object
    %item = "scm.list_item"(%x) {index = 3 : i64, label = 2 : i64} : (!scm.object) -> !scm.object
    "scm.check_length"(%x) {length = 4 : i64, label = 3 : i64} : (!scm.object) -> ()
    "scm.check_same"(%item, %y) {label = 4 : i64} : (!scm.object, !scm.object) -> ()
    "scm.check_no_alias"(%x, %y, %item) {label = 5 : i64}
      : (!scm.object, !scm.object, !scm.object) -> ()
    "scm.check_dual_level"() {level = -1 : i64, label = 5 : i64} : () -> ()
    "scm.pass"() : () -> ()
  }, {
    "scm.run_code"() {reason = "none"} : () -> ()
  }) {code = "f", framelocals = ["y", "x"]} : () -> ()
}
"""


def test_text_written_by_hand() -> None:
    program = dialect.parse(BY_HAND, labels=["the local x"])
    table = lower_guards.lower_guards(program)
    assert table.rows == [
        Row("local", 0, -1, 1, 0, None, 0),
        Row("local", 1, -1, 0, 0, None, 1),
        Row("list_item", 2, 0, 3, 0, None, 2),
        Row("check_length", -1, 0, 4, 0, None, 3),
        Row("check_same", -1, 2, 1, 0, None, 4),
        Row("check_no_alias", -1, -1, 0, 0, (0, 1, 2), 5),
        Row("check_dual_level", -1, -1, -1, 0, None, 5),
    ]
    assert table.n_registers == 3
    assert table.framelocals == ("y", "x")
    assert table.labels == ["the local x", *(f"label {n}" for n in range(1, 6))]
    assert table.counts()["local"] == 2
    check_golden(
        table.text(),
        r"""
    registers 3, locals (y, x)
       0 r0 = local a=1                                        // the local x
       1 r1 = local                                            // label 1
       2 r2 = list_item r0 a=3                                 // label 2
       3 check_length r0 a=4                                   // label 3
       4 check_same r2 a=1                                     // label 4
       5 check_no_alias (0, 1, 2)                              // label 5
       6 check_dual_level a=-1                                 // label 5
    """,
    )


def test_reloaded_text_lowers_to_the_same_table() -> None:
    program = imported(
        tree(
            local("x", leaf("TYPE_MATCH", "type", type_id=5), leaf("LENGTH_CHECK", "n", length=2)),
            local("y", leaf("EQUALS_MATCH", "y == 1.5", value=1.5)),
        )
    )
    again = dialect.parse(program.text(), program.objects, program.labels)
    assert lower_guards.lower_guards(again).rows == lower_guards.lower_guards(program).rows


def test_text_that_needs_objects_says_so() -> None:
    program = imported(tree(local("x", leaf("EQUALS_MATCH", "x == 1", value=1))))
    with pytest.raises(TridentError, match="lowers only together with its object table"):
        lower_guards.lower_guards(dialect.parse(program.text()))


def test_an_object_where_an_address_belongs_is_reported() -> None:
    program = imported(tree(local("x", leaf("TYPE_MATCH", "type", type_id=5))))
    program.objects.values[0] = int
    with pytest.raises(TridentError, match=r"scm.check_type: attribute type does not name an a"):
        lower_guards.lower_guards(program)


def test_every_guard_operation_has_a_rule() -> None:
    assert set(lower_guards.ROW_RULES) == {f"scm.{name}" for name in dialect.GUARD_OPS}


def test_the_runtime_knows_every_operation() -> None:
    frame = pytest.importorskip("trident._frame")
    assert set(frame.op_names()) == set(dialect.GUARD_OPS)


def test_missing_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(lower_guards.ROW_RULES, "scm.check_same")
    message = r"scm.check_same has no lowering .*add a rule to trident/codegen/lower_guards.py"
    with pytest.raises(UnsupportedGuard, match=message):
        lower_guards.lower_guards(dialect.parse(BY_HAND))


def test_duplicate_rule() -> None:
    with pytest.raises(TridentError, match=r"two rules for scm.grad: .*py:\d+ and .*guards.py:\d+"):
        row_rule("grad")(lambda context, op: context.row(op))
