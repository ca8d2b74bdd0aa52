"""What stands around the compiled function: settings, outputs, hooks, losses, and changes between the phases.

In: a draft and what is known of the outputs. Out: lines for `run(p)`.
"""
