"""Recovers from code that raises in a run after its first.

In: a backend, and a graph to compile. Out: the backend's code. If it raises, and its inputs are unchanged, we
interpret the graph. Random numbers are drawn again from the same generator states. The caller handles an
error in the first run, because it has more ways to recover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any
from weakref import ref

import torch
from torch import fx

from retrograd.backends.base import SEGMENT, Backend, Boxed, GraphKind
from retrograd.backends.registry import AtenBackend, InductorBackend
from retrograd.engine import versions_of
from retrograd.graph.fx import has_effect, only_draws, random_devices
from retrograd.policy import MOST_FAILURES, WATCHED_RUNS
from retrograd.report import tell, why_failed
from retrograd.runtime.modes import generator_states, restore_generator_states


def compile_fallible(
    backend: Backend,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    half: GraphKind = SEGMENT,
    *,
    strict: bool = False,
    is_proven: bool = False,
) -> Boxed:
    """Compile with `backend`, unless the graph only returns its inputs.

    The caller gets all errors if `strict`, or if the graph has other effects than drawing random numbers. It
    gets errors of the first run unless `is_proven`.
    """
    if all(node.op in ("placeholder", "output") for node in gm.graph.nodes):
        return AtenBackend().compile(gm, example_inputs)
    effects = filter(has_effect, gm.graph.nodes)
    if strict or isinstance(backend, AtenBackend) or not all(map(only_draws, effects)):
        return backend.compile(gm, example_inputs, half)
    own = AtenBackend().compile(gm, example_inputs)  # before the backend can change the graph
    draws = random_devices(gm.graph)
    code = backend.compile(gm, example_inputs, half)
    is_foreign = not isinstance(backend, InductorBackend)
    return _FallibleCode(backend.name, code, own, draws, is_foreign, int(is_proven))


@dataclass(eq=False)
class _FallibleCode:
    """Code that may be replaced by its interpreted graph.

    We do not keep the inputs alive: code frees them as it runs. Inputs that it has not freed when it raises
    are still alive in its frames.

    Attributes:
        name: of the backend.
        run: the code.
        own: interprets the graph.
        draws: devices whose generators the graph uses.
        is_foreign: whether the code is from a user's backend. It may mutate its inputs, although the graph
            does not, and we watch all its runs.
        runs: how many runs it counts.
        failures: how often it raised.
    """

    name: str
    run: Boxed
    own: Boxed
    draws: Sequence[torch.device]
    is_foreign: bool
    runs: int = 0
    failures: int = 0

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the code."""
        if self.runs >= WATCHED_RUNS and not self.is_foreign:
            self.own = self.run  # we no longer need the graph
            return self.run(args)
        if self.runs == 0:
            results = self.run(args)
            self.runs = 1
            return results
        self.runs += 1
        given = [ref(value) if isinstance(value, torch.Tensor) else value for value in args]
        versions = versions_of(args) if self.is_foreign else None
        generators = generator_states(self.draws)
        try:
            return self.run(args)
        except Exception as error:
            values = [one() if isinstance(one, ref) else one for one in given]
            if any(isinstance(one, ref) and one() is None for one in given):
                raise
            if versions is not None and versions_of(values) != versions:
                raise
            restore_generator_states(generators)
            clear_frames(error.__traceback__)  # they hold the code's intermediate results
            return self._made_good(values, error)

    def _made_good(self, values: list[Any], error: Exception) -> Sequence[Any]:
        """The results of the interpreted graph. If that raises too, `error` is the program's fault."""
        try:
            results = self.own(values)
        except Exception:
            raise error from None
        self.failures += 1
        if self.failures >= MOST_FAILURES and not isinstance(error, torch.OutOfMemoryError):
            self.run = self.own
        reason = why_failed(f"the code of backend {self.name!r}", error, "backend")
        tell(reason, "a graph was interpreted")
        return results
