"""Second stage: a `CaptureState` becomes a `JointGraph`.

In: a function and fake inputs. Out: one graph that computes the outputs and, from cotangents, the gradients;
the call's in-place mutations; and which outputs share memory with other tensors.

We run the function once, functionalised, with autograd on. Then we divide the resulting autograd graph into
regions and run each region by hand, so that the joint graph sums gradients as eager does. Some inputs must
enter in another way: a non-leaf that is changed in place, and inputs that share memory if one of them is
changed. If the run shows such an input, we repeat it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from retrograd.aot.extraction import leaves_sharing
from retrograd.aot.modules import FlatCall
from retrograd.aot.trace.analyse import Analysis
from retrograd.aot.trace.backward import differentiate
from retrograd.aot.trace.enter import Inputs, InputWrapping
from retrograd.aot.trace.structure import Structure
from retrograd.config import SWITCH, checked
from retrograd.engine import outside_of_graph_task
from retrograd.errors import CaptureError, PassError, Refusal, RetrogradError, first_line
from retrograd.facts import fact
from retrograd.graph.fx import copied_module, replace_by_equal
from retrograd.graph.joint import Boundary, Cotangent, JointSignature, Output, rendered
from retrograd.graph.joint_graph import CaptureOptions, CaptureState, JointValues
from retrograd.passes.aten import AnyPass, PassReport, pass_named, run_passes
from retrograd.passes.aten.dead_code import remove_dead_code
from retrograd.passes.aten.equal_calls import merge_equal_calls
from retrograd.runtime import pytree
from retrograd.runtime.modes import Autocast, autocast_off
from retrograd.trace import (
    FirstRun,
    JointTracer,
    OtherCotangent,
    checks_known,
    functional_mode,
    is_fake,
    make_graph,
    read_anew,
    refuse_lost_checks,
)


@dataclass(frozen=True, eq=False)
class JointGraph(JointValues):
    """A captured function: (primals, cotangents) -> (outputs, gradients).

    See `JointValues` for the other attributes.

    Attributes:
        reports: the report of each applied pass, in order.
    """

    reports: tuple[PassReport, ...] = ()

    def apply(self, *passes: AnyPass | str, **options: Any) -> JointGraph:
        """A new joint graph with `passes` applied in order; this one does not change.

        Args:
            passes: each is ``pass(gm, example_inputs, **options) -> gm``, which may change its `gm`; or the
                name of one of ours (``retrograd.passes.aten``).
            options: keyword arguments of the pass. There must be exactly one pass then.

        Raises:
            PassError: a pass raised (its error is the cause), or returned no graph module.
            VerificationError: the graph broke a law of joint graphs after a pass; the text names the pass,
                the node, its role and the way out.
            ValueError: there is no pass of that name.
        """
        named = [pass_named(one) if isinstance(one, str) else one for one in passes]
        if options and len(named) != 1:
            raise PassError.because(
                "pass-options",
                f"keyword arguments ({', '.join(options)}) were given for {len(named)} passes",
                "aot.apply",
                way_out="one apply for each pass, or functools.partial for its arguments",
            )
        chosen = [functools.partial(one, **options) if options else one for one in named]
        earlier = [report.name for report in self.reports]
        gm, reports = run_passes(copied_module(self.gm), self.example_inputs, chosen, earlier)
        return replace(self, gm=gm, reports=(*self.reports, *reports))

    @property
    def example_inputs(self) -> tuple[Any, ...]:
        """Fake tensors and symbolic numbers that describe the primals and cotangents."""
        return tuple(node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder"))

    def print_readable(self, *, sources: bool = True) -> str:
        """Return (not print) the graph as code, with the role of each placeholder and output.

        Args:
            sources: whether to show each line of the forward's source above its first call.
        """
        return rendered(self.gm.graph, self.signature, sources)


@checked(
    state=(CaptureState, "what aot.create_state returned"),
    **dict.fromkeys(("single_region", "split_at_leaf_grads", "separate_sums"), SWITCH),
)
def capture(
    state: CaptureState,
    *,
    single_region: bool = False,
    split_at_leaf_grads: bool = False,
    separate_sums: bool = False,
    layouts: Mapping[int, Sequence[int]] = MappingProxyType({}),
    backward_autocast: Autocast = (),
) -> JointGraph:
    """Capture the function of `state`.

    Args:
        state: from `create_state`.
        single_region: differentiate all outputs together, as stock AOTAutograd does, instead of dividing the
            backward into eager's regions.
        split_at_leaf_grads: end a region where the gradient of a leaf is complete, so that hooks see these
            gradients one by one, and not all of them are alive at once. The result stays bitwise equal. Each
            extra region costs a call.
        separate_sums: return each contribution to the gradient of an input separately, so that they can be
            added to those of other functions in eager's order. They occupy memory until the region ends.
        layouts: strides of cotangents, by boundary. Any other cotangent has the strides of its value if that
            is dense, and is contiguous otherwise.
        backward_autocast: the autocast settings that are on in the backward.

    Returns:
        The joint graph. If nothing requires grad (or grad mode is off), it has no backward.

    Raises:
        CaptureError: the function does something that a graph cannot represent; the cause is chained.
    """
    options = CaptureOptions(single_region, split_at_leaf_grads, separate_sums, layouts, backward_autocast)
    return capture_divided(state, options)[0]


def capture_divided(
    state: CaptureState, options: CaptureOptions, first: FirstRun | None = None
) -> tuple[JointGraph, Structure]:
    """`capture`, also returning the division of eager's autograd graph. If given, `first` follows the
    function's run and may finish it eagerly."""
    call, leaves = state.call, [leaf.value for leaf in state.leaves]
    with call.unchanged(leaves, first) if isinstance(call, FlatCall) else nullcontext():
        found: tuple[JointGraph, Structure] = outside_of_graph_task(
            lambda: _captured(state, options, first), False
        )
    return found


