from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import textwrap
import weakref
from types import CodeType
from typing import Any

import pytest
import torch

from tests.capture.conftest import Events
from trident import capture
from trident.capture import lifecycle
from trident.errors import TridentError


def code_of(function: Any) -> CodeType:
    return function.__code__


def make(text: str) -> Any:
    """A function whose code object nothing else holds."""
    namespace: dict[str, Any] = {"torch": torch}
    exec(text, namespace)
    return namespace.pop("f")


def test_events_of_a_compilation(events: Events) -> None:
    def f(x: Any) -> Any:
        return x + 1

    compiled = torch.compile(f, backend="eager")
    compiled(torch.ones(2))
    assert events.log[:3] == [("started", None), ("finished", "f"), ("added", "f")]
    compiled(torch.ones(2))
    assert [entry for entry in events.log if entry[1] == "f"] == events.log[1:3]
    (spec,) = capture.specializations_of(f.__code__)
    assert spec is events.added[0]
    assert spec.code is f.__code__
    assert isinstance(spec.compiled_code, CodeType)
    assert spec.compiled_code is not f.__code__
    assert spec.backend is capture.dynamo.backend_of(
        capture.dynamo.wrapper_context(compiled).callback
    )
    assert spec.isolate_id == -1
    assert spec.compile_id
    assert capture.dynamo.guard_check(spec, {"x": torch.ones(2)})
    assert not capture.dynamo.guard_check(spec, {"x": torch.ones(3, 3)})
    assert "rank mismatch" in capture.dynamo.guard_check_verbose(spec, {"x": torch.ones(3, 3)})
    assert capture.dynamo.guard_check_verbose(spec, {"x": torch.ones(2)}) == ""


def test_newest_first_and_recompilation(events: Events) -> None:
    def f(x: Any, mode: str) -> Any:
        return x + len(mode)

    compiled = torch.compile(f, backend="eager")
    for mode in ("a", "bb", "ccc"):
        compiled(torch.ones(2), mode)
    assert capture.specializations_of(f.__code__) == events.added[::-1]
    assert capture.live_specializations() == events.added


def test_reset(events: Events) -> None:
    def f(x: Any) -> Any:
        return x + 1

    torch.compile(f, backend="eager")(torch.ones(2))
    torch._dynamo.reset()
    assert events.removed == events.added
    assert not events.added[0].alive
    assert capture.specializations_of(f.__code__) == []


def test_reset_code(events: Events) -> None:
    def f(x: Any) -> Any:
        return x + 1

    def g(x: Any) -> Any:
        return x + 2

    torch.compile(f, backend="eager")(torch.ones(2))
    torch.compile(g, backend="eager")(torch.ones(2))
    torch._C._dynamo.eval_frame.reset_code(f.__code__)
    assert [spec.alive for spec in events.added] == [False, True]


def test_invalidation_when_a_guarded_object_dies(events: Events) -> None:
    guarded = type("Guarded", (), {})

    def f(x: Any, kind: Any) -> Any:
        return x + len(kind.__name__)

    torch.compile(f, backend="eager")(torch.ones(2), guarded)
    (spec,) = events.added
    assert spec.alive
    ids = [leaf.payload.get("obj_id") for leaf in spec.tree.leaves()]
    assert id(guarded) in ids
    reference = weakref.ref(guarded)
    del guarded
    gc.collect()
    assert reference() is None
    assert not spec.alive
    assert events.removed == [spec]
    assert capture.specializations_of(f.__code__) == []
    assert capture.entries_of(f.__code__) == []


def test_invalidation_inside_a_compiled_region(events: Events) -> None:
    # Dynamo's hook is on when the object dies: nothing of ours may be compiled then.
    holder = [type("Guarded", (), {})]

    def f(x: Any, kind: Any) -> Any:
        return x + len(kind.__name__)

    torch.compile(f, backend="eager")(torch.ones(2), holder[0])

    def drop(x: Any) -> Any:
        torch._dynamo.graph_break()
        holder.clear()
        gc.collect()
        return x + 1

    torch.compile(drop, backend="eager")(torch.ones(2))
    assert not events.added[0].alive
    names = {name for event, name in events.log if event in ("added", "skipped", "finished")}
    ours = {"__set__", "__get__", "_removed", "_tell", "specialization_removed", "wrapper"}
    assert not names & ours


