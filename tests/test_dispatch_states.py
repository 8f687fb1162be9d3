"""In every special state, Trident answers as stock does.

Each scenario builds compiled callables, warms them until they are served natively, then does
something special. It is run stock and under Trident; results, exceptions and compilations must be
equal.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trident
from tests.conftest import compilations, reset_compilations
from tests.states import Doubler, Identity
from tests.test_equality import assert_same

X = torch.arange(4.0)
SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def callables(**options: Any) -> dict[str, Callable[..., Any]]:
    """Compiled callables of every kind, warmed up: doors are open under Trident."""

    def same(x: Any) -> Any:
        return x

    def pair(x: Any, y: int = 3) -> Any:
        return (x, "constant", (y, x))

    def graph(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    in_place = Identity()
    in_place.compile(backend="eager", **options)
    result: dict[str, Callable[..., Any]] = {
        "same": torch.compile(same, backend="eager", **options),
        "pair": torch.compile(pair, backend="eager", **options),
        "graph": torch.compile(graph, backend="eager", **options),
        "module": torch.compile(Doubler(), backend="eager", **options),
        "identity": torch.compile(Identity(), backend="eager", **options),
        "in_place": in_place,
    }
    for function in result.values():
        for _ in range(4):
            function(X)
    return result


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error).splitlines()[:1]


def all_outcomes(*args: Any) -> list[Any]:
    return [outcome(function, *args) for function in callables().values()]


def call_all(functions: dict[str, Callable[..., Any]], *args: Any) -> list[Any]:
    return [outcome(function, *args) for function in functions.values()]


@scenario
def plain() -> Any:
    return all_outcomes(X)


@scenario
def no_grad_and_inference_mode() -> Any:
    functions = callables()
    weight = torch.ones(4, requires_grad=True)
    result = []
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            result.append([r for r in call_all(functions, weight) if isinstance(r, torch.Tensor)])
            result.append([torch.is_inference(r) for r in result[-1]])
    return [r for r in result if r and isinstance(r[0], bool)]


@scenario
def autocast() -> Any:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    f = torch.compile(multiply, backend="eager")
    square = torch.ones(4, 4)
    result = [f(square), f(square)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result += [f(square), f(square)]
    return [*result, f(square)]


@scenario
def make_fx() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    functions = callables()
    result = []
    for name in ("same", "graph", "module", "identity"):
        for pre_dispatch in (False, True):
            traced = outcome(trace(functions[name], pre_dispatch=pre_dispatch), X)
            if isinstance(traced, torch.fx.GraphModule):
                result.append([str(n.target) for n in traced.graph.nodes])
                result.append(traced(X + 1))
            else:
                result.append(traced)
    return result


@scenario
def symbolic_trace() -> Any:
    functions = callables()
    result = []
    for name in ("same", "graph"):
        inner = functions[name]

        def outer(x: Any, inner: Any = inner) -> Any:
            return inner(x) + 1

        traced = outcome(torch.fx.symbolic_trace, outer)
        kind = isinstance(traced, torch.fx.GraphModule)
        result.append(len(traced.graph.nodes) if kind else traced)
    return result


@scenario
def export() -> Any:
    functions = callables()

    class Outer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functions["same"](x) + functions["graph"](x)

    exported = outcome(torch.export.export, Outer(), (X,))
    if isinstance(exported, tuple):
        return exported
    return [str(n.target) for n in exported.graph.nodes], exported.module()(X)


@scenario
def jit_trace() -> Any:
    functions = callables()
    return [outcome(torch.jit.trace, functions[name], (X,)) for name in ("same", "graph")]


@scenario
def functorch() -> Any:
    functions = callables()
    batch = torch.arange(8.0).reshape(2, 4)
    result: list[Any] = []
    for name in ("same", "graph", "module", "identity"):
        f = functions[name]
        result.append(outcome(torch.vmap(f), batch))
        result.append(outcome(torch.func.grad(lambda x, f=f: f(x).sum()), X))
        result.append(outcome(torch.func.jvp, f, (X,), (torch.ones(4),)))
    return result


class LoggingMode(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append(str(func))
        return func(*args, **(kwargs or {}))


@scenario
def dispatch_mode() -> Any:
    functions = callables()
    log: list[str] = []
    with LoggingMode(log):
        results = call_all(functions, X)
    return results, log, call_all(functions, X)


class CountingFunctionMode(torch.overrides.TorchFunctionMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@scenario
def function_mode() -> Any:
    functions = callables()
    log: list[str] = []
    with CountingFunctionMode(log):
        results = call_all(functions, X)
    return results, log, call_all(functions, X)


@scenario
def default_device() -> Any:
    def make(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(4)

    f = torch.compile(make, backend="eager")
    result = [f(X), f(X)]
    with torch.device("meta"):
        result.append(outcome(f, X))
    torch.set_default_device("cpu")
    try:
        result += [f(X), f(X)]
    finally:
        torch.set_default_device(None)
    return [*result, f(X)]


@scenario
def fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    functions = callables()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        results = call_all(functions, fake)
    return [str(r) if isinstance(r, tuple) else (type(r), tuple(r.shape)) for r in results]


@scenario
def stances() -> Any:
    functions = callables()
    other = torch.arange(6.0)
    result = []
    for stance in ("force_eager", "eager_on_recompile", "fail_on_recompile", "default"):
        with torch.compiler.set_stance(stance):
            result.append([call_all(functions, X), outcome(functions["graph"], other)])
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        result.append([outcome(functions["graph"], X), []])
    result.append([call_all(functions, X), outcome(functions["graph"], other)])
    return result


@scenario
def disabled_regions() -> Any:
    functions = callables()

    def use(x: torch.Tensor) -> Any:
        return [f(x) for f in functions.values()]

    off = torch._dynamo.disable(use)
    off_inside = [torch.compiler.disable(f)(X) for f in functions.values()]
    return off(X), off_inside, call_all(functions, X)


@scenario
def nested_compiled() -> Any:
    functions = callables()

    def outer(x: torch.Tensor) -> Any:
        y = x + 1
        torch._dynamo.graph_break()
        return functions["graph"](functions["same"](y)), functions["identity"](y)

    f = torch.compile(outer, backend="eager")
    return [f(X) for _ in range(4)], call_all(functions, X)


@scenario
def fullgraph_caller() -> Any:
    functions = callables()

    def outer(x: torch.Tensor) -> Any:
        return functions["same"](x) + functions["graph"](x)

    f = torch.compile(outer, backend="eager", fullgraph=True)
    result = [outcome(f, X) for _ in range(3)]
    g = torch.compile(lambda x: functions["graph"](x) * 2, backend="eager", fullgraph=True)
    return result, [outcome(g, X) for _ in range(3)], [outcome(f, X) for _ in range(2)]


@scenario
def fullgraph_wrappers() -> Any:
    functions = callables(fullgraph=True)
    return [call_all(functions, X) for _ in range(3)]


@scenario
def backends_do_not_mix() -> Any:
    calls: list[str] = []

    def backend(name: str) -> Any:
        def compile_graph(gm: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                calls.append(name)
                return gm.forward(*args)

            return run

        return compile_graph

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    a = torch.compile(body, backend=backend("a"))
    b = torch.compile(body, backend=backend("b"))
    result = [f(X) for f in (a, b, a, b, a, b, b, a)]
    return result, calls


@scenario
def dynamic_options() -> Any:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0]

    result = []
    for dynamic in (True, False, None):
        f = torch.compile(body, backend="eager", dynamic=dynamic)
        result.append([f(torch.ones(n)) for n in (3, 4, 5, 3, 4, 9)])
        torch._dynamo.reset()
    return result


@scenario
def recompile_limit() -> Any:
    def body(x: torch.Tensor, n: float) -> torch.Tensor:
        return x + n

    f = torch.compile(body, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        numbers = [1, 2, 3, 4, 5, 1, 2, 3, 5, 1]
        return [f(X, n) for n in map(str.__len__, ("x" * n for n in numbers))]


@scenario
def global_state() -> Any:
    functions = callables()
    result = []
    threads = torch.get_num_threads()
    for change, undo in (
        (lambda: torch.set_num_threads(threads + 1), lambda: torch.set_num_threads(threads)),
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
    ):
        change()
        try:
            result.append(call_all(functions, X))
        finally:
            undo()
        result.append(call_all(functions, X))
    return result


@scenario
def saved_tensor_hooks() -> Any:
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()

    f = torch.compile(body, backend="eager")
    packed: list[str] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed.append("pack")
        return x

    x = X.clone().requires_grad_()
    result = [f(x), f(x)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result += [f(x), f(x)]
    return [r.detach() for r in result], packed


@scenario
def traced_and_profiled() -> Any:
    functions = callables()
    log: list[str] = []

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_name in ("same", "pair", "graph", "forward"):
            log.append(f"{event} {frame.f_code.co_name}")
        return tracer if event == "call" and not log[50:] else None

    sys.settrace(tracer)
    try:
        traced = call_all(functions, X)
    finally:
        sys.settrace(None)
    sys.setprofile(lambda frame, event, arg: tracer(frame, event, arg) and None)
    try:
        profiled = call_all(functions, X)
    finally:
        sys.setprofile(None)
    return traced, profiled, log, call_all(functions, X)


@scenario
def torch_profiler() -> Any:
    functions = callables()
    with torch.profiler.profile() as profile:
        results = call_all(functions, X)
    names = [e.name for e in profile.events() if "Torch-Compiled Region" in e.name]
    return results, len(names)


@scenario
def exceptions_in_compiled_code() -> Any:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) @ y

    f = torch.compile(body, backend="eager", dynamic=True)
    good = torch.ones(4, 4)
    result = [f(good, good), f(good, good)]
    return [*result, *(outcome(f, torch.ones(3, n), torch.ones(5, 2)) for n in (4, 4, 5))]


@scenario
def generators_and_coroutines() -> Any:
    def numbers(x: torch.Tensor) -> Any:
        for i in range(3):
            yield x + i

    f = torch.compile(numbers, backend="eager")
    return [list(f(X)) for _ in range(3)]


@scenario
def compile_in_thread() -> Any:
    functions = callables()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call_all(functions, X)))
    thread.start()
    thread.join()
    return results, call_all(functions, X)


def run(name: str) -> tuple[Any, dict[str, int]]:
    torch._dynamo.reset()
    reset_compilations()
    return SCENARIOS[name](), compilations()


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_same_as_stock(fresh: None, monkeypatch: Any, name: str) -> None:
    monkeypatch.setenv("TRIDENT_STRICT", "1")
    expected, stock_compilations = run(name)
    with trident.enable():
        actual, trident_compilations = run(name)
        stats = trident.stats()
    assert_same(actual, expected)
    assert trident_compilations == stock_compilations
    served = stats.hits + stats.run_code > 0
    assert served or name == "generators_and_coroutines", "the scenario never reached Trident"


def test_default_stance_set_anew(fresh: None) -> None:
    with trident.enable():
        functions = callables()
        torch.compiler.set_stance("force_eager")
        try:
            call_all(functions, X)
        finally:
            torch.compiler.set_stance("default")  # another object than the first
        before = trident.stats().hits + trident.stats().run_code
        call_all(functions, X)
        assert trident.stats().hits + trident.stats().run_code == before + len(functions)


def test_first_enabled_in_another_stance() -> None:
    code = """
        import torch, trident
        x = torch.ones(2)
        f = torch.compile(lambda x: x + 1, backend="eager")
        f(x)
        log = []
        with torch.compiler.set_stance("force_eager"), trident.enable():
            f(x), f(x)
            assert trident.stats().run_code == 0
        with trident.enable():
            f(x), f(x)
            assert trident.stats().run_code == 2, trident.stats()
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with 3.12")
def test_monitored(fresh: None) -> None:
    monitoring = sys.monitoring
    with trident.enable():
        functions = callables()
        log: list[str] = []
        monitoring.use_tool_id(3, "test")
        try:
            monitoring.register_callback(
                3, monitoring.events.PY_START, lambda code, _: log.append(code.co_name)
            )
            monitoring.set_events(3, monitoring.events.PY_START)
            call_all(functions, X)
        finally:
            monitoring.set_events(3, 0)
            monitoring.free_tool_id(3)
    assert {"same", "pair", "graph", "forward"} <= set(log)
