"""Trident's only contact with TorchDynamo's internals: what it compiled, and under which guards."""

from trident.capture import dynamo
from trident.capture.install import install, is_installed, uninstall
from trident.capture.lifecycle import (
    NOT_RECORDED,
    Listener,
    entries_of,
    failures,
    guarded_functions,
    is_skipped,
    live_specializations,
    set_listener,
    skipped_codes,
    specializations_of,
    unrecorded_codes,
)
from trident.capture.tree import GuardTree, Leaf, Node, Specialization

__all__ = [
    "NOT_RECORDED",
    "GuardTree",
    "Leaf",
    "Listener",
    "Node",
    "Specialization",
    "dynamo",
    "entries_of",
    "failures",
    "guarded_functions",
    "install",
    "is_installed",
    "is_skipped",
    "live_specializations",
    "set_listener",
    "skipped_codes",
    "specializations_of",
    "uninstall",
    "unrecorded_codes",
]
