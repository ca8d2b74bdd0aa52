"""Passes over a joint graph of ATen operators: ``pass(gm, example_inputs, **kw) -> gm``.

Each has a file, named for its effect. `run_passes` applies them in order and checks the laws of the joint
graph after each. A pass that changes results calls ``gm.recompile()`` itself. The others leave that to
`run_passes`, because the old code still computes the right results.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from retrograd.errors import OptionError, PassError, VerificationError, name_of
from retrograd.graph.joint import JointSignature, output_kinds, verify_joint
from retrograd.passes.aten.dead_code import remove_dead_code
from retrograd.passes.aten.equal_calls import merge_equal_calls

#: A pass, ``pass(gm, example_inputs) -> gm``. It may change `gm` or return another module.
JointPass = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]
#: A pass with keyword arguments, which `functools.partial` must bind first.
AnyPass = Callable[..., fx.GraphModule]


@dataclass(frozen=True)
class PassReport:
    """What one pass did.

    Attributes:
        name: of the pass.
        seconds: how long it ran, without the checks after it.
        change: by operator, the change in the number of calls, if it is not 0.
    """

    name: str
    seconds: float
    change: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        change = ", ".join(f"{count:+d} {name}" for name, count in sorted(self.change.items()))
        return f"{self.name}: {1000 * self.seconds:.1f} ms, {change or 'the same operators'}"


def run_passes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    passes: Sequence[JointPass],
    earlier: Sequence[str] = (),
) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    """Apply `passes` in order.

    The returned module is recompiled. The module that a pass receives may still have its old code.

    Args:
        gm: a joint graph with a `JointSignature` in ``meta["signature"]``. Passes may change it.
        example_inputs: the second argument of each pass.
        passes: callables. Bind their keyword arguments with `functools.partial`.
        earlier: names of passes that were applied before; errors list them.

    Raises:
        PassError: a pass raised (its error is the cause), or did not return a graph module.
        VerificationError: the graph broke a law of joint graphs after a pass.
    """
    signature = gm.meta.get("signature")
    if not isinstance(signature, JointSignature):
        text = "gm.meta has no signature, which says what the graph's inputs and outputs mean"
        way_out = "give it a joint graph (retrograd.aot.capture), and keep gm.meta in passes before it"
        raise PassError.because("no-signature", text, "aot.apply", way_out=way_out)
    reports: list[PassReport] = []
    done = list(earlier)
    for one in passes:
        name = pass_name(one)
        kinds, counts = output_kinds(gm.graph), operator_counts(gm.graph)
        start = time.perf_counter()
        try:
            gm = one(gm, example_inputs)
        except Exception as error:
            raise _failed(name, done, error) from error
        seconds = time.perf_counter() - start
        if not isinstance(gm, fx.GraphModule):
            raise _failed(name, done, TypeError(f"it returned {type(gm).__name__}, not a GraphModule"))
        done.append(name)
        if gm.meta.setdefault("signature", signature) != signature:
            text = "the pass gave the graph another signature"
            stage = f"aot.apply, after passes [{', '.join(done)}]"
            way_out = "a pass changes the graph; what its inputs and outputs mean is fixed at capture"
            raise VerificationError.because("joint-signature", text, stage, way_out=way_out)
        verify_joint(gm, signature, "aot.apply", done, kinds)
        change = operator_counts(gm.graph)
        change.subtract(counts)
        reports.append(PassReport(name, seconds, {n: c for n, c in change.items() if c}))
    gm.recompile()
    return gm, tuple(reports)


def _failed(name: str, done: Sequence[str], error: Exception) -> PassError:
    after = f"after passes [{', '.join(done)}]" if done else "the first pass"
    way_out = "leave the pass out, or see the error that caused this one"
    node = ""
    if isinstance(error, PassError):
        way_out, node = error.reason.way_out or way_out, error.reason.node
        message = error.reason.text
    else:
        message = f"{type(error).__name__}: {error}"
    text = f"pass {name} failed: {message}"
    return PassError.because("pass-failed", text, f"aot.apply, {after}", node=node, way_out=way_out)


def pass_name(one: Any) -> str:
    """The name of a pass, for reports and errors."""
    while isinstance(one, functools.partial):
        one = one.func
    return name_of(one)


def operator_counts(graph: fx.Graph) -> Counter[str]:
    """How often each operator is called."""
    calls = (node for node in graph.nodes if node.op.startswith("call_"))
    return Counter(str(_named(node.target)) for node in calls)


def _named(target: Any) -> Any:
    return target if hasattr(target, "_schema") else getattr(target, "__name__", target)


#: Passes that preserve results bitwise, in the order in which they are applied.
NUMERICS_PRESERVING: tuple[JointPass, ...] = (remove_dead_code, merge_equal_calls)


def pass_named(name: str) -> JointPass:
    """The pass with this name.

    Raises:
        OptionError: there is none.
    """
    known = {pass_name(one): one for one in NUMERICS_PRESERVING}
    if name not in known:
        raise OptionError("passes", f"unknown pass {name!r}", f"one of {', '.join(known)}, or a callable")
    return known[name]