def _captured(
    state: CaptureState, options: CaptureOptions, first: FirstRun | None
) -> tuple[JointGraph, Structure]:
    plan = InputWrapping()
    while True:
        attempt = _Attempt(state, plan, options, first)
        read_anew(state.fake_mode)
        checks = checks_known(state.fake_mode)
        try:
            with autocast_off(), state.fake_mode:
                gm = make_graph(attempt.body, state.decompositions, JointTracer, state.uses_python_forms)
                _refuse_fakes(gm)
                refuse_lost_checks(state.fake_mode, checks)
        except (RetrogradError, OtherCotangent):
            raise
        except Exception as error:
            is_over = first is not None and first.can_be_finished and not first.can_be_retraced
            if (larger := plan.with_copies(state)) != plan and not is_over:
                plan = larger
                continue
            raise CaptureError.because(
                error.code if isinstance(error, Refusal) else "trace-failed",
                f"cannot capture {state.name}: {first_line(error)}",
                "aot.capture",
                way_out="call it eagerly, or keep the part that cannot be captured out of the function",
            ) from error
        if attempt.leaves_gaps:
            options = replace(options, split_at_leaf_grads=False)
            continue
        if attempt.amended == plan:
            return attempt.result(gm), attempt.backward.structure
        plan = attempt.amended


