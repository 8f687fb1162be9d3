"""Trident's settings, read from the environment at each use.

=====================  =====================================================================
TRIDENT_DISABLE=1      ``trident.enable()`` does nothing and nothing is recorded
TRIDENT_STRICT=1       internal failures raise, and every hit is checked with Dynamo's own guards
=====================  =====================================================================
"""

from __future__ import annotations

import os


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def disabled() -> bool:
    """TRIDENT_DISABLE: Trident stays out of everything."""
    return _flag("TRIDENT_DISABLE")


def strict() -> bool:
    """TRIDENT_STRICT: raise instead of falling back, and re-check every hit."""
    return _flag("TRIDENT_STRICT")
