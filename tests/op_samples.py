"""PyTorch's own samples of its operators (``op_db``), compiled, against stock and eager.

    python -m tests.op_samples                 # all 34,000 samples of all operators: some hours
    python -m tests.op_samples --every 10      # each tenth operator
    python -m tests.op_samples add mul         # these operators
    python -m tests.op_samples --inductor      # through Inductor, against stock Inductor
    python -m tests.op_samples --errors        # what operators refuse, against stock
    python -m tests.op_samples --leaks         # memory of calls that succeed, and that raise

prints what differs, what is not native and why, and the counts; exits 1 if anything differs. The
tests run a part of it, in a process of its own: importing torch's samples changes torch's flags.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree

import trident
from tests.memory import grows
from tests.test_equality import assert_same
from trident.control import runtime

CALLS = 3
# Their values are whatever was in memory.
UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
# LAPACK's results differ from call to call in their last bits, in eager as well.
NOT_REPEATABLE = frozenset({"linalg.lstsq"})
OTHER_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.float64)


@dataclasses.dataclass(frozen=True)
class Sample:
    """The sample number `index` of an operator for a dtype."""

    op: Any
    dtype: torch.dtype
    index: int
    inputs: Any
    requires_grad: bool

    @property
    def name(self) -> str:
        variant = f".{self.op.variant_test_name}" if self.op.variant_test_name else ""
        dtype = str(self.dtype).removeprefix("torch.")
        trained = ", trained" if self.requires_grad else ""
        return f"{self.op.name}{variant} {dtype}{trained} #{self.index}"

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, made anew."""
        made = (self.inputs.input, *self.inputs.args), self.inputs.kwargs
        return _pytree.tree_map(_anew, made)


