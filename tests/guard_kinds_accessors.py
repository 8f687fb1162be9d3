"""The cases of test_guard_kinds for accessors: see guard_kinds."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tests.guard_kinds import (
    DEFAULT,
    DICT,
    ITERATOR,
    Box,
    Case,
    Lengths,
    Raises,
    State,
    UserDict,
    _after,
    changed,
    child,
    const,
    is_dict,
    is_iterable,
    is_type,
)


def function(x: Any, y: Any = 1, *, z: Any = 2) -> Any:
    return x


def _closure(value: Any) -> Any:
    def inner() -> Any:
        return value

    return inner


def _setter(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda target: setattr(target, name, value)


class Between(Box):
    pass


class Slotted:
    __slots__ = ("a",)


class Gets:
    """Attributes by code that may raise."""

    answer: Any = 1

    def __getattr__(self, name: str) -> Any:
        if isinstance(Gets.answer, BaseException):
            raise Gets.answer
        return Gets.answer

    @property
    def prop(self) -> Any:
        return self.answer_of_prop


ANSWERS = (1, AttributeError(), 2, ValueError(), 1, KeyboardInterrupt())


def _answers(target: Any) -> list[State]:
    return changed(target, *(lambda _, a=a: setattr(Gets, "answer", a) for a in ANSWERS))


def item_states(value: Any, key: Any) -> list[State]:
    """An item that is put, changed, deleted, replaced by an equal one."""
    return changed(
        value,
        lambda v: v.__setitem__(key, 1),
        lambda v: v.__setitem__(key, 2),
        lambda v: v.__setitem__(key, 1.0),
        lambda v: v.__setitem__(key, 1),
        lambda v: v.clear(),
        lambda v: v.extend([1, 1, 1]) if isinstance(v, list) else v.update({key: 1, 7: 7}),
        lambda v: v.reverse() if isinstance(v, list) else v.update({key: v.pop(key)}),
    )


def attribute_states(value: Any) -> list[State]:
    return changed(
        value,
        _setter("a", 1),
        _setter("a", 2),
        _setter("a", True),
        _setter("a", 1),
        lambda v: delattr(v, "a"),
        _setter("a", 1),
    )


def class_states() -> list[State]:
    """Its class hides the attribute, in ways that raise, too."""
    kind = type("Own", (Box,), {})
    return changed(
        kind(),
        lambda b: object.__setattr__(b, "__dict__", {"a": 1}),
        lambda b: setattr(kind, "a", property(lambda self: 2)),
        lambda b: setattr(kind, "a", property(lambda self: 1)),
        lambda b: setattr(kind, "a", property(Raises._raise)),
        lambda b: setattr(kind, "a", 5),
        lambda b: delattr(kind, "a"),
        lambda b: setattr(kind, "__getattribute__", Raises._raise),
        lambda b: delattr(kind, "__getattribute__"),
        lambda b: object.__setattr__(b, "__dict__", {"a": 2}),
        lambda b: object.__setattr__(b, "__dict__", {"a": 1}),
    )


def entry(method: str, position: int, value: Any) -> Any:
    """A dict manager for `x` that guards one entry."""

    def build(manager: Any, root: Any) -> Any:
        d = root.framelocals_manager(("self", 0), "self", {"a": 1, "b": 2}, DICT)
        below = getattr(d, method)(position, "entry", None, DEFAULT)
        below.add_equals_match_guard(value, ["text"], None)

    return build


ENTRIES: list[State] = [
    *changed(
        {},
        lambda d: d.update(a=1, b=2),
        lambda d: d.update(b=3),
        lambda d: d.update(b=2),
        lambda d: d.update(c=3),
        lambda d: d.pop("c"),
        lambda d: d.update(a=d.pop("a")),  # now the other way round
        lambda d: d.update(b=d.pop("b")),
        dict.clear,
    ),
    *const(UserDict(a=1, b=2), collections.OrderedDict(a=1, b=2), {1: 1, 2: 2}, [1, 2]),
]
GLOBALS: dict[str, Any] = {"name": 1}
REFERENT, WITHOUT_DICT = Box(), Slotted()


def _weakrefs() -> list[State]:
    return [
        lambda: weakref.ref(REFERENT),
        lambda: weakref.ref(Box()),  # dead
        lambda: weakref.ref(Lengths),
        lambda: weakref.proxy(REFERENT),
    ]


def _dies() -> list[State]:
    """One weak reference, whose referent dies."""
    alive = [Box()]
    reference = weakref.ref(alive[0])
    return changed(reference, lambda _: None, lambda _: alive.clear())


def _in_globals(state: State) -> State:
    def get() -> Any:
        GLOBALS["name"] = state()

    return get


def _identical(value: Any) -> Any:
    return lambda below, root: below.add_id_match_guard(id(value), ["text"], None)


def _global(method: str, then: Any) -> Any:
    """Below the globals, which are not `x`."""

    def build(manager: Any, root: Any) -> Any:
        found = root.globals_dict_manager(GLOBALS, "G", GLOBALS, DEFAULT)
        return child(method, "name", then=then)(found, root)

    return build


MODULE = types.ModuleType("module_of_a_guard")


def _module(manager: Any, root: Any) -> Any:
    """Below a module that Dynamo's lambda gives whatever the locals are (an ImportSource)."""
    found = root.lambda_manager(lambda _, m=MODULE: m, "module", MODULE, DEFAULT)
    return child("getattr_manager", "name", then=1)(found, root)


