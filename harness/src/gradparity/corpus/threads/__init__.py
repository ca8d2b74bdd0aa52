"""The corpus "threads": thirty public threads about wrong results of compiled PyTorch, each as a program.

In: nothing; importing this package makes the programs. Out: `THREADS`, by name: `t182012` is pytorch#182012.
What needs a GPU to go wrong is here too, in the same form. Each docstring says what eager does.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.scenario import Scenario, program_of
from gradparity.corpus.threads.composition import SCENARIOS as COMPOSITION
from gradparity.corpus.threads.functions import SCENARIOS as FUNCTIONS
from gradparity.corpus.threads.mutation import SCENARIOS as MUTATION
from gradparity.corpus.threads.outputs import SCENARIOS as OUTPUTS
from gradparity.corpus.threads.scattering import SCENARIOS as SCATTERING
from gradparity.corpus.threads.steps import SCENARIOS as STEPS
from gradparity.errors import UnknownNameError

THREADS: dict[str, Scenario] = {**SCATTERING, **MUTATION, **FUNCTIONS, **OUTPUTS, **COMPOSITION, **STEPS}


class ThreadCorpus:
    """One chunk and one case per thread."""

    name = "threads"

    def chunks(self) -> list[str]:
        """Names of all threads."""
        return list(THREADS)

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """The one program of this thread."""
        if chunk not in THREADS:
            raise UnknownNameError("thread", chunk, sorted(THREADS))
        yield program_of(THREADS[chunk], Case(self.name, chunk, None, seed))
