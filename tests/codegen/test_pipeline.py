"""Whole builds: what is recorded, the text of the stages, what a build costs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

from tests.codegen.golden import check_golden
from tests.codegen.trees import CODE, leaf, local, node, specialization, tree
from trident.codegen.pipeline import build, build_skipped
from trident.errors import TridentError


def test_guards_and_plan() -> None:
    built = build(specialization(tree(local("x", leaf("NONE_MATCH", "x is None")))))
    assert built.table is not None
    assert (built.guards_reason, built.plan_reason) == (None, None)
    assert built.plan_address != 0
    assert built.plan_locals == (1,)
    assert built.counts == {"local": 1, "check_none": 1}
    assert 0 < built.build_s < 5
    check_golden(
        built.ir("scm") + built.ir("guards"),
        r"""
    module {
      "scm.specialization"() ({
        %0 = "scm.local"() {index = 1 : i64, label = 0 : i64} : () -> !scm.object  // L['x']: framelocals_manager
        "scm.check_none"(%0) {label = 1 : i64} : (!scm.object) -> ()  // L['x']: x is None
        "scm.pass"() : () -> ()
      }, {
        %0 = "scm.argument"() {index = 1 : i64} : () -> !scm.object
        "scm.return"(%0) : (!scm.object) -> ()
      }) {code = "frame", framelocals = ["self", "x", "y"]} : () -> ()
    }
    registers 1, locals (self, x, y)
       0 r0 = local a=1                                        // L['x']: framelocals_manager
       1 check_none r0                                         // L['x']: x is None
    """,  # noqa: E501
    )
    assert "llvm.func @plan" in built.ir("llvm")


def test_run_code() -> None:
    code = (lambda self, x, y: x + y).__code__
    built = build(specialization(tree(local("x", leaf("NONE_MATCH", "x is None"))), code))
    assert built.table is not None
    assert (built.code, built.plan_address) == (None, 0)
    assert built.plan_reason is not None
    assert "instruction BINARY_OP +" in built.plan_reason
    assert '"scm.run_code"() {reason = "<lambda> (' in built.ir("scm")
    assert built.ir("llvm") == f"// none: {built.plan_reason}\n"


def test_unsupported_guards() -> None:
    built = build(specialization(tree(local("x", leaf("NEW", "new")))))
    assert (built.table, built.code, built.plan_address) == (None, None, 0)
    assert built.guards_reason is not None
    assert "leaf guard NEW has no rule" in built.guards_reason
    assert built.plan_reason == "the guards have no native form"
    assert built.ir("scm") == f"// none: {built.guards_reason}\n"


def test_skipped_frame() -> None:
    built = build_skipped(CODE)
    assert built.table is None
    assert built.guards_reason is None
    assert built.plan_address != 0
    assert built.ir("guards") == "// none: the frame has no guards\n"
    assert build_skipped((lambda x: x()).__code__).plan_address == 0


def test_unknown_stage() -> None:
    with pytest.raises(TridentError, match="no stage 'ptx'; there are scm, guards, llvm"):
        build_skipped(CODE).ir("ptx")


def large_tree(n: int) -> Any:
    """`n` leaves below about as many fetches, as of a model."""
    modules = [
        node(
            "dict_getitem_manager",
            f"layer{i}",
            f"L['self'].layer{i}",
            leaf("TYPE_MATCH", f"type of layer{i}", type_id=1000 + i),
            leaf("DICT_CONTAINS", "no forward", contains=False, key="forward"),
        )
        for i in range(n // 2)
    ]
    return tree(local("self", *modules))


def test_a_build_of_3000_leaves_is_fast() -> None:
    subject = specialization(large_tree(3_000))
    build(subject)
    seconds = min(build(subject).build_s for _ in range(3))
    assert seconds < 0.6, "0.3 s is the budget; the machines that run this are noisy"


def test_a_small_build_is_fast() -> None:
    subject = specialization(tree(local("x", leaf("NONE_MATCH", "x is None"))))
    build(subject)
    seconds = min(build(subject).build_s for _ in range(5))
    assert seconds < 0.05, "25 ms is the budget; the machines that run this are noisy"


def test_a_build_keeps_nothing_but_what_it_needs() -> None:
    class Value:
        pass

    value = Value()
    built = build(specialization(tree(local("x", leaf("EQUALS_MATCH", "==", value=value)))))
    watch = weakref.ref(value)
    del value
    assert watch() is not None
    del built
    gc.collect()
    assert watch() is None


def test_threads_build_at_once() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                assert build_skipped(CODE).plan_address
                assert build(specialization(large_tree(50))).table is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_builds_after_a_fork_in_the_middle_of_a_build() -> None:
    from trident.codegen import dialect

    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with dialect.session():
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if build_skipped(CODE).plan_address else 1)
    deadline = time.monotonic() + 60
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    release.set()
    thread.join()
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_process_exits_quietly_with_builds_alive() -> None:
    script = """
import trident.codegen.pipeline as pipeline
kept = pipeline.build_skipped((lambda x: (x, 1)).__code__)
assert kept.plan_address
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
