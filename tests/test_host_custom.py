"""Host programs: custom operators of Python, Triton and C++."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import trident
from tests.host_checks import assert_as_eager, compiled, hits, outcome
from tests.test_equality import assert_same
from tests.test_host_operators import boxed

try:
    import triton.language as tl
except ImportError:
    tl = None
python = torch.ops.trident_custom
cpp = torch.ops.trident_cpp


def inputs() -> list[Any]:
    return [torch.arange(1.0, 7.0).view(2, 3)]


# ---- torch.library.custom_op ----


@torch.library.custom_op("trident_custom::grow", mutates_args={"x", "log"})
def grow(x: Tensor, by: float, log: Tensor | None) -> None:  # 2.11 fails with a default
    x.add_(by)
    if log is not None:
        log.add_(1)
    if x[0, 0] < 0:
        raise ValueError("it shrinks")


@torch.library.custom_op("trident_custom::halves", mutates_args=())
def halves(x: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    return x.select(dim, 0).clone(), x.select(dim, 1) * 2


@halves.register_fake
def _(x: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    return x.select(dim, 0).clone(), x.select(dim, 1).clone()


@torch.library.custom_op("trident_custom::rows", mutates_args=())
def rows(xs: list[Tensor], scales: list[float], dtype: torch.dtype) -> list[Tensor]:
    return [(x * scale).to(dtype) for x, scale in zip(xs, scales, strict=True)]


@rows.register_fake
def _(xs: list[Tensor], scales: list[float], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x, dtype=dtype) for x in xs]


@torch.library.custom_op("trident_custom::swish", mutates_args=())
def swish(x: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(x * beta)
    return x * gate, gate


@swish.register_fake
def _(x: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _swish_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.beta = inputs
    ctx.save_for_backward(x, output[1])


def _swish_backward(ctx: Any, grad: Any, grad_of_gate: Any) -> Any:
    x, gate = ctx.saved_tensors
    slope = ctx.beta * gate * (1 - gate)
    return grad * (gate + x * slope) + grad_of_gate * slope, None


swish.register_autograd(_swish_backward, setup_context=_swish_context)


@torch.library.custom_op("trident_custom::returns_its_input", mutates_args=())
def returns_its_input(x: Tensor) -> Tensor:
    return x


@returns_its_input.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("trident_custom::counts", mutates_args=())
def counts(x: Tensor) -> int:
    return int((x > 2).sum())


@counts.register_fake
def _(x: Tensor) -> int:
    return 2


def mutating(x: Any) -> Any:
    log = torch.zeros(1)
    y = x * 2
    grow(y, 1.5, log)
    grow(x, 0.5, None)
    return y + x, log


def several(x: Any) -> Any:
    a, b = halves(x + 1)
    c, d = halves(x, dim=1)
    return a * b, c, d.relu()


def lists(x: Any) -> Any:
    first, second = rows([x, x[0]], [2.0, 0.5], torch.float64)
    return first + 1, second


def trained(x: Any) -> Any:
    y, gate = swish(x * 2, 1.5)
    return (y * gate + y).relu()


@pytest.mark.parametrize("f", [mutating, several, lists, trained])
def test_python(enabled: None, f: Any) -> None:
    assert_as_eager(f, inputs)
    assert len(boxed(f.__name__)) == 1


def test_python_trained(enabled: None) -> None:
    def gradients(f: Any) -> Any:
        (x,) = inputs()
        x.requires_grad_()
        y = f(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, grad, torch.autograd.grad(grad.sum(), x)

    def make() -> list[Any]:
        return [inputs()[0].requires_grad_()]

    g = compiled(trained, make)
    before = hits("trained")[0]
    assert_same(gradients(g), gradients(trained))
    assert hits("trained")[0] == before + 1


def mutates_and_raises(x: Any) -> Any:
    x.mul_(2)
    grow(x, 0.5, None)
    return x + 1


def test_python_raises(enabled: None) -> None:
    """What was done before the exception stays done."""
    found = assert_as_eager(mutates_and_raises, inputs, lambda: [-inputs()[0]])
    assert found[1].error == (ValueError, "it shrinks")


def aliasing(x: Any) -> Any:
    return returns_its_input(x * 2) + 1


def test_python_breaks_its_promise(enabled: None) -> None:
    """An operator that returns its input: as in eager, whatever torch makes of it."""
    expected = outcome(aliasing, inputs())
    g = torch.compile(aliasing, backend="trident")
    for _ in range(4):
        assert_same(outcome(g, inputs()), expected)


def counting(x: Any) -> Any:
    return x * counts(x)


def test_python_number(enabled: None) -> None:
    """Dynamo breaks at an operator that returns a number, and calls it as the user's code does."""
    stock = outcome(torch.compile(counting, backend="eager"), inputs())
    torch._dynamo.reset()
    g = torch.compile(counting, backend="trident")
    for _ in range(4):
        assert_same(outcome(g, inputs()), stock)
    specs = [spec for frame in trident.explain(g).frames for spec in frame.specializations]
    assert specs
    assert not any("trident_custom.counts" in spec.ir.get("scm", "") for spec in specs)


