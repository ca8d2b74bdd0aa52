"""The door to FX graphs: nodes, modules, boxed calls, and what an operator does besides computing.

In: FX graphs. Out: the same, changed or described.
"""

from retrograd._torch.fx.boxed_modules import boxed, copied
from retrograd._torch.fx.lazy_modules import lazily, lazy_graph_module
from retrograd._torch.fx.nodes import add_call, add_copy, add_placeholder
from retrograd._torch.fx.operators import (
    aliased_inputs,
    depends_on_data,
    fill_in_place,
    fills_with_random_numbers,
    has_effect,
    is_collective,
    is_higher_order,
    is_mutating,
    is_operator_overload,
    is_random,
    is_repeatable,
    is_wait,
    real_tensors,
    same_layout,
    schema_of,
)
from retrograd._torch.fx.strides import with_strides
