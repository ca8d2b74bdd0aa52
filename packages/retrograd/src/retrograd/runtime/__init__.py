"""What torch holds while a program runs: tensors and their memory, thread modes, streams, the profiler."""
