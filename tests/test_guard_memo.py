"""What guards remember from run to run: used while it holds, and never when it does not."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trident
from trident import _frame
from trident.capture import dynamo
from trident.control import runtime
from trident.scm import Entry

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 13),
    reason="dicts have no reliable versions there: nothing is remembered",
)


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Settings:
    def __init__(self) -> None:
        self.scale = 2.5
        self.names = ("a", ("b", 3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.settings = Settings()
        self.parts = [nn.Linear(4, 4), nn.ReLU()]
        self.flag = True
        self.count = 7
        self.calls = 0
        self.table = {"one": 1, "two": 2.5}
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        for part in self.parts:
            x = part(x)
        if self.flag and self.settings.names[1][1] == 3:
            x = x * self.settings.scale + self.table["two"]
        return torch.relu(x) + self.offset * self.count


class Guards:
    """The guards of `Model.forward` for one model, against Dynamo's own tree."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        torch.compile(model, backend="eager")(x)
        module = runtime.module_of(type(model).forward.__code__)
        module.build()
        self.entry: Entry = module.entries[0]
        assert self.entry.native is not None, self.entry.reason
        self.native: _frame.NativeSpecialization = self.entry.native

    def check(self) -> bool:
        """The native verdict, which must be Dynamo's."""
        given = {"self": self.model, "x": self.x}
        verdict = self.native.check(self.values())
        assert verdict == (dynamo.guard_check_verbose(self.entry.spec, given) == "")
        return verdict

    def values(self) -> tuple[Any, ...]:
        """The frame's locals."""
        given = {"self": self.model, "x": self.x}
        return tuple(given.get(name, NotImplemented) for name in self.native.framelocals)

    def remembered(self) -> bool:
        """Does a check pass without a full run?"""
        full, by_memo = self.native.runs
        assert self.check()
        return self.native.runs == (full, by_memo + 1)


@pytest.fixture
def guards() -> Iterator[Guards]:
    torch._dynamo.reset()
    with trident.enable(), torch.no_grad():
        found = Guards(Model(), torch.randn(2, 4))
        assert found.check()
        assert found.remembered()
        yield found
    torch._dynamo.reset()


def test_other_tensors(guards: Guards) -> None:
    guards.x = torch.randn(2, 4)
    assert guards.remembered()
    guards.x = torch.randn(3, 4)
    assert not guards.check()
    guards.x = torch.randn(2, 4, dtype=torch.float64)
    assert not guards.check()
    guards.x = torch.randn(2, 4)
    assert guards.remembered()


UNGUARDED: dict[str, Callable[[Model], Any]] = {
    "a new attribute": lambda m: setattr(m, "other", 1),
    "an attribute that is not guarded": lambda m: setattr(m, "calls", m.calls + 1),
    "of a submodule": lambda m: setattr(m.layers[1], "note", "x"),
    "of an object": lambda m: setattr(m.settings, "other", [1]),
    "an entry of a dict": lambda m: m.table.update(three=3),
    "values of a tensor": lambda m: m.offset.add_(1),
    "the same object": lambda m: setattr(m, "count", m.count),
    "of a class": lambda m: setattr(Settings, "unused", 1),
}


@pytest.mark.parametrize("name", UNGUARDED)
def test_other_changes_keep_it(guards: Guards, name: str) -> None:
    """Where the guarded entries of a dict are the same as before, a change costs no full run."""
    for _ in range(3):
        UNGUARDED[name](guards.model)
        assert guards.check()
    assert guards.remembered()


