"""The cases of test_guard_kinds: per kind of guard, trees of it and values to ask them for."""

from __future__ import annotations

import collections
import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

DEFAULT = torch._dynamo.guards.GuardManagerType.GUARD_MANAGER
DICT = torch._dynamo.guards.GuardManagerType.DICT_GUARD_MANAGER
State = Callable[[], Any]


class Raises:
    """Raises wherever Python code may run."""

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("on purpose")

    __eq__ = __len__ = __bool__ = __getitem__ = __iter__ = __call__ = _raise  # type: ignore
    __hash__ = __getattr__ = keys = _raise  # type: ignore[assignment]
    prop = property(_raise)


class Interrupts(Raises):
    def _raise(self, *_: Any) -> Any:
        raise KeyboardInterrupt

    __eq__ = __len__ = __bool__ = __getitem__ = __iter__ = __call__ = _raise  # type: ignore
    __hash__ = __getattr__ = keys = _raise  # type: ignore[assignment]
    prop = property(_raise)


class Box:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class IntLike(int):
    pass


class UserDict(dict):  # type: ignore[type-arg]
    pass


class Lengths:
    length = 2

    def __len__(self) -> int:
        if self.length < 0:
            raise ValueError("on purpose")
        return self.length


# Every guard gets these, too.
ODD: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "0": 0,
    "1": 1,
    "1.0": 1.0,
    "big": 1 << 80,
    "IntLike(1)": IntLike(1),
    "nan": float("nan"),
    "complex nan": complex(0, float("nan")),
    "'a'": "a",
    "b'a'": b"a",
    "()": (),
    "(1, 2)": (1, 2),
    "[]": [],
    "[1, 2]": [1, 2],
    "{}": {},
    "{'a': 1}": {"a": 1},
    "UserDict": UserDict(a=1),
    "OrderedDict": collections.OrderedDict(a=1),
    "proxy": types.MappingProxyType({"a": 1}),
    "{1}": {1},
    "frozenset": frozenset({1}),
    "tensor": torch.ones(2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "int": int,
    "function": lambda: 1,
    "method": collections.deque([1]).append,
    "weakref": weakref.ref(Box),
    "object": object(),
    "raises": Raises(),
    "interrupts": Interrupts(),
    "range": range(2),
    "tuple iterator": iter((1, 2)),
    "range iterator": iter(range(2)),
    "keys": torch._C._dispatch_keys(torch.ones(2)),
}


class Case(NamedTuple):
    """A tree, by what it adds to the manager of `x`, and states of `x` to ask it for.

    `dynamo_takes`: which odd values Dynamo's own guard survives (elsewhere another guard stands
    before it); the others are asked natively only, and must fail.
    """

    build: Callable[[Any, Any], Any]  # (the manager of x, the root)
    states: list[State]
    dynamo_takes: Callable[[Any], bool] = lambda value: True
    one_sided: bool = False  # no state passes, or none fails


def const(*values: Any) -> list[State]:
    return [lambda value=value: value for value in values]  # type: ignore[misc]


def changed(value: Any, *changes: Callable[[Any], Any]) -> list[State]:
    """The same object after each change."""

    def state(change: Callable[[Any], Any]) -> State:
        def get() -> Any:
            with contextlib.suppress(Exception):  # in another order than the one it was written for
                change(value)
            return value

        return get

    return [state(change) for change in changes]


def leaf(method: str, *args: Any) -> Callable[[Any, Any], Any]:
    return lambda manager, root: getattr(manager, method)(*args, ["text"], None)


def child(method: str, *key: Any, example: Any = None, then: Any = None) -> Any:
    """An accessor and one guard below it: a value that it must equal, or more to build."""

    def build(manager: Any, root: Any) -> Any:
        below = getattr(manager, method)(*key, "child", example, DEFAULT)
        if callable(then):
            return then(below, root)
        return below.add_equals_match_guard(then, ["text"], None)

    return build


def is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def has_keys(value: Any) -> bool:
    return isinstance(value, types.MappingProxyType | dict)


