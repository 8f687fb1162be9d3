"""Inductor's wrappers for CUDA, as text: launches, devices, streams, alignment; without a GPU."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest
import torch

from trident.capture import inductor
from trident.capture.inductor import Around, Wrapper
from trident.codegen.dialect import Emitter, session
from trident.codegen.import_wrapper import import_wrapper
from trident.errors import UnsupportedGraph

triton = pytest.importorskip("triton")
heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
guards = torch._C._dynamo.guards


def stream_of(index: int) -> int:
    raise AssertionError("nothing runs here")


class Result(heuristics.CompileResult):  # type: ignore[misc]
    """What compiled a kernel; its launcher is written by torch and recorded by Trident."""

    def __init__(self, grid: str, config: dict[str, int]) -> None:
        self.inductor_meta = {"grid_type": grid}
        self.config = triton.Config(config)

    def make_launcher(self) -> Any:
        raise AssertionError


@pytest.fixture
def kernel() -> Any:
    """A kernel as it is once it has been launched: of a pointer, and of a number ``xnumel``."""
    inductor.install()

    class Static:
        arg_tys, function, num_warps, shared = "Oi", 7, 4, 0
        has_global_scratch = has_profile_scratch = True

        def run(self, *arguments: Any) -> None:
            raise AssertionError

    Static.__name__ = "StaticallyLaunchedCudaKernel"

    def make(grid: str = "Grid1D", **config: int) -> Any:
        config = config or {"XBLOCK": 128}
        made = object.__new__(heuristics.CachingAutotuner)
        result = Result(grid, config)
        names = ["pointer", "xnumel"]
        passed = ["grid_0", "grid_1", "grid_2", "stream", *names]
        launcher = result._gen_launcher_code({"runner": Static().run}, names, passed)
        launcher.store_cubin, launcher.config = False, result.config
        vars(made).update(launchers=[launcher], inductor_meta={}, _cached_launcher=launcher)
        return made

    return make


def imported(text: str, kernel: Any, **options: Any) -> tuple[Any, list[str]]:
    """Inference, and the steps of the program."""
    names = {
        "torch": torch,
        "empty_strided_cuda": guards._empty_strided_cuda,
        "copy_if_misaligned": getattr(guards, "copy_if_misaligned", None),
        "get_raw_stream": stream_of,
        "kernel": kernel,
        "__builtins__": __builtins__,
    }
    wrapper = Wrapper(
        ast.parse(textwrap.dedent(text)).body,
        "args",
        names,
        "<wrapper>",
        Around(False, (), None, (), 1),
        **options,
    )
    with session():
        emitter = Emitter("f", ())
        signature = import_wrapper(wrapper, emitter)
        emitter.program.verify
        block = emitter.program.program_block
        assert block is not None
        return signature.inference, [op.operation.name.removeprefix("scm.") for op in block]


@pytest.fixture(autouse=True)
def known(monkeypatch: Any) -> None:
    functions = {**inductor.host_functions(), stream_of: "stream"}
    monkeypatch.setattr("trident.codegen.import_wrapper.host_functions", lambda: functions)


WHOLE = """
    a, = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((1000, ), (1, ), torch.float32)
        stream0 = get_raw_stream(0)
        kernel.run(buf0, 1000, stream=stream0)
    return (buf0, )
