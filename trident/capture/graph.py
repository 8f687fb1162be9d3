"""From Dynamo's graph to the operators that eager's Python bindings would call, in their order.

The graph is traced by ``make_fx(pre_dispatch=True)``, which records an operator before autograd,
autocast and decompositions act: one recorded operator is one call through the full dispatcher. It
runs on copies of Dynamo's own fake tensors under their own fake mode, so nothing is computed, and
no symbols are added to Dynamo's ShapeEnv. A guard that the trace would add to it ends the trace.

What the trace computed is compared with what Dynamo itself found for every node (shape, strides,
dtype, device, requires_grad); a difference, or anything not understood, means no host program.

A traced node's ``meta["trident"]`` says what it gives: :class:`Meta` for a tensor, a sympy
expression over the symbols of the inputs' sizes for a number, a list of these for several.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.fx.traceback
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._subclasses.fake_tensor import FakeTensor
from torch.backends import opt_einsum
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.symbol import SymT, symbol_is_type

from trident.capture import triton
from trident.capture.patching import Patches
from trident.errors import UnsupportedGraph

# Functions without a value that the tracer records; the last one does nothing after its first call
# with some text, which tracing makes.
_WITHOUT_VALUE = (
    *(operator.setitem, torch._assert_async, torch._C._set_grad_enabled),
    torch._C._log_api_usage_once,
)

_KEY = "trident"
# Where a traced module has, for each autocast region that it enters, what the user said of its
# cache: None for nothing. (The tracer turns the cache off, and would record that.)
AUTOCAST_CACHES = "trident_autocast_caches"
# Where it has whether autograd may record any of its operators.
RECORDS_GRADIENTS = "trident_records_gradients"
# They change what a tensor is, not what it holds: the trace would change its example, too, and
# eager's checks (of a leaf, say) depend on more than its metadata.
_METADATA_MUTATIONS = frozenset(
    {
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "rename_"),
        *("resize_", "resize_as_", "as_strided_", "set_", "detach_", "requires_grad_", "data"),
    }
)


@dataclasses.dataclass(slots=True, frozen=True)
class Line:
    """Where user code is: `file`, the name of its `function`, and `line` (0: unknown)."""

    file: str = ""
    function: str = ""
    line: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class TracedGraph:
    """The operators of a Dynamo graph: `module` is the traced one, or None for `reason`."""

    module: torch.fx.GraphModule | None
    reason: str | None = None
    native: Callable[..., Any] | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class Meta:
    """What a tensor is; its sizes and strides are sympy expressions, or ints. That of a traced node
    never requires a gradient: the tracer keeps a detached value."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def runner(
    module: torch.fx.GraphModule, enabled: Callable[[], bool]
) -> Callable[..., tuple[Any, ...]]:
    """What Dynamo's code is to call for its graph: the graph as it is, or its native program once
    there is one and while `enabled`."""
    traced = _traced(module)
    run = native_or(module.forward, traced, enabled)
    vars(run)[_KEY] = traced
    return run


class HasNative(Protocol):
    """`native`, once it is built, does what a graph does, or returns NotImplemented where stock is
    to run it."""

    native: Callable[..., Any] | None


def native_or(
    stock: Callable[..., Any], graph: HasNative, enabled: Callable[[], bool]
) -> Callable[..., tuple[Any, ...]]:
    """`stock`, or the native program of `graph` once there is one and while `enabled`."""

    def run(*inputs: Any) -> Any:
        native = graph.native
        if native is not None and enabled():
            outputs = native(*inputs)
            if outputs is not NotImplemented:
                return outputs
        return stock(*inputs)

    return run


def _traced(module: torch.fx.GraphModule) -> TracedGraph:
    try:
        return TracedGraph(_trace(module))
    except UnsupportedGraph as error:
        # FX adds where it was to the text.
        return TracedGraph(None, str(error).partition("\n")[0])
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return TracedGraph(None, f"tracing it raised {type(error).__name__}: {text[0]}")


