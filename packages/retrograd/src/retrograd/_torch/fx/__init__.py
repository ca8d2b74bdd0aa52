"""The door to FX graphs: nodes, modules, boxed calls, and what an operator does besides computing.

In: FX graphs. Out: the same, changed or described.
"""

from retrograd._torch.fx.graphs import (
    add_call,
    add_copy,
    add_placeholder,
    boxed,
    copied,
    copied_module,
    is_symbolic,
    lazily,
    lazy_graph_module,
    with_strides,
)
from retrograd._torch.fx.operators import (
    aliased_inputs,
    depends_on_data,
    draws_again,
    fill_in_place,
    fills_with_random_numbers,
    has_effect,
    insert_replay,
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