def _replaced(m: Model) -> None:
    other = Model()
    vars(other.layers[0])["_parameters"] = {"weight": None, "bias": None}
    m.layers[0] = other.layers[0]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "an int": lambda m: setattr(m, "count", 8),
    "a flag": lambda m: setattr(m, "flag", False),
    "an attribute of an object": lambda m: setattr(m.settings, "scale", 3.5),
    "a tuple in a tuple": lambda m: setattr(m.settings, "names", ("a", ("b", 4))),
    "a value of a dict": lambda m: m.table.update(two=3.5),
    "a key of a dict": lambda m: m.table.pop("two"),
    "an entry of __dict__": lambda m: vars(m).update(count=9),
    "__dict__": lambda m: setattr(m.settings, "__dict__", {"scale": 1.0, "names": ("a", ("b", 3))}),
    "__class__": lambda m: setattr(m.layers[0], "__class__", nn.Bilinear),
    "a buffer": lambda m: setattr(m, "offset", torch.ones(1, 4)),
    "data of a parameter": lambda m: setattr(m.layers[0].weight, "data", torch.ones(4, 4).t()),
    "requires_grad": lambda m: m.layers[1].weight.requires_grad_(False),
    "a dtype": lambda m: m.layers[2].to(torch.float64),
    "a module": _replaced,
    "no module": lambda m: m.layers.__delitem__(2),
    "an item of a list": lambda m: m.parts.__setitem__(1, nn.Tanh()),
    "a list": lambda m: m.parts.append(nn.ReLU()),
    "an attribute of a tensor": lambda m: torch._dynamo.mark_dynamic(m.offset, 0),
    "forward of one module": lambda m: setattr(m.layers[0], "forward", lambda x: x),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes(guards: Guards, name: str, again: bool) -> None:
    """`again`: after a change that made the guarded dicts look again."""
    if again:
        for change in UNGUARDED.values():
            change(guards.model)
            guards.check()
    CHANGES[name](guards.model)
    if name == "an attribute of a tensor" and TORCH < (2, 13):
        assert guards.check()  # 2.11 does not look at it
        return
    assert not guards.check()
    assert not guards.check()


def test_function_of_a_module_is_replaced(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "relu", torch.tanh)
        assert not guards.check()
    assert guards.check()
    assert guards.remembered()


def test_flips(guards: Guards) -> None:
    for _ in range(5):
        guards.model.flag = False
        assert not guards.check()
        guards.model.flag = True
        assert guards.check()


def test_tensor_type_gets_an_attribute(guards: Guards) -> None:
    torch.Tensor._dynamo_dynamic_indices = {0}  # type: ignore[attr-defined]
    try:  # stricter than Dynamo, which looks at the tensor only
        assert not guards.native.check(guards.values())
    finally:
        del torch.Tensor._dynamo_dynamic_indices  # type: ignore[attr-defined]
    assert guards.check()


def test_attribute_that_is_new_at_each_call(guards: Guards) -> None:
    """A tensor that the model replaces all the time is fetched anew; the rest is remembered."""
    model = guards.model
    for _ in range(20):
        model.offset = torch.ones(4)
        assert guards.check()
    full, _ = guards.native.runs
    for _ in range(50):
        model.offset = torch.ones(4)
        assert guards.check()
    assert guards.native.runs[0] == full


