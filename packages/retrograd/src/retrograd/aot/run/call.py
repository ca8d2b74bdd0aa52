"""Calls a compiled function at run time.

In: flat inputs. Out: what the captured function would return, with eager's autograd structure (see
`aot.run.attach`).

The constructor of `CompiledFunction` decides everything that does not depend on the inputs. A call then
fills one list of values, its *frame*: the primals (and the parts of wrapper subclasses), the graph's results
(and the subclasses built from them), and the barriers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from retrograd.aot.run.attach import Attaching
from retrograd.aot.run.eager_rerun import ReplayRecord, stand_in
from retrograd.aot.run.first_run_copies import WrittenAhead
from retrograd.aot.run.lowering import is_ready, still_compiling
from retrograd.aot.run.region import RegionCode
from retrograd.aot.run.value_table import Epilogue, FrameLayout, rebuilder
from retrograd.backends.base import Boxed
from retrograd.engine import versions_of, writes_in_place
from retrograd.errors import CodeFailedError, InputsChangedError, NotReadyError, Reason, UnlikeTracedError
from retrograd.graph.joint_graph import AliasOf, JointValues, Partition
from retrograd.runtime.modes import generator_states, restore_generator_states, undifferentiated
from retrograd.runtime.subclass import built, parts_of
from retrograd.runtime.tensor import common_base

#: we leave a function to eager after this many backwards that re-ran the call, if they make up half of its
#: calls: a re-run is slower than eager.
FEWEST_RERUNS = 8


class CompiledFunction:
    """A function compiled by ``aot.compile``. Called with the flat inputs of its `CaptureState`."""

    def __init__(self, partition: Partition, code: Boxed, regions: Sequence[RegionCode]) -> None:
        self.partition = partition
        self._joint = joint = partition.joint
        self._code, self._run = code, undifferentiated(code)
        self._found = joint.found
        self._primals = _primals_of(joint)
        self._layout = layout = FrameLayout(partition)
        self._value_count = len(joint.values)
        #: the expected results, including saved values if a backward is compiled for their layout. We check
        #: them in the first call.
        summary = partition.ahead.summary
        self._expected: list[Any] | None = [*summary.results]
        if all(region.follows_layout for region in regions):
            del self._expected[joint.signature.forward_count :]
        views = [plan for plan in joint.outputs if isinstance(plan, AliasOf) and plan.view.replay is None]
        places = {value: place for place, value in layout.plain_values.items()}
        #: indices of results from which we make views with `as_strided`.
        self._strided = {places[plan.value] for plan in views if plan.value in places}
        values = [(place, joint.values[value]) for place, value in layout.plain_values.items()]
        #: indices of results that are no views in eager. Below autograd, a kernel may return a view, which
        #: refuses ``detach_`` and shares the history of other results.
        self._no_views = [i for i, value in values if value.boundary is None and not value.is_view]
        self._finish = Epilogue(joint, layout.values, partition.written_ahead)
        self._rebuild = rebuilder(joint.out_spec)
        self._attaching = Attaching(partition, regions, layout, self._finish) if regions else None
        #: True if the function itself may have switched autograd on.
        self._records_inside = not joint.state.thread_modes.grad
        self._written = WrittenAhead(partition)
        self._has_effects = summary.has_effects_besides_random and not self._written
        self._draws = summary.random_devices
        changed = {update.primal for update in joint.updates} if regions else set()
        self._unread = partition.overwritten
        #: primals that we copy before they change, so that we can re-run the call.
        self._changed = sorted(changed - self._unread)
        #: primals that we do not hold, with their indices among the sources.
        leaves = [(i, joint.primals[i].leaf) for i in sorted(partition.released)]
        self._released = [(i, leaf) for i, leaf in leaves if leaf is not None]
        self._regions, self._calls = regions, 0
        self._by_dtype, self._shared = sorted(joint.by_dtype), sorted(joint.shared)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Call the function with flat inputs.

        Raises:
            CodeFailedError: the code raised; the user's tensors are unchanged.
            NotReadyError: the code is still being compiled, or does not support these inputs.
            UnlikeTracedError: a fake kernel of torch predicted a wrong result.
        """
        if not is_ready(self._code):
            raise NotReadyError(still_compiling(self._joint.state.name))
        sources = [*leaves, *self._found] if self._found else leaves
        primals = self._primals(sources)
        if any(primals[i].grad_dtype is not primals[i].dtype for i in self._by_dtype):
            raise NotReadyError(_GRAD_DTYPE)
        hooks = [hook for i in self._shared for hook in (primals[i]._backward_hooks or {}).values()]
        if any(map(writes_in_place, hooks)):
            raise NotReadyError(_HOOK_IN_PLACE)
        generators = generator_states(self._draws) if self._draws else {}
        written = self._written.before(primals) if self._written else None
        self._calls += 1
        try:
            frame = self._frame(primals)
        except Exception as error:
            if self._has_effects or (written is not None and not self._written.undo(written)):
                raise
            restore_generator_states(generators)
            if isinstance(error, (UnlikeTracedError, InputsChangedError)):
                raise
            raise CodeFailedError from error
        if written is not None:
            self._written.after(written)
        before: dict[int, torch.Tensor] = {}
        if self._changed:
            with torch.enable_grad():  # so that the copy has the primal's history
                before = {place: primals[place].clone() for place in self._changed}
        if self._finish.begins:
            self._finish.begin(frame)
        replay_record = self._replay_record(sources, primals, before, generators) if self._attaching else None
        if not self._records_inside:
            return self._outputs(sources, frame, replay_record)
        with torch.enable_grad():  # the plan of a view records that it was made under no_grad
            return self._outputs(sources, frame, replay_record)

    def why_disabled(self) -> Reason | None:
        """Why calls should run in eager mode from now on; None if they should not."""
        most = max(self._regions, key=lambda region: region.reruns, default=None)
        if most is None or most.reruns < FEWEST_RERUNS or 2 * most.reruns < self._calls:
            return None
        return Reason(
            "backwards-rerun",
            f"compiled code served for few backwards of {self._joint.state.name}, because {most.why_rerun}",
            "aot.run_backward",
            way_out="nothing to do: it runs eagerly from now on, which is faster",
        )

    def _outputs(self, sources: Sequence[Any], frame: list[Any], replay_record: ReplayRecord | None) -> Any:
        if self._attaching is not None:
            self._attaching(frame, replay_record)
        return self._rebuild(self._finish(sources, frame))

    def _replay_record(
        self,
        sources: Sequence[Any],
        primals: Sequence[Any],
        before: dict[int, torch.Tensor],
        generators: dict[torch.device, Any],
    ) -> ReplayRecord:
        """The record of the call. `before` has copies of the primals that the call changed."""
        if before:
            primals = [before.get(i, primal) for i, primal in enumerate(primals)]
        strides: dict[int, tuple[int, ...]] = {}
        if self._released:
            sources, primals = list(sources), list(primals)
            with torch.enable_grad():
                for place, source in self._released:
                    strides[place] = primals[place].stride()
                    primals[place] = sources[source] = stand_in(primals[place], (0,) * primals[place].dim())
        versions = versions_of(primals)
        for place in self._unread:
            versions[place] = None
        return ReplayRecord(sources, primals, versions, generators, (*before, *self._unread), strides)

    def _frame(self, primals: Sequence[Any]) -> list[Any]:
        """The frame, with the graph's results. Nothing of the user's has changed yet."""
        if self._layout.is_plain:
            results = self._results([*primals])
            values = results[: self._value_count] if self._layout.is_separate else ()
            return [*primals, *results, *values]
        pairs = zip(primals, self._joint.primals, strict=True)
        parts = [part for value, primal in pairs for part in parts_of(value, primal.wrapping)]
        results = self._results([*parts])
        flat = iter(results)
        return [*primals, *parts, *results, *[built(value.wrapping, flat) for value in self._joint.values]]

    def _results(self, parts: list[Any]) -> Sequence[Any]:
        """The graph's results for `parts`."""
        results = self._run(parts)
        if self._expected is not None:
            refuse_unlike_traced(results, self._expected, self._joint.state.name, self._strided)
            self._expected = None
        if views := [i for i in self._no_views if _is_view(results[i])]:
            results = [result.data if i in views else result for i, result in enumerate(results)]
        return results


