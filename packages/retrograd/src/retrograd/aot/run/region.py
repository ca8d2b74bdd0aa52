"""Runs the backward of one region.

In: the context of a `RegionNode`, and cotangents. Out: a gradient for each of the region's destinations.
Compiled code runs if it was made for cotangents like these. For a few other layouts we trace the region
again. For everything else we re-run the call in eager mode. If compiled code raises, we interpret its graph
or re-run the call. If the call cannot be re-run, because an input changed that eager does not need, we copy
the cotangents into the traced layout, and resolve lazy conjugates and negations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from retrograd.aot.droppable import RestoreSaved
from retrograd.aot.modules import hooks_of_all_modules
from retrograd.aot.run.cotangents import ExpectedTangent, Strides, traced_for
from retrograd.aot.run.eager_rerun import draws_otherwise, rerun_region, why_not_rerun
from retrograd.aot.run.lowering import begin_in_processes, is_ready, still_compiling
from retrograd.aot.run.pruned import CarriedValues, PrunedGraphs, Requested, SavedTensors, requested
from retrograd.aot.run.recording import lower_half, may_replay
from retrograd.backends.base import Backend, Boxed, GraphKind
from retrograd.backends.registry import AtenBackend, EagerBackend, find_backend
from retrograd.config import Config
from retrograd.cudagraphs.graphed_call import SharedMemory, Values
from retrograd.engine import checkpoint_is_valid, leads_to_parameter, will_run
from retrograd.errors import InputsChangedError
from retrograd.events import counters
from retrograd.graph.eager_order import Edge, LiveGraph
from retrograd.graph.fx import copied_module, lazy_graph, reads_memory
from retrograd.graph.joint_graph import Partition, SavedKind
from retrograd.graph.lazy import LazyGraph
from retrograd.graph.redraws import has_redraws
from retrograd.policy import MOST_FAILURES, MOST_PRUNED
from retrograd.process import cached_property
from retrograd.report import Report, why_failed
from retrograd.runtime.modes import (
    Autocast,
    ThreadModes,
    autocast_off,
    generator_states,
    restore_generator_states,
    without_modes,
)
from retrograd.runtime.subclass import PLAIN, SubclassSpec, built
from retrograd.runtime.tensor import graph_is_kept, is_batched, resolved
from retrograd.trace import InputGuard, know_values, laid_out_like

#: we compile code for this many layouts of the cotangents; with more, the region runs in eager mode.
MOST_LAYOUTS = 4
#: one layout for each root.
Layouts = tuple[Strides | None, ...]


@dataclass(eq=False)
class _Code:
    """Code for one layout of the cotangents, under one state of autocast.

    Attributes:
        graph: the graph from which the code is made.
        gradients: how to build each gradient from the results; None for one that the code does not compute.
        run: the code; None until it is compiled.
        has_run: whether it ever ran without an error.
        failures: how often it raised.
        guard: a fast check that the code takes these cotangents unchanged.
        pruned: the pruned graphs of the graph.
        codes: code of pruned graphs: by gradients, by names of further inputs, and of further results.
    """

    graph: LazyGraph
    gradients: Sequence[SubclassSpec | None]
    run: Boxed | None = None
    has_run: bool = False
    failures: int = 0
    guard: InputGuard | None = None
    pruned: PrunedGraphs | None = None
    codes: dict[tuple[Requested, tuple[str, ...], tuple[str, ...]], _Code] = field(default_factory=dict)

    @cached_property
    def _gives_all_plain(self) -> bool:
        return all(gradient is PLAIN for gradient in self.gradients)

    def results(self, values: Sequence[Any]) -> list[Any]:
        """The gradients, and after them the carried values."""
        if self._gives_all_plain:
            return list(values)
        flat = iter(values)
        gradients = [None if wrapping is None else built(wrapping, flat) for wrapping in self.gradients]
        return [*gradients, *flat]


class RegionCode:
    """The backward code of region `number`. Compiled when first needed; its recordings use `memory`.

    Attributes:
        reruns: how often we re-ran the call in eager mode instead.
        why_rerun: the reason for the last re-run.
    """

    def __init__(
        self,
        partition: Partition,
        number: int,
        backend: Backend,
        config: Config,
        report: Report,
        memory: SharedMemory,
    ) -> None:
        self._partition, self.number, self._backend, self._config = partition, number, backend, config
        self._report, self._memory = report, memory
        joint, self._backward = partition.joint, partition.backwards[number]
        region = joint.signature.regions[number]
        self.roots, self.destinations = region.roots, region.destinations
        self._gradients: list[SubclassSpec | None] = [
            joint.gradients.get((number, there)) for there in self.destinations
        ]
        self._expected = [ExpectedTangent(partition, number, root) for root in self.roots]
        self._as_traced: Layouts = (None,) * len(self.roots)
        self._undefined_matters = region.undefined_matters
        self._has_functions, self._reenters = region.has_functions, joint.reenters
        saved = [partition.saved[i] for i in self._backward.saved]
        self._made = {i: entry.place for i, entry in enumerate(saved) if entry.kind is SavedKind.INTERMEDIATE}
        #: True if saved values are held like plain attributes of a context: eager's nodes free nothing.
        self.frees_nothing = not (region.saves or self._backward.checked or config.cudagraphs)
        self._numbers = tuple(i for i, entry in enumerate(saved) if entry.is_unchecked or self.frees_nothing)
        self._tensors = len(saved) - len(self._numbers)
        self.follows_layout = isinstance(backend, AtenBackend)
        self._codes: dict[tuple[Autocast, Layouts], _Code | None] = {}
        self._saves = region.saves or bool(self._tensors or self._backward.checked)
        self._graph = self._backward.graph
        #: the number of the graph's results that make up each gradient.
        self._counts = [0 if gradient is None else gradient.count for gradient in self._gradients]
        self._read = SavedTensors(partition, number, self._counts)
        self._has_effects = self._graph.summary.has_effects_besides_random
        #: not empty if a re-run in eager mode would draw other random numbers than the forward did.
        self._draws_otherwise = find_backend(config.backend).draws_otherwise(partition.ahead.summary.targets)
        self.reruns, self.why_rerun = 0, ""
        is_static = all(expected.is_static for expected in self._expected)
        self._may_be_guarded = is_static and not self._reenters
        #: the code that ran last, if it has a guard.
        self._last: _Code | None = None

    def compile_ahead(self) -> None:
        """Compile now, for the layouts that the trace predicted."""
        self._codes[(), self._as_traced] = _Code(
            self._graph, self._gradients, self._lowered(self._graph, None)
        )

    def begin_in_processes(self) -> None:
        """Have other processes start on this code, for the layouts that the trace predicted."""
        graph = self._graph
        begin_in_processes(self._backend, graph, self._partition.joint.state, _half_of(graph), self._config)

    def __call__(self, ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        """Gradients for the region's destinations."""
        inside = ctx.meeting.arrived() if ctx.meeting else {}
        modes, last, wanted = self._partition.joint.state.thread_modes, self._last, requested(ctx)
        is_other = torch.is_anomaly_enabled() or (self._has_functions and not modes.has_same_defaults())
        by_nodes = inside or torch.is_grad_enabled() or (is_other and not self._draws_otherwise)
        is_usual = wanted is None and not by_nodes
        if is_usual and last is not None and last.guard is not None and last.guard.check(cotangents):
            return self._once_more(last, ctx, cotangents)
        are_undefined = not inside and all(cotangent is None for cotangent in cotangents)
        if are_undefined and not self._has_functions:
            return [None] * len(self.destinations)
        saved = self._read(ctx, wanted) if self._saves else ()  # one that saves nothing may run repeatedly
        if by_nodes or are_undefined or self._is_barred():
            return self._as_eager(ctx, cotangents, inside)
        autocast, is_batch = ThreadModes.autocast_now(), any(map(is_batched, cotangents))
        if not self._fit(cotangents) or (is_batch and autocast):
            code = None
        elif is_batch:
            code = self._batch_code
        else:
            code = self._code_for(autocast, self._layouts(cotangents))
        if code is None and (self._draws_otherwise or not (autocast or is_batch or self.can_be_rerun(ctx))):
            code, cotangents = self._code_as_traced(cotangents, is_batch)
        if code is None:
            return self._as_eager(ctx, cotangents)
        is_as_traced = (
            is_batch or code.graph is not self._graph or self._layouts(cotangents) == self._as_traced
        )
        args = self._arguments(saved, ctx.numbers, cotangents, is_as_traced)
        carried: CarriedValues | None = None
        if wanted is not None and not (is_batch or self._config.cudagraphs):
            code, carried = self._pruned(code, wanted, ctx, cotangents, args)
        if self._memory.other_devices and not (code.has_run and may_replay(code.run)):
            self._memory.restore_saved(args, self._made)
        if not code.has_run:
            del saved
            found = self._first_run(code, ctx, cotangents, args)
        else:
            if is_as_traced and wanted is None and not (autocast or is_batch) and self._may_be_guarded:
                self._guard(code, cotangents)
            del saved, cotangents
            self._give_up(ctx)
            found = self._run(code, args)
        count = len(self.destinations)
        if carried is not None and code.has_run:  # the strides are those that the code gives
            ctx.carried = carried
            carried.values.append(found[count:])
        return found[:count]

    def _code_as_traced(
        self, cotangents: Sequence[torch.Tensor | None], is_batch: bool
    ) -> tuple[_Code | None, Sequence[torch.Tensor | None]]:
        """Code for a call that cannot be re-run, and the cotangents as it takes them."""
        if is_batch:
            return self._batch_code, cotangents
        cotangents = tuple([c if c is None else resolved(c) for c in cotangents])
        if not self._fit(cotangents):
            return None, cotangents
        found = self._code_for((), self._layouts(cotangents)) or self._code_for((), self._as_traced)
        return found, cotangents

    @torch.compiler.disable  # Dynamo would trace it if a compiled function runs a backward
    def _pruned(
        self, code: _Code, wanted: Requested, ctx: Any, cotangents: Sequence[Any], args: list[Any]
    ) -> tuple[_Code, CarriedValues | None]:
        """Code for the gradients that are `wanted`, and what shall hold the values that it carries. Adds to
        the arguments the values that an earlier backward has carried."""
        code.pruned = graphs = code.pruned or PrunedGraphs(
            code.graph, len(self._backward.saved), self._counts
        )
        gradients = [one if flag else None for one, flag in zip(code.gradients, wanted, strict=True)]
        if not graphs.can_be_pruned or not any(gradients):
            return code, None
        before = ctx.carried
        taken = None if before is None else before.take(graphs, wanted, ctx, cotangents)
        given = () if taken is None else before.names
        # A step of one network between two requests may change its weights by ``.data``, without a version.
        carries = graph_is_kept() and taken is None and not leads_to_parameter(ctx, wanted)
        returned = tuple(graphs.carried(wanted)) if carries else ()
        key = wanted, given, returned
        if key not in code.codes:
            if len(code.codes) >= MOST_PRUNED:
                return code, None
            code.codes[key] = _Code(graphs.pruned(*key), gradients)
        args += taken or ()
        carried = CarriedValues(graphs, wanted, returned, ctx, cotangents) if returned else None
        return code.codes[key], carried

    @cached_property
    def _batch_code(self) -> _Code | None:
        """The interpreted graph, for ``is_grads_batched``. None if the graph reads memory by strides: a batch
        of cotangents has other strides than one of its rows."""
        gm = self._graph.gm
        if any(map(reads_memory, gm.graph.nodes)):
            return None
        return _Code(self._graph, self._gradients, EagerBackend().compile(gm, ()))

    def can_be_rerun(self, ctx: Any) -> bool:
        """Whether the call that this context belongs to can be re-run."""
        joint, call = self._partition.joint, ctx.replay_record
        return not (
            call is None or self._draws_otherwise or why_not_rerun(joint, self.number, call) is not None
        )

    def _is_barred(self) -> bool:
        """Whether the region has reentrant checkpoints that the running backward must not enter."""
        return self._reenters and not checkpoint_is_valid()

    def _guard(self, code: _Code, cotangents: Sequence[Any]) -> None:
        """Let later calls with such cotangents skip the checks. A guard that just failed is replaced."""
        if any(c is None for c in cotangents):
            return
        if self._config.cudagraphs and not may_replay(code.run):
            return
        if code.guard is None or code is self._last:
            code.guard = InputGuard(cotangents, (), (), None)
        self._last = code

    def _once_more(self, code: _Code, ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        """Gradients by code whose guard has accepted the cotangents. The guard also checks that autocast and
        modes are off."""
        args = self._kept(ctx.saved_tensors if self._saves else (), ctx.numbers)
        args += cotangents
        self._give_up(ctx)
        assert code.run is not None
        return code.results(code.run(args))

    def _layouts(self, cotangents: Sequence[torch.Tensor | None]) -> Layouts:
        """The strides of each cotangent; None if it has the traced layout."""
        return tuple([e.layout(c) for c, e in zip(cotangents, self._expected, strict=True)])

    def _code_for(self, autocast: Autocast, layouts: Layouts) -> _Code | None:
        """Code for this autocast and these layouts; None if we have no graph for them."""
        key = autocast, layouts
        if key not in self._codes:
            graph: LazyGraph | None = self._graph
            if autocast or layouts != self._as_traced:
                if len(self._codes) >= MOST_LAYOUTS:
                    return None
                own = {r: s for r, s in zip(self.roots, layouts, strict=True) if s is not None}
                graph = self._retraced(own, autocast)
            self._codes[key] = None if graph is None else _Code(graph, self._gradients)
        return self._codes[key]

    @torch.compiler.disable  # Dynamo would trace it if a compiled function runs a backward
    def _retraced(self, layouts: dict[int, Any], autocast: Autocast) -> LazyGraph | None:
        """A graph for other layouts, given by boundary; None if only eager can compute the gradients."""
        joint, expected = self._partition.joint, dict(zip(self.roots, self._expected, strict=True))
        if not all(expected[root].is_plain for root in layouts):
            return None
        is_static = all(expected[root].is_static for root in layouts)
        is_static = is_static and not (autocast and joint.state.is_symbolic)
        if (
            getattr(joint, "reports", ())  # passes have changed the graph since the trace
            or has_redraws(self._graph.gm.graph)  # from generator states or seeds that no other trace has
            or hooks_of_all_modules()  # a trace would call modules, and thus these hooks
            or not (is_static or self.follows_layout)  # new code may add guards that nobody would check
        ):
            return None if autocast else self._graph
        if not is_static and any(map(any, layouts.values())):
            return None
        with without_modes():
            gm = traced_for(self._partition, self.number, layouts, autocast)
        return None if gm is None else lazy_graph(gm)

    def _fit(self, cotangents: Sequence[torch.Tensor | None]) -> bool:
        for cotangent, expected in zip(cotangents, self._expected, strict=True):
            if not expected.fits(cotangent) or (cotangent is None and self._undefined_matters):
                return False
        return True

    def _kept(self, saved: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """The code's arguments before the cotangents."""
        args = list(saved[: self._tensors])
        for place, value in zip(self._numbers, numbers, strict=True):
            args.insert(place, value)
        return args

    def _arguments(
        self, saved: Sequence[Any], numbers: Sequence[Any], cotangents: Sequence[Any], is_as_traced: bool
    ) -> list[Any]:
        args = self._kept(saved, numbers)
        for cotangent, expected in zip(cotangents, self._expected, strict=True):
            if is_as_traced and cotangent is not None and expected.is_plain:
                args.append(cotangent)
            else:
                args.extend(expected.laid_out(cotangent))
        return args

    def _first_run(
        self, code: _Code, ctx: Any, cotangents: Sequence[torch.Tensor | None], args: list[Any]
    ) -> list[Any]:
        """Gradients by code that has not run. If it raises, its graph is interpreted; failing that, eager."""
        given, generators = [*args], generator_states(self._graph.summary.random_devices)
        name = self._partition.joint.state.name
        try:
            if code.run is None:
                counters["aot_backward_lowerings"] += 1
                code.run = self._lowered(code.graph, args)
            if not is_ready(code.run):
                reason = still_compiling(f"the backward of {name}")
                self._report.fell_back(reason, "a backward ran eagerly")
                return self._interpreted(code, given)
            grads = self._run(code, args)
            code.has_run = True
        except Exception as error:
            if self._config.strict or self._has_effects or isinstance(error, InputsChangedError):
                raise
            restore_generator_states(generators)
            try:
                grads = self._interpreted(code, given)
            except Exception:
                grads = self._as_eager(ctx, cotangents)
            code.failures += 1
            reason = why_failed(f"the backward code of {name}", error, "aot.backward")
            self._report.fell_back(reason, "a backward ran eagerly")
            if code.failures >= MOST_FAILURES and not isinstance(error, torch.OutOfMemoryError):
                code.run = EagerBackend().compile(code.graph.gm, ())
        self._give_up(ctx)
        return grads

    def _interpreted(self, code: _Code, args: list[Any]) -> list[Any]:
        return self._run(replace(code, run=EagerBackend().compile(code.graph.gm, ())), args)

    @torch.compiler.disable  # Dynamo would trace it if a compiled function runs a backward
    def _lowered(self, graph: LazyGraph, args: Sequence[Any] | None) -> Boxed:
        """Code for inputs with the layouts of `args`. Strides of saved values may differ from the trace,
        because the forward's backend chose them."""
        traced = graph.summary.inputs
        examples: Sequence[Any] = traced
        if args is not None and not self.follows_layout:
            examples = [laid_out_like(fake, value) for fake, value in zip(traced, args, strict=True)]
            if any(one is not other for one, other in zip(traced, examples, strict=True)):
                graph = lazy_graph(know_values(copied_module(graph.gm), examples), examples)
        state, half = self._partition.joint.state, _half_of(graph)
        cotangents = range(len(self._backward.saved), len(examples))
        values = Values(loose=cotangents, results=self._made, memory=self._memory)
        with nullcontext() if args is None else without_modes():
            with self._report.compiling(f"compiling a backward of {state.name}"):
                return lower_half(self._backend, graph, state, half, self._config, values)

    def _run(self, code: _Code, args: list[Any]) -> list[Any]:
        """Run the code with autocast off: its graph already contains autocast's casts."""
        assert code.run is not None
        with autocast_off():
            return code.results(code.run(args))

    def _give_up(self, ctx: Any) -> None:
        """Release what the region saved, unless the graph is retained. A region that saves nothing can run
        repeatedly."""
        if self._saves and not graph_is_kept():
            ctx.maybe_clear_saved_tensors()
            ctx.replay_record = ctx.carried = None

    @torch.compiler.disable  # Dynamo would trace it if a compiled function runs a backward
    def _as_eager(
        self,
        ctx: Any,
        cotangents: Sequence[torch.Tensor | None],
        inside: Mapping[Edge, torch.Tensor] = MappingProxyType({}),
    ) -> list[Any]:
        counters["aot_eager_regions"] += 1
        self.reruns += 1
        self.why_rerun = (
            "they are differentiated themselves"
            if inside or torch.is_grad_enabled()
            else "they get gradients, or run under modes, of another kind than captured"
        )
        if self._draws_otherwise and any(cotangent is not None for cotangent in cotangents):
            name = self._partition.joint.state.name
            raise draws_otherwise(name, self.why_rerun, self._draws_otherwise)
        given: dict[int | Edge, Any] = dict(inside)
        given.update(zip(self.roots, cotangents, strict=True))
        wanted = None
        if self._is_barred():
            wanted = {there for there, runs in zip(self.destinations, will_run(ctx), strict=True) if runs}

        def restore_saved(graph: LiveGraph, primals: Sequence[Any]) -> None:
            kept = self._kept(ctx.saved_tensors if self._saves else (), ctx.numbers)
            self._put_back(graph, kept, primals)

        return rerun_region(self._partition.joint, self.number, ctx, restore_saved, given, wanted)

    @cached_property
    def _put_back(self) -> RestoreSaved:
        return RestoreSaved(self._partition, self.number)


def _half_of(graph: LazyGraph) -> GraphKind:
    return GraphKind(is_backward=True, visible=len(graph.summary.results))
