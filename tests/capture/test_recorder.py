from __future__ import annotations

import threading
from types import CodeType
from typing import Any

import pytest
import torch

from tests.capture.conftest import Events
from tests.examples import EXAMPLES
from trident import capture
from trident.capture import payload, recorder, verify
from trident.capture.tree import Leaf, Node, Specialization


def kinds(spec: Specialization) -> set[str]:
    return {leaf.kind for leaf in spec.tree.leaves()}


def leaves(spec: Specialization, kind: str) -> list[Leaf]:
    return [leaf for leaf in spec.tree.leaves() if leaf.kind == kind]


def node_of(spec: Specialization, source: str) -> Node:
    return next(node for node in spec.tree.root.walk() if node.source == source)


def compile_once(events: Events, function: Any, *args: Any, **options: Any) -> Specialization:
    torch.compile(function, backend="eager", **options)(*args)
    assert events.problems() == []
    return events.added[-1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_recorded_without_problems(name: str, events: Events) -> None:
    EXAMPLES[name]("eager")
    assert events.problems() == []
    assert events.depth == 0
    for spec in events.added:
        assert {"GLOBAL_STATE", "SAVED_TENSORS_HOOKS", "DEFAULT_DEVICE"} <= kinds(spec)
        for leaf in spec.tree.leaves():
            n_args, _ = payload.RULES.get(leaf.kind, (1, None))
            assert leaf.payload or n_args == 0, leaf


def test_cpp_shape_guards_are_recorded(events: Events) -> None:
    with torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=True):
        EXAMPLES["automatic_dynamic"]("eager")
    assert events.problems() == []
    found = leaves(events.added[-1], "SYMBOLIC_SHAPE_GUARD")
    assert len({id(leaf.payload["relation"]) for leaf in found}) == 1
    assert {leaf.payload["position"] for leaf in found} == set(range(len(found)))


def test_storage_overlap(events: Events) -> None:
    EXAMPLES["overlapping_views"]("eager")
    found = leaves(events.added[-1], "STORAGE_OVERLAPPING")
    assert [leaf.payload["overlapping"] for leaf in found] == [True, True]


def test_root_payloads(events: Events) -> None:
    spec = compile_once(events, lambda x: x + 1, torch.ones(2))
    (hooks,) = leaves(spec, "SAVED_TENSORS_HOOKS")
    assert hooks.payload["ids_is_none"] is True
    assert hooks.payload["fn"](None) is True
    (state,) = leaves(spec, "GLOBAL_STATE")
    assert state.payload["state"].check() is True
    assert leaves(spec, "DEFAULT_DEVICE")[0].payload == {"device": None}
    assert leaves(spec, "TORCH_FUNCTION_MODE_STACK")[0].payload == {"types": []}


def test_default_device_payload(events: Events) -> None:
    torch.set_default_device("cpu")
    try:
        spec = compile_once(events, lambda x: x + 1, torch.ones(2))
    finally:
        torch.set_default_device(None)
    assert leaves(spec, "DEFAULT_DEVICE")[0].payload == {"device": torch.device("cpu")}
    types = leaves(spec, "TORCH_FUNCTION_MODE_STACK")[0].payload["types"]
    assert types == [torch.utils._device.DeviceContext]


def test_tensor_payload(events: Events) -> None:
    x = torch.ones(3, 4, dtype=torch.float64).t().requires_grad_()
    spec = compile_once(events, lambda x: x + 1, x)
    (leaf,) = leaves(spec, "TENSOR_MATCH")
    keys = (
        leaf.payload.pop("keyset"),
        leaf.payload.pop("tls_include"),
        leaf.payload.pop("tls_exclude"),
    )
    assert keys[0] == torch._C._dispatch_keys(x).raw_repr()
    assert all(type(key) is int for key in keys)
    assert leaf.payload == {
        "type_id": id(torch.Tensor),
        "dtype": torch.float64,
        "device_index": -1,
        "requires_grad": True,
        "sizes": (4, 3),
        "strides": (1, 4),
    }


def test_scalar_and_dynamic_tensor_payloads(events: Events) -> None:
    spec = compile_once(events, lambda x: x + 1, torch.tensor(1.0))
    (leaf,) = leaves(spec, "TENSOR_MATCH")
    assert (leaf.payload["sizes"], leaf.payload["strides"]) == ((), ())
    spec = compile_once(events, lambda x: x * x.shape[0], torch.ones(3, 4), dynamic=True)
    (leaf,) = leaves(spec, "TENSOR_MATCH")
    assert leaf.payload["sizes"] == (None, None)
    assert leaf.payload["strides"][1] == 1
    assert leaves(spec, "LAMBDA_GUARD") == spec.tree.root.epilogue


