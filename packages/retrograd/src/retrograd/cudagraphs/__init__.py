"""CUDA graphs: we record a compiled function's work on the device once, and replay it when that is safe."""
