"""Long runs, threads, forks, resets and ends in places where Trident is in the middle of something.

tests/test_dispatch_lifetime.py has the plain cases; here are those that need a certain moment.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import trident
from tests.conftest import compilations, frame_stats, reset_compilations
from tests.test_dispatch_lifetime import assert_flat
from trident import capture
from trident.codegen import pipeline
from trident.control import runtime

X = torch.arange(4.0)
PATIENCE = 20.0  # seconds that a thread or a child process may take before it counts as hanging


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def in_thread(body: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `body` in a thread; call the result to join it and get what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((body(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(PATIENCE)
        assert outcome, "the thread hangs"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return join


def in_child(body: Callable[[], bool]) -> Callable[[], None]:
    """Forks; call the result to wait for the child, in which `body` must return True in time."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(PATIENCE))
            status = 0 if body() else 2
        finally:
            os._exit(status)

    def join() -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return join


def run_python(code: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


# ---- long runs ----


def helper(x: Any) -> Any:
    return (x, "constant")


def test_hook_hits_are_flat(enabled: None) -> None:
    """Frames inside a compiled region get no door: the eval-frame hook itself answers them."""

    @torch.compile(backend="eager")
    def f(x: Any) -> Any:
        torch._dynamo.graph_break()
        for _ in range(100):
            helper(x)
        return helper(x)

    f(X)
    f(X)
    hits = frame_stats("helper").hits
    assert_flat(lambda: f(X), 1000, X, helper, helper.__code__)
    assert frame_stats("helper").hits - hits >= 100_000


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="stock itself keeps 3 KB of each compilation that fails"
)
def test_misses_between_hits_are_flat(enabled: None) -> None:
    """A hit after each few misses, so that the frame is not left to stock after too many."""

    def f(x: Any, n: int) -> Any:
        return (x, n)

    compiled = torch.compile(f, backend="eager", dynamic=False, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        for _ in range(4):
            compiled(X, 1)

        def call() -> None:
            assert compiled(X, 1) == (X, 1)
            for _ in range(3):
                with contextlib.suppress(torch._dynamo.exc.FailOnRecompileLimitHit):
                    compiled(X, 2)

        call()
        hits = frame_stats("f").hits
        assert_flat(call, 2000, X, f, f.__code__, compiled)
        assert frame_stats("f").hits - hits >= 2000


def test_rejected_arguments_are_flat(enabled: None) -> None:
    def f(a: Any, *, key: Any) -> Any:
        return (a, key)

    compiled, argument = torch.compile(f, backend="eager"), object()
    for _ in range(4):
        compiled(argument, key=1)
    arguments = {"key": argument, "other": argument}

    def call() -> None:
        compiled(argument, key=argument)
        for wrong in ((argument, argument), (argument,)):
            try:
                compiled(*wrong, **arguments)
            except TypeError:
                continue
            raise AssertionError("accepted")

    hits = frame_stats("f").hits
    assert_flat(call, 20_000, argument, f, compiled)
    assert frame_stats("f").hits - hits >= 20_000


def test_20000_exceptions_are_flat(enabled: None) -> None:
    """By value: of other shapes, Dynamo would not use what it compiled."""

    def f(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index)

    compiled = torch.compile(f, backend="eager")
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 200])
    for _ in range(4):
        compiled(X, good)

    def call() -> None:
        try:
            compiled(X, bad)
        except IndexError:
            return
        raise AssertionError("not raised")

    call()
    served = frame_stats("f").run_code
    assert_flat(call, 20_000, X, bad, f, f.__code__, compiled)
    assert frame_stats("f").run_code - served >= 20_000


# ---- threads ----


