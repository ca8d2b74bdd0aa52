"""alone: programs of a corpus without the tester.

In: a corpus's name, a compiler. Out: programs; of one that ran, the probe with the gradients, values and hook
calls that it recorded.

    from gradparity import corpus

    class Mine(corpus.Way):
        def compile(self, target):
            return my_compiler(target)

    for program in corpus.programs("scenarios", match="two_branches*"):
        seen = corpus.run(program, Mine())
        print(program.case.address, seen.grads(), seen.events)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradparity.case import Match
from gradparity.corpus.base import Program
from gradparity.corpus.registry import corpus
from gradparity.probe import Probe, Way


def programs(name: str, *, match: str = "*", device: str = "cpu", seed: int = 0) -> Iterator[Program]:
    """The programs of a corpus, by address, of those that match the glob. Raises UnknownNameError."""
    source, wanted = corpus(name), Match((match,))
    for chunk in source.chunks():
        if wanted.takes_chunk(name, chunk):
            for program in source.programs(chunk, torch.device(device), seed):
                if wanted.takes(program.case):
                    yield program


def run(
    program: Program, way: Way | None = None, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Probe:
    """Runs a program once. What it raises is raised. `dtype`: float64 makes the reference run."""
    torch.manual_seed(program.case.seed)
    probe = Probe(program.case, way or Way(), dtype, torch.device(device))
    program.body(probe)
    return probe
