"""The backward of one region at run time.

In: the context of a `RegionNode` and cotangents. Out: a gradient for each of the region's destinations. The
compiled graph runs if the cotangents are what it was made for; otherwise the region runs as eager would run
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrograd._torch.state import ThreadModes
from retrograd._torch.subclass import PLAIN, Wrapping, built, parts_of
from retrograd._torch.tensor import graph_is_kept
from retrograd._torch.trace import is_batched, laid_out_like, retraced
from retrograd.aot.run.eager_region import rerun_region
from retrograd.aot.run.lower_half import lower
from retrograd.aot.run.record import recorded
from retrograd.backends.base import Backend, Boxed, Half
from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.events import counters
from retrograd.graph.partition import Partition

#: how many layouts of cotangents code is made for; others are copied.
MOST_LAYOUTS = 4
#: in place of strides: cotangents of torch's older vmap (``is_grads_batched``), which no generated code
#: takes.
_BATCHED = ("batched",)


@dataclass(frozen=True)
class _Expected:
    """What a cotangent was traced as."""

    boundary: int
    wrapping: Wrapping
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def is_static(self) -> bool:
        """Whether it is a plain tensor without symbolic sizes."""
        numbers = (*self.shape, *self.strides)
        return self.wrapping is PLAIN and not any(isinstance(number, torch.SymInt) for number in numbers)


class RegionCode:
    """Code for the backward of region `number`, compiled when it is first needed."""

    def __init__(
        self,
        partition: Partition,
        number: int,
        backend: Backend,
        config: Config,
    ) -> None:
        self._partition, self._number, self._backend, self._config = partition, number, backend, config
        joint, self._graphs = partition.joint, partition.backwards[number]
        region = joint.signature.regions[number]
        self.roots, self.destinations = region.roots, region.destinations
        self._gradients: list[Wrapping | None] = [
            joint.gradients.get((number, there)) for there in self.destinations
        ]
        self._expected = [self._expect(root) for root in self.roots]
        self._nothing = (None,) * len(self.roots)
        self._plain = all(e.wrapping is PLAIN for e in self._expected) and all(
            g is None or g is PLAIN for g in self._gradients
        )
        self._places = [i for i, g in enumerate(self._gradients) if g is not None]
        self._undefined_matters = number in joint.undefined_matters
        saved = [partition.saved[i] for i in self._graphs.saved]
        self._numbers = tuple(i for i, entry in enumerate(saved) if entry.is_number)
        self._tensors = len(saved) - len(self._numbers)
        self.follows_layout = not backend.decompositions()
        # Code for another layout would be made when nobody installs the guards of its sizes any more.
        self._is_symbolic = not self.follows_layout and any(map(_has_symbols, self._expected))
        self._codes: dict[tuple[Any, ...], Boxed] = {}
        self._saves = bool(self._tensors or self._graphs.checked)

    def _expect(self, root: int) -> _Expected:
        joint = self._partition.joint
        value = joint.values[joint.signature.boundaries[root].value]
        nodes = [node for node in self._graphs.gm.graph.nodes if node.op == "placeholder"]
        first = next(node for node in nodes if node.name in (f"cotangent_{root}", f"cotangent_{root}_0"))
        fake = first.meta["val"]
        return _Expected(
            root, value.wrapping, tuple(fake.shape), tuple(fake.stride()), fake.dtype, fake.device
        )

    def compile_ahead(self) -> None:
        """Compile now, for the layouts that tracing predicted."""
        self._codes[self._layouts(())] = self._lowered(None)

    def __call__(self, ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        """Gradients for the destinations."""
        if all(cotangent is None for cotangent in cotangents):
            return [None] * len(self.destinations)
        saved = ctx.saved_tensors if self._saves else ()  # what saves nothing may run as often as one likes
        if (
            torch.is_grad_enabled()
            or ThreadModes.autocast_now()
            or torch.is_anomaly_enabled()
            or not self._fit(cotangents)
        ):
            return self._as_eager(ctx, cotangents)
        layouts = self._layouts(cotangents)
        may_add = len(self._codes) < MOST_LAYOUTS and (layouts is _BATCHED or not self._is_symbolic)
        is_known = layouts in self._codes or may_add
        args = self._arguments(saved, ctx.numbers, cotangents, is_known)
        layouts = layouts if is_known else self._layouts(())
        del saved, cotangents
        if not graph_is_kept():
            ctx.maybe_clear_saved_tensors()
            ctx.again = None
        return self._results(self._run(layouts, args))

    def _layouts(self, cotangents: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """For each plain cotangent that is laid out otherwise than traced, its strides: code is made for each
        such layout, for a backend that does not follow them by itself."""
        if self.follows_layout:
            return ()
        if any(map(is_batched, cotangents)):
            return _BATCHED
        return tuple(
            [
                cotangent.stride()
                if cotangent is not None and e.is_static and cotangent.stride() != e.strides
                else None
                for cotangent, e in zip(cotangents or self._nothing, self._expected, strict=True)
            ]
        )

    def _fit(self, cotangents: Sequence[torch.Tensor | None]) -> bool:
        for cotangent, expected in zip(cotangents, self._expected, strict=True):
            if cotangent is None:
                if self._undefined_matters or not expected.is_static:
                    return False
            elif not expected.wrapping.fits(cotangent):
                return False
        return True

    def _arguments(
        self, saved: Sequence[Any], numbers: Sequence[Any], cotangents: Sequence[Any], is_known: bool
    ) -> list[Any]:
        args = list(saved[: self._tensors])
        for place, value in zip(self._numbers, numbers, strict=True):
            args.insert(place, value)
        for cotangent, expected in zip(cotangents, self._expected, strict=True):
            if (
                expected.wrapping is PLAIN
                and cotangent is not None
                and (self.follows_layout or (is_known and expected.is_static))
            ):
                args.append(cotangent)
            elif expected.wrapping is PLAIN:
                args.append(_laid_out(cotangent, expected))
            else:
                args.extend(parts_of(_defined(cotangent, expected), expected.wrapping))
        return args

    def _run(self, layouts: tuple[Any, ...], args: list[Any]) -> Sequence[Any]:
        code = self._codes.get(layouts)
        if code is None:
            counters["aot_backward_lowerings"] += 1
            code = self._codes[layouts] = self._lowered(args, layouts)
        return code(args)

    @torch.compiler.disable  # Dynamo would trace it, where a compiled function runs a backward
    def _lowered(self, args: Sequence[Any] | None, layouts: tuple[Any, ...] = ()) -> Boxed:
        """Code for inputs laid out as they are in `args`: a backend may have given what is saved other
        strides than tracing did."""
        gm = self._graphs.gm
        if layouts is _BATCHED:
            return find_backend("eager").compile(gm, ())
        examples = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        if args is not None:
            traced = examples
            examples = [laid_out_like(fake, value) for fake, value in zip(traced, args, strict=True)]
            if any(one is not other for one, other in zip(traced, examples, strict=True)):
                gm = retraced(gm, examples)
        half = Half(is_backward=True, visible=len(gm.graph.output_node().args[0]))  # type: ignore[arg-type]
        code = lower(self._backend, gm, self._partition.joint.state, half, self._config, examples)
        if not self._config.cudagraphs:
            return code
        cotangents = range(len(self._graphs.saved), len(examples))
        return recorded(code, gm.graph, loose=cotangents)

    def _results(self, results: Sequence[Any]) -> list[Any]:
        if self._plain:
            if len(self._places) == len(self.destinations):
                return list(results)
            grads: list[Any] = [None] * len(self.destinations)
            for place, result in zip(self._places, results, strict=True):
                grads[place] = result
            return grads
        values = iter(results)
        return [None if wrapping is None else built(wrapping, values) for wrapping in self._gradients]

    def _as_eager(self, ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        counters["aot_eager_regions"] += 1
        given = dict(zip(self.roots, cotangents, strict=True))
        found = rerun_region(self._partition.joint, self._number, ctx.again, given)
        return [found[there] for there in self.destinations]


def _has_symbols(expected: _Expected) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*expected.shape, *expected.strides))


def _defined(cotangent: Any, expected: _Expected) -> Any:
    if cotangent is not None:
        return cotangent
    zeros = torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
    return built(expected.wrapping, iter([zeros.clone() for _ in range(expected.wrapping.count)]))


def _laid_out(cotangent: Any, expected: _Expected) -> torch.Tensor:
    """The cotangent in the layout that it was traced with."""
    if cotangent is None:
        return torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
    tensor: torch.Tensor = cotangent
    if not expected.is_static:
        return tensor.contiguous()
    if tensor.stride() == expected.strides:
        return tensor
    made = torch.empty_strided(tensor.shape, expected.strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