def test_subclass_attributes_do_not_fool_the_tensor_payload(events: Events) -> None:
    class Fake(torch.Tensor):
        dtype = "not a dtype"  # type: ignore[assignment]
        requires_grad = True  # type: ignore[assignment]

    value = torch.ones(2).as_subclass(Fake)
    rule = payload.RULES["TENSOR_MATCH"][1]
    made = rule((value, [], [], "x", ["text"], None, Fake, torch._C._dispatch_keys(value)))
    assert made["dtype"] is torch.float32
    assert made["requires_grad"] is False
    assert (made["sizes"], made["strides"]) == ((2,), (1,))


def test_sparse_tensor_is_a_problem(events: Events) -> None:
    x = torch.eye(3).to_sparse_csr()
    keys = torch._C._dispatch_keys(x)
    with pytest.raises(payload.PayloadError, match=r"tensor layout torch.sparse_csr"):
        payload.RULES["TENSOR_MATCH"][1]((x, [], [], "x", ["t"], None, type(x), keys))


def test_wrong_argument_types_are_problems() -> None:
    with pytest.raises(payload.PayloadError, match="type id is a type, expected int"):
        payload.RULES["TYPE_MATCH"][1]((int,))
    with pytest.raises(payload.PayloadError, match="length is a bool, expected int"):
        payload.RULES["LENGTH_CHECK"][1]((True,))
    x = torch.ones(2, 2)
    keys = torch._C._dispatch_keys(x)
    for sizes in ([2], [2, "s"]):
        with pytest.raises(payload.PayloadError, match="size"):
            payload.RULES["TENSOR_MATCH"][1]((x, sizes, [], "x", [], None, torch.Tensor, keys))


def test_value_payloads(events: Events) -> None:
    def g(x: Any, n: int, s: str, t: Any, none: Any, flag: bool, d: Any) -> Any:
        y = x * n + len(s) + len(t) + d["k"]
        return y if none is None and flag else x

    d = {"k": 3}
    with torch._dynamo.config.patch(specialize_int=True):
        spec = compile_once(events, g, torch.ones(2), 3, "abc", (1, 2), None, True, d)
    assert leaves(spec, "NONE_MATCH")
    values = [leaf.payload["value"] for leaf in leaves(spec, "EQUALS_MATCH")]
    assert 3 in values
    assert "abc" in values
    assert {"length": 2} in [leaf.payload for leaf in leaves(spec, "LENGTH_CHECK")]
    types = [leaf.payload["type_id"] for leaf in leaves(spec, "TYPE_MATCH")]
    assert {id(tuple), id(dict)} <= set(types)
    assert node_of(spec, "L['n']").accessor == (
        "framelocals_manager",
        ("n", capture.dynamo.framelocals(g.__code__).index("n")),
    )


def test_identity_payload_and_children(events: Events) -> None:
    spec = compile_once(events, lambda x: torch.nn.functional.relu(x), torch.ones(2))
    ids = [leaf.payload["obj_id"] for leaf in leaves(spec, "ID_MATCH")]
    assert id(torch) in ids
    (root_globals,) = [
        node for node in spec.tree.root.children if node.accessor[0] == "globals_dict_manager"
    ]
    assert root_globals.accessor[1] is globals()


def test_dict_manager(events: Events) -> None:
    EXAMPLES["dict_iteration"]("eager")
    spec = events.added[0]
    (node,) = [node for node in spec.tree.root.walk() if node.is_dict_manager]
    assert (node.dict_type_id, node.dict_len) == (id(dict), 2)
    assert sorted(node.kv) == [0, 1]
    keys = [node.kv[i][0].leaves[0].payload["value"] for i in (0, 1)]
    assert keys == ["x", "yy"]
    assert node.kv[1][1].accessor == ("get_value_manager", 1)


def test_iterator_payloads(events: Events) -> None:
    EXAMPLES["iterators"]("eager")
    spec = events.added[0]
    (leaf,) = leaves(spec, "RANGE_ITERATOR_MATCH")
    expected = {"start": 2, "stop": 5, "step": 1, "type_id": id(type(iter(range(1))))}
    assert leaf.payload == expected
    (leaf,) = leaves(spec, "TUPLE_ITERATOR_LEN")
    assert leaf.payload == {"length": 2, "type_id": id(type(iter(())))}


def test_containment_payloads(events: Events) -> None:
    EXAMPLES["mlp_inference"]("eager")
    found = [leaf.payload for leaf in leaves(events.added[-1], "DICT_CONTAINS")]
    assert {"contains": False, "key": "forward"} in found
    rule = payload.RULES["SET_CONTAINS"][1]
    assert rule((True, "a")) == {"contains": True, "item": "a"}
    with pytest.raises(payload.PayloadError, match="contains is a int, expected bool"):
        rule((1, "a"))


