"""The corpus "zoo": models of other people's packages, trained for three steps.

In: packages that are installed (nothing is downloaded: small configurations with random weights). Out: one
chunk a model; a chunk whose package is missing is left out of `chunks`, and asked for by name it raises
UnavailableError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.zoo.methods import METHODS
from gradparity.corpus.zoo.patterns import PATTERNS
from gradparity.corpus.zoo.recipe import Recipe, is_installed
from gradparity.corpus.zoo.science import SCIENCE
from gradparity.corpus.zoo.transformers import TRANSFORMERS
from gradparity.corpus.zoo.vision import VISION
from gradparity.errors import UnavailableError, UnknownNameError

ZOO: Mapping[str, Recipe] = MappingProxyType({**TRANSFORMERS, **VISION, **SCIENCE, **METHODS, **PATTERNS})


class ZooCorpus:
    """The zoo as a corpus."""

    name = "zoo"

    def chunks(self) -> list[str]:
        """The models whose packages are installed."""
        here = {package: is_installed(package) for package in {recipe.package for recipe in ZOO.values()}}
        return [name for name, recipe in ZOO.items() if here[recipe.package]]

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """Three training steps of this model."""
        if chunk not in ZOO:
            raise UnknownNameError("model of the zoo", chunk, sorted(ZOO))
        recipe = ZOO[chunk]
        if not is_installed(recipe.package):
            raise UnavailableError(
                f"zoo::{chunk}", f"{recipe.package} is not installed", "pip install 'gradparity[zoo]'"
            )
        yield Program(Case(self.name, chunk, None, seed), recipe.body, recipe.doc or chunk, fp64=recipe.fp64)