def of_callable(function: Any) -> TracedGraph | None:
    """The traced graph that one of Dynamo's ``__compiled_fn_…`` globals runs, if it has one."""
    if not isinstance(function, FunctionType):
        return None
    runs = getattr(function, "_torchdynamo_orig_callable", function)
    found = getattr(runs, _KEY, None)
    return found if isinstance(found, TracedGraph) else None


def given_by(node: torch.fx.Node) -> Any:
    """What a traced node gives: see above."""
    return node.meta.get(_KEY)


def line_of(node: torch.fx.Node) -> Line:
    """The innermost line of user code that `node` comes from."""
    found = _STACK_ENTRY.findall(node.meta.get("stack_trace") or "")
    return Line(found[-1][0], found[-1][2], int(found[-1][1])) if found else Line()


_STACK_ENTRY = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


def _trace(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    _reject_metadata_mutations(module.graph)
    # Those of the call that compiles, which the guards then ask for; Dynamo has put them aside.
    modes = {type(mode) for mode in torch_function_mode_stack_state_mgr.stack}
    for kind in modes - {DeviceContext}:
        raise UnsupportedGraph(f"the torch function mode {kind.__name__} sees its functions")
    examples = [_example(node) for node in module.graph.find_nodes(op="placeholder")]
    values = [node.meta.get("example_value") for node in module.graph.nodes]
    fake_modes = {id(e.fake_mode): e.fake_mode for e in _fakes(values)}
    if len(fake_modes) != 1:
        raise UnsupportedGraph(f"it has {len(fake_modes)} fake tensor modes")
    (mode,) = fake_modes.values()
    interpreter = _Interpreter(module)
    interpreter.unbacked.update(*map(_unbacked_symbols, examples))
    with (
        _quiet(interpreter.warned),
        _without_guards(mode.shape_env),
        mode,
        torch.fx.traceback.preserve_node_meta(),
    ):
        copies = [_copy(example) for example in examples]
        traced = _make_fx(interpreter.run, copies)
        interpreter.compare()
    constants = [node for node in traced.graph.nodes if node.op == "get_attr"]
    if interpreter.of_symbol and constants:
        raise UnsupportedGraph(f"{interpreter.of_symbol} of a symbolic number")
    for node in traced.graph.nodes:
        node.meta[_KEY] = _given(node.meta.pop("val", None))
    traced.meta[AUTOCAST_CACHES] = interpreter.autocast_caches
    traced.meta[RECORDS_GRADIENTS] = _records_gradients(traced.graph, examples)
    return traced


# What FX sets or patches, for all threads, while it traces.
_FX_STATE: tuple[tuple[Any, str], ...] = (
    (_symbolic_trace, "_is_fx_tracing_flag"),
    (_symbolic_trace, "CURRENT_PATCHER"),
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "__getattr__"),
)


def _make_fx(run: Callable[..., Any], inputs: list[Any]) -> torch.fx.GraphModule:
    """``make_fx``, without what it does to other threads, and needs not for a graph of Dynamo's:
    they see FX's flag and patches as they were. (Two traces at once could leave them for good.)"""

    def get() -> list[Any]:
        return [vars(owner).get(name) for owner, name in _FX_STATE]

    def put(values: list[Any]) -> None:
        for (owner, name), value in zip(_FX_STATE, values, strict=True):
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)

    others = get()

    def run_and_keep(*arguments: Any) -> Any:
        nonlocal others
        own = get()
        put(others)
        try:
            return run(*arguments)
        finally:
            others = get()
            put(own)  # for what make_fx does at its end

    try:
        make_fx = proxy_tensor.make_fx(run_and_keep, tracing_mode="real", pre_dispatch=True)
        traced: torch.fx.GraphModule = make_fx(*inputs)
    finally:
        put(others)
    return traced


