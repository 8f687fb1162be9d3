"""Guard tree to `scm`: one rule per leaf kind and per accessor method of Dynamo.

The order of operations is Dynamo's order of checking: a node's own leaves, then its children depth
first, then (for a dict whose entries are guarded) its keys and values by position. Relational
guards come after everything else, when all their members are fetched, and the epilogue last.

A rule is registered by the decorator above it. Leaf rules take ``(context, value, payload)``,
accessor rules ``(context, value, key)`` and return the child's value; `value` is None at the root,
which stands for the frame's locals and is no Python object. What has no rule, or cannot be
expressed, raises :class:`UnsupportedGuard`, and the specialization stays stock.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

from torch_mlir import ir

from trident.capture import dynamo
from trident.capture.tree import GuardTree, Leaf, Node
from trident.codegen.dialect import Emitter, Reference
from trident.codegen.import_shapes import import_shapes
from trident.codegen.registry import register
from trident.errors import UnsupportedGuard

Value: TypeAlias = "ir.Value | None"
LeafRule = Callable[["Context", Value, dict[str, Any]], None]
AccessorRule = Callable[["Context", Value, Any], ir.Value]

LEAF_RULES: dict[str, LeafRule] = {}
ACCESSOR_RULES: dict[str, AccessorRule] = {}


def leaf_rule(*kinds: str) -> Callable[[LeafRule], LeafRule]:
    """Registers the rule for leaf guards of `kinds`."""
    return register(LEAF_RULES, *kinds)


def accessor_rule(*methods: str) -> Callable[[AccessorRule], AccessorRule]:
    """Registers the rule for accessors made by `methods` of ``GuardManager``."""
    return register(ACCESSOR_RULES, *methods)


class Context:
    """What rules emit through: the program under construction and where in the tree they are."""

    __slots__ = ("_emitter", "framelocals", "index", "label", "members", "relations", "source")

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self.framelocals = emitter.program.framelocals()
        self.source = ""
        self.label = 0
        # Per relation (by identity): its check, label, and members in the order of their guards.
        self.relations: dict[int, tuple[str, int, list[ir.Value]]] = {}
        # The payload of each of these members.
        self.members: dict[int, list[dict[str, Any]]] = {}
        # What the last accessor of an indexed value said.
        self.index: Any = None

    def describe(self, text: str) -> None:
        """Label what is emitted from here on with the current source and `text`."""
        labels = self._emitter.program.labels
        labels.append(f"{self.source}: {text}" if self.source else text)
        self.label = len(labels) - 1

    def object(self, value: Any, text: str | None = None) -> int:
        """Index of a new entry in the side list of objects."""
        return self._emitter.program.objects.add(value, text)

    def reference(self, address: int, text: str) -> int:
        """Index of an object known by its address only."""
        return self._emitter.program.objects.add(Reference(self.integer(address)), text)

    def integer(self, value: Any) -> int:
        """`value` if it is an int of 64 bits."""
        if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
            raise self.unsupported(f"a {type(value).__name__} that is no 64-bit int")
        return value

    def fetch(self, name: str, value: Value, **attributes: int) -> ir.Value:
        """Append a fetch from `value` (which must not be the root) and return its result."""
        return self._emitter.value(
            self._emitter.guards, name, [self.required(value)], label=self.label, **attributes
        )

    def fetch_root(self, name: str, value: Value, **attributes: int) -> ir.Value:
        """Append a fetch from the frame itself (`value` must be the root)."""
        if value is not None:
            raise self.unsupported(f"{name} below another value")
        return self._emitter.value(self._emitter.guards, name, [], label=self.label, **attributes)

    def check(self, name: str, value: Value, **attributes: int) -> None:
        """Append a check of `value`, which must not be the root."""
        self.check_all(name, [self.required(value)], **attributes)

    def check_all(self, name: str, values: list[ir.Value], **attributes: int) -> None:
        """Append a check of `values`; none of them: a check of the frame's surroundings."""
        self._emitter.effect(self._emitter.guards, name, values, label=self.label, **attributes)

    def required(self, value: Value) -> ir.Value:
        """`value`; raises UnsupportedGuard at the root, which is no Python object."""
        if value is None:
            raise self.unsupported("it looks at the frame's locals as a whole")
        return value

    def relate(self, name: str, payload: dict[str, Any], value: Value) -> None:
        """Make `value` a member of a relation, to be checked by `name` after all fetches."""
        relation = payload["relation"]
        self.members.setdefault(id(relation), []).append(payload)
        entry = self.relations.setdefault(id(relation), (name, self.label, []))
        if entry[0] != name:
            raise self.unsupported(f"a relation of both {entry[0]} and {name}")
        entry[2].append(self.required(value))

    def unsupported(self, reason: str) -> UnsupportedGuard:
        """The error to raise for the guard under import."""
        return UnsupportedGuard(f"{self.label_text}: {reason}")

    @property
    def label_text(self) -> str:
        """The current label."""
        labels = self._emitter.program.labels
        return labels[self.label] if labels else self.source


