"""The only door to private torch. Everything that may change between releases is reached through here.

- is this torch one we know: `probe`
- running the engine: `engine` (request, gateway), `obstacles` (what cannot be collected), `window` (threads
  and forks take turns), `locks`, `collect` (what the engine hands over), `protocol` (the object that it talks
  to), `release` (free what chosen nodes saved), `graph_task` (run inside a backward of torch's own),
  `order_check` (is eager's order the one that was met before), `collector` (Python's, paused meanwhile)
- compiled forwards: `aot_functions` (the backward graphs that AOTAutograd left), `compiled_forwards` (their
  derivatives)
- reading it: `live_graph` (the autograd graph), `saved` (saved tensors with their history), `queries` (what
  user code asks about the running backward)
- reading ATen graphs: `operators` (what an operator does besides returning a value), `pytree` (nested
  containers)
- tracing a function with its backward: `joint_tracing`, `fakes` (inputs), `functional` (mutations and views
  as values), `wrappers` (wrapper subclasses, taken apart), `lifting` (tensors that were not given), `memory`
  (which tensors share it), `autograd_nodes` (called by hand), `effects` (calls chained by tokens),
  `checkpointing`, `interpret` (graphs that Dynamo made), `lazy_modules` (code written when asked for)
- dividing a joint graph: `min_cut` (torch's partitioners), `rng` (random numbers drawn again)
- running what was made of it: `function_entry` (an ``autograd.Function``, applied), `ambient` (modes around a
  call), `saved_hooks` (around a call), `leaf_hooks` (waiting on inputs), `dynamo_bridge` (a backend's side of
  Dynamo)
- keeping it: `expressions` (symbolic sizes as data), `symbols` (where they can be read), `cache_folder`
  (where compiled code lies)
- telling: `structured_trace` (for tlparse), `profiling` (ranges), `provenance` (which autograd node an ATen
  node comes from)
- other settings of torch: `stance` (may we compile), `stock_compiler` (stock compiled autograd beside ours)
- user code's effects: `hooks`, `hook_changes` (hooks that come and go), `versions` (saved tensors changed in
  place), `thread_state` (modes left switched), `streams` (CUDA streams beside the current one), `tensors`
  (references, layouts), `layout_warning`, `function_flags` (what a custom Function wants for undefined
  gradients)
- lowering: `tracing`, `history` (what eager would record of a segment), `guards`, `subclasses` and
  `subclass_metadata` (wrapper subclasses at the border of a segment), `boxed`, `inductor`,
  `inductor_passes`, `inductor_start` (what it loads, before it is needed), `triton_threads`, `strides` (of
  its results)
- recording it: `cuda_graphs`, `addresses` (tensors as memory)
- tracing a training step: `stand_ins` (real tensors, and what torch is called with instead),
  `trace_surroundings` (the engine and optimizers meanwhile), `scalars` (numbers in a trace),
  `number_tensors` (a graph that has tensors for them), `autograd_reach` (what a backward used up),
  `settings` (what a trace depends on)
- making graphs at little cost: `fx_nodes`
"""
