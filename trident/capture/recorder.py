"""Records Dynamo's guard trees while Dynamo builds them.

Once installed, the methods that build trees (of the pybind classes GuardManager, RootGuardManager
and DictGuardManager, and the ``install_*_guard`` functions) are wrapped. A wrapper calls the
original once, with the same arguments, and then notes what was added; outside a build, which is one
run of ``CheckFunctionManager.__init__`` in one thread, it does nothing more. What was added is read
from the C++ tree itself (a leaf that Dynamo drops as a duplicate adds nothing), only the payloads
come from the arguments.

Nothing here may disturb a compilation: whatever fails on our side becomes a problem of the tree,
and a tree with problems stays with stock Dynamo.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from trident.capture import dynamo, payload, verify
from trident.capture.patching import Patches
from trident.capture.tree import GuardTree, Leaf, Node
from trident.errors import TridentError

# Accessor method -> the name of its key argument (None: it has none).
ACCESSORS: dict[str, str | None] = {
    "getitem_manager": "key",
    "framelocals_manager": "key",
    "dict_getitem_manager": "key",
    "list_getitem_manager": "key",
    "tuple_getitem_manager": "key",
    "indexed_manager": "idx",
    "tensor_property_size_manager": "idx",
    "tensor_property_stride_manager": "idx",
    "tensor_property_storage_offset_manager": "idx",
    "tuple_iterator_getitem_manager": "index",
    "set_getitem_manager": "index",
    "globals_dict_manager": "f_globals",
    "global_weakref_manager": "global_name",
    "lambda_manager": "python_lambda",
    "generic_getattr_manager": "attr",
    "getattr_manager": "attr",
    "func_defaults_manager": None,
    "func_kwdefaults_manager": None,
    "type_manager": None,
    "type_dict_manager": None,
    "type_mro_manager": None,
    "weakref_call_manager": None,
    "call_function_no_args_manager": None,
    "code_manager": None,
    "closure_manager": None,
    "grad_manager": None,
    "get_generic_dict_manager": None,
}
ENTRY_MANAGERS = {"get_key_manager": 0, "get_value_manager": 1}
# Named like an accessor, but makes another tree.
_NO_ACCESSORS = frozenset({"clone_manager"})
_TENSOR_MATCH_TAIL = 2  # pytype, dispatch_keys

_patches = Patches()
_local = threading.local()
# The trees of finished builds, by their GuardManagerWrapper.
_trees: weakref.WeakKeyDictionary[Any, GuardTree] = weakref.WeakKeyDictionary()
# add_* method -> number of its arguments without self, from the pybind signature.
_arity: dict[str, int] = {}
_saved_tensors_hooks_code: CodeType | None = None


class Tracked:
    """A C++ guard manager during a build: it, its record, and its leaves so far.

    All Python objects of C++ parts are kept until the build ends, so their identity is that of the
    C++ parts.
    """

    __slots__ = ("leaves", "manager", "node")

    def __init__(self, manager: Any, node: Node) -> None:
        self.manager = manager
        self.node = node
        self.leaves: list[Any] = []


class Build:
    """One run of ``CheckFunctionManager.__init__``: the managers seen, the problems met."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.tracked: dict[int, Tracked] = {}
        self.epilogues: dict[int, list[Any]] = {}
        self.problems: list[str] = []
        self.functions: dict[int, weakref.ref[Any]] = {}
        self.alone: list[Any] = []
        # The source of the function that Dynamo wrote last.
        self.source: str | None = None

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def failed(self, what: str, error: BaseException) -> None:
        detail = str(error) if isinstance(error, TridentError) else type(error).__name__
        self.problem(f"recording {what} failed: {detail}")

    def track(self, manager: Any) -> Tracked:
        """The record of `manager`, which is a root if it was not made by an accessor."""
        tracked = self.tracked.get(id(manager))
        if tracked is None:
            tracked = Tracked(manager, Node(None, manager.get_source()))
            self.tracked[id(manager)] = tracked
            if not isinstance(manager, dynamo.guards_c().RootGuardManager):
                self.problem(f"{tracked.node.source}: its guard manager was made unseen")
        return tracked

    def adopt(self, manager: Any, accessor: tuple[str, Any], example: Any) -> Node | None:
        """A new record for `manager`, or None if it has one already."""
        if id(manager) in self.tracked:
            return None
        node = Node(accessor, manager.get_source())
        if isinstance(manager, dynamo.guards_c().DictGuardManager):
            node.is_dict_manager = True
            node.dict_type_id = id(type(example))
            node.dict_len = dict.__len__(example)
        self.tracked[id(manager)] = Tracked(manager, node)
        if isinstance(example, FunctionType) and dynamo.is_compile_wrapper(example):
            self.functions[id(example)] = weakref.ref(example)
        return node

    def accessor(self, parent: Any, method: str, key: Any, example: Any, child: Any) -> None:
        node = self.adopt(child, (method, key), example)
        if node is not None:
            self.track(parent).node.children.append(node)
            if method not in ACCESSORS:
                self.problem(f"{node.source}: accessor method {method} is unknown")

    def entry(self, parent: Any, method: str, position: int, example: Any, child: Any) -> None:
        node = self.adopt(child, (method, position), example)
        if node is not None:
            kv = self.track(parent).node.kv
            pair = list(kv.get(position, (None, None)))
            pair[ENTRY_MANAGERS[method]] = node
            kv[position] = (pair[0], pair[1])

    def new_leaves(self, manager: Any) -> list[tuple[Any, Leaf]]:
        """The leaves that `manager` has and its record has not; recorded without payloads."""
        tracked = self.track(manager)
        new = manager.get_leaf_guards()[len(tracked.leaves) :]
        pairs = [(real, Leaf(type(real).__name__, {}, verify.parts_of(real))) for real in new]
        tracked.leaves.extend(new)
        tracked.node.leaves.extend(leaf for _, leaf in pairs)
        return pairs

    def leaf(self, manager: Any, method: str, args: tuple[Any, ...]) -> None:
        pairs = self.new_leaves(manager)
        source = self.track(manager).node.source
        for real, leaf in pairs:
            if len(pairs) > 1:
                self.problem(f"{source}: {leaf.kind} was added unseen")
            self.fill(real, leaf, method, args, source)

    def fill(self, real: Any, leaf: Leaf, method: str, args: tuple[Any, ...], source: str) -> None:
        rule = payload.RULES.get(leaf.kind)
        if rule is None:
            self.problem(f"{source}: guard kind {leaf.kind} is unknown")
            return
        n_args, function = rule
        tail = _TENSOR_MATCH_TAIL if leaf.kind == "TENSOR_MATCH" else 0
        # The text parts always follow; releases differ in whether the user's stack does.
        if len(args) != _arity.get(method) or len(args) - n_args - tail not in (1, 2):
            self.problem(f"{source}: {method} takes {len(args)} arguments, which is unexpected")
            return
        try:
            leaf.payload = function(args if tail else args[:n_args])
        except payload.PayloadError as error:
            self.problem(f"{source}: {error}")
            return
        if leaf.kind in payload.CALLABLE_ALONE:
            self.alone.append(leaf)
            leaf.payload["leaf"] = payload.callable_leaf(real, None)
        elif leaf.kind == "LAMBDA_GUARD":
            hooks = payload.saved_tensors_hooks(args[0], _saved_tensors_hooks_code)
            if hooks is not None:
                leaf.kind, leaf.payload = "SAVED_TENSORS_HOOKS", hooks
            elif self.source is not None:
                # If it is another's, that shows when it is read (guard_source.py).
                leaf.payload["source"], self.source = self.source, None

    def epilogue(self, manager: Any, args: tuple[Any, ...]) -> None:
        tracked = self.track(manager)
        known = self.epilogues.setdefault(id(manager), [])
        for real in manager.get_epilogue_lambda_guards()[len(known) :]:
            known.append(real)
            leaf = Leaf(type(real).__name__, {}, verify.parts_of(real))
            tracked.node.epilogue.append(leaf)
            self.fill(real, leaf, "add_epilogue_lambda_guard", args, "the epilogue")

    def relation(self, function: str, args: tuple[Any, ...]) -> None:
        """Leaves that one ``install_*`` call put on several managers: they share a token."""
        token = object()
        groups = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
        seen: set[int] = set()
        for group in groups:
            for position, manager in enumerate(group):
                if not isinstance(manager, dynamo.guards_c().GuardManager):
                    continue
                if id(manager) in seen:
                    self.problem(f"{self.track(manager).node.source}: related to itself")
                    continue
                seen.add(id(manager))
                for _, leaf in self.new_leaves(manager):
                    leaf.payload = {"relation": token}
                    if leaf.kind == "STORAGE_OVERLAPPING":
                        leaf.payload["overlapping"] = group is groups[0]
                    elif leaf.kind == "SYMBOLIC_SHAPE_GUARD":
                        numbers = dict(zip(("n_int", "n_float", "address"), args[1:], strict=False))
                        leaf.payload.update(position=position, library=args[4], **numbers)
                    elif leaf.kind not in ("OBJECT_ALIASING", "NO_TENSOR_ALIASING"):
                        source = self.track(manager).node.source
                        self.problem(f"{source}: guard kind {leaf.kind} ({function}) is unknown")

    def finish(self, root: Any) -> GuardTree:
        """Verifies the record against the finished tree under `root`."""
        tracked = self.track(root)
        try:
            for text in verify.differences(root, tracked.node, self):
                self.problem(text)
        except Exception as error:
            self.failed("the comparison with Dynamo's tree", error)
        for leaf in self.alone:
            leaf.payload["leaf"].owner = root
        return GuardTree(tracked.node, self.problems, self.code, self.functions.values())


