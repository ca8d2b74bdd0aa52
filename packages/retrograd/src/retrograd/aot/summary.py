"""What a report says of a partition that was compiled."""

from __future__ import annotations

from retrograd.graph.partition import Partition
from retrograd.report import GraphReport


def summary(partition: Partition, ended_by: str = "") -> GraphReport:
    """The record of a partition; `ended_by` as in `GraphReport`."""
    forward, *backwards = [
        sum(node.op == "call_function" for node in gm.graph.nodes)
        for gm in (partition.forward, *(backward.gm for backward in partition.backwards))
    ]
    name, regions = partition.joint.state.name, len(partition.backwards)
    return GraphReport(name, forward, sum(backwards), regions, partition.saved_bytes, ended_by)
