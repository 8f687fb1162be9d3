"""Attributes that Trident replaces and puts back."""

from __future__ import annotations

from typing import Any

_ABSENT: Any = object()


class Patches:
    """Replaced attributes of classes and modules, undone in reverse order.

    An attribute that somebody else replaced in the meantime is left to them: our function, which
    theirs may call, then passes everything on.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    @property
    def active(self) -> bool:
        return bool(self._done)

    def put(self, owner: Any, name: str, value: Any, former: Any = _ABSENT) -> None:
        """Sets `owner.name`; `former` is what to restore, else what the owner's own dict holds."""
        if former is _ABSENT:
            former = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._done.append((owner, name, value, former))

    def undo(self) -> None:
        while self._done:
            owner, name, value, former = self._done.pop()
            if vars(owner).get(name) is not value:
                continue
            if former is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, former)
