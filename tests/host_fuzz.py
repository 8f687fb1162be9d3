"""Random programs, compiled, against stock: all that a caller can see of several calls.

    python -m tests.host_fuzz --seed 0 --seconds 600     # programs from number 0 on
    python -m tests.host_fuzz --seed 17 --count 1 --show # this one, and its text

A program is a function of a few operators (in place, views, ``out=``, lists, random numbers, sizes,
regions of ``no_grad`` and autocast, graph breaks) on random inputs, half of the time trained. It is
made line by line: a line stays if eager runs it, and now and then if it does not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import linecache
import logging
import math
import random
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree

import trident
from tests.conftest import compilations, reset_compilations
from tests.test_equality import assert_same

CALLS = 5
FLOATING = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHER = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool, torch.complex64)
SHAPES: tuple[tuple[str, ...], ...] = (
    *((), ("a",), ("b",), ("a", "b"), ("a", "a"), ("b", "a"), ("b", "b"), ("1", "b"), ("a", "1")),
    *(("2", "a", "b"), ("2", "b", "a"), ("1", "2", "a", "b"), ("2", "3", "a", "b"), ("0", "b")),
)

# What a line may be: {t}, {u}, {w} are tensors, {n} a number, {d} a dimension, {i} a small int,
# {k} an int input or a size, {x} a float input or a number, {p} and {q} ints, {v} the name of the
# tensor that the line makes, {m} of the int.
STATEMENTS = tuple(
    line
    for group in (
        # operators and numbers
        """
        {v} = {t} + {u}
        {v} = {t} - {n}
        {v} = {n} - {t}
        {v} = {t} * {n}
        {v} = {n} * {t} + {n}
        {v} = {t} * {u}
        {v} = {t} / {u}
        {v} = {t} / {n}
        {v} = {t} // {n}
        {v} = {t} % {n}
        {v} = {t} ** 2
        {v} = 2 ** {t}
        {v} = {t} @ {u}
        {v} = -{t}
        {v} = {t} * {x}
        {v} = {t} + {k}
        {v} = {k} * {t}
        {v} = torch.add({t}, {u}, alpha={n})
        {v} = torch.sub({t}, {k}, alpha=2)
        {v} = {t} > {n}
        {v} = {t} == {u}
        {v} = ~{t}
        {v} = {t} & {u}
        {v} = torch.relu({t})
        {v} = {t}.sin()
        {v} = torch.exp({t})
        {v} = torch.sigmoid({t})
        {v} = {t}.abs()
        {v} = {t}.float()
        {v} = {t}.to(torch.float64)
        {v} = {t}.to(torch.bfloat16)
        {v} = {t}.long()
        {v} = {t}.bool()
        {v} = {t}.type_as({u})
        {v} = {t}.to({u})
        {v} = torch.where({t} > 0, {t}, {u})
        {v} = torch.where({t} > 0, {t}, {n})
        {v} = torch.clamp({t}, -1, {n})
        {v} = torch.lerp({t}, {u}, 0.3)
        {v} = torch.addcmul({t}, {u}, {w}, value=0.5)
        {v} = torch.maximum({t}, {u})
        {v} = torch.nan_to_num({t}, nan={n})
        {v} = torch.complex({t}, {u})
        """,
        # reductions and the like
        """
        {v} = {t}.sum()
        {v} = {t}.sum({d})
        {v} = {t}.sum({d}, keepdim=True)
        {v} = {t}.mean({d})
        {v} = {t}.prod()
        {v} = {t}.amax({d})
        {v} = {t}.var({d})
        {v}, {v}_ = torch.max({t}, {d})
        {v} = torch.sort({t}, {d})[0]
        {v}, {v}_ = torch.topk({t}, 2, {d})
        {v} = torch.cumsum({t}, {d})
        {v} = torch.softmax({t}, {d})
        {v} = torch.logsumexp({t}, {d})
        {v} = torch.argmax({t}, {d})
        {v} = torch.norm({t})
        {v} = {t}.any()
        {v} = {t}.std()
        {v} = torch.linalg.vector_norm({t}, dim={d})
        {v} = torch.einsum('...i,...i->...', {t}, {u})
        {v} = F.layer_norm({t}, {t}.shape[-1:])
        {v} = F.gelu({t})
        {v} = F.linear({t}, {u})
        {v} = F.mse_loss({t}, {u})
        {v} = F.pad({t}, (1, 2))
        {v} = F.normalize({t}, dim={d})
        {v} = F.one_hot({t}.long().abs() % 3, 4)
        {v} = torch.diff({t})
        {v} = torch.trace({t})
        """,
        # views
        """
        {v} = {t}.t()
        {v} = {t}.mT
        {v} = {t}.transpose({d}, {d})
        {v} = {t}.reshape(-1)
        {v} = {t}.view(-1)
        {v} = {t}.flatten()
        {v} = {t}[0]
        {v} = {t}[-1]
        {v} = {t}[..., 0]
        {v} = {t}[..., 1:]
        {v} = {t}[::2]
        {v} = {t}[None]
        {v} = {t}.unsqueeze({d})
        {v} = {t}.squeeze()
        {v} = {t}.squeeze({d})
        {v} = {t}.expand(2, *{t}.shape)
        {v} = {t}.expand_as({u})
        {v} = {t}.detach()
        {v} = {t}.clone()
        {v} = {t}.contiguous()
        {v} = {t}.contiguous(memory_format=torch.channels_last)
        {v} = {t}.permute(*range({t}.dim())[::-1])
        {v} = {t}.diagonal()
        {v} = {t}.real
        {v} = {t}.imag
        {v} = {t}.conj()
        {v} = {t}.mH
        {v} = torch.view_as_real({t})
        {v} = torch.view_as_complex({t})
        {v} = {t}.view({t}.dtype)
        {v} = {t}.view(torch.uint8)
        {v} = {t}.view_as({u})
        {v} = {t}.reshape({u}.shape)
        {v} = {t}.narrow({d}, 0, 2)
        {v} = {t}.select({d}, {i})
        {v} = {t}.unfold({d}, 2, 1)
        {v} = {t}.as_strided((2,), (1,))
        {v} = {t}.as_strided((2, 2), (1, 1), {i})
        {v} = {t}.movedim(0, -1)
        {v} = {t}.broadcast_to({u}.shape)
        {v} = {t}.reshape({t}.shape[0], -1)
        {v} = {t}.view(1, {t}.numel())
        {v} = {t}.new_empty(0)
        """,
        # in place
        """
        {t}.add_({u})
        {t}.mul_({n})
        {t} += {n}
        {t} -= {u}
        {t} *= {t}
        {t}.sub_({x})
        {t}.zero_()
        {t}.fill_({n})
        {t}.copy_({u})
        {t}[0] = {n}
        {t}[..., 0] = {u}
        {t}[0] += {n}
        {t}[:, 0].mul_({n})
        {t}[{t} > 0] = {n}
        {t}.relu_()
        {t}.clamp_(min={n})
        {t}.masked_fill_({t} > 1, {n})
        {t}.index_fill_({d}, torch.tensor([0]), {n})
        {t}.index_add_(0, torch.tensor([0, 1]), {t}[:2].clone())
        {t}.scatter_({d}, torch.zeros_like({t}, dtype=torch.int64), {n})
        {t}.t().add_({n})
        {t}.view(-1)[1:].sub_({t}.view(-1)[:-1])
        {t}.diagonal().fill_({n})
        {t}.detach().mul_({n})
        {t}.addcmul_({u}, {w})
        {t}.lerp_({u}, 0.5)
        {t}.sigmoid_()
        {t}.real.add_(1)
        {t}.imag.mul_(2)
        {t}.expand(2, *{t}.shape).add_(1)
        {v} = {t}.add_({n})
        {v} = {t}.exp_().neg_()
        {v} = {t}.mul_(0.5).view(-1)
        F.relu({t}, inplace=True)
        torch.relu_({t})
        """,
        # out=
        """
        torch.add({t}, {u}, out={w})
        {v} = torch.mul({t}, {u}, out={w})
        {v} = torch.sin({t}, out={u})
        {v} = torch.sin({t}, out={t})
        {v} = torch.sum({t}, {d}, out={u})
        {v} = torch.cat([{t}, {t}], out={u})
        {v} = torch.matmul({t}, {u}, out={w})
        {v}, {v}_ = torch.max({t}, {d}, out=({u}, {w}))
        {v}, {v}_ = torch.sort({t}, out=({u}, {u}.long()))
        {v} = torch.exp({t}, out=torch.empty_like({t}))
        {v} = torch.neg({t}, out={u}[0])
        """,
        # lists
        """
        {v} = torch.cat([{t}, {u}], {d})
        {v} = torch.cat([{t}, {t}, {t}])
        {v} = torch.stack([{t}, {u}])
        {v}, {v}_ = torch.chunk({t}, 2, {d})[:2]
        {v} = {t}.split(1)[0]
        {v} = {t}.unbind()[-1]
        {v}, *{v}_ = {t}.unbind({d})
        {v} = torch.block_diag({t}, {u})
        {v}, {v}_ = torch.meshgrid({t}, {u}, indexing='ij')
        {v}, {v}_ = torch.broadcast_tensors({t}, {u})
        {v} = torch._foreach_add([{t}, {u}], {n})[1]
        torch._foreach_mul_([{t}, {u}], {n})
        {v} = {t}[torch.tensor([0, 1])]
        {v} = {t}[:, torch.tensor([1, 0, 1])]
        {v} = {t}[None, ..., torch.tensor([0])]
        {v} = torch.index_select({t}, {d}, torch.tensor([0, 0]))
        {v} = torch.gather({t}, {d}, torch.zeros_like({t}, dtype=torch.int64))
        {v} = torch.index_put({t}, (torch.tensor([0]),), torch.ones((), dtype={t}.dtype))
        {v} = torch.scatter_add({t}, 0, torch.zeros_like({t}, dtype=torch.int64), {t})
        {v} = torch.flip({t}, [{d}])
        {v} = torch.roll({t}, 1, {d})
        {v} = torch.tril({t})
        {v} = {t}.repeat(2, *[1] * {t}.dim())
        {v} = {t}.repeat_interleave(2)
        {v} = torch.cdist({t}, {u})
        {v} = torch.outer({t}, {u})
        """,
        # made in the function, and random
        """
        {v} = torch.tensor([1.0, 2.0, {n}])
        {v} = torch.tensor({n})
        {v} = torch.tensor([3, 1], dtype=torch.uint8)
        {v} = torch.zeros_like({t})
        {v} = torch.ones({t}.shape)
        {v} = torch.arange({t}.numel()).reshape({t}.shape)
        {v} = torch.full({t}.shape, {n})
        {v} = {t}.new_full((3,), {k})
        {v} = torch.linspace(0, 1, 3)
        {v} = torch.eye(3)
        {v} = torch.rand_like({t})
        {v} = torch.randn(3)
        {v} = torch.randint(0, 5, (2,))
        {v} = F.dropout({t}, 0.5)
        {v} = F.dropout({t}, 0.5, False)
        {v} = torch.bernoulli({t}.sigmoid())
        {v} = torch.multinomial(torch.ones(4), 2)
        {v} = torch.randperm(4)
        {t}.normal_()
        {t}.uniform_(-1, 1)
        {v} = torch.empty({t}.shape).fill_({x})
        {v} = F.alpha_dropout({t}, 0.2, True)
        """,
        # numbers of sizes
        """
        {v} = {t} * {t}.shape[-1]
        {v} = {t} + {t}.numel() // 2
        {v} = {t}[: {t}.shape[0] // 2]
        {v} = {t} - ({t}.numel() - 7) % 3
        {v} = torch.arange({t}.shape[0] * 2 - 1)
        {v} = {t}.new_zeros({t}.shape[0] + 1, max({t}.shape[0], 2))
        {v} = {t} + {t}.stride(0)
        {v} = {t}.sum() / {t}.shape[0]
        {v} = {t} * ({k} - 9) // 2
        {v} = {t} + (-{k} // 3) * (({k} + 1) % 4)
        {m} = {p} + {q}
        {m} = {p} - {q}
        {m} = {p} * {q}
        {m} = {p} // {q}
        {m} = {p} % {q}
        {m} = {p} // 3
        {m} = -{p} % 4
        {m} = max({p}, {q})
        {m} = min({p}, {q}, 6)
        {m} = abs({p})
        {m} = {p} ** 2
        {m} = {p} >> 1
        {m} = {p} & 3
        {m} = int({p} / 2)
        {m} = int({p} > {q})
        {m} = math.ceil({p} / 3)
        {m} = {p} if {p} > {q} else {q} - 1
        {m} = {t}.shape[0]
        {m} = {t}.numel()
        {m} = {t}.stride(0)
        {m} = {t}.storage_offset()
        {v} = {t} * {p}
        {v} = {t} + {p}
        {v} = {t} - {p} / 2
        {v} = {t}[: {p}]
        {v} = {t}[{p} :]
        {v} = {t}[{p} % {t}.shape[0]]
        {v} = torch.full(({p} % 5, 2), {q})
        {v} = torch.arange({p})
        {v} = {t}.roll({p}, 0)
        {v} = {t}.as_strided((2,), ({p} % 2,))
        {v} = torch.tensor([{p}, {q}])
        {v} = F.pad({t}, ({p} % 3, {q} % 2))
        {v} = {t}.new_zeros({p} % 4).sum() + {q}
        {t}.add_({p})
        """,
    )
    for line in textwrap.dedent(group).strip().splitlines()
)
CONTEXTS = (
    *("torch.no_grad()", "torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(False)"),
    *("torch.autocast('cpu', torch.bfloat16)", "torch.autocast('cpu', torch.float16)"),
    *("torch.autocast('cpu', enabled=False)", "torch.inference_mode()"),
    "torch.autocast('cpu', torch.bfloat16, cache_enabled=False)",
)
NUMBERS = ("2", "-1", "0", "3", "0.5", "-0.0", "1e-3", "True", "1e10", "300", "0.1", "2.5", "1j")
STRUCTURES = (
    *("{0}", "({0},)", "({0}, {1})", "[{0}, {1}]", "({0}, ({1}, [{2}]))", "{{'a': {0}, 'b': {1}}}"),
    *("({0}, {0})", "({0}, {0}.view(-1))", "({0}, {1}, {2}, None, 3)", "({0}, {0}.shape[0])"),
    *("({0}, {1}, {0}[...], {1}.detach(), {2})", "({0}.contiguous(), {0})", "({0}, {p})"),
    *("({p}, {0}, [{q}, {1}])", "{{'n': {p}, 'x': {0}}}"),
)


@dataclasses.dataclass(frozen=True)
class Input:
    """How an input is made anew for each call. `base`: a view of that input."""

    name: str
    shape: tuple[str, ...]
    dtype: torch.dtype
    layout: str
    requires_grad: bool
    base: str | None = None

    def make(self, sizes: dict[str, int], made: dict[str, Any]) -> torch.Tensor:
        shape = [sizes.get(size) or int(size) for size in self.shape]
        if self.base is not None:
            x = made[self.base]
            return x.reshape(-1) if self.layout == "plain" or x.dim() == 0 else x[..., :1]
        if self.layout == "transposed":
            shape = shape[::-1]
        if self.layout == "sliced":
            shape = [size + 1 for size in shape]
        if self.layout == "expanded":
            shape = [1, *shape[1:]]
        x = torch.randn(shape, dtype=torch.float64) * 2
        x = x.to(self.dtype) if self.dtype is not torch.bool else x > 0
        if self.layout == "transposed" and x.dim() > 0:
            x = x.permute(*range(x.dim())[::-1])
        elif self.layout == "sliced":
            x = x[(slice(1, None),) * x.dim()]
        elif self.layout == "expanded":
            x = x.expand([sizes.get(size) or int(size) for size in self.shape])
        elif self.layout == "channels_last" and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self.requires_grad:
            x.requires_grad_()
            if self.layout == "computed":
                x = x * 1
        elif self.layout == "parameter" and x.is_floating_point():
            x = torch.nn.Parameter(x)
        return x


@dataclasses.dataclass(frozen=True)
class Program:
    number: int
    inputs: tuple[Input, ...]
    numbers: tuple[str, ...]
    text: str
    sizes: tuple[dict[str, int], ...]
    dynamic: bool | None

    @property
    def name(self) -> str:
        return f"<program {self.number}>"

    def function(self) -> Callable[..., Any]:
        """A new function: Dynamo compiles each of its code objects once."""
        linecache.cache[self.name] = len(self.text), None, self.text.splitlines(True), self.name
        namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math, "__name__": __name__}
        exec(compile(self.text, self.name, "exec"), namespace)
        f: Callable[..., Any] = namespace["program"]
        return f

    def arguments(self, call: int) -> list[Any]:
        """Those of the call number `call`."""
        torch.manual_seed(1000 * self.number + call)
        rng, made = random.Random(self.number + call), {}
        for x in self.inputs:
            made[x.name] = x.make(self.sizes[call], made)
        values = {"k": lambda: rng.choice([3, 5, 7, -4, 11]), "x": lambda: rng.choice([0.3, -1.7])}
        return [*made.values(), *(values[name]() for name in self.numbers)]


class _Author:
    """Writes the program number `number`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rng = random.Random(number)
        self.trained = self.rng.random() < 0.5
        self.names: list[str] = []
        self.ints: list[str] = ["2", "3", "-5"]
        self.lines: list[str] = []
        self.n_made = 0

    def program(self) -> Program:
        rng = self.rng
        inputs = self._inputs()
        numbers = tuple(name for name in ("k", "x") if rng.random() < 0.25)
        first = {"a": 3, "b": 4}
        sizes = [first] * CALLS
        if rng.random() < 0.3:
            other = {"a": rng.choice([2, 5, 3]), "b": rng.choice([3, 4, 6])}
            sizes = [first, other, {"a": 6, "b": 5}, {"a": 4, "b": 7}, first]
        elif rng.random() < 0.1:
            sizes = [first, first, first, {"a": 1, "b": 4}, first]
        dynamic = rng.choice([None, None, None, True])
        signature = ", ".join([*(x.name for x in inputs), *numbers])
        draft = Program(self.number, inputs, numbers, "", tuple(sizes), dynamic)
        values = draft.arguments(0)
        namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math}
        namespace.update(zip(signature.split(", "), values, strict=True))
        self.names = [x.name for x in inputs]
        self.ints += [f"{x.name}.shape[0]" for x in inputs if x.shape] + ["k"] * ("k" in numbers)
        wanted = rng.randint(2, 8)
        for _ in range(wanted * 8):
            if len(self.lines) >= wanted:
                break
            self._add(namespace)
        body = "\n".join([*self.lines, f"return {self._result()}"])
        text = f"def program({signature}):\n{textwrap.indent(body, '    ')}\n"
        return dataclasses.replace(draft, text=text)

    def _inputs(self) -> tuple[Input, ...]:
        rng, made = self.rng, []
        main, shapes = rng.choice(FLOATING), rng.sample(SHAPES, 2)
        layouts = ["transposed", "sliced", "expanded", "channels_last", "computed", "parameter"]
        for i in range(rng.randint(1, 4)):
            dtype = main if rng.random() < 0.75 else rng.choice([*FLOATING, *OTHER])
            layout = rng.choice(layouts) if rng.random() < 0.4 else "plain"
            grad = self.trained and dtype.is_floating_point and rng.random() < 0.7
            if layout in ("expanded", "computed") and not grad and layout == "computed":
                layout = "plain"
            base = rng.choice(made).name if made and rng.random() < 0.12 else None
            shape = rng.choice(shapes)
            if layout == "expanded" and (not shape or shape[0] == "0"):
                layout = "plain"
            made.append(Input(f"t{i}", shape, dtype, layout, grad, base))
        return tuple(made)

    def _add(self, namespace: dict[str, Any]) -> None:
        """A line more, or a region of some, if eager runs it."""
        rng = self.rng
        made: list[str] = []
        if rng.random() < 0.12:
            inner = [self._line(made) for _ in range(rng.randint(1, 3))]
            line = f"with {rng.choice(CONTEXTS)}:\n" + textwrap.indent("\n".join(inner), "    ")
        elif rng.random() < 0.02:
            line = "torch._dynamo.graph_break()"
        else:
            line = self._line(made)
        state = torch.get_rng_state()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, namespace)
        except Exception:
            torch.set_rng_state(state)
            if rng.random() > 0.01:
                return
        self.lines.append(line)
        new = [n for n in made if isinstance(namespace.get(n), torch.Tensor)]
        self.ints += [n for n in made if isinstance(namespace.get(n), int)]
        small = [n for n in new if namespace[n].numel() < 2000]
        self.names += small

    def _line(self, made: list[str]) -> str:
        rng = self.rng
        self.n_made += 1
        name = f"v{self.n_made}"
        line = rng.choice(STATEMENTS)
        known = [*self.names, *self.names[-3:], *made]
        values = {key: rng.choice(known) for key in "tuw"}
        line = line.format(
            **values,
            v=name,
            m=name,
            p=rng.choice([*self.ints, *self.ints[-2:]]),
            q=rng.choice(self.ints),
            n=rng.choice(NUMBERS),
            d=rng.choice(["0", "-1", "1"]),
            i=rng.choice(["0", "1", "2"]),
            k="k" if rng.random() < 0.7 else f"{values['t']}.dim()",
            x="x" if rng.random() < 0.7 else rng.choice(NUMBERS),
        )
        if f"{name} =" in line or f"{name}," in line:
            made.append(name)
            if f"{name}_ =" in line and "*" not in line.partition("=")[0]:
                made.append(f"{name}_")
        return line

    def _result(self) -> str:
        names = [self.rng.choice([*self.names, *self.names[-3:]]) for _ in range(3)]
        ints = {key: self.rng.choice([*self.ints, *self.ints[-2:]]) for key in "pq"}
        return self.rng.choice(STRUCTURES).format(*names, **ints)


