"""The joint graph as users hold it.

In: what ``aot.capture`` found. Out: the same with passes applied, checked after each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from retrograd._torch.fx import copied_module
from retrograd.errors import PassError, Reason
from retrograd.graph.joint_graph import JointValues
from retrograd.graph.render import rendered
from retrograd.passes.aten import AnyPass, PassReport, pass_named, run_passes


@dataclass(frozen=True, eq=False)
class JointGraph(JointValues):
    """A captured function: (primals, cotangents) -> (outputs, gradients).

    See `JointValues` for the other attributes.

    Attributes:
        reports: what each pass that was applied did, in order.
    """

    reports: tuple[PassReport, ...] = ()

    def apply(self, *passes: AnyPass | str, texts: bool = False, **options: Any) -> JointGraph:
        """The joint graph with `passes` applied, in order; this one stays as it is.

        Args:
            passes: each is ``pass(gm, example_inputs, **options) -> gm`` and may change the `gm` that it is
                given; or the name of one of our own (``retrograd.passes.aten``).
            texts: whether the reports hold the graph as code before and after.
            options: keyword arguments of the pass; there must be only one then.

        Raises:
            PassError: a pass raised (its error is the cause), or returned no graph module.
            VerificationError: the graph broke a law of joint graphs after a pass; the text names the pass,
                the node, its role and the way out.
            ValueError: there is no pass of that name.
        """
        named = [pass_named(one) if isinstance(one, str) else one for one in passes]
        if options and len(named) != 1:
            raise _too_many(len(named), options)
        chosen = [functools.partial(one, **options) if options else one for one in named]
        earlier = [report.name for report in self.reports]
        gm, reports = run_passes(
            copied_module(self.gm), self.example_inputs, chosen, texts=texts, earlier=earlier
        )
        return replace(self, gm=gm, reports=(*self.reports, *reports))

    @property
    def example_inputs(self) -> tuple[Any, ...]:
        """Fake tensors and symbolic numbers like the primals and cotangents."""
        return tuple(node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder"))

    def print_readable(self, *, sources: bool = True) -> str:
        """The graph as code, each placeholder and each output with its role; it is returned, not printed.

        Args:
            sources: whether the lines of the forward's source stand where their calls begin.
        """
        return rendered(self.gm.graph, self.signature, sources)


def _too_many(count: int, options: dict[str, Any]) -> PassError:
    given = ", ".join(options)
    return PassError(
        Reason(
            "pass-options",
            f"keyword arguments ({given}) were given for {count} passes",
            "aot.apply",
            way_out="one apply for each pass, or functools.partial for its arguments",
        )
    )