class Gate:
    """Many may be inside `shared` at once, or one in `alone`, which goes first."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = self._waiting = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting == 0)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
            self._condition.wait_for(lambda: self._inside == 0)
            yield
            self._waiting -= 1
            self._condition.notify_all()


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_threads_with_resets(enabled: None) -> None:
    """Calls, compilations, switching, and resets. The gate keeps only the resets apart from calls:
    stock torch itself crashes when Dynamo is reset while another thread is in its lookup."""
    model, gate, stop = Scale(), Gate(), threading.Event()
    functions: list[tuple[Any, Any, Any]] = [
        (torch.compile(helper, backend="eager"), X, (X, "constant")),
        (torch.compile(model, backend="eager"), X, X),
        (torch.compile(lambda x: torch.relu(x) + 1, backend="eager"), X, X + 1),
        (torch.compile(lambda x: x, backend="eager", fullgraph=True), X, X),
    ]
    counts = {"calls": 0, "resets": 0, "switches": 0, "compilations": 0}

    def check(function: Any, argument: Any, expected: Any) -> None:
        result = function(argument)
        if isinstance(expected, tuple):
            assert result == expected
        else:
            assert torch.equal(result, expected)

    def call() -> None:
        with gate.shared():
            for function in functions:
                check(*function)
        counts["calls"] += 1

    def compile_new() -> None:
        number = counts["compilations"] = counts["compilations"] + 1
        f = torch.compile(lambda x: x + number, backend="eager")
        for _ in range(3):
            with gate.shared():
                check(f, X, X + number)

    def switch() -> None:
        with trident.enable():
            time.sleep(0.001)
        trident.stats()
        if counts["switches"] % 4 == 3:
            trident.disable()
            time.sleep(0.001)
            keep.append(trident.enable())
        counts["switches"] += 1

    def reset() -> None:
        time.sleep(0.05)
        with gate.alone():
            torch._dynamo.reset()
        counts["resets"] += 1

    def until_stopped(body: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                body()
        finally:
            stop.set()

    keep: list[Any] = []
    call()
    with switching_often():
        bodies = (call, call, compile_new, switch, reset)
        joins = [in_thread(lambda body=body: until_stopped(body)) for body in bodies]
        end = time.monotonic() + 4
        while time.monotonic() < end or (
            min(counts.values()) < 3 and time.monotonic() < end + 4 * PATIENCE
        ):
            if stop.wait(0.1):
                break
        stop.set()
        for join in joins:
            join()
    while trident.is_enabled():
        trident.disable()
    assert min(counts.values()) > 2, counts
    keep.append(trident.enable())
    for _ in range(4):
        call()
    assert trident.stats().hits > 0
    assert trident.stats().run_code > 0
    trident.disable()


class Collision:
    """A dict key in the way of the name "scale": who looks that up, as guards do, calls Python."""

    interrupt: Callable[[], object] | None = None

    def __hash__(self) -> int:
        return hash("scale")

    def __eq__(self, other: object) -> bool:
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            interrupt()
        return self is other


class Options:
    scale = 1.0


@pytest.fixture
def options() -> Iterator[Options]:
    value, collision = Options(), Collision()
    vars(value)[collision] = vars(value)["collision"] = collision  # type: ignore[index]
    value.scale = 3.0
    yield value
    assert collision.interrupt is None, "the guards did not run"


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("end", ["reset", "disable", "nothing"])
def test_ended_by_another_thread_during_its_guards(
    fresh: None, options: Options, end: str, plan: bool
) -> None:
    """Whatever ends there, the call's value is that of the function."""
    reached, go_on = threading.Event(), threading.Event()

    def interrupt() -> None:
        reached.set()
        assert go_on.wait(PATIENCE)

    def f(x: torch.Tensor) -> Any:
        number = 7 if options.scale == 3.0 else 0
        return (x, number) if plan else x * number

    def check(result: Any, number: int) -> None:
        assert result == (X, number) if plan else torch.equal(result, X * number)

    with trident.enable():
        compiled = torch.compile(f, backend="eager", fullgraph=plan)
        for _ in range(4):
            check(compiled(X), 7)
        frame = frame_stats("f")
        assert (frame.hits if plan else frame.run_code) > 0
        vars(options)["collision"].interrupt = interrupt
        join = in_thread(lambda: compiled(X))
        assert reached.wait(PATIENCE)
        try:
            (spec,) = runtime.module_of(f.__code__).entries
            if end == "reset":
                torch._dynamo.reset()
            elif end == "disable":
                trident.disable()
            assert spec.spec.alive == (end != "reset")
        finally:
            go_on.set()
        check(join(), 7)
        for _ in range(3):
            check(compiled(X), 7)


