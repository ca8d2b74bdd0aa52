"""Names of corpora, and how a case's program is found again.

In: a corpus name or a case address. Out: a Corpus or a Program. Raises UnknownNameError.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

import gradparity.corpus.scenarios as _scenarios  # noqa: F401 - importing the package registers its scenarios
from gradparity.case import Case
from gradparity.corpus.autograd_function_db import autograd_function_db
from gradparity.corpus.base import Addressed, Corpus, Program
from gradparity.corpus.generated import GeneratedCorpus
from gradparity.corpus.hop_db import hop_db
from gradparity.corpus.models import ModelCorpus
from gradparity.corpus.module_db import ModuleCorpus
from gradparity.corpus.op_db import op_db
from gradparity.corpus.scenario import ScenarioCorpus
from gradparity.errors import UnknownNameError

DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "complex64": torch.complex64}
"""The dtypes besides float32 of which operators have a corpus."""

NAMED: dict[str, Callable[[], Corpus]] = {
    "scenarios": ScenarioCorpus,
    "op_db": op_db,
    **{f"op_db:{name}": partial(op_db, dtype) for name, dtype in DTYPES.items()},
    "module_db": ModuleCorpus,
    "module_db:float64": partial(ModuleCorpus, torch.float64),
    "autograd_function_db": autograd_function_db,
    "hop_db": hop_db,
    "models": ModelCorpus,
    "generated": GeneratedCorpus,
}

USUAL = [name for name in NAMED if ":" not in name and name != "generated"]
"""What runs when no corpus is named: everything in float32 that somebody wrote."""


@cache
def corpus(name: str) -> Corpus:
    """The corpus of this name; one object per process, because loading a database takes seconds."""
    if name not in NAMED:
        raise UnknownNameError("corpus", name, list(NAMED))
    return NAMED[name]()


def program(case: Case, device: torch.device) -> Program:
    """The program of this case."""
    source = corpus(case.corpus)
    if isinstance(source, Addressed):
        return source.program(case, device)
    found = 0
    for item in source.programs(case.name, device, case.seed):
        if item.case == case or (case.index is None and item.case.index is None):
            return item
        found += 1
    known = [f"{case.corpus}::{case.name}::0 … {found - 1}"] if found else []
    raise UnknownNameError("case", case.address, known)
