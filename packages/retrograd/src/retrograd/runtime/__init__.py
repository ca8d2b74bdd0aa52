"""torch's state in a running program: tensors and their memory, thread modes, streams, the profiler."""
