"""`explain`: times of the parts of calls, the guard program, and why the last call missed."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trident
from tests.conftest import frame_stats
from trident import guard_report
from trident.capture import dynamo
from trident.control import runtime

X = torch.arange(4.0)


def add_mul(x: Any, y: Any) -> Any:
    return torch.relu(x + y) * 2


def same(x: Any) -> Any:
    return x


def spec_of(f: Any, **options: Any) -> Any:
    (frame,) = trident.explain(f, **options).frames
    (spec,) = frame.specializations
    return spec


# ---- measure ----


def test_measures_guards_plan_and_program(enabled: None) -> None:
    compiled = torch.compile(add_mul, backend="trident")
    for _ in range(10):
        compiled(X, X)
    plain = trident.explain(compiled)
    assert (plain.guard_ns, plain.plan_ns, plain.host_ns) == (None, None, None)
    assert "timed calls" not in str(plain)
    explanation = trident.explain(compiled, measure=True)
    (frame,) = explanation.frames
    (spec,) = frame.specializations
    for report in (explanation, frame, spec):
        times = report.guard_ns, report.plan_ns, report.host_ns
        assert all(isinstance(ns, float) and 0 <= ns < 1e9 for ns in times)
    assert 0 < spec.guard_ns < spec.host_ns  # three operators take longer than two tensors' guards
    assert spec.timing.calls == 8  # the first ones
    text = f"host program {spec.host_ns:,.0f} ns (medians of 8 timed calls)"
    assert f"a call: guards {spec.guard_ns:,.0f} ns, frame plan " in str(explanation)
    assert text in str(explanation)


def test_measures_all_calls_after_it_was_asked(enabled: None) -> None:
    """The program waits, and the time is in the program's, not in the plan's or the guards'."""
    wait_s = [0.0]

    @torch.library.custom_op("trident_explain::wait", mutates_args=())
    def wait(x: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(wait_s[0])
        return x.clone()

    wait.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: wait(x) + 1, backend="trident")
    for _ in range(60):
        compiled(X)
    assert spec_of(compiled).program_native
    assert spec_of(compiled, measure=True).host_ns < 2e6
    wait_s[0] = 0.002
    for _ in range(31):
        compiled(X)
    spec = spec_of(compiled, measure=True)
    assert spec.timing.calls == 31
    assert spec.host_ns >= 2e6
    assert spec.guard_ns < 1e6
    assert spec.plan_ns < 1e6


def test_few_calls_are_timed_unasked(enabled: None) -> None:
    def f(x: Any, y: Any) -> Any:
        return torch.relu(x + y) * 2

    compiled = torch.compile(f, backend="trident")
    for _ in range(20):
        compiled(X, X)
    native = runtime.module_of(f.__code__).entries[0].native
    assert native is not None
    last_ns, samples = native.samples
    assert len(samples) == 8
    for _ in range(900):
        compiled(X, X)
    assert native.samples[0] == last_ns
    for _ in range(1100):
        compiled(X, X)
    assert native.samples[0] > last_ns


def test_measures_specializations_of_their_own(enabled: None) -> None:
    compiled = torch.compile(use_number, backend="trident", dynamic=False)
    for n in (1, 1, 1, 2, 2, 2):
        compiled(X, n)
    explanation = trident.explain(compiled, measure=True)
    (frame,) = explanation.frames
    newest, oldest = frame.specializations
    assert newest.timing is not None
    assert oldest.timing is not None
    assert frame.timing == newest.timing
    for _ in range(3):
        compiled(X, 1)
    explanation = trident.explain(compiled, measure=True)
    (frame,) = explanation.frames
    assert explanation.timing == frame.timing == frame.specializations[1].timing


def test_measures_what_there_is(enabled: None) -> None:
    eager = torch.compile(add_mul, backend="eager")
    trivial = torch.compile(same, backend="eager")
    assert trident.explain(eager, measure=True).guard_ns is None
    for _ in range(4):
        eager(X, X)
        trivial(X)
    spec = spec_of(eager, measure=True)
    assert spec.guard_ns > 0
    assert (spec.plan_ns, spec.host_ns) == (None, None)
    explanation = trident.explain(trivial, measure=True)
    assert (explanation.guard_ns, explanation.host_ns) == (None, None)
    assert explanation.plan_ns is not None
    assert "a call: frame plan" in str(explanation)


