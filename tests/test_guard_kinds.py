"""Each kind of leaf guard and accessor of Dynamo, natively and by Dynamo's own guard manager.

Trees are built by hand on a ``RootGuardManager`` while the recorder listens, lowered, and asked for
many values of `x` in turns (see guard_kinds): passing and failing ones, the same object changed in
place, wrong types, and objects that raise wherever they can. Both must give the same verdict every
time, but for :data:`STRICTER`. What exists in torch and is neither tested nor named in
:data:`NOT_HERE` fails.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import trident
from tests.codegen import trees
from tests.guard_kinds import LEAVES, ODD, Case, State, Y
from tests.guard_kinds_accessors import ACCESSORS, Gets
from trident import _frame, capture
from trident.capture import recorder
from trident.capture.tree import GuardTree
from trident.codegen.lower_guards import lower_guards

guards: Any = torch._C._dynamo.guards

# Kinds without cases, and where they are tested or why not.
NOT_HERE = {
    "LeafGuard": "the base class",
    "RelationalGuard": "the base class",
    "GLOBAL_STATE": "test_surroundings",
    "TORCH_FUNCTION_MODE_STACK": "test_surroundings",
    "DEFAULT_DEVICE": "test_surroundings",
    "DUAL_LEVEL_MATCH": "test_surroundings",
    "STORAGE_OVERLAPPING": "tests/codegen/test_relations.py",
    "SYMBOLIC_SHAPE_GUARD": "tests/codegen/test_relations.py",
    "DYNAMIC_INDICES": "torch 2.11 and 2.12 only: Dynamo's own object is called",
    "indexed_manager": "tests/codegen/test_relations.py (only under SYMBOLIC_SHAPE_GUARD)",
    "clone_manager": "makes another tree",
}
# (kind, odd value): where Dynamo says yes although its question raised an exception.
STRICTER = {
    ("NO_HASATTR", "raises"): "hasattr raises; Dynamo takes the attribute for absent",
    ("NO_HASATTR", "interrupts"): "likewise",
    ("DIMENSION_DYNAMIC_MARKING_GUARD", "raises"): "likewise",
    ("DIMENSION_DYNAMIC_MARKING_GUARD", "interrupts"): "likewise",
}


@pytest.fixture(autouse=True)
def ready() -> Iterator[None]:
    capture.install()
    with trident.enable():
        pass  # hands the runtime what guards on the surroundings read
    yield
    Gets.answer = 1


def recorded(build: Callable[[Any], Any]) -> tuple[Any, GuardTree]:
    """The root that `build` fills, and its record."""
    root = guards.RootGuardManager()
    record = recorder.Build(trees.CODE)
    recorder._stack().append(record)
    try:
        build(root)
    finally:
        recorder._stack().remove(record)
    tree = record.finish(root)
    assert tree.problems == []
    return root, tree


def native_of(tree: GuardTree) -> Any:
    table = lower_guards(trees.imported(tree))
    native = _frame.NativeSpecialization(table.framelocals)
    native.set_guards(table.rows, table.n_registers)
    return native


class Pair:
    """A tree and its native twin."""

    def __init__(self, case: Case) -> None:
        def build(root: Any) -> None:
            below = root.framelocals_manager(("x", 1), "x", None, ANY)
            below.add_lambda_guard(lambda x: True, ["a guard that keeps x in the tree"], None)
            case.build(below, root)

        try:
            self.root, tree = recorded(build)
            self.native = native_of(tree)
        except (AttributeError, ValueError) as error:
            if re.search("has no attribute 'add_|native on Python 3.11 only", str(error)):
                pytest.skip(str(error))  # not of this torch or Python
            raise
        self.on_self = any(n.source == "self" for n in tree.root.children)

    def native_verdict(self, x: Any) -> bool:
        return self.native.check((x if self.on_self else 0, x, Y))

    def verdicts(self, x: Any) -> tuple[bool, Any]:
        """Native, and Dynamo's: True, False, or the exception it raised."""
        first = self.native_verdict(x)
        values = {"self": x if self.on_self else 0, "x": x, "y": Y}
        values = {name: value for name, value in values.items() if value is not NotImplemented}
        dynamo: Any
        state = torch._C._get_torch_function_state()
        try:
            dynamo = self.root.check(values)
        except BaseException as error:
            dynamo = type(error).__name__
            torch._C._set_torch_function_state(state)  # Dynamo leaves it off when a guard raises
        assert self.native_verdict(x) == first
        return first, dynamo


