"""The only door to private torch. Everything that may change between releases is reached through here.

Each sub-package is reached through its own ``__init__``, which says what goes in and what comes out:

- `autograd`: the engine, its compiler protocol, live graphs, nodes, hooks
- `trace`: fake tensors, functionalisation, the tracer, symbolic sizes and their guards
- `dynamo`: a backend's side of Dynamo, its guards and frames, code that stock compiled
- `inductor`: Inductor and torch's partitioners
- `facts`: tables of what torch does not tell of its operators, of what we replace and need, and of its faults

`fx`, `cuda` and `subclass` (tensors that wrap other tensors) are one file each. The other files at the top:
`patches` replaces attributes of torch, `probe` refuses a torch that lacks what we need, `releases` holds what
differs between the releases. `pytree` takes containers apart; `state`, `tensor` and `log` know of a thread's
modes, of tensors as memory, and of profiler and trace; `operators` knows where an operator comes from and
what it may raise, `handlers` which code of the user's catches errors, `folder` where compiled code lies.
"""
