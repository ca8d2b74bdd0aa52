"""Make the outputs of compiled code differentiable, as eager's would be; the derivative is compiled code too.

In: the outputs of a lowered function in grad mode, its arguments, and the `History` that eager would have
recorded. Out: the outputs with autograd nodes of ours. Such a node keeps the arguments that derivatives read.
Its backward runs the function's vector-Jacobian product, which is lowered like any function, and in grad mode
is made differentiable in the same way, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from retrograd._torch.autograd import EngineRequest, run_stock, window
from retrograd._torch.trace import History, Part, arguments_read, saved_tensors_unseen
from retrograd.backends.base import Boxed

Grad = torch.Tensor | None


class Differentiable:
    """Gives autograd nodes to the outputs of one lowering.

    Raises:
        Exception: a derivative cannot be traced.
    """

    def __init__(
        self, fn: Boxed, args: Sequence[Any], history: History, runner: Callable[[Boxed, str], Boxed]
    ) -> None:
        self._identical = history.identical
        self._parts = tuple(_DifferentiablePart(fn, args, part, runner) for part in history.parts)
        self._leaves = _new_leaves(history, [args[i].is_leaf for i in history.leaves])

    def __call__(self, results: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """`results`, computed outside of grad mode from `args`, with eager's history."""
        outputs = [args[self._identical[o]] if o in self._identical else r for o, r in enumerate(results)]
        edges: dict[int, torch.Tensor] = {}
        for part, leaves in zip(self._parts, self._leaves, strict=True):
            edges.update((i, args[i].view_as(args[i])) for i in leaves)
            part.record(outputs, args, edges)
        return outputs