def tree_of(guard_manager: Any) -> GuardTree | None:
    """The tree recorded for a GuardManagerWrapper, or None if it was built unseen."""
    return _trees.get(guard_manager)


def note_foreign_mode(active: bool) -> bool:
    """Tells the builds of this thread whether a dispatch mode is active around the compilation
    (Dynamo takes the modes off before it builds guards); returns the former value."""
    former = getattr(_local, "foreign_mode", False)
    _local.foreign_mode = active
    return former


def _stack() -> list[Build]:
    # Per thread: builds nest, and a build evaluates user code, which may start threads.
    try:
        return _local.stack
    except AttributeError:
        _local.stack = []
        return _local.stack


def _current() -> Build | None:
    stack = _stack()
    return stack[-1] if stack else None


Note = Callable[[Build, Any, str, tuple[Any, ...], dict[str, Any], Any], None]


def _recorded(original: Any, method: str, note: Note) -> Callable[..., Any]:
    """`original`, followed by `note` when a build is running in this thread."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        build = _current()
        if build is not None:
            try:
                note(build, self, method, args, kwargs, result)
            except Exception as error:
                build.failed(method, error)
        return result

    return wrapper


def _note_leaf(build: Build, self: Any, method: str, args: Any, kwargs: Any, result: Any) -> None:
    if kwargs:
        build.problem(f"{method} was called with keywords, which is unexpected")
    build.leaf(self, method, args)


def _note_epilogue(
    build: Build, self: Any, method: str, args: Any, kwargs: Any, result: Any
) -> None:
    if kwargs:
        build.problem(f"{method} was called with keywords, which is unexpected")
    build.epilogue(self, args)


def _note_child(build: Build, self: Any, method: str, args: Any, kwargs: Any, result: Any) -> None:
    if not isinstance(result, dynamo.guards_c().GuardManager):
        return
    key_name = "index" if method in ENTRY_MANAGERS else ACCESSORS.get(method)
    names = [key_name] if key_name else []
    given = dict(zip([*names, "source", "example_value", "guard_manager_enum"], args, strict=False))
    given.update(kwargs)
    key = given[key_name] if key_name else None
    if method in ENTRY_MANAGERS:
        build.entry(self, method, int(given["index"]), given["example_value"], result)
    else:
        build.accessor(self, method, key, given["example_value"], result)


def _relation(original: Any, function: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        build = _current()
        if build is not None:
            try:
                if kwargs:
                    build.problem(f"{function} was called with keywords, which is unexpected")
                build.relation(function, args)
            except Exception as error:
                build.failed(function, error)
        return result

    return wrapper


def _written(original: Any) -> Callable[..., Any]:
    """``build_guard_function``, followed by a note of the source that it returns."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        build = _current()
        if build is not None:
            build.source = result[1] if type(result) is tuple and type(result[-1]) is str else None
        return result

    return wrapper


