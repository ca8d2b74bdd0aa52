"""The door to a thread's modes and to random number generators.

In: nothing, or a graph that draws. Out: values to compare, and to put back.
"""

from retrograd._torch.state.rng import (
    draws_again,
    generator_states,
    insert_replay,
    restore_generator_states,
    seeds_and_states,
    with_generator_states,
)
from retrograd._torch.state.thread_modes import (
    KeptModes,
    ThreadModes,
    UserCode,
    are_modes_plain,
    as_if_autocast,
    autocast_off,
    compile_stance,
    modes_kept,
    torch_functions_off,
    undifferentiated,
    why_interpreted_now,
    why_not_capturable_now,
    without_torch_functions,
)
