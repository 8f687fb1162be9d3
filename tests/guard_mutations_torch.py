"""The mutations of tensors, modules and torch's global and thread state; see guard_mutations."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch.nn.utils import parametrize, stateless
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import guard_worlds as worlds
from tests.guard_mutations import (
    Env,
    Undo,
    _restores_dict,
    _restores_vars,
    mutation,
    of,
    other_tensor,
)
from tests.guard_worlds import World

Module = torch.nn.Module


# Tensors, in place.


@mutation(of(torch.Tensor))
def tensor_requires_grad(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    former = t.requires_grad
    t.requires_grad_(not former)
    return lambda: t.requires_grad_(former)


@mutation(of(torch.Tensor))
def tensor_data(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    data = t.data
    t.data = other_tensor(rng, data)
    return lambda: setattr(t, "data", data)


@mutation(of(torch.Tensor))
def tensor_resize(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    shape, stride, offset = t.shape, t.stride(), t.storage_offset()
    base = t.data
    base.resize_(t.numel() + 1) if rng.random() < 0.5 else base.unsqueeze_(0)
    t.data = base
    return lambda: setattr(t, "data", base.as_strided(shape, stride, offset))


@mutation(of(torch.Tensor))
def tensor_values(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    with torch.no_grad():
        former = t.clone()
        t.add_(1)

    def undo() -> None:
        with torch.no_grad():
            t.copy_(former)

    return undo


@mutation(of(torch.Tensor))
def tensor_grad(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    former = t.grad
    t.grad = None if former is not None else torch.ones_like(t)
    return lambda: setattr(t, "grad", former)


@mutation(of(torch.Tensor))
def tensor_marks(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    undo = _restores_vars(t)
    marks = torch._dynamo
    rng.choice([marks.mark_dynamic, marks.mark_static, marks.maybe_mark_dynamic])(t, 0)
    return undo


@mutation(of(torch.Tensor))
def tensor_attribute(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    undo = _restores_vars(t)
    t.extra = 1  # type: ignore[attr-defined]
    return undo


@mutation(of(torch.Tensor))
def tensor_class(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    kind = type(t)
    t.__class__ = rng.choice([worlds.UserTensor, torch.nn.Parameter])
    return lambda: setattr(t, "__class__", kind)


@mutation(of(torch.Tensor))
def tensor_used(rng: random.Random, world: World, t: torch.Tensor) -> Undo:
    """Nothing that a guard sees: new views and results."""
    t.detach().view(-1).sum().item()
    return lambda: None


# Modules.


def _restores_module(module: Module) -> Undo:
    """All dicts of the module and of those below."""
    undos = [_restores_vars(m) for m in module.modules()]
    for m in module.modules():
        undos += [_restores_dict(d) for d in vars(m).values() if isinstance(d, dict)]

    def undo() -> None:
        for one in undos:
            one()

    return undo


@mutation(of(Module))
def module_mode(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    m.train(not m.training)
    return undo


@mutation(of(Module))
def module_mode_twice(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    former = m.training
    m.train(not former).train(former)
    return undo


@mutation(of(Module))
def module_load(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    state = {k: v.clone() for k, v in m.state_dict().items()}
    m.load_state_dict(state, assign=rng.random() < 0.5)
    return undo


@mutation(of(Module))
def module_to(rng: random.Random, world: World, m: Module) -> Undo:
    data = [(p, p.data, p.requires_grad) for p in m.parameters()]
    restore = _restores_module(m)
    m.to(rng.choice([torch.float64, torch.float32, torch.float16]))

    def undo() -> None:
        restore()
        for parameter, values, needs in data:
            parameter.data = values
            parameter.requires_grad_(needs)

    return undo


@mutation(of(Module))
def module_requires_grad(rng: random.Random, world: World, m: Module) -> Undo:
    former = [(p, p.requires_grad) for p in m.parameters()]
    m.requires_grad_(rng.random() < 0.5)
    return lambda: [p.requires_grad_(needs) for p, needs in former]


@mutation(of(Module))
def module_parameter(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    name = rng.choice(list(m._parameters))
    value = m._parameters[name]
    assert value is not None
    new = torch.nn.Parameter(value.detach().clone(), value.requires_grad)
    rng.choice(
        [
            lambda: setattr(m, name, new),
            lambda: m._parameters.__setitem__(name, new),
            lambda: m.register_parameter(name, new),
            lambda: delattr(m, name),
            lambda: m.register_parameter(name, None),
            lambda: m.register_parameter("extra", new),
            lambda: m._parameters.__setitem__(name, other_tensor(rng, value)),
        ]
    )()
    return undo


@mutation(of(Module))
def module_buffer(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    name = rng.choice(list(m._buffers))
    rng.choice(
        [
            lambda: setattr(m, name, torch.ones(4)),
            lambda: m.register_buffer(name, torch.ones(4, dtype=torch.float64)),
            lambda: setattr(m, name, None),
            lambda: delattr(m, name),
            lambda: m.register_buffer("extra", torch.ones(1)),
        ]
    )()
    return undo


@mutation(of(Module))
def module_dicts_replaced(rng: random.Random, world: World, m: Module) -> Undo:
    """By equal dicts, or with one changed value."""
    undo = _restores_module(m)
    name = rng.choice(["_parameters", "_buffers", "_modules", "_forward_hooks"])
    new = copy.copy(vars(m)[name])
    if rng.random() < 0.4 and new:
        new.popitem()
    m.__dict__[name] = new
    return undo


@mutation(of(Module))
def module_child(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    name = rng.choice(list(m._modules))
    child = m._modules[name]
    assert child is not None
    rng.choice(
        [
            lambda: m._modules.__setitem__(name, copy.deepcopy(child)),
            lambda: setattr(m, name, copy.copy(child)),
            lambda: setattr(m, name, worlds.Scaled()),
            lambda: m._modules.__setitem__(name, None),
            lambda: delattr(m, name),
            lambda: m.add_module("extra", worlds.Scale()),
            lambda: m._modules.__setitem__(name, m._modules.pop(name)),
        ]
    )()
    return undo


@mutation(of(torch.nn.ModuleList, torch.nn.Sequential))
def module_list(rng: random.Random, world: World, m: Any) -> Undo:
    undo = _restores_module(m)
    rng.choice(
        [
            lambda: m.append(worlds.Scale()),
            lambda: m.__delitem__(-1),
            lambda: m.__setitem__(0, worlds.Scaled()),
            lambda: m.insert(0, m[-1]),
        ]
    )()
    return undo


@mutation(of(Module))
def module_hook(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    registers: list[Any] = [m.register_forward_hook, m.register_forward_pre_hook]
    registers += [m.register_full_backward_hook, m.register_state_dict_pre_hook]
    handle = rng.choice(registers)(lambda *_: None)
    if rng.random() < 0.3:
        handle.remove()
        return undo

    def remove() -> None:
        handle.remove()
        undo()

    return remove


@mutation(of(Module))
def module_parametrized(rng: random.Random, world: World, m: Module) -> Undo:
    undo, kind = _restores_module(m), type(m)
    name = rng.choice(list(m._parameters))
    parametrize.register_parametrization(m, name, worlds.Double())

    def remove() -> None:
        if rng.random() < 0.5 and parametrize.is_parametrized(m, name):
            parametrize.remove_parametrizations(m, name, leave_parametrized=False)
        object.__setattr__(m, "__class__", kind)
        undo()

    return remove


@mutation(of(Module))
def module_functional(rng: random.Random, world: World, m: Module) -> Undo:
    """What functional_call does around its call."""
    undo = _restores_module(m)
    values = {name: p.detach().clone() for name, p in m.named_parameters()}
    context = stateless._reparametrize_module(m, values)
    context.__enter__()

    def leave() -> None:
        context.__exit__(None, None, None)
        undo()

    return leave


@mutation(of(Module))
def module_tied(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    owners = [s for s in m.modules() if s._parameters.get("weight") is not None]
    rng.choice(owners)._parameters["weight"] = rng.choice(owners)._parameters["weight"]
    return undo


@mutation(of(Module))
def module_attributes_of_all(rng: random.Random, world: World, m: Module) -> Undo:
    undo = _restores_module(m)
    m.apply(lambda s: setattr(s, "power", 2))
    return undo


@mutation(of(Module))
def module_zero_grad(rng: random.Random, world: World, m: Module) -> Undo:
    grads = [(p, p.grad) for p in m.parameters()]
    for parameter, grad in grads:
        parameter.grad = None if grad is not None else torch.ones_like(parameter)
    return lambda: [setattr(p, "grad", grad) for p, grad in grads]


# Global and thread state.


def _entered(context: Any) -> Undo:
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


class OtherFunctionMode(FunctionMode):
    pass


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


@mutation(of(Env))
def grad_mode(rng: random.Random, world: World, _: Any) -> Undo:
    return _entered(torch.set_grad_enabled(not torch.is_grad_enabled()))


@mutation(of(Env))
def inference_mode(rng: random.Random, world: World, _: Any) -> Undo:
    return _entered(torch.inference_mode())


@mutation(of(Env))
def torch_function(rng: random.Random, world: World, _: Any) -> Undo:
    """A function of torch's, or of its modules, replaced."""
    places: list[tuple[Any, str]] = [(torch, "relu"), (torch, "ones"), (torch.nn, "functional")]
    places += [(torch.nn.functional, "linear"), (torch.nn.modules.linear, "F")]
    owner, name = rng.choice(places)
    value = getattr(owner, name)
    setattr(owner, name, rng.choice([value, lambda *args, **kwargs: value(*args, **kwargs)]))
    return lambda: setattr(owner, name, value)


