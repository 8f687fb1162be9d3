from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import trident


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo as after import, before and after; the runtime has what guards on the surroundings
    read."""
    torch._dynamo.reset()
    with trident.enable():
        pass
    yield
    torch._dynamo.reset()
