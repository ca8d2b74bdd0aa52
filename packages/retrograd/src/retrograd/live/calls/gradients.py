"""Calls without user code: nodes, operations of a compiled function's own graph, sums, and ``.grad``.

In: ``(grads, *saved)`` for a node, the gradient of a view's base for ``CopySlices``, values for an operation.
Out: gradients.

In: gradients (None is undefined). Out: their sum, or the ``.grad`` of one leaf or of many: this is the one
place that writes it. The rules are those of ``InputBuffer::add`` (``input_buffer.cpp``) and
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

#: references to a gradient that may be stolen: a local variable, and `getrefcount`'s argument. The rule is
#: ``is_tensor_stealable`` in ``torch/csrc/autograd/variable.h``.
_OWN_REFERENCES = 2


Grad = torch.Tensor | None
Geometry = tuple[Sequence[int], Sequence[int], int]

# adding gradients


@without_torch_functions
def sum_gradients(*grads: Grad) -> Grad:
    """The sum in the order given; undefined gradients count for nothing. Sparse ones are added to dense
    ones, never the other way round."""
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
    """Write a gradient into ``variable.grad`` with eager's rules: steal it, or add it to one that is surely
    laid out as it should be; everything else is done by torch's own node.

    Args:
        variable: a leaf.
        box: the gradient. It is taken out of the list, so that only this function refers to it: a gradient
            with another reference is copied, not stolen.
        kept_for_post_hooks: whether the plan refers to the gradient too, to show it to the node's post hooks.
            Eager does the same, and steals it nevertheless.
    """
    grad = box.pop()
    if grad is None or not variable.requires_grad:
        return
    asked = variable.grad_dtype
    if asked is not variable.dtype and asked is not None and grad.dtype is not asked:
        grad = grad.to(asked)
    existing = grad_of(variable)
    if existing is None:
        # Asked here, not in a function of its own: a call to Python holds one more reference where Dynamo's
        # evaluation of frames is installed.
        others = getrefcount(grad) - _OWN_REFERENCES - int(kept_for_post_hooks)
        is_ours = others <= 0 and grad._use_count() <= 1  # type: ignore[attr-defined]
        if is_ours and not torch.is_grad_enabled() and _take_over(variable, grad):
            return
        if not is_ours and not torch.is_grad_enabled():
            grad = grad.clone()  # torch's node counts references, and expects one more for each kind of hook
    elif not torch.is_grad_enabled() and _is_laid_out(existing, variable):
        existing += grad
        return
    accumulate_in_node(variable, grad)


accumulate_grad = without_torch_functions(accumulate_quietly)
accumulate_grad.__name__ = accumulate_grad.__qualname__ = "accumulate_grad"


def _is_laid_out(total: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether a dense ``.grad`` has the layout that it owes, so that torch gives no warning."""
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (total, variable)):
        return False
    strides = total.stride()
    if variable.is_contiguous() and strides == variable.stride():  # the common case, quickly
        return 0 not in strides
    return obeys_layout_contract(total, variable)


def _take_over(variable: torch.Tensor, grad: torch.Tensor) -> bool:
    """Make a gradient without other owners the ``.grad``; whether eager does so too. Python refuses one whose
    size, dtype or layout differs from the leaf's; eager's C++ does not."""
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
    """Accumulations that follow one another in a plan, with no user code between them.

    Plain cases are decided here with few calls into torch, and additions are made by one ``_foreach_add_``.
    Everything else is left to `accumulate_grad`. What was plain is remembered: one guard in C++ then says
    that it still is.
    """

    def __init__(self) -> None:
        self._pairs: InputGuard | None = None
        self._totals: InputGuard | None = None
        #: whether each pair of leaf and gradient is plain, as long as `_pairs` holds.
        self._fitting: list[bool] = []
        self._has_run = False

    def __call__(self, variables: Sequence[torch.Tensor], grads: list[Grad]) -> None:
        """Write ``.grad`` of each of `variables` with eager's rules.

        Args:
            variables: leaves.
            grads: one gradient each. The list is emptied, so that a gradient with no other reference may be
                stolen.
        """
        with torch_functions_off():
            is_plain = self._has_run and not torch.is_grad_enabled() and is_layout_enforced()
            self._has_run = True
            if is_plain and self._are_as_before(variables, grads):
                self._write(variables, grads)
            else:
                _one_by_one(variables, grads)

    def _are_as_before(self, variables: Sequence[torch.Tensor], grads: Sequence[Grad]) -> bool:
        """Whether it is known which pairs are plain: the gradient has the layout that its ``.grad`` owes."""
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
        """Whether all are plain, and have the layout that they owe: torch gives no warning then."""
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
    """Whether a plain gradient has the sizes, dtype and layout that its plain leaf asks for."""
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
    """Whether it is the conjugate or the negative of what is in its memory, or must not be changed."""
    return tensor is not None and (is_lazy(tensor) or tensor.is_inference())


def _are_disjoint(totals: Sequence[Grad], grads: Sequence[Grad]) -> bool:
    """Whether no two share memory: devices other than the CPU may add them at the same time."""
    tensors = [tensor for tensor in (*totals, *grads) if tensor is not None]
    if all(tensor.is_cpu for tensor in tensors):
        return True
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    return all(start + size <= following for (start, size), (following, _) in pairwise(spans))


