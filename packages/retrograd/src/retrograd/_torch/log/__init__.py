"""The door to torch's profiler and structured trace.

In: names and texts. Out: ranges and records, where somebody listens.
"""

from retrograd._torch.log.profiler import node_range, profiling, text_range
from retrograd._torch.log.structured_trace import CompileId, artifact, compiling, event, new_compile_id
