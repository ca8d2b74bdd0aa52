"""Keep a checkpoint that changes what it is given whole, where Dynamo would make it a part of its graph.

In: the checkpoints that Dynamo meets while it traces for a backend that wants eager kept. Out: a break of the
graph around those that change a tensor in place, as a batch norm in training changes its statistics. Eager
makes the change in the forward, and again when the backward runs the function once more; a graph makes it
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from retrograd._torch.dynamo.keep_eager import break_graph, keeps_eager
from retrograd._torch.patches import handle
from retrograd._torch.trace import changes_of, functional_mode, to_functional


def keep_checkpoints_whole() -> None:
    """From here on, for backends that want eager kept."""
    name = "torch._dynamo.variables.higher_order_ops:CheckpointHigherOrderVariable._call_function"
    handle(name, _call)


def _call(original: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """What Dynamo makes of ``checkpoint(...)``."""
    result = original(variable, tx, args, kwargs)
    if torch.is_grad_enabled() and keeps_eager(tx) and _changes_something(tx):
        why = "Eager makes the change again when the backward computes the function once more."
        break_graph("checkpoint that changes a tensor", "torch.utils.checkpoint.checkpoint", why)
    return result


def _changes_something(tx: Any) -> bool:
    """Whether the checkpoint that was traced last changes a tensor from outside."""
    graph: fx.Graph = tx.output.current_tracer.graph
    *_, node = graph.find_nodes(op="call_function", target=tag_activation_checkpoint)
    body, *inputs = node.args
    assert isinstance(body, fx.Node)
    assert isinstance(body.target, str)
    module = tx.output.nn_modules[body.target]
    examples = [arg.meta["example_value"] if isinstance(arg, fx.Node) else arg for arg in inputs]
    try:
        with tx.fake_mode, torch.no_grad(), functional_mode():
            given = [to_functional(one) if isinstance(one, torch.Tensor) else one for one in examples]
            fx.Interpreter(module).run(*given)
            changes = [changes_of(one) for one in given if isinstance(one, torch.Tensor)]
    except Exception:
        return False  # the backend will say what it cannot do
    return any(change.elements or change.shape or change.memory for change in changes)
