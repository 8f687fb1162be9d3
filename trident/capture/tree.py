"""The record of one Dynamo cache entry: its guard tree, with payloads, and the entry itself.

Dynamo's finished C++ guard tree tells its structure but not what it compares with. The recorder
(``recorder.py``) notes the payloads while Dynamo builds the tree; the verifier (``verify.py``)
then compares the two and lists every difference in :attr:`GuardTree.problems`. A tree with
problems must not be compiled to native code.

Lifetime rule: a record keeps alive nothing that Dynamo's own guard does not keep alive. Tensors,
modules and functions that guards refer to by identity are noted as ids or weak references only.

Leaf kinds are the names of Dynamo's C++ classes. Payload keys, per kind:

====================================  =============================================================
TYPE_MATCH                            type_id
ID_MATCH                              obj_id
EQUALS_MATCH                          value
LENGTH_CHECK, DICT_LENGTH             length
TUPLE_ITERATOR_LEN                    length, type_id
RANGE_ITERATOR_MATCH                  start, stop, step, type_id
MAPPING_KEYS_MATCH                    keys (list)
DISPATCH_KEY_SET_MATCH                keyset, tls_include, tls_exclude (raw 64-bit integers)
GLOBAL_STATE                          state (GlobalStateGuard)
TORCH_FUNCTION_MODE_STACK             types (list of the modes' types)
NO_HASATTR                            attr
DICT_CONTAINS                         contains (bool), key
SET_CONTAINS                          contains (bool), item
DUAL_LEVEL_MATCH                      level
DEFAULT_DEVICE                        device (torch.device or None)
DICT_VERSION                          tag
TENSOR_MATCH                          type_id, keyset, tls_include, tls_exclude, dtype,
                                      device_index (-1: none), requires_grad, sizes, strides
                                      (tuples of ``int | None``, None: any)
LAMBDA_GUARD, LAMBDA_GUARD_NO_ARGS,   fn; source, the text that Dynamo made it of (where it did)
LAMBDA_GUARD_NO_FRAMELOCALS
SAVED_TENSORS_HOOKS                   fn, ids_is_none (Dynamo's class is LAMBDA_GUARD)
NO_TENSOR_ALIASING, OBJECT_ALIASING   relation (one object shared by all leaves of a relation)
STORAGE_OVERLAPPING                   relation, overlapping (bool)
SYMBOLIC_SHAPE_GUARD                  relation, position, n_int, n_float, address (of a C function
                                      ``int8_t (int64_t *, double *)``), library (keeps it loaded)
NONE_MATCH, NOT_NONE, TRUE_MATCH, FALSE_MATCH, FLOAT_IS_NAN, COMPLEX_IS_NAN    (empty)
DIMENSION_DYNAMIC_MARKING_GUARD       expected (attribute -> set of dimensions), absent (list of
                                      attributes), dependent, leaf
DYNAMIC_INDICES                       dimensions (set), leaf
FAKE_SCRIPT_TYPE_MATCH                leaf
====================================  =============================================================

``leaf`` is Dynamo's own leaf guard: ``leaf(value) -> bool``; it keeps its tree alive. Leaves of
any other kind have an empty payload and the tree has a problem: a leaf that we do not know may
rely on what the root does before (as TENSOR_MATCH does), so calling it alone need not be sound.

Accessors are ``(method, key)``, the name of the ``GuardManager`` method that made the child and
its key: an attribute name, a dict key, an index, or None. Special keys: ``framelocals_manager``
has ``(name, index)``; ``globals_dict_manager`` has the globals dict; ``lambda_manager`` has the
Python function; entries of :attr:`Node.kv` have ``("get_key_manager" | "get_value_manager",
position)``.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any


@dataclasses.dataclass(slots=True, eq=False)
class Leaf:
    """One leaf guard: `kind`, what it compares with (`payload`) and Dynamo's text (`parts`)."""

    kind: str
    payload: dict[str, Any]
    parts: list[str]


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One guard manager: a value reached through `accessor` from its parent, and its guards.

    `is_dict_manager` nodes check, before anything else, that the value's exact type has the id
    `dict_type_id` and its length is `dict_len`; their `kv` maps a position in iteration order to
    the guards of that entry's key and value. `epilogue` is filled at the root only.
    """

    accessor: tuple[str, Any] | None
    source: str
    is_dict_manager: bool = False
    dict_type_id: int | None = None
    dict_len: int | None = None
    leaves: list[Leaf] = dataclasses.field(default_factory=list)
    children: list[Node] = dataclasses.field(default_factory=list)
    kv: dict[int, tuple[Node | None, Node | None]] = dataclasses.field(default_factory=dict)
    epilogue: list[Leaf] = dataclasses.field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in the order in which Dynamo first checks them."""
        yield self
        for child in self.children:
            yield from child.walk()
        for position in sorted(self.kv):
            for entry in self.kv[position]:
                if entry is not None:
                    yield from entry.walk()


class GuardTree:
    """The recorded guard tree of `code`; usable only if `problems` is empty.

    `functions` holds weak references to the wrapper functions made by ``torch.compile`` that any
    guard of the tree looks at.
    """

    def __init__(
        self,
        root: Node,
        problems: list[str],
        code: CodeType,
        functions: Iterable[weakref.ref[Any]] = (),
    ) -> None:
        self.root = root
        self.problems = problems
        self.functions = list(functions)
        # Weak: the entry, and with it this record, belongs to the code object.
        self._code = weakref.ref(code)

    @property
    def code(self) -> CodeType:
        """The user's code; ReferenceError once it is gone."""
        return _alive(self._code)

    def leaves(self) -> Iterator[Leaf]:
        """All leaf guards, the epilogue last."""
        for node in self.root.walk():
            yield from node.leaves
        yield from self.root.epilogue


class Specialization:
    """One Dynamo cache entry.

    `code` is the user's code, `compiled_code` what Dynamo made of it, `guard_manager` its
    GuardManagerWrapper. `alive` turns False when Dynamo invalidates or drops the entry; after that
    the ids in `tree` may belong to other objects, and nothing may run on its account.

    An entry belongs to its code object, so `code` is held weakly and raises ReferenceError once the
    code is gone, as it can be by the time a listener hears of the removal: key tables by `code_id`,
    the id of the code, which stays. Everything else is what Dynamo's entry holds too.
    """

    def __init__(
        self,
        code: CodeType,
        compiled_code: CodeType,
        guard_manager: Any,
        tree: GuardTree,
        backend: Any,
        compile_id: str,
        isolate_id: int = -1,
        trace_annotation: str = "",
        alive: bool = True,
    ) -> None:
        self._code = weakref.ref(code)
        self.code_id = id(code)
        self.compiled_code = compiled_code
        self.guard_manager = guard_manager
        self.tree = tree
        self.backend = backend
        self.compile_id = compile_id
        self.isolate_id = isolate_id
        self.trace_annotation = trace_annotation
        self.alive = alive

    @property
    def code(self) -> CodeType:
        """The user's code; ReferenceError once it is gone."""
        return _alive(self._code)

    def __repr__(self) -> str:
        code = self._code()
        name = "<gone>" if code is None else code.co_name
        return f"<Specialization {self.compile_id} of {name}{'' if self.alive else ', dead'}>"


def _alive(reference: weakref.ref[CodeType]) -> CodeType:
    code = reference()
    if code is None:
        raise ReferenceError("the code object of this Dynamo cache entry is gone")
    return code