"""


def test_a_launch(kernel: Any) -> None:
    _, steps = imported(WHOLE, kernel())
    assert steps == ["device_enter", "empty_strided", "launch", "device_exit", "yield"]


def test_a_return_within_the_region_leaves_it(kernel: Any) -> None:
    text = WHOLE.replace("    return (buf0, )", "        return (buf0, )")
    _, steps = imported(text, kernel())
    assert steps[-3:] == ["launch", "device_exit", "yield"]


def test_a_symbolic_grid_is_computed(kernel: Any) -> None:
    """``-(xnumel // -128)``, before anything else happens."""
    text = WHOLE.replace("a, = args", "s0, a = args").replace("1000", "s0")
    _, steps = imported(text, kernel())
    assert steps.count("floor_divide") == 1
    assert steps.count("multiply") == 1
    assert "launch" in steps


def test_a_grid_in_two_parts(kernel: Any) -> None:
    """Names that the launcher computes first."""
    with pytest.raises(UnsupportedGraph, match="ynumel"):  # which this kernel does not take
        imported(WHOLE, kernel("Grid2DWithYZOverflow", XBLOCK=1, YBLOCK=1))


@pytest.mark.skipif(not hasattr(guards, "copy_if_misaligned"), reason="since torch 2.12")
def test_inputs_that_are_copied(kernel: Any) -> None:
    text = WHOLE.replace("stream0 =", "a = copy_if_misaligned(a)\n        stream0 =")
    inference, _ = imported(text.replace("run(buf0", "run(a"), kernel())
    assert inference.aligned == [0]
    with pytest.raises(UnsupportedGraph, match="aligns something else"):
        imported(text.replace("misaligned(a)", "misaligned(buf0)"), kernel())


def test_inputs_that_are_copied_around_it(kernel: Any) -> None:
    """torch 2.11 does it in a function of its own; inputs that the program does not use are not
    asked for."""
    inference, _ = imported(WHOLE, kernel(), aligned=(0,))
    assert inference.aligned == []
    inference, _ = imported(WHOLE.replace("run(buf0", "run(a"), kernel(), aligned=(0,))
    assert inference.aligned == [0]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("get_raw_stream(0)", "get_raw_stream(1)", "the stream of another device"),
        ("set_device(0)", "set_device(1)", "it changes the device"),
        ("_DeviceGuard(0)", "_DeviceGuard(-1)", "a region that is not known"),
        ("_DeviceGuard(0)", "stream(0)", "a region that is not known"),
        ("1000, stream", "1000, 5, stream", "kernel takes 2 arguments"),
        (", stream=stream0", "", "a launch with other arguments"),
        ("stream=stream0", "stream=stream0, grid=3", "a launch with other arguments"),
        ("stream=stream0", "stream=0", "a launch with other arguments"),
        ("_DeviceGuard(0)", "_DeviceGuard(0, x=1)", "a region that is not known"),
        ("get_raw_stream(0)", "get_raw_stream(0, x=1)", "the stream of another device"),
        ("set_device(0)", "set_device(0, x=1)", "it changes the device"),
        (
            "    return (buf0, )",
            "    kernel.run(buf0, 1000, stream=stream0)",
            "a launch with other",
        ),
    ],
)
def test_refused(kernel: Any, old: str, new: str, reason: str) -> None:
    assert old in WHOLE
    with pytest.raises(UnsupportedGraph, match=reason):
        imported(WHOLE.replace(old, new), kernel())


def test_kernels_that_are_not_ready(kernel: Any) -> None:
    for change, reason in (
        ({"launchers": []}, "has not been launched yet"),
        ({"launchers": [lambda: 0]}, "a launcher that is not known"),
        ({"inductor_meta": {"coordinate_descent_tuning": True}}, "has not been tuned yet"),
        ({"_cached_launcher": None}, "not at its last launcher yet"),
        ({"run": len}, "is a CachingAutotuner"),
        ({"dump_launch_params": True}, "shows its launches"),
    ):
        made = kernel()
        if change.get("launchers"):
            change["launchers"][0].config = None  # type: ignore[attr-defined, index]
        vars(made).update(change)
        with pytest.raises(UnsupportedGraph, match=reason):
            imported(WHOLE, made)


@pytest.mark.parametrize("used", ["return (buf1, )", "x = aten._unique(buf1)\n    return (a, )"])
def test_a_number_that_an_operator_returns(used: str) -> None:
    """It is dropped; whoever uses it is not native."""
    text = f"""
    a, = args
    args.clear()
    buf0 = torch.ops.aten._scaled_dot_product_flash_attention.default(a, a, a)
    buf1 = buf0[4]
    {used}
    """
    with pytest.raises(UnsupportedGraph, match="a number that an operator returns"):
        imported(text, None)


def test_numbers_that_nobody_uses() -> None:
    text = """
    a, = args
    args.clear()
    buf0 = torch.ops.aten._scaled_dot_product_flash_attention.default(a, a, a)
    buf1 = buf0[0]
    return (buf1, )
    """
    assert "operator" in imported(text, None)[1]
