"""``torch.compile(f, backend="trident")``: the graph itself, as eager would run it.

Dynamo finds :func:`compile_graph` through the entry point ``trident`` of the group
``torch_dynamo_backends``; nobody needs to import trident for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trident import is_enabled  # what Dynamo compiles from here on is recorded
from trident.capture import graph


def compile_graph(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """The graph as it is, with what a native host program of it needs.

    Without ``trident.enable()`` the graph runs as under ``backend="eager"``. Under it, a call whose
    guards pass runs the same operators in the same order natively. What cannot be native does not
    raise here: ``trident.explain`` says why.

    Args:
        module: Dynamo's graph.
        example_inputs: its inputs; unused, the graph's own fake tensors are traced instead.
    """
    return graph.runner(module, is_enabled)
