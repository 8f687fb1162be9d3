"""Whatever is done to a compiled module after its door opened: the same as stock."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules import module as module_py

import trident
from tests.test_doors import X, opened, outcome
from trident import _frame

Undo = Callable[[], Any]
Log = list[Any]


class Change:
    """What happens to a compiled module; returns how to undo it."""

    def __init__(self, original: Any, compiled: Any, log: Log) -> None:
        self.original, self.compiled, self.log = original, compiled, log
        self.kind = type(original)

    def note(self, name: str, result: Any = None) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.log.append((name, len(args), sorted(kwargs)))
            return result

        return hook

    def answer(self, name: str) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            self.log.append((name, len(args)))
            return name

        return answer


def set_attribute(target: Any, name: str, value: Any) -> Undo:
    """Past the target's own __setattr__, which may send it elsewhere."""
    (type if isinstance(target, type) else object).__setattr__(target, name, value)
    return lambda: delattr(target, name)


def set_over(target: Any, name: str, value: Any) -> Undo:
    former = target.__dict__[name]
    setattr(target, name, value)
    return lambda: setattr(target, name, former)


def removed(handle: Any) -> Undo:
    return lambda: handle.remove()


def fill(hooks: dict[Any, Any], hook: Any) -> Undo:
    hooks[12345] = hook
    return lambda: hooks.pop(12345)


def drop(target: Any, name: str) -> Undo:
    value = target.__dict__.pop(name)
    return lambda: target.__dict__.__setitem__(name, value)


def replace_dict(target: Any, **changes: Any) -> Undo:
    former = target.__dict__
    object.__setattr__(target, "__dict__", {**former, **changes})
    return lambda: object.__setattr__(target, "__dict__", former)


def replace_class(c: Change) -> Undo:
    c.original.__class__ = type("Other", (c.kind,), {"forward": c.answer("other class")})
    return lambda: setattr(c.original, "__class__", c.kind)


def replace_target(c: Change) -> Undo:
    wrapper = c.compiled.forward if c.compiled is not c.original else c.original._compiled_call_impl
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("fn")]
    former = cell.cell_contents
    cell.cell_contents = c.answer("cell")
    return lambda: setattr(cell, "cell_contents", former)


def get_attribute_of_its_own(c: Change) -> Undo:
    def look_up(self: Any, name: str) -> Any:
        return c.answer("looked up") if name == "forward" else object.__getattribute__(self, name)

    return set_attribute(c.kind, "__getattribute__", look_up)


def swap_submodule(c: Change) -> Undo:
    former = c.original.child
    c.original.child = torch.nn.Linear(4, 4)
    return lambda: setattr(c.original, "child", former)


def train(c: Change) -> Undo:
    c.compiled.eval()
    c.log.append((c.original.training, c.compiled.training))
    return lambda: c.log.append(c.compiled.train() is c.compiled)


def load_state(c: Change) -> Undo:
    state = {k: torch.zeros_like(v) for k, v in c.original.state_dict().items()}
    c.log.append(str(c.original.load_state_dict(state)))
    c.log.append(sorted(c.compiled.state_dict()))
    return lambda: c.original.load_state_dict(state)


