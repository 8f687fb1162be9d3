"""Under ``backend="trident"`` all is as in eager, bit for bit, and the graph runs natively."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import trident
from tests.conftest import frame_stats
from tests.host_functions import FUNCTIONS, TRAINED, make_inputs
from tests.test_equality import assert_same

CALLS = 4


def run(f: Any, requires_grad: bool = False, device: str = "cpu") -> list[Any]:
    """Results, inputs afterwards, gradients and the generators' states of some calls."""
    found = []
    torch.manual_seed(3)
    for _ in range(CALLS):
        inputs = [x.to(device).requires_grad_(requires_grad) for x in make_inputs()]
        result = f(*inputs)
        if requires_grad:
            result[0].backward()
        aliases = [[_same_storage(a, b) for b in inputs] for a in _tensors(result)]
        gradients = [x.grad for x in inputs]
        states = [torch.get_rng_state()]
        if device == "cuda":
            states.append(torch.cuda.get_rng_state())
        found.append((result, inputs, gradients, aliases, states))
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, bool]:
    return a is b, a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def native_programs(name: str) -> list[bool]:
    """For each specialization of the frame called `name`: does it run natively, with its graph?"""
    return [
        bool(entry.built is not None and entry.built.program and entry.built.plan_address)
        for module in trident.control.runtime.modules.values()
        if module.name == name
        for entry in module.entries
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_as_eager(enabled: None, name: str) -> None:
    f = FUNCTIONS[name]
    expected = run(f)
    assert_same(run(torch.compile(f, backend="trident")), expected)
    assert native_programs(name) == [True]


@pytest.mark.parametrize("name", TRAINED)
def test_trained_as_eager(enabled: None, name: str) -> None:
    f = TRAINED[name]
    expected = run(f, requires_grad=True)
    assert_same(run(torch.compile(f, backend="trident"), requires_grad=True), expected)
    assert native_programs(name) == [True]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_as_eager_without_trident(fresh: None, name: str) -> None:
    f = FUNCTIONS[name]
    assert_same(run(torch.compile(f, backend="trident")), run(f))


@torch.library.custom_op("trident_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_explain(enabled: None) -> None:
    def f(x: Any, i: Any) -> Any:
        return triple((x + 1)[i]) * 2

    compiled = torch.compile(f, backend="trident")
    arguments = torch.ones(3), torch.tensor([2, 0])
    for _ in range(3):
        compiled(*arguments)
    explanation = trident.explain(compiled, ir=True)
    (frame,) = explanation.frames
    (spec,) = frame.specializations
    assert spec.plan_native
    assert spec.program_native
    assert "4 operators, trident_tests::triple through the dispatcher" in str(explanation)
    assert 'name = "aten.add.Tensor"' in spec.ir["scm"]
    assert "_ZN2at4_ops10mul_Tensor4callE" in spec.ir["llvm"]
    assert f"{__file__}:" in spec.ir["scm"]


def in_pieces(x: Any, i: Any, scale: float) -> Any:
    y = torch.relu(x + 1) * scale
    torch._dynamo.graph_break()
    return y[i] * 2


def boolean_mask(x: Any, i: Any, scale: float) -> Any:
    return x[x > 0] * scale, i.nonzero()


def in_a_context(x: Any, i: Any, scale: float) -> Any:
    y = torch.relu(x + 1) * scale
    with torch.no_grad():
        torch._dynamo.graph_break()
        return y[i] * 2


@pytest.mark.parametrize("f", [in_pieces, boolean_mask, in_a_context])
def test_graph_breaks(enabled: None, f: Any) -> None:
    """The plan goes on after the break; in a context Dynamo's code does, which handles exceptions,
    and calls the host program for its graph."""
    compiled = torch.compile(f, backend="trident")
    x, i = torch.randn(4), torch.tensor([2, 0])
    for scale in (0.5, 1.5, 2.5, -1.0):
        assert_same(compiled(x, i, scale), f(x, i, scale))
    is_plan = f is not in_a_context
    counters = frame_stats(f.__name__)
    assert (counters.hits >= 2) == is_plan
    assert (counters.run_code >= 2) != is_plan
    frame = trident.explain(compiled).frames[0]
    assert frame.specializations[0].program_native
    assert frame.specializations[0].plan_native == is_plan
    assert ("called by Dynamo's code object" in str(trident.explain(compiled))) != is_plan


def test_error_after_a_graph_break(enabled: None) -> None:
    compiled = torch.compile(in_pieces, backend="trident")
    x, good, bad = torch.randn(4), torch.tensor([2, 0]), torch.tensor([9, 0])
    for _ in range(3):
        compiled(x, good, 0.5)
    (actual, lines), (expected, _) = (_raised(f, x, bad) for f in (compiled, in_pieces))
    assert actual == expected
    assert lines[-1].endswith("return y[i] * 2")


def _raised(f: Any, *arguments: Any) -> tuple[Any, list[str]]:
    with pytest.raises(IndexError) as raised:
        f(*arguments, 0.5)
    return str(raised.value), [str(entry.statement).strip() for entry in raised.traceback]


def test_graph_of_dynamos_code_after_disable(fresh: None) -> None:
    """Without Trident, or where a mode must see every operator, the graph runs as it is."""
    compiled = torch.compile(in_a_context, backend="trident")
    x, i = torch.randn(4), torch.tensor([2, 0])
    with trident.enable():
        for _ in range(3):
            compiled(x, i, 0.5)
    (entry,) = (
        entry
        for module in trident.control.runtime.modules.values()
        if module.name == "in_a_context"
        for entry in module.entries
    )
    (name,) = (n for n in entry.spec.compiled_code.co_names if n.startswith("__compiled_fn_"))
    graph = trident.capture.graph.of_callable(globals()[name])
    assert entry.built.program is not None
    assert graph is not None
    calls = []
    native, graph.native = graph.native, lambda *inputs: calls.append(inputs) or native(*inputs)
    assert_same(compiled(x, i, 0.5), in_a_context(x, i, 0.5))
    assert not calls
    with trident.enable():
        assert_same(compiled(x, i, 0.5), in_a_context(x, i, 0.5))
        assert len(calls) == 1
        with torch.profiler.profile():
            assert graph.native(x, i) is NotImplemented


def test_explain_says_why_not(enabled: None) -> None:
    compiled = torch.compile(lambda x: x.clone().t_(), backend="trident")
    for _ in range(3):
        compiled(make_inputs()[0])
    assert "t_ changes what a tensor is" in str(trident.explain(compiled))


def test_cudnn_switched_off(enabled: None, monkeypatch: Any) -> None:
    """Python functions pass the flag to their operator, as it is at the call."""
    f = torch.compile(lambda x: F.layer_norm(x, (3,)), backend="trident")
    x = torch.randn(2, 3)
    for _ in range(3):
        f(x)
    trident.reset_stats()
    expected = F.layer_norm(x, (3,))
    for on, hits in ((True, 1), (False, 1), (True, 2)):
        monkeypatch.setattr(torch.backends.cudnn, "enabled", on)
        assert torch.equal(f(x), expected)
        assert trident.stats().hits == hits


GLOBAL = torch.zeros(1)


def from_a_global(x: Any) -> Any:
    return x, GLOBAL


def from_a_global_and_a_graph(x: Any) -> Any:
    return x + 1, GLOBAL


@pytest.mark.parametrize("f", [from_a_global, from_a_global_and_a_graph])
@pytest.mark.parametrize("backend", ["eager", "trident"])
def test_two_functions_with_one_code(fresh: None, f: Any, backend: str) -> None:
    """Dynamo's guards look at the globals of the function that was compiled; its code at those of
    the one that is called."""
    other = FunctionType(f.__code__, {**globals(), "GLOBAL": torch.ones(1)})
    x = torch.ones(2)

    def attempts() -> list[Any]:
        torch._dynamo.reset()
        functions = [torch.compile(g, backend=backend, fullgraph=True) for g in (f, other)]
        found: list[Any] = []
        for g in functions * 4:
            try:
                found.append(g(x))
            except NameError:  # the graph is in the other's globals
                found.append(NameError)
        return found

    expected = attempts()
    with trident.enable():
        assert_same(attempts(), expected)


BY_NAME = """
import sys, torch
from torch._dynamo.backends import registry
if {imported}:
    import trident
    registry._discover_entrypoint_backends = lambda: None
assert torch.compile(lambda x: x + 1, backend="trident")(torch.ones(2)).tolist() == [2, 2]
assert "trident.backend" in sys.modules
"""


@pytest.mark.parametrize("imported", [False, True])
def test_backend_is_found_by_name(imported: bool) -> None:
    """By the installed entry point, and without it once trident is imported."""
    if not imported and not entry_points(group="torch_dynamo_backends", name="trident"):
        pytest.skip("the package is not installed")
    code = BY_NAME.format(imported=imported)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
