"""The only door to private torch. Everything that may change between releases is reached through here.

- is this torch one we know: `probe`
- running the engine: `engine` (request, gateway), `obstacles` (what cannot be collected), `collect` (the
  capture window), `protocol` (the object that the engine talks to), `graph_task` (run inside a backward of
  torch's own)
- reading it: `live_graph` (the autograd graph), `queries` (what user code asks about the running backward)
- user code's effects: `hooks`, `hook_changes` (hooks that come and go), `versions` (saved tensors changed in
  place), `thread_state` (modes left switched), `tensors` (references, layouts),
  `function_flags` (what a custom Function wants for undefined gradients)
- lowering: `tracing`, `guards`, `subclasses` and `subclass_metadata` (wrapper subclasses at the border of a
  segment), `boxed`, `inductor`
"""
