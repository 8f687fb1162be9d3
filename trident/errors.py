"""Trident's exceptions: one root, so that a caller can catch all of them by one name."""

from __future__ import annotations


class TridentError(Exception):
    """Root of everything that Trident raises on its own account."""


class UnsupportedGuard(TridentError):
    """A guard that has no native form: its specialization stays with stock Dynamo."""


class UnsupportedPlan(TridentError):
    """A frame whose bytecode has no native form: Dynamo's own code object runs instead."""


class UnsupportedGraph(TridentError):
    """A graph that has no native host program: it runs as stock runs it."""


class BuildMismatchError(TridentError, ImportError):
    """The extension is missing, or was built for another Python or torch."""
