"""Hand-made guard trees."""

from __future__ import annotations

from types import CodeType
from typing import Any

from trident.capture.tree import GuardTree, Leaf, Node, Specialization
from trident.codegen.dialect import Emitter, Program, session
from trident.codegen.import_guards import import_guards


def frame(self: Any, x: Any, y: Any) -> Any:
    return x


CODE: CodeType = frame.__code__
NAMES = ("self", "x", "y")


def leaf(kind: str, *parts: str, **payload: Any) -> Leaf:
    return Leaf(kind, payload, list(parts))


def node(method: str | None, key: Any, source: str, *below: Leaf | Node, **fields: Any) -> Node:
    """A node whose guards and children are `below`."""
    made = Node(None if method is None else (method, key), source, **fields)
    made.leaves += [item for item in below if isinstance(item, Leaf)]
    made.children += [item for item in below if isinstance(item, Node)]
    return made


def local(name: str, *below: Leaf | Node) -> Node:
    key = (name, NAMES.index(name))
    return node("framelocals_manager", key, f"L['{name}']", *below)


def tree(*below: Leaf | Node, epilogue: list[Leaf] | None = None) -> GuardTree:
    root = node(None, None, "", *below)
    root.epilogue += epilogue or []
    return GuardTree(root, [], CODE)


def imported(guards: GuardTree) -> Program:
    """The verified program of `guards`, with a plan that runs Dynamo's code."""
    with session():
        emitter = Emitter(CODE.co_name, NAMES)
        import_guards(guards, emitter)
        emitter.effect(emitter.guards, "pass", [])
        emitter.run_code("a test of guards")
    emitter.program.verify()
    return emitter.program


def specialization(guards: GuardTree, compiled_code: CodeType = CODE) -> Specialization:
    return Specialization(CODE, compiled_code, None, guards, None, "0/0")