ANY = torch._dynamo.guards.GuardManagerType.GUARD_MANAGER
CASES = [
    pytest.param(kind, case, id=f"{kind}-{number}")
    for kind, cases in (*LEAVES.items(), *ACCESSORS.items())
    for number, case in enumerate(cases)
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_verdicts_agree(kind: str, case: Case) -> None:
    pair = Pair(case)
    seen = set()
    # In their order, which changes in place need; then each after each other.
    orders: list[State] = [*case.states, *case.states]
    orders += [state for both in itertools.permutations(case.states, 2) for state in both]
    for state in orders:
        x = state()
        native, dynamo = pair.verdicts(x)
        assert native == (dynamo is True), (x, dynamo)
        seen.add(native)
    if not case.one_sided:
        assert seen == {True, False}


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_odd_values(kind: str, case: Case) -> None:
    pair = Pair(case)
    for name, x in [*ODD.items(), *reversed(ODD.items())]:
        for state in case.states[:2]:
            pair.native_verdict(state())  # a passing or failing one in between
        if not case.dynamo_takes(x):
            assert not pair.native_verdict(x), name
            continue
        if kind == "set_getitem_manager" and hasattr(type(x), "__next__"):
            continue  # each question takes what it asks for
        native, dynamo = pair.verdicts(x)
        stricter = (kind, name) in STRICTER and not native
        assert native == (dynamo is True) or stricter, (name, dynamo)


def test_all_kinds_are_tested() -> None:
    leaf_classes = {
        name
        for name, value in vars(guards).items()
        if isinstance(value, type) and issubclass(value, guards.LeafGuard)
    }
    assert leaf_classes <= {*LEAVES, *NOT_HERE}
    methods = {
        name
        for kind in (guards.GuardManager, guards.RootGuardManager, guards.DictGuardManager)
        for name in vars(kind)
        if name.endswith("_manager")
    }
    assert methods == {*ACCESSORS} | (methods & {*NOT_HERE})
    adders = {name for name in vars(guards.GuardManager) if name.startswith("add_")}
    # One per leaf class, but for the base classes and those that functions install.
    installed = {name for name in dir(guards) if name.startswith("install_")}
    assert len(adders) + len(installed) == len(leaf_classes) - 2


def test_all_accessor_classes_are_tested() -> None:
    """By what the accessors of our cases call themselves."""
    seen = set()
    for cases in ACCESSORS.values():
        for case in cases:
            pending = [Pair(case).root]
            root = pending[0]
            while pending:
                manager = pending.pop()
                seen |= {a.repr().split("(")[0].split("<")[0] for a in manager.get_accessors()}
                pending += manager.get_child_managers()
            del root
    classes = {
        name
        for name, value in vars(guards).items()
        if isinstance(value, type) and issubclass(value, guards.GuardAccessor)
    }
    assert classes - {"GuardAccessor"} <= seen


SURROUNDINGS: dict[str, tuple[Callable[[Any], Any], list[Callable[[], Any]]]] = {
    "GLOBAL_STATE": (
        lambda root: root.add_global_state_guard(guards.GlobalStateGuard(), ["text"], None),
        [
            contextlib.nullcontext,
            torch.no_grad,
            torch.inference_mode,
            lambda: torch.autocast("cpu", torch.bfloat16),
            lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
            lambda: _set(torch.set_num_threads, 2, 1),
            lambda: _set(torch.use_deterministic_algorithms, True, False),
            lambda: _set(torch.set_autocast_cache_enabled, False, True),
            torch._C.DisableTorchFunction,
            torch._C.DisableTorchFunctionSubclass,
        ],
    ),
    "TORCH_FUNCTION_MODE_STACK": (
        lambda root: root.add_torch_function_mode_stack_guard([], ["text"], None),
        [
            contextlib.nullcontext,
            lambda: torch.device("cpu"),
            torch.overrides.BaseTorchFunctionMode,
        ],
    ),
    "DEFAULT_DEVICE": (
        lambda root: root.add_default_device_guard(["text"], None),
        [
            contextlib.nullcontext,
            lambda: _set(torch.set_default_device, "meta", None),
            lambda: _set(torch.set_default_device, "cpu", None),
            lambda: torch.device("meta"),
        ],
    ),
    "DUAL_LEVEL_MATCH": (
        lambda root: root.add_dual_level_match_guard(-1, ["text"], None),
        [contextlib.nullcontext, torch.autograd.forward_ad.dual_level],
    ),
}


@contextlib.contextmanager
def _set(function: Callable[[Any], Any], inside: Any, after: Any) -> Iterator[None]:
    function(inside)
    try:
        yield
    finally:
        function(after)


@pytest.mark.parametrize("kind", SURROUNDINGS)
def test_surroundings(kind: str) -> None:
    build, states = SURROUNDINGS[kind]
    root, tree = recorded(build)
    native = native_of(tree)
    seen = set()
    for state in [*states, *(s for pair in itertools.permutations(states, 2) for s in pair)]:
        with state():
            verdict = native.check((0, 0, 0))
            assert verdict == root.check({}), state
        seen.add(verdict)
        assert native.check((0, 0, 0))  # as it was
    assert seen == {True, False}


def test_function_modes_by_type() -> None:
    modes = [type(f"Mode{n}", (torch.overrides.TorchFunctionMode,), {})() for n in range(2)]
    expected = list(modes)
    root, tree = recorded(
        lambda root: root.add_torch_function_mode_stack_guard(expected, ["text"], None)
    )
    native = native_of(tree)
    for order in (
        [],
        modes,
        modes[::-1],
        modes[:1],
        [*modes, modes[0]],
        [type(m)() for m in modes],
    ):
        with contextlib.ExitStack() as stack:
            for mode in order:
                stack.enter_context(mode)
            assert native.check((0, 0, 0)) == root.check({})


def test_epilogue() -> None:
    """The last guards, which see all locals."""
    root, tree = recorded(
        lambda root: root.add_epilogue_lambda_guard(lambda L: L["x"] < L["y"], ["x < y"], None)
    )
    native = native_of(tree)
    for x, y in ((1, 2), (2, 1), (1, "a"), (None, None), (1, 2.5)):
        assert native.check((0, x, y)) == root.check({"self": 0, "x": x, "y": y})
    assert not native.check((0, 1, NotImplemented))
    assert not root.check({"self": 0, "x": 1})