def test_two_threads_build_the_same_specialization(enabled: None, monkeypatch: Any) -> None:
    """Only one may: of two natives, the end of the entry would reach only one."""
    first_builds, second_is_done = threading.Event(), threading.Event()
    original, builds = pipeline.build, list[Any]()

    def slow(spec: Any) -> Any:
        builds.append(spec)
        if not first_builds.is_set():
            first_builds.set()
            assert second_is_done.wait(PATIENCE)
        return original(spec)

    def f(x: torch.Tensor, kind: str) -> Any:
        return (x, len(kind))

    monkeypatch.setattr(pipeline, "build", slow)
    compiled = torch.compile(f, backend="eager", fullgraph=True, dynamic=False)
    compiled(X, "a")
    join = in_thread(lambda: compiled(X, "a"))
    assert first_builds.wait(PATIENCE)
    compiled(X, "bb")  # one more: the module is stale again while the first thread builds
    for kind in ("a", "bb", "a", "bb"):
        assert compiled(X, kind) == (X, len(kind))
    second_is_done.set()
    assert join() == (X, 1)
    for kind in ("a", "bb", "a", "bb"):
        assert compiled(X, kind) == (X, len(kind))
    entries = runtime.module_of(f.__code__).entries
    assert [entry.native is not None for entry in entries] == [True, True]
    assert len(builds) == len(set(map(id, builds))) == 2
    assert frame_stats("f").hits >= 4


# ---- forks ----


def compiled_before(n: int, fullgraph: bool = True) -> list[Callable[[], bool]]:
    """Functions compiled by Dynamo and not yet built by Trident. (After a fork the child may find
    that a thread that is gone holds Dynamo's own lock: stock torch cannot compile there.)

    Only one thread may call fullgraph ones, which have guards: stock counts the compiled frames of
    all threads together, and may then say that there was none."""

    def same(x: Any) -> Any:
        return (x, -1)

    def make(i: int) -> Callable[[], bool]:
        code = same.__code__  # each gets a code object of its own
        code = code.replace(co_consts=tuple(i if c == -1 else c for c in code.co_consts))
        function = FunctionType(code, globals())
        compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
        assert compiled(X) == (X, i)
        return lambda: compiled(X) == (X, i)

    return [make(i) for i in range(n)]


def end_fullgraph_calls() -> None:
    """In a child: of the threads that are not there any more, whose calls stock waits for."""
    module: Any = torch._C._dynamo.eval_frame
    if hasattr(module, "set_fullgraph_compiled_frame_count"):
        module.set_fullgraph_compiled_frame_count(-1)
    else:
        module.set_eval_frame_override(module._EvalFrameOverride.NONE)


def built_and_served(function: Callable[[], bool]) -> bool:
    before = trident.stats().hits
    return all(function() for _ in range(4)) and trident.stats().hits - before >= 3


def test_fork_while_another_thread_builds(enabled: None) -> None:
    stop, started = threading.Event(), threading.Event()
    functions = compiled_before(60)
    known, unknown = compiled_before(2, fullgraph=False)
    assert built_and_served(known)

    def build() -> int:
        for n, function in enumerate(functions):
            assert function()
            started.set()
            if stop.is_set():
                return n
        return len(functions)

    def child() -> bool:
        end_fullgraph_calls()
        return built_and_served(known) and built_and_served(unknown)

    with switching_often():
        join = in_thread(build)
        assert started.wait(PATIENCE)
        for i in range(8):
            in_child(child)()
            assert built_and_served(known)
            time.sleep(0.003 * i)
        stop.set()
        assert join() > 0
    assert built_and_served(unknown)


def test_fork_in_the_middle_of_a_build(enabled: None, monkeypatch: Any) -> None:
    """Surely there, inside the part that one thread at a time may be in."""
    reached, go_on = threading.Event(), threading.Event()
    original = pipeline.lower_plan
    first, second, third = compiled_before(3)

    def slow(*arguments: Any) -> Any:
        reached.set()
        go_on.wait(PATIENCE)
        return original(*arguments)

    monkeypatch.setattr(pipeline, "lower_plan", slow)
    join = in_thread(first)
    assert reached.wait(PATIENCE)

    def child() -> bool:
        monkeypatch.undo()
        end_fullgraph_calls()
        return built_and_served(second) and all(first() for _ in range(4))

    in_child(child)()
    go_on.set()
    assert join()
    assert built_and_served(first)
    assert built_and_served(third)


