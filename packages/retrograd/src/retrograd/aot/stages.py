"""All stages in one call.

In: a `CaptureState` and checked choices. Out: a `CompiledFunction`; the report and the logs are told what was
captured.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import fx

from retrograd.aot.capture import JointGraph, capture
from retrograd.aot.compile import compile_with
from retrograd.aot.kept import kept_partition
from retrograd.aot.partition import partition
from retrograd.aot.run.call import CompiledFunction
from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.events import AOT_LOGS
from retrograd.graph.capture_state import CaptureState
from retrograd.graph.partition import Partition
from retrograd.passes.aten import pass_named
from retrograd.report import GraphReport, Report


def run_stages(  # noqa: PLR0913 - what all stages together need
    state: CaptureState,
    config: Config,
    report: Report,
    *,
    split_at_leaf_grads: bool = False,
    lazy: bool = True,
    ended_by: str = "",
    graph: fx.GraphModule | None = None,
) -> CompiledFunction:
    """Capture, apply passes, partition and compile.

    Args:
        state: from ``aot.create_state``.
        config: the choices.
        report: receives what was compiled, and later what runs eagerly.
        split_at_leaf_grads: as in ``aot.capture``.
        lazy: as in ``aot.compile``.
        ended_by: as in `GraphReport`.
        graph: from Dynamo, if that is all that `state` calls; then partitions are kept on disk.

    Raises:
        Exception: whatever a stage raises.
    """
    kept = None if graph is None else kept_partition(state, graph, config)
    parts = None if kept is None else kept.read()
    if parts is None:
        parts = partition(_captured(state, config, split_at_leaf_grads), config.partitioner)
        if kept is not None:
            kept.write(parts)
    code = compile_with(parts, config, report, lazy)
    report.compiled(_described(parts, ended_by))
    if AOT_LOGS["graph"].isEnabledFor(logging.DEBUG):
        joint: Any = parts.joint
        AOT_LOGS["graph"].debug("%s\n%s", state.name, joint.print_readable())
    return code


def _captured(state: CaptureState, config: Config, split_at_leaf_grads: bool) -> JointGraph:
    is_exact = not find_backend(config.backend).traces
    joint = capture(
        state,
        single_region=config.single_region,
        split_at_leaf_grads=split_at_leaf_grads,
        sums_apart=is_exact,
    )
    return joint.apply(*config.passes) if config.passes else joint


def _described(partition: Partition, ended_by: str) -> GraphReport:
    forward, *backwards = [
        sum(node.op == "call_function" for node in gm.graph.nodes)
        for gm in (partition.forward, *(backward.gm for backward in partition.backwards))
    ]
    name, regions = partition.joint.state.name, len(partition.backwards)
    return GraphReport(name, forward, sum(backwards), regions, partition.saved_bytes, ended_by)


def find_named(config: Config) -> None:
    """Look up what the choices name.

    Raises:
        OptionError: there is no such backend or pass.
    """
    find_backend(config.backend)
    if config.backward is not None:
        find_backend(config.backward, "backward")
    for one in config.passes:
        if isinstance(one, str):
            pass_named(one)
