"""The door to Dynamo: what it prepares for a backend, its guards, its frames, and the code it compiled.

In: the graphs and frames that Dynamo hands out. Out: fake inputs, more guards, and decisions about frames.
"""

from retrograd._torch.dynamo.bridge import (
    GraphInput,
    fake_mode_for,
    fake_of_attribute,
    grad_mode_left,
    graph_inputs,
    guard_same,
    has_symbols,
    register_once,
    traced_in,
    why_ended,
    why_not_as_given,
)
from retrograd._torch.dynamo.compiled_forwards import watch_compiled_forwards
from retrograd._torch.dynamo.frames import (
    compiled_frames,
    guard_what_dynamo_does_not,
    is_optimizer_code,
    place_of,
    user_error_behind,
)
from retrograd._torch.dynamo.keep_eager import watch_dynamo
from retrograd._torch.dynamo.keep_whole import keep_calls_whole
