"""Compares a recorded guard tree with the finished C++ tree.

While a build runs, the record holds the Python objects of all C++ managers and leaves that it saw,
so "the same" means the same C++ object, not merely equal text. Every difference is one line of
text; a tree with differences must not be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trident.capture import dynamo
from trident.capture.tree import Leaf, Node

if TYPE_CHECKING:
    from trident.capture.recorder import Build

# Accessor method -> how Dynamo's accessor describes itself.
ACCESSOR_TEXT = {
    "getitem_manager": "GetItemGuardAccessor",
    "framelocals_manager": "FrameLocalsGuardAccessor",
    "dict_getitem_manager": "DictGetItemGuardAccessor",
    "list_getitem_manager": "ListGetItemGuardAccessor",
    "tuple_getitem_manager": "TupleGetItemGuardAccessor",
    "indexed_manager": "IndexedGuardAccesor",
    "tensor_property_size_manager": "TensorPropertyGuardAccessor<TensorProperty::SIZE",
    "tensor_property_stride_manager": "TensorPropertyGuardAccessor<TensorProperty::STRIDE",
    "tensor_property_storage_offset_manager": (
        "TensorPropertyGuardAccessor<TensorProperty::STORAGE_OFFSET"
    ),
    "tuple_iterator_getitem_manager": "TupleIteratorGetItemAccessor",
    "set_getitem_manager": "SetGetItemGuardAccessor",
    "globals_dict_manager": "GlobalsGuardAccessor",
    "global_weakref_manager": "GlobalWeakRefGuardAccessor",
    "lambda_manager": "PythonLambdaGuardAccessor",
    "generic_getattr_manager": "GenericGetAttrGuardAccessor",
    "getattr_manager": "GetAttrGuardAccessor",
    "func_defaults_manager": "FuncDefaultsGuardAccessor",
    "func_kwdefaults_manager": "FuncKwDefaultsGuardAccessor",
    "type_manager": "TypeGuardAccessor",
    "type_dict_manager": "TypeDictGuardAccessor",
    "type_mro_manager": "TypeMROGuardAccessor",
    "weakref_call_manager": "WeakRefCallGuardAccessor",
    "call_function_no_args_manager": "CallFunctionNoArgsGuardAccessor",
    "code_manager": "CodeGuardAccessor",
    "closure_manager": "ClosureGuardAccessor",
    "grad_manager": "GradGuardAccessor",
    "get_generic_dict_manager": "GetGenericDictGuardAccessor",
}
# Kinds that the record names otherwise than Dynamo does.
_CLASS_OF = {"SAVED_TENSORS_HOOKS": "LAMBDA_GUARD"}


def parts_of(leaf: Any) -> list[str]:
    """Dynamo's text of a leaf guard: a list of strings, or one string where it made only one."""
    parts = leaf.verbose_code_parts()
    return [parts] if isinstance(parts, str) else [str(part) for part in parts]


def differences(manager: Any, node: Node, build: Build) -> Iterator[str]:
    """Yields what differs between the C++ tree under `manager` and the record under `node`."""
    tracked = build.tracked.get(id(manager))
    where = node.source or "root"
    if tracked is None or tracked.manager is not manager or tracked.node is not node:
        yield f"{where}: another guard manager stands here than was recorded"
        return
    yield from _leaf_differences(where, manager.get_leaf_guards(), tracked.leaves, node.leaves)
    yield from _child_differences(where, manager, node, build)
    c = dynamo.guards_c()
    is_dict = isinstance(manager, c.DictGuardManager)
    if is_dict != node.is_dict_manager:
        yield f"{where}: a dict manager on one side only"
    elif is_dict:
        yield from _entry_differences(where, manager, node, build)
    if isinstance(manager, c.RootGuardManager):
        yield from _leaf_differences(
            f"{where} epilogue",
            manager.get_epilogue_lambda_guards(),
            build.epilogues.get(id(manager), []),
            node.epilogue,
        )


def _leaf_differences(
    where: str, real: list[Any], seen: list[Any], record: list[Leaf]
) -> Iterator[str]:
    if len(real) != len(seen) or any(a is not b for a, b in zip(real, seen, strict=True)):
        names = [type(leaf).__name__ for leaf in real]
        yield f"{where}: has the leaves {names}, recorded {[leaf.kind for leaf in record]}"
        return
    if len(real) != len(record):
        yield f"{where}: {len(real)} leaves, {len(record)} recorded"
        return
    for leaf, recorded in zip(real, record, strict=True):
        kind = _CLASS_OF.get(recorded.kind, recorded.kind)
        if type(leaf).__name__ != kind:
            yield f"{where}: {type(leaf).__name__} recorded as {recorded.kind}"
        elif parts_of(leaf) != recorded.parts:
            yield f"{where}: the text of {kind} differs"


def _child_differences(where: str, manager: Any, node: Node, build: Build) -> Iterator[str]:
    accessors, children = manager.get_accessors(), manager.get_child_managers()
    if not len(accessors) == len(children) == len(node.children):
        yield f"{where}: {len(children)} children, {len(node.children)} recorded"
        return
    for accessor, child, recorded in zip(accessors, children, node.children, strict=True):
        method = "" if recorded.accessor is None else recorded.accessor[0]
        expected = ACCESSOR_TEXT.get(method)
        text = accessor.repr()
        # The name must end there: GetItemGuardAccessor is no DictGetItemGuardAccessor.
        if expected is None or not (
            text == expected or text.startswith((f"{expected}(", f"{expected}>"))
        ):
            yield f"{where}: {text} recorded as {method}"
        else:
            yield from differences(child, recorded, build)


def _entry_differences(where: str, manager: Any, node: Node, build: Build) -> Iterator[str]:
    entries = manager.get_key_value_managers()
    if set(entries) != set(node.kv):
        yield f"{where}: guards the entries {sorted(entries)}, recorded {sorted(node.kv)}"
        return
    for position, pair in entries.items():
        for manager_here, recorded in zip(pair, node.kv[position], strict=True):
            if (manager_here is None) != (recorded is None):
                yield f"{where}: entry {position} is guarded on one side only"
            elif manager_here is not None and recorded is not None:
                yield from differences(manager_here, recorded, build)
