from __future__ import annotations

from collections.abc import Iterator
from types import CodeType

import pytest
import torch

from trident import capture
from trident.capture.tree import Specialization


class Events:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str | None]] = []
        self.added: list[Specialization] = []
        self.removed: list[Specialization] = []
        self.skipped: list[CodeType] = []
        self.depth = 0

    def specialization_added(self, spec: Specialization) -> None:
        assert spec.alive
        self.added.append(spec)
        self.log.append(("added", spec.code.co_name))

    def specialization_removed(self, spec: Specialization) -> None:
        assert not spec.alive
        self.removed.append(spec)
        self.log.append(("removed", spec.compile_id))

    def frame_skipped(self, code: CodeType) -> None:
        self.skipped.append(code)
        self.log.append(("skipped", code.co_name))

    def compile_started(self) -> None:
        self.depth += 1
        self.log.append(("started", None))

    def compile_finished(self, code: CodeType | None) -> None:
        self.depth -= 1
        self.log.append(("finished", code.co_name if code else None))

    def problems(self) -> list[str]:
        return [text for spec in self.added for text in spec.tree.problems]


@pytest.fixture
def events() -> Iterator[Events]:
    """The capture installed and Dynamo fresh, before and after."""
    was_installed = capture.is_installed()
    torch._dynamo.reset()
    capture.install()
    listener = Events()
    capture.set_listener(listener)
    before = capture.failures()
    yield listener
    capture.set_listener(None)
    torch._dynamo.reset()
    assert capture.live_specializations() == []
    assert capture.failures() == before
    if not was_installed:
        capture.uninstall()
