"""Changes to the objects of a guard world, each with its undo, for the differential test of guards.

A mutation is registered by the decorator above it, with what it applies to. It takes ``(rng, world,
target)`` and returns a function that undoes it; undone last first, the world is as it was, with the
very same objects in the same order. It may raise; then it has done nothing that matters.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import gc
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tests import guard_worlds as worlds
from tests.guard_worlds import World

Undo = Callable[[], Any]
Mutation = Callable[[random.Random, World, Any], Undo]
Accepts = Callable[[Any], bool]


class Rule(NamedTuple):
    accepts: Accepts
    apply: Mutation


RULES: dict[str, Rule] = {}


class Slot(NamedTuple):
    """A place that holds a value: attribute, item or cell `key` of `holder`."""

    kind: str
    holder: Any
    key: Any

    def get(self) -> Any:
        if self.kind == "attribute":
            return self.holder.__dict__[self.key]
        if self.kind == "slot":
            return getattr(self.holder, self.key)
        return self.holder.cell_contents if self.kind == "cell" else self.holder[self.key]

    def set(self, value: Any) -> None:
        if self.kind in ("attribute", "slot"):
            setattr(self.holder, self.key, value)
        elif self.kind == "cell":
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class Env:
    """What surrounds the frame: the target of mutations of global and thread state."""


class Reached:
    """What a world's frame can reach: the targets of mutations."""

    def __init__(self, world: World | None) -> None:
        self.objects: list[Any] = []
        self.slots: list[Slot] = []
        self._seen: set[int] = set()
        if world is not None:
            self._visit_all(world)

    def _visit_all(self, world: World) -> None:
        for binding in world.bindings:
            self._visit(binding.args)
        self._items(world.globals, [n for n in world.globals if n[0] == "p" and n[1:].isdigit()])
        self._function(world.frame)
        kinds = {type(o): None for o in self.objects if type(o) in worlds.CLASSES}
        self.objects += [Env(), *(kinds or worlds.CLASSES)]

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (type, types.ModuleType)):
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            self.objects.append(value)
            self._items(value, list(dict.keys(value)))
        elif isinstance(value, list):
            self.objects.append(value)
            self._items(value, range(len(value)))
        elif isinstance(value, tuple):
            for item in value:
                self._visit(item)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, functools.partial):
            self._visit(value.func)
            self._visit(value.keywords)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__)
        elif isinstance(value, types.MappingProxyType | range | slice | enum.Enum):
            return
        elif not isinstance(value, int | float | str | bytes | complex | None):
            self._object(value)

    def _object(self, value: Any) -> None:
        self.objects.append(value)
        if isinstance(value, worlds.Slotted):
            for name in ("a", "b"):
                if hasattr(value, name):
                    self._slot(Slot("slot", value, name))
        elif not isinstance(value, torch.Tensor) and type(getattr(value, "__dict__", None)) is dict:
            for name in list(vars(value)):
                self._slot(Slot("attribute", value, name))

    def _function(self, value: Any) -> None:
        self._seen.add(id(value))
        self.objects.append(value)
        for cell in value.__closure__ or ():
            self._slot(Slot("cell", cell, None))
        self._visit(value.__kwdefaults__ or {})

    def _items(self, holder: Any, keys: Any) -> None:
        for key in keys:
            self._slot(Slot("item", holder, key))

    def _slot(self, slot: Slot) -> None:
        self.slots.append(slot)
        with contextlib.suppress(Exception):
            self._visit(slot.get())


def mutation(accepts: Accepts) -> Callable[[Mutation], Mutation]:
    """Registers a mutation of the targets that `accepts` says."""

    def add(function: Mutation) -> Mutation:
        assert function.__name__ not in RULES, function.__name__
        RULES[function.__name__] = Rule(accepts, function)
        return function

    return add


def of(*kinds: Any) -> Accepts:
    return lambda target: isinstance(target, kinds)


def candidates(reached: Reached, rule: Rule) -> list[Any]:
    return [t for t in (*reached.objects, *reached.slots) if accepted(rule, t)]