def _new_leaves(history: History, are_leaves: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """For each part, the leaves among its inputs that are inputs of no earlier part; none if there is one
    leaf.

    Our node is given such a leaf through an alias made just before the node. The node passes on all gradients
    at once, but eager accumulates into each leaf as soon as its last contribution is there. The engine first
    runs what was made last, so the aliases make it accumulate in eager's order.
    """
    leaves = [i for i, is_leaf in zip(history.leaves, are_leaves, strict=True) if is_leaf]
    if len(leaves) == 1:
        leaves = []
    new = []
    for part in history.parts:
        new.append(tuple(i for i in leaves if i in part.inputs))
        leaves = [i for i in leaves if i not in part.inputs]
    return tuple(new)


class _DifferentiablePart:
    """The outputs of one `Part`, and its derivatives: one for each set of outputs that has a cotangent."""

    def __init__(
        self, fn: Boxed, args: Sequence[Any], part: Part, runner: Callable[[Boxed, str], Boxed]
    ) -> None:
        self.part = part
        self._fn, self._runner = fn, runner
        self._derivatives: dict[tuple[int, ...], Boxed] = {}
        every = vector_jacobian_product(fn, len(args), part.inputs, part.outputs)
        self._first = _first_places(args)
        self._saved = [i for i in part.saved if self._first[i] == i]
        self._copied = [i for i in arguments_read(every, args) - part.saved if self._first[i] == i]

    def record(self, outputs: list[Any], args: Sequence[Any], edges: dict[int, torch.Tensor]) -> None:
        """Replace this part's tensors in `outputs` by differentiable ones."""
        inputs = [edges.get(i, args[i]) for i in self.part.inputs]
        kept = [args[i] for i in self._saved]
        # Eager would have saved something computed from these, so the user may change them in place.
        kept += [args[i].clone() for i in self._copied]
        results = [outputs[o] for o in self.part.outputs]
        tensors = _CompiledSegment.apply(self, results, kept, [*map(_described, args)], *inputs)
        for o, tensor in zip(self.part.outputs, tensors, strict=True):
            outputs[o] = tensor

    def arguments(self, saved: Sequence[torch.Tensor], described: Sequence[Any]) -> list[Any]:
        """The function's arguments again, with uninitialized memory for those that no derivative reads."""
        at_hand = dict(zip((*self._saved, *self._copied), saved, strict=True))
        for i, value in enumerate(described):
            if self._first[i] == i and i not in at_hand:
                at_hand[i] = value() if isinstance(value, partial) else value
        return [at_hand[i] for i in self._first]

    def derivative(self, arity: int, given: tuple[int, ...]) -> Boxed:
        """The lowered vector-Jacobian product, for cotangents of the outputs `given`."""
        if given not in self._derivatives:
            product = vector_jacobian_product(self._fn, arity, self.part.inputs, given)
            name = f"derivative of outputs {', '.join(map(str, given))}"
            self._derivatives[given] = self._runner(product, name)
        return self._derivatives[given]


def _first_places(args: Sequence[Any]) -> list[int]:
    """For each argument, the place where the same tensor is given first; its own place if it is no tensor."""
    tensors = {id(arg): i for i, arg in reversed(list(enumerate(args))) if isinstance(arg, torch.Tensor)}
    return [tensors[id(arg)] if isinstance(arg, torch.Tensor) else i for i, arg in enumerate(args)]


def _described(value: Any) -> Any:
    """What makes uninitialized memory in place of a tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return partial(
        torch.empty_strided,
        tuple(value.shape),
        tuple(value.stride()),
        dtype=value.dtype,
        device=value.device,
        requires_grad=value.requires_grad,
    )


#: of the arguments of the node's forward that are no inputs of the function.
_NO_GRADS = (None,) * 4


class _CompiledSegment(torch.autograd.Function):
    """The node. Its forward only returns what has been computed already."""

    @staticmethod
    def forward(
        ctx: Any,
        part: _DifferentiablePart,
        results: list[torch.Tensor],
        saved: list[torch.Tensor],
        arguments: list[Any],
        *inputs: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.part, ctx.arguments = part, arguments
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Grad) -> Any:
        part: _DifferentiablePart = ctx.part
        outputs = zip(part.part.outputs, cotangents, strict=True)
        given = tuple(o for o, grad in outputs if grad is not None)
        if not given:
            return (*_NO_GRADS, *[None] * len(part.part.inputs))
        args = part.arguments(ctx.saved_tensors, ctx.arguments)
        runner = part.derivative(len(args), given)
        return (*_NO_GRADS, *runner([*args, *(grad for grad in cotangents if grad is not None)]))


def vector_jacobian_product(fn: Boxed, arity: int, wanted: tuple[int, ...], given: tuple[int, ...]) -> Boxed:
    """A boxed function of `fn`'s arguments and one cotangent for each output in `given` (or none).

    It returns the gradients of the arguments in `wanted`, and is differentiable in grad mode.
    """

    def run(args: list[Any]) -> Sequence[Grad]:
        differentiable = torch.is_grad_enabled()
        inputs, cotangents = _aliases(args[:arity], differentiable), args[arity:]
        args.clear()
        with torch.enable_grad():
            results = fn(list(inputs))
        cotangents = cotangents or [torch.empty_like(results[o]) for o in given]
        request = EngineRequest(
            tuple(results[o] for o in given),
            tuple(cotangents),
            keep_graph=differentiable,
            create_graph=differentiable,
            inputs=tuple(inputs[i] for i in wanted),
            allow_unreachable=True,
        )
        with window.stock(), torch.autograd.set_multithreading_enabled(False):
            return run_stock(request)

    def unseen(args: list[Any]) -> Sequence[Grad]:
        if torch.is_grad_enabled():
            return run(args)
        with saved_tensors_unseen():
            return run(args)

    return unseen


def _aliases(values: Sequence[Any], differentiable: bool) -> list[Any]:
    """The values, with an alias for each tensor that requires grad: a derivative with respect to one argument
    must not go through the history of another."""
    aliases: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad and id(value) not in aliases:
            aliases[id(value)] = value.view_as(value) if differentiable else value.detach().requires_grad_()
    return [aliases.get(id(value), value) for value in values]