def _is_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value._is_view()


def _primals_of(joint: JointValues) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks the primals from the sources. An alias group's primal is its members' base."""
    count, groups = len(joint.state.leaves), joint.state.aliases
    found = itertools.count(count)
    places: list[int | list[int]] = [
        [member.leaf for member in groups[primal.group].members]
        if primal.group is not None
        else (next(found) if primal.leaf is None else primal.leaf)
        for primal in joint.primals
    ]
    if places == list(range(count + len(joint.found))):
        return list
    return lambda sources: [
        sources[place] if type(place) is int else common_base([sources[leaf] for leaf in place])  # type: ignore[union-attr]
        for place in places
    ]


def refuse_unlike_traced(
    results: Sequence[Any], expected: Sequence[Any], name: str, strided: Collection[int] = ()
) -> None:
    """Compare shapes and dtypes with the trace. At the indices `strided`, from which we make views,
    compare strides too."""
    for number, (result, fake) in enumerate(zip(results, expected, strict=False)):
        if not isinstance(fake, torch.Tensor) or not isinstance(result, torch.Tensor):
            continue
        if result.dtype != fake.dtype or _differ(fake.shape, result.shape):
            found = f" is {result.dtype} {list(result.shape)}"
            reason = f"{fake.dtype} {list(fake.shape)}"
        elif number in strided and _differ(_strides(fake, result.shape), _strides(result, result.shape)):
            found = f", of which views are returned, has strides {result.stride()}"
            reason = f"{tuple(fake.stride())}"
        else:
            continue
        raise UnlikeTracedError.because(
            "unlike-traced",
            f"result {number} of {name}{found}, and a fake tensor of torch's said {reason}",
            "aot.call",
            way_out="this is a wrong fake kernel in torch: keep its operator out of the function",
        )


def _differ(traced: Sequence[Any], now: Sequence[int]) -> bool:
    """Whether numbers differ. Numbers that were symbolic in the trace never do."""
    pairs = zip(traced, now, strict=False)
    return len(traced) != len(now) or any(type(one) is int and one != other for one, other in pairs)


def _strides(value: torch.Tensor, shape: Sequence[int]) -> list[Any]:
    """The strides that matter. The stride of a dimension of size 1 is arbitrary."""
    return [stride for size, stride in zip(shape, value.stride(), strict=True) if size != 1]


_GRAD_DTYPE = Reason(
    "grad-dtype",
    "a leaf asks for its gradient in another dtype (grad_dtype), and what it gets is cast or added up",
    "aot.run",
    way_out="leave grad_dtype as it is, or cast what the leaf is used as",
)

_HOOK_IN_PLACE = Reason(
    "hook-in-place",
    "a hook of a leaf changes the gradient in place, which other parts of the backward get too",
    "aot.run",
    way_out="have the hook return a new gradient, as torch asks",
)
