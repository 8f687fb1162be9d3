"""Small programs that use ``torch.compile``, for tests that compare ways to run them.

``EXAMPLES[name](backend)`` builds everything anew under a fixed seed, calls the compiled function
several times (so that later calls can hit, and some recompile), and returns the list of results.
The results depend on nothing else: two runs, stock and under Trident, must agree bit for bit.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Example = Callable[[str], list[Any]]
EXAMPLES: dict[str, Example] = {}


def example(function: Example) -> Example:
    """Registers `function` under its name, run with a fixed seed."""
    name = function.__name__

    def run(backend: str) -> list[Any]:
        torch.manual_seed(0)
        return function(backend)

    if name in EXAMPLES:
        raise ValueError(f"two examples are called {name}")
    EXAMPLES[name] = run
    return run


GLOBAL_TENSOR = torch.arange(3.0)
GLOBAL_FLOAT = 1.5


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Pair = collections.namedtuple("Pair", "left right")


class OrderedOutput(collections.OrderedDict):
    """A dict that is also a dataclass, as model libraries return it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


@dataclasses.dataclass
class BaseOutput(OrderedOutput):
    last: Any = None
    pooled: Any = None
    hidden: Any = None


@dataclasses.dataclass
class Plain:
    a: torch.Tensor
    b: int = 3


