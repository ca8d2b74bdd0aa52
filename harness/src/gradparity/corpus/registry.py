"""Names of corpora, and how a case's program is found again.

In: a corpus name or a case address. Out: a Corpus or a Program. Raises UnknownNameError. Besides the corpora
below there are those that other packages provide by the entry-point group "gradparity.corpora" (a callable
without arguments that returns a Corpus), folders, and the finds of a store.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import entry_points

import torch

from gradparity.case import SEPARATOR, Case, Match
from gradparity.corpus.autograd_function_db import autograd_function_db
from gradparity.corpus.base import Addressed, Corpus, Program
from gradparity.corpus.demo import DemoCorpus
from gradparity.corpus.folder import FolderCorpus
from gradparity.corpus.generated import GeneratedCorpus
from gradparity.corpus.hop_db import hop_db
from gradparity.corpus.models import ModelCorpus
from gradparity.corpus.module_db import ModuleCorpus
from gradparity.corpus.op_db import op_db
from gradparity.corpus.scenario import ScenarioCorpus
from gradparity.corpus.threads import ThreadCorpus
from gradparity.corpus.zoo import ZooCorpus
from gradparity.corpus.zoo.architectures import ArchitectureCorpus
from gradparity.errors import CorpusError, UnknownNameError

DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "complex64": torch.complex64}
"""The dtypes besides float32 of which operators have a corpus."""

NAMED: dict[str, Callable[[], Corpus]] = {
    "scenarios": ScenarioCorpus,
    "op_db": op_db,
    **{f"op_db:{name}": partial(op_db, dtype) for name, dtype in DTYPES.items()},
    "op_db_cotangents": partial(op_db, layouts=True),
    **{f"op_db_cotangents:{name}": partial(op_db, dtype, layouts=True) for name, dtype in DTYPES.items()},
    "module_db": ModuleCorpus,
    "module_db_cotangents": partial(ModuleCorpus, layouts=True),
    "module_db:float64": partial(ModuleCorpus, torch.float64),
    "autograd_function_db": autograd_function_db,
    "hop_db": hop_db,
    "models": ModelCorpus,
    "threads": ThreadCorpus,
    "demo": DemoCorpus,
    "generated": GeneratedCorpus,
    "zoo": ZooCorpus,
    "architectures": ArchitectureCorpus,
}

UNUSUAL = ("demo", "generated", "zoo", "architectures", "op_db_cotangents", "module_db_cotangents")
USUAL = [name for name in NAMED if ":" not in name and name not in UNUSUAL]
"""What runs when no corpus is named: everything in float32 that somebody wrote for the purpose."""


FORMS = {
    "folder:<path>": "programs of your own: Python files with scenarios",
    "finds:<store>": "the distinct divergences that a store holds",
}
GROUP = "gradparity.corpora"


@cache
def corpus(name: str) -> Corpus:
    """The corpus of this name; one object per process, because loading a database takes seconds."""
    if name in NAMED:
        return NAMED[name]()
    form, _, rest = name.partition(":")
    if form == "folder" and rest:
        return FolderCorpus(rest)
    if form == "finds" and rest:
        made: Corpus = importlib.import_module("gradparity.stored").FindsCorpus(
            rest
        )  # only the tester has stores
        return made
    if name in (others := provided()):
        return others[name]()
    raise UnknownNameError("corpus", name, [*others, *FORMS, *NAMED])


@cache
def provided() -> dict[str, Callable[[], Corpus]]:
    """The corpora of other packages, by name; loaded when they are asked for."""
    return {point.name: partial(_load, point.name) for point in entry_points(group=GROUP)}


def _load(name: str) -> Corpus:
    (point, *_) = entry_points(group=GROUP, name=name)
    try:
        made: Corpus = point.load()()
    except Exception as error:
        raise CorpusError(f"the corpus {name} of {point.value} cannot be loaded: {error}") from error
    return made


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


def unmatched(globs: Iterable[str], names: Iterable[str]) -> list[UnknownNameError]:
    """For each glob that takes no chunk of these corpora, an error that proposes names like it."""
    chunks = [(name, chunk) for name in names for chunk in corpus(name).chunks()]
    known = list(dict.fromkeys(chunk for _, chunk in chunks))
    missing = [glob for glob in globs if not any(Match((glob,)).takes_chunk(*place) for place in chunks)]
    return [UnknownNameError("case", (glob.split(SEPARATOR) * 2)[1].strip("*"), known) for glob in missing]


def imported_by(case: str) -> str:
    """The folder, file or store that the address of a case names to be imported; "" if it names none."""
    form, _, place = case.partition(SEPARATOR)[0].partition(":")
    return place if form in ("folder", "finds") else ""
