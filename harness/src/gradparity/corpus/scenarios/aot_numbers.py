"""Functions compiled ahead that are given another number in each call.

A formula may depend on the value of a number: the square and the cube of a tensor have kernels of their own,
and so have their derivatives. A number that a compiler keeps symbolic must not change what is computed.

In: a probe, whose `compile` is the identity for eager. Out: values and gradients of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "shapes")


def _with_numbers(
    p: Probe, function: Callable[[Tensor, float], Tensor], numbers: Iterable[float], positive: bool = False
) -> None:
    start = p.rand(4, 5) + 0.5 if positive else p.randn(4, 5)
    x = p.leaf("x", start.requires_grad_())
    call = p.compile(lambda a, n: function(a.tanh(), n))
    for step, number in enumerate(numbers):
        out = call(x, number)
        p.value(f"out{step}", out)
        with p.backward():
            out.square().sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_exponent_that_is_another_integer(p: Probe) -> None:
    """Exponents 0 to 5: squares and cubes are multiplied out; that of 0 has a gradient of zeros."""
    _with_numbers(p, lambda x, n: x**n, (1, 2, 3, 4, 5, 0, 2, 3))


@scenario(tags=TAGS)
def aot_exponent_that_is_another_float(p: Probe) -> None:
    """Exponents with a fraction: the square root and its reciprocal have kernels of their own."""
    _with_numbers(p, lambda x, n: x.pow(n), (0.5, -0.5, 1.5, 2.0, 3.0, -1.0, 0.0), positive=True)


@scenario(tags=TAGS)
def aot_exponent_computed_from_a_number(p: Probe) -> None:
    """The exponent is the reciprocal of what the caller gives."""
    _with_numbers(p, lambda x, n: x.softmax(-1).pow(1 / n), (1, 2, 3, 4, 2), positive=True)


@scenario(tags=TAGS)
def aot_number_computed_from_another(p: Probe) -> None:
    """The backward reads a number that was computed from the one that the caller gives."""
    _with_numbers(p, lambda x, n: x * (n + 1) * (2 * n - 3), (1, 2, 3, 4))


@scenario(tags=TAGS)
def aot_number_computed_from_a_size(p: Probe) -> None:
    """The backward reads a number that was computed from the sizes of the input."""
    call = p.compile(lambda a: (a.exp() * (a.shape[0] + 1)).view(a.numel() // 2, 2) / (a.shape[0] * 2 - 1))
    for rows in (3, 4, 5):
        x = p.leaf(f"x of {rows}", p.randn(rows, 2, requires_grad=True))
        out = call(x)
        p.value(f"out of {rows}", out)
        with p.backward():
            out.sum().backward()


@scenario(tags=TAGS)
def aot_base_that_is_another_number(p: Probe) -> None:
    """A number to the power of a tensor; the derivative at base 0 is a case of its own."""
    _with_numbers(p, lambda x, n: n**x, (2, 3, 4, 1, 0, 2), positive=True)


@scenario(tags=TAGS)
def aot_exponent_in_place(p: Probe) -> None:
    """The power is written into an intermediate."""
    _with_numbers(p, lambda x, n: (x * 2).pow_(n), (2, 3, 4, 2))


@scenario(tags=TAGS)
def aot_exponent_in_double_precision(p: Probe) -> None:
    """`float_power` computes in float64, whatever it is given."""
    _with_numbers(p, lambda x, n: torch.float_power(x, n).float(), (2, 3, 4, 2))


@scenario(tags=TAGS)
def aot_exponent_of_a_pooling(p: Probe) -> None:
    """`lp_pool1d` raises to a power and takes the root."""
    _with_numbers(p, lambda x, n: functional.lp_pool1d(x[None], n, 2), (2, 3, 4, 2), positive=True)


@scenario(tags=TAGS)
def aot_exponent_that_is_a_size(p: Probe) -> None:
    """The exponent is the number of rows, another one in each call; a size to a power stays a size."""
    x = p.leaf("x", (p.rand(6, 3) + 0.5).requires_grad_())
    call = p.compile(lambda a: (a ** a.shape[0]).sum() / a.shape[0] ** 2)
    for step, rows in enumerate((2, 3, 4, 5)):
        with p.backward():
            call(x[:rows]).backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_order_of_a_norm(p: Probe) -> None:
    """Norms of order 1, 2, 3, infinity and 0 have formulas of their own."""
    _with_numbers(p, lambda x, n: torch.linalg.vector_norm(x, n, dim=-1), (1, 2, 3, float("inf"), 0, 2.5))


@scenario(tags=TAGS)
def aot_order_of_a_distance(p: Probe) -> None:
    """Distances of order 1, 2 and others."""
    _with_numbers(p, lambda x, n: functional.pairwise_distance(x, x.detach().flip(0), p=n), (1, 2, 3, 4, 1.5))


@scenario(tags=TAGS)
def aot_slopes_and_thresholds(p: Probe) -> None:
    """Numbers that activations compare with and multiply by."""

    def activated(x: Tensor, n: float) -> Tensor:
        return (
            functional.leaky_relu(x, n * 0.1) + functional.elu(x, n) + functional.hardtanh(x, -n / 4, n / 3)
        )

    _with_numbers(p, activated, (1, 2, 3, 4, 0.5))


@scenario(tags=TAGS)
def aot_factors_of_sums(p: Probe) -> None:
    """`alpha`, `beta` and `value`, among them 1 and 0, which eager leaves out."""

    def summed(x: Tensor, n: float) -> Tensor:
        product = torch.addmm(x, x @ x.T, x, beta=n, alpha=n)
        return torch.add(product, x.sin(), alpha=n) + torch.addcmul(x, x.sin(), x.cos(), value=n)

    _with_numbers(p, summed, (2, 1, 0, 3, 0.5))


@scenario(tags=TAGS)
def aot_tensor_made_of_a_number(p: Probe) -> None:
    """The number becomes a tensor inside."""
    _with_numbers(
        p, lambda x, n: torch.logaddexp(x, torch.tensor(float(n))) * torch.tensor(n), (1, 2, 3.5, 4)
    )


def _averaged(average: Tensor, value: Tensor) -> Tensor:
    torch._foreach_lerp_([average], [value], 0.3)
    return average


def _is_one_operator(p: Probe, fused: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    a = p.leaf("a", p.randn(200, requires_grad=True))
    b, c = p.randn(200), p.rand(200) + 1
    out = p.compile(fused)(a, b, c)
    p.value("out", out.detach())
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_sum_with_a_scaled_quotient(p: Probe) -> None:
    """`addcdiv` with a number rounds as one operator, not as a division, a product and a sum."""
    _is_one_operator(p, lambda a, b, c: torch.addcdiv(a, b, c, value=0.3))


@scenario(tags=TAGS)
def aot_sum_with_a_scaled_quotient_in_place(p: Probe) -> None:
    """`addcdiv_` with a number is one operator."""
    _is_one_operator(p, lambda a, b, c: (a * 1).addcdiv_(b, c, value=0.3))


@scenario(tags=TAGS)
def aot_sum_with_a_scaled_product(p: Probe) -> None:
    """`addcmul` with a number is one operator."""
    _is_one_operator(p, lambda a, b, c: torch.addcmul(a, b, c, value=0.3))


@scenario(tags=TAGS)
def aot_sum_with_a_scaled_product_in_place(p: Probe) -> None:
    """`addcmul_` with a number is one operator."""
    _is_one_operator(p, lambda a, b, c: (a * 1).addcmul_(b, c, value=0.3))


@scenario(tags=TAGS)
def aot_scaled_sum_in_place(p: Probe) -> None:
    """`add_` with `alpha` is one operator."""
    _is_one_operator(p, lambda a, b, c: (a * 1).add_(b, alpha=0.3) * c)


@scenario(tags=TAGS)
def aot_average_of_a_list(p: Probe) -> None:
    """`torch._foreach_lerp_`, by which an average of weights is kept, is one operator for each tensor."""
    _is_one_operator(p, lambda a, b, c: _averaged(a.detach().clone(), b) + a * c)


@scenario(tags=TAGS)
def aot_tensors_made_of_numbers_in_every_way(p: Probe) -> None:
    """A function makes tensors of numbers by constructors old and new, changes them, and indexes with one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        scale = torch.FloatTensor([0.5, 1.5, 2.0]).add_(torch.tensor([1.0, 0.0, 2.0])).to(a)
        order = torch.LongTensor([2, 0, 1]).to(a.device)
        shift = a.new([1.0, 2.0, 3.0]) * torch.Tensor([2.0]).to(a)
        return a[order] * scale + shift + torch.as_tensor(3)

    call = p.compile(run)
    for step in range(2):
        out = call(x)
        p.value(f"out {step}", out)
        with p.backward():
            out.square().sum().backward()


#: by name, what is computed of a number that was read out of a tensor, and checked.
READ: dict[str, Callable[[Tensor, int], Any]] = {
    "equal": lambda x, z: [torch._check(z == 3), x * z],
    "less": lambda x, z: [torch._check(z < 5), x * z],
    "between": lambda x, z: [torch._check(z >= 0), torch._check(z <= 4), x.sum() * torch.ones(z).sum()],
    "a_size": lambda x, z: [torch._check(z == x.shape[0] - 1), x.sin()],
}


@scenario(tags=TAGS)
def aot_numbers_read_are_checked(p: Probe) -> None:
    """A check of a number that is read inside the graph holds for each call, not for the first alone."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for name, fn in READ.items():
            call = p.compile(lambda a, number, fn=fn: fn(a, number.item())[-1])
            for number in (3, 7, 3):
                try:
                    shown = call(x, torch.tensor(number, device=x.device))
                except RuntimeError:  # the texts are Dynamo's
                    p.event(f"{name} {number} is refused")
                else:
                    p.value(f"{name} {number}", shown)
