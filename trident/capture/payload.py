"""What each kind of leaf guard compares with, taken from the call that adds the guard.

A rule receives the leading arguments of the ``add_*_guard`` method (everything before the text
parts, and for TENSOR_MATCH those after it too) and returns the payload that ``tree.py`` lists. A
rule checks the types of what it takes, so that a release that changes an argument's meaning makes
a problem instead of a wrong guard. Rules raise :class:`PayloadError` for values that the payload
cannot express.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.utils._device

from trident.errors import TridentError

Args = tuple[Any, ...]
Rule = Callable[[Args], dict[str, Any]]


class PayloadError(TridentError):
    """A leaf guard whose expectation has no exact form in the record."""


# Kind -> (number of arguments that the rule takes, before the text parts; the rule).
RULES: dict[str, tuple[int, Rule]] = {}


def _rule(n_args: int, *kinds: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for kind in kinds:
            if kind in RULES:
                here, there = function.__qualname__, RULES[kind][1].__qualname__
                raise TridentError(f"payload rule for {kind} registered by {there} and {here}")
            RULES[kind] = n_args, function
        return function

    return register


def _typed(kind: type, value: Any, what: str) -> Any:
    # Exactly: True is an int to isinstance, and a str subclass may redefine equality.
    if type(value) is not kind:
        raise PayloadError(f"{what} is a {type(value).__name__}, expected {kind.__name__}")
    return value


@_rule(0, "NONE_MATCH", "NOT_NONE", "TRUE_MATCH", "FALSE_MATCH", "FLOAT_IS_NAN", "COMPLEX_IS_NAN")
def _no_payload(args: Args) -> dict[str, Any]:
    return {}


@_rule(1, "TYPE_MATCH")
def _type_match(args: Args) -> dict[str, Any]:
    return {"type_id": _typed(int, args[0], "type id")}


@_rule(1, "ID_MATCH")
def _id_match(args: Args) -> dict[str, Any]:
    return {"obj_id": _typed(int, args[0], "object id")}


@_rule(1, "EQUALS_MATCH")
def _equals_match(args: Args) -> dict[str, Any]:
    return {"value": args[0]}


@_rule(1, "LENGTH_CHECK", "DICT_LENGTH")
def _length(args: Args) -> dict[str, Any]:
    return {"length": _typed(int, args[0], "length")}


@_rule(2, "TUPLE_ITERATOR_LEN")
def _tuple_iterator_len(args: Args) -> dict[str, Any]:
    length, type_id = args
    return {"length": _typed(int, length, "length"), "type_id": _typed(int, type_id, "type id")}


@_rule(4, "RANGE_ITERATOR_MATCH")
def _range_iterator_match(args: Args) -> dict[str, Any]:
    names = ("start", "stop", "step", "type_id")
    return {name: _typed(int, value, name) for name, value in zip(names, args, strict=True)}


@_rule(0, "DEFAULT_DEVICE")
def _default_device(args: Args) -> dict[str, Any]:
    return {"device": torch.utils._device.CURRENT_DEVICE}


@_rule(1, "MAPPING_KEYS_MATCH")
def _mapping_keys_match(args: Args) -> dict[str, Any]:
    return {"keys": list(args[0].keys())}


@_rule(1, "DISPATCH_KEY_SET_MATCH")
def _dispatch_key_set_match(args: Args) -> dict[str, Any]:
    return _key_set(args[0])


@_rule(1, "GLOBAL_STATE")
def _global_state(args: Args) -> dict[str, Any]:
    return {"state": args[0]}


@_rule(1, "TORCH_FUNCTION_MODE_STACK")
def _torch_function_mode_stack(args: Args) -> dict[str, Any]:
    return {"types": [type(mode) for mode in _typed(list, args[0], "mode stack")]}


@_rule(1, "NO_HASATTR")
def _no_hasattr(args: Args) -> dict[str, Any]:
    return {"attr": _typed(str, args[0], "attribute name")}


@_rule(2, "DICT_CONTAINS")
def _dict_contains(args: Args) -> dict[str, Any]:
    return {"contains": _typed(bool, args[0], "contains"), "key": args[1]}


@_rule(2, "SET_CONTAINS")
def _set_contains(args: Args) -> dict[str, Any]:
    return {"contains": _typed(bool, args[0], "contains"), "item": args[1]}


@_rule(1, "DUAL_LEVEL_MATCH")
def _dual_level_match(args: Args) -> dict[str, Any]:
    return {"level": _typed(int, args[0], "dual level")}


@_rule(1, "DICT_VERSION")
def _dict_version(args: Args) -> dict[str, Any]:
    return {"tag": torch._C._dynamo.guards.dict_version(args[0])}


@_rule(3, "DIMENSION_DYNAMIC_MARKING_GUARD")
def _dimension_marking(args: Args) -> dict[str, Any]:
    expected, absent, dependent = args
    return {
        "expected": {name: set(dims) for name, dims in _typed(dict, expected, "expected").items()},
        "absent": list(_typed(list, absent, "absent")),
        "dependent": dict(_typed(dict, dependent, "dependent")),
    }


# Of torch 2.11 and 2.12; later releases have DIMENSION_DYNAMIC_MARKING_GUARD.
@_rule(1, "DYNAMIC_INDICES")
def _dynamic_indices(args: Args) -> dict[str, Any]:
    return {"dimensions": set(_typed(set, args[0], "dimensions"))}


@_rule(2, "FAKE_SCRIPT_TYPE_MATCH")
def _fake_script_type_match(args: Args) -> dict[str, Any]:
    return {}


# value, sizes, strides, name; the text parts follow, then (by release) the user's stack, then the
# type and the dispatch keys.
@_rule(4, "TENSOR_MATCH")
def _tensor_match(args: Args) -> dict[str, Any]:
    tensor, sizes, strides, pytype, keys = args[0], args[1], args[2], args[-2], args[-1]
    # A subclass may define attributes of these names: ask the base class, as Dynamo's C++ does.
    base: Any = torch._C.TensorBase
    with torch._C.DisableTorchFunction():
        layout = base.layout.__get__(tensor)
        if layout is not torch.strided:
            raise PayloadError(f"tensor layout {layout}")
        own_sizes, own_strides = tuple(base.size(tensor)), tuple(base.stride(tensor))
        index = base.device.__get__(tensor).index
        dtype, requires_grad = base.dtype.__get__(tensor), base.requires_grad.__get__(tensor)
    return {
        "type_id": id(_typed_type(pytype)),
        **_key_set(keys),
        "dtype": dtype,
        "device_index": -1 if index is None else index,
        "requires_grad": _typed(bool, requires_grad, "requires_grad"),
        "sizes": _dims(sizes, own_sizes, "size"),
        "strides": _dims(strides, own_strides, "stride"),
    }


def _typed_type(value: Any) -> type:
    if not isinstance(value, type) or not issubclass(value, torch.Tensor):
        raise PayloadError("the expected type of a tensor is not a tensor type")
    return value


def _dims(given: Any, own: tuple[Any, ...], what: str) -> tuple[int | None, ...]:
    # Dynamo's C++ takes an empty list to mean the tensor's own.
    dims = tuple(given) or own
    for dim in dims:
        if dim is not None and type(dim) is not int:
            raise PayloadError(f"tensor {what} of type {type(dim).__name__}")
    if len(dims) != len(own):
        raise PayloadError(f"{len(dims)} {what}s for a tensor of {len(own)} dimensions")
    return dims


def _key_set(keys: Any) -> dict[str, Any]:
    """The key set and the thread's include and exclude sets, which Dynamo applies to it."""
    return {
        "keyset": keys.raw_repr(),
        "tls_include": torch._C._dispatch_tls_local_include_set().raw_repr(),
        "tls_exclude": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
    }


