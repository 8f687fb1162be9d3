"""Every guard that the installed torch can make is native, or calls Dynamo's own object.

The recorder makes a problem of every other kind, so a release that adds one leaves the
specializations that use it stock; this test then says what to add.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trident.capture import dynamo, payload, recorder, verify
from trident.codegen.import_guards import ACCESSOR_RULES, LEAF_RULES

# Of other releases than the installed one; the class names, per release, were read from each.
OF_OTHER_RELEASES = {
    *("DIMENSION_DYNAMIC_MARKING_GUARD", "FAKE_SCRIPT_TYPE_MATCH"),  # from 2.13 on
    *("DYNAMIC_INDICES", "LAMBDA_GUARD_NO_ARGS", "LAMBDA_GUARD_NO_FRAMELOCALS"),  # before
}


def classes_below(base: Any) -> set[str]:
    c = dynamo.guards_c()
    return {
        name
        for name, value in vars(c).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }


def test_leaf_classes() -> None:
    c = dynamo.guards_c()
    classes = classes_below(c.LeafGuard) - {"RelationalGuard"}
    assert len(classes) >= 30
    assert classes <= set(LEAF_RULES) | payload.CALLABLE_ALONE
    relational = classes_below(c.RelationalGuard)
    assert classes - relational <= set(payload.RULES)
    # And none that no release has.
    known = set(LEAF_RULES) | payload.CALLABLE_ALONE
    assert known - classes - {"SAVED_TENSORS_HOOKS"} <= OF_OTHER_RELEASES


def test_accessors() -> None:
    c = dynamo.guards_c()
    methods = {
        name
        for cls in (c.GuardManager, c.RootGuardManager, c.DictGuardManager)
        for name in vars(cls)
        if name.endswith("_manager") and name not in recorder._NO_ACCESSORS
    }
    entries = set(recorder.ENTRY_MANAGERS)
    assert methods - entries <= set(recorder.ACCESSORS)
    assert methods <= set(ACCESSOR_RULES)
    assert set(recorder.ACCESSORS) == set(verify.ACCESSOR_TEXT)
    # The class of each accessor, where torch shows it.
    texts = {text.split("<")[0] for text in verify.ACCESSOR_TEXT.values()}
    assert classes_below(c.GuardAccessor) - texts == set()


def test_every_method_that_adds_a_guard_is_wrapped() -> None:
    c = dynamo.guards_c()
    installers = {name for name in vars(c) if name.startswith("install_")}
    assert installers == {
        "install_no_tensor_aliasing_guard",
        "install_object_aliasing_guard",
        "install_storage_overlapping_guard",
        "install_symbolic_shape_guard",
    }
    added = {name for name in dir(c.GuardManager) if name.startswith("add_")}
    assert all(name.endswith("_guard") for name in added)


@pytest.mark.parametrize("kind", sorted(payload.CALLABLE_ALONE))
def test_guards_that_are_called_have_a_call(kind: str) -> None:
    leaf = getattr(dynamo.guards_c(), kind, None)
    if leaf is None:
        pytest.skip(f"torch {torch.__version__} has none")
    assert callable(vars(leaf).get("__call__"))
