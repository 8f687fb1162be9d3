"""Random frames whose guards look at many kinds of objects, for the differential test of guards.

A world is one frame (a function or a module's ``forward``) made of parts. A part is a value, put at
a random place (an argument, a global, a cell, an attribute, an item of a container), and lines of
code that use it. A world depends on its seed only.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import linecache
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from trident.capture import dynamo


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Plain:
    """Attributes of any kind, and one of the class."""

    level = 3

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def method(self, x: Any) -> Any:
        return x + self.level


class Other(Plain):
    level = 3


class Derived(Plain):
    @property
    def twice(self) -> Any:
        return self.base * 2


class Dynamic:
    def __init__(self, **fields: Any) -> None:
        self.__dict__["fields"] = fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None


class Slotted:
    __slots__ = ("__weakref__", "a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    name: str = "relu"
    sizes: tuple[int, ...] = (2, 3)
    nested: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0
    count: int = 3


Pair = collections.namedtuple("Pair", ["first", "second"])


class UserDict(dict):  # type: ignore[type-arg]
    pass


class UserList(list):  # type: ignore[type-arg]
    pass


class UserTensor(torch.Tensor):
    pass


class Scale(torch.nn.Module):
    factor = 1

    def __init__(self, value: float = 2.0, size: int = 4) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((size,), value))
        self.register_buffer("offset", torch.ones(size))
        self.register_buffer("absent", None)
        self.power = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight + self.offset * self.factor
        return y if self.training else y * self.power


class Scaled(Scale):
    pass


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = Scale(), True
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * self.config.scale if self.gate else y


class Double(torch.nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


# Whose attributes may be changed.
CLASSES: tuple[type, ...] = (Plain, Other, Derived, Slotted, Config, Scale, Scaled, Block)


def helper(rng: random.Random) -> Any:
    """A new function with defaults, keyword defaults and a cell."""
    depth = rng.choice([2, 3])

    def scaled(x: Any, by: Any = 2, shift: Any = (1, 2), *, power: Any = 1) -> Any:
        return x * by * power + shift[0] * depth

    return scaled


def other_helper() -> Any:
    depth = 5

    def scaled(x: Any, by: Any = 2, shift: Any = (1, 2), *, power: Any = 1) -> Any:
        return x - by * power + shift[0] * depth

    return scaled


# Per part: how its value is made, and lines that use it as {e}.
Part = tuple[Callable[[random.Random], Any], str]
PARTS: dict[str, Part] = {
    "int": (lambda rng: rng.choice([0, 1, 3, 1000]), "x = x + {e}"),
    "float": (lambda rng: rng.choice([0.5, 2.0]), "x = x * {e}"),
    "nan": (lambda rng: float("nan"), "x = x if {e} != {e} else x + 1"),
    "complex": (lambda rng: 1 + 2j, "x = x + 1 if {e} == 1 + 2j else x"),
    "str": (lambda rng: "relu", "x = torch.relu(x) if {e} == 'relu' else x - 1"),
    "bytes": (lambda rng: b"ab", "x = x + len({e})"),
    "bool": (lambda rng: rng.random() < 0.5, "x = x + 1 if {e} else x - 1"),
    "none": (lambda rng: None, "x = x + 1 if {e} is None else x"),
    "optional": (
        lambda rng: rng.choice([None, torch.ones(4)]),
        "x = x + 1 if {e} is None else x + {e}",
    ),
    "enum": (lambda rng: Color.RED, "x = x + 1 if {e} is Color.RED else x"),
    "enum_value": (lambda rng: Color.BLUE, "x = x + {e}.value"),
    "dtype": (lambda rng: torch.float32, "x = x + torch.ones(4, dtype={e})"),
    "device": (lambda rng: torch.device("cpu"), "x = x + torch.ones(4, device={e})"),
    "size": (lambda rng: torch.Size([4]), "x = x + torch.ones({e})"),
    "tuple": (lambda rng: (1, "a", (2.5, None)), "x = x + {e}[0] + {e}[2][0] * len({e})"),
    "namedtuple": (lambda rng: Pair(2, 3.0), "x = x * {e}.first + {e}.second"),
    "range": (lambda rng: range(1, 4), "for i in {e}:\n    x = x + i"),
    "slice": (lambda rng: slice(0, 4), "x = x[{e}]"),
    "list": (lambda rng: [1, 2.5, 3], "for v in {e}:\n    x = x + v"),
    "list_item": (lambda rng: [1, [2, 3]], "x = x + {e}[1][0]"),
    "user_list": (lambda rng: UserList([1, 2]), "x = x + {e}[0] + len({e})"),
    "deque": (lambda rng: collections.deque([1, 2]), "for v in {e}:\n    x = x + v"),
    "dict": (lambda rng: {"a": 1, "b": 2.5}, "for k, v in {e}.items():\n    x = x + v + len(k)"),
    "dict_item": (lambda rng: {"a": 1, "b": {"c": 3}}, "x = x + {e}['b']['c']"),
    "dict_int_keys": (lambda rng: {1: 2, (3, 4): 5}, "x = x + {e}[1] + {e}[(3, 4)]"),
    "dict_in": (lambda rng: {"a": 1}, "x = x + 1 if 'b' in {e} else x + {e}.get('a', 7)"),
    "dict_keys": (lambda rng: {"a": 1, "b": 2}, "x = x + len(list({e}.keys()))"),
    "empty_dict": (lambda rng: {}, "x = x if {e} else x + 1"),
    "ordered_dict": (
        lambda rng: collections.OrderedDict(a=1, b=2),
        "for k, v in {e}.items():\n    x = x * v",
    ),
    "default_dict": (lambda rng: collections.defaultdict(int, a=1), "x = x + {e}['a']"),
    "user_dict": (lambda rng: UserDict(a=1, b=2), "x = x + {e}['a'] + len({e})"),
    "mapping_proxy": (lambda rng: types.MappingProxyType({"a": 2}), "x = x * {e}['a']"),
    "set": (lambda rng: {1, "b"}, "x = x + 1 if 1 in {e} else x"),
    "set_len": (lambda rng: {1, 2}, "x = x + len({e})"),
    "frozenset": (lambda rng: frozenset({1, 2}), "x = x + 1 if 2 in {e} else x"),
    "tensor": (
        lambda rng: torch.ones(4, requires_grad=rng.random() < 0.3),
        "x = x + {e}",
    ),
    "tensor_grad": (
        lambda rng: torch.ones(4, requires_grad=True),
        "x = x + {e} if {e}.grad is None else x",
    ),
    "tensor_size": (lambda rng: torch.ones(3, 4), "x = x + {e}[0] * {e}.size(0)"),
    "tensor_class": (lambda rng: torch.ones(4).as_subclass(UserTensor), "x = x + {e}"),
    "parameter": (lambda rng: torch.nn.Parameter(torch.ones(4)), "x = x * {e}"),
    "tensor_list": (lambda rng: [torch.ones(4), torch.zeros(4)], "for t in {e}:\n    x = x + t"),
    "tensor_dict": (
        lambda rng: {"a": torch.ones(4), "b": torch.zeros(4)},
        "for t in {e}.values():\n    x = x + t",
    ),
    "plain": (
        lambda rng: Plain(scale=2.0, inner=Plain(bias=1, flag=True)),
        "x = x * {e}.scale + {e}.inner.bias if {e}.inner.flag else x",
    ),
    "class_attribute": (lambda rng: Plain(a=1), "x = x + {e}.level + {e}.a"),
    "method": (lambda rng: Other(a=1), "x = {e}.method(x)"),
    "bound_method": (lambda rng: Plain(a=1).method, "x = {e}(x)"),
    "property": (lambda rng: Derived(base=2), "x = x + {e}.twice"),
    "getattr": (lambda rng: Dynamic(a=1, b=2), "x = x + {e}.a"),
    "hasattr": (lambda rng: Plain(a=1), "x = x + 1 if hasattr({e}, 'extra') else x + {e}.a"),
    "type": (lambda rng: Plain(a=1), "x = x + 1 if type({e}) is Plain else x"),
    "isinstance": (lambda rng: Other(a=1), "x = x + 1 if isinstance({e}, Plain) else x"),
    "slots": (lambda rng: Slotted(1, "b"), "x = x + {e}.a + len({e}.b)"),
    "dataclass": (
        lambda rng: Config(nested=Config()),
        "x = torch.relu(x * {e}.scale) if {e}.nested.name == 'relu' else x + {e}.sizes[0]",
    ),
    "frozen": (lambda rng: Frozen(), "x = x * {e}.scale + {e}.count"),
    "class": (lambda rng: Plain, "x = x + {e}.level"),
    "function": (helper, "x = {e}(x)"),
    "partial": (lambda rng: functools.partial(helper(rng), by=3), "x = {e}(x)"),
    "weakref": (lambda rng: weakref.ref(_kept(Plain(a=1))), "x = x + {e}().a"),
    "weakref_tensor": (lambda rng: weakref.ref(_kept(torch.ones(4))), "x = x + {e}()"),
    "module": (lambda rng: Scale(), "x = {e}(x)"),
    "frozen_module": (lambda rng: Scale().requires_grad_(False).eval(), "x = {e}(x)"),
    "block": (lambda rng: Block(), "x = {e}(x)"),
    "linear": (lambda rng: torch.nn.Linear(4, 4), "x = {e}(x)"),
    "sequential": (
        lambda rng: torch.nn.Sequential(Scale(), torch.nn.ReLU(), Scale(3.0)),
        "x = {e}(x)",
    ),
    "module_list": (
        lambda rng: torch.nn.ModuleList(Scale() for _ in range(2)),
        "for m in {e}:\n    x = m(x)",
    ),
    "module_dict": (
        lambda rng: torch.nn.ModuleDict({"a": Scale(), "b": Block()}),
        "for k, m in {e}.items():\n    x = m(x)",
    ),
    "module_attributes": (
        lambda rng: Scale(),
        "x = x + {e}.weight * {e}.power if {e}.training else x + {e}.offset",
    ),
    "parameters": (lambda rng: Scale(), "for p in {e}.parameters():\n    x = x + p"),
    "hooks": (lambda rng: Scale(), "x = x + len({e}._forward_hooks) + 1"),
    "tuple_iterator": (lambda rng: iter((1, 2.5, 3)), "for v in {e}:\n    x = x + v"),
    "range_iterator": (lambda rng: iter(range(1, 4)), "for v in {e}:\n    x = x + v"),
    "grad_mode": (lambda rng: 1, "x = x + {e} if torch.is_grad_enabled() else x"),
    "global_len": (lambda rng: (1, 2), "x = x + len({e}) + max({e})"),
}
ITERATORS = ("tuple_iterator", "range_iterator")
# Alone in having guards of their kind: taken more often than the others.
RARE = (
    "set",
    "frozenset",
    "weakref",
    "tensor_grad",
    "deque",
    "mapping_proxy",
    "module_list",
    "nan",
)
_kept_alive: collections.deque[Any] = collections.deque(maxlen=2_000)


def _kept(value: Any) -> Any:
    """`value`, kept alive for as long as any world lasts: only weak references lead to it."""
    _kept_alive.append(value)
    return value


PLACES = ("argument", "keyword", "global", "cell", "attribute", "item", "own")


class Binding:
    """One way to call the frame: its arguments by name, with `self` where it has one."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args