def test_mapping_keys_payload(events: Events) -> None:
    EXAMPLES["mapping_proxy"]("eager")
    (leaf,) = leaves(events.added[0], "MAPPING_KEYS_MATCH")
    assert leaf.payload == {"keys": ["k"]}


def test_nan_payload(events: Events) -> None:
    EXAMPLES["nan_constant"]("eager")
    (leaf,) = leaves(events.added[0], "FLOAT_IS_NAN")
    assert leaf.payload == {}


def test_no_hasattr_payload(events: Events) -> None:
    class Thing:
        value = 1

    def g(x: Any, thing: Any) -> Any:
        return x + (2 if hasattr(thing, "missing") else thing.value)

    spec = compile_once(events, g, torch.ones(2), Thing())
    assert {"attr": "missing"} in [leaf.payload for leaf in leaves(spec, "NO_HASATTR")]


def test_dual_level_payload(events: Events) -> None:
    def g(x: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.make_dual(x, x).sin()

    torch.compile(g, backend="eager")(torch.ones(2))
    found = [leaf for spec in events.added for leaf in leaves(spec, "DUAL_LEVEL_MATCH")]
    if found:  # whether Dynamo traces forward AD here depends on the release
        assert found[0].payload == {"level": -1}


def test_dimension_marks_call_the_leaf(events: Events) -> None:
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    spec = compile_once(events, lambda x: x + 1, x)
    older = leaves(spec, "DYNAMIC_INDICES")  # torch 2.11 and 2.12
    if older:
        assert older[0].payload["dimensions"] == {0}
        assert older[0].payload["leaf"](x) is True
        return
    (leaf,) = leaves(spec, "DIMENSION_DYNAMIC_MARKING_GUARD")
    assert leaf.payload["expected"] == {"_dynamo_dynamic_indices": {0}}
    assert "_dynamo_static_indices" in leaf.payload["absent"]
    assert leaf.payload["leaf"](x) is True
    torch._dynamo.mark_static(x, 1)
    assert leaf.payload["leaf"](x) is False
    assert leaf.payload["leaf"].owner is spec.guard_manager.root


def test_aliasing(events: Events) -> None:
    EXAMPLES["aliased_arguments"]("eager")
    found = leaves(events.added[0], "NO_TENSOR_ALIASING")
    assert len(found) == 2
    assert found[0].payload["relation"] is found[1].payload["relation"]
    with torch._dynamo.config.patch(use_lamba_guard_for_object_aliasing=False):
        torch._dynamo.reset()
        EXAMPLES["aliased_arguments"]("eager")
    found = [leaf for spec in events.added for leaf in leaves(spec, "OBJECT_ALIASING")]
    assert found
    assert found[0].payload["relation"] is found[1].payload["relation"]
    assert events.problems() == []


def test_saved_tensor_hooks_payload(events: Events) -> None:
    def pack(x: Any) -> Any:
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        spec = compile_once(events, lambda x: x * 2, torch.ones(2))
    (leaf,) = leaves(spec, "SAVED_TENSORS_HOOKS")
    # Hooks that cannot be inlined count as none to Dynamo.
    assert leaf.payload["ids_is_none"] is True


def test_guard_filter_builds_twice(events: Events) -> None:
    def keep(entries: Any) -> list[bool]:
        return [entry.guard_type != "ID_MATCH" for entry in entries]

    model = torch.nn.Linear(2, 2)
    options = {"guard_filter_fn": keep}
    spec = compile_once(events, lambda x: model(x), torch.ones(2), options=options)
    assert spec.tree.root.children


def test_functions_that_guards_look_at(events: Events) -> None:
    inner = torch.compile(lambda x: x + 1, backend="eager")
    spec = compile_once(events, lambda x: inner(x) * 2, torch.ones(2))
    assert capture.guarded_functions(spec) == [inner]
    spec = compile_once(events, lambda x: x * 3, torch.ones(2))
    assert capture.guarded_functions(spec) == []


def test_a_dispatch_mode_is_a_problem(events: Events) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    with Mode(), torch._dynamo.config.patch(inline_torch_dispatch_torch_compile=False):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert not [spec for spec in events.added if not spec.tree.problems]
    recorder.note_foreign_mode(True)
    try:
        with_mode = recorder._begin((test_a_dispatch_mode_is_a_problem.__code__,), {})
        assert with_mode is not None
        assert with_mode.problems == ["compiled under a dispatch mode"]
        recorder._end(with_mode, None)
    finally:
        recorder.note_foreign_mode(False)


@pytest.mark.parametrize("method", ["leaf", "accessor", "track", "finish", "fill", "relation"])
@pytest.mark.parametrize("error", [ValueError, RecursionError, AssertionError])
def test_our_failure_stays_ours(
    method: str, error: type[Exception], events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("ours")

    monkeypatch.setattr(recorder.Build, method, fail)
    f = torch.compile(lambda x, y: x + y, backend="eager")
    x = torch.ones(2)
    assert torch.equal(f(x, x.clone()), x * 2)
    assert torch.equal(f(x, x.clone()), x * 2)
    for spec in events.added:
        assert spec.tree.problems
    # finish and track leave no record at all: the entry is listed as not recorded.
    if method in ("finish", "track"):
        assert events.added == []
    recorder_failures = [text for text in capture.failures() if "has no record" in text]
    assert bool(recorder_failures) == (method in ("finish", "track"))
    monkeypatch.undo()
    capture.lifecycle._failures.clear()


def test_dynamos_failure_stays_dynamos(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def tensor_match(self: Any, guard: Any, value: Any = None) -> None:
        calls.append(guard)
        raise OSError("Dynamo's")

    monkeypatch.setattr(torch._dynamo.guards.GuardBuilder, "TENSOR_MATCH", tensor_match)
    with pytest.raises(Exception, match="Dynamo's"):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert len(calls) == 1
    assert events.depth == 0
    assert events.added == []
    assert recorder._stack() == []
    monkeypatch.undo()
    compile_once(events, lambda x: x + 1, torch.ones(2))


def test_unknown_methods_and_kinds_are_problems(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(payload.RULES, "TENSOR_MATCH")
    monkeypatch.delitem(recorder.ACCESSORS, "framelocals_manager")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    problems = events.problems()
    assert "L['x']: guard kind TENSOR_MATCH is unknown" in problems
    assert any("framelocals_manager" in text for text in problems)


def test_unexpected_signature_is_a_problem(events: Events, monkeypatch: Any) -> None:
    monkeypatch.setitem(recorder._arity, "add_tensor_match_guard", 9)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    (problem,) = events.problems()
    assert problem == "L['x']: add_tensor_match_guard takes 8 arguments, which is unexpected"


@pytest.mark.parametrize("damage", ["leaf", "child", "accessor", "parts", "entry", "epilogue"])
def test_verification_sees_differences(damage: str, events: Events, monkeypatch: Any) -> None:
    finish = recorder.Build.finish

    def tampered(self: recorder.Build, root: Any) -> Any:
        record = self.track(root).node
        if damage == "leaf":
            record.leaves.pop()
        elif damage == "child":
            record.children.pop()
        elif damage == "accessor":
            record.children[0].accessor = ("getattr_manager", "x")
        elif damage == "parts":
            record.leaves[0].parts = ["other"]
        elif damage == "entry":
            next(node for node in record.walk() if node.is_dict_manager).kv.popitem()
        elif damage == "epilogue":
            record.epilogue.append(Leaf("LAMBDA_GUARD", {}, []))
        return finish(self, root)

    monkeypatch.setattr(recorder.Build, "finish", tampered)
    torch.compile(lambda d: sum(v for k, v in d.items() if k), backend="eager")(
        {"a": torch.ones(2), "b": torch.ones(2)}
    )
    assert len(events.problems()) == 1
    assert events.problems()[0]


def test_a_leaf_added_behind_our_back_is_a_problem(events: Events, monkeypatch: Any) -> None:
    c = torch._C._dynamo.guards
    original = torch._dynamo.guards.CheckFunctionManager.compile_check_fn

    def sneak(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        add = vars(c.GuardManager)["add_lambda_guard"]
        inner = getattr(add, "__wrapped__", None)
        assert inner is not None
        inner(self.guard_manager.root, lambda x: True, ["sneaked"], None)

    monkeypatch.setattr(torch._dynamo.guards.CheckFunctionManager, "compile_check_fn", sneak)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert any("LAMBDA_GUARD" in text for text in events.problems())


def test_threads_record_apart(events: Events) -> None:
    def work(n: int) -> None:
        # Not dynamic: what one code learns about sizes is shared with others of its name.
        f = torch.compile(eval(f"lambda x: x + {n}"), backend="eager", dynamic=False)
        for size in (2, 3):
            f(torch.ones(size))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events.problems() == []
    assert len(events.added) == 8


def test_tables_agree() -> None:
    assert set(verify.ACCESSOR_TEXT) == set(recorder.ACCESSORS)
    c = torch._C._dynamo.guards
    classes = (c.GuardManager, c.DictGuardManager, c.RootGuardManager)
    methods = {name for cls in classes for name in vars(cls) if name.endswith("_manager")}
    known = set(recorder.ACCESSORS) | set(recorder.ENTRY_MANAGERS) | recorder._NO_ACCESSORS
    assert methods <= known, "this torch has accessors that are not in the tables"


def test_code_is_held_weakly(events: Events) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    spec = compile_once(events, function, torch.ones(2))
    assert isinstance(spec.code, CodeType)
    assert spec.code is function.__code__
    assert spec.tree.code is function.__code__
    assert spec.code_id == id(function.__code__)