CHANGES: dict[str, Callable[[Change], Undo]] = {
    "hook": lambda c: removed(c.original.register_forward_hook(c.note("forward"))),
    "hook result": lambda c: removed(c.original.register_forward_hook(c.note("f", X + 1))),
    "hook kwargs": lambda c: removed(
        c.original.register_forward_hook(c.note("forward"), with_kwargs=True, always_call=True)
    ),
    "pre": lambda c: removed(c.original.register_forward_pre_hook(c.note("pre"))),
    "pre result": lambda c: removed(c.original.register_forward_pre_hook(c.note("pre", X + 1))),
    "backward": lambda c: removed(c.original.register_full_backward_hook(c.note("backward"))),
    "backward pre": lambda c: removed(c.original.register_full_backward_pre_hook(c.note("b"))),
    "hook above": lambda c: removed(c.compiled.register_forward_hook(c.note("forward"))),
    "pre above": lambda c: removed(c.compiled.register_forward_pre_hook(c.note("pre"))),
    "backward above": lambda c: removed(c.compiled.register_full_backward_hook(c.note("b"))),
    "global": lambda c: removed(module_py.register_module_forward_hook(c.note("global"))),
    "global pre": lambda c: removed(module_py.register_module_forward_pre_hook(c.note("global"))),
    "global backward": lambda c: removed(
        module_py.register_module_full_backward_hook(c.note("global"))
    ),
    "global backward pre": lambda c: removed(
        module_py.register_module_full_backward_pre_hook(c.note("global"))
    ),
    "hooks filled": lambda c: fill(c.original._forward_hooks, c.note("filled")),
    "hooks filled above": lambda c: fill(c.compiled._forward_hooks, c.note("filled")),
    "hooks replaced": lambda c: set_over(c.original, "_forward_pre_hooks", {1: c.note("replaced")}),
    "hooks missing": lambda c: drop(c.original, "_forward_hooks"),
    "hooks missing above": lambda c: drop(c.compiled, "_backward_hooks"),
    "forward": lambda c: set_attribute(c.original, "forward", c.answer("instance")),
    "forward of the class": lambda c: set_over(c.kind, "forward", c.answer("class")),
    "forward above": lambda c: set_over(c.compiled, "forward", c.answer("above")),
    "implementation": lambda c: set_attribute(c.original, "_call_impl", c.answer("implementation")),
    "implementation above": lambda c: set_attribute(c.compiled, "_call_impl", c.answer("above")),
    "implementation of the class": lambda c: set_attribute(c.kind, "_call_impl", c.answer("class")),
    "call of the class": lambda c: set_attribute(c.kind, "__call__", c.answer("class")),
    "call of modules": lambda c: set_over(torch.nn.Module, "__call__", c.answer("modules")),
    "implementation of modules": lambda c: set_over(
        torch.nn.Module, "_call_impl", c.answer("modules")
    ),
    "call above": lambda c: set_over(
        torch._dynamo.OptimizedModule, "__call__", c.answer("optimized")
    ),
    "compiled call": lambda c: set_attribute(c.original, "_compiled_call_impl", c.answer("set")),
    "compiled call above": lambda c: set_attribute(
        c.compiled, "_compiled_call_impl", c.answer("set")
    ),
    "dict": lambda c: replace_dict(c.original, _forward_hooks={1: c.note("dict")}),
    "dict above": lambda c: replace_dict(c.compiled, _forward_hooks={1: c.note("dict")}),
    "plain dict": lambda c: replace_dict(c.original),
    "class": replace_class,
    "target": replace_target,
    "__getattribute__": get_attribute_of_its_own,
    "submodule": swap_submodule,
    "train": train,
    "state": load_state,
}
# These would not find what they change, or change both at once.
NOT_IN_PLACE = {name for name in CHANGES if "above" in name} | {"compiled call"}


def change_module(name: str, in_place: bool) -> list[Any]:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = torch.nn.Linear(4, 4)

        def forward(self, x: Any, y: Any = "y") -> Any:
            return x

    torch._dynamo.reset()
    torch.manual_seed(0)
    original, log = Model(), []
    compiled: Any = original
    if in_place:
        original.compile(backend="eager")
    else:
        compiled = torch.compile(original, backend="eager")

    def call(n: int) -> None:
        for _ in range(n):
            x = X.clone().requires_grad_()
            log.append(outcome(compiled, x))
            log.append(outcome(lambda x=x: (compiled(x * 1, y=2) * 2).sum().backward()))
            log.append(x.grad is not None)

    call(3)
    door = original._compiled_call_impl if in_place else compiled
    assert _frame.has_door(door) == trident.is_enabled()
    for _ in range(2):
        undo = CHANGES[name](Change(original, compiled, log))
        call(2)
        undo()
        call(2)
    return log


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", sorted(CHANGES))
@pytest.mark.filterwarnings("ignore")
def test_changed_module(fresh: None, monkeypatch: Any, name: str, in_place: bool) -> None:
    if in_place and name in NOT_IN_PLACE:
        pytest.skip("the same as for the original")
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    expected = change_module(name, in_place)
    with trident.enable():
        assert change_module(name, in_place) == expected
        assert trident.stats().hits >= 5


def test_another_method_at_the_address_of_the_target(fresh: None) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x

        def other(self, x: Any) -> Any:
            return "other"

    model = Model()
    with trident.enable():
        compiled = opened(model, X)
        wrapper = compiled.forward
        cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("fn")]
        address = id(cell.cell_contents)
        wrapper.__dict__.clear()
        cell.cell_contents = None
        kept = [model.other]
        while id(kept[-1]) != address and len(kept) < 1000:
            kept.append(model.other)
        if id(kept[-1]) != address:
            pytest.skip("the address was not used again")
        cell.cell_contents = kept[-1]
        assert compiled(X) == "other"


def test_copies_of_modules(fresh: None) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (self, x)

    def run() -> list[Any]:
        torch._dynamo.reset()
        model = Model()
        compiled = opened(model, X)
        results: list[Any] = []
        for twin in (copy.copy(compiled), copy.deepcopy(compiled), copy.deepcopy(model)):
            called = [twin(X) for _ in range(6)]
            inner = getattr(twin, "_orig_mod", twin)
            results.append([type(twin).__name__, inner is model])
            results.append([(c[0] is inner, torch.equal(c[1], X)) for c in called])
        results.append(outcome(pickle.dumps, compiled)[0])
        results.append(compiled(X)[0] is model)
        return results

    expected = run()
    with trident.enable():
        assert run() == expected
