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


class Base:
    def method(self) -> int:
        return 1

    def other(self) -> int:
        return 2


class Middle(Base):
    pass


class Thing(Middle):
    """As `nn.Module`: what is found in no other way is asked for."""

    asked: list[str] = []

    def __init__(self) -> None:
        self.a = 1

    def __getattr__(self, name: str) -> Any:
        Thing.asked.append(name)
        raise AttributeError(name)


class Other:
    def __init__(self) -> None:
        self.a = 1

    def method(self) -> int:
        return 3


CODE = Base.method.__code__


def has_method(thing: Any) -> bool:
    """What the guards of `guards_of_a_method` say."""
    try:
        return type(thing.method) is types.MethodType and thing.method.__code__ is CODE
    except AttributeError:
        return False


def guards_of_a_method() -> _frame.NativeSpecialization:
    native = _frame.NativeSpecialization(("thing",))
    rows: list[tuple[Any, ...]] = [
        ("local", 0, -1, 0, 0, None, 0),
        ("generic_dict", 1, 0, 0, 0, None, 0),
        ("dict_item", 2, 1, 0, 0, "a", 0),
        ("check_equals", -1, 2, 0, 0, 1, 0),
        ("getattr", 3, 0, 0, 0, "method", 0),
        ("check_not_none", -1, 3, 0, 0, None, 0),
        ("check_type", -1, 3, id(types.MethodType), 0, None, 0),
        ("code", 4, 3, 0, 0, None, 0),
        ("check_id", -1, 4, id(CODE), 0, None, 0),
    ]
    native.set_guards(rows, 5)
    return native


