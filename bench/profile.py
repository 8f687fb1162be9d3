"""Where the time of a call through the default backend goes, by Linux's perf.

    python -m bench.profile               # to bench/results/profile.json; libraries to stderr

Shares of the samples of one thread, by library: Inductor's kernels, torch's operators and
allocations, memory management of the C library, Python and torch's bindings, and Trident's own.
Exits with 2 where perf is not installed.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 5.0
# By the name of the library that a sample is in.
PARTS = (
    ("kernels", r"\.main\.so$"),
    ("operators", r"libtorch_cpu|libc10|libmkl|libgomp|libm[.-]|libopenblas|libstdc"),
    ("memory", r"^libc[.-]"),
    ("trident", r"_frame\.|JIT|perf-\d+\.map|anon"),
    ("python", r"libpython|^python|libtorch_python|ld-linux|libpthread"),
)


def decoder(**sizes: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from decoder import Config, Decoder, make_cache, make_prompt

    config = Config(layers=28, **sizes)
    model = Decoder(config).eval()
    tokens, cache = make_prompt(config, "cpu")[:, :1], make_cache(config, "cpu")
    return torch.compile(model), (tokens, torch.arange(1), cache)


def narrow_decoder() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """That of the other benchmarks."""
    return decoder(dim=32, heads=2, kv_heads=1, hidden=32, vocabulary=64, length=64)


def small() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y) * 2

    return torch.compile(function), (torch.randn(16), torch.randn(16))


def shares(compiled: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "perf.data"
        command = ["perf", "record", "-q", "-F", "2000", "-o", str(data), "-p", str(os.getpid())]
        recorder = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(0.5)
        calls = 0
        start = time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            for _ in range(10):
                compiled(*inputs)
            calls += 10
        elapsed = time.perf_counter() - start
        recorder.send_signal(2)
        recorder.wait()
        text = subprocess.run(
            ["perf", "report", "-i", str(data), "--sort", "dso", "--stdio"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found: dict[str, float] = collections.defaultdict(float)
    for percent, library in re.findall(r"^\s*([\d.]+)%\s+(?:\S+\s+)??(\S.*?)\s*$", text, re.M):
        part = next((name for name, pattern in PARTS if re.search(pattern, library)), "other")
        found[part] += float(percent)
    return {"us_per_call": elapsed / calls * 1e6, "percent": dict(found), "libraries": text}


def main() -> int:
    if shutil.which("perf") is None:
        print("perf is not installed", file=sys.stderr)
        return 2
    import torch

    import trident
    from bench import environment

    torch.set_num_threads(1)
    results = {}
    for make in (small, narrow_decoder, decoder):
        compiled, inputs = make()
        with torch.no_grad(), trident.enable():
            for _ in range(20):
                compiled(*inputs)
            assert trident.stats().run_code == 0
            found = shares(compiled, inputs)
        print(found.pop("libraries"), file=sys.stderr)
        results[f"profile_{make.__name__}"] = {
            "environment": environment.describe(),
            "figures": found,
        }
    path = ROOT / "bench" / "results" / "profile.json"
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
