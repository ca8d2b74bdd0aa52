"""Inlines the graph of an AOT-compiled backward into a captured backward, node by node.

In: an `AotBackward`, what the engine hands over for it, and the graph that is being captured. Out: its
gradients as values, and the step in which each is ready. The steps are those of eager, which would have run
one autograd node for each forward operation and accumulated a parameter's gradient as soon as it was ready
(pytorch#144376). The engine hands over the hooks on the function's outputs first. We move them to where eager
would call them.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import fx

from retrograd.engine import tensors_on_context
from retrograd.errors import Refusal
from retrograd.graph.backward_graph import (
    AotBackward,
    AotCall,
    BuiltGradient,
    Call,
    CallKind,
    HookKind,
    InlinedCall,
    SourceKind,
    Tangent,
    call_of,
)
from retrograd.live.calls import gradients, user_code
from retrograd.live.capture.call_graph import CallGraph
from retrograd.live.inlined.undefined_grads import UndefinedGrads

Value = Any  # an FX node of the captured graph, a number, or None for an undefined gradient


_LateHook = Callable[[Value, int], fx.Node]


class CompiledFunctions:
    """Inlines compiled functions into one captured backward.

    Attributes:
        moved: for the result of a hook that was moved, the gradient before the hook.
    """

    def __init__(self, calls: CallGraph) -> None:
        self._calls = calls
        self._names: Counter[str] = Counter()
        self.moved: dict[Value, Value] = {}

    def lay_in(self, aot: AotBackward, call: AotCall) -> tuple[list[Value], InlinedCall]:
        """Inline the graph of the current node call.

        Returns:
            A gradient for each argument of the forward. The steps of the `InlinedCall` list edges of the
            node.

        Raises:
            Refusal: it must stay one call. Then the captured graph is unchanged.
        """
        if call.zeros is None and any(map(_may_be_undefined, call.grads)):
            raise Refusal("not-inlined", "a gradient may be undefined, and its sizes are not known")
        bare, late = self._without_tensor_hooks(call.grads)
        kept = self._tensors_on_context(call.context, aot.kept_on_context)
        objects = [self._calls.placeholder(SourceKind.HOOK, index) for index in call.objects]
        given = [*call.sizes, *call.saved, *kept, *objects]
        try:
            # If a graph occurs twice in one backward, the nodes of the second copy are named ``aot3_1_…``.
            number = self._names[aot.name]
            numbered = replace(aot, name=f"{aot.name}_{number}") if number else aot
            self._names[aot.name] += 1
            inlining = _Inlining(numbered, replace(call, grads=bare), given, late, self._calls)
            gradients, inlined = inlining.run()
        except Refusal:
            for node in kept:
                self._calls.graph.erase_node(node)
            raise
        self._erase_moved_hooks(call.grads, bare)
        tensors = (i for i, is_tensor in enumerate(call.wanted) if is_tensor)
        edges = {i: edge for edge, i in enumerate(tensors)}
        steps = tuple(tuple(edges[i] for i in step if i in edges) for step in inlined.steps)
        return gradients, replace(inlined, steps=steps)

    def _tensors_on_context(self, context: int, count: int) -> list[fx.Node]:
        if not count:
            return []
        args = (self._calls.placeholder(SourceKind.HOOK, context),)
        result = self._calls.call(CallKind.AOT_SAVED, tensors_on_context, args)
        return [node for node in self._calls.elements(result, [True] * count) if node is not None]

    # hooks

    def _without_tensor_hooks(self, grads: Sequence[Value]) -> tuple[list[Value], list[list[_LateHook]]]:
        """The gradients before their tensor hooks, and the hooks, which are called later."""
        bare: list[Value] = []
        late: list[list[_LateHook]] = []
        for grad in grads:
            chain: list[fx.Node] = []
            while grad in self._calls.before_hooks:
                chain.append(grad)
                grad = self._calls.before_hooks[grad]
            bare.append(grad)
            late.append([functools.partial(self._repeat_hook, node) for node in reversed(chain)])
        return bare, late

    def _repeat_hook(self, hook: fx.Node, value: Value, step: int) -> fx.Node:
        """Add a call of the hook that `hook` calls, with `value` instead of its gradient."""
        target: Any = hook.target if value is not None else user_code.call_hook_of_unreached
        call = replace(call_of(hook), step=step)
        return self._calls.tensor_hook(call, target, hook.args[0], value)  # type: ignore[arg-type]

    def _erase_moved_hooks(self, grads: Sequence[Value], bare: Sequence[Value]) -> None:
        for grad, before in zip(grads, bare, strict=True):
            while grad is not None and grad is not before:
                self.moved[grad] = before
                earlier = self._calls.before_hooks.pop(grad)
                self._calls.graph.erase_node(grad)
                grad = earlier


def _may_be_undefined(value: Any) -> bool:
    """Whether user code computed the gradient, so that it may be None at run time."""
    if value is None or value.op != "call_function":
        return False
    call = value.meta["call"]
    if call.hook in (HookKind.TENSOR_PRE, HookKind.RETAIN_GRAD):
        return _may_be_undefined(value.args[1])  # a tensor hook cannot make a gradient undefined
    if call.kind is CallKind.SUM:
        return all(map(_may_be_undefined, value.all_input_nodes))
    if call.kind is CallKind.PROJECT:
        source, i = value.args
        validated = source.meta["call"].kind is CallKind.VALIDATE
        return _may_be_undefined(source.args[0][i] if validated else source)
    return call.kind in (CallKind.FUNCTION, CallKind.CPP_FUNCTION, CallKind.HOOK)


class _Steps:
    """Says in which step of a compiled function each of its nodes runs. A step ends where a gradient is
    ready."""

    def __init__(self, aot: AotBackward, wanted: Sequence[bool], grads: UndefinedGrads) -> None:
        self._gradients, self._key = aot.gradients, grads.key
        keys = {
            min(map(grads.key.__getitem__, parts))
            for gradient, want in zip(aot.gradients, wanted, strict=True)
            if want and (parts := _parts(gradient)) and not all(map(grads.is_undefined, parts))
        }
        #: the keys at which the steps end, negated so that they ascend
        self._ends = sorted(-key for key in keys) or [0.0]
        self.last = len(self._ends) - 1

    def of(self, nodes: Iterable[fx.Node]) -> int:
        """The step in which the last of `nodes` runs."""
        return max(self._at(self._key[node]) for node in nodes)

    def of_users(self, node: fx.Node) -> int:
        """The step in which the hooks of an output run: eager calls them when it reaches the node that made
        the output."""
        keys = (self._key[user] for user in node.users if user in self._key and user.op != "output")
        return self._at(max(keys, default=float("-inf")))

    def _at(self, key: float) -> int:
        """The first step that does not end before the node with this key runs."""
        return min(bisect_left(self._ends, -key), self.last)

    def served(self, gradients: Sequence[Value]) -> tuple[tuple[int, ...], ...]:
        """For each step, the indices of the gradients that are ready after it. None in `gradients` is an
        undefined one."""
        steps: list[list[int]] = [[] for _ in self._ends]
        for i, (gradient, value) in enumerate(zip(self._gradients, gradients, strict=True)):
            steps[0 if value is None else self.of(_parts(gradient))].append(i)
        return tuple(tuple(self._like_edges(step)) for step in steps)

    def _like_edges(self, step: Sequence[int]) -> list[int]:
        """Sort the gradients of a step. Gradients that one eager node computes together arrive in the order
        of that node's inputs, which is the order of the operation's results. Others arrive in the order of
        the forward's arguments."""
        ordered = list(step)
        results: dict[fx.Node, list[int]] = {}
        for i in step:
            gradient = self._gradients[i]
            if isinstance(gradient, fx.Node) and gradient.target is operator.getitem:
                results.setdefault(gradient.args[0], []).append(i)  # type: ignore[arg-type]
        for joined in results.values():
            places = sorted(map(ordered.index, joined))
            by_result = sorted(joined, key=lambda i: self._gradients[i].args[1])  # type: ignore[union-attr,arg-type,return-value]
            for place, i in zip(places, by_result, strict=True):
                ordered[place] = i
        return ordered


