"""The calls that run no user code: built-in nodes, ATen ops of a compiled function, sums, and ``.grad``.

In: ``(grads, *saved)`` for a node; the gradient of a view's base for ``CopySlices``; values for an ATen op.
Out: gradients.

In: gradients, where None means undefined. Out: their sum, or the ``.grad`` of one or many leaves. No other
file writes ``.grad``. The rules are those of ``InputBuffer::add`` (``input_buffer.cpp``) and
``AccumulateGrad::accumulateGrad`` (``accumulate_grad.h``) in ``torch/csrc/autograd``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import compress, pairwise
from sys import getrefcount
from typing import Any, Self

import torch
from torch import fx

from retrograd.facts.releases import is_layout_enforced
from retrograd.graph.fx import is_higher_order, is_operator_overload
from retrograd.runtime.modes import as_if_autocast, torch_functions_off, without_torch_functions
from retrograd.runtime.tensor import (
    PLAIN_CLASSES,
    accumulate_in_node,
    add_each,
    grad_of,
    is_lazy,
    obeys_layout_contract,
    set_grad,
    set_grad_of_another_shape,
)
from retrograd.trace import InputGuard

#: A gradient may be stolen if it has no more references than these: a local variable and the argument of
#: `getrefcount`. The rule is ``is_tensor_stealable`` in ``torch/csrc/autograd/variable.h``.
_OWN_REFERENCES = 2


Grad = torch.Tensor | None
Geometry = tuple[Sequence[int], Sequence[int], int]

# adding gradients


@without_torch_functions
def sum_gradients(*grads: Grad) -> Grad:
    """Add the gradients in the order given, and skip undefined ones. A sparse gradient is added to a dense
    one, never the other way round."""
    total: Grad = None
    for grad in grads:
        if total is None or grad is None:
            total = grad if total is None else total
        elif total.is_sparse and not grad.is_sparse:
            total = grad + total
        else:
            total = total + grad
    return total


def accumulate_quietly(variable: torch.Tensor, box: list[Grad], kept_for_post_hooks: bool = False) -> None:
    """Write a gradient into ``variable.grad`` by eager's rules.

    We steal the gradient, or add it in place to a ``.grad`` that obeys the layout contract. In all other
    cases torch's own AccumulateGrad node does the work.

    Args:
        variable: a leaf.
        box: a list that holds the gradient. We take it out, so that only this function refers to it: a
            gradient with another reference is copied instead of stolen.
        kept_for_post_hooks: whether the plan holds another reference, to show the gradient to the node's post
            hooks. Eager holds one too, and still steals the gradient.
    """
    grad = box.pop()
    if grad is None or not variable.requires_grad:
        return
    asked = variable.grad_dtype
    if asked is not variable.dtype and asked is not None and grad.dtype is not asked:
        grad = grad.to(asked)
    existing = grad_of(variable)
    if existing is None:
        # Checked inline: where Dynamo's frame evaluation is installed, a call of a Python function holds one
        # more reference.
        others = getrefcount(grad) - _OWN_REFERENCES - int(kept_for_post_hooks)
        is_ours = others <= 0 and grad._use_count() <= 1  # type: ignore[attr-defined]
        if is_ours and not torch.is_grad_enabled() and _take_over(variable, grad):
            return
        if not is_ours and not torch.is_grad_enabled():
            grad = grad.clone()  # torch's node allows one more reference for each kind of hook
    elif not torch.is_grad_enabled() and _is_laid_out(existing, variable):
        existing += grad
        return
    accumulate_in_node(variable, grad)


accumulate_grad = without_torch_functions(accumulate_quietly)
accumulate_grad.__name__ = accumulate_grad.__qualname__ = "accumulate_grad"


def _is_laid_out(total: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether a dense ``.grad`` obeys the layout contract, so that torch does not warn."""
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (total, variable)):
        return False
    return obeys_layout_contract(total, variable)