def test_fork_while_another_thread_compiles(enabled: None) -> None:
    """The child must not wait for the end of a compilation that it does not have: 3.11 hides the
    doors during one."""
    reached, go_on = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        reached.set()
        go_on.wait(PATIENCE)
        return graph.forward

    def plain(x: Any) -> Any:
        return (x, 1)

    known = torch.compile(plain, backend="eager", fullgraph=True)
    for _ in range(4):
        known(X)
    door = type(known)
    join = in_thread(lambda: torch.compile(lambda x: x + 1, backend=backend)(X))
    assert reached.wait(PATIENCE)

    def child() -> bool:
        return type(known) is door and built_and_served(lambda: known(X) == (X, 1))

    in_child(child)()
    go_on.set()
    assert torch.equal(join(), X + 1)
    assert type(known) is door


def test_fork_while_another_thread_switches(fresh: None, monkeypatch: Any) -> None:
    reached, go_on = threading.Event(), threading.Event()
    original = runtime.start

    def slow() -> None:
        reached.set()
        go_on.wait(PATIENCE)
        original()

    (function,) = compiled_before(1)
    monkeypatch.setattr(runtime, "start", slow)
    join = in_thread(trident.enable)
    assert reached.wait(PATIENCE)

    def child() -> bool:
        monkeypatch.undo()
        with trident.enable():
            return built_and_served(function)

    in_child(child)()
    go_on.set()
    join()
    assert built_and_served(function)
    trident.disable()


# ---- resets in the middle ----


@pytest.mark.parametrize("strict", ["", "1"])
def test_reset_inside_the_compiled_graph(
    fresh: None, monkeypatch: pytest.MonkeyPatch, strict: str
) -> None:
    """Dynamo's code object runs on while the entry that owned it is gone."""
    monkeypatch.setenv("TRIDENT_STRICT", strict)
    resets: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if resets:
                resets.clear()
                torch._dynamo.reset()
                gc.collect()
            return graph(*args)

        return run

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2 + len(f.__name__)

    with trident.enable():
        compiled = torch.compile(f, backend=backend)
        for i in range(9):
            if i in (3, 6):
                assert frame_stats("f").run_code > 0
                resets.append(1)
            assert torch.equal(compiled(X), X * 2 + 1)
        assert frame_stats("f").run_code > 0


def test_reset_inside_a_backend(fresh: None) -> None:
    """In the middle of a compilation; whatever stock makes of it."""

    def outcome() -> list[Any]:
        left = [2]

        def backend(graph: Any, inputs: Any) -> Any:
            if left:
                left.pop()
                torch._dynamo.reset()
            return graph.forward

        compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=backend)
        outcomes: list[Any] = []
        reset_compilations()
        for _ in range(5):
            try:
                outcomes.append(compiled(X).tolist())
            except Exception as error:
                outcomes.append((type(error), str(error).splitlines()[0]))
        torch._dynamo.reset()
        return [outcomes, compilations()]

    stock = outcome()
    with trident.enable():
        assert outcome() == stock


def test_reset_inside_the_guards_of_a_door(enabled: None, options: Options) -> None:
    def f(x: torch.Tensor) -> Any:
        return (x, 1 if options.scale == 3.0 else 2)

    collision = vars(options)["collision"]
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    for i in range(12):
        if i in (5, 9):
            hits = frame_stats("f").hits
            assert hits > 0
            collision.interrupt = lambda: (torch._dynamo.reset(), gc.collect())
        assert compiled(X) == (X, 1)
        assert collision.interrupt is None


# ---- death ----


def make_class(i: int) -> Any:
    return type("Config", (), {"name": "n" * i})


def make_module(i: int) -> Any:
    module = torch.nn.Identity()
    module.name = "n" * i
    return module


def make_function(i: int) -> Any:
    def function() -> None: ...

    function.name = "n" * i  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("make", [make_class, make_module, make_function])
