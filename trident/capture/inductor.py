"""What Inductor made of a graph: its generated wrapper and kernels, and AOTAutograd's part.

Inductor writes a Python module per graph; its function ``call(args)`` allocates, calls kernels and
operators, and returns. The module's source is there however the graph was compiled, cold or from a
cache, and is believed only if compiling it gives the very code of the function that runs. Around it
are the functions of AOTAutograd's runtime wrappers. These are closures, so what they do is recorded
when they are made: ``<wrapper>.post_compile`` of ``torch._functorch._aot_autograd``. What is not
known, anywhere on the way from Dynamo's ``__compiled_fn_…`` to ``call``, leaves the graph to stock.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import functools
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import OutputType

from trident.capture import dynamo, triton
from trident.capture.graph import native_or
from trident.capture.patching import Patches
from trident.errors import UnsupportedGraph

_patches = Patches()
# What a function that a wrapper made does: functions compare by identity.
_stages: weakref.WeakKeyDictionary[Any, _Stage] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class _Stage:
    """`wrapper` made a function around `inner`, for a graph with this `metadata`. If
    `keeps_mutations`, Inductor's code mutates inputs itself."""

    wrapper: Any
    inner: Any
    keeps_mutations: bool
    metadata: Any


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Around:
    """What AOTAutograd's runtime wrapper does around an inference graph, which runs with gradients
    off: it takes autocast away if `without_autocast`, and advances the versions of the inputs at
    `mutated` first. `epilogue`, unless it is None, is called with the list of the inputs at
    `epilogue_inputs` and the list of the graph's outputs; it returns the `n_results` results."""

    without_autocast: bool
    mutated: tuple[int, ...]
    epilogue: Callable[[list[Any], list[Any]], list[Any]] | None
    epilogue_inputs: tuple[int, ...]
    n_results: int


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Kernel:
    """A C++ kernel of Inductor's: its function at `address`, and the C++ types of its arguments."""

    name: str
    address: int
    types: tuple[str, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Wrapper:
    """Inductor's host code of one graph: the statements of ``call``, the names that they may use,
    the file they are in, and what is `around`. `native`: see :class:`TracedGraph`. The inputs at
    the positions `aligned` are copied first where they are not."""

    body: list[ast.stmt]
    parameter: str
    names: dict[str, Any]
    file: str
    around: Around
    native: Callable[..., Any] | None = None
    kernel_types: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = dataclasses.field(default_factory=dict)
    codes: list[CodeType] = dataclasses.field(default_factory=list)
    aligned: tuple[int, ...] = ()

    def subgraph(self, name: str) -> ast.FunctionDef | None:
        """The function of the module that the global `name` is, if it is one."""
        function, definition = self.names.get(name), self.functions.get(name)
        if definition is None or not isinstance(function, FunctionType):
            return None
        return definition if function.__code__ in self.codes else None

    def kernel(self, name: str) -> Kernel | None:
        """The C++ kernel that the global `name` calls, if it is one."""
        function, types = self.names.get(name), self.kernel_types.get(name)
        if types is None or not isinstance(function, BuiltinFunctionType):
            return None
        module = function.__self__
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or file is None:
            return None
        address = _symbol(file, function.__name__)
        return None if address is None else Kernel(name, address, types)


@functools.cache
def _symbol(file: str, name: str) -> int | None:
    """The address of the C function `name` of a library that is loaded (and stays so)."""
    function = getattr(ctypes.CDLL(file), name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


_WRAPPERS = (
    *("RuntimeWrapper", "FunctionalizedRngRuntimeWrapper", "FakifiedOutWrapper"),
    *("AOTDispatchSubclassWrapper", "EffectTokensWrapper", "AOTDedupeWrapper"),
    *("AOTSyntheticBaseWrapper", "DebugAssertWrapper"),
)


def runner(
    function: Any, wrapper: Wrapper, enabled: Callable[[], bool]
) -> Callable[..., tuple[Any, ...]]:
    """What Dynamo's code is to call instead of `function`, the ``__compiled_fn_…`` of the graph of
    `wrapper`, where the frame around it is not native."""
    run = native_or(function, wrapper, enabled)
    vars(run).update(vars(function))
    vars(run)["_torchdynamo_orig_callable"] = function
    dynamo.skip_frames_of(run.__code__)
    return run


def install() -> None:
    """Notes what AOTAutograd's runtime wrappers do, from now on. A class that this torch lacks, or
    another that it has, makes functions that are not known here: their graphs stay stock."""
    if _patches.active:
        return
    for name in _WRAPPERS:
        kind = getattr(runtime_wrappers, name, None)
        original = None if kind is None else vars(kind).get("post_compile")
        if isinstance(original, FunctionType):
            _patches.put(kind, "post_compile", _recording(original))
    triton.record_launchers(_patches)


def uninstall() -> None:
    _patches.undo()


def _recording(original: FunctionType) -> Callable[..., Any]:
    @functools.wraps(original)
    def post_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        known = len(args) == 2 and set(kwargs) == {"runtime_metadata"}
        if known and made is not args[0] and isinstance(made, FunctionType):
            keeps = bool(args[1].keep_inference_input_mutations)
            _stages[made] = _Stage(self, args[0], keeps, kwargs["runtime_metadata"])
        return made

    return post_compile


def of_callable(function: Any) -> Wrapper | None:
    """Inductor's wrapper behind one of Dynamo's ``__compiled_fn_…`` globals; None if Inductor has
    no part in it. Raises UnsupportedGraph, with the reason, if what happens on the way is not
    known."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    outer = _forward(function)
    if outer is None:
        return None
    runtime: _Stage | None = None
    current = _unserializable(outer)
    body = _without_operators(current)
    while body is None and not _is_graph(current):
        stage = _stages.get(current) if isinstance(current, FunctionType) else None
        if stage is None:
            name = getattr(current, "__qualname__", type(current).__name__)
            raise UnsupportedGraph(f"AOTAutograd runs it through {name}")
        if isinstance(stage.wrapper, runtime_wrappers.RuntimeWrapper) and runtime is None:
            runtime = stage
        elif not _passes_on(stage):
            raise UnsupportedGraph(f"AOTAutograd runs it through {type(stage.wrapper).__name__}")
        current = _unserializable(stage.inner)
        body = _without_operators(current)
    if runtime is None:
        raise UnsupportedGraph("it has no runtime wrapper of AOTAutograd's")
    around = _around(runtime)
    if body is not None:
        return Wrapper(body, _PARAMETER, {}, "<graph without operators>", around)
    return _wrapper(current, around)


def _forward(function: Any) -> Any:
    """What ``aot_module_simplified`` returned calls, or None: it only makes a list of its
    arguments."""
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    place = (function.__module__, code.co_qualname)
    if place != ("torch._functorch.aot_autograd", "aot_module_simplified.<locals>.forward"):
        return None
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    parameters = [
        cells.pop(n).cell_contents for n in ("params_buffers_flat", "params_flat") if n in cells
    ]
    if set(cells) != {"compiled_fn"} or parameters not in ([[]], [()], []):
        raise UnsupportedGraph("AOTAutograd passes parameters of its own to it")
    if not set(code.co_names) <= {"extend", "AssertionError"}:
        raise UnsupportedGraph("this torch calls it in a way that Trident does not know")
    return cells["compiled_fn"].cell_contents


def _unserializable(function: Any) -> Any:
    """What a ``SerializableCompiledFunction`` calls."""
    kind = getattr(runtime_wrappers, "SerializableCompiledFunction", None)
    return function.compiled_fn if kind is not None and type(function) is kind else function


def _is_graph(value: Any) -> bool:
    from torch._inductor.output_code import CompiledFxGraph

    return type(value) is CompiledFxGraph


_PARAMETER = "args"


def _without_operators(function: Any) -> list[ast.stmt] | None:
    """What a graph without operators, which Inductor leaves to FX, would be as Inductor's ``call``;
    None for anything else."""
    if not isinstance(function, FunctionType):
        return None
    if function.__qualname__ != "make_boxed_func.<locals>.g":
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    method = cells["f"].cell_contents if "f" in cells else None
    owner = getattr(method, "__self__", None)
    if not isinstance(owner, torch.fx.GraphModule) or getattr(method, "__name__", "") != "forward":
        return None
    *inputs, output = owner.graph.nodes
    if any(node.op != "placeholder" for node in inputs) or output.op != "output":
        return None
    (returned,) = output.args
    if not isinstance(returned, (tuple, list)):
        return None
    if not all(isinstance(node, torch.fx.Node) for node in returned):
        return None
    lines = [f"({''.join(f'{node.name}, ' for node in inputs)}) = {_PARAMETER}"] if inputs else []
    lines.append(f"return ({''.join(f'{node}, ' for node in returned)})")
    return ast.parse("\n".join(lines)).body


def _passes_on(stage: _Stage) -> bool:
    """Does the function only call the inner one?"""
    name = type(stage.wrapper).__name__
    if name == "FunctionalizedRngRuntimeWrapper":
        return not stage.metadata.is_rng_op_functionalized
    if name == "EffectTokensWrapper":
        return not stage.metadata.tokens
    return False


def _around(stage: _Stage) -> Around:
    wrapper, metadata = stage.wrapper, stage.metadata
    if wrapper.trace_joint:
        raise UnsupportedGraph("it is for training")
    if metadata.num_mutated_inp_runtime_indices or metadata.grad_enabled_mutation is not None:
        # Dynamo breaks graphs there, or Inductor's own code does it.
        raise UnsupportedGraph("AOTAutograd updates inputs or the grad mode after it")
    if metadata.tokens:
        raise UnsupportedGraph("it has effects that are ordered by tokens")
    mutated: tuple[int, ...] = ()
    if stage.keeps_mutations:
        mutated = tuple(metadata.mutated_graph_handled_indices_seen_by_autograd)
    handlers: list[Any] = []
    inputs: list[int] = []
    if metadata.num_outputs_aliased:
        handlers = [
            runtime_wrappers.make_output_handler(info, metadata, False)
            for info in metadata.output_info
        ]
        of_input = (OutputType.alias_of_input, OutputType.is_input)
        inputs = [i.base_idx for i in metadata.output_info if i.output_type in of_input]
    marks: list[tuple[int, Any]] = []
    if metadata.dynamic_outputs:
        dimensions = [info.dynamic_dims for info in metadata.output_info]
        marks = [(i, dims) for i, dims in enumerate(dimensions) if dims is not None]
    epilogue = _epilogue(handlers, tuple(inputs), marks) if handlers or marks else None
    n_results = len(metadata.output_info)
    return Around(wrapper.disable_amp, mutated, epilogue, tuple(inputs), n_results)


def _epilogue(
    handlers: list[Any], positions: tuple[int, ...], marks: list[tuple[int, Any]]
) -> Callable[[list[Any], list[Any]], list[Any]]:
    """What the runtime wrapper does after the graph, by its own functions and in its order: makes
    the outputs that alias something anew, and marks those with dynamic sizes."""
    names = ("mark_dynamo_propagated_dynamic_indices", "maybe_mark_dynamic_helper")
    known = [vars(runtime_wrappers)[n] for n in names if hasattr(runtime_wrappers, n)]
    if marks and not known:
        raise UnsupportedGraph("this torch marks dynamic outputs in a way that is not known")

    def epilogue(inputs: list[Any], outputs: list[Any]) -> list[Any]:
        results = outputs
        if handlers:
            originals = dict(zip(positions, inputs, strict=True))
            # After the outputs of the user come the tensors that some are views of.
            results = [h(originals, outputs, o) for o, h in zip(outputs, handlers, strict=False)]
        for position, dimensions in marks:
            known[0](results[position], dimensions)
        return results

    return epilogue


def _wrapper(graph: Any, around: Around) -> Wrapper:
    method, aligned = _without_copies(graph.current_callable)
    function = method.__func__ if isinstance(method, MethodType) else method
    if not isinstance(function, FunctionType) or function.__name__ != "call":
        name = getattr(function, "__qualname__", type(function).__name__)
        raise UnsupportedGraph(f"Inductor runs it through {name}")
    source = graph.source_code
    file = function.__code__.co_filename
    try:
        tree = ast.parse(source)
        compiled = compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, TypeError) as error:
        raise UnsupportedGraph(f"Inductor's source of it cannot be read: {error}") from None
    definition = _definition(tree, function.__code__.co_firstlineno)
    codes = _codes(compiled)
    if definition is None or function.__code__ not in codes:
        raise UnsupportedGraph("Inductor's source is not what runs")
    arguments = definition.args.args
    if isinstance(method, MethodType):
        arguments = arguments[1:]
    if len(arguments) != 1 or graph.fx_kwargs.get("cpp_wrapper"):
        raise UnsupportedGraph("Inductor's function takes its arguments in a way that is not known")
    return Wrapper(
        definition.body,
        arguments[0].arg,
        function.__globals__,
        file,
        around,
        kernel_types=_kernel_types(tree),
        functions={node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)},
        codes=codes,
        aligned=aligned,
    )


def _without_copies(function: Any) -> tuple[Any, tuple[int, ...]]:
    """What ``align_inputs_from_check_idxs`` made `function` of, if it did, and the positions of the
    inputs that it copies where they are not aligned."""
    if getattr(function, "__qualname__", "") != "align_inputs_from_check_idxs.<locals>.run":
        return function, ()
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
    known = {"inputs_to_check", "model", "mutated_input_idxs"}
    if function.__module__ != "torch._inductor.utils" or set(cells) != known:
        raise UnsupportedGraph("this torch aligns inputs in a way that Trident does not know")
    return cells["model"].cell_contents, tuple(cells["inputs_to_check"].cell_contents)


def _definition(tree: ast.Module, line: int) -> ast.FunctionDef | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "call" and node.lineno == line:
            return node
    return None


def _codes(code: CodeType) -> list[CodeType]:
    """`code` and all codes in it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return [code, *(found for c in inner for found in _codes(c))]


def _kernel_types(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """The C++ types of the arguments of each kernel, by the global that is it."""
    found: dict[str, tuple[str, ...]] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="async_compile"), attr="cpp_pybinding"),
                    args=[ast.List(elts=types), *_],
                ),
            ):
                if all(isinstance(t, ast.Constant) and isinstance(t.value, str) for t in types):
                    found[name] = tuple(t.value for t in types)  # type: ignore[attr-defined]
    return found


