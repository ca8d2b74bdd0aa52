"""The corpus "architectures": a small model of every architecture that packages have, trained for three steps.

In: what the installed packages say of themselves: the modules of timm, and the types of models of transformers
that predict words or classes of images. So it grows with them, and nobody chose what is easy. Out: one chunk
an architecture; of images a program for each memory format. Nothing is downloaded. Whether eager trains a
model that was made small by rules is not known before: where it raises, the case is set aside.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.zoo.recipe import Trained, is_installed, trained
from gradparity.corpus.zoo.shrunk import Task, build, tasks
from gradparity.corpus.zoo.transformers import VOCABULARY
from gradparity.errors import UnknownNameError
from gradparity.probe import Probe

CLASSES, BATCH, LENGTH = 10, 2, 16
MOST_PARAMETERS = 100_000_000
#: the side of an image, if the model takes any.
SIDE = 96
FORMATS = (torch.contiguous_format, torch.channels_last)
#: what small models of timm have in their names, the smallest first.
SMALL = (
    "test", "atto", "femto", "pico", "nano", "xxs", "tiny", "xs", "mini", "s0", "18", "26", "b0", "s1", "t0",
    "small", "50", "base",
)  # fmt: skip


class ArchitectureCorpus:
    """The architectures as a corpus."""

    name = "architectures"

    def chunks(self) -> list[str]:
        """Those of the packages that are installed."""
        images = _small_ones() if is_installed("timm") else []
        return [f"timm/{name}" for name in images] + [f"transformers/{kind}" for kind in tasks()]

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """Three training steps of this model; in channels last too, if it takes images."""
        package, _, name = chunk.partition("/")
        if chunk not in self.chunks():
            raise UnknownNameError("architecture", chunk, self.chunks())
        is_of_images = package == "timm" or tasks()[name].is_of_images
        for number, memory_format in enumerate(FORMATS if is_of_images else FORMATS[:1]):
            make = partial(_timm if package == "timm" else _transformers, name, memory_format)
            body, case = trained(package, make).body, Case(self.name, chunk, number, seed)
            yield Program(case, body, f"{chunk} in {memory_format}", untried=True)


def _small_ones() -> list[str]:
    """For each module of timm, the model that seems to be the smallest."""
    timm: Any = importlib.import_module("timm")
    modules = [timm.list_models(module=module) for module in timm.list_modules()]
    return [min(names, key=_size) for names in modules if names]


def _size(name: str) -> tuple[int, int, str]:
    places = (place for place, word in enumerate(SMALL) if word in name)
    return next(places, len(SMALL)), len(name), name


def _timm(name: str, memory_format: torch.memory_format, p: Probe) -> Trained:
    timm: Any = importlib.import_module("timm")
    model = _if_small(partial(timm.create_model, name, num_classes=CLASSES))
    channels, *sides = model.default_cfg["input_size"]
    if not model.default_cfg.get("fixed_input_size"):
        sides = [min(side, SIDE) for side in sides]
    images = [p.randn(BATCH, channels, *sides).to(memory_format=memory_format) for _ in range(2)]
    return Trained(model.to(memory_format=memory_format), images, _energy)


def _transformers(kind: str, memory_format: torch.memory_format, p: Probe) -> Trained:
    task = tasks()[kind]
    model = _if_small(partial(build, task))
    if not task.is_of_images:
        batches = [p.randint(VOCABULARY - 3, BATCH, LENGTH) + 3 for _ in range(2)]
        return Trained(model, [{"input_ids": batch, "labels": batch} for batch in batches], _loss)
    images = [p.randn(BATCH, 3, *_sides(task, model)).to(memory_format=memory_format) for _ in range(2)]
    return Trained(model.to(memory_format=memory_format), [{"pixel_values": one} for one in images], _loss)


def _sides(task: Task, model: Any) -> list[int]:
    side = getattr(model.config, "image_size", SIDE)
    return [side, side] if isinstance(side, int) else list(side)


def _if_small(make: Callable[[], Any]) -> Any:
    """What `make` makes. It is counted without memory first; some models cannot be made so.

    Raises:
        ValueError: it has too many parameters.
    """
    count = 0
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):
        count = sum(parameter.numel() for parameter in make().parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it has {count:,} parameters, and {MOST_PARAMETERS:,} are the most")
    return make()


def _energy(model: Any, batch: Any) -> torch.Tensor:
    outputs = [one for one in tree_leaves(model(batch)) if isinstance(one, torch.Tensor)]
    total: torch.Tensor = sum(one.float().square().mean() for one in outputs)  # type: ignore[assignment]
    return total


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result = model(**batch)
    loss: torch.Tensor | None = result.loss
    return result.logits.float().square().mean() if loss is None else loss
