"""Does a call leave memory behind?"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any


class _Malloc(ctypes.Structure):
    """glibc's ``struct mallinfo2``: the bytes of small blocks `in_use`, and of `mapped` ones."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "mapped")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "in_use", "fordblks", "keep")),
    ]


def _memory() -> tuple[int, int]:
    """Bytes that malloc has given out, and blocks that Python's allocator has."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Malloc
    found = mallinfo()
    return found.in_use + found.mapped, sys.getallocatedblocks()


def grows(call: Callable[[], Any], n: int = 1000) -> str | None:
    """What each of `n` calls leaves behind, if it does so each time."""
    for _ in range(n // 5):
        call()
    for _ in range(3):
        before = _memory()
        for _ in range(n):
            call()
        n_bytes, n_blocks = (after - first for after, first in zip(_memory(), before, strict=True))
        if n_bytes < 8 * n and n_blocks < n // 4:
            return None
    return f"{n_bytes / n:.1f} bytes and {n_blocks / n:.1f} blocks a call"