def is_iterable(value: Any) -> bool:
    with contextlib.suppress(BaseException):
        iter(value)
        return True
    return False


def is_type(value: Any) -> bool:
    return isinstance(value, type)


BOX, LIST, DICTIONARY, LENGTHS = Box(a=1), [1, 2], {"a": 1}, Lengths()
TENSOR = torch.ones(2, 3)
KEYS = torch._C._dispatch_keys(TENSOR)
ITERATOR, RANGE = type(iter(())), type(iter(range(0)))


def tensor_match(value: torch.Tensor, sizes: list[Any], strides: list[Any]) -> Any:
    keys = torch._C._dispatch_keys(value)
    return lambda manager, root: manager.add_tensor_match_guard(
        value, sizes, strides, "x", ["text"], None, type(value), keys
    )


Y = Box()  # what the local y is


def _related(root: Any, how: str) -> None:
    """`x` against `y`, and for tensors against `self` too."""
    both = [root.framelocals_manager((n, i), n, None, DEFAULT) for n, i in (("x", 1), ("y", 2))]
    if how == "object":
        torch._dynamo.guards.install_object_aliasing_guard(*both, ["x is y"], None)
    else:
        torch._dynamo.guards.install_no_tensor_aliasing_guard(
            both, ["x", "y"], ["no aliasing"], None
        )


def _after(iterator: Iterator[Any], n: int) -> Iterator[Any]:
    for _ in range(n):
        next(iterator, None)
    return iterator


def _marked(mark: Callable[..., Any], *dims: int) -> torch.Tensor:
    tensor = torch.ones(2, 2)
    for dim in dims:
        mark(tensor, dim)
    return tensor


def _marked_no_more() -> torch.Tensor:
    """The mark was taken back, but for the flag that says that there are some."""
    tensor = _marked(torch._dynamo.mark_dynamic, 0)
    del tensor._dynamo_dynamic_indices  # type: ignore[attr-defined]
    return tensor