def _begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build | None:
    try:
        code = args[0] if args else kwargs["f_code"]
        build = Build(code)
        if getattr(_local, "foreign_mode", False) or dynamo.in_foreign_mode():
            build.problem("compiled under a dispatch mode")
        _stack().append(build)
        return build
    except Exception:
        return None  # no record: the entry stays with stock


def _end(build: Build, guard_manager: Any) -> None:
    """Files the tree of a build that succeeded (`guard_manager` is None if it did not)."""
    try:
        stack = _stack()
        del stack[stack.index(build) :]
        if guard_manager is not None and _patches.active:
            _trees[guard_manager] = build.finish(guard_manager.root)
    except Exception:
        # No record: the entry stays with stock, and its report says that it was not recorded.
        _trees.pop(guard_manager, None)


def _delimited(original: Any) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build = _begin(args, kwargs)
        done = False
        try:
            original(self, *args, **kwargs)
            done = True
        finally:
            if build is not None:
                _end(build, getattr(self, "guard_manager", None) if done else None)

    return __init__


def _signature_arity(method: Any) -> int:
    """Number of arguments, without self, in a pybind docstring's signature (-1: none found)."""
    first = (getattr(method, "__doc__", None) or "").strip().split("\n")[0]
    match = re.fullmatch(r"\w+\((.*)\) -> \S.*", first)
    if match is None:
        return -1
    # Commas inside brackets belong to a type.
    flat = re.sub(r"\[[^][]*\]", "", match[1])
    return flat.count(",")