# ---- what is compared ----


def _describe(x: Any, seen: list[torch.Tensor]) -> Any:
    """All there is to see of a value; `seen` are the tensors before it."""
    if not isinstance(x, torch.Tensor):
        return type(x), repr(x)
    found: dict[str, Any] = {
        "kind": (type(x), x.dtype, x.device, x.shape, x.layout),
        "grad": (x.requires_grad, *_graph(x)),
        "lazy": (x.is_conj(), x.is_neg(), x.is_inference()),
        "same": [i for i, other in enumerate(seen) if other is x],
    }
    if x.layout is torch.strided:
        found["memory"] = x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
        found["aliases"] = [i for i, other in enumerate(seen) if _shares(x, other)]
        base = x._base
        found["base"] = x._is_view(), [i for i, o in enumerate(seen) if o is base]
    if not x.is_inference():
        found["version"] = x._version
    if x.device.type != "meta":
        found["values"] = x.detach().clone() if x.layout is torch.strided else x.to_dense()
    seen.append(x)
    return found


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return b.layout is torch.strided and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _graph(x: torch.Tensor) -> list[Any]:
    """The nodes of its autograd graph, depth first."""
    try:
        names: list[Any] = [x.is_leaf, x.output_nr]
        stack = [x.grad_fn]
    except RuntimeError as error:  # it was changed in a mode that forbids this
        return [str(error)]
    while stack and len(names) < 100:
        node = stack.pop()
        names.append("" if node is None else node.name())
        if node is not None:
            stack += [other for other, _ in node.next_functions]
    return names


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
    """Once and twice, and what ``backward`` accumulates."""
    wanted = [y for y in outputs if y.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if not wanted or not leaves:
        return None
    found: list[Any] = []
    try:
        loss: Any = sum((y.abs() if y.is_complex() else y).double().pow(2).sum() for y in wanted)
        once = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        found.append([_describe(g, []) for g in once])
        again = [g for g in once if g is not None and g.requires_grad]
        if again:
            twice = torch.autograd.grad(
                sum(g.double().sum() for g in again),  # type: ignore[arg-type]
                leaves,
                allow_unused=True,
                retain_graph=True,
            )
            found.append([_describe(g, []) for g in twice])
        loss.backward()
        found.append([x.grad for x in leaves if x.is_leaf])
    except Exception as error:
        found.append((type(error), str(error)))
    return found


def _state() -> Any:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_rng_state(),
    )


