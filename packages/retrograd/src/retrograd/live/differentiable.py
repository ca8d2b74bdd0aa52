"""Make the outputs of compiled code differentiable, as eager's would be; the derivative is compiled code too.

In: the outputs of a lowered function in grad mode, its arguments, and the `History` that eager would have
recorded. Out: the outputs with autograd nodes of ours. Such a node keeps the arguments, and its backward runs
the lowered vector-Jacobian product of the function; that one is run in grad mode if the backward is, and so is
differentiable by the same means, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from retrograd._torch.engine import EngineRequest, run_stock
from retrograd._torch.history import History, Part, saved_tensors_unseen
from retrograd._torch.tensors import graph_is_kept
from retrograd._torch.tracing import unread
from retrograd._torch.versions import modified_error

__all__ = ["Differentiable", "Runner"]

Boxed = Callable[[list[Any]], Sequence[Any]]
Grad = torch.Tensor | None


class Runner(Protocol):
    """Runs a boxed function, compiled where it can be."""

    def run(self, args: list[Any]) -> Sequence[Any]: ...


class Differentiable:
    """Gives autograd nodes to the outputs of one lowering.

    Args:
        fn: the function as captured.
        history: what eager records when it runs.
        runner: makes a `Runner` of a boxed function; the second argument says what it is.
    """

    def __init__(self, fn: Boxed, history: History, runner: Callable[[Boxed, str], Runner]) -> None:
        self._identical = history.identical
        self._leaves = history.leaves
        self._parts = tuple(_DifferentiablePart(fn, part, runner) for part in history.parts)

    def __call__(self, results: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """`results`, computed outside of grad mode from `args`, with eager's history."""
        outputs = [args[self._identical[o]] if o in self._identical else r for o, r in enumerate(results)]
        edges = self._edges(args)
        for part in self._parts:
            part.record(outputs, args, edges)
        return outputs

    def _edges(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """What stands for an argument among the inputs of our nodes.

        Our node passes all gradients on at once, but eager accumulates into each leaf as soon as its last
        contribution is there. With several leaves, an alias apiece, made in the reverse of that order, makes
        the engine accumulate in that order.
        """
        leaves = [i for i in self._leaves if args[i].is_leaf]
        return {i: args[i].view_as(args[i]) for i in leaves} if len(leaves) > 1 else {}


class _DifferentiablePart:
    """The outputs of one `Part`, and its derivatives: one for each set of outputs that has a cotangent."""

    def __init__(self, fn: Boxed, part: Part, runner: Callable[[Boxed, str], Runner]) -> None:
        self.part = part
        self._fn, self._runner = fn, runner
        self._derivatives: dict[tuple[int, ...], Runner] = {}

    def record(self, outputs: list[Any], args: Sequence[Any], edges: dict[int, torch.Tensor]) -> None:
        """Replace this part's tensors in `outputs` by differentiable ones."""
        kept = _Kept(self, list(args), {i: args[i] for i in self.part.saved})
        inputs = [edges.get(i, args[i]) for i in self.part.inputs]
        recorded = _CompiledSegment.apply(kept, [outputs[o] for o in self.part.outputs], *inputs)
        for o, tensor in zip(self.part.outputs, recorded, strict=True):
            outputs[o] = tensor

    def function(self, arity: int, given: tuple[int, ...]) -> Boxed:
        """The vector-Jacobian product, for cotangents of the outputs `given`."""
        return _vector_jacobian_product(self._fn, arity, self.part.inputs, given)

    def derivative(self, arity: int, given: tuple[int, ...]) -> Runner:
        """The same, lowered."""
        if given not in self._derivatives:
            name = f"derivative of outputs {', '.join(map(str, given))}"
            self._derivatives[given] = self._runner(self.function(arity, given), name)
        return self._derivatives[given]


@dataclass
class _Kept:
    """What a node of ours keeps besides what it saves with autograd: everything that eager does not save.

    Such an argument may be changed in place in eager; only if our derivative reads it must we refuse.
    """

    of: _DifferentiablePart
    args: list[Any]
    saved: dict[int, torch.Tensor]
    versions: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        for i in self.saved:
            self.args[i] = None
        self.versions = {
            i: value._version
            for i, value in enumerate(self.args)
            if isinstance(value, torch.Tensor) and not value.is_inference()
        }

    def arguments(self, saved: Sequence[torch.Tensor]) -> list[Any]:
        """The function's arguments again."""
        args = list(self.args)
        for i, tensor in zip(self.saved, saved, strict=True):
            args[i] = tensor
        return args

    def release(self) -> None:
        """Let go of what belongs to saved tensors that autograd has let go of."""
        if self.saved:
            self.args = [None if isinstance(value, torch.Tensor) else value for value in self.args]

    def refuse_changed(self, fn: Boxed, args: Sequence[Any]) -> None:
        """Raise if an argument that the derivative `fn` reads is not what it was."""
        changed = [i for i, version in self.versions.items() if args[i]._version != version]
        if changed:
            unused = unread(fn, args)
            for i in changed:
                if i not in unused:
                    raise RuntimeError(modified_error(args[i], self.versions[i]))


class _CompiledSegment(torch.autograd.Function):
    """The node; its forward only hands out what is computed already."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, results: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept.saved.values())
        ctx.kept = kept
        kept.saved = dict.fromkeys(kept.saved)  # type: ignore[arg-type]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Grad) -> Any:
        kept: _Kept = ctx.kept
        part = kept.of.part
        given = tuple(o for o, grad in zip(part.outputs, cotangents, strict=True) if grad is not None)
        if not given:
            return (None, None, *[None] * len(part.inputs))
        args = kept.arguments(ctx.saved_tensors)
        arity = len(args)
        args += [grad for grad in cotangents if grad is not None]
        kept.refuse_changed(kept.of.function(arity, given), args)
        if not graph_is_kept():
            kept.release()
        return (None, None, *kept.of.derivative(arity, given).run(args))


def _vector_jacobian_product(
    fn: Boxed, arity: int, wanted: tuple[int, ...], given: tuple[int, ...]
) -> Boxed:
    """A boxed function of `fn`'s arguments and one cotangent for each output in `given`; it returns the
    gradients of the arguments in `wanted`, and is differentiable in grad mode."""

    def run(args: list[Any]) -> Sequence[Grad]:
        differentiable = torch.is_grad_enabled()
        inputs, cotangents = _aliases(args[:arity], differentiable), args[arity:]
        args.clear()
        with torch.enable_grad():
            results = fn(list(inputs))
        request = EngineRequest(
            tuple(results[o] for o in given),
            tuple(cotangents),
            keep_graph=differentiable,
            create_graph=differentiable,
            inputs=tuple(inputs[i] for i in wanted),
            allow_unreachable=True,
        )
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
