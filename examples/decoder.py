"""Greedy decoding with a small Llama-style decoder and a static KV cache.

Random weights from a fixed seed, float32: the tokens are the same on every run of a machine.

    python examples/decoder.py --layers 4 --steps 300
    python examples/decoder.py --backend none            # without torch.compile
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Cache = list[tuple[Tensor, Tensor]]  # per layer: keys and values, each (batch, heads, length, dim)
Step = Callable[[Tensor, Tensor, Cache], Tensor]
WEIGHT_SCALE = 1.5
WARMUP_STEPS = 5  # not part of the median: they compile


@dataclass(frozen=True)
class Config:
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 352
    vocabulary: int = 1024
    length: int = 512  # of the KV cache, in tokens

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x is (batch, heads, tokens, dim), cos and sin are (tokens, dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.query = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        batch, tokens, dim = x.shape
        keys, values = cache

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, tokens, heads, self.head_dim).transpose(1, 2)

        query = rotate(split(self.query(x), self.heads), *rotary)
        keys.index_copy_(2, positions, rotate(split(self.key(x), self.kv_heads), *rotary))
        values.index_copy_(2, positions, split(self.value(x), self.kv_heads))
        groups = self.heads // self.kv_heads
        attended = functional.scaled_dot_product_attention(
            query,
            keys.repeat_interleave(groups, dim=1),
            values.repeat_interleave(groups, dim=1),
            attn_mask=mask,
        )
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, dim))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, rotary, mask, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Maps tokens (batch, n) at positions (n,) to the logits (batch, vocabulary) of the last."""

    cos: Tensor
    sin: Tensor
    slots: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        half = config.head_dim // 2
        frequencies = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.length), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("slots", torch.arange(config.length))

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        x = self.embedding(tokens)
        rotary = self.cos[positions], self.sin[positions]
        mask = self.slots <= positions[:, None]  # (n, length): a token sees what came before it
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, positions, rotary, mask, layer_cache)
        return self.head(self.norm(x[:, -1]))


def make_model(config: Config, device: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):  # large enough for the context to change the next token
            nn.init.normal_(module.weight, std=WEIGHT_SCALE * module.in_features**-0.5)
    return model.to(device).eval()


def make_cache(config: Config, device: str) -> Cache:
    shape = (1, config.kv_heads, config.length, config.head_dim)
    return [
        (torch.zeros(shape, device=device), torch.zeros(shape, device=device))
        for _ in range(config.layers)
    ]


def make_prompt(config: Config, device: str, tokens: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocabulary, (1, tokens), generator=generator).to(device)


class Generation:
    """One sequence that grows by a token a step; the first step is the prefill of the prompt."""

    def __init__(self, step: Step, config: Config, device: str) -> None:
        self.step, self.device = step, torch.device(device)
        self.cache = make_cache(config, device)
        self.input = make_prompt(config, device)
        self.positions = torch.arange(self.input.shape[1], device=device)
        self.tokens: list[int] = []
        self.times_s: list[float] = []

    def advance(self) -> None:
        """Runs one step and takes its time, the wait for the token included."""
        started = time.perf_counter()
        logits = self.step(self.input, self.positions, self.cache)
        self.input = logits.argmax(-1, keepdim=True)
        self.tokens.append(int(self.input))  # waits for the device
        self.times_s.append(time.perf_counter() - started)
        self.positions = self.positions[-1:] + 1

    def median_us(self) -> float:
        return statistics.median(self.times_s[WARMUP_STEPS:]) * 1e6


def progress(label: str, done: int, total: int, width: int = 40) -> None:
    if done % max(1, total // 100) and done != total:
        return
    filled = width * done // total
    bar = "#" * filled + "." * (width - filled)
    sys.stderr.write(f"\r{label:<12} [{bar}] {done}/{total}" + ("\n" if done == total else ""))
    sys.stderr.flush()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Greedy decoding with a small Llama-style model.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300, help="tokens to generate, at most 496")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--backend", default="inductor", help="of torch.compile; none: eager")
    parser.add_argument("--json", type=Path, help="write tokens and the time of each step here")
    options = parser.parse_args()
    limit = Config.length - 16
    if not WARMUP_STEPS < options.steps <= limit:
        parser.error(f"--steps must be {WARMUP_STEPS + 1} to {limit}")
    return options


def main() -> None:
    options = arguments()
    config = Config(layers=options.layers)
    model = make_model(config, options.device)
    step: Step = model
    if options.backend != "none":
        step = torch.compile(model, backend=options.backend)
    generation = Generation(step, config, options.device)
    with torch.no_grad():
        for done in range(options.steps):
            generation.advance()
            progress("decoding", done + 1, options.steps)
    print(f"tokens: {' '.join(map(str, generation.tokens[:12]))} …")
    print(f"prefill and compilation: {sum(generation.times_s[:WARMUP_STEPS]):.2f} s")
    print(f"median step: {generation.median_us():.0f} µs")
    if options.json is not None:
        result: dict[str, Any] = {
            "config": asdict(config),
            "device": options.device,
            "backend": options.backend,
            "tokens": generation.tokens,
            "times_us": [round(seconds * 1e6, 2) for seconds in generation.times_s],
            "median_us": generation.median_us(),
        }
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
