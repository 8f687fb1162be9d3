"""Guard trees to `scm`, and on to the guard table (whose golden text stands beside)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.codegen.golden import check_golden
from tests.codegen.trees import imported, leaf, local, node, tree
from trident.capture.tree import GuardTree
from trident.codegen.import_guards import ACCESSOR_RULES, LEAF_RULES
from trident.codegen.lower_guards import lower_guards


def sample_tree() -> GuardTree:
    """What most trees of models are made of."""
    state, relation = torch._C._dynamo.guards.GlobalStateGuard(), object()
    tensor: dict[str, Any] = {
        "type_id": id(torch.Tensor),
        "keyset": 1 << 63,
        "tls_include": 1,
        "tls_exclude": 2,
        "dtype": torch.float32,
        "device_index": -1,
        "requires_grad": False,
        "sizes": (2, None),
        "strides": (None, 1),
    }
    weight = node(
        "dict_getitem_manager",
        "weight",
        "L['self'].weight",
        leaf("TENSOR_MATCH", "check_tensor(weight)", **tensor),
        leaf("NO_TENSOR_ALIASING", "no aliasing", relation=relation),
    )
    entries = node(
        "getattr_manager",
        "entries",
        "L['self'].entries",
        is_dict_manager=True,
        dict_type_id=id(dict),
        dict_len=2,
    )
    key = node("get_key_manager", 1, "key 1", leaf("EQUALS_MATCH", "key == 'b'", value="b"))
    value = node("get_value_manager", 1, "value 1", leaf("NONE_MATCH", "value is None"))
    first = node("get_value_manager", 0, "value 0", leaf("TRUE_MATCH", "value is True"))
    entries.kv = {1: (key, value), 0: (None, first)}
    return tree(
        leaf("GLOBAL_STATE", "global state", state=state),
        leaf("TORCH_FUNCTION_MODE_STACK", "no modes", types=[]),
        leaf("DEFAULT_DEVICE", "no default device", device=None),
        leaf("SAVED_TENSORS_HOOKS", "no hooks", fn=len, ids_is_none=True),
        local(
            "self",
            leaf("TYPE_MATCH", "type is Module, type=<class 'a.Module'>", type_id=4321),
            node("get_generic_dict_manager", None, "L['self'].__dict__", weight),
            entries,
        ),
        local(
            "x",
            leaf("TENSOR_MATCH", "check_tensor(x)", **tensor),
            leaf("NO_TENSOR_ALIASING", "no aliasing", relation=relation),
        ),
        node(
            "globals_dict_manager",
            {"f": len},
            "G",
            node("dict_getitem_manager", "f", "G['f']", leaf("ID_MATCH", "f is f", obj_id=99)),
        ),
        epilogue=[leaf("LAMBDA_GUARD", "shapes", fn=len)],
    )


def test_program() -> None:
    check_golden(
        imported(sample_tree()).text(),
        r"""
    module {
      "scm.specialization"() ({
        "scm.check_global_state"() {label = 0 : i64, object = 0 : i64} : () -> ()  // #0 = <GlobalStateGuard> | global state
        "scm.check_function_modes"() {label = 1 : i64, object = 1 : i64} : () -> ()  // #1 = () | no modes
        "scm.check_default_device"() {label = 2 : i64, object = 2 : i64} : () -> ()  // #2 = None | no default device
        "scm.check_saved_tensor_hooks"() {ids_are_none = 1 : i64, label = 3 : i64, object = 3 : i64} : () -> ()  // #3 = <builtin_function_or_method> | no hooks
        %0 = "scm.local"() {index = 0 : i64, label = 4 : i64} : () -> !scm.object  // L['self']: framelocals_manager
        "scm.check_type"(%0) {label = 5 : i64, type = 4 : i64} : (!scm.object) -> ()  // #4 = type a.Module | L['self']: type is Module, type=<class 'a.Module'>
        %1 = "scm.generic_dict"(%0) {label = 6 : i64} : (!scm.object) -> !scm.object  // L['self'].__dict__: get_generic_dict_manager
        %2 = "scm.dict_item"(%1) {label = 7 : i64, object = 5 : i64} : (!scm.object) -> !scm.object  // #5 = 'weight' | L['self'].weight: dict_getitem_manager
        "scm.check_tensor"(%2) {label = 8 : i64, object = 6 : i64} : (!scm.object) -> ()  // #6 = tensor torch.float32 sizes=2x? strides=?x1 device_index=-1 requires_grad=False | L['self'].weight: check_tensor(weight)
        %3 = "scm.getattr"(%0) {label = 10 : i64, object = 7 : i64} : (!scm.object) -> !scm.object  // #7 = 'entries' | L['self'].entries: getattr_manager
        "scm.check_dict"(%3) {label = 11 : i64, length = 2 : i64, type = 8 : i64} : (!scm.object) -> ()  // #8 = type | L['self'].entries: exact type and length 2
        %4 = "scm.dict_value"(%3) {index = 0 : i64, label = 12 : i64} : (!scm.object) -> !scm.object  // value 0: get_value_manager
        "scm.check_true"(%4) {label = 13 : i64} : (!scm.object) -> ()  // value 0: value is True
        %5 = "scm.dict_key"(%3) {index = 1 : i64, label = 14 : i64} : (!scm.object) -> !scm.object  // key 1: get_key_manager
        "scm.check_equals"(%5) {label = 15 : i64, object = 9 : i64} : (!scm.object) -> ()  // #9 = 'b' | key 1: key == 'b'
        %6 = "scm.dict_value"(%3) {index = 1 : i64, label = 16 : i64} : (!scm.object) -> !scm.object  // value 1: get_value_manager
        "scm.check_none"(%6) {label = 17 : i64} : (!scm.object) -> ()  // value 1: value is None
        %7 = "scm.local"() {index = 1 : i64, label = 18 : i64} : () -> !scm.object  // L['x']: framelocals_manager
        "scm.check_tensor"(%7) {label = 19 : i64, object = 10 : i64} : (!scm.object) -> ()  // #10 = tensor torch.float32 sizes=2x? strides=?x1 device_index=-1 requires_grad=False | L['x']: check_tensor(x)
        %8 = "scm.globals"() {label = 21 : i64, object = 11 : i64} : () -> !scm.object  // #11 = globals | G: globals_dict_manager
        %9 = "scm.dict_item"(%8) {label = 22 : i64, object = 12 : i64} : (!scm.object) -> !scm.object  // #12 = 'f' | G['f']: dict_getitem_manager
        "scm.check_id"(%9) {id = 13 : i64, label = 23 : i64} : (!scm.object) -> ()  // #13 = id | G['f']: f is f
        "scm.check_no_alias"(%2, %7) {label = 9 : i64} : (!scm.object, !scm.object) -> ()  // L['self'].weight: no aliasing
        "scm.check_lambda_locals"() {label = 24 : i64, object = 14 : i64} : () -> ()  // #14 = <builtin_function_or_method> | shapes
        "scm.pass"() : () -> ()
      }, {
        "scm.run_code"() {reason = "a test of guards"} : () -> ()
      }) {code = "frame", framelocals = ["self", "x", "y"]} : () -> ()
    }
    """,  # noqa: E501
    )


def test_table() -> None:
    check_golden(
        lower_guards(imported(sample_tree())).text(),
        r"""
    registers 10, locals (self, x, y)
       0 check_global_state <GlobalStateGuard>                 // global state
       1 check_function_modes ()                               // no modes
       2 check_default_device                                  // no default device
       3 check_saved_tensor_hooks a=1 <builtin_function_or_method>  // no hooks
       4 r0 = local                                            // L['self']: framelocals_manager
       5 check_type r0 a=@                                     // L['self']: type is Module, type=<class 'a.Module'>
       6 r1 = generic_dict r0                                  // L['self'].__dict__: get_generic_dict_manager
       7 r2 = dict_item r1 'weight'                            // L['self'].weight: dict_getitem_manager
       8 check_tensor r2 ...                                   // L['self'].weight: check_tensor(weight)
       9 r3 = getattr r0 'entries'                             // L['self'].entries: getattr_manager
      10 check_dict r3 a=@ b=2                                 // L['self'].entries: exact type and length 2
      11 r4 = dict_value r3                                    // value 0: get_value_manager
      12 check_true r4                                         // value 0: value is True
      13 r5 = dict_key r3 a=1                                  // key 1: get_key_manager
      14 check_equals r5 'b'                                   // key 1: key == 'b'
      15 r6 = dict_value r3 a=1                                // value 1: get_value_manager
      16 check_none r6                                         // value 1: value is None
      17 r7 = local a=1                                        // L['x']: framelocals_manager
      18 check_tensor r7 ...                                   // L['x']: check_tensor(x)
      19 r8 = globals ...                                      // G: globals_dict_manager
      20 r9 = dict_item r8 'f'                                 // G['f']: dict_getitem_manager
      21 check_id r9 a=@                                       // G['f']: f is f
      22 check_no_alias (2, 7)                                 // L['self'].weight: no aliasing
      23 check_lambda_locals <builtin_function_or_method>      // shapes
    """,  # noqa: E501
    )


def test_rows_carry_addresses_and_the_very_objects() -> None:
    guards = sample_tree()
    rows = {row.op: row for row in lower_guards(imported(guards)).rows}
    assert rows["check_type"].a == 4321
    assert rows["check_id"].a == 99
    assert (rows["check_dict"].a, rows["check_dict"].b) == (id(dict), 2)
    assert rows["check_global_state"].obj is guards.root.leaves[0].payload["state"]
    assert rows["globals"].obj is guards.root.children[2].accessor[1]
    assert rows["check_saved_tensor_hooks"].a == 1
    assert rows["check_tensor"].obj == (
        *(id(torch.Tensor), 1 << 63, 1, 2),
        *(torch.float32, -1, False, (2, None), (None, 1)),
    )


def rows_of(*below: Any) -> list[Any]:
    return lower_guards(imported(tree(local("x", *below)))).rows[1:]


CASES: list[tuple[str, dict[str, Any], tuple[str, int, int, Any]]] = [
    ("TYPE_MATCH", {"type_id": 7}, ("check_type", 7, 0, None)),
    ("ID_MATCH", {"obj_id": 8}, ("check_id", 8, 0, None)),
    ("NONE_MATCH", {}, ("check_none", 0, 0, None)),
    ("NOT_NONE", {}, ("check_not_none", 0, 0, None)),
    ("TRUE_MATCH", {}, ("check_true", 0, 0, None)),
    ("FALSE_MATCH", {}, ("check_false", 0, 0, None)),
    ("FLOAT_IS_NAN", {}, ("check_float_nan", 0, 0, None)),
    ("COMPLEX_IS_NAN", {}, ("check_complex_nan", 0, 0, None)),
    ("EQUALS_MATCH", {"value": (1, 2)}, ("check_equals", 0, 0, (1, 2))),
    ("LENGTH_CHECK", {"length": 3}, ("check_length", 3, 0, None)),
    ("DICT_LENGTH", {"length": 4}, ("check_dict_length", 4, 0, None)),
    ("TUPLE_ITERATOR_LEN", {"length": 2, "type_id": 9}, ("check_tuple_iterator", 2, 9, None)),
    (
        "RANGE_ITERATOR_MATCH",
        {"start": 1, "stop": 1 << 70, "step": 3, "type_id": 9},
        ("check_range_iterator", 0, 9, (1, 1 << 70, 3)),
    ),
    ("MAPPING_KEYS_MATCH", {"keys": ["a"]}, ("check_mapping_keys", 0, 0, ["a"])),
    ("NO_HASATTR", {"attr": "z"}, ("check_no_attr", 0, 0, ("z",))),
    ("DICT_CONTAINS", {"contains": True, "key": "k"}, ("check_dict_contains", 1, 0, "k")),
    ("SET_CONTAINS", {"contains": False, "item": 5}, ("check_set_contains", 0, 0, 5)),
    ("DICT_VERSION", {"tag": 1 << 40}, ("check_dict_version", 1 << 40, 0, None)),
    (
        "DISPATCH_KEY_SET_MATCH",
        {"keyset": 1 << 63, "tls_include": 0, "tls_exclude": 1},
        ("check_dispatch_keys", 0, 0, (1 << 63, 0, 1)),
    ),
    ("LAMBDA_GUARD", {"fn": len}, ("check_lambda", 0, 0, len)),
    ("LAMBDA_GUARD_NO_FRAMELOCALS", {"fn": len}, ("check_lambda", 0, 0, len)),
    ("FAKE_SCRIPT_TYPE_MATCH", {"leaf": len}, ("check_leaf", 0, 0, len)),
    ("DYNAMIC_INDICES", {"dimensions": {0}, "leaf": len}, ("check_leaf", 0, 0, len)),
    (
        "DIMENSION_DYNAMIC_MARKING_GUARD",
        {"expected": {"a": {0}}, "absent": ["b"], "dependent": {}, "leaf": len},
        ("check_leaf", 0, 0, len),
    ),
]


@pytest.mark.parametrize(("kind", "payload", "row"), CASES, ids=[case[0] for case in CASES])
def test_leaf(kind: str, payload: dict[str, Any], row: tuple[str, int, int, Any]) -> None:
    [made] = rows_of(leaf(kind, f"{kind} of x", **payload))
    assert (made.op, made.a, made.b, made.obj) == row
    assert (made.dst, made.src) == (-1, 0)


SURROUNDINGS: list[tuple[str, dict[str, Any], tuple[str, int, Any]]] = [
    ("DUAL_LEVEL_MATCH", {"level": -1}, ("check_dual_level", -1, None)),
    ("DEFAULT_DEVICE", {"device": torch.device("cpu")}, ("check_default_device", 0, None)),
    ("LAMBDA_GUARD", {"fn": len}, ("check_lambda_locals", 0, len)),
    ("LAMBDA_GUARD_NO_ARGS", {"fn": len}, ("check_lambda_no_args", 0, len)),
    ("TORCH_FUNCTION_MODE_STACK", {"types": [int]}, ("check_function_modes", 0, (int,))),
]


@pytest.mark.parametrize(("kind", "payload", "row"), SURROUNDINGS, ids=lambda v: str(v)[:20])
def test_leaf_of_the_root(kind: str, payload: dict[str, Any], row: tuple[str, int, Any]) -> None:
    [made] = lower_guards(imported(tree(leaf(kind, "root", **payload)))).rows
    assert (made.op, made.a) == row[:2]
    assert made.obj == (payload["device"] if kind == "DEFAULT_DEVICE" else row[2])
    assert (made.dst, made.src) == (-1, -1)


def test_absent_dimension_marks_call_no_python() -> None:
    rows = rows_of(
        leaf(
            "DIMENSION_DYNAMIC_MARKING_GUARD",
            "no marks",
            expected={},
            absent=["_dynamo_dynamic_indices", "_dynamo_static_indices"],
            dependent={},
            leaf=len,
        )
    )
    assert [(row.op, row.obj) for row in rows] == [
        (
            "check_no_attr",
            ("_dynamo_dynamic_indices", "_dynamo_static_indices", "_has_dynamo_dim_marking"),
        )
    ]


ACCESSORS: list[tuple[str, Any, tuple[str, int, Any]]] = [
    ("getattr_manager", "a", ("getattr", 0, "a")),
    ("generic_getattr_manager", "a", ("generic_getattr", 0, "a")),
    ("get_generic_dict_manager", None, ("generic_dict", 0, None)),
    ("getitem_manager", slice(1), ("getitem", 0, slice(1))),
    ("dict_getitem_manager", (1, 2), ("dict_item", 0, (1, 2))),
    ("list_getitem_manager", -1, ("list_item", -1, None)),
    ("tuple_getitem_manager", 2, ("tuple_item", 2, None)),
    ("set_getitem_manager", 1, ("set_item", 1, None)),
    ("tuple_iterator_getitem_manager", 1, ("tuple_iterator_item", 1, None)),
    ("type_manager", None, ("type", 0, None)),
    ("type_dict_manager", None, ("type_dict", 0, None)),
    ("type_mro_manager", None, ("type_mro", 0, None)),
    ("func_defaults_manager", None, ("func_defaults", 0, None)),
    ("func_kwdefaults_manager", None, ("func_kwdefaults", 0, None)),
    ("closure_manager", None, ("closure", 0, None)),
    ("code_manager", None, ("code", 0, None)),
    ("grad_manager", None, ("grad", 0, None)),
    ("tensor_property_size_manager", 1, ("tensor_size", 1, None)),
    ("tensor_property_stride_manager", 1, ("tensor_stride", 1, None)),
    ("tensor_property_storage_offset_manager", None, ("tensor_storage_offset", 0, None)),
    ("weakref_call_manager", None, ("weakref_call", 0, None)),
    ("call_function_no_args_manager", None, ("call_no_args", 0, None)),
    ("global_weakref_manager", "name", ("global_weakref", 0, "name")),
    ("lambda_manager", len, ("call", 0, len)),
]


@pytest.mark.parametrize(("method", "key", "row"), ACCESSORS, ids=[a[0] for a in ACCESSORS])
def test_accessor(method: str, key: Any, row: tuple[str, int, Any]) -> None:
    child = node(method, key, "child", leaf("NONE_MATCH", "child is None"))
    fetch, check = rows_of(child)
    assert (fetch.op, fetch.a, fetch.obj) == row
    assert (fetch.dst, fetch.src, check.src) == (1, 0, 1)


def test_every_rule_has_a_test() -> None:
    tested = {method for method, _, _ in ACCESSORS}
    elsewhere = {"framelocals_manager", "globals_dict_manager", "get_key_manager"}
    elsewhere |= {"get_value_manager", "indexed_manager"}
    assert set(ACCESSOR_RULES) == tested | elsewhere
    kinds = {case[0] for case in CASES} | {case[0] for case in SURROUNDINGS}
    kinds |= {"GLOBAL_STATE", "SAVED_TENSORS_HOOKS", "TENSOR_MATCH", "NO_TENSOR_ALIASING"}
    kinds |= {"OBJECT_ALIASING", "SYMBOLIC_SHAPE_GUARD", "STORAGE_OVERLAPPING"}
    assert set(LEAF_RULES) == kinds - {"FAKE_SCRIPT_TYPE_MATCH"}


def test_same_object_is_checked_after_both_fetches() -> None:
    relation = object()
    same = leaf("OBJECT_ALIASING", "x is y", relation=relation)
    table = lower_guards(imported(tree(local("x", same), local("y", same, node_of_type()))))
    assert [row.op for row in table.rows] == ["local", "local", "type", "check_same"]
    assert (table.rows[-1].src, table.rows[-1].a) == (0, 1)
    assert table.labels[table.rows[-1].label] == "L['x']: x is y"


def node_of_type() -> Any:
    return node("type_manager", None, "type(y)")


def test_deep_trees_do_not_recurse() -> None:
    deepest = node("list_getitem_manager", 0, "deep", leaf("NONE_MATCH", "deep is None"))
    for _ in range(5_000):
        deepest = node("list_getitem_manager", 0, "deep", deepest)
    assert len(rows_of(deepest)) == 5_002