@mutation(of(Env))
def global_module_hook(rng: random.Random, world: World, _: Any) -> Undo:
    module = torch.nn.modules.module
    registers = [module.register_module_forward_hook, module.register_module_forward_pre_hook]
    return rng.choice(registers)(lambda *_: None).remove


@mutation(of(Env))
def autocast(rng: random.Random, world: World, _: Any) -> Undo:
    dtype = rng.choice([torch.bfloat16, torch.float16])
    return _entered(torch.autocast("cpu", dtype, enabled=rng.random() < 0.8))


@mutation(of(Env))
def autocast_settings(rng: random.Random, world: World, _: Any) -> Undo:
    cache, dtype = torch.is_autocast_cache_enabled(), torch.get_autocast_dtype("cpu")
    torch.set_autocast_cache_enabled(not cache)
    torch.set_autocast_dtype("cpu", torch.float16)

    def undo() -> None:
        torch.set_autocast_cache_enabled(cache)
        torch.set_autocast_dtype("cpu", dtype)

    return undo


@mutation(of(Env))
def default_dtype(rng: random.Random, world: World, _: Any) -> Undo:
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if former is torch.float32 else torch.float32)
    return lambda: torch.set_default_dtype(former)


@mutation(of(Env))
def default_device(rng: random.Random, world: World, _: Any) -> Undo:
    former = torch.utils._device.CURRENT_DEVICE
    torch.set_default_device(rng.choice(["cpu", "meta"]))
    return lambda: torch.set_default_device(former)