def accepted(rule: Rule, target: Any) -> bool:
    """Objects whose classes were changed may raise at any question."""
    try:
        return rule.accepts(target)
    except Exception:
        return False


# Other values.


def other(rng: random.Random, value: Any) -> Any:
    """A value to put in place of `value`: of the same kind, nearly the same, or of another."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice([None, 0, 1, True, 1.0, "relu", (), [], {}, torch.ones(4)])
    if isinstance(value, bool):
        return rng.choice([not value, int(value), float(value)])
    if isinstance(value, int):
        return rng.choice([value + 1, bool(value), float(value), -value, 1 << 70])
    if isinstance(value, float):
        return rng.choice([value * 2, int(value) if value == value else 0, float("nan"), -value])
    if isinstance(value, str | bytes):
        return rng.choice([value + value[:1], value.swapcase(), value[:1]])
    if isinstance(value, torch.Tensor):
        return other_tensor(rng, value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return rng.choice([value[:-1], value + value[:1], value[::-1], [*value], (*value,)])
    if isinstance(value, dict | set | frozenset) and rng.random() < 0.5:
        return type(value)() if rng.random() < 0.5 else copy.copy(value)
    if type(value) is types.FunctionType:
        return rng.choice([worlds.other_helper(), worlds.helper(rng)])
    if isinstance(value, types.MethodType):
        return rng.choice([worlds.Plain().method, worlds.Other().method, value.__func__])
    return fresh(rng, value)


def fresh(rng: random.Random, value: Any) -> Any:
    """A copy of `value`, or an object like it."""
    choice = rng.randrange(5)
    if choice == 0:
        return copy.deepcopy(value)
    if choice == 1:
        return copy.copy(value)
    if choice == 2 and isinstance(value, torch.nn.Module):
        return worlds.Scaled() if rng.random() < 0.5 else worlds.Block()
    alike = [part for part in worlds.PARTS.values() if part[1].find("{e}") >= 0]
    made = rng.choice(alike)[0](rng)
    return made if choice == 3 else type(value)() if rng.random() < 0.3 else copy.copy(value)


def equal(rng: random.Random, value: Any) -> Any:
    """An object equal to `value`, but another one where there can be one."""
    if isinstance(value, str):
        return "".join(list(value))
    if type(value) is int:
        return rng.choice([int(str(value)), float(value)]) if abs(value) < 1 << 60 else value
    if type(value) is float:
        return float(str(value))
    return copy.copy(value)


def other_tensor(rng: random.Random, value: torch.Tensor) -> Any:
    value = value.detach()
    return rng.choice(
        [
            lambda: value.clone(),
            lambda: value.double(),
            lambda: torch.cat([value, value]),
            lambda: value.clone().requires_grad_(),
            lambda: value.repeat_interleave(2, -1)[..., ::2],
            lambda: value.clone().unsqueeze(0),
            lambda: torch.nn.Parameter(value.clone()),
            lambda: torch.nn.Parameter(value.clone(), requires_grad=False),
            lambda: torch.nn.Buffer(value.clone()),
            lambda: value.clone().as_subclass(worlds.UserTensor),
            lambda: value.to("meta"),
            lambda: value.to_sparse(),
            lambda: value.to(torch.complex64).conj(),
            lambda: torch.ones(1),
            lambda: torch.zeros(0),
            lambda: 3,
        ]
    )()


# Slots: attributes, items, cells.


def _settable(target: Any) -> bool:
    return isinstance(target, Slot)


def _restores(slot: Slot) -> Undo:
    """Puts the slot's present value back, in its present place."""
    holder = slot.holder
    if slot.kind == "attribute":
        return _restores_vars(holder)
    # Among globals is what Dynamo puts there: only the slot's own is ours to restore.
    if isinstance(holder, dict) and "__builtins__" not in holder:
        return _restores_dict(holder)
    value = slot.get()
    return lambda: slot.set(value)


