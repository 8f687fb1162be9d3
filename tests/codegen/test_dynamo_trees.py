"""Tables built from Dynamo's own trees agree with Dynamo's own check, value by value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trident import capture
from trident.capture.tree import Specialization
from trident.codegen.pipeline import build

_frame = pytest.importorskip("trident._frame")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.rest = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.scale, self.flag, self.table = 2.0, True, {"a": 1, "b": (3, "s")}

    def forward(self, x: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        x = self.first(x)
        for layer in self.rest:
            x = layer(x) if self.flag else x
        for value in self.table.values():
            x = x * (value if isinstance(value, int) else value[0])
        return x * self.scale + extra["y"]


@pytest.fixture
def compiled(fresh_dynamo: None) -> tuple[Model, Specialization]:
    model = Model()
    torch.compile(model, backend="eager")(torch.ones(2, 4), {"y": torch.ones(4)})
    [specialization] = capture.specializations_of(Model.forward.__code__)
    return model, specialization


def IN_PLACE(model: Any, values: Any) -> None:
    model.rest[1].weight.requires_grad_(False)


CHANGES: list[Callable[[Model, dict[str, Any]], Any]] = [
    lambda model, values: None,
    lambda model, values: values.update(x=torch.zeros(2, 4)),
    lambda model, values: values.update(x=torch.ones(3, 4)),
    lambda model, values: values.update(x=torch.ones(4, 2).t()),
    lambda model, values: values.update(x=torch.ones(2, 4, dtype=torch.float64)),
    lambda model, values: values.update(x=torch.ones(2, 4, requires_grad=True)),
    lambda model, values: values.update(x=1),
    lambda model, values: values.update(x=torch.nn.Parameter(torch.ones(2, 4))),
    lambda model, values: torch._dynamo.mark_dynamic(values["x"], 0),
    lambda model, values: values["extra"].update(y=values["x"]),
    lambda model, values: values["extra"].pop("y"),
    lambda model, values: values["extra"].update(z=1),
    lambda model, values: setattr(model, "scale", 3.0),
    lambda model, values: setattr(model, "scale", 2),
    lambda model, values: setattr(model, "flag", False),
    lambda model, values: model.table.update(a=2),
    lambda model, values: model.table.update(c=2),
    lambda model, values: model.table.update(b=[3, "s"]),
    lambda model, values: setattr(model.first, "forward", None),
    lambda model, values: setattr(model.rest[0], "weight", torch.nn.Parameter(torch.ones(4, 5))),
    IN_PLACE,
    lambda model, values: model.rest.append(torch.nn.Linear(4, 4)),
    lambda model, values: setattr(model.rest[0], "bias", None),
    lambda model, values: model.rest[0].register_parameter("weight", model.rest[1].weight),
    lambda model, values: model.eval(),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"line{_line(change)}")
def test_verdicts_agree(
    compiled: tuple[Model, Specialization], change: Callable[[Model, dict[str, Any]], Any]
) -> None:
    model, specialization = compiled
    built = build(specialization)
    assert built.table is not None, built.guards_reason
    native = _frame.NativeSpecialization(built.table.framelocals)
    native.set_guards(built.table.rows, built.table.n_registers)
    values = {"self": model, "x": torch.ones(2, 4), "extra": {"y": torch.ones(4)}}
    change(model, values)
    locals_ = tuple(values.get(name, NotImplemented) for name in built.table.framelocals)
    expected = capture.dynamo.guard_check(specialization, values)
    verdict = native.check(locals_)
    # On 3.12 and later, Dynamo skips the tensors of dicts that it watches, also when a tensor's own
    # metadata changed. We always read it: stricter, which only means that stock decides.
    stricter = sys.version_info >= (3, 12) and change is IN_PLACE and not verdict
    assert verdict == expected or stricter
    # Grad mode is part of the global state.
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        assert not native.check(locals_)


def _line(change: Any) -> int:
    return int(change.__code__.co_firstlineno)
