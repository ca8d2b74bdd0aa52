"""The hooks of DDP's reducer, written in C++: the engine does not hand over a graph with such hooks.

In: the reducers that DDP makes from now on, and the leaves of a backward. Out: the reducers of these leaves
are told by hooks in Python that a gradient is ready, as DDP does itself for its mixed precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from retrograd.engine.request import LiveBackward, edge_of, leaf_of
from retrograd.facts.patches import handle
from retrograd.runtime.modes import without_torch_functions

#: By reducer whose hooks are still in C++, its parameters: the reducer knows each by its position.
_parameters: weakref.WeakKeyDictionary[Any, Sequence[torch.Tensor]] = weakref.WeakKeyDictionary()


def _making(original: Callable[..., None], module: Any, parameters: Any, *args: Any, **options: Any) -> None:
    original(module, parameters, *args, **options)
    _parameters[module.reducer] = tuple(parameters)


handle("torch.nn.parallel.distributed:DistributedDataParallel._ddp_init_helper", _making)


@without_torch_functions
def replace_cpp_hooks(backward: LiveBackward) -> bool:
    """Replace the C++ hooks of reducers on leaves of `backward` by hooks in Python. Gives whether there were
    any. We leave a reducer alone if one of its parameters is frozen: its node cannot be found."""
    leaves = {id(leaf_of(node.handle)) for node in backward.asked_graph.nodes}
    found = [
        (reducer, parameters)
        for reducer, parameters in _parameters.items()
        if any(id(one) in leaves for one in parameters) and all(one.requires_grad for one in parameters)
    ]
    for reducer, parameters in found:
        del _parameters[reducer]
        reducer._remove_autograd_hooks()
        for index, parameter in enumerate(parameters):
            registered = edge_of(parameter)[0].register_hook(partial(_ready, weakref.ref(reducer), index))
            # The reducer's hook is called before those that users have registered since.
            registered.hooks_dict_ref().move_to_end(registered.id, last=False)
    return bool(found)


def _ready(reducer: weakref.ref[Any], index: int, *_: Any) -> None:
    """Tell the reducer that the gradient of this parameter has been accumulated."""
    alive = reducer()
    if alive is not None:
        alive._autograd_hook(index)
