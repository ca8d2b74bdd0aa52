"""Leave an operation that raises on fake tensors to Python, which raises eager's own error, in its time.

In: the nodes that Dynamo runs on fake tensors while it traces for a backend that wants eager kept. Out: a
break of the graph before a node that raises. So all that eager does before the error is done, and the
program gets the error that it may expect. With ``fullgraph`` Dynamo's own error stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import exc

from retrograd._torch.dynamo.tracing_for import break_graph, keeps_eager
from retrograd._torch.patches import handle
from retrograd._torch.releases import raised_on_fakes

_RAISED = raised_on_fakes(exc)


def leave_errors_to_eager() -> None:
    """From here on, for backends that want eager kept."""
    handle("torch._dynamo.utils:_get_fake_value_impl", _fake_value)


def _fake_value(original: Callable[..., Any], node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(node, tx, *args, **kwargs)
    except _RAISED as error:
        if tx.one_graph or not keeps_eager(tx):
            raise
        text = str(error).partition("\n\n")[0]
    return break_graph("operation that raises on fake tensors", str(node.target), text)