def import_guards(tree: GuardTree, emitter: Emitter) -> dict[str, ir.Value]:
    """Fill the guards of `emitter`'s program with what `tree` checks, but for ``scm.pass``.

    Returns what they fetch without running Python, by the text of Dynamo's source: an expression,
    such as ``L['self']._modules['fc']``, that Dynamo's code would evaluate to the same object.
    Raises UnsupportedGuard, with the guard's source and what to do, if any guard of the tree has
    no native form; the program is then useless.
    """
    if tree.problems:
        raise UnsupportedGuard(f"the guard tree was not recorded exactly: {tree.problems[0]}")
    context = Context(emitter)
    fetched: dict[str, ir.Value] = {}
    plain: set[Value] = set()
    # An explicit stack: the depth of a user's data structure must not overflow ours.
    pending: list[tuple[Node, Value]] = [(tree.root, None)]
    while pending:
        node, parent = pending.pop()
        value = parent if node.accessor is None else _import_accessor(context, node, parent)
        if _is_plain_fetch(node, parent in plain) and value is not None:
            plain.add(value)
            fetched.setdefault(node.source, value)
        _import_leaves(context, node, value)
        below = [*node.children]
        for position in sorted(node.kv):
            below += [entry for entry in node.kv[position] if entry is not None]
        pending += [(child, value) for child in reversed(below)]
    _import_relations(context)
    context.source = ""
    for leaf in tree.root.epilogue:
        _import_leaf(context, None, leaf)
    return fetched


_PLAIN_ROOTS = ("framelocals_manager", "globals_dict_manager")
_PLAIN_ACCESSORS = (
    *("get_generic_dict_manager", "list_getitem_manager"),
    *("tuple_getitem_manager", "get_value_manager"),
)


def _is_plain_fetch(node: Node, below_plain: bool) -> bool:
    """Does no Python run to fetch it?"""
    method, key = node.accessor or ("", None)
    if not below_plain:
        return method in _PLAIN_ROOTS
    return method in _PLAIN_ACCESSORS or (method == "dict_getitem_manager" and type(key) is str)


def _import_accessor(context: Context, node: Node, parent: Value) -> ir.Value:
    assert node.accessor is not None
    method, key = node.accessor
    context.source = node.source
    context.describe(method)
    rule = ACCESSOR_RULES.get(method)
    if rule is None:
        raise context.unsupported(
            f"accessor {method} has no rule; the specialization stays with stock Dynamo "
            "(add a rule to trident/codegen/import_guards.py)"
        )
    return rule(context, parent, key)


def _import_leaves(context: Context, node: Node, value: Value) -> None:
    context.source = node.source
    if node.is_dict_manager:
        if node.dict_type_id is None or node.dict_len is None:
            raise UnsupportedGuard(f"{node.source}: the dict's type or length was not recorded")
        context.describe(f"exact type and length {node.dict_len}")
        kind = context.reference(node.dict_type_id, "type")
        context.check("check_dict", value, type=kind, length=context.integer(node.dict_len))
    elif node.kv:
        raise UnsupportedGuard(f"{node.source}: entries are guarded but it is no dict manager")
    if node.accessor is None or node.accessor[0] != "indexed_manager":
        context.index = None
    elif (
        node.children or node.kv or {leaf.kind for leaf in node.leaves} != {"SYMBOLIC_SHAPE_GUARD"}
    ):
        raise UnsupportedGuard(f"{node.source}: a guard looks at a pair of index and value")
    for leaf in node.leaves:
        _import_leaf(context, value, leaf)