def _words(error: BaseException) -> Any:
    """Of an exception at run time all, of one while compiling what it comes from."""
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return type(error), str(error).partition("\n")[0][:200]
    return type(error), str(error)


def calls(program: Program, function: Callable[..., Any]) -> Iterator[Any]:
    """What is to see of each call."""
    for number in range(CALLS):
        arguments = program.arguments(number)
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        torch.manual_seed(number)
        error, result = None, None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = function(*arguments)
            except Exception as raised:
                error = _words(raised)
        state = _state()
        warned = [(w.category, str(w.message)) for w in caught]
        leaves, structure = _pytree.tree_flatten(result)
        seen: list[torch.Tensor] = []
        described = [_describe(x, seen) for x in (*arguments, *leaves)]
        outputs = [y for y in leaves if isinstance(y, torch.Tensor)]
        yield {
            "error": error,
            "structure": str(structure),
            "tensors": described,
            "warnings": warned if number > 1 else None,  # while compiling, Dynamo has its own
            "state": state,
            "gradients": _gradients(outputs, tensors),
        }


@dataclasses.dataclass
class Verdict:
    native: int  # calls that ran natively
    raised: bool
    reasons: list[str] = dataclasses.field(default_factory=list)


def check(program: Program) -> Verdict:
    """Raises AssertionError where Trident differs from stock."""
    torch._dynamo.reset()
    reset_compilations()
    f = program.function()
    expected = list(calls(program, torch.compile(f, backend="eager", dynamic=program.dynamic)))
    by_stock = compilations()
    torch._dynamo.reset()
    reset_compilations()
    trident.reset_stats()
    with trident.enable():
        g = torch.compile(program.function(), backend="trident", dynamic=program.dynamic)
        for number, found in enumerate(calls(program, g)):
            assert_same(found, expected[number], f"call {number}")
        assert_same(compilations(), by_stock, "compilations")
        stats = trident.stats()
        lines = str(trident.explain(g)).splitlines()
    reasons = [line.strip() for line in lines if "stock: " in line]
    return Verdict(stats.hits + stats.raised, any(e["error"] for e in expected), reasons)


