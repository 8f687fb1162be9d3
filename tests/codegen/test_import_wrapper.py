"""Statements of Inductor's wrappers: what they become, and what is refused, with a reason."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest
import torch

from trident.capture.inductor import Around, Wrapper
from trident.codegen.dialect import Emitter, session
from trident.codegen.import_graph import Signature
from trident.codegen.import_wrapper import import_wrapper
from trident.errors import UnsupportedGraph

guards = torch._C._dynamo.guards
NAMES: dict[str, Any] = {
    "torch": torch,
    "aten": torch.ops.aten,
    "device": torch.device,
    "empty_strided_cpu": guards._empty_strided_cpu,
    "reinterpret_tensor": guards._reinterpret_tensor,
    "assert_size_stride": guards.assert_size_stride,
    "table": torch.ones(3),
    "unknown": lambda x: x,
    "__builtins__": __builtins__,
}


def imported(text: str, n_results: int = 1, **options: Any) -> tuple[Signature, list[str]]:
    """The signature, and the steps of the program, without their attributes' values."""
    body = ast.parse(textwrap.dedent(text)).body
    around = Around(False, (), None, (), n_results)
    wrapper = Wrapper(body, "args", NAMES, "<wrapper>", around, **options)
    with session():
        emitter = Emitter("f", ())
        signature = import_wrapper(wrapper, emitter)
        emitter.program.block("guards")
        block = emitter.program.program_block
        assert block is not None
        steps = [op.operation.name.removeprefix("scm.") for op in block]
    return signature, steps


def test_buffers_are_released_after_their_last_name() -> None:
    signature, steps = imported(
        """
        a, b = args
        args.clear()
        assert_size_stride(a, (4, 4), (4, 1), 'input')
        x = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        torch.ops.aten.mm.out(a, b, out=x)
        del a
        y = x; del x  # reuse
        z = reinterpret_tensor(y, (16, ), (1, ), 0)
        del y
        w = torch.ops.aten.add.Tensor(z, table)
        del z
        return (w, None, )
    """,
        n_results=2,
    )
    assert signature.inputs == (0, 1)
    assert signature.outputs == (0, 1)
    assert steps == [
        *("input", "input", "check", "empty_strided", "operator", "reinterpret", "release"),
        *("constant_tensor", "operator", "release", "yield"),
    ]


def test_sizes_are_integers() -> None:
    signature, steps = imported(
        """
        a, b, unused = args
        args.clear()
        s0 = a
        x = empty_strided_cpu((2*s0, max(1, s0 // 2)), (max(1, s0 // 2), 1), torch.float32)
        return (x, s0, b, )
    """,
        n_results=3,
    )
    assert signature.inputs == (1, 0)
    assert signature.outputs == (0, 2, 1)
    assert {"integer_input", "multiply", "floor_divide", "maximum"} <= set(steps)


SUBGRAPHS = """
def first(args):
    a, = args
    args.clear()
    x = torch.ops.aten.add.Tensor(a, a)
    y = torch.ops.aten.mul.Tensor(x, a)
    del x
    return (y, a, )

def second(args):
    a, = args
    args.clear()
    return (a, a, )
"""


def with_subgraphs(text: str, n_results: int) -> list[str]:
    tree, scope = ast.parse(SUBGRAPHS), dict(NAMES)
    exec(compile(tree, "<wrapper>", "exec"), scope)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    codes = [scope[name].__code__ for name in functions]
    names = {name: scope[name] for name in functions}
    with pytest.MonkeyPatch.context() as patch:
        for name, function in names.items():
            patch.setitem(NAMES, name, function)
        return imported(text, n_results, functions=functions, codes=codes)[1]


def test_subgraphs_are_inlined() -> None:
    steps = with_subgraphs(
        """
        a, = args
        args.clear()
        x = [None] * 2
        x_args = [a,]
        x = first(x_args)
        y = x[0]
        z_args = [y,]
        del y
        z = first(z_args)
        del x
        return (z[0], z[1], )
    """,
        2,
    )
    operators = ["operator", "operator", "release"]
    assert steps == ["input", *operators, *operators, "yield"]


def test_names_that_branches_leave() -> None:
    branch = """
        a, = args
        args.clear()
        x = [None] * 2
        other = a
        if a.item():
            x_args = [a,]
            x = first(x_args)
            {assigned}
        else:
            x_args = [a,]
            x = second(x_args)
        return (x[0], x[1], other, )
    """
    assert with_subgraphs(branch.format(assigned="pass"), 3) == ["input", "branch", "yield"]
    with pytest.raises(UnsupportedGraph, match="the name other is not known"):
        with_subgraphs(branch.format(assigned="other = x[0]"), 3)


REFUSED = {
    "while True: pass": "a statement that is not known",
    "x = unknown(a)": "a call of a function that is not known",
    "x = missing(a)": "the name missing is not known",
    "x = a.shape": "the attribute shape of what it computes",
    "x = a.sin()": "a call of something that it computes",
    "x = torch.ops.aten.add.Tensor(*a)": "a call with starred arguments",
    "x = torch.ops.aten.add.Tensor(a)": "aten.add.Tensor lacks its argument other",
    "x = torch.ops.aten.add.Tensor(a, a, foo=1)": "aten.add.Tensor has no argument foo",
    "x = torch.ops.aten.add.Tensor(a, a, other=a)": "gets its argument other twice",
    "x = torch.ops.aten.unbind.int(a)": "aten.unbind.int returns List[Tensor]",
    "x = torch.ops.aten.item.default(a)": "aten.item.default returns number",
    "x = empty_strided_cpu((2, ), (1, 1), torch.float32)": "more sizes or strides",
    "x = empty_strided_cpu((2, ), (1, ), a)": "an allocation without a dtype",
    "x = a[0]": "an item of something else than an operator's results",
    "x = a @ a": "arithmetic that is not known",
    "x = lambda: a": "an expression that is not known",
    "if a.item(): x = a": "a statement that is not known",
    "if not (a.item() > 2): raise RuntimeError('')": "a call of something that it computes",
    "args.append(a)": "it takes its arguments in a way that is not known",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_refused(statement: str) -> None:
    with pytest.raises(UnsupportedGraph) as error:
        imported(f"a, = args\nargs.clear()\n{statement}\nreturn (a, )")
    assert REFUSED[statement] in str(error.value)


def test_what_it_must_return() -> None:
    for text, reason in {
        "a, = args\nargs.clear()\nreturn a": "a statement that is not known",
        "a, = args\nargs.clear()\nreturn (a, 'text', )": "something else than tensors and ints",
        "a, = args\nargs.clear()\nreturn (a, a, )": "it returns 2 values of 1",
        "a, = args\nargs.clear()": "it does not return",
    }.items():
        with pytest.raises(UnsupportedGraph, match=reason):
            imported(text)