def _import_leaf(context: Context, value: Value, leaf: Leaf) -> None:
    context.describe(" and ".join(leaf.parts) or leaf.kind)
    rule = LEAF_RULES.get(leaf.kind)
    if rule is not None:
        rule(context, value, leaf.payload)
    elif callable(leaf.payload.get("leaf")):
        leaf_guard = context.object(leaf.payload["leaf"], f"Dynamo's {leaf.kind}")
        context.check("check_leaf", value, object=leaf_guard)
    else:
        raise context.unsupported(
            f"leaf guard {leaf.kind} has no rule; the specialization stays with stock Dynamo "
            "(add a rule to trident/codegen/import_guards.py)"
        )


def _import_relations(context: Context) -> None:
    for relation, (name, label, values) in context.relations.items():
        context.label = label
        RELATION_RULES[name](context, values, context.members[relation])


RelationRule = Callable[[Context, list[ir.Value], list[dict[str, Any]]], None]
RELATION_RULES: dict[str, RelationRule] = {}


def relation_rule(name: str) -> Callable[[RelationRule], RelationRule]:
    """Registers the rule for relations that are checked by `name`."""
    return register(RELATION_RULES, name)


@relation_rule("check_same")
def relate_same(context: Context, values: list[ir.Value], payloads: list[dict[str, Any]]) -> None:
    for other in values[1:]:
        context.check_all("check_same", [values[0], other])


@relation_rule("check_no_alias")
def relate_no_alias(
    context: Context, values: list[ir.Value], payloads: list[dict[str, Any]]
) -> None:
    context.check_all("check_no_alias", values)


@relation_rule("check_overlap")
def relate_overlap(
    context: Context, values: list[ir.Value], payloads: list[dict[str, Any]]
) -> None:
    pairs = list(zip(values, payloads, strict=True))
    overlapping = [value for value, payload in pairs if payload["overlapping"]]
    others = [value for value, payload in pairs if not payload["overlapping"]]
    function = context.object(dynamo.overlapping_tensors(), "Dynamo's compute_overlapping_tensors")
    n = len(overlapping)
    context.check_all("check_overlap", overlapping + others, overlapping=n, object=function)


@relation_rule("check_symbolic_shapes")
def relate_symbolic_shapes(
    context: Context, values: list[ir.Value], payloads: list[dict[str, Any]]
) -> None:
    first, positions = payloads[0], [payload["position"] for payload in payloads]
    n_int = context.integer(first["n_int"])
    if sorted(positions) != list(range(n_int + context.integer(first["n_float"]))):
        raise context.unsupported(f"values at the positions {positions}")
    ordered = [values[positions.index(position)] for position in range(len(positions))]
    entry = (context.integer(first["address"]), first["library"])
    function = context.object(entry, "C function")
    context.check_all("check_symbolic_shapes", ordered, integers=n_int, object=function)


# Accessors of the frame itself.


@accessor_rule("framelocals_manager")
def fetch_local(context: Context, value: Value, key: Any) -> ir.Value:
    name, index = key
    if not (0 <= index < len(context.framelocals) and context.framelocals[index] == name):
        raise context.unsupported(f"no local {name!r} at index {index} of {context.framelocals}")
    return context.fetch_root("local", value, index=index)


