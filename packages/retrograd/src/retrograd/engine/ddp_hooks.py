"""The hooks of DDP's reducer, written in C++: the engine does not hand over a graph with such hooks.

In: a backward that the engine has refused. Out: the reducers of its leaves are told by hooks in Python that a
gradient is ready, as DDP does itself for its mixed precision, and another attempt can succeed.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.engine.request import LiveBackward, edge_of, leaf_of
from retrograd.process import forgotten_by_reset
from retrograd.runtime.modes import without_torch_functions

#: What the engine says of such a graph.
DDP = "C++ DDP Reducer"

#: The leaves whose reducers we have looked for.
_searched = WeakIdKeyDictionary()
forgotten_by_reset(_searched.clear)


@without_torch_functions
def replace_cpp_hooks(backward: LiveBackward, refused: Exception) -> bool:
    """Replace the C++ hooks of reducers on leaves of `backward`, if that is why the engine has `refused` it.
    Gives whether there were any. A reducer knows each parameter by its position only, so we leave it alone if
    parameters were frozen after wrapping."""
    leaves = [leaf for node in backward.asked_graph.nodes if (leaf := leaf_of(node.handle)) is not None]
    if DDP not in str(refused) or all(leaf in _searched for leaf in leaves):
        return False
    _searched.update(dict.fromkeys(leaves))
    found = False
    for module in gc.get_objects():
        if issubclass(type(module), DistributedDataParallel) and hasattr(module, "reducer"):
            parameters = [one for one in module._module_parameters if one.requires_grad]
            is_ours = not {*map(id, leaves)}.isdisjoint(map(id, parameters))
            if is_ours and len(parameters) == module._get_ddp_logging_data()["num_parameter_tensors"]:
                _replace(module.reducer, parameters)
                found = True
    return found


def _replace(reducer: Any, parameters: list[Any]) -> None:
    reducer._remove_autograd_hooks()
    for index, parameter in enumerate(parameters):
        registered = edge_of(parameter)[0].register_hook(partial(_ready, weakref.ref(reducer), index))
        # The reducer's hook is called before those that users have registered since.
        registered.hooks_dict_ref().move_to_end(registered.id, last=False)


def _ready(reducer: weakref.ref[Any], index: int, *_: Any) -> None:
    """Tell the reducer that the gradient of this parameter has been accumulated."""
    alive = reducer()
    if alive is not None:
        alive._autograd_hook(index)