class MLP(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Rotary(nn.Module):
    def __init__(self, dim: int, length: int = 64) -> None:
        super().__init__()
        t = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", torch.cat([t, t], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([t, t], -1).sin(), persistent=False)

    def forward(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[position], self.sin[position]


def rotate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@dataclasses.dataclass
class Config:
    hidden: int = 32
    heads: int = 4
    layers: int = 2


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.heads
        self.dim = config.hidden // config.heads
        self.scaling = self.dim**-0.5
        self.q, self.k, self.v, self.o = (
            nn.Linear(config.hidden, config.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, rotary: Any, cache: list[Any]) -> torch.Tensor:
        b, t, _ = x.shape
        cos, sin = rotary
        q, k, v = (
            f(x).view(b, t, self.heads, self.dim).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
        keys, values = cache[self.layer]
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        cache[self.layer] = (keys, values)
        out = nn.functional.scaled_dot_product_attention(q, keys, values, scale=self.scaling)
        return self.o(out.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden)
        self.attention = Attention(config, layer)
        self.up = nn.Linear(config.hidden, 64, bias=False)
        self.down = nn.Linear(64, config.hidden, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor, rotary: Any, cache: list[Any]) -> torch.Tensor:
        x = x + self.attention(self.norm(x), rotary, cache)
        return x + self.down(self.act(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(50, config.hidden)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.rotary = Rotary(config.hidden // config.heads)
        self.head = nn.Linear(config.hidden, 50, bias=False)

    def forward(self, ids: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        x, rotary = self.embedding(ids), self.rotary(position)
        for layer in self.layers[: self.config.layers]:
            x = layer(x, rotary, cache)
        return self.head(x)


@example
def plain(backend: str) -> list[Any]:
    f = torch.compile(lambda x, y: x + y * 2, backend=backend)
    return [f(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(3)]


@example
def keywords(backend: str) -> list[Any]:
    def g(x: Any, *, scale: float = 1.0, flag: bool = True, **kw: Any) -> Any:
        return x * scale + kw["b"] if flag else x - 1

    f = torch.compile(g, backend=backend)
    x = torch.randn(3)
    return [
        f(x, scale=2.0, b=torch.ones(3)),
        f(x, scale=2.0, b=torch.zeros(3)),
        f(x, b=torch.ones(3)),
        f(x, flag=False),
    ]


@example
def mark_dynamic(backend: str) -> list[Any]:
    f = torch.compile(lambda x: (x.view(-1) * x.shape[0]).reshape(x.shape[0], 4), backend=backend)
    out = []
    for n in (5, 7, 5):
        x = torch.randn(n, 4)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        out.append(f(x))
    return out


@example
def automatic_dynamic(backend: str) -> list[Any]:
    f = torch.compile(lambda x, y: x.sum() + y[: x.shape[0] // 2].sum(), backend=backend)
    sizes = ((6, 9), (8, 11), (10, 12), (6, 9))
    return [f(torch.randn(a, 4), torch.randn(b)) for a, b in sizes]


@example
def int_and_float_arguments(backend: str) -> list[Any]:
    f = torch.compile(lambda x, k, a: x[:k] * a, backend=backend)
    x = torch.randn(9)
    return [f(x, 3, 0.5), f(x, 4, 0.7), f(x, 5, 0.5), f(x, 3, 0.5)]


@example
def mlp_inference(backend: str) -> list[Any]:
    f = torch.compile(MLP().eval(), backend=backend)
    with torch.no_grad():
        return [f(torch.randn(2, 8)) for _ in range(3)]


@example
def sequential(backend: str) -> list[Any]:
    f = torch.compile(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), backend=backend)
    return [f(torch.randn(2, 8)).detach() for _ in range(3)]


@example
def train_and_eval(backend: str) -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    f = torch.compile(model, backend=backend)
    x, out = torch.randn(2, 4), []
    for mode in (True, False, True):
        model.train(mode)
        out.append(f(x).detach())
    return out


@example
def training_step(backend: str) -> list[Any]:
    model = MLP(2)
    f = torch.compile(lambda x, y: ((model(x) - y) ** 2).mean(), backend=backend)
    out: list[Any] = []
    for _ in range(3):
        loss = f(torch.randn(2, 8), torch.randn(2, 8))
        loss.backward()
        out.append(loss.detach())
    return [*out, model.layers[0].weight.grad]


@example
def optimizer_step(backend: str) -> list[Any]:
    model = MLP(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    f = torch.compile(lambda: optimizer.step(), backend=backend)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 8)).sum().backward()
        f()
    return [p.detach().clone() for p in model.parameters()]


@example
def closure(backend: str) -> list[Any]:
    a, items = 0.25, [torch.randn(3), 2, "s"]
    f = torch.compile(lambda x: x * a + items[0] * items[1], backend=backend)
    out = [f(torch.randn(3)), f(torch.randn(3))]
    items[1] = 3
    return [*out, f(torch.randn(3))]


@example
def dict_argument(backend: str) -> list[Any]:
    f = torch.compile(lambda d: d["x"] + d["y"]["z"] * d["k"], backend=backend)
    return [f({"x": torch.randn(3), "y": {"z": torch.randn(3)}, "k": k}) for k in (3, 3, 4)]


@example
def dict_iteration(backend: str) -> list[Any]:
    def g(d: dict[str, Any]) -> Any:
        total = torch.zeros(3)
        for key, value in d.items():
            total = total * 2 + value * len(key)
        return total

    f = torch.compile(g, backend=backend)
    x, y = torch.randn(3), torch.randn(3)
    return [f({"x": x, "yy": y}), f({"x": y, "yy": x}), f({"yy": y, "x": x}), f({"x": x})]


@example
def global_tensor(backend: str) -> list[Any]:
    f = torch.compile(lambda x: x + GLOBAL_TENSOR * GLOBAL_FLOAT, backend=backend)
    return [f(torch.randn(3)) for _ in range(2)]


@example
def graph_break(backend: str) -> list[Any]:
    def g(x: Any) -> Any:
        y = x + 1
        torch._dynamo.graph_break()
        z = torch.relu(y)
        return z * y.shape[0]

    f = torch.compile(g, backend=backend)
    return [f(torch.randn(3)) for _ in range(3)]


@example
def aliased_arguments(backend: str) -> list[Any]:
    f = torch.compile(lambda a, b, c: a + b + c, backend=backend)
    x, y, z = torch.randn(4), torch.randn(4), torch.randn(4)
    return [f(x, x, y), f(y, y, x), f(x, y, z), f(x, x, x)]


@example
def overlapping_views(backend: str) -> list[Any]:
    # Only ahead-of-time backends guard on overlap.
    def g(p: Any, q: Any) -> Any:
        p.add_(1)
        return p + q

    backend = "aot_eager" if backend == "eager" else backend
    f = torch.compile(g, backend=backend, dynamic=True)
    base = torch.randn(10)
    return [f(base[:6], base[4:]), f(base[:6], base[4:]), base.clone()]


@example
def model_output(backend: str) -> list[Any]:
    f = torch.compile(lambda o: o.last + o.hidden[1], backend=backend)
    return [
        f(BaseOutput(last=torch.randn(3), hidden=(torch.randn(3), torch.randn(3))))
        for _ in range(2)
    ]


@example
def dataclass_argument(backend: str) -> list[Any]:
    f = torch.compile(lambda o: o.a + o.b, backend=backend)
    return [f(Plain(torch.randn(3), b)) for b in (3, 3, 5)]


@example
def decoder(backend: str) -> list[Any]:
    config = Config()
    model = Decoder(config).eval()
    cache: list[Any] = [
        (torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8)) for _ in range(config.layers)
    ]
    f = torch.compile(model, backend=backend)
    with torch.no_grad():
        return [
            f(torch.full((1, 1), step % 50), torch.tensor([step]), cache) for step in range(3, 7)
        ]


@example
def default_arguments(backend: str) -> list[Any]:
    def g(x: Any, scale: float = 2.0, *, shift: int = 1) -> Any:
        return x * scale + shift

    f = torch.compile(lambda x: g(x) + g(x, shift=2), backend=backend)
    x = torch.randn(3)
    out = [f(x), f(x)]
    g.__defaults__ = (3.0,)
    return [*out, f(x)]


@example
def set_and_string(backend: str) -> list[Any]:
    def g(x: Any, names: set[str], mode: str) -> Any:
        return x + 1 if mode in names else x - 1

    f = torch.compile(g, backend=backend)
    x = torch.randn(3)
    return [f(x, {"a", "b"}, "a"), f(x, {"a", "b"}, "a"), f(x, {"b"}, "a")]


@example
def enum_and_named_tuple(backend: str) -> list[Any]:
    def g(p: Pair, color: Color) -> Any:
        return p.left + p.right if color is Color.RED else p.left - p.right

    f = torch.compile(g, backend=backend)
    pair = Pair(torch.randn(3), torch.randn(3))
    return [f(pair, Color.RED), f(pair, Color.RED), f(pair, Color.BLUE)]


@example
def iterators(backend: str) -> list[Any]:
    def g(numbers: Any, tensors: Any) -> Any:
        return next(tensors) * next(numbers)

    f = torch.compile(g, backend=backend)
    x, y = torch.randn(3), torch.randn(3)
    return [f(iter(range(2, n)), iter((x, y))) for n in (5, 5, 6)]


@example
def nan_constant(backend: str) -> list[Any]:
    f = torch.compile(lambda x, a: torch.nan_to_num(x * a), backend=backend, dynamic=False)
    x = torch.randn(3)
    return [f(x, float("nan")), f(x, float("nan")), f(x, 2.0)]


@example
def grad_mode(backend: str) -> list[Any]:
    f = torch.compile(lambda x: x * 2, backend=backend)
    x, out = torch.randn(3, requires_grad=True), []
    for enabled in (True, False, True, False):
        with torch.set_grad_enabled(enabled):
            y = f(x)
            out += [y.detach(), y.requires_grad]
    return out


@example
def default_device(backend: str) -> list[Any]:
    f = torch.compile(lambda x: x + torch.ones(3, device=x.device), backend=backend)
    x = torch.randn(3)
    out = [f(x)]
    with torch.device("cpu"):
        out.append(f(x))
    return [*out, f(x)]


@example
def module_attributes(backend: str) -> list[Any]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = 2.0
            self.options = {"bias": 1, "on": True}

        def forward(self, x: Any) -> Any:
            y = self.linear(x) * self.scale
            return y + self.options["bias"] if self.options["on"] else y

    model = Scaled()
    f = torch.compile(model, backend=backend)
    x = torch.randn(2, 4)
    out = [f(x).detach(), f(x).detach()]
    model.scale = 3.0
    out.append(f(x).detach())
    model.options["on"] = False
    return [*out, f(x).detach()]


@example
def many_specializations(backend: str) -> list[Any]:
    f = torch.compile(lambda x, mode: x + len(mode), backend=backend)
    x = torch.randn(3)
    return [f(x, mode) for mode in ("a", "bb", "ccc", "a", "bb", "ccc", "a")]


@example
def no_graph(backend: str) -> list[Any]:
    f = torch.compile(lambda x, y: (x, (y, 1)), backend=backend)
    x = torch.randn(3)
    return [f(x, "s"), f(x, 2), f("a", x)]


@example
def mapping_proxy(backend: str) -> list[Any]:
    f = torch.compile(lambda x, m: x * m["k"], backend=backend)
    x = torch.randn(3)
    return [f(x, types.MappingProxyType({"k": k})) for k in (2, 2, 3)]


@example
def nested_compiled(backend: str) -> list[Any]:
    inner = torch.compile(lambda x: x + 1, backend=backend)
    outer = torch.compile(lambda x: inner(x) * 2, backend=backend)
    return [outer(torch.randn(3)), inner(torch.randn(3)), outer(torch.randn(3))]