def _set(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    """Sets an attribute; returns what undoes it."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    return (lambda: setattr(owner, name, before)) if had else (lambda: delattr(owner, name))


def _of_dict(thing: Any, change: Callable[[dict[str, Any]], Any]) -> Callable[[], Any]:
    before = dict(vars(thing))
    change(vars(thing))
    return lambda: (vars(thing).clear(), vars(thing).update(before))


def _new_dict(thing: Any, **new: Any) -> Callable[[], Any]:
    before = vars(thing)
    thing.__dict__ = {**before, **new}
    return lambda: setattr(thing, "__dict__", before)


def _as_other(thing: Any) -> Callable[[], Any]:
    thing.__class__ = Other
    return lambda: setattr(thing, "__class__", Thing)


def _bases(cls: Any, *bases: Any) -> Callable[[], Any]:
    before = cls.__bases__
    cls.__bases__ = bases
    return lambda: setattr(cls, "__bases__", before)


def _without_method() -> Callable[[], Any]:
    before = Base.method
    del Base.method
    return lambda: setattr(Base, "method", before)


def _other_code() -> Callable[[], Any]:
    Base.method.__code__ = Base.other.__code__
    return lambda: setattr(Base.method, "__code__", CODE)


def _lookup(self: Any, name: str) -> Any:
    return object.__getattribute__(self, "other" if name == "method" else name)


METHODS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "in the class": lambda t: _set(Thing, "method", Base.other),
    "in a base": lambda t: _set(Middle, "method", Base.other),
    "of the base": lambda t: _set(Base, "method", Base.other),
    "the same function in a base": lambda t: _set(Middle, "method", Base.method),
    "none": lambda t: _without_method(),
    "a property": lambda t: _set(Thing, "method", property(lambda self: 5)),
    "a static method": lambda t: _set(Thing, "method", staticmethod(Base.method)),
    "a class method": lambda t: _set(Thing, "method", classmethod(Base.method)),
    "other code": lambda t: _other_code(),
    "in the object": lambda t: _set(t, "method", 5),
    "the same in the object": lambda t: _set(t, "method", t.method),
    "in __dict__": lambda t: _of_dict(t, lambda d: d.update(method=5)),
    "not in __dict__": lambda t: _of_dict(t, lambda d: d.update(unrelated=5)),
    "another __dict__": lambda t: _new_dict(t, method=5),
    "another __dict__ like it": lambda t: _new_dict(t),
    "__class__": _as_other,
    "__bases__": lambda t: _bases(Thing, Other),
    "__bases__ of a base": lambda t: _bases(Middle, Other),
    "__getattribute__": lambda t: _set(Thing, "__getattribute__", _lookup),
    "__getattribute__ of a base": lambda t: _set(Base, "__getattribute__", _lookup),
    "__getattr__ of a base": lambda t: _set(Base, "__getattr__", lambda self, name: 5),
    "unrelated": lambda t: _set(Thing, "unrelated", 5),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("makes", ["a full run", "facts"])
def test_methods(name: str, makes: str) -> None:
    """A method of the type, whose function is guarded, is no reason to run a lookup again, and
    whatever makes it another one is seen."""
    thing, native = Thing(), guards_of_a_method()
    vars(thing)
    Thing.asked.clear()
    assert native.check((thing,))
    if makes == "facts":
        assert native.check((thing,))
        assert native.runs == (1, 1)
        assert {4, 5, 6} <= set(native.remembered)
    undo = METHODS[name](thing)
    try:
        expected = has_method(thing)
        for _ in range(3):
            assert native.check((thing,)) == expected
    finally:
        undo()
    assert has_method(thing)
    for _ in range(3):
        assert native.check((thing,))


def test_lookup_of_the_users_is_run() -> None:
    """Where the type has its own way to look attributes up, that is called, as Dynamo does."""
    names: list[str] = []

    class Own(Thing):
        def __getattribute__(self, name: str) -> Any:
            names.append(name)
            return object.__getattribute__(self, name)

    thing, native = Own(), guards_of_a_method()
    for _ in range(3):
        names.clear()
        assert native.check((thing,))
        assert "method" in names


def test_class_is_no_object_with_methods() -> None:
    """An attribute of a class is found as its metaclass says."""

    class Meta(type):
        def method(cls) -> int:
            return 1

    class Made(metaclass=Meta):
        a = 1

    native = _frame.NativeSpecialization(("made",))
    code = Meta.method.__code__
    rows: list[tuple[Any, ...]] = [
        ("local", 0, -1, 0, 0, None, 0),
        ("type_dict", 1, 0, 0, 0, None, 0),
        ("dict_item", 2, 1, 0, 0, "a", 0),
        ("check_equals", -1, 2, 0, 0, 1, 0),
        ("getattr", 3, 0, 0, 0, "method", 0),
        ("code", 4, 3, 0, 0, None, 0),
        ("check_id", -1, 4, id(code), 0, None, 0),
    ]
    native.set_guards(rows, 5)
    for _ in range(3):
        assert native.check((Made,))
    Made.method = Base.other  # type: ignore[method-assign, assignment]
    assert not native.check((Made,))
    del Made.method
    assert native.check((Made,))


def test_attribute_of_a_module() -> None:
    """An attribute that `getattr` finds in `__dict__` is remembered, for modules as for others."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.size = 3

    part, native = Part(), _frame.NativeSpecialization(("part",))
    rows: list[tuple[Any, ...]] = [
        ("local", 0, -1, 0, 0, None, 0),
        ("generic_dict", 1, 0, 0, 0, None, 0),
        ("dict_item", 2, 1, 0, 0, "training", 0),
        ("check_true", -1, 2, 0, 0, None, 0),
        ("getattr", 3, 0, 0, 0, "size", 0),
        ("check_equals", -1, 3, 0, 0, 3, 0),
    ]
    native.set_guards(rows, 4)
    assert native.check((part,))
    assert native.check((part,))
    assert {4, 5} <= set(native.remembered)
    part.size = 4
    assert not native.check((part,))
    part.size = 3
    assert native.check((part,))
    Part.size = property(lambda self: 4)  # type: ignore[assignment]
    assert not native.check((part,))
    del Part.size
    assert native.check((part,))
    del part.size
    assert not native.check((part,))
    part.register_buffer("size", torch.ones(1))
    assert not native.check((part,))


class Subclass(Tensor):
    pass


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3, 4)


