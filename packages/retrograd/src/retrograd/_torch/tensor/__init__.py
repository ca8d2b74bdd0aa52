"""The door to what only torch's internals know of one tensor: its memory, and who refers to it.

In: tensors. Out: addresses, counts of references, layouts.
"""

from retrograd._torch.tensor.addresses import (
    addresses_are,
    holders,
    is_dense,
    layout_of,
    new_memory,
    reinterpreted,
    same_memory,
    storage_of,
    whole_of,
)
from retrograd._torch.tensor.ownership import (
    accumulate_in_node,
    clone_for_layout_contract,
    grad_of,
    graph_is_kept,
    obeys_layout_contract,
    set_grad,
    zeros_for_slot,
    zeros_of_slot,
)