@_rule(1, "LAMBDA_GUARD", "LAMBDA_GUARD_NO_ARGS", "LAMBDA_GUARD_NO_FRAMELOCALS")
def _lambda_guard(args: Args) -> dict[str, Any]:
    if not callable(args[0]):
        raise PayloadError(f"lambda guard on a {type(args[0]).__name__}")
    return {"fn": args[0]}


# Kinds whose leaf may be called alone, outside its tree: they look at nothing but the value.
CALLABLE_ALONE = frozenset(
    {"DIMENSION_DYNAMIC_MARKING_GUARD", "DYNAMIC_INDICES", "FAKE_SCRIPT_TYPE_MATCH"}
)


def callable_leaf(leaf: Any, owner: Any) -> Any:
    """`leaf` as a callable that keeps `owner`, the manager of its tree, alive with it.

    The leaf's Python object does not own the C++ leaf; the tree does.
    """
    call = functools.partial(leaf)
    call.owner = owner  # type: ignore[attr-defined]
    return call


def saved_tensors_hooks(fn: Any, method: CodeType | None) -> dict[str, Any] | None:
    """The payload of SAVED_TENSORS_HOOKS if `fn` is the function that Dynamo's own builder method
    (with the code `method`) makes for it, else None."""
    if type(fn) is not FunctionType or method is None or fn.__code__ not in method.co_consts:
        return None
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    if set(cells) != {"get_hooks", "guard_hooks_ids", "hooks_ids_fn"}:
        return None
    ids = cells["guard_hooks_ids"].cell_contents
    return {"fn": fn, "ids_is_none": ids is None}
