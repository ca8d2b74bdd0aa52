"""What Dynamo has prepared when it calls a backend: fake inputs, their mode, and the place for guards.

In: the graph and example inputs that a backend is called with. Out: `GraphInput` values with the fakes that
Dynamo traced with, so that no tensor is made fake a second time; guards, which Dynamo installs with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo import list_backends, register_backend
from torch._guards import DuplicateInputs, TracingContext, detect_fake_mode

from retrograd._torch.trace import hint_of, is_fake


@dataclass(frozen=True, eq=False)
class GraphInput:
    """One input of a graph that Dynamo made.

    Attributes:
        name: how the program reaches it (``L['x']``), or the placeholder's name.
        value: Dynamo's fake, a symbolic number, or a constant.
        given: the tensor itself, if Dynamo gave it; else `value`.
        source: Dynamo's source, for guards; None if there is none.
        is_parameter: whether it is an ``nn.Parameter``.
        is_static: whether Dynamo says that it stays the same from call to call.
    """

    name: str
    value: Any
    given: Any
    source: Any
    is_parameter: bool
    is_static: bool


def fake_mode_for(example_inputs: Sequence[Any]) -> Any:
    """The fake mode in whose name a backend is called; None if nobody compiles."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return detect_fake_mode(list(example_inputs))


def graph_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[GraphInput]:
    """The inputs of `gm`. A tensor that neither is fake nor has a fake of Dynamo's stays real."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [_graph_input(node, given) for node, given in zip(placeholders, example_inputs, strict=True)]


def _graph_input(node: fx.Node, given: Any) -> GraphInput:
    value = given
    if isinstance(given, torch.Tensor) and not is_fake(given):
        value = node.meta.get("example_value", given)
    argument = node.meta.get("grapharg")
    source = getattr(node, "_dynamo_source", None) or getattr(argument, "source", None)
    is_number = bool(getattr(argument, "pass_arg_as_tensor", False))  # the program's own value is no tensor
    marks = node.meta.get("tensor_dict") or {}
    return GraphInput(
        source.name if source is not None else node.name,
        value,
        given,
        None if is_number else source,
        isinstance(given, torch.nn.Parameter) or bool(getattr(given, "_is_param", False)),
        "_dynamo_static_input_type" in marks,
    )


def fake_of_attribute(mode: Any, tensor: torch.Tensor) -> Any:
    """The fake of a tensor that the graph itself holds; the same each time. Its sizes are static."""
    return tensor if is_fake(tensor) else mode.from_tensor(tensor, static_shapes=True)


def why_not_as_given(item: GraphInput) -> str | None:
    """What Dynamo's own trace changed of a fake, so that it no longer shows the input; None if nothing."""
    fake, given = item.value, item.given
    if not isinstance(given, torch.Tensor) or fake is given:
        return None
    if fake.dim() != given.dim() or fake.dtype != given.dtype or fake.device != given.device:
        return "its dimensions, dtype or device"
    if [*map(hint_of, fake.shape)] != [*map(hint_of, given.shape)]:
        return "its sizes"
    return None


def has_symbols(mode: Any) -> bool:
    """Whether the shape environment of `mode` knows symbolic sizes."""
    return mode.shape_env is not None and bool(mode.shape_env.var_to_range)


@contextmanager
def traced_in(mode: Any) -> Iterator[None]:
    """Torch's tracing context names `mode` inside.

    For its backends Dynamo prepares another mode with the same shape environment; both must not meet.
    """
    if TracingContext.try_get() is None:
        yield
        return
    with TracingContext.patch(fake_mode=mode):
        yield


def guard_same(first: GraphInput, second: GraphInput) -> None:
    """Dynamo is to compile again when the two are not the same tensor."""
    context = TracingContext.try_get()
    if context is not None and first.source is not None and second.source not in (None, first.source):
        guards: list[Any] = context.guards_context.aotautograd_guards
        guards.append(DuplicateInputs(first.source, second.source))


def why_ended(gm: fx.GraphModule) -> str:
    """Why Dynamo ended the graph where it did, and where; empty if nothing was left."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", True):
        return ""
    text = str(reason.reason).strip().splitlines()[0]
    frame = reason.user_stack[-1] if reason.user_stack else None
    return text if frame is None else f"{text} ({frame.filename}:{frame.lineno})"


def grad_mode_left(gm: fx.GraphModule) -> bool | None:
    """The grad mode that the graph leaves on; None if it does not switch it."""
    switches = [node for node in gm.graph.nodes if node.target is torch._C._set_grad_enabled]
    return bool(switches[-1].args[0]) if switches else None


def register_once(name: str, backend: Callable[..., Any]) -> None:
    """Make `backend` known to ``torch.compile``, unless an installed distribution has done so."""
    if name not in list_backends(exclude_tags=None):
        register_backend(backend, name)