class _Inlining:
    """One compiled function that is being inlined.

    Args:
        aot: its graph.
        call: what the engine handed over for it, with the gradients before their hooks.
        given: values for the sizes, saved tensors and opaque objects of the graph, in this order.
        hooks: for each output, the hooks on its gradient. They are called with the full gradient, where it
            is complete.
        calls: the backward that is being captured.

    Raises:
        Refusal: the graph does not fit the values. Then nothing has been added.
    """

    def __init__(
        self,
        aot: AotBackward,
        call: AotCall,
        given: Sequence[Value],
        hooks: Sequence[Sequence[_LateHook]],
        calls: CallGraph,
    ) -> None:
        self._aot, self._given, self._hooks, self._calls = aot, call, hooks, calls
        placeholders = [node for node in aot.graph.nodes if node.op == "placeholder"]
        first = len(given)
        rest = iter(placeholders[first:])
        self._tangents = [[*islice(rest, tangent.leaves)] for tangent in aot.tangents]
        if first + sum(map(len, self._tangents)) != len(placeholders):
            raise Refusal(
                "not-inlined", f"its graph takes {len(placeholders)} values, {first} saved ones arrived"
            )
        self._env: dict[fx.Node, Value] = dict(zip(placeholders, given, strict=False))
        undefined = [i for i, t in enumerate(aot.tangents) if call.grads[t.slot] is None]
        outputs = [_parts(g) for g, want in zip(aot.gradients, call.wanted, strict=True) if want]
        self._grads = UndefinedGrads(aot.graph, self._tangents, undefined, outputs)
        if self._grads.zeros and call.zeros is None:
            raise Refusal("not-inlined", "an undefined gradient has to be zeros of a size that is not known")
        self._owner = {node: i for i, nodes in enumerate(self._tangents) for node in nodes}
        self._whole: dict[fx.Node, list[Tangent]] = {}
        for tangent, total in zip(aot.tangents, self._grads.totals, strict=True):
            self._whole.setdefault(total, []).append(tangent)
        self._totals: dict[int, Value] = {}
        self._steps = _Steps(aot, call.wanted, self._grads)

    def run(self) -> tuple[list[Value], InlinedCall]:
        """Return one gradient for each argument of the forward. The steps of the `InlinedCall` list these
        arguments."""
        entering = {tangent.slot for tangent in self._aot.tangents}
        for slot, grad in enumerate(self._given.grads):
            if slot not in entering:
                self._hooked(grad, slot)
        for node in self._grads.order:
            self._arrive_for(node.all_input_nodes, self._steps.of([node]))
            self._env[node] = self._value(node)
            self._complete(node)
        self._arrive_for(self._owner, self._steps.last)
        gradients = [
            self._gradient(gradient) if want else None
            for gradient, want in zip(self._aot.gradients, self._given.wanted, strict=True)
        ]
        return gradients, InlinedCall(
            self._steps.served(gradients),
            self._totals,
            self._grads.consumed(),
            {tangent.slot: self._grads.consumed_for(i) for i, tangent in enumerate(self._aot.tangents)},
            self._grads.leaves_a_part(),
        )

    # tangents

    def _arrive_for(self, nodes: Iterable[fx.Node], step: int) -> None:
        """Bring in the tangents among `nodes`, when eager would reach the outputs that they belong to."""
        for node in nodes:
            if node in self._owner and node not in self._env:
                number = self._owner[node]
                self._arrive(number, step)
                self._complete(self._tangents[number][0])

    def _arrive(self, number: int, step: int) -> None:
        tangent, placeholders = self._aot.tangents[number], self._tangents[number]
        grad = self._given.grads[tangent.slot]
        make_zeros = self._given.zeros and self._given.zeros(tangent.slot)
        if tangent.leaves > 1:
            grad = self._hooked(grad, tangent.slot, step)
        if grad is None and number in self._grads.zeros:
            assert make_zeros is not None
            grad = self._call(gradients.NodeFunction("zeros", make_zeros), (), "zeros", step)
        if grad is None:
            self._env.update(dict.fromkeys(placeholders))
            return
        name = placeholders[0].name
        call = Call(CallKind.ATEN, self._calls.current, step=step, slot=tangent.slot)
        read = gradients.tangent(tangent.read, make_zeros)
        leaves = self._calls.add(call, read, (grad,), name=f"{self._aot.name}_{name}_read")
        for i, placeholder in enumerate(placeholders):
            self._env[placeholder] = self._call(operator.getitem, (leaves, i), placeholder.name, step)

    def _complete(self, node: fx.Node) -> None:
        """If `node` completes the gradient of an output, record the gradient and call the output's hooks."""
        for tangent in self._whole.get(node, ()):
            self._totals[tangent.slot] = self._env[node]
            if tangent.leaves == 1:
                self._env[node] = self._hooked(self._env[node], tangent.slot, self._steps.of_users(node))

    def _hooked(self, grad: Value, slot: int, step: int = 0) -> Value:
        """Call the hooks of an output. If its gradient is undefined, so is the result."""
        after = grad
        for hook in self._hooks[slot]:
            after = hook(after if grad is not None else None, step)
        return None if grad is None else after

    # nodes

    def _value(self, node: fx.Node) -> Value:
        if node in self._grads.stands_for:
            return self._env[self._grads.stands_for[node]]
        step = self._steps.of([node])
        if node.op == "get_attr":
            held = self._aot.constants[str(node.target)]
            return self._call(gradients.NodeFunction(str(node.target), lambda: held), (), node.name, step)
        self._fill(node.all_input_nodes, step)
        args = fx.map_arg(node.args, self._env.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._env.__getitem__)
        return self._call(gradients.operation(node), args, node.name, step, kwargs)

    def _fill(self, inputs: Iterable[fx.Node], step: int) -> None:
        """Make zeros for those of `inputs` that are undefined but needed."""
        for node in self._grads.filled.intersection(inputs):
            fake = node.meta["val"]
            make = functools.partial(torch.zeros, tuple(fake.shape), dtype=fake.dtype, device=fake.device)
            self._env[node] = self._call(
                gradients.NodeFunction("zeros", make), (), f"{node.name}_zeros", step
            )

    def _gradient(self, gradient: fx.Node | BuiltGradient | None) -> Value:
        parts = _parts(gradient)
        if all(map(self._grads.is_undefined, parts)):
            return None
        if isinstance(gradient, fx.Node):
            return self._env[gradient]
        assert gradient is not None
        step = self._steps.of(parts)
        self._fill(parts, step)
        values = tuple(self._env[part] if isinstance(part, fx.Node) else part for part in gradient.parts)
        return self._call(gradients.NodeFunction("subclass", gradient.build), values, "subclass", step)

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
    """The nodes that a gradient is built from."""
    if gradient is None:
        return []
    if isinstance(gradient, fx.Node):
        return [gradient]
    return [part for part in gradient.parts if isinstance(part, fx.Node)]