@functools.cache
def host_functions() -> dict[Any, str]:
    """The functions of torch that a wrapper calls, beside operators: what each is, by identity."""
    guards = torch._C._dynamo.guards
    names = {
        "_empty_strided_cpu": "empty_strided",
        "_empty_strided_cuda": "empty_strided",
        "copy_if_misaligned": "align",
        "_reinterpret_tensor": "reinterpret",
        "assert_size_stride": "check_layout",
        "assert_alignment": "check_alignment",
    }
    found = {getattr(guards, n): kind for n, kind in names.items() if hasattr(guards, n)}
    if hasattr(torch._C, "_cuda_getCurrentRawStream"):
        found[torch._C._cuda_getCurrentRawStream] = "stream"
    found[torch.cuda._DeviceGuard] = "device_guard"
    found[torch.cuda.set_device] = "set_device"
    return found


def operator_of(function: Any, has_out: bool) -> Any:
    """The overload that `function` calls, or None: an operator; one of torch's own functions that
    Inductor calls by name, for tensors; a packet with one overload."""
    if isinstance(function, torch._ops.OpOverload):
        return function
    found = _functions().get((function, has_out))
    if found is None and isinstance(function, torch._ops.OpOverloadPacket):
        overloads = function.overloads()
        return getattr(function, overloads[0]) if len(overloads) == 1 else None
    return found


@functools.cache
def _functions() -> dict[tuple[Any, bool], Any]:
    aten = torch.ops.aten
    return {
        (torch.mm, True): aten.mm.out,
        (torch.addmm, True): aten.addmm.out,
        (torch.bmm, True): aten.bmm.out,
        (torch.baddbmm, True): aten.baddbmm.out,
        (torch._int_mm, True): aten._int_mm.out,
        (torch.convolution, False): aten.convolution.default,
        # The other overload is for TorchScript, and calls this one.
        (aten.index_put_, False): aten.index_put_.default,
    }