def _records_gradients(graph: torch.fx.Graph, examples: list[Any]) -> bool:
    """May autograd record an operator of the traced `graph`? (Its nodes do not say: the values that
    the tracer keeps of them are detached.)"""
    tensors = [example for example in examples if isinstance(example, torch.Tensor)]
    enables = any(
        node.target is torch._C._set_grad_enabled and node.args[0] is not False
        for node in graph.nodes
    )
    enabled = torch.is_grad_enabled() or enables
    return enabled and any(tensor.requires_grad for tensor in tensors)


def _given(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise UnsupportedGraph(f"it has tensors with the layout {value.layout}")
        sizes, strides = (tuple(map(_number, n)) for n in (value.shape, value.stride()))
        return Meta(sizes, strides, value.dtype, value.device, value.requires_grad)
    if isinstance(value, (tuple, list)):
        return [_given(item) for item in value]
    return _number(value)


def _number(value: Any) -> Any:
    """The expression of a symbolic number; everything else as it is."""
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return value.node.expr if symbolic else value


class _NewGuard(GuardOnDataDependentSymNode):
    """The trace would add a guard. (Of this class, as ShapeEnv logs no warning for it.)"""


@contextlib.contextmanager
def _without_guards(shape_env: ShapeEnv | None) -> Iterator[None]:
    """Raises UnsupportedGraph if what runs inside would add a guard to `shape_env`.

    Dynamo ran the same operators on the same sizes, so what is asked has a guard already.
    """
    if shape_env is None:
        yield
        return
    if not hasattr(shape_env, "_check_frozen"):
        raise UnsupportedGraph("this torch has a ShapeEnv that Trident does not know")
    wanted: list[str] = []

    def refuse(expression: Any, value: Any) -> None:
        wanted.append(f"{expression} == {value}")
        raise _NewGuard(expression)

    if not _patches.active:
        original = proxy_tensor._extract_tensor_metadata

        def extract(*args: Any, **kwargs: Any) -> Any:
            # It asks for memory formats that nobody needs here, which would add guards.
            tracing = getattr(_local, "tracing", False)
            return None if tracing else original(*args, **kwargs)

        # It stays: other threads may be inside.
        _patches.put(proxy_tensor, "_extract_tensor_metadata", extract)
    vars(shape_env)["_check_frozen"] = refuse
    _local.tracing = True
    try:
        yield
    except Exception:
        if not wanted:
            raise
    finally:
        _local.tracing = False
        del vars(shape_env)["_check_frozen"]
    if wanted:  # perhaps somebody went on without it
        raise UnsupportedGraph(f"tracing it would add the guard {wanted[0]}")


_patches = Patches()
_local = threading.local()


@contextlib.contextmanager
def _quiet(warned: list[str]) -> Iterator[None]:
    """What the trace itself warns of goes to `warned`; the user's saved tensor hooks see nothing.

    The graph's first run warns the user. (The filters are the process's: another thread may show a
    warning once more meanwhile.)"""
    thread, show = threading.get_ident(), warnings.showwarning

    def keep(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            warned.append(str(message))
        else:
            show(message, *args, **kwargs)

    hooks = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = keep
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(hooks)


def _reject_metadata_mutations(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in ("call_method", "call_function") and name in _METADATA_MUTATIONS:
            raise UnsupportedGraph(f"{name} changes what a tensor is, not what it holds")


def _fakes(value: Any) -> Iterator[FakeTensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _fakes(item)


def _float(node: torch.fx.Node) -> torch.SymFloat | float:
    """Of a float, which Dynamo passes as a tensor, of which the graph takes the item."""
    items = [user.meta.get("example_value") for user in node.users if user.target == "item"]
    if not items or len(items) < len(node.users) or not isinstance(items[0], torch.SymFloat):
        raise UnsupportedGraph(f"its input {node.name} is a float that is used as a tensor")
    expression = items[0].node.expr
    if expression.is_Symbol and symbol_is_type(expression, SymT.FLOAT):
        return items[0]
    value = float(expression) if expression.is_number else 0.0
    if value == 0 or not math.isfinite(value):
        # Dynamo specialized it, and guards for equality: -0.0 passes for 0.0.
        raise UnsupportedGraph(f"its input {node.name} is a float that Dynamo specialized")
    return value


_Example = torch.Tensor | torch.SymInt | torch.SymFloat | int | float
# They make a constant of a symbolic number while they are traced.
_CONSTANT_MAKERS = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})


def _example(node: torch.fx.Node) -> _Example:
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        # torch.as_tensor, say, of a symbolic number keeps 32 bits of it.
        return int(value.node.expr) if value.node.expr.is_number else value
    if getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False):
        return _float(node)
    if not isinstance(value, FakeTensor) or type(value) not in (FakeTensor, torch.nn.Parameter):
        raise UnsupportedGraph(f"its input {node.name} is no plain tensor")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise UnsupportedGraph(f"its input {node.name} has the layout {value.layout}")
    if value.is_conj() or value.is_neg() or value.is_inference():
        raise UnsupportedGraph(f"its input {node.name} is conjugated, negated or of inference mode")
    return value


def _copy(example: _Example) -> _Example:
    if not isinstance(example, torch.Tensor):
        return example
    copy = torch.empty_strided(
        example.shape, example.stride(), dtype=example.dtype, device=example.device
    )
    if isinstance(example, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=example.requires_grad)
    if example.requires_grad:
        copy.requires_grad_()
        if not example.is_leaf:
            with torch.enable_grad():
                copy = copy.view_as(copy)
    return copy


class _Interpreter(torch.fx.Interpreter):
    """Runs Dynamo's graph for the tracer, and remembers what each node gave."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.warned: list[str] = []
        self._found: list[tuple[torch.fx.Node, Any]] = []
        self.autocast_caches: list[bool | None] = []
        self._regions: dict[torch.fx.Node, Any] = {}
        self.unbacked: set[Any] = set()  # symbols of the inputs
        self._recorded: set[Any] = set()  # by autograd, while it is traced
        self.of_symbol: str | None = None  # a function that may have made a constant of one

    def run_node(self, n: torch.fx.Node) -> Any:
        # The contexts record themselves, and change the state; the bare functions only the former.
        if n.target is torch.amp.autocast_mode._enter_autocast:
            arguments: Any = n.args
            region = self._regions[n] = torch.autocast(*arguments)
            if len(arguments) > 2 and bool(arguments[2]) is not region._enabled:
                raise UnsupportedGraph("torch.autocast disables itself, with a warning")
            self.autocast_caches.append(arguments[3] if len(arguments) > 3 else None)
            region.__enter__()
            return None
        if n.target is torch.amp.autocast_mode._exit_autocast:
            node, region = self._regions.popitem()
            region.__exit__(None, None, None)
            if node is not n.args[0]:
                raise UnsupportedGraph("its autocast regions do not nest")
            return None
        if triton.is_launch(n.target):
            return self._launch(n)
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            raise UnsupportedGraph(f"{n.target} has no native form")
        if n.op == "call_method" and n.target == "item":
            (source,) = self.fetch_args_kwargs_from_env(n)[0]
            if isinstance(source, (torch.SymFloat, float)):
                return source
        known = "example_value" in n.meta or isinstance(n.target, torch._ops.OpOverload)
        if n.op.startswith("call") and not known and n.target not in _WITHOUT_VALUE:
            # It sets some state, which the tracer would do once and not record.
            raise UnsupportedGraph(f"{n.target} is not known to be an operator")
        if n.op == "call_function" and _is_of_users(n.target):
            raise UnsupportedGraph(f"{n.target} is a function whose Python code runs for each call")
        if n.target is torch.autograd.grad:  # not recorded: no gradients of its operators
            raise UnsupportedGraph("torch.autograd.grad has no native form")
        if n.target is torch.einsum and _n_nodes(n.args) > 2 and opt_einsum.is_available():
            raise UnsupportedGraph("torch.einsum asks torch.backends.opt_einsum in each call")
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        if name in _CONSTANT_MAKERS and _has_symbol(self.fetch_args_kwargs_from_env(n)):
            self.of_symbol = name
        if _unbacked_symbols(n.meta.get("example_value")) - self.unbacked:
            raise UnsupportedGraph(f"what {n.name} gives depends on data")
        value = super().run_node(n)
        if any("Triggered internally at" not in text for text in self.warned):
            # A Python function did, of which only the operators are recorded.
            raise UnsupportedGraph(f"{n.target} warns: {self.warned[-1]}")
        self.warned.clear()
        if self._applied_function(_fakes(value)) and not isinstance(n.target, _OPERATORS):
            raise UnsupportedGraph(f"{n.target} applies a torch.autograd.Function")
        if "example_value" in n.meta and n.op != "placeholder":
            self._found.append((n, value))
        return value

    def _launch(self, node: torch.fx.Node) -> None:
        """Records the launch of a user's kernel, of which nothing is known but its arguments."""
        mode: Any = proxy_tensor.get_proxy_mode()
        _, given = self.fetch_args_kwargs_from_env(node)
        proxies = tree_map(mode.tracer.unwrap_proxy, given)
        mode.tracer.create_proxy("call_function", node.target, (), proxies, name="launch")

    def _applied_function(self, tensors: Iterator[FakeTensor]) -> bool:
        """Did a ``torch.autograd.Function`` compute any of them just now? Its operators are traced,
        but not its backward. (That of a custom operator is made by torch, and called below it.)"""
        nodes: list[Any] = list(map(_grad_fn, tensors))
        found = False
        while nodes:
            node = nodes.pop()
            if node is None or node in self._recorded:
                continue
            self._recorded.add(node)
            made = type(node).__name__.startswith("GeneratedBackwardFor_")
            found |= isinstance(node, torch.autograd.function.BackwardCFunction) and not made
            nodes += [before for before, _ in node.next_functions]
        return found

    def compare(self) -> None:
        """Raises UnsupportedGraph unless every node gave what Dynamo says that it gives."""
        for node, value in self._found:
            ours, theirs = _given(value), _given(node.meta["example_value"])
            if ours != theirs:
                raise UnsupportedGraph(f"{node.name} is traced as {ours}, not as {theirs}")


def _unbacked_symbols(value: Any) -> set[Any]:
    if isinstance(value, (tuple, list)):
        return set().union(*map(_unbacked_symbols, value))
    symbolic = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    return set(free_unbacked_symbols(value)) if symbolic else set()


_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
# Their functions in Dynamo's graphs depend on their arguments only. (`torch._dynamo.variables`
# makes functions that call users' ones.)
_PURE = ("torch.", "einops.", "_operator.", "operator.", "math.", "builtins.")


def _is_of_users(target: Any) -> bool:
    """Is it what ``allow_in_graph`` or ``nonstrict_trace`` put into the graph? Its Python code may
    do anything, and do it in each call."""
    if isinstance(target, FunctionType):
        module = f"{target.__globals__.get('__name__')}."
    else:
        module = f"{getattr(target, '__module__', None) or 'torch'}."
    return not module.startswith(_PURE) or module.startswith("torch._dynamo.variables.")


def _grad_fn(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that nothing may be differentiated through any more
        return None


def _n_nodes(arguments: Any) -> int:
    return sum(isinstance(leaf, torch.fx.Node) for leaf in tree_leaves(arguments))


def _has_symbol(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_symbol, value))
    if isinstance(value, dict):
        return any(map(_has_symbol, value.values()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
