"""Errors that an operator raises only when it runs, and that the program catches.

In: a probe, whose `compile` is the identity for eager. Out: what the handler makes of it, and gradients.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled",)


def _safe_cholesky(matrix: Tensor) -> tuple[Tensor, int]:
    for tries, jitter in enumerate((0.0, 0.1, 5.0)):
        try:
            return torch.linalg.cholesky(matrix + jitter * torch.eye(len(matrix), dtype=matrix.dtype)), tries
        except torch.linalg.LinAlgError:
            continue
    raise RuntimeError("it is not positive definite")


@scenario(tags=TAGS)
def a_factorisation_is_tried_again_with_jitter(p: Probe) -> None:
    """A matrix that is not positive definite gets jitter until its factorisation succeeds."""
    call = p.compile(lambda m: _safe_cholesky((m + m.t()) / 2))
    for step, scale in enumerate((1.0, -1.0, 1.0)):
        m = p.leaf(f"m{step}", (scale * torch.eye(3) + 0.01 * p.randn(3, 3)).requires_grad_())
        factor, tries = call(m)
        p.event("tries", tries)
        with p.backward():
            factor.sum().backward()


@scenario(tags=TAGS)
def a_label_out_of_range_is_caught(p: Probe) -> None:
    """A loss whose labels are out of range is replaced by another one."""

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        try:
            return F.cross_entropy(x, labels)
        except (IndexError, RuntimeError):
            return x.pow(2).mean()

    call = p.compile(loss)
    for step, label in enumerate((1, 7, 2)):
        x = p.leaf(f"x{step}", p.randn(2, 3, requires_grad=True))
        with p.backward():
            call(x, torch.tensor([0, label])).backward()


@scenario(tags=TAGS)
def a_suppressed_error_leaves_what_was_before(p: Probe) -> None:
    """Inside ``contextlib.suppress``, an index out of range leaves the result as it was."""

    def chosen(x: Tensor, places: Tensor) -> Tensor:
        result = x * 3
        with contextlib.suppress(IndexError, RuntimeError):
            result = x.index_select(0, places)
        return result

    call = p.compile(chosen)
    for step, place in enumerate((9, 1)):
        x = p.leaf(f"x{step}", p.randn(2, 3, requires_grad=True))
        with p.backward():
            call(x, torch.tensor([place])).sum().backward()


@scenario(tags=TAGS)
def an_assertion_about_values_is_caught(p: Probe) -> None:
    """An assertion about a tensor raises an ``AssertionError`` with its text."""

    def positive(x: Tensor) -> Tensor:
        try:
            assert (x > 0).all(), "it is negative"
        except AssertionError as error:
            return x * len(str(error))
        return x.log()

    call = p.compile(positive)
    for step, sign in enumerate((-1.0, 1.0)):
        x = p.leaf(f"x{step}", (sign * (p.rand(3) + 0.5)).requires_grad_())
        with p.backward():
            call(x).sum().backward()


@scenario(tags=TAGS)
def a_look_at_values_inside_a_try_is_no_error(p: Probe) -> None:
    """A branch, and a number, that depend on elements stand in a `try` whose handler takes any error."""

    def branch(x: Tensor) -> Tensor:
        try:
            if x.sum() > 0:
                return x * 2
        except Exception:
            pass
        return x * 13

    def number(x: Tensor) -> Tensor:
        try:
            scale = float(x.max())
        except RuntimeError:
            scale = 1.0
        return x / scale

    for name, fn in (("branch", branch), ("number", number)):
        x = p.leaf(name, p.tensor([1.0, 2.0], requires_grad=True))
        out = p.compile(fn)(x)
        p.value(f"{name} out", out)
        with p.backward():
            out.sum().backward()


@scenario(tags=TAGS)
def what_a_function_did_before_a_look_at_values_is_done_once(p: Probe) -> None:
    """A line of a log comes before a number that is read out of a tensor."""

    def logged(x: Tensor) -> Tensor:
        p.log.append("called")
        return x * x.sum().item()

    call = p.compile(logged)
    for step in range(2):
        x = p.leaf(f"x{step}", p.randn(3, requires_grad=True))
        out = call(x)
        p.value("out", out)
        with p.backward():
            out.sum().backward()