# built-in nodes


class NodeFunction(functools.partial[Any]):
    """A function under the name of a node: the closure that the engine gave for it, or one of ours. It is
    called from C.

    Attributes:
        structure_key: equal for two that compute the same, and name the same node in their errors.
    """

    __name__: str
    __qualname__: str
    structure_key: tuple[Hashable, ...]

    def __new__(cls, name: str, fn: Callable[..., Any], key: tuple[Hashable, ...] | None = None) -> Self:
        """Name the function; it is compared by `key`, by default by its name and itself."""
        self = super().__new__(cls, of_its_pieces(fn) if name in SPLIT else fn)
        self.__name__ = self.__qualname__ = name
        self.__module__ = "autograd"
        self.structure_key = key or (fn, name)
        return self

    def __repr__(self) -> str:
        return f"autograd.{self.__name__}"


class OutputCheck(NodeFunction):
    """Checks the gradients that a node returned against what their consumers expect, and converts them."""

    #: how the closure begins an error. It does not know the node, which eager names.
    _NAMELESS = "[Compiled Autograd Tracing:]"

    _node: str

    def __new__(cls, fn: Callable[..., Any], node: str) -> Self:
        """Name the engine's closure `fn`, and the node, for its error."""
        self = super().__new__(cls, "validate_outputs", fn, (fn, node))
        self._node = node
        return self

    def __call__(self, grads: Sequence[Any], *saved: Any) -> Sequence[Any]:
        """The gradients as their consumers take them.

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
    """An `OutputCheck` in a plan that runs again: where gradients are like those that it returned as they
    were, one guard in C++ says so.

    Args:
        check: the check. saved: its other arguments, the same in each run.
    """

    def __init__(self, check: OutputCheck, saved: Sequence[Any]) -> None:
        self._check, self._saved = check, saved
        self._passed: InputGuard | None = None
        self._has_run = False

    def __call__(self, grads: Sequence[Any]) -> Sequence[Any]:
        """The gradients as their consumers take them."""
        if self._passed is not None and self._passed.check(grads):
            return grads
        results = self._check(grads, *self._saved)
        if not self._has_run:  # a guard takes longer than the check: many plans run only once
            self._has_run = True
            return results
        kept = [type(grad) is torch.Tensor or grad is None for grad in grads]
        if all(kept) and all(one is other for one, other in zip(results, grads, strict=True)):
            self._passed = InputGuard(grads, (), (), None)
        return results


# nodes whose number of inputs depends on a size, which the engine's key for a structure does not hold

UNBOUND = ("UnbindBackward0", "UnbindBackward0_copy")
SPLIT = ("SplitBackward0", "SplitBackward0_copy", "UnsafeSplitBackward0")


def of_its_pieces(split: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a split, given as many gradients as the forward of this call had pieces."""

    def run(grads: Sequence[Grad], needs: Any, dim: int, kind: Any, sizes: Sequence[int], each: int) -> Any:
        count = max(1, int(-(-sizes[dim] // each))) if each else 1
        return split([*grads, *[None] * count][:count], needs, dim, kind, sizes, each)

    return run


def _as_long(grad: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """What a backward of `unbind` returned for another number of pieces, none of which is used that `sizes`
    does not have."""
    for dim, (size, wanted) in enumerate(zip(grad.shape, sizes, strict=True)):
        if size > wanted:
            return grad.narrow(dim, 0, wanted)
        if size < wanted:
            more = grad.new_zeros(()).expand(*grad.shape[:dim], wanted - size, *grad.shape[dim + 1 :])
            return torch.cat([grad, more], dim)
    return grad


# the gradient of an in-place operation on a view: what stands around the operation's own backward. The rule
# is ``CopySlices::apply_impl`` in ``torch/csrc/autograd/functions/tensor.cpp``.


@without_torch_functions
def prologue(grad: Grad, base: Geometry, view: Geometry) -> tuple[Grad, Grad, Grad]:
    """Copy the base's gradient and cut out the part under the view.

    Args:
        grad: gradient of the base after the operation, of the base's sizes; None if undefined.
        base, view: sizes, strides and storage offset (in elements).

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
    """Put the operation's gradient in place of the part under the view.

    Args:
        needs: which of the operation's inputs want a gradient.
        result, part: from `prologue`; `result` is changed in place through `part`.
        grads: what the operation's backward returned.
    """
    if result is None:
        return [None] * len(needs)
    outputs = [grads[i] if needed else None for i, needed in enumerate(needs)]
    if outputs and outputs[0] is not None:
        assert part is not None
        part.copy_(outputs[0])
        outputs[0] = result
    return outputs


# the calls of a compiled function's own graph


def tangent(read: Callable[[Any], list[Any]], zeros: Callable[[], torch.Tensor] | None) -> NodeFunction:
    """Takes a gradient in.

    Args:
        read: brings it into the layout and class that the graph was traced for.
        zeros: makes the gradient that is taken instead if user code returned None.
    """
    return NodeFunction("tangent", lambda grad: read(zeros() if grad is None and zeros else grad))


def operation(node: fx.Node) -> NodeFunction:
    """Runs an operation of the graph, under autocast as eager would.

    Inductor gives the forward's saved tensors strides of its own choice. The backward was traced before that,
    so a ``view`` in it may have to copy.
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