def _take_over(variable: torch.Tensor, grad: torch.Tensor) -> bool:
    """Steal a gradient that has no other owner, if eager would. Return whether it was stolen. Python's setter
    refuses a gradient whose size, dtype or layout differs from the leaf's; eager's C++ does not."""
    taken = grad.detach() if _may_be_taken_over(variable, grad) else None
    if taken is None and grad.is_sparse:
        indices, values = grad._indices(), grad._values()
        if indices.is_contiguous() and values.is_contiguous():
            taken = torch.sparse_coo_tensor(indices, values, grad.shape, check_invariants=False)
    if taken is None:
        return False
    for write in (set_grad, set_grad_of_another_shape):
        try:
            write(variable, taken)
        except RuntimeError:
            continue
        return True
    return False


def _may_be_taken_over(variable: torch.Tensor, grad: torch.Tensor) -> bool:
    if grad.is_mkldnn:
        return True
    if grad.layout is not torch.strided or variable.layout is torch.sparse_csr:
        return False
    return not is_layout_enforced() or obeys_layout_contract(grad, variable)


class Accumulator:
    """Consecutive accumulations of a plan, with no user code between them.

    Plain cases are decided here with few calls into torch, and one ``_foreach_add_`` makes all additions.
    `accumulate_grad` handles all other cases. Once a set of pairs was plain, one C++ guard checks that it
    still is.
    """

    def __init__(self) -> None:
        self._pairs: InputGuard | None = None
        self._totals: InputGuard | None = None
        #: Whether each pair of leaf and gradient is plain. Valid while the guard `_pairs` holds.
        self._fitting: list[bool] = []
        self._has_run = False

    def __call__(self, variables: Sequence[torch.Tensor], grads: list[Grad]) -> None:
        """Write ``.grad`` of each of `variables` by eager's rules.

        Args:
            variables: leaves.
            grads: one gradient for each leaf. The list is emptied, so that a gradient with no other reference
                can be stolen.
        """
        with torch_functions_off():
            is_plain = self._has_run and not torch.is_grad_enabled() and is_layout_enforced()
            self._has_run = True
            if is_plain and self._are_as_before(variables, grads):
                self._write(variables, grads)
            else:
                _one_by_one(variables, grads)

    def _are_as_before(self, variables: Sequence[torch.Tensor], grads: Sequence[Grad]) -> bool:
        """Whether `_fitting` is valid for these pairs. A pair is plain if the gradient has the layout that
        the contract asks of its ``.grad``."""
        if not all(variable.grad_dtype is variable.dtype for variable in variables):
            return False
        if self._pairs is not None and self._pairs.check(self._fitting_of(variables, grads)):
            return True
        self._pairs = self._totals = None
        self._fitting = list(map(_fits, grads, variables))
        if any(self._fitting):
            self._pairs = InputGuard(self._fitting_of(variables, grads), (), (), None)
        return self._pairs is not None

    def _fitting_of(self, variables: Sequence[torch.Tensor], grads: Sequence[Grad]) -> list[Any]:
        return [*compress(variables, self._fitting), *compress(grads, self._fitting)]

    def _write(self, variables: Sequence[torch.Tensor], grads: list[Any]) -> None:
        before: list[Any] = [variable.grad for variable in variables]
        missing = sum([total is None for total in before])
        if missing == len(before):
            grads.reverse()
            for variable, fits in zip(variables, self._fitting, strict=True):
                grad = grads.pop()
                if fits and getrefcount(grad) <= _OWN_REFERENCES and grad._use_count() <= 1:
                    variable.grad = grad.detach()
                else:
                    box, grad = [grad], None
                    accumulate_grad(variable, box)
        elif (
            not missing
            and all(self._fitting)
            and self._can_be_added_to(before, variables)
            and _are_disjoint(before, grads)
        ):
            add_each(before, grads)
            grads.clear()
        else:
            _one_by_one(variables, grads)

    def _can_be_added_to(self, totals: Sequence[Grad], variables: Sequence[torch.Tensor]) -> bool:
        """Whether all ``.grad`` tensors are plain and obey the layout contract, so that torch does not
        warn."""
        if self._totals is not None and self._totals.check(totals):
            return True
        if not all(map(_fits, totals, variables)) or any(map(_is_lazy_or_inference, totals)):
            return False
        self._totals = InputGuard(totals, (), (), None)
        return True


def _one_by_one(variables: Sequence[torch.Tensor], grads: list[Grad]) -> None:
    grads.reverse()
    for variable in variables:
        accumulate_grad(variable, [grads.pop()])


