"""Lay the graph of an AOT-compiled backward into a captured backward, node by node.

In: an `AotBackward`, the values that the engine handed over for it, and the graph under way. Out: its
gradients as values, and in which step of it each is ready. Steps are those of eager: it would have run one
autograd node for each forward operation, and accumulated a parameter's gradient as soon as it was there
(pytorch#144376).
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd.errors import Refusal
from retrograd.graph.aot_backward import AotBackward, BuiltGradient, InlinedCall
from retrograd.graph.backward_graph import Call, CallKind
from retrograd.live.calls import aten
from retrograd.live.capture.call_graph import CallGraph
from retrograd.live.inlined.undefined_grads import TangentFlow

Value = Any  # an FX node of the captured graph, a number, or None for an undefined gradient


@dataclass(frozen=True)
class Arriving:
    """What the engine hands over at one compiled function.

    Attributes:
        grads: gradients of the forward's outputs; None is undefined.
        placeholders: values for the sizes, saved tensors and opaque objects of the graph, in its order.
        hooks: for each output, the hooks on its gradient, not called yet: they are called with the whole
            gradient, where it is complete.
        wanted: for each input of the forward, whether its gradient is.
        zeros: makes zeros in place of the gradient of an output; None if their sizes are not known.
    """

    grads: Sequence[Value]
    placeholders: Sequence[Value]
    hooks: Sequence[Sequence[Callable[[Value, int], Value]]]
    wanted: Sequence[bool]
    zeros: Callable[[int], Callable[[], torch.Tensor]] | None


def inline(aot: AotBackward, arriving: Arriving, calls: CallGraph) -> tuple[list[Value], InlinedCall]:
    """Lay `aot` in, as calls of the current node call of `calls`.

    Returns:
        One gradient per argument of the forward; in the `InlinedCall` steps speak of these arguments.

    Raises:
        Refusal: the graph and what arrives do not fit together; nothing has been added then.
    """
    return _Inlining(aot, arriving, calls).run()


class _Inlining:
    def __init__(self, aot: AotBackward, arriving: Arriving, calls: CallGraph) -> None:
        self._aot, self._arriving, self._calls = aot, arriving, calls
        placeholders = [node for node in aot.graph.nodes if node.op == "placeholder"]
        first = len(arriving.placeholders)
        self._tangents = list(_groups(placeholders[first:], [tangent.leaves for tangent in aot.tangents]))
        if first + sum(map(len, self._tangents)) != len(placeholders):
            raise Refusal(
                "not-inlined", f"its graph takes {len(placeholders)} values, {first} saved ones arrived"
            )
        self._env: dict[fx.Node, Value] = dict(zip(placeholders, arriving.placeholders, strict=False))
        undefined = [i for i, t in enumerate(aot.tangents) if arriving.grads[t.slot] is None]
        outputs = [_parts(g) for g, want in zip(aot.gradients, arriving.wanted, strict=True) if want]
        self._flow = TangentFlow(aot.graph, self._tangents, undefined, outputs)
        if self._flow.zeros and arriving.zeros is None:
            raise Refusal("not-inlined", "an undefined gradient has to be zeros of a size that is not known")
        self._owner = {node: i for i, nodes in enumerate(self._tangents) for node in nodes}
        self._whole: dict[fx.Node, list[int]] = {}
        for number, total in enumerate(self._flow.totals):
            self._whole.setdefault(total, []).append(number)
        self._ends = self._readiness()

    def _readiness(self) -> list[float]:
        """After which keys a gradient is ready, negated, so that they ascend: the ends of the steps."""
        keys = {
            min(map(self._flow.key.__getitem__, parts))
            for gradient, want in zip(self._aot.gradients, self._arriving.wanted, strict=True)
            if want and (parts := _parts(gradient)) and not all(map(self._flow.is_undefined, parts))
        }
        return sorted(-key for key in keys) or [0.0]

    def _step(self, node: fx.Node) -> int:
        return self._step_at(self._flow.key[node])

    def _step_at(self, key: float) -> int:
        """The step in which what has `key` runs: the first that does not end before it."""
        return min(bisect_left(self._ends, -key), len(self._ends) - 1)

    def run(self) -> tuple[list[Value], InlinedCall]:
        totals: dict[int, Value] = {}
        entering = {tangent.slot for tangent in self._aot.tangents}
        for slot, grad in enumerate(self._arriving.grads):
            if slot not in entering:
                self._hooked(grad, slot)
        for node in self._flow.order:
            self._arrive_for(node.all_input_nodes, self._step(node), totals)
            self._env[node] = self._value(node)
            self._complete(node, totals)
        self._arrive_for(self._owner, len(self._ends) - 1, totals)
        gradients = [
            self._gradient(gradient) if want else None
            for gradient, want in zip(self._aot.gradients, self._arriving.wanted, strict=True)
        ]
        return gradients, InlinedCall(
            self._steps(gradients),
            totals,
            self._flow.consumed(),
            {tangent.slot: self._flow.consumed_for(i) for i, tangent in enumerate(self._aot.tangents)},
            self._flow.leaves_a_part(),
        )

    # tangents

    def _arrive_for(self, nodes: Iterable[fx.Node], step: int, totals: dict[int, Value]) -> None:
        """Take those tangents in that are among `nodes`: eager does so when it comes to their outputs."""
        for node in nodes:
            if node in self._owner and node not in self._env:
                number = self._owner[node]
                self._arrive(number, step)
                self._complete(self._tangents[number][0], totals)

    def _arrive(self, number: int, step: int) -> None:
        tangent, placeholders = self._aot.tangents[number], self._tangents[number]
        grad = self._arriving.grads[tangent.slot]
        if tangent.leaves > 1:
            grad = self._hooked(grad, tangent.slot, step)
        if grad is None and number in self._flow.zeros:
            assert self._arriving.zeros is not None
            grad = self._call(aten.Named("zeros", self._arriving.zeros(tangent.slot)), (), "zeros", step)
        if grad is None:
            self._env.update(dict.fromkeys(placeholders))
            return
        name = placeholders[0].name
        make_zeros = self._arriving.zeros and self._arriving.zeros(tangent.slot)
        call = Call(CallKind.ATEN, self._calls.current, step=step, enters=tangent.slot)
        read = aten.tangent(tangent.read, make_zeros)
        leaves = self._calls.add(call, read, (grad,), name=f"{self._aot.name}_{name}_read")
        for i, placeholder in enumerate(placeholders):
            self._env[placeholder] = self._call(operator.getitem, (leaves, i), placeholder.name, step)

    def _complete(self, node: fx.Node, totals: dict[int, Value]) -> None:
        """If the gradient of an output is whole with `node`, note it and call its hooks."""
        for number in self._whole.get(node, ()):
            slot = self._aot.tangents[number].slot
            totals[slot] = self._env[node]
            if self._aot.tangents[number].leaves == 1:
                self._env[node] = self._hooked(self._env[node], slot, self._step_of_users(node))

    def _hooked(self, grad: Value, slot: int, step: int = 0) -> Value:
        """Call the hooks of an output; what they make of an undefined gradient is undefined."""
        after = grad
        for hook in self._arriving.hooks[slot]:
            after = hook(after if grad is not None else None, step)
        return None if grad is None else after

    def _step_of_users(self, node: fx.Node) -> int:
        """Eager calls the hooks of an output when it comes to the node that made it."""
        keys = [self._flow.key[user] for user in node.users if user in self._flow.key and user.op != "output"]
        return self._step_at(max(keys, default=float("-inf")))

    # nodes

    def _value(self, node: fx.Node) -> Value:
        if node in self._flow.stands_for:
            return self._env[self._flow.stands_for[node]]
        step = self._step(node)
        if node.op == "get_attr":
            constant = aten.constant(str(node.target), self._aot.constants[str(node.target)])
            return self._call(constant, (), node.name, step)
        for empty in self._flow.filled.intersection(node.all_input_nodes):
            self._env[empty] = self._zeros_like(empty, step)
        args = fx.map_arg(node.args, self._env.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._env.__getitem__)
        return self._call(aten.operation(node), args, node.name, step, kwargs)

    def _zeros_like(self, node: fx.Node, step: int) -> Value:
        fake = node.meta["val"]
        make = functools.partial(torch.zeros, tuple(fake.shape), dtype=fake.dtype, device=fake.device)
        return self._call(aten.Named("zeros", make), (), f"{node.name}_zeros", step)

    def _gradient(self, gradient: fx.Node | BuiltGradient | None) -> Value:
        parts = _parts(gradient)
        if all(map(self._flow.is_undefined, parts)):
            return None
        if isinstance(gradient, fx.Node):
            return self._env[gradient]
        assert gradient is not None
        for empty in self._flow.filled.intersection(parts):
            self._env[empty] = self._zeros_like(empty, self._last_step(parts))
        values = tuple(self._env[part] if isinstance(part, fx.Node) else part for part in gradient.parts)
        return self._call(aten.Named("subclass", gradient.build), values, "subclass", self._last_step(parts))

    def _last_step(self, parts: Sequence[fx.Node]) -> int:
        return max(map(self._step, parts))

    def _steps(self, gradients: Sequence[Value]) -> tuple[tuple[int, ...], ...]:
        steps: list[list[int]] = [[] for _ in self._ends]
        for i, (gradient, value) in enumerate(zip(self._aot.gradients, gradients, strict=True)):
            steps[0 if value is None else self._last_step(_parts(gradient))].append(i)
        return tuple(tuple(self._like_edges(step)) for step in steps)

    def _like_edges(self, step: Sequence[int]) -> list[int]:
        """Gradients that one eager node makes together arrive in the order of its own inputs: that of the
        results of one operation; otherwise that in which the forward took them."""
        ordered = list(step)
        results: dict[fx.Node, list[int]] = {}
        for i in step:
            gradient = self._aot.gradients[i]
            if isinstance(gradient, fx.Node) and gradient.target is operator.getitem:
                results.setdefault(gradient.args[0], []).append(i)  # type: ignore[arg-type]
        for together in results.values():
            places = sorted(map(ordered.index, together))
            by_result = sorted(together, key=lambda i: self._aot.gradients[i].args[1])  # type: ignore[union-attr,arg-type,return-value]
            for place, i in zip(places, by_result, strict=True):
                ordered[place] = i
        return ordered

    def _call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        name: str,
        step: int = 0,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        call = Call(CallKind.ATEN, self._calls.current, step=step)
        return self._calls.add(call, target, args, kwargs, f"{self._aot.name}_{name}")


def _parts(gradient: fx.Node | BuiltGradient | None) -> list[fx.Node]:
    """The nodes that a gradient is made of."""
    if gradient is None:
        return []
    if isinstance(gradient, fx.Node):
        return [gradient]
    return [part for part in gradient.parts if isinstance(part, fx.Node)]


def _groups(nodes: Sequence[fx.Node], sizes: Sequence[int]) -> Iterator[Sequence[fx.Node]]:
    first = 0
    for size in sizes:
        yield nodes[first : first + size]
        first += size
