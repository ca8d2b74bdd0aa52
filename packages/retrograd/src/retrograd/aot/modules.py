"""The state of a module: parameters and buffers as inputs of a function.

In: a module. Out: `ModuleState`: its tensors, each once however often it is tied, and a way to call the
module with others in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from retrograd.errors import CaptureError, Reason
from retrograd.graph.joint import PrimalKind

__all__ = ["ModuleState", "StateReplacedError"]


class StateReplacedError(Exception):
    """The module put another tensor in the place of a parameter or buffer; the text says which."""


@dataclass(frozen=True)
class ModuleState:
    """The tensors of a module.

    Attributes:
        module: None for a function that is no module.
        names, kinds, tensors: of each tensor, parameters first.
        places: for each tensor, the dictionaries that hold it, with its name there.
    """

    module: nn.Module | None = None
    names: tuple[str, ...] = ()
    kinds: tuple[PrimalKind, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    places: tuple[tuple[tuple[dict[str, Any], str], ...], ...] = ()

    @staticmethod
    def of(module: nn.Module) -> ModuleState:
        """The state of `module`.

        Raises:
            CaptureError: a parameter or buffer that is not initialised yet.
        """
        found: dict[int, tuple[str, PrimalKind, torch.Tensor, list[tuple[dict[str, Any], str]]]] = {}
        for kind in (PrimalKind.PARAMETER, PrimalKind.BUFFER):
            for path, child in module.named_modules():
                holder: dict[str, Any] = child._parameters if kind is PrimalKind.PARAMETER else child._buffers
                for key, tensor in holder.items():
                    if tensor is not None:
                        name = f"{path}.{key}" if path else key
                        _refuse_lazy(module, name, tensor)
                        entry = found.setdefault(id(tensor), (name, kind, tensor, []))
                        entry[3].append((holder, key))
        names, kinds, tensors, places = zip(*found.values(), strict=True) if found else ((), (), (), ())
        return ModuleState(module, names, kinds, tensors, tuple(map(tuple, places)))

    def current(self) -> list[torch.Tensor]:
        """The tensors that are in these places now."""
        return [places[0][0][places[0][1]] for places in self.places]

    def is_tied_as_before(self) -> bool:
        """Whether places that held one and the same tensor still do."""
        return all(
            holder.get(key) is places[0][0].get(places[0][1])
            for places in self.places
            if len(places) > 1
            for holder, key in places[1:]
        )

    @contextmanager
    def replaced(self, tensors: Sequence[Any]) -> Iterator[None]:
        """The module with `tensors` in place of its own.

        Raises:
            StateReplacedError: on leaving, if the module itself replaced one.
        """
        before = self.current()
        try:
            self._place(tensors)
            yield
            for name, tensor, places in zip(self.names, tensors, self.places, strict=True):
                if any(holder.get(key) is not tensor for holder, key in places):
                    raise StateReplacedError(f"{name} is assigned anew by the module")
        finally:
            self._place(before)

    def _place(self, tensors: Sequence[Any]) -> None:
        for tensor, places in zip(tensors, self.places, strict=True):
            for holder, key in places:
                holder[key] = tensor


def _refuse_lazy(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise CaptureError(
            Reason(
                "lazy-state",
                f"{name} of {type(module).__name__} is not initialised",
                "aot.create_state",
                node=name,
                way_out="call the module once on real inputs first",
            )
        )