def test_reused_addresses(fresh: None, monkeypatch: Any, make: Any, plan: bool) -> None:
    """The next object at the address of a dead one, and of the same kind, is not taken for it."""
    monkeypatch.setenv("TRIDENT_STRICT", "1")

    def f(x: torch.Tensor, thing: Any) -> Any:
        return (x, len(thing.name)) if plan else x * len(thing.name)

    addresses: set[int] = set()
    reused = 0
    with trident.enable(), torch._dynamo.config.patch(recompile_limit=100):
        compiled = torch.compile(f, backend="eager", fullgraph=True, dynamic=False)
        for i in range(40):
            if reused >= 2:
                break
            candidates = [make(i)]
            while id(candidates[-1]) not in addresses and len(candidates) < 500:
                candidates.append(make(i))
            thing = candidates[-1]
            reused += id(thing) in addresses
            addresses.add(id(thing))
            del candidates
            for _ in range(3):
                result = compiled(X, thing)
                assert result == (X, i) if plan else torch.equal(result, X * i)
            del thing
            gc.collect()
        frame = frame_stats("f")
        assert (frame.hits if plan else frame.run_code) > 0
    assert reused, "no address was used again: the test tests nothing"


def test_trained_models_are_freed(fresh: None) -> None:
    """Parameters, gradients and the optimizer too, as soon as stock frees them."""

    def make() -> list[weakref.ref[Any]]:
        model = torch.nn.Sequential(Scale(), torch.nn.Linear(4, 4), Scale())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="eager")
        for _ in range(5):
            optimizer.zero_grad()
            compiled(X).sum().backward()
            optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        return [weakref.ref(o) for o in (model, optimizer, *model.parameters(), *gradients)]

    def alive(references: list[weakref.ref[Any]]) -> list[bool]:
        gc.collect()
        return [reference() is not None for reference in references]

    stock = alive(make())
    torch._dynamo.reset()
    with trident.enable():
        references = make()
        assert alive(references) == stock
        assert trident.stats().run_code > 0
        torch._dynamo.reset()
        assert not any(alive(references))


def test_nothing_is_kept_for_dead_code(enabled: None) -> None:
    def make() -> weakref.ref[Any]:
        namespace: dict[str, Any] = {}
        exec("def f(x): return (x, 1)\ndef g(x): return x + 1", namespace)
        for name in "fg":
            compiled = torch.compile(namespace[name], backend="eager")
            for _ in range(3):
                compiled(X)
        return weakref.ref(namespace["f"].__code__)

    make()
    torch._dynamo.reset()
    gc.collect()
    modules, skipped = len(runtime.modules), len(capture.skipped_codes())
    codes = [make() for _ in range(10)]
    torch._dynamo.reset()
    gc.collect()
    assert [code() for code in codes] == [None] * len(codes)
    assert len(runtime.modules) <= modules
    assert len(capture.skipped_codes()) <= skipped


# ---- limits ----


@pytest.mark.parametrize("fullgraph", [False, True])
def test_recompile_limit(fresh: None, fullgraph: bool) -> None:
    def outcome() -> list[Any]:
        def f(x: torch.Tensor, n: str) -> torch.Tensor:
            return x * len(n)

        torch._dynamo.reset()
        reset_compilations()
        compiled = torch.compile(f, backend="eager", dynamic=False, fullgraph=fullgraph)
        outcomes: list[Any] = []
        for n in (0, 1, 0, 2, 3, 4, 0, 4, 2, 5):
            for _ in range(3):
                try:
                    outcomes.append(compiled(X, "n" * n).tolist())
                except Exception as error:
                    outcomes.append(type(error))
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(f)
        return [outcomes, compilations(), len(entries)]

    with torch._dynamo.config.patch(recompile_limit=3):
        stock = outcome()
        assert stock[-1] == 3
        with trident.enable():
            assert outcome() == stock
            assert frame_stats("f").run_code > 0


# ---- recursion ----


def depths() -> list[int]:
    """How deep Python and compiled frames nest in turn before RecursionError, each of two times."""
    reached = 0

    @torch._dynamo.disable
    def down(x: Any, n: list[int]) -> Any:
        nonlocal reached
        reached = max(reached, n[0])
        n[0] += 1
        return f(x, n)

    @torch.compile(backend="eager")
    def f(x: Any, n: Any) -> Any:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return down(y, n) if n is not None else y

    result = []
    for _ in range(2):
        for _ in range(3):
            f(X, None)
        reached = 0
        with pytest.raises(RecursionError):
            down(X, [0])
        result.append(reached)
    return result


def test_recursion_depth_through_compiled_functions(without_strict: None, fresh: None) -> None:
    stock = depths()
    torch._dynamo.reset()
    trident.reset_stats()
    with trident.enable():
        assert depths() == stock
        assert trident.stats().run_code > stock[0]
    assert stock[1] > 20


