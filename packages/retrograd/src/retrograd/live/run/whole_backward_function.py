"""All segments of a specialised plan as one function, apart from the accumulations.

In: the `PlanLayout` of a plan without opaque calls. Out: `JoinedSegments`: a function from a list of the
values that segments read to a list of the gradients, which neither reads nor writes anything else; and the
way back: a plan that calls a function of that shape and writes ``.grad``. Others may change the function in
between, for example record it as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from retrograd._torch.autograd import Collected
from retrograd.backends.base import Boxed
from retrograd.graph.backward_graph import Source, SourceKind
from retrograd.graph.schedule import Accumulation, OpaqueCall, Segment
from retrograd.live.run.generated_source import Code, PlanLayout, write


@dataclass(frozen=True)
class JoinedSegments:
    """The segments of one plan as one function.

    Attributes:
        takes: the placeholders of the plan whose values `run` takes, in order: saved tensors and parameters
            (the same memory in every backward), activations and incoming gradients.
        gives: what `run` returns, in order: the gradients that are accumulated, then the plan's outputs.
        run: takes a list of values, empties it, and returns a list. Its guards are the plan's: it is to be
            called with values that fit them.
        is_compiled: whether all of it is a backend's code.
    """

    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    run: Boxed
    is_compiled: bool
    _layout: PlanLayout

    def around(self, run: Boxed) -> PlanLayout:
        """The plan with `run` in place of the segments: what a `SpecialisedPlan` is made of.

        Args:
            run: as `JoinedSegments.run`. A gradient that `run` keeps a reference to is copied into ``.grad``,
                one to which it keeps none is stolen.
        """
        nodes = tuple(node for step in self._layout.schedule.segments for node in step.nodes)
        whole = Segment(nodes, self.takes, self.gives, worth_compiling=True)
        accumulations = [step for step in self._layout.schedule.steps if isinstance(step, Accumulation)]
        everything = tuple(range(len(self.takes)))
        code = Code(run, everything, (True,) * len(self.gives), None, is_compiled=True)
        return self._layout.with_steps([whole, *accumulations], [code])


def joined(layout: PlanLayout) -> JoinedSegments | None:
    """The segments of a plan as one function; None if something has to run between them, or if a segment
    asks a guard of its own."""
    steps, segments = layout.schedule.steps, layout.schedule.segments
    codes = [code for _, code in sorted(layout.codes.items())]
    if any(isinstance(step, OpaqueCall) for step in steps) or any(code.check is not None for code in codes):
        return None
    made = {node for step in segments for node in step.outputs}
    grads = [step.node.args[1] for step in steps if isinstance(step, Accumulation)]
    results = (node for node in (*grads, *layout.outputs) if isinstance(node, fx.Node) and node in made)
    gives = tuple(dict.fromkeys(results))
    takes = tuple(dict.fromkeys(node for step in segments for node in step.inputs if node not in made))
    inner = replace(
        layout,
        placeholders=[(node, Source(SourceKind.INPUT, i)) for i, node in enumerate(takes)],
        lengths={kind: len(takes) if kind is SourceKind.INPUT else 0 for kind in SourceKind},
        outputs=gives,
        guard=None,
    )
    function = write(inner.with_steps(segments, codes)).emit.function()

    def run(values: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = function(Collected(None, values, [], [], [], []), None, None, None)
        return results

    return JoinedSegments(takes, gives, run, all(code.is_compiled for code in codes), layout)
