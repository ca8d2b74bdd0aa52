"""CUDA graphs: what a compiled function does on a device, recorded once and replayed where that is safe."""
