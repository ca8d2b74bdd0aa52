"""Inductor's passes for joint graphs, run where its cache can spare them.

In: a graph that Inductor is about to lower. Out: the graph after the passes that stock runs before it
partitions a joint graph. They run as the first of the passes on the graph that is lowered, so a graph that is
found in Inductor's cache on disk is not searched for patterns, and these are not even loaded: a second
process starts the sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomGraphPassType


class _JointPasses(CustomGraphPass):
    """The joint passes, then the pass that the user has set in this place."""

    def __init__(self, then: Any) -> None:
        self._then: Sequence[Any] = then if isinstance(then, (list, tuple)) else [then] if then else []

    def __call__(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        assert graph.owning_module is not None
        joint_graph_passes(graph.owning_module)
        for each in self._then:
            each(graph)

    def uuid(self) -> Any | None:
        """Tells Inductor's cache what runs here; None (nothing is cached) if the user's pass cannot."""
        theirs = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._then]
        return None if None in theirs else ("retrograd-joint-passes", torch.__version__, *map(repr, theirs))


def with_joint_passes() -> AbstractContextManager[Any]:
    """Inside, Inductor runs the joint passes on every graph that it lowers and does not find in its cache."""
    before: CustomGraphPassType = config.post_grad_custom_pre_pass
    return config.patch(post_grad_custom_pre_pass=_JointPasses(before))