LEAVES: dict[str, list[Case]] = {
    "TYPE_MATCH": [
        Case(
            leaf("add_type_match_guard", id(Box)),
            changed(
                Box(),
                lambda box: None,
                lambda box: setattr(box, "__class__", type("B", (Box,), {})),
                lambda box: setattr(box, "__class__", Box),
            ),
        ),
        Case(leaf("add_type_match_guard", id(int)), const(1, True, IntLike(1), 1.0)),
    ],
    "ID_MATCH": [Case(leaf("add_id_match_guard", id(BOX)), const(BOX, Box(a=1), None))],
    "NONE_MATCH": [Case(leaf("add_none_match_guard"), const(None, 0))],
    "NOT_NONE": [Case(leaf("add_not_none_guard"), const(None, 0, Raises()))],
    "TRUE_MATCH": [Case(leaf("add_true_match_guard"), const(True, False, 1))],
    "FALSE_MATCH": [Case(leaf("add_false_match_guard"), const(True, False, 0, None))],
    "EQUALS_MATCH": [
        Case(leaf("add_equals_match_guard", value), const(value, *others))
        for value, *others in (
            (1, 1.0, True, 2, IntLike(1)),
            ("relu", "".join(["re", "lu"]), "tanh", b"relu"),
            (1000, int("1000"), 1001),
            (0.0, -0.0, 0, False, float("nan")),
            (float("nan"), float("nan"), 1.0),
            ((1, ("a", 2.0)), (1, ("a", 2.0)), (1, ["a", 2.0]), (True, ("a", 2)), [1]),
            (torch.float32, torch.float64, None),
            (torch.Size([2]), torch.Size([3]), (2,)),
            (torch.device("cpu"), torch.device("meta"), "cpu"),
            (frozenset({1}), frozenset({2}), {1}),
            (slice(1, 2), slice(1, 3)),
            (range(2), range(3)),
        )
    ]
    + [
        Case(leaf("add_equals_match_guard", value), const(value, type(value)()))
        for value in (Raises(), Interrupts())
    ],
    "LENGTH_CHECK": [
        Case(
            leaf("add_length_check_guard", 2),
            [
                *const((1, 2), (1,), "ab", torch.ones(2), torch.ones(3), torch.ones(())),
                *changed(LIST, lambda v: v.append(3), lambda v: v.pop()),
                *changed(
                    LENGTHS,
                    lambda v: setattr(v, "length", -1),
                    lambda v: setattr(v, "length", 2),
                    lambda v: setattr(v, "length", 3),
                ),
            ],
        ),
        Case(leaf("add_length_check_guard", 0), const((), [], "", [1], {})),
    ],
    "DICT_LENGTH": [
        Case(
            leaf("add_dict_length_check_guard", 1),
            changed(
                DICTIONARY,
                lambda d: None,
                lambda d: d.update(b=1),
                lambda d: d.pop("b"),
                dict.clear,
                lambda d: d.update(a=1),
            ),
        )
    ],
    "DICT_CONTAINS": [
        Case(
            leaf("add_dict_contains_guard", contains, "a"),
            [
                *changed(
                    DICTIONARY,
                    lambda d: d.pop("a", 0),
                    lambda d: d.update(a=1),
                    lambda d: d.update(a=2),
                ),
                *const({}, {"b": 1}),
            ],
        )
        for contains in (True, False)
    ]
    + [
        Case(leaf("add_dict_contains_guard", True, 1), const({1.0: 0}, {True: 0}, {2: 0})),
        Case(leaf("add_dict_contains_guard", False, (1, "a")), const({(1, "a"): 0}, {})),
    ],
    "SET_CONTAINS": [
        Case(
            leaf("add_set_contains_guard", contains, 1),
            [
                *changed({1}, lambda s: s.add(1), lambda s: s.discard(1)),
                *const(frozenset({1}), frozenset({2}), {1.0}, {True}),
            ],
        )
        for contains in (True, False)
    ],
    "MAPPING_KEYS_MATCH": [
        Case(
            leaf("add_mapping_keys_guard", types.MappingProxyType({"a": 1, "b": 2})),
            const(
                *map(types.MappingProxyType, ({"a": 3, "b": 4}, {"b": 2, "a": 1}, {"a": 1}, {})),
                {"a": 1, "b": 2},
                UserDict(a=1, b=2),
            ),
            has_keys,
        )
    ],
    "NO_HASATTR": [
        Case(
            leaf("add_no_hasattr_guard", name),
            changed(
                Box(),
                lambda box: box.__dict__.update(a=1, z=1),
                lambda box: box.__dict__.pop("z"),
                lambda box: setattr(Box, "z", property(lambda self: self.missing)),
                lambda box: setattr(Box, "z", 3),
                lambda box: delattr(Box, "z"),
            ),
        )
        for name in ("z",)
    ],
    "TUPLE_ITERATOR_LEN": [
        Case(
            leaf("add_tuple_iterator_length_guard", 2, id(ITERATOR)),
            [
                lambda: iter((1, 2)),
                lambda: iter((1, 2, 3)),
                lambda: iter(()),
                lambda: _after(iter((0, 1, 2)), 1),
                lambda: _after(iter((1, 2)), 3),
            ],
        )
    ],
    "RANGE_ITERATOR_MATCH": [
        Case(
            leaf("add_range_iterator_match_guard", 1, 7, 2, id(RANGE)),
            [
                *(
                    lambda bounds=bounds: iter(range(*bounds))
                    for bounds in ((1, 7, 2), (1, 6, 2), (1, 7, 1), (2, 8, 2), (1, 1 << 70, 2))
                ),
                lambda: _after(iter(range(-1, 7, 2)), 1),
                lambda: _after(iter(range(1, 7, 2)), 9),
            ],
        )
    ],
    "FLOAT_IS_NAN": [Case(leaf("add_float_is_nan_guard"), const(float("nan"), 1.0, torch.nan))],
    "COMPLEX_IS_NAN": [
        Case(
            leaf("add_complex_is_nan_guard"),
            const(1j, complex(float("nan"), 0), complex(0, float("nan")), float("nan")),
        )
    ],
    "DICT_VERSION": [
        Case(
            lambda manager, root: manager.add_dict_version_guard(DICTIONARY, ["text"], None),
            [
                *const(DICTIONARY, dict(DICTIONARY)),
                *changed(DICTIONARY, lambda d: d.update(a=d["a"]), lambda d: d.update(a=5)),
            ],
            is_dict,
        )
    ],
    "DISPATCH_KEY_SET_MATCH": [
        Case(
            leaf("add_dispatch_key_set_guard", KEYS),
            const(
                KEYS,
                torch._C._dispatch_keys(torch.ones(1)),
                torch._C._dispatch_keys(torch.ones(1).to_sparse()),
            ),
        )
    ],
    "TENSOR_MATCH": [
        Case(
            tensor_match(TENSOR, *shape),
            [
                *const(
                    torch.zeros(2, 3),
                    torch.zeros(3, 2),
                    torch.zeros(3, 2).t(),
                    torch.zeros(2, 4),
                    torch.zeros(2, 3, 1),
                    torch.zeros(2, 3, dtype=torch.float64),
                    torch.zeros(2, 3, requires_grad=True),
                    torch.zeros(2, 3).to("meta"),
                    torch.nn.Parameter(TENSOR),
                    torch.zeros(2, 3).to_sparse(),
                    torch.zeros(2, 3).to_sparse_csr(),
                    torch.zeros(2, 6)[:, ::2],
                    torch.zeros(2, 3, dtype=torch.complex64).conj(),
                    torch._neg_view(torch.zeros(2, 3)),
                ),
                *changed(
                    torch.ones(2, 3),
                    lambda t: None,
                    lambda t: t.requires_grad_(True),
                    lambda t: t.requires_grad_(False),
                    lambda t: t.t_(),
                    lambda t: t.t_(),
                    lambda t: setattr(t, "data", torch.ones(2, 3, dtype=torch.float64)),
                    lambda t: setattr(t, "data", torch.ones(2, 3)),
                ),
            ],
        )
        for shape in (
            ([], []),
            ([2, 3], [3, 1]),
            ([None, 3], [None, 1]),
            ([None, None], [None, None]),
        )
    ]
    + [
        Case(
            tensor_match(torch.nn.Parameter(TENSOR), [], []),
            const(TENSOR, torch.nn.Parameter(TENSOR)),
        )
    ],
    "LAMBDA_GUARD": [
        Case(
            lambda manager, root, fn=fn: manager.add_lambda_guard(fn, ["text"], None),
            const(1, 2),
            one_sided=number > 0,
        )
        for number, fn in enumerate(
            (lambda x: x == 1, lambda x: x.a == 1, lambda x: [], lambda x: 1 / 0)
        )
    ],
    "DIMENSION_DYNAMIC_MARKING_GUARD": [
        Case(
            lambda manager, root, marks=marks: manager.add_dimension_marking_guard(
                *marks, ["text"], None
            ),
            [
                lambda: torch.ones(2),
                *(
                    lambda dims=dims: _marked(torch._dynamo.mark_dynamic, *dims)  # type: ignore
                    for dims in ((0,), (1,), (0, 1))
                ),
                lambda: _marked(torch._dynamo.mark_static, 0),
                lambda: _marked(torch._dynamo.maybe_mark_dynamic, 0),
                _marked_no_more,
            ],
        )
        for marks in (
            ({}, ["_dynamo_dynamic_indices"], {}),
            ({}, ["_dynamo_dynamic_indices", "_dynamo_static_indices"], {}),
            ({"_dynamo_dynamic_indices": {0}}, [], {}),
        )
    ],
    "FAKE_SCRIPT_TYPE_MATCH": [
        Case(leaf("add_fake_script_type_match_guard", Lengths, id(Box)), const(BOX, 1))
    ],
    "OBJECT_ALIASING": [
        Case(lambda manager, root: _related(root, "object"), const(Y, Box(), None, 1)),
    ],
    "NO_TENSOR_ALIASING": [
        Case(lambda manager, root: _related(root, "tensors"), const(Y, Box(), None, 1)),
    ],
}