def _fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(3, 4))


TENSORS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.ones(3, 4),
    "scalar": lambda: torch.ones(()),
    "one dimension": lambda: torch.ones(3),
    "five dimensions": lambda: torch.ones(2, 3, 4, 1, 2),
    "six dimensions": lambda: torch.ones(2, 3, 4, 1, 2, 1),
    "six other dimensions": lambda: torch.ones(2, 3, 4, 1, 1, 2),
    "another size": lambda: torch.ones(3, 5),
    "transposed": lambda: torch.ones(4, 3).t(),
    "expanded": lambda: torch.ones(3, 1).expand(3, 4),
    "offset": lambda: torch.ones(4, 4)[1:],
    "float64": lambda: torch.ones(3, 4, dtype=torch.float64),
    "int": lambda: torch.ones(3, 4, dtype=torch.int32),
    "complex": lambda: torch.ones(3, 4, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(3, 4, dtype=torch.complex64).conj(),
    "requires grad": lambda: torch.ones(3, 4, requires_grad=True),
    "of an operator": lambda: torch.ones(3, 4, requires_grad=True) * 1,
    "a view of it": lambda: torch.ones(3, 4, requires_grad=True).view(3, 4),
    "detached": lambda: torch.ones(3, 4, requires_grad=True).detach(),
    "parameter": lambda: nn.Parameter(torch.ones(3, 4)),
    "parameter without grad": lambda: nn.Parameter(torch.ones(3, 4), requires_grad=False),
    "meta": lambda: torch.ones(3, 4, device="meta"),
    "sparse": lambda: torch.ones(3, 4).to_sparse(),
    "csr": lambda: torch.ones(3, 4).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(3, 4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3, 4), 1.0, 0, torch.qint8),
    "subclass": lambda: torch.ones(3, 4).as_subclass(Subclass),
    "inference": _inference,
    "functional": lambda: torch._to_functional_tensor(torch.ones(3, 4)),
    "fake": _fake,
    "with an attribute": lambda: torch._dynamo.maybe_mark_dynamic(t := torch.ones(3, 4), 0) or t,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
def test_tensors_of_all_kinds(dynamic: bool) -> None:
    """Each kind under the guards of each, as locals and as attributes of a module."""
    torch._dynamo.reset()
    tensors = {name: make() for name, make in TENSORS.items()}
    n_guards = n_passed = 0

    class Holder:
        value: Tensor

    for name, tensor in tensors.items():

        def f(x: Tensor, holder: Holder) -> Any:
            return x.shape, holder.value.shape, torch.ones(2) + 1

        holder = Holder()
        holder.value = tensor
        vars(holder)
        f = types.FunctionType(f.__code__.replace(co_name=f"f_{n_guards}"), f.__globals__)
        with trident.enable():
            try:
                torch.compile(f, backend="eager", dynamic=dynamic)(tensor, holder)
            except Exception:
                continue  # of no use to Dynamo
            module = runtime.module_of(f.__code__)
            module.build()
        for entry in module.entries:
            if entry.native is None:
                continue
            n_guards += 1
            for _ in range(3):
                entry.native.check((tensor, holder))
            for other_name, other in tensors.items():
                for held in (tensor, other):
                    holder.value = held
                    given = {"x": other, "holder": holder}
                    values = tuple(
                        given.get(key, NotImplemented) for key in entry.native.framelocals
                    )
                    expected = dynamo.guard_check_verbose(entry.spec, given) == ""
                    for _ in range(3):
                        verdict = entry.native.check(values)
                        assert verdict == expected, (name, other_name, held is other)
                    n_passed += expected
            holder.value = tensor
    assert n_guards > 15
    assert n_passed > n_guards
    torch._dynamo.reset()