def test_measures_a_program_that_dynamos_code_calls(enabled: None) -> None:
    def broken(x: Any) -> Any:
        y = torch.relu(x) * 3
        with torch.no_grad():
            torch._dynamo.graph_break()
            return y + 1

    compiled = torch.compile(broken, backend="trident")
    for _ in range(5):
        compiled(X)
    first, _rest = trident.explain(compiled, measure=True).frames
    assert first.host_ns is not None
    assert first.host_ns > 0
    assert first.plan_ns is None


def test_says_that_nothing_was_timed(fresh: None) -> None:
    compiled = torch.compile(add_mul, backend="eager")
    compiled(X, X)
    assert "nothing was timed yet" in str(trident.explain(compiled, measure=True))
    assert "nothing was timed yet" not in str(trident.explain(compiled))


def test_programs_that_raise_or_recurse_are_not_timed_wrongly(enabled: None) -> None:
    state = {"depth": 0, "raises": False}

    @torch.library.custom_op("trident_explain::inner", mutates_args=())
    def inner(x: torch.Tensor) -> torch.Tensor:
        if state["raises"]:
            raise ValueError("as asked")
        if state["depth"] > 0:
            state["depth"] -= 1
            return compiled(x)
        return x.clone()

    inner.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: inner(x) * 2, backend="trident")
    for _ in range(4):
        compiled(X)
    trident.explain(compiled, measure=True)
    for depth in (2, 0, 3):
        state["depth"] = depth
        assert torch.equal(compiled(X), X * 2 ** (depth + 1))
        state["raises"] = True
        with pytest.raises(ValueError, match="as asked"):
            compiled(X)
        state["raises"] = False
    host_ns = trident.explain(compiled, measure=True).host_ns
    assert host_ns is not None
    assert host_ns > 0


# ---- the guard program ----


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.flag = True

    def forward(self, x: Any) -> Any:
        return self.linear(x) if self.flag else x


def test_guard_program(enabled: None) -> None:
    model = Scaled()
    compiled = torch.compile(model, backend="eager")
    for n in (2, 3, 3, 3, 3):
        compiled(torch.ones(n, 4))
    (frame,) = trident.explain(compiled, guards=True).frames
    dynamic = frame.specializations[0]
    guards = {(g.operation, g.source): g for g in dynamic.guard_program}
    flag = guards["check_true", "L['self'].flag"]
    assert flag.kind == "remembered"
    assert flag.check == "L['self'].flag == True"
    assert flag.user_line is not None
    assert flag.user_line.startswith("return self.linear(x) if self.flag else x  # ")
    assert guards["check_tensor", "L['x']"].kind == "native"
    weight = "L['self']._modules['linear']._parameters['weight']"
    assert guards["check_tensor", weight].kind == "native"  # read at each call
    assert guards["check_shapes", ""].kind == "native"
    assert dynamic.callbacks == []
    kinds = dynamic.guard_kinds
    assert sum(kinds.values()) == len(dynamic.guard_program) == dynamic.n_guards
    text = str(trident.explain(compiled))
    assert f"{kinds['native']} native, {kinds['remembered']} remembered" in text
    assert "L['self'].flag" not in text
    assert "remembered  L['self'].flag == True" in str(trident.explain(compiled, guards=True))
    assert frame.specializations[1].callbacks == []
    assert trident.explain(compiled).frames[0].specializations[0].guard_program == []