def _restores_dict(d: dict[Any, Any]) -> Undo:
    items = list(dict.items(d))

    def undo() -> None:
        if list(map(id, dict.keys(d))) != [id(key) for key, _ in items]:
            dict.clear(d) if type(d) is dict else d.clear()
        for key, value in items:
            if key not in d or dict.__getitem__(d, key) is not value:
                d[key] = value

    return undo


def _restores_vars(o: Any) -> Undo:
    d = o.__dict__
    restore = _restores_dict(d)

    def undo() -> None:
        if o.__dict__ is not d:
            object.__setattr__(o, "__dict__", d)
        restore()

    return undo


def _put(slot: Slot, value: Any) -> Undo:
    undo = _restores(slot)
    try:
        slot.set(value)
    except BaseException:
        undo()
        raise
    return undo


@mutation(_settable)
def set_other(rng: random.Random, world: World, slot: Slot) -> Undo:
    return _put(slot, other(rng, slot.get()))


@mutation(_settable)
def set_and_set_back(rng: random.Random, world: World, slot: Slot) -> Undo:
    """By the plain assignment, which changes nothing else."""
    value = slot.get()
    slot.set(other(rng, value))
    return lambda: slot.set(value)


@mutation(_settable)
def set_same(rng: random.Random, world: World, slot: Slot) -> Undo:
    return _put(slot, slot.get())


@mutation(_settable)
def set_equal(rng: random.Random, world: World, slot: Slot) -> Undo:
    return _put(slot, equal(rng, slot.get()))


@mutation(_settable)
def set_copy(rng: random.Random, world: World, slot: Slot) -> Undo:
    value = slot.get()
    return _put(slot, copy.deepcopy(value) if rng.random() < 0.5 else copy.copy(value))


@mutation(_settable)
def set_none(rng: random.Random, world: World, slot: Slot) -> Undo:
    return _put(slot, None)


@mutation(_settable)
def set_what_another_slot_has(rng: random.Random, world: World, slot: Slot) -> Undo:
    """Aliases: two ways lead to one object."""
    slots = [s for s in Reached(world).slots if s.holder is not slot.holder]
    value = slot.get()
    alike = [s for s in slots if type(_value(s)) is type(value)]
    new = _value(rng.choice(alike or slots))
    if _reaches(new, slot.holder):
        raise ValueError("a cycle, in which Dynamo runs forever")
    return _put(slot, new)


def _reaches(value: Any, holder: Any) -> bool:
    reached = Reached(None)
    reached._visit(value)
    return any(found is holder for found in (value, *reached.objects))


def _value(slot: Slot) -> Any:
    with contextlib.suppress(Exception):
        return slot.get()


@mutation(lambda t: isinstance(t, Slot) and t.kind in ("attribute", "slot"))
def delete_attribute(rng: random.Random, world: World, slot: Slot) -> Undo:
    undo = _restores(slot)
    delattr(slot.holder, slot.key)
    return undo


@mutation(lambda t: isinstance(t, Slot) and t.kind == "item")
def delete_item(rng: random.Random, world: World, slot: Slot) -> Undo:
    undo = _restores_list(slot.holder) if isinstance(slot.holder, list) else _restores(slot)
    del slot.holder[slot.key]
    return undo


@mutation(lambda t: isinstance(t, Slot) and t.kind == "cell")
def empty_cell(rng: random.Random, world: World, slot: Slot) -> Undo:
    undo = _restores(slot)
    del slot.holder.cell_contents
    return undo


def _twin_maker(value: Any) -> Callable[[], Any] | None:
    """Makes objects like `value` but with other contents, without keeping `value` alive."""
    kind = type(value)
    if kind is list:
        items = [*value, 1] if len(value) % 2 else value[:-1]
        return lambda: list(items)
    if kind is dict:
        entries = {**value, "extra": 1} if len(value) % 2 else dict(list(value.items())[:-1])
        return lambda: dict(entries)
    if kind is torch.Tensor and value.dim() == 1:
        return lambda: torch.ones(7)
    if isinstance(value, worlds.Plain | torch.nn.Module):
        state = {k: v if k[:1] == "_" else 3 for k, v in vars(value).items()}

        def make() -> Any:
            made = kind.__new__(kind)
            made.__dict__.update(state)
            return made

        return make
    return None


