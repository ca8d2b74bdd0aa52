"""Staged AOTAutograd: capture a function as a joint graph, which you can change, compile or export.

>>> from retrograd import aot
>>> joint = aot.capture(aot.create_state(fn, args))
>>> fn = aot.compile(aot.partition(joint, "min_cut"), forward="inductor")

Every stage is a plain function from one frozen value to another. You may stop after any stage and continue
later.
"""

from __future__ import annotations

from retrograd.aot.compiler import compile
from retrograd.aot.graph_files import export, load
from retrograd.aot.joint_capture import JointGraph, capture
from retrograd.aot.partitioner import partition
from retrograd.aot.staged_function import AotFunction, AotModule, function, module
from retrograd.aot.state import create_state

__all__ = [
    "AotFunction",
    "AotModule",
    "JointGraph",
    "capture",
    "compile",
    "create_state",
    "export",
    "function",
    "load",
    "module",
    "partition",
]