def test_remembered_is_what_the_memo_covers(enabled: None) -> None:
    model = Scaled()
    compiled = torch.compile(model, backend="eager")
    for _ in range(4):
        compiled(torch.ones(2, 4))
    (entry,) = runtime.module_of(Scaled.forward.__code__).entries
    assert entry.native is not None
    assert entry.built is not None
    assert entry.built.table is not None
    rows = entry.built.table.rows
    covered = entry.native.remembered
    assert covered
    assert all(rows[i].op != "check_tensor" for i in covered)
    assert max(covered) < len(rows)
    # Without a memo in use nothing is remembered.
    other = torch.compile(use_number, backend="eager")
    other(X, 1)
    assert spec_of(other).guard_kinds["remembered"] == 0


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        (
            "L['x'].y: L['x'].y == 3     # a + b  # f.py:3 in f (HINT: text)",
            ("L['x'].y", "L['x'].y == 3", "a + b  # f.py:3 in f"),
        ),
        ("L: ___check_global_state()", ("", "___check_global_state()", None)),
        (
            "2 <= L['x'].size()[0]  # if a: b  # f.py:1 in f (user code shown is first)",
            ("", "2 <= L['x'].size()[0]", "if a: b  # f.py:1 in f"),
        ),
        (
            "G['a']['b c']: len(G['a']['b c']) == 2",
            ("G['a']['b c']", "len(G['a']['b c']) == 2", None),
        ),
        ("label 3", ("", "label 3", None)),
    ],
)
def test_labels(label: str, parts: tuple[str, str, str | None]) -> None:
    assert guard_report.split_label(label) == parts


# ---- why the last call missed ----


class Config:
    def __init__(self, value: Any) -> None:
        self.value = value


class Other(Config):
    pass


def double(x: Any) -> Any:
    return x * 2


def take(x: Any, config: Any) -> Any:
    return x + len(str(config)) if isinstance(config, (str, type(None))) else x + 1


def use_value(x: Any, config: Any) -> Any:
    return x + 1 if config.value else x - 1


def use_items(x: Any, items: Any) -> Any:
    return x + len(items)


def use_number(x: Any, n: Any) -> Any:
    return x * n


def use_both(x: Any, y: Any) -> Any:
    return x + y


def use_key(x: Any, d: Any) -> Any:
    return x + 1 if "k" in d else x


T = functools.partial(torch.ones, 4)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], str]] = {
    "size": (
        double,
        (torch.ones(4),),
        (torch.ones(5),),
        "size of x at dimension 0: expected 4, got 5",
    ),
    "second size": (
        double,
        (torch.ones(2, 3),),
        (torch.ones(2, 7),),
        "size of x at dimension 1: expected 3, got 7",
    ),
    "stride": (
        double,
        (torch.ones(3, 3),),
        (torch.ones(3, 3).t(),),
        "stride of x at dimension 0: expected 3, got 1",
    ),
    "dimensions": (
        double,
        (torch.ones(4),),
        (torch.ones(4, 1),),
        "dimensions of x: expected 1, got 2",
    ),
    "dtype": (double, (T(),), (T(dtype=torch.int64),), "dtype of x: expected float32, got int64"),
    "requires_grad": (
        double,
        (T(),),
        (T(requires_grad=True),),
        "requires_grad of x: expected False, got True",
    ),
    "device": (double, (T(),), (T(device="meta"),), "device of x: expected cpu, got meta"),
    "parameter": (
        double,
        (T(),),
        (torch.nn.Parameter(T(), requires_grad=False),),
        "type of x: expected Tensor, got torch.nn.parameter.Parameter",
    ),
    "conjugate": (
        double,
        (T(dtype=torch.complex64),),
        (T(dtype=torch.complex64).conj(),),
        "dispatch keys of x: expected DispatchKeySet(CPU,",
    ),
    "no tensor": (double, (T(),), (3,), "type of x: expected Tensor, got int"),
    "text": (take, (T(), "ab"), (T(), "abc"), "config: expected 'ab', got 'abc'"),
    "long text": (
        take,
        (T(), "ab"),
        (T(), "c" * 1000),
        "config: expected 'ab', got a str of length 1000",
    ),
    "none": (take, (T(), None), (T(), "ab"), "config: expected None, got 'ab'"),
    "flag": (
        use_value,
        (T(), Config(True)),
        (T(), Config(False)),
        "config.value: expected True, got False",
    ),
    "type": (
        use_value,
        (T(), Config(True)),
        (T(), Other(True)),
        f"type of config: expected {__name__}.Config, got {__name__}.Other",
    ),
    "length": (use_items, (T(), [1, 2]), (T(), [1, 2, 3]), "length of items: expected 2, got 3"),
    "list or tuple": (
        use_items,
        (T(), [1, 2]),
        (T(), (1, 2)),
        "type of items: expected list, got tuple",
    ),
    "number": (use_number, (T(), 3), (T(), 4), "n: expected 3, got 4"),
    "kind of number": (use_number, (T(), 3), (T(), 3.0), "n: expected 3, got 3.0, a float"),
    "alias": (
        use_both,
        (T(), T()),
        ((t := T()), t),
        "check_no_aliasing(L['x'], L['y']): expected distinct objects",
    ),
    "key": (use_key, (T(), {"k": 1}), (T(), {"j": 1}), "'k' in d: expected there, got not there"),
}


