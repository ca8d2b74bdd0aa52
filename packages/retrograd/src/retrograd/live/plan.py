"""Run a backward step by step.

In: a `BackwardGraph` in eager's order, and at run time what the engine collected. Out: the gradients that
``autograd.grad`` returns, and ``.grad`` written. Values are let go as soon as their last step has read them.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx

from retrograd._torch.collect import Collected
from retrograd._torch.hook_changes import HookChanges, watching
from retrograd._torch.thread_state import thread_state_kept
from retrograd._torch.versions import Versions
from retrograd.backends.base import Backend
from retrograd.backends.eager import EagerBackend
from retrograd.config import Config
from retrograd.events import counters
from retrograd.graph.backward_graph import BackwardGraph, SourceKind, call_of, source_of
from retrograd.graph.hook_kind import CallKind, HookKind
from retrograd.graph.report import BackwardReport
from retrograd.graph.schedule import Accumulation, OpaqueCall, Schedule, Segment
from retrograd.live.calls.gradients import accumulate_grad
from retrograd.live.calls.saved import ModifiedTensor
from retrograd.live.cut import cut
from retrograd.live.late_hooks import rest_with_changes
from retrograd.live.lower import SegmentRunner
from retrograd.live.running import RunningBackward

__all__ = ["Plan"]

Values = dict[fx.Node, Any]


class Plan:
    """The steps of one backward, with the code of its segments.

    Args:
        backward: in eager's order.
        config, backend: how segments are lowered.
    """

    def __init__(self, backward: BackwardGraph, config: Config, backend: Backend) -> None:
        counters["plans"] += 1
        self._backward = backward
        self.schedule: Schedule = cut(backward, _named_opaque(backward, config))
        self.report = BackwardReport(backward, self.schedule, backend.name)
        self._placeholders = tuple(backward.placeholders())
        self._outputs = backward.outputs()
        self._saved = _saved_tensors(backward) if self.schedule.opaque_calls else frozenset()
        number = itertools.count()
        tell = self.report.lowerings.append
        self._runners = tuple(
            SegmentRunner(step, next(number), config, backend, tell) if isinstance(step, Segment) else None
            for step in self.schedule.steps
        )

    @property
    def runs_user_code(self) -> bool:
        """Whether a step calls something that can look at the running backward."""
        return bool(self.schedule.opaque_calls)

    def run(self, call: Collected, running: RunningBackward) -> list[torch.Tensor | None]:
        """Run all steps.

        Args:
            call: what the engine collected; its lists are emptied.
            running: told which node call user code runs for.
        """
        self.report.runs += 1
        counters["runs"] += 1
        values = self._bind(call)
        versions = Versions({node: values[node] for node in self._saved})
        with watching() as changes:
            return self._steps(values, versions, running, changes)

    def _steps(
        self, values: Values, versions: Versions[fx.Node], running: RunningBackward, changes: HookChanges
    ) -> list[Any]:
        for number, (step, dying, runner) in enumerate(
            zip(self.schedule.steps, self.schedule.dying, self._runners, strict=True)
        ):
            if isinstance(step, Segment):
                assert runner is not None
                for error in versions.changed(step.inputs, values).values():
                    raise RuntimeError(error)
                args = [values.pop(node) if node in dying else values[node] for node in step.inputs]
                values.update(zip(step.outputs, runner.run(args), strict=True))
            elif isinstance(step, Accumulation):
                _accumulate(step, dying, values)
            else:
                running.enter(call_of(step.node).node_call)
                _call(step, dying, values, versions)
                if changes:
                    return self._rest(number, values, versions, running, changes)
        return [None if node is None else values[node] for node in self._outputs]

    def _rest(
        self,
        number: int,
        values: Values,
        versions: Versions[fx.Node],
        running: RunningBackward,
        changes: HookChanges,
    ) -> list[Any]:
        """Hooks came or went: lay out what is left anew, and interpret it."""
        done = self.schedule.steps[: number + 1]
        backward, rest = rest_with_changes(self._backward, done, values, running, changes)
        versions = versions.renamed(zip(values, rest, strict=False))
        values.clear()
        plan = Plan(backward, Config(backend="eager"), EagerBackend())
        return plan._steps(rest, versions, running, changes)

    def _bind(self, call: Collected) -> Values:
        """Placeholders to values; what nobody reads is let go at once."""
        lists: dict[SourceKind, list[Any]] = {
            SourceKind.INPUT: call.inputs,
            SourceKind.SIZE: call.sizes,
            SourceKind.SCALAR: call.scalars,
            SourceKind.HOOK: call.hooks,
            SourceKind.PACKED: call.packed,
        }
        values = {node: lists[source.kind][source.index] for node, source in self._placeholders if node.users}
        for items in lists.values():
            items.clear()
        return values


def _accumulate(step: Accumulation, dying: frozenset[fx.Node], values: Values) -> None:
    variable_node, grad_node, has_post_hooks = step.node.args
    variable = values[variable_node]  # type: ignore[index]
    # The list is the only reference to the gradient if this is its last use: then it may be stolen.
    box = [values.pop(grad_node) if grad_node in dying else values[grad_node]]  # type: ignore[arg-type,index]
    kept = bool(has_post_hooks) and grad_node in values and _only_for_post_hooks(step.node)
    accumulate_grad(variable, box, kept)
    for node in dying:
        values.pop(node, None)


def _only_for_post_hooks(accumulation: fx.Node) -> bool:
    """Whether the plan keeps the gradient for nothing but the post hooks of this AccumulateGrad node."""
    grad = accumulation.args[1]
    assert isinstance(grad, fx.Node)
    later = [user for user in grad.users if accumulation < user]
    own = call_of(accumulation).node_call
    return all(
        user.op == "call_function"
        and call_of(user).hook is HookKind.NODE_POST
        and call_of(user).node_call == own
        for user in later
    )


def _call(step: OpaqueCall, dying: frozenset[fx.Node], values: Values, versions: Versions[fx.Node]) -> None:
    counters["opaque_calls"] += 1
    read = values
    if call_of(step.node).kind is CallKind.FUNCTION:
        changed = versions.changed(step.node.all_input_nodes, values)
        read = (
            {**values, **{node: ModifiedTensor(error) for node, error in changed.items()}}
            if changed
            else values
        )
    args = [_argument(argument, read) for argument in step.node.args]
    del read
    for node in dying:
        values.pop(node, None)
    assert callable(step.node.target)
    with thread_state_kept():
        result = step.node.target(*args)
    if step.node not in dying:
        values[step.node] = result
    for node in step.projections:
        if node not in dying:
            values[node] = operator.getitem(result, node.args[1])


def _argument(argument: Any, values: Values) -> Any:
    """An FX argument with values for its nodes, in plain lists and tuples."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, list):
        return [_argument(item, values) for item in argument]
    if isinstance(argument, tuple):
        return tuple(_argument(item, values) for item in argument)
    return argument


def _saved_tensors(backward: BackwardGraph) -> frozenset[fx.Node]:
    """Placeholders that nodes read as saved tensors (not as incoming gradients, nor to write `.grad`)."""
    reads = {CallKind.NODE, CallKind.CPP_FUNCTION, CallKind.FUNCTION}
    return frozenset(
        value
        for node, call in backward.calls()
        if call.kind in reads
        for value in node.all_input_nodes
        if value.op == "placeholder" and source_of(value).kind is SourceKind.INPUT
    )


def _named_opaque(backward: BackwardGraph, config: Config) -> dict[fx.Node, str]:
    """Calls of the nodes that the user named in ``opaque=``."""
    return {
        node: "named in opaque="
        for node, call in backward.calls()
        if call.kind.is_functional and getattr(node.target, "__name__", "") in config.opaque
    }
