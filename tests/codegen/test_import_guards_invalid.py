"""What cannot be imported says what, where, why and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.codegen.trees import imported, leaf, local, node, tree
from trident.codegen.import_guards import leaf_rule
from trident.errors import TridentError, UnsupportedGuard


def shape_leaf(relation: int, position: int) -> Any:
    numbers = {"n_int": 2, "n_float": 0, "address": 0, "library": None}
    return leaf("SYMBOLIC_SHAPE_GUARD", "s0", relation=relation, position=position, **numbers)


@pytest.mark.parametrize(
    ("guards", "message"),
    [
        (
            tree(local("x", leaf("NEW_KIND", "new(L['x'])"))),
            r"L\['x'\]: new\(L\['x'\]\): leaf guard NEW_KIND has no rule; the specialization stays "
            r"with stock Dynamo \(add a rule to trident/codegen/import_guards.py\)",
        ),
        (
            tree(local("x", node("new_manager", None, "L['x'].new"))),
            r"L\['x'\].new: new_manager: accessor new_manager has no rule",
        ),
        (tree(leaf("NONE_MATCH", "root")), "root: it looks at the frame's locals as a whole"),
        (
            tree(node("getattr_manager", "a", "L.a")),
            "L.a: getattr_manager: it looks at the frame's locals as a whole",
        ),
        (
            tree(local("x", node("globals_dict_manager", {}, "G"))),
            "G: globals_dict_manager: globals below another value",
        ),
        (
            tree(node("framelocals_manager", ("z", 1), "L['z']")),
            r"no local 'z' at index 1 of \('self', 'x', 'y'\)",
        ),
        (
            tree(node("framelocals_manager", ("y", -1), "L['y']")),
            "no local 'y' at index -1",
        ),
        (
            tree(local("x", leaf("LENGTH_CHECK", "len", length=1 << 63))),
            r"L\['x'\]: len: a int that is no 64-bit int",
        ),
        (
            tree(local("x", node("list_getitem_manager", "0", "L['x'][0]"))),
            "a str that is no 64-bit int",
        ),
        (
            tree(local("x", leaf("SYMBOLIC_SHAPE_GUARD", "s0", relation=0, position=1))),
            "s0: its index is None, not 1",
        ),
        (
            tree(local("x", node("indexed_manager", 0, "pair", leaf("NONE_MATCH", "none")))),
            "pair: a guard looks at a pair of index and value",
        ),
        (
            tree(local("x", node("indexed_manager", 0, "pair", shape_leaf(0, position=1)))),
            "s0: its index is 0, not 1",
        ),
        (
            tree(local("x", node("indexed_manager", 1, "pair", shape_leaf(0, position=1)))),
            r"values at the positions \[1\]",
        ),
        (
            tree(local("x", node("type_manager", None, "d", is_dict_manager=True))),
            "d: the dict's type or length was not recorded",
        ),
        (
            tree(local("x", node("type_manager", None, "d", kv={0: (None, None)}))),
            "d: entries are guarded but it is no dict manager",
        ),
    ],
)
def test_unsupported(guards: Any, message: str) -> None:
    with pytest.raises(UnsupportedGuard, match=message):
        imported(guards)


def test_one_relation_of_two_kinds() -> None:
    relation = object()
    first = leaf("OBJECT_ALIASING", "x is y", relation=relation)
    second = leaf("NO_TENSOR_ALIASING", "x is not y", relation=relation)
    with pytest.raises(UnsupportedGuard, match="relation of both check_same and check_no_alias"):
        imported(tree(local("x", first), local("y", second)))


def test_trees_with_problems() -> None:
    guards = tree()
    guards.problems.append("leaves differ at L['x']")
    with pytest.raises(UnsupportedGuard, match="not recorded exactly: leaves differ at"):
        imported(guards)


def test_duplicate_rules_name_both_places() -> None:
    with pytest.raises(TridentError, match=r"two rules for TYPE_MATCH: .*py:\d+ and .*invalid.py"):
        leaf_rule("TYPE_MATCH")(lambda context, value, payload: None)