@pytest.mark.parametrize("name", CASES)
def test_why_the_last_call_missed(enabled: None, name: str) -> None:
    f, first, second, expected = CASES[name]
    compiled = torch.compile(f, backend="eager", dynamic=False)
    for _ in range(3):
        compiled(*first)
    assert spec_of(compiled).last_miss is None
    assert "the last miss" not in str(trident.explain(compiled))
    compiled(*second)
    compiled(*second)
    (frame,) = trident.explain(compiled).frames
    *newer, older = frame.specializations  # none newer where there is no graph
    assert all(spec.last_miss is None for spec in newer)
    assert older.last_miss is not None
    assert str(older.last_miss).startswith(expected), str(older.last_miss)
    assert f"    the last miss: {expected}" in str(trident.explain(compiled))
    # Dynamo's own tree rejects the call in the same guard, or in another of the same source.
    spec = runtime.module_of(f.__code__).entries[-1].spec
    names = f.__code__.co_varnames[: f.__code__.co_argcount]
    verbose = dynamo.guard_check_verbose(spec, dict(zip(names, second, strict=True)))
    same_guard = older.last_miss.source in verbose or older.last_miss.guard in verbose
    assert same_guard or "Duplicate tensor" in verbose, verbose


def test_why_with_several_specializations(enabled: None) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for n in (2, 3, 4, 2, 3, 4, 9):
        compiled(torch.ones(n))
    (frame,) = trident.explain(compiled).frames
    expected = [None] + [f"size of x at dimension 0: expected {n}, got 9" for n in (4, 3, 2)]
    found = [
        spec.last_miss and str(spec.last_miss).split("  # ")[0] for spec in frame.specializations
    ]
    assert found == expected
    assert "x: x + 1, backend" in frame.specializations[1].last_miss.user_line


def test_why_a_shape_condition_failed(enabled: None) -> None:
    @torch.compile(backend="eager", dynamic=True)
    def f(x: Any, y: Any) -> Any:
        if x.shape[0] % 4 == 0 and x.shape[0] < 100:
            return x.sum() + y.sum()
        return x.sum() - y.sum()

    for n in (8, 12, 8):
        f(torch.ones(n, 3), torch.ones(5))
    f(torch.ones(10, 3), torch.ones(5))
    miss = trident.explain(f).frames[0].specializations[-1].last_miss
    assert miss is not None
    assert miss.subject == "a condition on x"
    assert "4" in miss.expected
    assert "100" not in miss.expected  # only the condition that does not hold
    assert miss.got == "x: a torch.Tensor of float32 (10, 3) on cpu"
    assert "if x.shape[0] % 4 == 0" in str(miss.user_line)


def test_why_of_the_surroundings(enabled: None) -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    for _ in range(3):
        compiled(X)
    with torch.no_grad():
        compiled(X)
    miss = trident.explain(compiled).frames[0].specializations[-1].last_miss
    assert str(miss).startswith("global state grad_mode: expected as when compiled, got changed")


