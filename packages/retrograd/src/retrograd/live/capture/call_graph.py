"""Builds the FX graph of typed calls during capture.

In: the calls of the current node call, one by one. Out: FX nodes that carry their `Call`, and placeholders
that carry their `Source`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from retrograd.graph.backward_graph import Call, CallKind, HookKind, NodeCall, Source, SourceKind, call_of
from retrograd.graph.fx import add_call, add_placeholder

Value = fx.Node | None


class CallGraph:
    """A graph that is being captured.

    Attributes:
        graph: the FX graph.
        node_calls: the node calls so far; the last is the current one.
        before_hooks: for the result of a tensor hook, the gradient that the hook received.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.node_calls: list[NodeCall] = []
        self.before_hooks: dict[fx.Node, Value] = {}
        self._executed: set[int] = set()
        self._placeholders: dict[tuple[SourceKind, int], fx.Node] = {}
        self._last_placeholder: fx.Node | None = None

    @property
    def current(self) -> int:
        """Index of the current node call."""
        return self.node_calls[-1].index

    def execute(self) -> None:
        """Mark the current node call as executed. Other node calls only pass gradients to their hooks."""
        self._executed.add(self.current)

    def captured(self, value: Value) -> Value:
        """The value that ``autograd.grad`` returns for an input. If the input's node is also executed, it is
        the gradient before the tensor hooks (``Engine::evaluate_function`` captures it there), else the
        gradient after them."""
        while value in self.before_hooks and call_of(value).node_call in self._executed:
            value = self.before_hooks[value]
        return value

    def placeholder(self, kind: SourceKind, index: int) -> fx.Node:
        """The placeholder of one run-time argument. It is created at first use."""
        node = self._placeholders.get((kind, index))
        if node is None:
            after = self._last_placeholder
            with self.graph.inserting_after(after) if after else self.graph.inserting_before():
                node = add_placeholder(self.graph, f"{kind.value}_{index}")
            node.meta["source"] = Source(kind, index)
            self._placeholders[kind, index] = self._last_placeholder = node
        return node

    def add(
        self,
        call: Call,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """Add one call. `name` is the name of its FX node."""
        node = add_call(self.graph, target, args, kwargs, name)
        node.meta["call"] = call
        return node

    def call(
        self,
        kind: CallKind,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        hook: HookKind | None = None,
        note: str = "",
    ) -> fx.Node:
        """Add one call that belongs to the current node call."""
        return self.add(Call(kind, self.current, hook, note=note), target, args)

    def elements(self, result: fx.Node, wanted: Sequence[bool]) -> list[Value]:
        """The elements of a call's result; None for those that are not wanted."""
        call = Call(CallKind.PROJECT, call_of(result).node_call)
        return [
            self.add(call, operator.getitem, (result, i)) if want else None for i, want in enumerate(wanted)
        ]

    def tensor_hook(
        self, call: Call, target: Callable[..., Any], hook: fx.Node | int, grad: Value
    ) -> fx.Node:
        """Add the call of a hook on one gradient."""
        node = self.add(call, target, (hook, grad))
        self.before_hooks[node] = grad
        return node
