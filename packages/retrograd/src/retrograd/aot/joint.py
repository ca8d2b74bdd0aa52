"""The joint graph as users hold it.

In: what ``aot.capture`` found. Out: the same with passes applied, checked after each.
"""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.graph.joint_graph import JointValues

__all__ = ["JointGraph"]


@dataclass(frozen=True, eq=False)
class JointGraph(JointValues):
    """A captured function: (primals, cotangents) -> (outputs, gradients).

    See `JointValues` for the attributes.
    """

    def print_readable(self) -> str:
        """The graph as code, with a role for every input and output."""
        roles = [f"#   {role}" for role in (*self.signature.inputs, *self.signature.outputs)]
        text: str = self.gm.print_readable(print_output=False)
        return "\n".join([*roles, text])