FUNCTIONS: list[State] = [
    *changed(
        function,
        lambda f: None,
        _setter("__defaults__", (2,)),
        _setter("__defaults__", None),
        _setter("__defaults__", (1,)),
        _setter("__kwdefaults__", {"z": 3}),
        _setter("__kwdefaults__", None),
        _setter("__kwdefaults__", {"z": 2}),
        _setter("__code__", (lambda x, y, *, z: 1).__code__),
        _setter("__code__", function.__code__),
    ),
    *const(types.MethodType(function, 1), len, _closure(1), Box.__init__),
    *changed(
        _closure(1),
        lambda f: None,
        lambda f: setattr(f.__closure__[0], "cell_contents", 2),
        lambda f: setattr(f.__closure__[0], "cell_contents", 1),
        lambda f: delattr(f.__closure__[0], "cell_contents"),
    ),
]


def _cell(below: Any, root: Any) -> None:
    cell = below.tuple_getitem_manager(0, "cell", None, DEFAULT)
    child("getattr_manager", "cell_contents", then=1)(cell, root)


def _set_grad(value: Any) -> Callable[[torch.Tensor], Any]:
    return lambda t: setattr(t, "grad", value)


# Per accessor method: cases.
ACCESSORS: dict[str, list[Case]] = {
    "getattr_manager": [
        Case(child("getattr_manager", "a", then=1), attribute_states(Box())),
        Case(child("getattr_manager", "a", then=1), attribute_states(WITHOUT_DICT)),
        Case(child("getattr_manager", "a", then=1), class_states()),
        Case(child("getattr_manager", "a", then=1), _answers(Gets())),
        Case(child("getattr_manager", "prop", then=1), _answers(Gets())),
    ],
    "generic_getattr_manager": [
        Case(child("generic_getattr_manager", "a", then=1), attribute_states(Box())),
        Case(child("generic_getattr_manager", "a", then=1), class_states()),
        Case(child("generic_getattr_manager", "prop", then=1), _answers(Gets())),
    ],
    "get_generic_dict_manager": [
        Case(
            child("get_generic_dict_manager", then=child("dict_getitem_manager", "a", then=1)),
            states,
        )
        for states in (attribute_states(Box()), class_states())
    ],
    "getitem_manager": [
        Case(child("getitem_manager", 1, then=1), item_states([0, 0, 0], 1)),
        Case(child("getitem_manager", "a", then=1), item_states({}, "a")),
        Case(child("getitem_manager", "a", then=1), item_states(UserDict(), "a")),
    ],
    "dict_getitem_manager": [
        Case(child("dict_getitem_manager", key, then=1), item_states(kind(), key), takes)
        for kind in (dict, UserDict, collections.OrderedDict)
        for key, takes in (("a", is_dict), (3, is_dict), ((1, "b"), is_dict))
    ],
    "list_getitem_manager": [
        Case(child("list_getitem_manager", index, then=1), item_states([0, 0, 0], 1))
        for index in (1, 0, 5)
    ],
    "tuple_getitem_manager": [
        Case(child("tuple_getitem_manager", 1, then=1), const((0, 1), (0, 2), (0,), (), [0, 1]))
    ],
    "set_getitem_manager": [
        Case(
            child("set_getitem_manager", 0, then=1),
            const({1}, {2}, set(), frozenset({1}), [1]),
            is_iterable,  # Dynamo's own crashes for others
        )
    ],
    "tuple_iterator_getitem_manager": [
        Case(
            lambda manager, root: (
                manager.add_tuple_iterator_length_guard(2, id(ITERATOR), ["text"], None),
                child("tuple_iterator_getitem_manager", 1, then=1)(manager, root),
            ),
            [
                lambda: iter((0, 1)),
                lambda: iter((1, 0)),
                lambda: _after(iter((0, 0, 1)), 1),
                lambda: iter((0, 1, 1)),
                lambda: _after(iter((0, 1)), 3),
            ],
        )
    ],
    "type_manager": [
        Case(
            child("type_manager", then=_identical(Box)),
            changed(
                Box(),
                lambda b: None,
                _setter("__class__", type("B", (Box,), {})),
                _setter("__class__", Box),
            ),
        )
    ],
    "type_dict_manager": [
        Case(
            child("type_dict_manager", then=child("dict_getitem_manager", "t", then=1)),
            changed(Box, *(_setter("t", v) for v in (1, 2, 1)), lambda b: delattr(b, "t")),
            is_type,
        )
    ],
    "type_mro_manager": [
        Case(
            child(
                "type_mro_manager",
                then=child("tuple_getitem_manager", 1, then=_identical(Box)),
            ),
            const(type("B", (Box,), {}), Box, int),
            is_type,
        ),
        Case(
            child(
                "type_mro_manager",
                then=child("tuple_getitem_manager", 1, then=_identical(Box)),
            ),
            changed(
                type("B", (Box,), {}),
                lambda kind: None,
                _setter("__bases__", (Between,)),
                _setter("__bases__", (Box,)),
            ),
            is_type,
        ),
    ],
    "func_defaults_manager": [
        Case(
            child("func_defaults_manager", then=child("tuple_getitem_manager", 0, then=1)),
            FUNCTIONS,
        )
    ],
    "func_kwdefaults_manager": [
        Case(
            child("func_kwdefaults_manager", then=child("dict_getitem_manager", "z", then=2)),
            FUNCTIONS,
        )
    ],
    "code_manager": [
        Case(child("code_manager", then=_identical(function.__code__)), FUNCTIONS),
    ],
    "closure_manager": [Case(child("closure_manager", then=_cell), FUNCTIONS)],
    "grad_manager": [
        Case(
            child("grad_manager", then=lambda below, root: below.add_none_match_guard(["t"], None)),
            changed(torch.ones(2), _set_grad(None), _set_grad(torch.ones(2)), _set_grad(None)),
        )
    ],
    "tensor_property_size_manager": [
        Case(
            child("tensor_property_size_manager", 1, then=3),
            [
                *const(torch.ones(2, 3), torch.ones(3, 2), torch.ones(3)),
                *changed(torch.ones(2, 3), lambda t: t.t_(), lambda t: t.t_()),
            ],
        )
    ],
    "tensor_property_stride_manager": [
        Case(
            child("tensor_property_stride_manager", 0, then=3),
            [
                *const(torch.ones(2, 3), torch.ones(3, 2), torch.ones(())),
                *changed(torch.ones(2, 3), lambda t: t.t_(), lambda t: t.t_()),
            ],
        )
    ],
    "tensor_property_storage_offset_manager": [
        Case(
            child("tensor_property_storage_offset_manager", None, then=1),
            const(torch.ones(4), torch.ones(4)[1:], torch.ones(4)[2:]),
        )
    ],
    "weakref_call_manager": [
        Case(child("weakref_call_manager", then=_identical(REFERENT)), _weakrefs()),
        *(
            Case(
                child(
                    "weakref_call_manager", then=lambda b, root: b.add_none_match_guard(["t"], None)
                ),
                states,
            )
            for states in (_weakrefs(), _dies())
        ),
    ],
    "call_function_no_args_manager": [
        Case(
            child("call_function_no_args_manager", then=1),
            const(lambda: 1, lambda: 2, lambda: 1 / 0, lambda x: 1, 1),
        )
    ],
    "lambda_manager": [
        Case(child("lambda_manager", lambda x: x + 1, then=2), const(1, 2, "a", 1.0)),
        Case(child("lambda_manager", lambda x: x.a, then=1), attribute_states(Box())),
        Case(
            _module,
            [
                lambda: setattr(MODULE, "name", 1),
                lambda: setattr(MODULE, "name", 2),
                lambda: setattr(MODULE, "name", 1),
                lambda: vars(MODULE).pop("name", None) and None,
            ],
        ),
    ],
    "global_weakref_manager": [
        Case(
            _global("global_weakref_manager", _identical(REFERENT)),
            [*map(_in_globals, _weakrefs()), lambda: GLOBALS.update(name=1), GLOBALS.clear],
        )
    ],
    "globals_dict_manager": [
        Case(
            _global("dict_getitem_manager", 1),
            [
                lambda: GLOBALS.update(name=1),
                lambda: GLOBALS.update(name=2),
                lambda: GLOBALS.update(name=1, other=2),
                lambda: GLOBALS.update(other=GLOBALS.pop("name", 0)),
            ],
        )
    ],
    "get_key_manager": [Case(entry("get_key_manager", 1, "b"), ENTRIES)],
    "get_value_manager": [
        Case(entry("get_value_manager", position, value), ENTRIES)
        for position, value in ((0, 1), (1, 2))
    ],
    "framelocals_manager": [
        Case(child("type_manager", then=_identical(int)), const(1, 2, NotImplemented))
    ],
}