class World:
    """A frame, ways to call it, and the objects it looks at."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.names = [rng.choice([*PARTS, *RARE * 2]) for _ in range(rng.randint(2, 5))]
        self.is_module = rng.random() < 0.45
        self.backend = rng.choice(["eager", "eager", "eager", "trident"])
        self.globals: dict[str, Any] = {"__name__": "tests.guard_worlds", "torch": torch}
        self.globals.update(Color=Color, Plain=Plain)
        self.cells: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.arguments: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.lines: list[str] = []
        self.guarded: set[Any] = set()  # attributes and keys that guards look at
        for number, name in enumerate(self.names):
            self._add(number, name)
        self._break_graph(random.Random(~seed))
        self.frame = self._define(seed)
        self.code: types.CodeType = self.frame.__code__
        self.compiled = torch.compile(self.frame, backend=self.backend)
        self.through_module = rng.random() < 0.3
        self.kind: type | None = self._class() if self.is_module else None
        self.bindings = [self._binding() for _ in range(rng.choice([1, 1, 2]))]

    def _add(self, number: int, name: str) -> None:
        make, lines = PARTS[name]
        value, label = make(self.rng), f"p{number}"
        place = self.rng.choice(PLACES)
        if name in ITERATORS:
            place = "argument"
        if place == "own" and not self.is_module:
            place = "argument"
        expression = label
        if place == "attribute":
            self.arguments[label], expression = Plain(value=value, spare=1), f"{label}.value"
        elif place == "item":
            holder: Any = self.rng.choice(["list", "dict", "tuple"])
            made = {"list": [0, value], "dict": {0: 0, 1: value}, "tuple": (0, value)}
            self.arguments[label], expression = made[holder], f"{label}[1]"
        elif place == "own":
            self.own[label], expression = value, f"self.{label}"
        elif place == "keyword":
            self.defaults[label] = value
        else:
            target = {"global": self.globals, "cell": self.cells, "argument": self.arguments}
            target[place][label] = value
        self.lines += lines.replace("{e}", expression).split("\n")

    def _break_graph(self, rng: random.Random) -> None:
        """In one world of four: what comes after is a frame of its own, whose hits are checked as
        Trident is strict."""
        continued = (" ", "else", "elif", "except", "finally")
        places = [n for n, line in enumerate(self.lines) if n and not line.startswith(continued)]
        if places and rng.random() < 0.25:
            self.lines.insert(rng.choice(places), "torch._dynamo.graph_break()")

    def _define(self, seed: int) -> types.FunctionType:
        arguments = ["self"] * self.is_module + ["x", *self.arguments]
        keywords = [f"{name}=_default_{name}" for name in self.defaults]
        signature = ", ".join([*arguments, *(["*", *keywords] if keywords else [])])
        if keywords and self.rng.random() < 0.5:
            signature = ", ".join([*arguments, *keywords])
        source = [f"def make({', '.join(self.cells)}):", f"    def frame({signature}):"]
        source += [f"        {line}" for line in [*self.lines, "return x"]]
        source.append("    return frame")
        file = f"<guard world {seed}>"
        text = "\n".join(source) + "\n"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        scope = self.globals
        scope.update({f"_default_{name}": value for name, value in self.defaults.items()})
        exec(compile(text, file, "exec"), scope)
        frame: types.FunctionType = scope.pop("make")(*self.cells.values())
        for name in self.defaults:
            del scope[f"_default_{name}"]
        return frame

    def _class(self) -> type:
        return type("Framed", (torch.nn.Module,), {"forward": self.frame, "level": 1})

    def _binding(self) -> Binding:
        args: dict[str, Any] = {}
        if self.kind is not None:
            owner = self.kind()
            for name, value in self.own.items():
                setattr(owner, name, value)
            args["self"] = owner
        args["x"] = torch.ones(4, requires_grad=self.rng.random() < 0.1)
        return Binding({**args, **self.arguments})

    def f_locals(self, binding: Binding) -> dict[str, Any] | None:
        """What the frame's locals are when it starts, or None if it cannot be called so."""
        try:
            bound = inspect.signature(self.frame).bind(**binding.args)
        except TypeError:
            return None
        bound.apply_defaults()
        found = dict(bound.arguments)
        for name, cell in zip(self.code.co_freevars, self.frame.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:
                continue
        return found

    def call(self, binding: Binding) -> Any:
        """Calls the compiled frame (Dynamo keeps what it compiled by its code)."""
        args = dict(binding.args)
        owner = args.get("self")
        if self.through_module and isinstance(owner, torch.nn.Module):
            del args["self"]
            return torch.compile(owner, backend=self.backend)(**args)
        return self.compiled(**args)

    def names_of_locals(self) -> tuple[str, ...]:
        return dynamo.framelocals(self.code)

    def source(self) -> str:
        return "".join(linecache.cache[self.code.co_filename][2])  # type: ignore[misc]