# ---- torch.library.Library ----

LIBRARY = torch.library.Library("trident_custom", "FRAGMENT")
LIBRARY.define("composite(Tensor x, Scalar by=2) -> Tensor")
LIBRARY.impl("composite", lambda x, by=2: (x * by).sin() + 1, "CompositeImplicitAutograd")
LIBRARY.define("twice_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("twice_", lambda x: x.mul_(2), "CPU")
LIBRARY.impl("twice_", lambda x: x, "Meta")
LIBRARY.define("own_autograd(Tensor x) -> Tensor")
LIBRARY.impl("own_autograd", lambda x: x * 3, "CPU")
LIBRARY.impl("own_autograd", lambda x: torch.empty_like(x), "Meta")


class OwnAutograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return python.own_autograd(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 30


LIBRARY.impl("own_autograd", OwnAutograd.apply, "Autograd")


def composite(x: Any) -> Any:
    return python.composite(x) * python.composite(x, 0.5)


def twice(x: Any) -> Any:
    y = python.twice_(x)
    return y + x, y


def own_autograd(x: Any) -> Any:
    return python.own_autograd(x * 2) + 1


@pytest.mark.parametrize("f", [composite, twice, own_autograd])
def test_library(enabled: None, f: Any) -> None:
    assert_as_eager(f, inputs)


@pytest.mark.parametrize("f", [composite, own_autograd])
def test_library_trained(enabled: None, f: Any) -> None:
    def make() -> list[Any]:
        return [inputs()[0].requires_grad_()]

    def gradients(g: Any) -> Any:
        (x,) = make()
        return torch.autograd.grad(g(x).sum(), x)

    g = compiled(f, make)
    before = hits(f.__name__)[0]
    assert_same(gradients(g), gradients(f))
    assert hits(f.__name__)[0] == before + 1


# ---- torch.library.triton_op ----


def kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 3, mask=at < n)


@pytest.fixture(scope="module")
def scaled() -> Any:
    """A ``triton_op`` whose kernel runs in Triton's interpreter, as there may be no GPU."""
    pytest.importorskip("triton", reason="there is no Triton")
    from triton.runtime.interpreter import InterpretedFunction

    interpreted = InterpretedFunction(kernel)

    @torch.library.triton_op("trident_custom::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        interpreted[(1,)](x, y, x.numel(), 8)
        return y

    scaled.register_fake(torch.empty_like)
    return scaled


def test_triton(enabled: None, scaled: Any) -> None:
    def interprets(x: Any) -> Any:
        return scaled(x + 1) * scaled(x)

    assert_as_eager(interprets, inputs)
    assert boxed("interprets") == ("trident_custom::scaled",)


# ---- TORCH_LIBRARY ----

SOURCE = """
#include <torch/library.h>
#include <ATen/ATen.h>
#include <stdexcept>

using at::Tensor;

std::tuple<Tensor, Tensor> pair(const Tensor &x, int64_t n) { return {x + n, x * n}; }
Tensor &grow(Tensor &x, double by) { return x.add_(by); }
Tensor checked(const Tensor &x) {
  TORCH_CHECK_INDEX(x.sum().item<double>() > 0, "the sum is ", x.sum().item<double>());
  return x.clone();
}
Tensor thrown(const Tensor &x) {
  if (x.sum().item<double>() <= 0) throw std::runtime_error("thrown");
  return x.clone();
}
Tensor odd(const Tensor &x) {
  if (x.sum().item<double>() <= 0) throw 3;
  return x.clone();
}
std::vector<Tensor> many(at::TensorList xs, const std::optional<Tensor> &y, c10::string_view how,
                         at::ArrayRef<double> by, const at::Scalar &plus,
                         std::optional<at::ScalarType> dtype, at::OptionalIntArrayRef sizes) {
  std::vector<Tensor> made;
  for (size_t i = 0; i < xs.size(); i++) made.push_back(xs[i] * by[i] + plus);
  if (y) made.push_back(how == "negative" ? -*y : *y + 1);
  for (Tensor &t : made) t = dtype ? t.to(*dtype) : t;
  if (sizes) made[0] = made[0].reshape(*sizes);
  return made;
}
Tensor overridden(const Tensor &x) { return x + 100; }

TORCH_LIBRARY(trident_cpp, m) {
  m.def("pair(Tensor x, int n) -> (Tensor, Tensor)");
  m.def("grow_(Tensor(a!) x, float by) -> Tensor(a!)");
  m.def("checked(Tensor x) -> Tensor");
  m.def("thrown(Tensor x) -> Tensor");
  m.def("odd(Tensor x) -> Tensor");
  m.def("many(Tensor[] xs, Tensor? y, str how, float[] by, *, Scalar plus=1, "
        "ScalarType? dtype=None, int[]? sizes=None) -> Tensor[]");
  m.def("overridden(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(trident_cpp, CompositeExplicitAutograd, m) {
  m.impl("pair", pair);
  m.impl("grow_", grow);
  m.impl("checked", checked);
  m.impl("thrown", thrown);
  m.impl("odd", odd);
  m.impl("many", many);
  m.impl("overridden", overridden);
}
"""


def fake_many(
    xs: Any, y: Any, how: str, by: Any, *, plus: Any = 1, dtype: Any = None, sizes: Any = None
) -> Any:
    made = [torch.empty_like(x, dtype=dtype) for x in ([*xs, y] if y is not None else xs)]
    return [made[0].reshape(sizes), *made[1:]] if sizes is not None else made


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from torch.utils.cpp_extension import is_ninja_available, load_inline

    if not is_ninja_available():
        pytest.skip("torch builds extensions with ninja, which is not there")
    load_inline(
        "trident_cpp",
        SOURCE,
        extra_cflags=["-O1"],
        is_python_module=False,
        no_implicit_headers=True,
        build_directory=str(tmp_path_factory.mktemp("trident_cpp")),
    )
    fakes = {
        "pair": lambda x, n: (torch.empty_like(x), torch.empty_like(x)),
        "grow_": lambda x, by: x,
        "many": fake_many,
        **dict.fromkeys(("checked", "thrown", "odd", "overridden"), torch.empty_like),
    }
    fragment = torch.library.Library("trident_cpp", "FRAGMENT")
    for name, fake in fakes.items():
        fragment.impl(name, fake, "Meta")
    yield
    fragment._destroy()


def cpp_tuple(x: Any) -> Any:
    a, b = cpp.pair(x * 2, 3)
    return a.sin() + b, a


def cpp_mutating(x: Any) -> Any:
    y = cpp.grow_(x, 1.5)
    cpp.grow_(y, 0.25)
    return y, x * 2


def cpp_many(x: Any) -> Any:
    a, b, c = cpp.many([x, x[0]], x.sin(), "negative", [2.0, 0.5], plus=1.5, dtype=torch.float64)
    (d,) = cpp.many([x], None, "", [3.0], sizes=[3, 2])
    return a * 2, b, c, d


@pytest.mark.slow
@pytest.mark.parametrize("f", [cpp_tuple, cpp_mutating, cpp_many])
def test_cpp(enabled: None, library: None, f: Any) -> None:
    assert_as_eager(f, inputs)
    assert len(boxed(f.__name__)) == 1


def cpp_checked(x: Any) -> Any:
    x.mul_(2)
    return cpp.checked(x) + 1


def cpp_thrown(x: Any) -> Any:
    x.mul_(2)
    return cpp.thrown(x) + 1


def cpp_odd(x: Any) -> Any:
    x.mul_(2)
    return cpp.odd(x) + 1


@pytest.mark.slow
@pytest.mark.parametrize("f", [cpp_checked, cpp_thrown])
def test_cpp_raises(enabled: None, library: None, f: Any) -> None:
    found = assert_as_eager(f, inputs, lambda: [-inputs()[0]])
    assert found[1].error is not None


@pytest.mark.slow
def test_cpp_throws_what_is_no_exception(enabled: None, library: None) -> None:
    """Eager says "Caught an unknown exception!"."""
    g = compiled(cpp_odd, inputs)
    expected, actual = (outcome(f, [-inputs()[0]]) for f in (cpp_odd, g))
    assert expected.error is not None
    assert_same(actual, expected)
    assert hits("cpp_odd")[1] == 1


def cpp_overridden(x: Any) -> Any:
    return cpp.overridden(x * 2) + 1


@pytest.mark.slow
def test_cpp_overridden_in_python(enabled: None, library: None) -> None:
    """A kernel that Python registers, and takes back, counts at the next call."""
    g = compiled(cpp_overridden, inputs)
    for _ in range(2):
        assert_same(g(*inputs()), cpp_overridden(*inputs()))
        before = g(*inputs())
        override = torch.library.Library("trident_cpp", "IMPL")
        override.impl("overridden", lambda x: x - 5, "CPU")
        try:
            assert_same(g(*inputs()), cpp_overridden(*inputs()))
            assert not torch.equal(g(*inputs()), before)
        finally:
            override._destroy()
    assert hits("cpp_overridden")[0] >= 8


def raises_in_python(x: Any) -> Any:
    return cpp.overridden(x * 2) + 1


@pytest.mark.slow
def test_cpp_overridden_by_a_kernel_that_raises(enabled: None, library: None) -> None:
    g = compiled(raises_in_python, inputs)
    error = KeyError("key")

    def kernel(x: Any) -> Any:
        raise error

    override = torch.library.Library("trident_cpp", "IMPL")
    override.impl("overridden", kernel, "CPU")
    try:
        for f in (raises_in_python, g):
            with pytest.raises(KeyError) as info:
                f(*inputs())
            assert info.value is error
    finally:
        override._destroy()
    assert hits("raises_in_python")[1] == 1
    assert_same(g(*inputs()), raises_in_python(*inputs()))


def cpp_trained(x: Any) -> Any:
    a, b = cpp.pair(x * 2, 3)
    return a * b


@pytest.mark.slow
def test_cpp_trained(enabled: None, library: None) -> None:
    """With a derivative that Python registered."""

    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return a + b * ctx.n, None

    def context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.n = inputs

    torch.library.register_autograd("trident_cpp::pair", backward, setup_context=context)

    def gradients(f: Any) -> Any:
        x = inputs()[0].requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)

    g = compiled(cpp_trained, lambda: [inputs()[0].requires_grad_()])
    before = hits("cpp_trained")[0]
    assert_same(gradients(g), gradients(cpp_trained))
    assert hits("cpp_trained")[0] == before + 1
