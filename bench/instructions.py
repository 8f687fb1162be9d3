"""Instructions that a check of guards executes, counted by valgrind's callgrind; prints JSON.

    python -m bench.instructions

Exits with 2 where valgrind is not installed. A run under valgrind takes some minutes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CALLS = 100


def two_tensors() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    import torch

    from bench.test_guards import add, entry_of

    x, y = torch.randn(16), torch.randn(16)
    return entry_of(add, x, y), (x, y), {"x": x, "y": y}


def decoder() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from decoder import Config, Decoder, make_cache, make_prompt

    import trident
    from trident.control import runtime

    config = Config(layers=28, dim=32, heads=2, kv_heads=1, hidden=32, vocabulary=64, length=64)
    model = Decoder(config).eval()
    tokens, cache = make_prompt(config, "cpu"), make_cache(config, "cpu")
    given = {
        "self": model,
        "tokens": tokens,
        "positions": torch.arange(tokens.shape[1]),
        "cache": cache,
    }
    with torch.no_grad(), trident.enable():
        torch.compile(model, backend="eager")(*list(given.values())[1:])
        module = runtime.module_of(Decoder.forward.__code__)
        module.build()
    (entry,) = module.entries
    assert entry.native is not None, entry.reason
    return entry, locals_of(entry, given), given


def locals_of(entry: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    """The frame's locals, by name, as its native guards take them."""
    return tuple(given.get(name, NotImplemented) for name in entry.native.framelocals)


SUBJECTS = {"two_tensors": two_tensors, "decoder": decoder}


def run(subject: str, calls: int) -> None:
    """What callgrind watches: `calls` native checks, after what makes them quick."""
    import torch

    entry, values, _ = SUBJECTS[subject]()
    with torch.no_grad() if subject == "decoder" else torch.enable_grad():
        entry.native.check_many(values, calls)


def counted(subject: str, calls: int) -> int:
    """Instructions inside of GuardProgram::run_memo in a process that makes so many checks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("valgrind", "--tool=callgrind", "--toggle-collect=trident::GuardProgram::run_memo(*"),
            f"--callgrind-out-file={folder}/out",
            *(sys.executable, "-m", "bench.instructions", subject, str(calls)),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise SystemExit(done.stderr[-2000:])
    return int(found[1])


def main() -> None:
    if len(sys.argv) == 3:
        run(sys.argv[1], int(sys.argv[2]))
        return
    if shutil.which("valgrind") is None:
        print("valgrind is not installed", file=sys.stderr)
        sys.exit(2)
    # The first check runs all rows, the others what is left of them.
    result = {subject: counted(subject, CALLS + 1) / CALLS for subject in SUBJECTS}
    print(json.dumps({f"{name}_instructions": n for name, n in result.items()}))


if __name__ == "__main__":
    main()