@mutation(of(Env))
def device_context(rng: random.Random, world: World, _: Any) -> Undo:
    return _entered(torch.device(rng.choice(["cpu", "meta"])))


@mutation(of(Env))
def deterministic(rng: random.Random, world: World, _: Any) -> Undo:
    former = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(not former, warn_only=rng.random() < 0.5)
    return lambda: torch.use_deterministic_algorithms(former, warn_only=warn)


@mutation(of(Env))
def num_threads(rng: random.Random, world: World, _: Any) -> Undo:
    torch.set_num_threads(2)
    return lambda: torch.set_num_threads(1)


@mutation(of(Env))
def matmul_precision(rng: random.Random, world: World, _: Any) -> Undo:
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(rng.choice(["high", "medium"]))
    return lambda: torch.set_float32_matmul_precision(former)


@mutation(of(Env))
def function_mode(rng: random.Random, world: World, _: Any) -> Undo:
    return _entered(rng.choice([FunctionMode, OtherFunctionMode])())


@mutation(of(Env))
def function_disabled(rng: random.Random, world: World, _: Any) -> Undo:
    kinds: list[Any] = [torch._C.DisableTorchFunction, torch._C.DisableTorchFunctionSubclass]
    return _entered(rng.choice(kinds)())


@mutation(of(Env))
def dispatch_mode(rng: random.Random, world: World, _: Any) -> Undo:
    return _entered(DispatchMode())


@mutation(of(Env))
def dual_level(rng: random.Random, world: World, _: Any) -> Undo:
    return _entered(torch.autograd.forward_ad.dual_level())


@mutation(of(Env))
def saved_tensors_hooks(rng: random.Random, world: World, _: Any) -> Undo:
    graph = torch.autograd.graph
    if rng.random() < 0.3:
        return _entered(graph.disable_saved_tensors_hooks("on purpose"))
    return _entered(graph.saved_tensors_hooks(lambda t: t, lambda t: t))


@mutation(of(Env))
def functorch_level(rng: random.Random, world: World, _: Any) -> Undo:
    functorch = torch._C._functorch
    functorch._grad_increment_nesting()
    return lambda: functorch._grad_decrement_nesting()
