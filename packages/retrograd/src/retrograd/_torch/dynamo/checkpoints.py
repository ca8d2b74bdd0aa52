"""Keep a checkpoint whole that cannot be repeated, where Dynamo would make it a part of its graph.

In: the checkpoints that Dynamo meets while it traces for a backend that wants eager kept. Out: a break of the
graph around those that change a tensor in place, as a batch norm in training changes its statistics, and
around those that draw random numbers without ``preserve_rng_state``. When eager's backward runs the function
once more, it makes the change again, and draws other numbers; a graph has one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd._torch.dynamo.keep_eager import break_graph, keeps_eager
from retrograd._torch.patches import handle
from retrograd._torch.trace import any_changed, functional_mode, to_functional


def keep_checkpoints_whole() -> None:
    """From here on, for backends that want eager kept."""
    name = "torch._dynamo.variables.higher_order_ops:CheckpointHigherOrderVariable._call_function"
    handle(name, _call)


def _call(original: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """What Dynamo makes of ``checkpoint(...)``."""
    result = original(variable, tx, args, kwargs)
    if torch.is_grad_enabled() and keeps_eager(tx) and (why := _why_not_repeatable(tx)) is not None:
        break_graph("checkpoint that cannot be repeated", "torch.utils.checkpoint.checkpoint", why)
    return result


def _why_not_repeatable(tx: Any) -> str | None:
    """What the checkpoint that was traced last does otherwise when it runs again; None if nothing."""
    graph: fx.Graph = tx.output.current_tracer.graph
    *_, node = graph.find_nodes(op="call_function", target=tag_activation_checkpoint)
    body, *inputs = node.args
    assert isinstance(body, fx.Node)
    assert isinstance(body.target, str)
    module = tx.output.nn_modules[body.target]
    examples = [arg.meta["example_value"] if isinstance(arg, fx.Node) else arg for arg in inputs]
    watch = _Draws()
    try:
        with tx.fake_mode, torch.no_grad(), functional_mode(), watch:
            given = [to_functional(one) if isinstance(one, torch.Tensor) else one for one in examples]
            fx.Interpreter(module).run(*given)
            is_changed = any_changed(given)
    except Exception:
        return None  # the backend will say what it cannot do
    if is_changed:
        return "It changes a tensor, and changes it again when the backward computes it once more."
    if watch.count and not node.kwargs.get("preserve_rng_state", True):
        return "It draws other random numbers when the backward computes it once more."
    return None


class _Draws(TorchDispatchMode):
    """Counts the calls that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
