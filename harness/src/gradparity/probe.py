"""Probe: the one object through which a program makes inputs and is observed.

In: a case, a `Way` (how a program is compiled, and where its backward runs), dtype, device. Out: recorded
leaves, values and hook events, which `observe` turns into an Outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from gradparity.case import Case
from gradparity.errors import CaseError
from gradparity.outcome import (
    KEEP_ELEMENTS,
    GradRecord,
    HookEvent,
    Invariant,
    Payload,
    StateRecord,
    ValueRecord,
    freeze,
)

T = TypeVar("T")
M = TypeVar("M", bound=torch.nn.Module)

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""What each dtype becomes in the float64 reference run."""


class Way:
    """How programs run: as eager runs them, where a subclass says nothing else."""

    def compile(self, target: T) -> T:
        """Compiles a function or module, or returns it as it is."""
        return target

    def backward(self) -> AbstractContextManager[Any]:
        """The context in which a program runs its backward."""
        return nullcontext()

    def training_step(self, step: Callable[..., T]) -> Callable[..., T]:
        """A whole step that is called without its first argument, `backward`."""

        def backward(loss: torch.Tensor) -> None:
            with self.backward():
                loss.backward()

        return partial(step, backward)

    def wrap_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Protects a recording hook from tracing, where the compiler traces hooks."""
        return hook


class Probe:
    """Makes inputs, wraps what the subject compiles, and records what the program shows.

    Arguments: the case (its seed decides all values), the way in which it runs, the run's dtype, the device.
    `log` is a plain list: what a program appends to it, also inside a compiled function, is observed.
    """

    def __init__(self, case: Case, way: Way, dtype: torch.dtype, device: torch.device) -> None:
        self.case = case
        self.dtype = dtype
        self.device = device
        self.events: list[HookEvent] = []
        self.values: list[ValueRecord] = []
        self.log: list[Any] = []
        self.invariants: list[Invariant] = []
        self._way = way
        self._leaves: dict[str, torch.Tensor] = {}
        self._watched: dict[str, tuple[torch.Tensor, int | None]] = {}
        self._generator: torch.Generator | None = None
        self._on_leaf: list[Callable[[torch.Tensor], None]] = []

    def randn(self, *shape: int, requires_grad: bool = False, dtype: str = "float32") -> torch.Tensor:
        """Normal values of this shape: drawn in float32 on the CPU, rounded to the dtype, then converted to
        the run's.
        """
        return self._made(torch.randn(shape, generator=self._numbers()), requires_grad, dtype)

    def rand(self, *shape: int, requires_grad: bool = False, dtype: str = "float32") -> torch.Tensor:
        """Uniform values in [0, 1) of this shape, made likewise."""
        return self._made(torch.rand(shape, generator=self._numbers()), requires_grad, dtype)

    def randint(self, high: int, *shape: int) -> torch.Tensor:
        """Integers (int64) in [0, high)."""
        return torch.randint(high, shape, generator=self._numbers()).to(self.device)

    def tensor(self, data: Any, requires_grad: bool = False) -> torch.Tensor:
        """Given values; floating point ones are rounded to float32 and converted to the run's dtype."""
        made = torch.as_tensor(data)
        if made.is_floating_point():
            return self._made(made.to(torch.float32), requires_grad)
        return made.to(self.device)

    def leaf(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Registers a tensor whose `.grad` is observed at the end. Raises CaseError if the name is taken."""
        if not isinstance(tensor, torch.Tensor):
            raise CaseError(f"{self.case.address}: the leaf {name!r} is a {type(tensor).__name__}, no tensor")
        if name in self._leaves:
            raise CaseError(f"{self.case.address}: two leaves are called {name!r}")
        self._leaves[name] = tensor
        for do in self._on_leaf:
            do(tensor)
        return self.watch(name, tensor)

    def leaves(self) -> dict[str, torch.Tensor]:
        """The leaves that are registered so far, by name."""
        return dict(self._leaves)

    def each_leaf(self, do: Callable[[torch.Tensor], None]) -> None:
        """Does something with every leaf that is registered from now on."""
        self._on_leaf.append(do)

    def watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Registers a tensor that the program may change: its data, metadata and version counter are observed
        at the end. Leaves and buffers of modules are watched anyway. Raises CaseError if the name is taken.
        """
        if name in self._watched:
            raise CaseError(f"{self.case.address}: two watched tensors are called {name!r}")
        self._watched[name] = (tensor, version_of(tensor))
        return tensor

    def module(self, module: M, name: str = "m") -> M:
        """Converts a module to the run's dtype and device, registers its parameters as leaves "name.weight",
        …, and watches its buffers.
        """
        module.to(device=self.device, dtype=self.dtype)
        for key, parameter in module.named_parameters():
            self.leaf(f"{name}.{key}", parameter)
        for key, buffer in module.named_buffers():
            self.watch(f"{name}.{key}", buffer)
        return module

    def compile(self, target: T) -> T:
        """The function or module as the subject compiles it; itself, for eager and compiled-autograd
        subjects.
        """
        return self._way.compile(target)

    def backward(self) -> AbstractContextManager[Any]:
        """The context for the part of the program that runs backward."""
        return self._way.backward()

    def training_step(self, step: Callable[..., T]) -> Callable[..., T]:
        """A whole training step as the subject runs it, called without its first argument.

        Arguments: `step(backward, *args)`, where `backward(loss)` runs the backward of a scalar. Subjects
        that compile whole steps compile it; others call it with a backward of theirs.
        """
        return self._way.training_step(step)

    def hook(
        self, site: str, fn: Callable[..., Any] | None = None, kind: str = "tensor"
    ) -> Callable[..., Any]:
        """A hook that records a call and then returns `fn(*args)`, or None without `fn`.

        Arguments: the site's name in the event list; what the hook does besides; the kind of hook. For
        "post_accumulate" the payload is the parameter's `.grad`; for "module*" the module argument is left
        out.
        """

        def recording(*args: Any) -> Any:
            self.event(site, *_payload(kind, args), kind=kind)
            return fn(*args) if fn is not None else None

        return self._way.wrap_hook(recording)

    def event(self, site: str, *payload: Any, kind: str = "event") -> None:
        """Records an event by hand: tensors, None, numbers, strings, tuples of these."""
        frozen = tuple(freeze(item, KEEP_ELEMENTS) for item in payload)
        self.events.append(HookEvent(site, kind, frozen))

    def value(self, name: str, value: Any) -> None:
        """Observes an extra value: a tensor, None, a number, or a tuple of these."""
        self.values.append(ValueRecord(name, freeze(value)))

    def invariant(self, name: str, holds: bool, detail: str = "") -> None:
        """Observes whether something holds that must hold in every run, whatever the numbers are."""
        self.invariants.append(Invariant(name, bool(holds), detail))

    def same_mask(self, name: str, output: torch.Tensor, grad: torch.Tensor) -> None:
        """Observes whether an output and a gradient of the same shape are zero in the same places: dropout
        drew its mask once, not again in the backward.
        """
        other = int(((output == 0) != (grad == 0)).sum())
        detail = f"{other} of {output.numel()} elements are zero in only one of output and gradient"
        self.invariant(name, other == 0, detail if other else "")

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor made outside in float32, widened when this is the float64 reference run."""
        wide = WIDER.get(tensor.dtype)
        return tensor.to(wide) if wide is not None and self.is_reference else tensor

    @property
    def seed(self) -> int:
        """The case's seed, which decides all values."""
        return self.case.seed

    @property
    def is_reference(self) -> bool:
        """Whether this run is the float64 reference."""
        return self.dtype is torch.float64

    def grads(self) -> tuple[GradRecord, ...]:
        """The `.grad` of all leaves, as they are now."""
        return tuple(GradRecord(name, freeze(leaf.grad)) for name, leaf in self._leaves.items())

    def state(self) -> tuple[StateRecord, ...]:
        """All watched tensors, as they are now."""
        return tuple(
            StateRecord(name, freeze(tensor), _rise(before, version_of(tensor)))
            for name, (tensor, before) in self._watched.items()
        )

    def logged(self) -> tuple[Payload, ...]:
        """What the program appended to `log`."""
        return tuple(freeze(item, KEEP_ELEMENTS) for item in self.log)

    def release(self) -> None:
        """Lets go of all tensors, and of the gradients and hooks of leaves; nothing is observed afterwards.

        Without it a program's tensors stay for ever: hooks hold the probe, a gradient that was made with a
        graph holds its leaf, and a hook of several leaves holds the node that accumulates into each. These
        are cycles through C++, which Python's collector does not see. A subclass may have made these
        attributes its own: torch's are meant. A tensor that is no leaf has its hooks in the same dictionary.
        """
        base: Any = torch.Tensor
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in self._leaves.values():
                base.grad.__set__(leaf, None)
                for attribute in (base._backward_hooks, base._post_accumulate_grad_hooks):
                    if hooks := attribute.__get__(leaf):
                        hooks.clear()
        self._leaves, self._watched, self._on_leaf = {}, {}, []
        self.events, self.values, self.log, self.invariants = [], [], [], []

    def _numbers(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.case.seed + 1)
        return self._generator

    def _made(self, made: torch.Tensor, requires_grad: bool, dtype: str = "float32") -> torch.Tensor:
        if dtype == "float32":
            return made.to(device=self.device, dtype=self.dtype).requires_grad_(requires_grad)
        return self.cast(made.to(device=self.device, dtype=getattr(torch, dtype))).requires_grad_(
            requires_grad
        )


Body = Callable[[Probe], None]
"""A program: it makes its inputs, runs, and is observed through the probe."""


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter; None where a tensor has none, as inference tensors."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return None


def _rise(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _payload(kind: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if "accumulate" in kind or "post_acc" in kind:
        return tuple(arg.grad if isinstance(arg, torch.Tensor) else arg for arg in args)
    return tuple(arg for arg in args if not isinstance(arg, torch.nn.Module))