def test_state_of_the_process(guards: Guards) -> None:
    """GLOBAL_STATE is compared field by field; any other value is no hit."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    states: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: torch.set_grad_enabled(True), lambda: torch.set_grad_enabled(False)),
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(dtype),
        ),
        (lambda: torch.set_num_threads(threads + 1), lambda: torch.set_num_threads(threads)),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision(precision),
        ),
        (
            lambda: torch.set_autocast_enabled("cpu", True),
            lambda: torch.set_autocast_enabled("cpu", False),
        ),
        (
            lambda: torch.set_autocast_cache_enabled(False),
            lambda: torch.set_autocast_cache_enabled(True),
        ),
        (
            lambda: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(False),
            lambda: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(True),
        ),
        (
            lambda: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(False),
            lambda: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(True),
        ),
    ]
    assert dynamo.knows_global_state()
    for number, (change, undo) in enumerate(states):
        change()
        try:
            assert not guards.check(), number
        finally:
            undo()
        assert guards.check()
        assert guards.remembered()
    with torch._C.DisableTorchFunctionSubclass():
        assert not guards.check()


def test_autocast_dtype(guards: Guards) -> None:
    """It counts only while autocast is on."""
    before = torch.get_autocast_dtype("cpu")
    try:
        torch.set_autocast_dtype("cpu", torch.float16)
        assert guards.check()
    finally:
        torch.set_autocast_dtype("cpu", before)
    with torch.autocast("cpu", torch.bfloat16):
        inside = Guards(Model(), torch.randn(2, 4))
        assert inside.check()
        assert inside.remembered()
        torch.set_autocast_dtype("cpu", torch.float16)
        assert not inside.check()


def test_what_is_remembered_keeps_nothing_alive() -> None:
    import gc
    import weakref

    torch._dynamo.reset()
    with trident.enable(), torch.no_grad():
        found = Guards(Model(), torch.randn(2, 4))
        for _ in range(3):
            found.check()
        died = weakref.ref(found.model)
        weight = weakref.ref(found.model.layers[0].weight)
        del found
        gc.collect()
        assert died() is None
        assert weight() is None


def several(source: str, n: int, make: Callable[[Any, int], Any]) -> tuple[list[Any], list[Entry]]:
    """Calls that need a specialization each of one frame, and these."""
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(compile(source, __file__, "exec"), names)  # Dynamo 2.11 skips what has no file
    calls = [make(names["f"], i) for i in range(n)]
    for _ in range(4):
        for call in calls:
            call()
    code = names["f"].forward.__code__ if isinstance(names["f"], type) else names["f"].__code__
    entries = runtime.module_of(code).entries
    assert len(entries) == n
    return calls, entries


MODULE = """
class f(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i = i
    def forward(self, x):
        return x * self.i
"""
MANY: dict[str, tuple[str, Callable[[Any, int], Any]]] = {
    "a size": (
        "def f(x):\n    return x * 2\n",
        lambda f, i: lambda: torch.compile(f, backend="trident")(torch.ones(i + 2)),
    ),
    "an int": (
        "def f(x, i):\n    return x * i\n",
        lambda f, i: lambda: torch.compile(f, backend="trident")(torch.ones(3), i + 2),
    ),
    "a string": (
        "def f(x, mode):\n    return x * len(mode)\n",
        lambda f, i: lambda: torch.compile(f, backend="trident")(torch.ones(3), f"mode {i}"),
    ),
    "an attribute of self": (
        MODULE,
        lambda f, i: functools.partial(torch.compile(f(i + 0.5), backend="trident"), torch.ones(3)),
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_many_specializations(name: str) -> None:
    """Once known, a call runs the guards of one specialization."""
    torch._dynamo.reset()
    source, make = MANY[name]
    with (
        torch._dynamo.config.patch(
            recompile_limit=64, accumulated_recompile_limit=256, automatic_dynamic_shapes=False
        ),
        trident.enable(),
    ):
        calls, entries = several(source, 24, make)
        natives = [entry.native for entry in entries if entry.native is not None]
        assert len(natives) == len(entries)
        for call in reversed(calls):
            before = [sum(native.runs) for native in natives]
            call()
            after = [sum(native.runs) for native in natives]
            assert sum(after) - sum(before) == 1
    torch._dynamo.reset()


def test_learning_runs_no_other_guards() -> None:
    """Until a call is known, guards run in Dynamo's order up to those that pass, and no others."""
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False),
        trident.enable(),
    ):
        names: dict[str, Any] = {}
        exec(compile("def f(x):\n    return x * 2\n", __file__, "exec"), names)
        f = torch.compile(names["f"], backend="trident")
        for n in range(6):
            f(torch.ones(n + 2))
        module = runtime.module_of(names["f"].__code__)
        module.build()
        natives = [entry.native for entry in module.entries if entry.native is not None]
        assert len(natives) == 6
        for position, n in ((0, 7), (1, 6), (2, 5), (5, 2), (0, 2)):
            before = [sum(native.runs) for native in natives]
            f(torch.ones(n))
            ran = sum(sum(native.runs) for native in natives) - sum(before)
            assert ran == position + 1
    torch._dynamo.reset()