@mutation(lambda t: isinstance(t, Slot) and _twin_maker(_value(t)) is not None)
def reuse_address(rng: random.Random, world: World, slot: Slot) -> Undo:
    """The object dies, and another with other contents takes its address. No way back."""
    make, address = _twin_maker(slot.get()), id(slot.get())
    assert make is not None
    slot.set(None)
    gc.collect(0)
    made = []
    for _ in range(200):
        made.append(make())
        if id(made[-1]) == address:
            REUSED[0] += 1
            break
    slot.set(made[-1])
    return lambda: None


REUSED = [0]  # how often an address was really reused
FINAL = frozenset({"reuse_address"})  # what was done before must be undone first


# Lists.


def _restores_list(values: list[Any]) -> Undo:
    items = list(values)

    def undo() -> None:
        values[:] = items

    return undo


@mutation(of(list))
def list_append(rng: random.Random, world: World, values: list[Any]) -> Undo:
    values.append(other(rng, values[-1]) if values else 1)
    return lambda: values.pop()


@mutation(of(list))
def list_pop(rng: random.Random, world: World, values: list[Any]) -> Undo:
    undo = _restores_list(values)
    values.pop(rng.randrange(len(values)))
    return undo


@mutation(of(list))
def list_reorder(rng: random.Random, world: World, values: list[Any]) -> Undo:
    undo = _restores_list(values)
    rng.choice(
        [values.reverse, lambda: rng.shuffle(values), lambda: values.append(values.pop(0))]
    )()
    return undo


# Dicts, also modules' own and objects'.


@mutation(of(dict))
def dict_insert(rng: random.Random, world: World, d: dict[Any, Any]) -> Undo:
    undo = _restores_dict(d)
    d[rng.choice(["extra", "b", 7, (3, 4), 1.0, True, _guarded_name(rng, world)])] = rng.choice(
        [1, None, torch.ones(4)]
    )
    return undo


@mutation(of(dict))
def dict_pop_and_put_back(rng: random.Random, world: World, d: dict[Any, Any]) -> Undo:
    undo = _restores_dict(d)
    key = rng.choice(list(d))
    value = d.pop(key)
    d[key] = value
    return undo


@mutation(of(dict))
def dict_reverse(rng: random.Random, world: World, d: dict[Any, Any]) -> Undo:
    undo = _restores_dict(d)
    items = list(d.items())[::-1]
    d.clear()
    d.update(items)
    return undo


@mutation(of(dict))
def dict_rename_key(rng: random.Random, world: World, d: dict[Any, Any]) -> Undo:
    undo = _restores_dict(d)
    chosen = rng.choice(list(d))
    items = [(f"{k}_" if k == chosen else k, v) for k, v in d.items()]
    d.clear()
    d.update(items)
    return undo


@mutation(of(dict))
def dict_clear(rng: random.Random, world: World, d: dict[Any, Any]) -> Undo:
    undo = _restores_dict(d)
    d.clear()
    return undo


@mutation(of(dict))
def dict_swap_values(rng: random.Random, world: World, d: dict[Any, Any]) -> Undo:
    undo = _restores_dict(d)
    a, b = rng.sample(list(d), 2)
    d[a], d[b] = d[b], d[a]
    return undo


@mutation(of(dict))
def dict_set_all_same(rng: random.Random, world: World, d: dict[Any, Any]) -> Undo:
    d.update(dict(d))
    return lambda: None


@mutation(of(set))
def set_add(rng: random.Random, world: World, s: set[Any]) -> Undo:
    new = rng.choice([17, "z", 1])
    had = new in s
    s.add(new)
    return lambda: None if had else s.discard(new)


@mutation(of(set))
def set_discard(rng: random.Random, world: World, s: set[Any]) -> Undo:
    gone = rng.choice(sorted(s, key=str))
    s.discard(gone)
    return lambda: s.add(gone)