@dataclasses.dataclass
class Report:
    programs: int
    native: int
    calls: int
    raised: int
    reasons: collections.Counter[str]
    wrong: list[str]

    def text(self) -> str:
        lines = [f"{self.programs} programs, {self.native} of them native ({self.calls} calls)"]
        lines.append(f"{self.raised} raise")
        lines += [f"not native, {n} times: {why}" for why, n in self.reasons.most_common(40)]
        lines += [f"WRONG: {text}" for text in self.wrong]
        return "\n".join(lines)


def _normal(reason: str) -> str:
    """Without names of programs, addresses and numbers of symbols."""
    text = re.sub(r"\S+ \(<program \d+>:\d+\): ", "", reason)
    return re.sub(r"\b0x[0-9a-f]+|\bs\d+\b|at offset \d+", "…", text)[:160]


def run(first: int, count: int | None, seconds: float, show: bool = False) -> Report:
    report = Report(0, 0, 0, 0, collections.Counter(), [])
    end = time.monotonic() + seconds
    number = first
    while time.monotonic() < end and (count is None or number < first + count):
        program = _Author(number).program()
        if show:
            print(program.inputs, program.sizes, program.dynamic, program.text, sep="\n")
        report.programs += 1
        number += 1
        try:
            verdict = check(program)
        except AssertionError as error:
            text = f"{program.name} {str(error)[:300]}\n{program.text}"
            report.wrong.append(text)
            print(f"WRONG: {text}", flush=True)
            continue
        report.native += verdict.native > 0
        report.calls += verdict.native
        report.raised += verdict.raised
        report.reasons.update(map(_normal, verdict.reasons))
    torch._dynamo.reset()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--show", action="store_true", help="print each program")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):  # FX prints where a graph raised
        report = run(arguments.seed, arguments.count, arguments.seconds, arguments.show)
    print(report.text())
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
