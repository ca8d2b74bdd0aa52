"""The live path: captures one backward, schedules, lowers and runs it.

A call of ``backward`` enters at `contexts`; only `calls.gradients` writes ``.grad``.
"""