DEEP = """
    import sys, torch, trident
    x = torch.arange(4.0)
    left = [0]
    same = torch.compile(lambda x: (x, 1), backend="eager", fullgraph=True)

    @torch._dynamo.disable
    def down(x):
        left[0] -= 1
        return same(x)[0] if left[0] <= 0 else f(x)

    @torch.compile(backend="eager")
    def f(x):
        y = x + 1
        torch._dynamo.graph_break()
        return down(y)

    with trident.enable():
        for left[0] in (3, 3, 3, 3):
            f(x)
        sys.setrecursionlimit(100_000)
        left[0] = {depth}
        assert torch.equal(f(x), x + {depth})
        assert trident.stats().hits > {depth}
"""


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_STACK)[0] not in (8 << 20, resource.RLIM_INFINITY),
    reason="the depth is for a stack of 8 MiB",
)
def test_deep_stack() -> None:
    """As deep as stock, which on the machine where this was written overflows at 2,470 calls (of
    which each takes ten or so Python frames) on 3.11; Trident's own frames on the C stack allow
    2,570. Later Pythons count what is on the C stack, and raise earlier."""
    depth = 2300 if sys.version_info < (3, 12) else 200
    assert run_python(DEEP.format(depth=depth)) == (0, "", "")


# Each end in a fork of one process that has imported torch already.
SHUTDOWN = """
    import atexit, os, sys, threading, time, torch, trident
    x = torch.ones(2)
    same = torch.compile(lambda x: (x, 1), backend="eager", fullgraph=True)
    graph = torch.compile(lambda x: x + 1, backend="eager")
    plain = torch.compile(lambda x: (x, 2), backend="eager")
    def work():
        # Stock counts what fullgraph functions compiled for all threads together: not those.
        while True: plain(x)
    def check():
        assert same(x) == (x, 1)
    class Last:
        def __del__(self, same=same, graph=graph, x=x): same(x), graph(x)
    def warm():
        for _ in range(4): same(x), graph(x), plain(x)
        assert trident.stats().hits > 0 and trident.stats().run_code > 0
    with trident.enable(): warm()
    children = []
    for i, (end, status) in enumerate({ends}):
        child = os.fork()
        if child == 0:
            children.clear()
            output = os.open(f"{directory}/{{i}}", os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            exec(end)
            break
        children.append((child, i, end, status))
    for child, i, end, status in children:
        found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = open(f"{directory}/{{i}}").read()
        if (found, text) != (status, ""): print(end, found, text, sep="\\n")
"""

# (Daemon threads only get what calls no kernel: stock torch aborts if one is in a kernel then, and
# from Python 3.12 on also if one is in any compiled function.)
ENDS = [
    ("trident.enable(); warm()", 0),
    ("with trident.enable(): warm(); sys.exit(5)", 5),
    ("trident.enable(); warm(); os._exit(6)", 6),
    ("trident.enable(); warm(); torch._dynamo.reset()", 0),
    ("trident.enable(); warm(); atexit.register(check)", 0),
    ("atexit.register(check); trident.enable(); warm()", 0),
    ("trident.enable(); warm(); last = Last(); last.me = last", 0),
    ("trident.enable(); warm(); same.last = Last(); same.me = same", 0),
    ("trident.enable(); warm(); threading.Thread(target=sys.exit).start()", 0),
    (
        "trident.enable(); warm(); "
        "threading.Thread(target=lambda: (time.sleep(0.3), warm())).start()",
        0,
    ),
]
if sys.version_info < (3, 12):
    start = "[threading.Thread(target=work, daemon=True).start() for _ in range(2)]"
    ENDS.append((f"trident.enable(); warm(); {start}; time.sleep(0.2)", 0))


def test_quiet_ends(tmp_path: Path) -> None:
    code = SHUTDOWN.format(ends=ENDS, directory=tmp_path)
    assert run_python(code) == (0, "", "")
    assert len(list(tmp_path.iterdir())) == len(ENDS)


def test_error_at_the_end(tmp_path: Path) -> None:
    code = SHUTDOWN.format(ends=[], directory=tmp_path)
    end = "trident.enable(); warm(); raise ValueError('deliberate')"
    status, out, err = run_python(textwrap.dedent(code) + end)
    assert (status, out, err.splitlines()[-1]) == (1, "", "ValueError: deliberate")
    assert err.count("Traceback") == 1
