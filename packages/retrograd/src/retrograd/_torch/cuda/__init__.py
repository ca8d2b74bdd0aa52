"""The door to torch's CUDA graphs and streams.

In: functions and streams. Out: recordings that can be replayed, and waits between streams.
"""

from retrograd._torch.cuda.graphs import CudaRecorder
from retrograd._torch.cuda.streams import (
    in_order_with_streams,
    is_captured_beside_streams,
    side_streams,
    user_code_in_order,
)
