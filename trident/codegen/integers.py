"""The numbers that a graph computes of its inputs' sizes, as steps of a ``scm.program``.

A float that is an input is passed on only: sympy does not keep the order in which floats are added.

They are emitted before the first operator, from sympy expressions as torch's ShapeEnv has them: an
expression is computed once, and one that leaves 64 bits (or divides by zero) sends the call to
stock before anything has happened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch_mlir import ir

from trident.codegen.dialect import Emitter
from trident.codegen.registry import register
from trident.errors import UnsupportedGraph
from trident.texts import safe_text

_RANGE = range(-(2**63), 2**63)


def is_float(expression: Any) -> bool:
    """Is this the sympy symbol of a float?"""
    return isinstance(expression, sympy.Symbol) and symbol_is_type(expression, SymT.FLOAT)


class Integers:
    """Emits steps for expressions over the symbols that were bound."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self._values: dict[Any, ir.Value] = {}
        self.steps: dict[Any, tuple[str, list[ir.Value], int]] = {}

    def bind(self, symbol: Any, name: str, operands: list[ir.Value], index: int) -> bool:
        """Let `symbol` be what that step gives, which is emitted when it is used first. False if
        it is no symbol, or has a value."""
        if not isinstance(symbol, sympy.Symbol) or symbol in self.steps:
            return False
        self.steps[symbol] = name, operands, index
        return True

    def value(self, expression: Any) -> ir.Value:
        """The value of an int or a sympy expression; UnsupportedGraph if it has no native form."""
        expression = sympy.sympify(expression)
        value = self._values.get(expression)
        if value is None:
            floats = any(map(is_float, expression.free_symbols))
            if floats and not is_float(expression):
                raise UnsupportedGraph(f"{safe_text(str(expression))} computes with a float")
            # Names, not classes: torch has several of its own, which moved between releases.
            rule = _RULES.get(type(expression).__name__) or (
                _constant if isinstance(expression, sympy.Integer) else None
            )
            if rule is None:
                raise UnsupportedGraph(f"the number {safe_text(str(expression))} is not native")
            value = self._values[expression] = rule(self, expression)
        return value

    def step(self, name: str, *operands: Any) -> ir.Value:
        """The step `name` of two integers."""
        values = [self.value(operand) for operand in operands]
        return self.emitter.integer_step(name, values)


_Rule = Callable[[Integers, Any], ir.Value]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    return register(_RULES, *names)


def _constant(integers: Integers, expression: Any) -> ir.Value:
    number = int(expression)
    if number not in _RANGE:
        raise UnsupportedGraph(f"the number {number} does not fit into 64 bits")
    return integers.emitter.integer_step("integer", [], value=number)


_FOLDS = {"Add": "add", "Mul": "multiply", "Max": "maximum", "Min": "minimum"}


@_rule(*_FOLDS)
def _fold(integers: Integers, expression: Any) -> ir.Value:
    name = _FOLDS[type(expression).__name__]
    values = [integers.value(argument) for argument in expression.args]
    return functools.reduce(lambda a, b: integers.emitter.integer_step(name, [a, b]), values)


@_rule("Symbol")
def _symbol(integers: Integers, expression: Any) -> ir.Value:
    if expression not in integers.steps:
        raise UnsupportedGraph(f"the number {expression} is not known before it runs")
    name, operands, index = integers.steps[expression]
    return integers.emitter.integer_step(name, operands, index=index)


@_rule("FloorDiv", "CleanDiv")
def _floor_divide(integers: Integers, expression: Any) -> ir.Value:
    return integers.step("floor_divide", *expression.args)


@_rule("Mod", "PythonMod")
def _modulo(integers: Integers, expression: Any) -> ir.Value:
    return integers.step("modulo", *expression.args)


@_rule("ModularIndexing")
def _modular_indexing(integers: Integers, expression: Any) -> ir.Value:
    base, divisor, modulus = expression.args
    quotient = integers.step("floor_divide", base, divisor)
    return integers.emitter.integer_step("modulo", [quotient, integers.value(modulus)])


@_rule("Pow", "PowByNatural")
def _power(integers: Integers, expression: Any) -> ir.Value:
    base, exponent = expression.args
    if not isinstance(exponent, sympy.Integer) or not 1 <= int(exponent) <= 64:
        raise UnsupportedGraph(f"the number {safe_text(str(expression))} is not native")
    factors = [integers.value(base)] * int(exponent)
    return functools.reduce(lambda a, b: integers.emitter.integer_step("multiply", [a, b]), factors)


@_rule("Identity")
def _identity(integers: Integers, expression: Any) -> ir.Value:
    return integers.value(expression.args[0])
