"""All stages in one call.

In: a `CaptureState` and checked choices. Out: a `CompiledFunction`; the report and the logs are told what was
captured.
"""

from __future__ import annotations

import logging

from retrograd.aot.capture import capture
from retrograd.aot.compile import compile_with
from retrograd.aot.partition import partition
from retrograd.aot.run.call import CompiledFunction
from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.events import AOT_LOGS
from retrograd.graph.joint_graph import CaptureState, Partition
from retrograd.passes.aten import pass_named
from retrograd.report import GraphReport, Report


def run_stages(
    state: CaptureState,
    config: Config,
    report: Report,
    *,
    split_at_leaf_grads: bool = False,
    lazy: bool = True,
    ended_by: str = "",
) -> CompiledFunction:
    """Capture, apply passes, partition and compile.

    Args:
        state: from ``aot.create_state``.
        config: the choices.
        report: receives what was compiled, and later what runs eagerly.
        split_at_leaf_grads: as in ``aot.capture``.
        lazy: as in ``aot.compile``.
        ended_by: as in `GraphReport`.

    Raises:
        Exception: whatever a stage raises.
    """
    is_exact = not find_backend(config.backend).traces
    joint = capture(
        state,
        single_region=config.single_region,
        split_at_leaf_grads=split_at_leaf_grads,
        sums_apart=is_exact,
    )
    if config.passes:
        joint = joint.apply(*config.passes)
    parts = partition(joint, config.partitioner)
    code = compile_with(parts, config, report, lazy)
    report.compiled(_described(parts, ended_by))
    if AOT_LOGS["graph"].isEnabledFor(logging.DEBUG):
        AOT_LOGS["graph"].debug("%s\n%s", state.name, joint.print_readable())
    return code


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