def _wrap_methods(cls: type) -> None:
    for name, method in list(vars(cls).items()):
        if name == "add_epilogue_lambda_guard":
            note: Note = _note_epilogue
        elif name.startswith("add_") and name.endswith("_guard"):
            note = _note_leaf
        elif name.endswith("_manager") and name not in _NO_ACCESSORS:
            note = _note_child
        else:
            continue
        original = getattr(cls, name)
        if note is not _note_child:
            _arity.setdefault(name, _signature_arity(original))
        _patches.put(cls, name, _recorded(original, name, note), method)


def install() -> None:
    """Wraps Dynamo's builders. Idempotent; raises TridentError naming what torch lacks."""
    global _saved_tensors_hooks_code
    if _patches.active:
        return
    dynamo.require()
    c, py = dynamo.guards_c(), dynamo.guards_py()
    hooks = getattr(py.GuardBuilder, "AUTOGRAD_SAVED_TENSORS_HOOKS", None)
    _saved_tensors_hooks_code = getattr(hooks, "__code__", None)
    try:
        for cls in (c.GuardManager, c.RootGuardManager, c.DictGuardManager):
            _wrap_methods(cls)
        for name, function in list(vars(py).items()):
            if name.startswith("install_") and getattr(c, name, None) is function:
                _patches.put(py, name, _relation(function, name))
        if hasattr(py, "build_guard_function"):
            _patches.put(py, "build_guard_function", _written(py.build_guard_function))
        manager = py.CheckFunctionManager
        _patches.put(manager, "__init__", _delimited(manager.__init__))
    except BaseException:
        _patches.undo()
        raise


def uninstall() -> None:
    """Restores Dynamo's builders and forgets the records."""
    _patches.undo()
    _trees.clear()


def is_installed() -> bool:
    return _patches.active