def _anew(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        new = value.detach().clone()
        if value.layout is torch.strided and new.stride() != value.stride():
            storage = value.untyped_storage()
            new = torch.empty(0, dtype=value.dtype).set_(
                storage.clone(), value.storage_offset(), value.shape, value.stride()
            )
        if value.is_conj() != new.is_conj():
            new = new.conj()
        return new.requires_grad_(value.requires_grad)
    return copy.deepcopy(value) if isinstance(value, torch.Generator) else value


def samples(
    names: list[str] | None = None,
    every: int = 1,
    first: int = 0,
    most: int | None = None,
    both: bool = True,
    trained: bool = True,
) -> Iterator[Sample]:
    """The samples: of float32, of another dtype of each operator (if `both`), and of float32 for
    training (if also `trained`); at most `most` of each, chosen at random but always the same."""
    chosen = [op for op in op_db if not names or op.name in names]
    for number, op in enumerate(chosen[first::every]):
        supported = op.supported_dtypes("cpu")
        others = [dtype for dtype in OTHER_DTYPES if dtype in supported]
        kinds = [(torch.float32, False)] if torch.float32 in supported else []
        if both and others:
            kinds.append((others[number % len(others)], False))
        if both and trained and torch.float32 in supported and op.supports_autograd:
            kinds.append((torch.float32, True))
        for dtype, requires_grad in kinds:
            torch.manual_seed(0)
            try:
                found = list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
            except Exception as error:  # a sample that this torch cannot make
                logging.getLogger(__name__).info("%s %s: %s", op.name, dtype, error)
                continue
            indices = range(len(found))
            if most is not None and len(found) > most:
                indices = sorted(random.Random(op.name).sample(indices, most))  # type: ignore[assignment]
            for index in indices:
                yield Sample(op, dtype, index, found[index], requires_grad)


@dataclasses.dataclass
class Outcome:
    result: Any
    inputs: Any
    gradients: Any
    aliases: Any
    random: Any

    @property
    def failed(self) -> bool:
        return isinstance(self.result, BaseException)


def outcome(f: Callable[..., Any], sample: Sample) -> Outcome:
    args, kwargs = sample.arguments()
    torch.manual_seed(3)
    gradients: Any = None
    try:
        result = f(*args, **kwargs)
    except Exception as error:
        result = error
    tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    outputs = [x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    aliases = [[_alias(a, b) for b in (*tensors, *outputs)] for a in outputs]
    if sample.requires_grad:
        gradients = _gradients(outputs, tensors)
    return Outcome(
        _comparable(result), _comparable((args, kwargs)), gradients, aliases, torch.get_rng_state()
    )


def _alias(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, bool]:
    strided = a.layout is torch.strided and b.layout is torch.strided
    same = strided and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return a is b, same and a.numel() > 0


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
    differentiable = [y for y in outputs if y.requires_grad]
    leaves = [x for x in inputs if x.requires_grad and x.is_leaf]
    if not differentiable or not leaves:
        return None
    try:
        found = torch.autograd.grad(
            [y.sum() if not y.is_complex() else y.abs().sum() for y in differentiable],
            leaves,
            allow_unused=True,
        )
    except Exception as error:
        return type(error), str(error)
    return [_comparable(x) for x in found]


def _comparable(value: Any) -> Any:
    """What `assert_same` can compare: sparse and quantized tensors by their parts."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            whole = value.coalesce()
            return "sparse", whole.indices().clone(), whole.values().clone(), value.shape
        if value.layout is not torch.strided:
            return str(value.layout), value.to_dense()
        return value.resolve_conj().resolve_neg()
    if isinstance(value, (tuple, list)):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    plain = value is None or isinstance(value, (int, float, complex, str, BaseException))
    return value if plain else str(type(value))


def function_of(sample: Sample, after: str = "", more: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A new function (Dynamo compiles each of its code objects once) that calls the operator, and
    returns what `after`, an expression in the parameters `more`, gives as well."""
    op = sample.op.op
    names = [f"a{i}" for i in range(1 + len(sample.inputs.args))]
    keywords = list(sample.inputs.kwargs)
    passed = [*names, *(f"{key}={key}" for key in keywords)]
    head = f"def sampled({', '.join([*more, *names, *keywords])}):\n"
    text = f"{head}    return op({', '.join(passed)}){after and ', '}{after}\n"
    namespace: dict[str, Any] = {"op": op, "__name__": __name__}
    exec(compile(text, f"<sample {sample.name}>", "exec"), namespace)
    f: Callable[..., Any] = namespace["sampled"]
    return f


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`kind`: "native", "stock" (why: `reason`), "pieces" (the graph breaks) or "uncompiled"."""

    kind: str
    reason: str = ""
    differs_in_stock: bool = False


def check(sample: Sample) -> Verdict:
    """Raises AssertionError where Trident differs from eager; where stock does, too, from stock."""
    f = function_of(sample)
    eager = outcome(f, sample)
    torch._dynamo.reset()
    stock = outcome(torch.compile(f, backend="eager"), sample)
    torch._dynamo.reset()
    trident.reset_stats()
    with trident.enable():
        compiled = torch.compile(f, backend="trident")
        ours = [outcome(compiled, sample) for _ in range(CALLS)]
        hits = sum(x.hits + x.raised for x in trident.stats().frames if x.name == "sampled")
        verdict = _verdict(compiled, hits)
    in_stock = _differs(sample, stock, eager)
    for number, found in enumerate(ours):
        if _differs(sample, found, eager) and (not in_stock or _differs(sample, found, stock)):
            _assert_same(
                sample, found, stock if in_stock else eager, f"{sample.name}, call {number}"
            )
    return dataclasses.replace(verdict, differs_in_stock=in_stock)


def check_inductor(sample: Sample) -> Verdict:
    """Raises AssertionError where Trident differs from stock, which runs the same kernels."""
    f = function_of(sample)
    torch._dynamo.reset()
    trident.reset_stats()
    compiled = torch.compile(f)
    with trident.enable():
        ours = [outcome(compiled, sample) for _ in range(CALLS)]
        hits = sum(x.hits + x.raised for x in trident.stats().frames if x.name == "sampled")
        verdict = _verdict(compiled, hits)
    stock = outcome(compiled, sample)
    for number, found in enumerate(ours):
        _assert_same(sample, found, stock, f"{sample.name}, call {number}")
    return verdict


def _differs(sample: Sample, found: Outcome, expected: Outcome) -> bool:
    try:
        _assert_same(sample, found, expected, "")
    except AssertionError:
        return True
    return False


def _assert_same(sample: Sample, found: Outcome, expected: Outcome, what: str) -> None:
    if sample.op.name in UNINITIALIZED | NOT_REPEATABLE and not expected.failed:
        assert type(found.result) is type(expected.result), what
        return
    if expected.failed or found.failed:
        # Dynamo has words of its own for what it cannot trace.
        assert found.failed == expected.failed, f"{what}: {found.result!r}, {expected.result!r}"
        return
    assert found.aliases == expected.aliases, f"{what}: aliases"
    assert_same(found.result, expected.result, f"{what}: result")
    assert_same(found.inputs, expected.inputs, f"{what}: inputs")
    assert_same(found.gradients, expected.gradients, f"{what}: gradients")
    assert torch.equal(found.random, expected.random), f"{what}: state of the generator"


def _verdict(compiled: Any, hits: int) -> Verdict:
    entries = [
        entry
        for module in runtime.modules.values()
        if module.name == "sampled"
        for entry in module.entries
    ]
    frames = [module for module in runtime.modules.values() if module.entries]
    if not entries:
        return Verdict("uncompiled")
    if len(frames) > 1:
        return Verdict("pieces")
    built = entries[0].built
    if built is None:
        return Verdict("stock", entries[0].reason or "it was never built")
    if hits and built.plan_address and (built.program is not None or not built.has_graph):
        return Verdict("native")
    if not built.has_graph or "CALL_FUNCTION_EX" in (built.plan_reason or ""):
        return Verdict("pieces")
    return Verdict("stock", built.program_reason or built.plan_reason or "no call hit")


@dataclasses.dataclass
class Report:
    """What `run` found."""

    counts: collections.Counter[str]
    reasons: collections.Counter[str]
    wrong: list[str]
    differ_in_stock: list[str]

    @property
    def native_share(self) -> float:
        """Of the samples that Dynamo captured in one graph, those that ran natively."""
        whole = self.counts["native"] + self.counts["stock"]
        return self.counts["native"] / max(1, whole)

    def text(self) -> str:
        lines = [f"{kind}: {n}" for kind, n in self.counts.most_common()]
        lines.append(f"native of those in one graph: {self.native_share:.2%}")
        lines += [f"not native, {n} times: {reason}" for reason, n in self.reasons.most_common()]
        lines += [f"stock differs from eager: {name}" for name in self.differ_in_stock]
        lines += [f"WRONG: {text}" for text in self.wrong]
        return "\n".join(lines)


def run(chosen: Iterator[Sample], check: Callable[[Sample], Verdict] = check) -> Report:
    report = Report(collections.Counter(), collections.Counter(), [], [])
    for sample in chosen:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdict = check(sample)
        except AssertionError as error:
            report.wrong.append(f"{sample.name}: {str(error)[:500]}")
            continue
        report.counts[verdict.kind] += 1
        if verdict.differs_in_stock:
            report.differ_in_stock.append(sample.name)
        if verdict.kind == "stock":
            report.reasons[f"{sample.op.name}: {verdict.reason.splitlines()[0][:160]}"] += 1
    torch._dynamo.reset()
    return report


def check_errors(every: int, first: int) -> Report:
    """What operators refuse they refuse with stock's words, again and again."""
    report = Report(collections.Counter(), collections.Counter(), [], [])
    for op in [op for op in op_db if op.error_inputs_func is not None][first::every]:
        for index, error in enumerate(op.error_inputs("cpu")):
            sample = Sample(op, torch.float32, index, error.sample_input, False)
            f = function_of(sample)
            torch._dynamo.reset()
            stock = _words(outcome(torch.compile(f, backend="eager"), sample))
            torch._dynamo.reset()
            with trident.enable():
                compiled = torch.compile(f, backend="trident")
                for _ in range(CALLS):
                    found = _words(outcome(compiled, sample))
                    report.counts["refused" if stock else "accepted"] += 1
                    if found != stock:
                        report.wrong.append(f"{sample.name}: {found}, not {stock}")
    return report


def check_leaks(every: int, first: int) -> Report:
    """Calls of an operator, and calls that raise after it, leave nothing behind: 1,000 and more of
    a sample of each, every other one for training."""
    report = Report(collections.Counter(), collections.Counter(), [], [])
    chosen = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")][first::every]
    table, good, bad = torch.arange(3.0), torch.tensor([0]), torch.tensor([9])
    for number, op in enumerate(chosen):
        requires_grad = bool(number % 2) and op.supports_autograd
        found = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=requires_grad)))
        sample = Sample(op, torch.float32, 0, found, requires_grad)
        args, kwargs = sample.arguments()
        f = function_of(sample, "table[at]", ("table", "at"))

        def attempt(f: Callable[..., Any], at: Any, args: Any = args, kwargs: Any = kwargs) -> None:
            with contextlib.suppress(IndexError):
                f(table, at, *args, **kwargs)

        torch._dynamo.reset()
        trident.reset_stats()
        with trident.enable():
            g = torch.compile(f, backend="trident")
            with contextlib.suppress(Exception):
                for at in (good, good, good, bad):
                    attempt(g, at)
            stats = trident.stats()
            if not stats.hits or not stats.raised:
                report.counts["not native"] += 1
                continue
            for at, what in ((good, "succeeds"), (bad, "raises")):
                report.counts[what] += 1
                growth = grows(partial(attempt, g, at))
                if growth and not grows(partial(attempt, f, at)):
                    report.wrong.append(f"{sample.name} {what}: {growth}")
    return report


def _words(found: Outcome) -> tuple[str, str] | None:
    if not found.failed:
        return None
    return type(found.result).__name__, str(found.result).partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=None, help="samples of each operator and dtype")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--leaks", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    if arguments.errors or arguments.leaks:
        part = check_errors if arguments.errors else check_leaks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = part(arguments.every, arguments.first)
    else:
        chosen = samples(
            arguments.names,
            arguments.every,
            arguments.first,
            arguments.most,
            trained=not arguments.inductor,
        )
        report = run(chosen, check_inductor if arguments.inductor else check)
    print(report.text())
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