def _fits(grad: Grad, variable: torch.Tensor) -> bool:
    """Whether a plain gradient has the size, dtype and layout that its plain leaf asks for."""
    if type(grad) is not torch.Tensor or type(variable) not in PLAIN_CLASSES or not variable.requires_grad:
        return False
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (grad, variable)):
        return False
    return (
        grad.shape == variable.shape
        and grad.dtype is variable.dtype
        and grad.device == variable.device
        and obeys_layout_contract(grad, variable)
        and not _is_lazy_or_inference(grad)
    )


def _is_lazy_or_inference(tensor: Grad) -> bool:
    """Whether the tensor has a lazy conjugate or negative bit, or is an inference tensor, which must not be
    changed."""
    return tensor is not None and (is_lazy(tensor) or tensor.is_inference())


def _are_disjoint(totals: Sequence[Grad], grads: Sequence[Grad]) -> bool:
    """Whether no two tensors share memory. Always True on the CPU: only other devices may run the additions
    of one call concurrently."""
    tensors = [tensor for tensor in (*totals, *grads) if tensor is not None]
    if all(tensor.is_cpu for tensor in tensors):
        return True
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    return all(start + size <= following for (start, size), (following, _) in pairwise(spans))


# built-in nodes


class NodeFunction(functools.partial[Any]):
    """A function that carries the name of a node: the engine's closure for that node, or one of ours. It is a
    ``partial``, so that the call happens in C.

    Attributes:
        structure_key: two functions with equal keys compute the same and name the same node in their errors.
    """

    __name__: str
    __qualname__: str
    structure_key: tuple[Hashable, ...]

    def __new__(cls, name: str, fn: Callable[..., Any], key: tuple[Hashable, ...] | None = None) -> Self:
        """Name the function. Functions are compared by `key`, which defaults to the function and its name."""
        self = super().__new__(cls, of_its_pieces(fn) if name in SPLIT else fn)
        self.__name__ = self.__qualname__ = name
        self.__module__ = "autograd"
        self.structure_key = key or (fn, name)
        return self

    def __repr__(self) -> str:
        return f"autograd.{self.__name__}"


class OutputCheck(NodeFunction):
    """Checks the gradients that a node returned against what their consumers expect, and converts them."""

    #: The prefix of the closure's errors. The closure does not know the node, which eager's error names.
    _NAMELESS = "[Compiled Autograd Tracing:]"

    _node: str

    def __new__(cls, fn: Callable[..., Any], node: str) -> Self:
        """Wrap the engine's closure `fn`. `node` is the node's name, for the error text."""
        self = super().__new__(cls, "validate_outputs", fn, (fn, node))
        self._node = node
        return self

    def __call__(self, grads: Sequence[Any], *saved: Any) -> Sequence[Any]:
        """Return the gradients, converted to what their consumers expect.

        Raises:
            RuntimeError: a gradient does not fit; the text is eager's.
        """
        if self._node in UNBOUND:
            grads = [_as_long(grads[0], saved[0][0][1])]
        try:
            return self.func(grads, *saved)
        except RuntimeError as error:
            text = str(error)
            if not text.startswith(self._NAMELESS):
                raise
        raise RuntimeError(f"Function {self._node} returned an {text.removeprefix(self._NAMELESS)}")