@dataclass
class _Attempt:
    """One attempt to trace the function."""

    state: CaptureState
    plan: InputWrapping
    options: CaptureOptions
    first: FirstRun | None
    leaves_gaps: bool = False

    def body(self, tracer: JointTracer) -> Sequence[Any]:
        self.amended = self.plan
        self.inputs = inputs = Inputs(self.state, self.plan, tracer, self.first)
        with functional_mode(not self.state.decompositions, inputs.look_at):
            inputs.enter()
            result = inputs.call(self.options.separate_sums)
            # As a pytree node, a torch.Size would become a tuple.
            flat, self.out_spec = pytree.tree_flatten(result, lambda value: isinstance(value, torch.Size))
            flat = [*map(inputs.as_traced, flat)]
            self.analysis = Analysis(inputs, flat)
            changed = {inputs.primals[update.primal].leaf for update in self.analysis.updates}
            self.amended = inputs.with_aliases(self.plan.amended(self.state, changed))
            if self.amended != self.plan:
                return (0,)
            before = inputs.mutations(flat)
            for value in self.analysis.values:
                value.parts()  # This regenerates views of mutated tensors, before the backward starts.
            self.backward = differentiate(tracer, inputs, self.analysis, self.options)
            if inputs.mutations(flat) != before:
                raise Refusal("backward-effect", "its backward changes a tensor that others can see")
            self.leaves_gaps = self.options.split_at_leaf_grads and self.backward.leaves_gaps()
            values = [*self.analysis.values, *self.backward.stand_ins]
            return [*(part for value in values for part in value.parts()), *self.backward.parts()]

    def result(self, gm: fx.GraphModule) -> JointGraph:
        values = tuple(
            value.described(self.backward.boundary_of(number))
            for number, value in enumerate([*self.analysis.values, *self.backward.stand_ins])
        )
        gm.meta["signature"] = signature = self._signature(values)
        gm.meta["releasable"] = self.backward.releasable
        _tidy(gm)
        return JointGraph(
            state=self.state,
            gm=gm,
            signature=signature,
            primals=tuple(self.inputs.primals),
            values=values,
            updates=self.analysis.updates,
            outputs=self.analysis.outputs,
            out_spec=self.out_spec,
            gradients=self.backward.wrappings(),
            by_dtype=frozenset(self.backward.by_dtype),
            shared=leaves_sharing(gm, signature, self.inputs.primals),
            entered_as=self.plan.entered_as,
            options=self.options,
            offsets_matter=self.inputs.reads_offsets,
            reenters=self.inputs.reenters,
        )

    def _signature(self, values: Sequence[Any]) -> JointSignature:
        forward = [
            Output(number, part)
            for number, value in enumerate(values)
            for part in range(value.wrapping.count)
        ]
        structure = self.backward.structure
        cotangents = [
            Cotangent(boundary, part)
            for boundary, wrapping in self.backward.cotangents
            for part in range(wrapping.count)
        ]
        return JointSignature(
            inputs=(*self.inputs.roles, *cotangents),
            outputs=(*forward, *self.backward.roles()),
            boundaries=tuple(
                Boundary(value, number < self.backward.visible)
                for number, value in enumerate(self.backward.boundary_values)
            ),
            regions=tuple(self.backward.regions),
            order=structure.order,
        )


def _refuse_fakes(gm: fx.GraphModule) -> None:
    """Refuse a graph that holds a fake tensor. A function that builds a graph inside, as
    ``torch.func.linearize`` does, stores tensors of the trace in it, which we cannot map to values."""
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attrgetter(node.target)(gm)
        if isinstance(value, torch.Tensor) and is_fake(value):
            raise Refusal("not-representable", "it keeps tensors where a trace does not see them")


_aten = torch.ops.aten


def _tidy(gm: fx.GraphModule) -> None:
    """Remove what only tracing needed: aliases that equal their input, tensors that hold one number, the
    running statistics that a training batch norm does not read, dead code, and duplicate calls."""
    _write_numbers(gm)
    for node in gm.graph.nodes:
        if fact("alias", node.target) == "same":
            replace_by_equal(node, node.args[0])
        elif places := fact("unread", node.target):
            condition = fact("unread_if", node.target)
            for place in places if condition is None or node.args[condition] is True else ():
                node.update_arg(place, None)
    remove_dead_code(gm)
    merge_equal_calls(gm)
    gm.recompile()


_NUMBERS = frozenset(
    {torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64}
)


def _write_numbers(gm: fx.GraphModule) -> None:
    """Create ``torch.tensor(2.0, device=...)`` directly on its device. The trace has a host tensor, held by
    the graph, and a copy to the device, which would synchronise with the device in each call."""
    for fresh in gm.graph.find_nodes(op="call_function", target=_aten.lift_fresh_copy.default):
        held: Any = fresh.args[0]
        value = attrgetter(held.target)(gm) if held.op == "get_attr" else None
        if type(value) is not torch.Tensor or value.dim() or not value.is_cpu or value.dtype not in _NUMBERS:
            continue
        for node in (*fresh.users, fresh):
            if (made := node.meta.get("val")) is None:
                continue  # the output node
            is_copy = node.target is _aten._to_copy.default and made.dtype in _NUMBERS
            if node is not fresh and not (is_copy and made.is_floating_point() == value.is_floating_point()):
                continue
            options = {"dtype": made.dtype, "device": made.device, "pin_memory": False}
            with gm.graph.inserting_before(node):
                number = gm.graph.call_function(_aten.full.default, ([], value.item()), options)
            number.meta = dict(node.meta)
            node.replace_all_uses_with(number)
