"""The hooks of DDP's reducer, written in C++: the engine does not hand over a graph with such hooks.

In: a backward that the engine has refused. Out: the reducers of its leaves are told by hooks in Python that a
gradient is ready, as DDP does itself for its mixed precision, and another attempt can succeed.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

from torch._subclasses import FakeTensorMode
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.engine.request import LiveBackward, edge_of, leaf_of
from retrograd.process import forgotten_by_reset
from retrograd.runtime.modes import without_torch_functions

#: What the engine says of such a graph.
DDP = "C++ DDP Reducer"

#: Parameters whose reducers we have found not to be replaceable.
_left_alone = WeakIdKeyDictionary()
forgotten_by_reset(_left_alone.clear)

#: The reducers whose hooks we have replaced. They stay replaced after ``reset``.
_replaced: weakref.WeakSet[Any] = weakref.WeakSet()


@without_torch_functions
def replace_cpp_hooks(backward: LiveBackward, refused: Exception) -> bool:
    """Replace the C++ hooks of reducers on leaves of `backward`, if that is why the engine has `refused` it.
    Gives whether there were any. We leave them alone if we cannot tell which parameters a reducer has, or
    which hooks of one node come first."""
    if DDP not in str(refused):
        return False
    leaves = [leaf_of(node.handle) for node in backward.asked_graph.nodes]
    leaves = [leaf for leaf in leaves if isinstance(leaf, Parameter)]
    if all(leaf in _left_alone for leaf in leaves):
        return False
    ours, found = {*map(id, leaves)}, []
    for module in gc.get_objects():
        # A module without a logger is still being made, or could not be made.
        if issubclass(type(module), DistributedDataParallel) and getattr(module, "logger", None) is not None:
            is_ours = not ours.isdisjoint(map(id, module._module_parameters))
            if is_ours and module.reducer not in _replaced:
                found.append((module.reducer, _parameters_of(module)))
    if not found or not _replace(found):
        _left_alone.update(dict.fromkeys(leaves))
        return False
    return True


def _parameters_of(module: Any) -> list[Any]:
    """The parameters of the reducer of `module` by index. It knows those that required grad when `module` was
    made; the list is empty if these are not the ones that do now."""
    every = module._module_parameters
    asking = [one for one in every if one.requires_grad]
    if len(asking) == len(every):
        return asking if len(every) == module._get_ddp_logging_data()["num_parameter_tensors"] else []
    buckets: list[Any] = []
    with suppress(RuntimeError), FakeTensorMode(allow_non_fake_inputs=True):  # raised for sparse gradients
        buckets = module.reducer._get_zeros_like_grad_buckets()
    known = {id(one) for bucket in buckets for one in bucket.parameters()}
    return asking if known == {*map(id, asking)} else []


def _replace(found: list[tuple[Any, list[Any]]]) -> bool:
    """Replace the hooks of reducers, given with their parameters, unless other hooks share their nodes."""
    handles = []
    for reducer, parameters in found:
        for index, parameter in enumerate(parameters):
            ready = partial(_ready, weakref.ref(reducer), index)
            handles.append(edge_of(parameter)[0].register_hook(ready))
    if not all(parameters for _, parameters in found) or any(len(h.hooks_dict_ref()) > 1 for h in handles):
        for handle in handles:
            handle.remove()
        return False
    for reducer, _ in found:
        reducer._remove_autograd_hooks()
        _replaced.add(reducer)
    return True


def _ready(reducer: weakref.ref[Any], index: int, *_: Any) -> None:
    """Tell the reducer that the gradient of this parameter has been accumulated."""
    alive = reducer()
    if alive is not None:
        alive._autograd_hook(index)