def test_nothing_is_kept_alive(events: Events) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    reference, weight = weakref.ref(model), weakref.ref(model[0].weight)
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 4)
    tensor = weakref.ref(x)
    compiled(x)
    assert events.added
    del compiled, model, x
    gc.collect()
    assert reference() is None
    assert weight() is None
    assert tensor() is None


def test_nothing_is_kept_alive_after_reset(events: Events) -> None:
    class Thing:
        pass

    thing = Thing()
    thing.value = 2  # type: ignore[attr-defined]
    reference = weakref.ref(thing)
    torch.compile(lambda x, t: x * t.value, backend="eager")(torch.ones(2), thing)
    events.added.clear()
    torch._dynamo.reset()
    events.removed.clear()
    del thing
    gc.collect()
    assert reference() is None


def test_the_code_object_is_not_ours(events: Events) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    torch.compile(f, backend="eager")(torch.ones(2))
    (spec,) = events.added
    code = f.__code__
    held = sys.getrefcount(code)
    capture.uninstall()
    assert sys.getrefcount(code) == held
    capture.install()
    assert spec.code is code


def test_a_specialization_outlives_its_code() -> None:
    code = compile("1", "<test>", "eval")
    tree = capture.GuardTree(capture.Node(None, ""), [], code)
    spec = capture.Specialization(code, code.replace(), None, tree, None, "0/0")
    key = id(code)
    del code
    assert spec.code_id == key
    for holder in (spec, tree):
        with pytest.raises(ReferenceError, match="code object of this Dynamo cache entry is gone"):
            holder.code
    assert repr(spec) == "<Specialization 0/0 of <gone>>"


def test_skipped_frames(events: Events) -> None:
    f = make("def f(x): return x")
    torch.compile(f, backend="eager")(torch.ones(2))
    assert f.__code__ in events.skipped
    assert capture.is_skipped(f.__code__)
    assert ("finished", None) in events.log
    twin = f.__code__.replace()
    assert twin == f.__code__
    assert not capture.is_skipped(twin)
    code = weakref.ref(f.__code__)
    events.skipped.clear()
    del f
    torch._dynamo.reset()
    gc.collect()
    if code() is None:
        assert all(reference() is not None for reference in lifecycle._skipped.values())


def test_compiling_forgets_a_skip(events: Events) -> None:
    def f(x: Any) -> Any:
        return x + 1

    with torch._dynamo.config.patch(disable=True):
        torch.compile(f, backend="eager")(torch.ones(2))
    assert capture.is_skipped(f.__code__)
    torch._dynamo.reset()
    torch.compile(f, backend="eager")(torch.ones(2))
    assert capture.specializations_of(f.__code__)
    assert not capture.is_skipped(f.__code__)