class RememberingCheck:
    """An `OutputCheck` for a plan that runs repeatedly. Once the check has returned gradients unchanged, one
    C++ guard recognises gradients with equal metadata, and the check is skipped.

    Args:
        check: the check.
        saved: its other arguments, which are the same in each run.
    """

    def __init__(self, check: OutputCheck, saved: Sequence[Any]) -> None:
        self._check, self._saved = check, saved
        self._passed: InputGuard | None = None
        self._has_run = False

    def __call__(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients, converted to what their consumers expect."""
        if self._passed is not None and self._passed.check(grads):
            return grads
        results = self._check(grads, *self._saved)
        if not self._has_run:  # building a guard costs more than a check; many plans run once
            self._has_run = True
            return results
        kept = [type(grad) is torch.Tensor or grad is None for grad in grads]
        if all(kept) and all(one is other for one, other in zip(results, grads, strict=True)):
            self._passed = InputGuard(grads, (), (), None)
        return results


# nodes whose number of gradients depends on a size that is not part of the engine's cache key

UNBOUND = ("UnbindBackward0", "UnbindBackward0_copy")
SPLIT = ("SplitBackward0", "SplitBackward0_copy", "UnsafeSplitBackward0")


def of_its_pieces(split: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of a split, so that it receives one gradient for each piece of the current
    forward."""

    def run(grads: Sequence[Grad], needs: Any, dim: int, kind: Any, sizes: Sequence[int], each: int) -> Any:
        count = max(1, int(-(-sizes[dim] // each))) if each else 1
        return split([*grads, *[None] * count][:count], needs, dim, kind, sizes, each)

    return run


def _as_long(grad: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Fit to `sizes` the gradient from a backward of `unbind` that was made for another number of pieces: cut
    off extra pieces, which nothing uses, or append zeros."""
    for dim, (size, wanted) in enumerate(zip(grad.shape, sizes, strict=True)):
        if size > wanted:
            return grad.narrow(dim, 0, wanted)
        if size < wanted:
            more = grad.new_zeros(()).expand(*grad.shape[:dim], wanted - size, *grad.shape[dim + 1 :])
            return torch.cat([grad, more], dim)
    return grad


# The gradient of an in-place operation on a view: what runs before and after the operation's own backward. It
# follows ``CopySlices::apply_impl`` in ``torch/csrc/autograd/functions/tensor.cpp``.


@without_torch_functions
def prologue(grad: Grad, base: Geometry, view: Geometry) -> tuple[Grad, Grad, Grad]:
    """Copy the base's gradient and take the part under the view out of it.

    Args:
        grad: the gradient of the base after the operation, with the base's sizes; None if undefined.
        base: sizes, strides and storage offset (in elements) of the base.
        view: the same for the view.

    Returns:
        The copy, its part under the view (an alias of the copy), and a contiguous clone of that part.
    """
    if grad is None:
        return None, None, None
    result = grad.new_empty_strided(tuple(base[0]), tuple(base[1]))
    result.copy_(grad)
    part = result.as_strided(tuple(view[0]), tuple(view[1]), view[2] - base[2])
    return result, part, part.clone(memory_format=torch.contiguous_format)


@without_torch_functions
def epilogue(needs: Sequence[bool], result: Grad, grads: Sequence[Grad], part: Grad) -> list[Grad]:
    """Write the operation's gradient into the part under the view.

    Args:
        needs: which of the operation's inputs need a gradient.
        result: the copy from `prologue`. It is changed in place through `part`.
        grads: what the operation's backward returned.
        part: from `prologue`.
    """
    if result is None:
        return [None] * len(needs)
    outputs = [grads[i] if needed else None for i, needed in enumerate(needs)]
    if outputs and outputs[0] is not None:
        assert part is not None
        part.copy_(outputs[0])
        outputs[0] = result
    return outputs


# calls of the graph of a compiled function


def tangent(read: Callable[[Any], list[Any]], zeros: Callable[[], torch.Tensor] | None) -> NodeFunction:
    """Make the function that brings an incoming gradient into the graph of a compiled function.

    Args:
        read: converts the gradient to the layout and class that the graph was traced for.
        zeros: makes the gradient that is used instead if user code returned None.
    """
    return NodeFunction("tangent", lambda grad: read(zeros() if grad is None and zeros else grad))


def operation(node: fx.Node) -> NodeFunction:
    """Make the function that runs one operation of the graph, under autocast as eager would.

    Inductor chooses the strides of the forward's saved tensors after the backward was traced, so a ``view``
    in the backward may have to copy. We call ``reshape`` instead.
    """
    target: Any = node.target
    if target is torch.ops.aten.view.default:
        target = torch.ops.aten.reshape.default
    name = str(getattr(target, "__name__", target))
    if not is_operator_overload(target) and not is_higher_order(target):
        return NodeFunction(name, target, (target,))
    traced = node.meta.get("val")
    dtype = traced.dtype if isinstance(traced, torch.Tensor) else None
    return NodeFunction(name, functools.partial(as_if_autocast, dtype, target), (target, dtype))
