"""Tables of rules, filled by decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trident.errors import TridentError

Rule = TypeVar("Rule", bound=Callable[..., Any])


def register(table: dict[str, Rule], *names: str) -> Callable[[Rule], Rule]:
    """Decorator: the rule for `names` in `table`; a second one raises TridentError."""

    def decorate(rule: Rule) -> Rule:
        for name in names:
            if name in table:
                raise TridentError(f"two rules for {name}: {place(table[name])} and {place(rule)}")
            table[name] = rule
        return rule

    return decorate


def place(rule: Callable[..., Any]) -> str:
    """Where `rule` is written: "file:line"."""
    code = rule.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