def test_order_is_dynamos() -> None:
    """Where several specializations fit a call, the last used or made is taken, as in stock."""
    torch._dynamo.reset()

    def f(x: Tensor, mode: Any) -> Any:
        return x * 2

    used: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        name = "dynamic" if any(isinstance(i, torch.SymInt) for i in inputs) else "static"
        number = f"{name} {len(seen)}"
        seen.append(number)

        def run(*args: Any) -> Any:
            used.append(number)
            return module.forward(*args)

        return run

    def sequence(compiled: Any) -> list[str]:
        used.clear()
        for size in (4, 8, 4, 16, 4, 8, 8, 4, 32, 4):
            compiled(torch.ones(size), None)
        return list(used)

    seen: list[str] = []
    stock = sequence(torch.compile(f, backend=backend))
    torch._dynamo.reset()
    seen.clear()
    with trident.enable():
        assert sequence(torch.compile(f, backend=backend)) == stock
    torch._dynamo.reset()


def guards_of_a_thing(call: Callable[[Any], bool], after: str) -> _frame.NativeSpecialization:
    """Guards that a, b and c of `thing` are 1, 2 and 3, and that `call` says yes, which they ask
    `after` one of these."""
    native = _frame.NativeSpecialization(("thing",))
    rows: list[tuple[Any, ...]] = [
        ("local", 0, -1, 0, 0, None, 0),
        ("generic_dict", 1, 0, 0, 0, None, 0),
    ]
    for register, (name, value) in enumerate([("a", 1), ("b", 2), ("c", 3)], 2):
        rows.append(("dict_item", register, 1, 0, 0, name, 0))
        rows.append(("check_equals", -1, register, 0, 0, value, 0))
        if name == after:
            rows.append(("check_lambda", -1, 0, 0, 0, call, 0))
    native.set_guards(rows, 5)
    return native


def test_rows_that_call_python() -> None:
    """What Python changes while guards run is seen: the facts are looked at after it, too."""
    thing = types.SimpleNamespace(a=1, b=2, c=3)
    calls: list[Callable[[], Any]] = []

    def call(_: Any) -> bool:
        for change in calls:
            change()
        return True

    native = guards_of_a_thing(call, after="b")
    for _ in range(3):
        assert native.check((thing,))
    assert native.runs == (1, 2)
    calls.append(lambda: setattr(thing, "c", 4))
    assert not native.check((thing,))
    calls[:] = [lambda: setattr(thing, "c", 3)]
    assert native.check((thing,))  # as Dynamo, which looks at c after that
    calls.clear()
    assert native.check((thing,))
    calls.append(lambda: setattr(thing, "other", 4))
    assert native.check((thing,))
    calls[:] = [lambda: vars(thing).clear()]
    assert not native.check((thing,))


def test_python_changes_what_was_fetched_before() -> None:
    """A run passes although its Python then changed what it had found: that is not remembered."""
    thing = types.SimpleNamespace(a=1, b=2, c=3)
    value = 1

    def call(_: Any) -> bool:
        thing.a = value
        return True

    native = guards_of_a_thing(call, after="c")
    value = 5
    assert native.check((thing,))  # as Dynamo, which looked at a before
    assert not native.check((thing,))
    thing.a, value = 1, 1
    assert native.check((thing,))
    assert native.check((thing,))
    value = 7
    assert native.check((thing,)) is False or not native.check((thing,))
    assert not native.check((thing,))


def test_fresh_object_at_each_call() -> None:
    """An argument that is another object at each call keeps nothing else from being remembered."""
    torch._dynamo.reset()

    def f(model: Model, batch: Any) -> Any:
        return model.layers[0](batch.x) * batch.scale

    def batch() -> Any:
        return types.SimpleNamespace(x=torch.ones(2, 4), scale=2.0)

    with trident.enable(), torch.no_grad():
        model = Model()
        torch.compile(f, backend="eager")(model, batch())
        (entry,) = runtime.module_of(f.__code__).entries
        runtime.module_of(f.__code__).build()
        assert entry.native is not None
        kept = [batch() for _ in range(3000)]
        for one in kept:
            assert entry.native.check((model, one))
        full, _ = entry.native.runs
        for one in [batch() for _ in range(200)]:
            assert entry.native.check((model, one))
        assert entry.native.runs[0] == full
        kept[0].scale = 3.0
        assert not entry.native.check((model, kept[0]))
    torch._dynamo.reset()
