"""What ``aot.compile`` returns: called like what was captured.

In: arguments, or flat inputs. Out: what the captured function returns. Inputs that are not like those of the
capture are refused; ``aot.function`` captures again for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from retrograd._torch.pytree import tree_flatten
from retrograd._torch.trace import InputGuard
from retrograd.aot.calls import FlatCall
from retrograd.aot.run.call import CompiledFunction
from retrograd.errors import CallError, CodeFailedError, NotReadyError, Reason
from retrograd.graph.capture_state import CaptureState, Leaf
from retrograd.graph.partition import Partition
from retrograd.specialize.guard import guard_as_traced


class Compiled:
    """A compiled joint graph with real autograd.

    Attributes:
        code: what runs, for flat inputs that are known to fit.
    """

    def __init__(self, code: CompiledFunction) -> None:
        self.code = code
        self._state: CaptureState = code.partition.joint.state
        self._guard: InputGuard | None = None

    @property
    def partition(self) -> Partition:
        """What it was made of."""
        return self.code.partition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it like what was captured; a module's parameters and buffers are those that it has now.

        Raises:
            CallError: arguments unlike those of the capture.
        """
        state, (flat, spec) = self._state, tree_flatten((args, kwargs))
        if state.in_spec is not None and spec != state.in_spec:
            raise self._error(
                "arguments", f"the arguments are {spec}, and were {state.in_spec}", "give them as then"
            )
        held = state.call.state.current() if isinstance(state.call, FlatCall) else []
        if len(held) + len(flat) != len(state.leaves):
            count = len(state.leaves) - len(held)
            raise self._error(
                "arguments", f"{count} inputs were captured, and {len(flat)} are given", _WITH_STATE
            )
        return self._checked([*held, *flat])

    def flat(self, leaves: Sequence[Any]) -> Any:
        """Call it with flat inputs: a module's parameters and buffers first, then the arguments.

        Raises:
            CallError: inputs unlike those of the capture.
        """
        if not isinstance(leaves, (list, tuple)):
            raise self._error(
                "inputs", f"expected a list of inputs, got {type(leaves).__name__}", _WITH_STATE
            )
        expected = len(self._state.leaves)
        if len(leaves) != expected:
            raise self._error(
                "inputs", f"{expected} inputs were captured, and {len(leaves)} are given", _WITH_STATE
            )
        return self._checked(list(leaves))

    def _checked(self, leaves: list[Any]) -> Any:
        if self._guard is None or not self._guard.check(leaves):
            for leaf, value in zip(self._state.leaves, leaves, strict=True):
                for what in _differences(leaf, value):
                    raise self._error(leaf.name, f"{leaf.name} {what}", _ANEW)
            if self._guard is not None:
                raise self._error("inputs", self._guard.why_not(leaves), _ANEW)
            self._guard = guard_as_traced(leaves, self._state)
        try:
            return self.code(leaves)
        except (CodeFailedError, NotReadyError) as error:
            raise error.__cause__ or error from None

    def _error(self, role: str, text: str, way_out: str) -> CallError:
        name = self._state.name
        return CallError(
            Reason("call", f"cannot call the compiled {name}: {text}", "aot.call", role, way_out=way_out)
        )


_WITH_STATE = "call it like the function that was captured, or .flat([...]) with its state first"
_ANEW = "capture it for such inputs too, or use aot.function, which does"


def _differences(leaf: Leaf, value: Any) -> Iterator[str]:
    """What makes `value` another kind of input than `leaf`."""
    if not isinstance(leaf.value, torch.Tensor):
        if leaf.kind is None and (type(value) is not type(leaf.value) or value != leaf.value):
            yield f"was {leaf.value!r} at capture, and is {value!r}"
        return
    if not isinstance(value, torch.Tensor):
        yield f"was a tensor at capture, and is {type(value).__name__}"
        return
    fake = leaf.value
    static = [size if type(size) is int else None for size in fake.shape]
    sizes_fit = value.dim() == len(static) and all(
        size is None or size == now for size, now in zip(static, value.shape, strict=True)
    )
    if not sizes_fit:
        yield f"had sizes {list(fake.shape)} at capture, and has {list(value.shape)}"
    for what in ("dtype", "device"):
        if getattr(value, what) != getattr(fake, what):
            yield f"had {what} {getattr(fake, what)} at capture, and has {getattr(value, what)}"
    if value.requires_grad != leaf.requires_grad:
        yield f"{'required' if leaf.requires_grad else 'did not require'} grad at capture"