@mutation(of(collections.deque))
def deque_change(rng: random.Random, world: World, values: collections.deque[Any]) -> Undo:
    items = list(values)
    rng.choice([values.rotate, lambda: values.append(3), lambda: values.pop()])()

    def undo() -> None:
        values.clear()
        values.extend(items)

    return undo


@mutation(lambda t: hasattr(t, "__next__"))
def iterator_next(rng: random.Random, world: World, iterator: Iterator[Any]) -> Undo:
    next(iterator)
    return lambda: None


# Objects with a dict.


def _has_dict(target: Any) -> bool:
    return (
        isinstance(target, torch.nn.Module | worlds.Plain | worlds.Config | worlds.Dynamic)
        and type(target.__dict__) is dict
    )


@mutation(_has_dict)
def vars_update(rng: random.Random, world: World, o: Any) -> Undo:
    undo = _restores_vars(o)
    name = rng.choice(list(vars(o)))
    o.__dict__.update({name: other(rng, vars(o)[name])})
    return undo


@mutation(_has_dict)
def vars_replaced(rng: random.Random, world: World, o: Any) -> Undo:
    """By an equal dict, or by one that differs."""
    undo = _restores_vars(o)
    new = dict(vars(o))
    if rng.random() < 0.5:
        name = rng.choice(list(new))
        new[name] = other(rng, new[name])
    object.__setattr__(o, "__dict__", new)
    return undo


@mutation(_has_dict)
def vars_swapped_with_copy(rng: random.Random, world: World, o: Any) -> Undo:
    """The object keeps its dict; a shallow copy of it takes its place somewhere."""
    slots = [slot for slot in Reached(world).slots if _value(slot) is o]
    return _put(rng.choice(slots), copy.copy(o))


@mutation(_has_dict)
def vars_reordered(rng: random.Random, world: World, o: Any) -> Undo:
    undo = _restores_vars(o)
    items = list(vars(o).items())
    rng.shuffle(items)
    vars(o).clear()
    vars(o).update(items)
    return undo


@mutation(_has_dict)
def add_attribute(rng: random.Random, world: World, o: Any) -> Undo:
    undo = _restores_vars(o)
    names = ["extra", "forward", "level", "method", "factor", "twice", "unused", "__len__"]
    names.append(_guarded_name(rng, world))
    setattr(o, rng.choice(names), rng.choice([1, 3, lambda x: x]))
    return undo


@mutation(lambda t: _has_dict(t) or isinstance(t, worlds.Slotted))
def assign_class(rng: random.Random, world: World, o: Any) -> Undo:
    kind = type(o)
    new = rng.choice([k for k in (*worlds.CLASSES, kind) if k.__base__ is not object] + [kind])
    if rng.random() < 0.4:
        new = type(kind.__name__, (kind,), {"__slots__": ()} if kind is worlds.Slotted else {})
    o.__class__ = new
    return lambda: object.__setattr__(o, "__class__", kind)


# Classes.


def _class_names(kind: type) -> list[str]:
    return [
        n
        for n in ("level", "factor", "twice", "method", "forward", "scale", "name")
        if n in vars(kind)
    ]


def _restores_class(kind: type, name: str) -> Undo:
    if name in vars(kind):
        value = vars(kind)[name]
        return lambda: setattr(kind, name, value)
    return lambda: delattr(kind, name) if name in vars(kind) else None


@mutation(of(type))
def class_set(rng: random.Random, world: World, kind: type) -> Undo:
    name = rng.choice(_class_names(kind))
    undo = _restores_class(kind, name)
    value = vars(kind)[name]
    setattr(kind, name, rng.choice([other(rng, value), value, *_properties(name), 3]))
    return undo


@mutation(of(type))
def class_add(rng: random.Random, world: World, kind: type) -> Undo:
    name = rng.choice(["extra", "level", "unused", "weight", *[_guarded_name(rng, world)] * 6])
    undo = _restores_class(kind, name)
    setattr(kind, name, rng.choice([1, *_properties(name), lambda self, x: x]))
    return undo


