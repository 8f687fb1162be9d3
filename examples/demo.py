"""The main job (`make demo`): decoder.py eager, under stock torch.compile, and under Trident.

First in one process, in turns of a few steps, so that the machine's noise meets all three alike;
then as a user would run it: `python -m trident run examples/decoder.py`, an unchanged script.
Prints a table and fails unless every run generated the same tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoder import (
    Config,
    Generation,
    Step,
    default_device,
    make_model,
    progress,
)

import trident

DECODER = Path(__file__).resolve().with_name("decoder.py")
TURN_STEPS = 5  # steps of one variant before the next one's turn
COLUMNS = ("", "µs/step", "stock / this", "hits", "misses", "specializations")
SHARES = ("guards native", "plan native", "program native")


NATIVE = 'Trident, backend="trident"'


@dataclass
class Row:
    name: str
    median_us: float
    tokens: list[int]
    stats: Mapping[str, Any] | None = None  # trident.stats().as_dict()
    comparable: bool = True  # ran in turns with the others


def shares(stats: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of all calls that Trident saw: whose guards, frame plan, host program were native.

    A hit is native throughout, as is a call whose native code raised; run_code had native guards
    and then ran Dynamo's code object, as where the graph or the frame around it is not native; a
    miss was stock.
    """
    planned = stats["hits"] + stats["raised"]
    guarded = planned + stats["run_code"]
    calls = guarded + stats["misses"]
    return (guarded / calls, planned / calls, planned / calls) if calls else (0.0, 0.0, 0.0)


def run_interleaved(config: Config, options: argparse.Namespace) -> list[Row]:
    """Eager, stock and Trident in turns: the latter two share one compiled model. Last, Trident
    with the graph itself as a native program, for which only the backend's name changes."""
    model = make_model(config, options.device)
    compiled: Step = torch.compile(model, backend=options.backend)
    native: Step = torch.compile(model, backend="trident")
    variants: dict[str, tuple[Generation, Callable[[], AbstractContextManager[Any]]]] = {
        "eager": (Generation(model, config, options.device), nullcontext),
        "stock torch.compile": (Generation(compiled, config, options.device), nullcontext),
        "Trident": (Generation(compiled, config, options.device), trident.enable),
        NATIVE: (Generation(native, config, options.device), trident.enable),
    }
    stats: dict[int, dict[str, Any]] = {}
    with torch.no_grad():
        # All orders in turn: who runs after whom shows in the caches, by more than Trident saves.
        orders = itertools.cycle(itertools.permutations(variants.values()))
        for done in range(0, options.steps, TURN_STEPS):
            for generation, context in next(orders):
                trident.reset_stats()
                with context():
                    for _ in range(min(TURN_STEPS, options.steps - done)):
                        generation.advance()
                if context is trident.enable:
                    add_stats(stats.setdefault(id(generation), {}), trident.stats().as_dict())
            progress("in turns", min(done + TURN_STEPS, options.steps), options.steps)
    return [
        Row(name, generation.median_us(), generation.tokens, stats.get(id(generation)))
        for name, (generation, _) in variants.items()
    ]


def add_stats(total: dict[str, Any], turn: Mapping[str, Any]) -> None:
    """Adds a turn's counts of calls; frames are those of the last turn."""
    for key in ("hits", "run_code", "misses", "raised"):
        total[key] = total.get(key, 0) + turn[key]
    total["frames"] = turn["frames"]


def run_script(options: argparse.Namespace) -> Row:
    """The same job as `python -m trident run examples/decoder.py` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result, stats = Path(folder) / "result.json", Path(folder) / "stats.json"
        command = [sys.executable, "-m", "trident", "run", "--stats", str(stats), str(DECODER)]
        command += ["--layers", str(options.layers), "--steps", str(options.steps)]
        command += ["--device", options.device, "--backend", options.backend]
        command += ["--json", str(result)]
        print("$ python -m trident run examples/decoder.py …", flush=True)
        subprocess.run(command, check=True)
        decoded = json.loads(result.read_text())
        return Row(
            "python -m trident run",
            decoded["median_us"],
            decoded["tokens"],
            json.loads(stats.read_text()),
            comparable=False,
        )


def table(rows: list[Row]) -> str:
    stock_us = next(row.median_us for row in rows if row.name == "stock torch.compile")
    lines = [[*COLUMNS, *SHARES]]
    for row in rows:
        ratio = f"{stock_us / row.median_us:.2f}" if row.comparable else "-"
        cells = [row.name, f"{row.median_us:.0f}", ratio]
        if row.stats is None:
            cells += ["-"] * 6
        else:
            hits = row.stats["hits"] + row.stats["run_code"]
            specializations = sum(frame["specializations"] for frame in row.stats["frames"])
            cells += [str(hits), str(row.stats["misses"]), str(specializations)]
            cells += [f"{share:.1%}" for share in shares(row.stats)]
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rendered = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    rendered.insert(1, "-" * len(rendered[0]))
    return "\n".join(rendered)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", type=Path, help="write the table's data here")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    config = Config(layers=options.layers)
    print(
        f"a decoder of {config.layers} layers, {options.steps} steps on {options.device}, "
        f"backend {options.backend}, torch {torch.__version__}; compiling takes most of the time"
    )
    rows = [*run_interleaved(config, options), run_script(options)]
    print(f"\n{table(rows)}\n")
    print("Medians. The first four rows ran in turns in one process; the last in its own, so its")
    print("time compares with nothing here.")
    print("hits: calls whose guards passed natively. With Inductor the kernels are stock's.")
    if options.json is not None:
        data = [{"name": row.name, "median_us": row.median_us, "stats": row.stats} for row in rows]
        options.json.write_text(json.dumps(data, indent=2))
    different = [row.name for row in rows if row.tokens != rows[0].tokens]
    if different:
        print(f"FAILED: tokens differ from eager's under: {', '.join(different)}")
        return 1
    print(f"The {len(rows[0].tokens)} tokens are identical in all runs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