CHANGES_OF_A_TENSOR: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda t: setattr(t, "data", torch.ones(3, 5)),
    "data of another type": lambda t: setattr(t, "data", torch.ones(3, 4, dtype=torch.float64)),
    "strides": lambda t: t.t_().resize_(3, 4).as_strided_((3, 4), (1, 3)),
    "size": lambda t: t.resize_(2, 2),
    "dimensions": lambda t: t.unsqueeze_(0),
    "more dimensions than fit": lambda t: t.resize_(3, 4, 1, 1, 1, 1),
    "storage": lambda t: t.set_(torch.ones(12).storage(), 0, (3, 4), (1, 3)),  # type: ignore
    "requires_grad": lambda t: t.requires_grad_(),
    "in place": lambda t: t.add_(torch.ones(3, 4, requires_grad=True)),
    "class": lambda t: setattr(t, "__class__", Subclass),
    "swapped": lambda t: torch.utils.swap_tensors(t, torch.ones(3, 4, dtype=torch.int64)),
    "an attribute": lambda t: torch._dynamo.mark_dynamic(t, 0),
    "__dict__": lambda t: setattr(
        t, "__dict__", {"_dynamo_dynamic_indices": {0}, "_has_dynamo_dim_marking": True}
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES_OF_A_TENSOR)
def test_changes_of_a_tensor(name: str) -> None:
    """Of an argument, and of an attribute of an object: another verdict than before."""
    torch._dynamo.reset()

    def f(x: Tensor, holder: Any) -> Any:
        return x + holder.value

    for local in (True, False):
        x, holder = torch.ones(3, 4), types.SimpleNamespace(value=torch.ones(3, 4))
        with trident.enable():
            torch.compile(f, backend="eager")(x, holder)
            module = runtime.module_of(f.__code__)
            module.build()
        native = module.entries[0].native
        assert native is not None
        for _ in range(3):
            assert native.check((x, holder))
        changed = x if local else holder.value
        CHANGES_OF_A_TENSOR[name](changed)
        given = {"x": x, "holder": holder}
        expected = dynamo.guard_check_verbose(module.entries[0].spec, given) == ""
        if name in ("an attribute", "__dict__"):
            assert TORCH < (2, 13) or not expected
        else:
            assert not expected
        for _ in range(3):
            assert native.check((x, holder)) == expected
        torch._dynamo.reset()


def test_state_of_the_thread() -> None:
    """Each thread's own state counts, and what one thread remembers holds in no other."""
    import threading

    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        return x + 1

    x = torch.ones(3)
    with trident.enable():
        torch.compile(f, backend="eager")(x)
        module = runtime.module_of(f.__code__)
        module.build()
    entry = module.entries[0]
    native = entry.native
    assert native is not None

    class Mode(torch.overrides.TorchFunctionMode):
        pass

    states: list[Callable[[], Any]] = [
        lambda: torch.enable_grad(),
        lambda: torch.no_grad(),
        lambda: torch.inference_mode(),
        lambda: torch.autocast("cpu"),
        lambda: torch._C.DisableTorchFunctionSubclass(),
        lambda: Mode(),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ]
    found: list[tuple[bool, bool]] = []

    def look() -> None:
        for state in states:
            with state():
                expected = dynamo.guard_check_verbose(entry.spec, {"x": x}) == ""
                found.extend((native.check((x,)), expected) for _ in range(3))

    for _ in range(3):
        found.clear()
        assert native.check((x,))
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert len(found) == 3 * len(states)
        assert all(verdict == expected for verdict, expected in found), found
        assert found[0] == (True, True)
        assert found[3] == (False, False)
        assert native.check((x,))
    torch._dynamo.reset()


PRECISIONS: list[Callable[[str], Any]] = [
    lambda p: setattr(torch.backends.cuda.matmul, "fp32_precision", p),
    lambda p: setattr(torch.backends.cudnn, "fp32_precision", p),
    lambda p: setattr(torch.backends, "fp32_precision", p),
]


def test_matmul_precision(guards: Guards) -> None:
    """It follows from three settings, all of which are looked at."""
    try:
        for change in PRECISIONS:
            for precision in ("tf32", "ieee", "none", "tf32"):
                change(precision)
                guards.check()
                guards.check()
            change("none")
            guards.check()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert guards.check()