def _properties(name: str) -> list[property]:
    """Data descriptors, which hide the instances' own attributes: another value, and the same."""
    return [property(lambda self: 3), property(lambda self: self.__dict__[name])]


def _guarded_name(rng: random.Random, world: World) -> str:
    names = sorted(key for key in world.guarded if type(key) is str and key.isidentifier())
    return rng.choice([n for n in names if n[:2] != "__"] or ["extra"])


def _raises(*_: Any) -> Any:
    raise ValueError("on purpose")


@mutation(of(type))
def class_special(rng: random.Random, world: World, kind: type) -> Undo:
    """A special method appears: also one that raises."""
    name = rng.choice(
        ["__getattr__", "__eq__", "__len__", "__bool__", "__hash__", "__getattribute__"]
    )
    if name in vars(kind):
        raise ValueError(name)
    undo = _restores_class(kind, name)
    answers = [_raises, lambda self, *_: 1, lambda self, *_: True]
    setattr(
        kind,
        name,
        object.__getattribute__
        if name[2:6] == "geta" and rng.random() < 0.5
        else rng.choice(answers),
    )
    return undo


@mutation(of(type))
def class_delete(rng: random.Random, world: World, kind: type) -> Undo:
    name = rng.choice(_class_names(kind))
    undo = _restores_class(kind, name)
    delattr(kind, name)
    return undo


@mutation(lambda t: t is worlds.Other or t is worlds.Derived or t is worlds.Scaled)
def class_bases(rng: random.Random, world: World, kind: type) -> Undo:
    """Another class between it and its bases, which may hide what they have."""
    bases = kind.__bases__
    hiding = {"method": lambda self, x: x, "level": 9, "factor": 9}
    between = type("Between", bases, rng.choice([{}, hiding]))
    kind.__bases__ = (between,)
    return lambda: setattr(kind, "__bases__", bases)


# Functions.


@mutation(of(types.FunctionType))
def function_defaults(rng: random.Random, world: World, f: types.FunctionType) -> Undo:
    defaults = f.__defaults__
    new = defaults and rng.choice(
        [defaults[::-1], (*defaults[:-1], (5, 6)), (*list(defaults),), None]
    )
    f.__defaults__ = new
    return lambda: setattr(f, "__defaults__", defaults)


@mutation(of(types.FunctionType))
def function_kwdefaults(rng: random.Random, world: World, f: types.FunctionType) -> Undo:
    former = f.__kwdefaults__
    new = {name: other(rng, value) for name, value in (former or {"power": 1}).items()}
    f.__kwdefaults__ = rng.choice([new, former and dict(former), None])
    return lambda: setattr(f, "__kwdefaults__", former)


@mutation(lambda t: isinstance(t, types.FunctionType) and t.__code__.co_name == "scaled")
def function_code(rng: random.Random, world: World, f: types.FunctionType) -> Undo:
    code = f.__code__
    f.__code__ = rng.choice([worlds.other_helper().__code__, code.replace(), code])
    return lambda: setattr(f, "__code__", code)


@mutation(of(types.FunctionType))
def function_attribute(rng: random.Random, world: World, f: types.FunctionType) -> Undo:
    f.__dict__["extra"] = 1
    return lambda: f.__dict__.pop("extra", None)


@mutation(of(Env))
def global_insert(rng: random.Random, world: World, _: Any) -> Undo:
    """Some that the frame does not look at, some that hide a builtin."""
    name = rng.choice(["unrelated", "len", "max", "hasattr", "isinstance", "type", "list", "p99"])
    if name in world.globals:
        raise ValueError(name)
    world.globals[name] = rng.choice([1, len, lambda *a: 2])
    return lambda: world.globals.pop(name)


@mutation(of(Env))
def global_torch(rng: random.Random, world: World, _: Any) -> Undo:
    name = rng.choice(["torch", "Color", "Plain"])
    value = world.globals[name]
    if rng.random() < 0.5:
        del world.globals[name]
    else:
        world.globals[name] = rng.choice([types.ModuleType("torch"), worlds.Other, value])
    return lambda: world.globals.__setitem__(name, value)
