"""What the tests of special states share: warmed compiled callables, and stock against Trident.

A scenario is called with `enter`, which it calls between warm-up and the state it is about. It
runs stock first, then under Trident in three ways: enabled throughout, enabled only from `enter`
on (what stock compiled and skipped is taken over), and enabled only until then (nothing stays).
"""

from __future__ import annotations

import functools
import os
import re
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

import trident
from tests.conftest import compilations, reset_compilations
from tests.test_equality import assert_same
from trident import _frame

X = torch.arange(4.0)
Enter = Callable[[], None]
Scenario = Callable[[Enter], Any]
MODES = ("throughout", "after_warm_up", "until_warm")


def registry() -> tuple[dict[str, Scenario], Callable[[Scenario], Scenario]]:
    """A file's scenarios by name, and the decorator that adds one."""
    scenarios: dict[str, Scenario] = {}

    def scenario(function: Scenario) -> Scenario:
        scenarios[function.__name__] = function
        return function

    return scenarios, scenario


def cases(scenarios: dict[str, Scenario], *until_warm: str) -> list[tuple[str, str]]:
    """(scenario, mode) pairs: the last mode only for the scenarios named."""
    return [(name, mode) for name in scenarios for mode in MODES[:2]] + [
        (name, MODES[2]) for name in until_warm
    ]


# Names and numbers that differ from run to run.
_VARYING = (
    (re.compile(r"__compiled_fn_\d+(_[0-9a-f]+)*"), "__compiled_fn"),
    (re.compile(r"_at_\d+_\d+"), "_at"),
    (re.compile(r"<eval_with_key>\.\d+"), "<eval_with_key>"),
    (re.compile(r"0x[0-9a-f]+"), "0x"),
)


class Doubler(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Identity(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def callables(**options: Any) -> dict[str, Callable[..., Any]]:
    """Compiled callables of every kind, called until doors are open (under Trident).

    `skip` and `pair` have no graph and no guards, `mark` and `bundle` are guarded constants (`mark`
    tells eager from compiled), the rest run graphs or are modules."""

    def skip(x: Any) -> Any:
        return x

    def pair(x: Any, y: int = 3) -> Any:
        return (x, "constant", (y, x))

    def mark(x: Any) -> Any:
        return 1 if torch.compiler.is_compiling() else 0

    def bundle(x: Any, n: int = 3) -> Any:
        return (x, n, None, "a")

    def graph(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    options = {"backend": "eager", **options}
    in_place = Identity()
    in_place.compile(**options)
    doubler = Doubler()
    doubler.compile(**options)
    result: dict[str, Callable[..., Any]] = {
        "skip": torch.compile(skip, **options),
        "pair": torch.compile(pair, **options),
        "mark": torch.compile(mark, **{**options, "fullgraph": True}),
        "bundle": torch.compile(bundle, **{**options, "fullgraph": True}),
        "graph": torch.compile(graph, **options),
        "module": torch.compile(Doubler(), **options),
        "identity": torch.compile(Identity(), **options),
        "in_place": in_place,
        "in_place_doubler": doubler,
    }
    for function in result.values():
        for _ in range(4):
            outcome(function, X)  # some raise in some states
    return result


class Backend:
    """A backend that counts its compilations and calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.log.append(f"compile {self.name}")

        def run(*args: Any) -> Any:
            self.log.append(f"run {self.name}")
            return gm.forward(*args)

        return run


DOORED = ("skip", "pair", "mark", "bundle", "identity")
TENSOR_TO_TENSOR = ("skip", "graph", "module", "identity", "in_place", "in_place_doubler")


def normal(text: str) -> str:
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    return text


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or all there is to see of the exception: type, message, causes, every frame."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return describe(error)


def describe(error: BaseException | None) -> Any:
    if error is None:
        return None
    frames = traceback.extract_tb(error.__traceback__)[1:]
    where = [(normal(frame.filename), normal(frame.name), frame.lineno) for frame in frames]
    chained = error.__suppress_context__, describe(error.__cause__)
    return type(error), normal(str(error)), where, chained


def call_all(functions: dict[str, Callable[..., Any]], *args: Any) -> dict[str, Any]:
    return {name: outcome(function, *args) for name, function in functions.items()}


def served() -> int:
    """Calls that Trident served so far."""
    stats = trident.stats()
    return stats.hits + stats.run_code


def run(scenario: Scenario, mode: str | None) -> Any:
    """(result, warnings, compilations); `mode` None: stock."""
    torch._dynamo.reset()
    torch._dynamo.eval_frame._EXAMPLE_INPUTS = None  # of eager_then_compile; no reset forgets them
    reset_compilations()
    tokens: list[Any] = []

    def enter() -> None:
        if mode == "after_warm_up":
            tokens.append(trident.enable())
        elif mode == "until_warm":
            tokens.pop().__exit__(None, None, None)

    if mode in ("throughout", "until_warm"):
        tokens.append(trident.enable())
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = scenario(enter)
    finally:
        for token in tokens:
            token.__exit__(None, None, None)
    # torch warns of some things only once per process: only what the tests' own code warns of.
    ours = [w for w in caught if w.filename.startswith(os.path.dirname(__file__))]
    seen = [(w.category, normal(str(w.message)), w.filename, w.lineno) for w in ours]
    return result, seen, compilations()


@functools.cache
def stock(scenario: Scenario) -> Any:
    return run(scenario, None)


def check(scenario: Scenario, mode: str, serves: bool = True) -> None:
    """Raises AssertionError unless the scenario shows the same under Trident as stock; `serves`:
    and unless Trident answered some of its calls."""
    expected = stock(scenario)
    trident.reset_stats()
    actual = run(scenario, mode)
    assert not serves or served() > 0, "the scenario never reached Trident"
    assert_same(actual, expected)
    assert _frame.n_doors() == 0
