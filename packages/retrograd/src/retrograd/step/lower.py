"""Give the graph of a whole step to a backend.

In: a `StepGraph` and a backend. Out: a boxed callable that takes the graph's inputs.
"""

from __future__ import annotations

from retrograd._torch.joint_tracing import decomposed
from retrograd.backends.base import Backend, Boxed, Half
from retrograd.backends.eager import EagerBackend
from retrograd.events import counters
from retrograd.step.plan import StepGraph

__all__ = ["lower"]


def lower(backend: Backend, step: StepGraph) -> Boxed:
    """Compile the graph.

    Raises:
        Exception: whatever the backend raises.
    """
    half = Half(is_inference=True, visible=len(step.gm.graph.output_node().args[0]))  # type: ignore[arg-type]
    counters["step_compiles"] += 1
    return backend.compile(step.gm, step.examples, half)