@accessor_rule("globals_dict_manager")
def fetch_globals(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch_root("globals", value, object=context.object(key, "globals"))


# Accessors whose key is any object.


@accessor_rule("getattr_manager")
def fetch_getattr(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("getattr", value, object=context.object(key))


@accessor_rule("generic_getattr_manager")
def fetch_generic_getattr(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("generic_getattr", value, object=context.object(key))


@accessor_rule("getitem_manager")
def fetch_getitem(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("getitem", value, object=context.object(key))


@accessor_rule("dict_getitem_manager")
def fetch_dict_item(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("dict_item", value, object=context.object(key))


@accessor_rule("global_weakref_manager")
def fetch_global_weakref(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("global_weakref", value, object=context.object(key))


# Accessors whose key is an integer.


@accessor_rule("list_getitem_manager")
def fetch_list_item(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("list_item", value, index=context.integer(key))


@accessor_rule("tuple_getitem_manager")
def fetch_tuple_item(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("tuple_item", value, index=context.integer(key))


@accessor_rule("set_getitem_manager")
def fetch_set_item(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("set_item", value, index=context.integer(key))


@accessor_rule("tuple_iterator_getitem_manager")
def fetch_tuple_iterator_item(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("tuple_iterator_item", value, index=context.integer(key))


@accessor_rule("tensor_property_size_manager")
def fetch_tensor_size(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("tensor_size", value, index=context.integer(key))


@accessor_rule("tensor_property_stride_manager")
def fetch_tensor_stride(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("tensor_stride", value, index=context.integer(key))


@accessor_rule("get_key_manager")
def fetch_dict_key(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("dict_key", value, index=context.integer(key))


@accessor_rule("get_value_manager")
def fetch_dict_value(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("dict_value", value, index=context.integer(key))


# Accessors whose key means nothing.


@accessor_rule("get_generic_dict_manager")
def fetch_generic_dict(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("generic_dict", value)


@accessor_rule("type_manager")
def fetch_type(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("type", value)


@accessor_rule("type_dict_manager")
def fetch_type_dict(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("type_dict", value)


@accessor_rule("type_mro_manager")
def fetch_type_mro(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("type_mro", value)


@accessor_rule("func_defaults_manager")
def fetch_func_defaults(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("func_defaults", value)


@accessor_rule("func_kwdefaults_manager")
def fetch_func_kwdefaults(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("func_kwdefaults", value)


@accessor_rule("closure_manager")
def fetch_closure(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("closure", value)


@accessor_rule("code_manager")
def fetch_code(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("code", value)


@accessor_rule("grad_manager")
def fetch_grad(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("grad", value)


@accessor_rule("tensor_property_storage_offset_manager")
def fetch_tensor_storage_offset(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("tensor_storage_offset", value)


@accessor_rule("weakref_call_manager")
def fetch_weakref_call(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("weakref_call", value)


@accessor_rule("call_function_no_args_manager")
def fetch_call_no_args(context: Context, value: Value, key: Any) -> ir.Value:
    return context.fetch("call_no_args", value)


_RETURNS_DEFAULT = (lambda _, found=None: found).__code__


def _returns_default(function: Any) -> bool:
    """Is it ``lambda _, m=module: m``, by which Dynamo finds the module of an ImportSource?"""
    if not isinstance(function, FunctionType) or len(function.__defaults__ or ()) != 1:
        return False
    code, same = function.__code__, _RETURNS_DEFAULT
    names = ("co_code", "co_argcount", "co_kwonlyargcount", "co_posonlyargcount")
    starred = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return not code.co_flags & starred and all(
        getattr(code, name) == getattr(same, name) for name in names
    )


@accessor_rule("lambda_manager")
def fetch_lambda(context: Context, value: Value, key: Any) -> ir.Value:
    if value is None and _returns_default(key):
        (module,) = key.__defaults__
        return context.fetch_root("globals", value, object=context.object(module))
    return context.fetch("call", value, object=context.object(key))


@accessor_rule("indexed_manager")
def fetch_indexed(context: Context, value: Value, key: Any) -> ir.Value:
    # Dynamo makes a pair of index and value, which only SYMBOLIC_SHAPE_GUARD looks at.
    context.index = key
    return context.required(value)


# Leaf guards of a value.


@leaf_rule("TYPE_MATCH")
def guard_type(context: Context, value: Value, payload: dict[str, Any]) -> None:
    kind = context.reference(payload["type_id"], _type_text(context))
    context.check("check_type", value, type=kind)


@leaf_rule("ID_MATCH")
def guard_id(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_id", value, id=context.reference(payload["obj_id"], "id"))


@leaf_rule("NONE_MATCH")
def guard_none(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_none", value)


@leaf_rule("NOT_NONE")
def guard_not_none(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_not_none", value)


@leaf_rule("TRUE_MATCH")
def guard_true(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_true", value)


@leaf_rule("FALSE_MATCH")
def guard_false(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_false", value)


@leaf_rule("FLOAT_IS_NAN")
def guard_float_nan(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_float_nan", value)


@leaf_rule("COMPLEX_IS_NAN")
def guard_complex_nan(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_complex_nan", value)


@leaf_rule("EQUALS_MATCH")
def guard_equals(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_equals", value, object=context.object(payload["value"]))


@leaf_rule("LENGTH_CHECK")
def guard_length(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_length", value, length=context.integer(payload["length"]))


@leaf_rule("DICT_LENGTH")
def guard_dict_length(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_dict_length", value, length=context.integer(payload["length"]))


@leaf_rule("TUPLE_ITERATOR_LEN")
def guard_tuple_iterator(context: Context, value: Value, payload: dict[str, Any]) -> None:
    kind = context.reference(payload["type_id"], _type_text(context))
    length = context.integer(payload["length"])
    context.check("check_tuple_iterator", value, type=kind, length=length)


@leaf_rule("RANGE_ITERATOR_MATCH")
def guard_range_iterator(context: Context, value: Value, payload: dict[str, Any]) -> None:
    kind = context.reference(payload["type_id"], _type_text(context))
    expected = tuple(payload[key] for key in ("start", "stop", "step"))
    context.check("check_range_iterator", value, type=kind, object=context.object(expected))


@leaf_rule("MAPPING_KEYS_MATCH")
def guard_mapping_keys(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_mapping_keys", value, object=context.object(list(payload["keys"])))


@leaf_rule("NO_HASATTR")
def guard_no_attr(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_no_attr", value, object=context.object((payload["attr"],)))


@leaf_rule("DICT_CONTAINS")
def guard_dict_contains(context: Context, value: Value, payload: dict[str, Any]) -> None:
    key = context.object(payload["key"])
    context.check("check_dict_contains", value, contains=int(payload["contains"]), object=key)


@leaf_rule("SET_CONTAINS")
def guard_set_contains(context: Context, value: Value, payload: dict[str, Any]) -> None:
    item = context.object(payload["item"])
    context.check("check_set_contains", value, contains=int(payload["contains"]), object=item)


@leaf_rule("DICT_VERSION")
def guard_dict_version(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check("check_dict_version", value, tag=context.integer(payload["tag"]))


@leaf_rule("DISPATCH_KEY_SET_MATCH")
def guard_dispatch_keys(context: Context, value: Value, payload: dict[str, Any]) -> None:
    keys = tuple(payload[key] for key in ("keyset", "tls_include", "tls_exclude"))
    context.check("check_dispatch_keys", value, object=context.object(keys, "dispatch keys"))


@leaf_rule("TENSOR_MATCH")
def guard_tensor(context: Context, value: Value, payload: dict[str, Any]) -> None:
    expected = tuple(payload[key] for key in TENSOR_FIELDS)
    text = (
        f"tensor {payload['dtype']} sizes={_shape_text(payload['sizes'])} "
        f"strides={_shape_text(payload['strides'])} device_index={payload['device_index']} "
        f"requires_grad={payload['requires_grad']}"
    )
    context.check("check_tensor", value, object=context.object(expected, text))


# Order of the payload of `scm.check_tensor`.
TENSOR_FIELDS = (
    "type_id",
    "keyset",
    "tls_include",
    "tls_exclude",
    "dtype",
    "device_index",
    "requires_grad",
    "sizes",
    "strides",
)


@leaf_rule("LAMBDA_GUARD", "LAMBDA_GUARD_NO_FRAMELOCALS")
def guard_lambda(context: Context, value: Value, payload: dict[str, Any]) -> None:
    if value is not None:
        context.check("check_lambda", value, object=context.object(payload["fn"]))
    elif not import_shapes(context, payload):
        context.check_all("check_lambda_locals", [], object=context.object(payload["fn"]))


_MARKING_FLAGS = ("_has_dynamo_dim_marking",)


@leaf_rule("DIMENSION_DYNAMIC_MARKING_GUARD")
def guard_dimension_marks(context: Context, value: Value, payload: dict[str, Any]) -> None:
    if payload["expected"] or payload["dependent"]:
        leaf = context.object(payload["leaf"], "Dynamo's DIMENSION_DYNAMIC_MARKING_GUARD")
        context.check("check_leaf", value, object=leaf)
        return
    # Every tensor has this guard, nearly always for no marks at all: never call Python for that.
    # Dynamo then looks at the flag only, which whoever marks a tensor sets and nobody takes away.
    names = (*payload["absent"], *_MARKING_FLAGS)
    context.describe(f"no attribute {', '.join(names)}")
    context.check("check_no_attr", value, object=context.object(names))


@leaf_rule("DYNAMIC_INDICES")
def guard_dynamic_indices(context: Context, value: Value, payload: dict[str, Any]) -> None:
    leaf = context.object(payload["leaf"], "Dynamo's DYNAMIC_INDICES")
    context.check("check_leaf", value, object=leaf)


@leaf_rule("LAMBDA_GUARD_NO_ARGS")
def guard_lambda_no_args(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check_all("check_lambda_no_args", [], object=context.object(payload["fn"]))


# Leaf guards of the frame's surroundings: they look at no value.


@leaf_rule("GLOBAL_STATE")
def guard_global_state(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check_all("check_global_state", [], object=context.object(payload["state"]))


@leaf_rule("TORCH_FUNCTION_MODE_STACK")
def guard_function_modes(context: Context, value: Value, payload: dict[str, Any]) -> None:
    modes = context.object(tuple(payload["types"]))
    context.check_all("check_function_modes", [], object=modes)


@leaf_rule("DEFAULT_DEVICE")
def guard_default_device(context: Context, value: Value, payload: dict[str, Any]) -> None:
    device = payload["device"]
    text = str(device) if type(device).__module__ == "torch" else None
    context.check_all("check_default_device", [], object=context.object(device, text))


@leaf_rule("DUAL_LEVEL_MATCH")
def guard_dual_level(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.check_all("check_dual_level", [], level=context.integer(payload["level"]))


@leaf_rule("SAVED_TENSORS_HOOKS")
def guard_saved_tensor_hooks(context: Context, value: Value, payload: dict[str, Any]) -> None:
    function, ids_are_none = context.object(payload["fn"]), int(payload["ids_is_none"])
    context.check_all("check_saved_tensor_hooks", [], object=function, ids_are_none=ids_are_none)


# Relational leaf guards: members are collected here and checked when all are fetched.


@leaf_rule("OBJECT_ALIASING")
def guard_same_object(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.relate("check_same", payload, value)


@leaf_rule("NO_TENSOR_ALIASING")
def guard_no_alias(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.relate("check_no_alias", payload, value)


@leaf_rule("SYMBOLIC_SHAPE_GUARD")
def guard_symbolic_shape(context: Context, value: Value, payload: dict[str, Any]) -> None:
    if context.index != payload["position"]:
        raise context.unsupported(f"its index is {context.index}, not {payload['position']}")
    context.relate("check_symbolic_shapes", payload, value)


@leaf_rule("STORAGE_OVERLAPPING")
def guard_overlap(context: Context, value: Value, payload: dict[str, Any]) -> None:
    context.relate("check_overlap", payload, value)


_TYPE_IN_PART = re.compile(r"type=<class '([^']*)'>")


def _type_text(context: Context) -> str:
    found = _TYPE_IN_PART.search(context.label_text)
    return f"type {found[1]}" if found else "type"


def _shape_text(shape: tuple[int | None, ...]) -> str:
    return "x".join("?" if size is None else str(size) for size in shape) or "scalar"
