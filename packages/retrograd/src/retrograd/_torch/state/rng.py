"""Random numbers that are drawn in the forward and again, the same, in the backward; generators as they were.

In: a graph and a call that draws; or the devices of a function. Out: nodes that keep the generator's state;
states.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from retrograd._torch.fx import real_tensors


def insert_replay(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Replace a call that draws random numbers by one that also keeps the generator's state.

    Returns:
        The state, what the call gives (which is read in place of `node`), and a call that gives it again.
    """
    draw: tuple[Any, ...] = (node.target, *node.args)
    with graph.inserting_before(node):
        both = graph.call_function(run_and_save_rng_state, draw, dict(node.kwargs))
        state = graph.call_function(operator.getitem, (both, 0))
        value = graph.call_function(operator.getitem, (both, 1))
        again = graph.call_function(run_with_rng_state, (state, *draw), dict(node.kwargs))
    for made in (both, value, again):
        made.meta = dict(node.meta)
    value.name, again.name = f"{node.name}_drawn", f"{node.name}_again"
    state.meta["val"] = _fake_state(node)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    return state, value, again


def draws_again(graph: fx.Graph) -> bool:
    """Whether numbers are drawn in it from a state that was kept."""
    return any(node.target is run_with_rng_state for node in graph.nodes)


def _fake_state(node: fx.Node) -> torch.Tensor:
    """A fake of the state of the generator that a call draws from."""
    value = node.meta["val"]
    while isinstance(value, (tuple, list)):
        value = value[0]
    with real_tensors():
        cuda = value.device.type == "cuda" and torch.cuda.is_available()
        size = (torch.cuda.get_rng_state() if cuda else torch.random.get_rng_state()).numel()
    with value.fake_mode:
        return torch.empty(size, dtype=torch.uint8)


def generator_states(devices: Iterable[torch.device]) -> dict[torch.device, Any]:
    """The states of the default generators of these devices."""
    states: dict[torch.device, Any] = {}
    for device in devices:
        states[device] = (
            torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()
        )
    return states


def seeds_and_states() -> tuple[Any, ...]:
    """What the default generators are at, to be compared: the CPU's state, and the seed of CUDA in use."""
    seeds = torch.cuda.initial_seed() if torch.cuda.is_initialized() else None
    with real_tensors():
        return bytes(torch.random.get_rng_state().numpy()), seeds


def restore_generator_states(states: dict[torch.device, Any]) -> None:
    """Put generators back into states from `generator_states`."""
    _set(states)


@contextmanager
def with_generator_states(states: dict[torch.device, Any]) -> Iterator[None]:
    """Inside, the default generators are in `states`; afterwards as they were before."""
    before = generator_states(states)
    try:
        _set(states)
        yield
    finally:
        _set(before)


def _set(states: dict[torch.device, Any]) -> None:
    for device, state in states.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.random.set_rng_state(state)
