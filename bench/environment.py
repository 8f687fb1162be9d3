"""What a measurement was made with: commit, machine, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "torch-mlir", "triton", "numpy", "cython")
# Files whose changes do not make a checkout "dirty": what a benchmark run itself writes.
OUTPUTS = (":!bench/results", ":!README.md")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """One flat record; a number without it says nothing."""
    return {
        # On a machine that has the files without their history, the environment says it.
        "commit": os.environ.get("BENCH_COMMIT") or git("rev-parse", "HEAD") or None,
        "dirty": "BENCH_COMMIT" not in os.environ
        and bool(git("status", "--porcelain", "--", ".", *OUTPUTS)),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "threads": torch.get_num_threads(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
    }
