"""The only door to private torch. Everything that may change between releases is reached through here.

Modules: `probe` (is this torch supported), `engine` (run the engine), `collect` (open the capture window),
`protocol` (the object that the engine talks to), `live_graph` (read the autograd graph), `queries`
(what user code asks about the running backward), `hooks` (hooks that come and go while a plan runs),
`tensors` (reference counts, gradients), `tracing`, `guards`, `inductor`.
"""