def test_why_keeps_nothing_alive_and_asks_nobody(enabled: None) -> None:
    asked = []

    class Loud:
        value = 1

        def __repr__(self) -> str:
            asked.append("repr")
            return "loud"

        __str__ = __repr__

        def __len__(self) -> int:
            asked.append("len")
            return 1

        def __eq__(self, other: object) -> bool:
            asked.append("eq")
            return True

        __hash__ = None  # type: ignore[assignment]

    def f(x: Any, config: Any) -> Any:
        return x + config.value

    compiled = torch.compile(f, backend="eager")
    for _ in range(2):
        compiled(X, Config(1))
    tensor, loud = torch.ones(4, dtype=torch.float64), Loud()
    compiled(tensor, Config(1))
    references = [weakref.ref(tensor)]
    del tensor
    gc.collect()
    assert [r() for r in references] == [None]
    assert "dtype of x: expected float32, got float64" in str(trident.explain(compiled))
    asked.clear()
    compiled(X, loud)
    during_stock = list(asked)
    text = str(trident.explain(compiled))
    assert asked == during_stock
    assert "Loud" in text
    torch._dynamo.reset()
    reference = weakref.ref(loud)
    del loud
    gc.collect()
    assert reference() is None


def test_why_for_another_backend(enabled: None) -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        return gm.forward

    def f(x: Any) -> Any:
        return x + 1

    first, second = torch.compile(f, backend="eager"), torch.compile(f, backend=backend)
    for _ in range(2):
        first(X)
    second(X)
    specs = trident.explain(f).frames[0].specializations
    miss = specs[-1].last_miss
    assert miss is not None
    assert miss.row == -1
    assert "no guard failed" in str(trident.explain(f))
    assert "another backend" in str(miss)


def test_the_words_for_every_check() -> None:
    """No operation is without words, whatever it looked at."""
    from trident import _frame
    from trident.codegen.lower_guards import GuardTable, Row

    objects: dict[str, Any] = {
        "check_tensor": (0, 0, 0, 0, torch.float32, -1, False, (1,), (1,)),
        "check_no_attr": ("a",),
        "check_function_modes": (),
    }
    snapshots: list[Any] = [
        None,
        ("value", None),
        ("value", torch.device("cpu")),
        ("type", "int"),
        ("object", "list", 2),
        ("object", "C", -1),
        ("tensor", "torch.Tensor", 0, torch.float32, torch.device("cpu"), False, (1,), (1,)),
        ("tensor", "S", 1, None, None, None, None, None),
        ("text", "grad_mode "),
        ("locals", {"x": ("value", 1)}),
    ]
    for op in _frame.op_names():
        source, target = (-1, 0) if not op.startswith("check") else (0, -1)
        row = Row(op, target, source, 1, 2, objects.get(op, "k"), 0)
        table = GuardTable([row], 1, ["L['x'].y: check  # line"], ("x",))
        for got in snapshots:
            report = guard_report.miss_report(table, 0, got, lambda label: [])
            assert report.subject, op
            assert report.expected, op
            assert report.got, op
            assert report.user_line == "line"


def test_misses_cost_no_memory(enabled: None) -> None:
    """Only the last miss is kept."""
    compiled = torch.compile(use_number, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(X, 1)
        compiled(X, 1)
        for n in range(2, 50):
            compiled(X, n)
            compiled(X, 1)
    assert "n: expected 1, got 49" in str(trident.explain(compiled))
    assert frame_stats("use_number").misses >= 48


def test_a_build_that_cannot_start(
    without_strict: None, enabled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch-mlir the code generator cannot be imported: all is stock, and says so."""
    monkeypatch.setitem(sys.modules, "trident.codegen.pipeline", None)
    monkeypatch.delattr("trident.codegen.pipeline", raising=False)

    def nothing(x: Any) -> Any:
        return x

    def f(x: Any) -> Any:
        return x + 1

    x = torch.ones(3)
    for compiled, expected in (
        (torch.compile(nothing), x),
        (torch.compile(f, backend="eager"), x + 1),
    ):
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
    assert "internal failure: ModuleNotFoundError" in str(trident.explain(compiled))