def test_backend_exception_ends_the_compilation(events: Events) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise KeyError("backend")

    with pytest.raises(Exception, match="backend"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert events.depth == 0
    assert events.added == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_listener_exceptions_go_nowhere(events: Events, error: type[BaseException]) -> None:
    class Bad:
        def __getattr__(self, name: str) -> Any:
            def fail(*args: Any) -> None:
                raise error(name)

            return fail

    capture.set_listener(Bad())
    f = torch.compile(lambda x: x + 1, backend="eager")
    assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    (spec,) = capture.live_specializations()
    torch._dynamo.reset()
    assert not spec.alive
    texts = capture.failures()
    assert any(text.startswith("specialization_removed") for text in texts)
    lifecycle._failures.clear()


def test_isolated_regions(events: Events) -> None:
    if not hasattr(torch._C._dynamo.eval_frame, "get_eval_frame_isolate_recompiles_id"):
        pytest.skip("this torch has no recompilation scopes")

    def f(x: Any) -> Any:
        return x + 1

    compiled = torch.compile(f, backend="eager", isolate_recompiles=True)
    compiled(torch.ones(2))
    (spec,) = events.added
    context = capture.dynamo.wrapper_context(compiled)
    assert spec.isolate_id == capture.dynamo.isolate_id_of(context) >= 0


def test_the_attribute_behaves_as_before(events: Events) -> None:
    wrapper = torch._dynamo.guards.GuardManagerWrapper
    instance = wrapper()
    assert instance.cache_entry is None
    assert vars(instance)["cache_entry"] is None
    del instance.cache_entry
    assert not hasattr(instance, "cache_entry")
    with pytest.raises(AttributeError, match="'GuardManagerWrapper' object has no attribute"):
        instance.cache_entry
    with pytest.raises(AttributeError):
        del instance.cache_entry
    with pytest.raises(AttributeError):
        wrapper.cache_entry

    class Reduced(wrapper):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.cache_entry = None

        def __reduce__(self) -> Any:
            return object.__new__, (object,)

    state = dict(vars(Reduced()))
    assert pickle.loads(pickle.dumps(state)) == {"cache_entry": None}


def test_install_is_idempotent_and_uninstall_restores() -> None:
    guards, c = torch._dynamo.guards, torch._C._dynamo.guards
    frame = torch._dynamo.convert_frame.CatchErrorsWrapper
    owners = (guards, guards.CheckFunctionManager, guards.GuardManagerWrapper, frame)
    owners += (c.GuardManager, c.RootGuardManager, c.DictGuardManager)
    was_installed = capture.is_installed()
    capture.uninstall()
    before = [dict(vars(owner)) for owner in owners]
    capture.install()
    assert capture.is_installed()
    during = [dict(vars(owner)) for owner in owners]
    assert all(a != b for a, b in zip(before, during, strict=True))
    capture.install()
    assert [dict(vars(owner)) for owner in owners] == during
    capture.uninstall()
    capture.uninstall()
    for owner, old in zip(owners, before, strict=True):
        new = dict(vars(owner))
        assert new.keys() == old.keys(), owner
        assert all(new[name] is old[name] for name in old), owner
    assert not capture.is_installed()
    if was_installed:
        capture.install()


def test_uninstall_kills_specializations(events: Events) -> None:
    def f(x: Any) -> Any:
        return x + 1

    compiled = torch.compile(f, backend="eager")
    compiled(torch.ones(2))
    capture.uninstall()
    assert [spec.alive for spec in events.added] == [False]
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    capture.install()
    assert len(capture.entries_of(f.__code__)) == 1
    assert capture.specializations_of(f.__code__) == []
    torch._dynamo.reset()


def test_somebody_elses_patch_survives_uninstall(events: Events) -> None:
    guards = torch._dynamo.guards
    ours = guards.CheckFunctionManager.__init__

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    guards.CheckFunctionManager.__init__ = theirs
    capture.uninstall()
    try:
        assert guards.CheckFunctionManager.__init__ is theirs
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert capture.live_specializations() == []
    finally:
        guards.CheckFunctionManager.__init__ = ours.__wrapped__
        torch._dynamo.reset()
        capture.install()


def test_entries_from_before(events: Events) -> None:
    capture.uninstall()

    def f(x: Any) -> Any:
        return x + 1

    compiled = torch.compile(f, backend="eager")
    compiled(torch.ones(2))
    capture.install()
    assert len(capture.entries_of(f.__code__)) == 1
    assert any(code is f.__code__ for code in capture.unrecorded_codes())
    compiled(torch.ones(2, 2))
    assert len(capture.entries_of(f.__code__)) == 1
    assert len(capture.specializations_of(f.__code__)) == 1
    torch._dynamo.reset()
    assert capture.entries_of(f.__code__) == []


def test_missing_api_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    was_installed = capture.is_installed()
    capture.uninstall()
    monkeypatch.delattr(torch._dynamo.guards, "CheckFunctionManager")
    with pytest.raises(TridentError, match=r"lacks torch\._dynamo\.guards\.CheckFunctionManager"):
        capture.install()
    assert not capture.is_installed()
    monkeypatch.undo()
    if was_installed:
        capture.install()


@pytest.mark.slow
def test_interpreter_exit_is_quiet() -> None:
    script = textwrap.dedent("""
        import torch
        from trident import capture
        capture.install()
        class Loud:
            def __getattr__(self, name):
                return lambda *args: None
        capture.set_listener(Loud())
        model = torch.nn.Linear(2, 2)
        f = torch.compile(lambda x: model(x), backend="eager")
        f(torch.ones(2))
        g = torch.compile(eval("lambda x: x + 1"), backend="eager")
        g(torch.ones(2))
        print("done")
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert "Error" not in done.stderr
