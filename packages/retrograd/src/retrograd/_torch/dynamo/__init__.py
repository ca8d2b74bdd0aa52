"""The door to Dynamo: what it prepares for a backend, its guards, its frames, and the code it compiled.

In: the graphs and frames that Dynamo hands out. Out: fake inputs, more guards, and decisions about frames.
"""

from retrograd._torch.dynamo.compiled_forwards import watch_compiled_forwards
from retrograd._torch.dynamo.frames import (
    GraphInput,
    compiled_frames,
    fake_mode_for,
    fake_of_attribute,
    grad_mode_left,
    graph_inputs,
    guard_same,
    guard_what_dynamo_does_not,
    has_symbols,
    is_optimizer_code,
    left_by_backend,
    register_once,
    traced_in,
    user_error_behind,
    why_ended,
    why_not_as_given,
)
from retrograd._torch.dynamo.keep_eager import watch_dynamo
from retrograd._torch.dynamo.keep_whole import keep_calls_whole
from retrograd._torch.dynamo.pieces import kernels_of_small_piece
from retrograd._torch.dynamo.wrappers import keep_hooks_of_wrappers
