"""Outcome: everything that was observed of one run of one program.

In: live tensors, hook payloads, an exception. Out: frozen records that later writes by the program cannot
change. Tensors stay in the process that made them; only fingerprints and texts leave it.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

KEEP_ELEMENTS = 1 << 16
"""Tensors in hook payloads are kept up to this many elements; of larger ones the head is kept, and the
hash of all.
"""


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """A snapshot of a tensor: metadata, and copies of its data (`parts`: one for a strided tensor, several
    for sparse, nested and wrapper subclasses). `digest` is set where the data was cut short.
    """

    cls: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    layout: str
    requires_grad: bool
    parts: tuple[torch.Tensor, ...]
    digest: str | None = None

    def describe(self) -> str:
        """Short text: dtype, shape and fingerprint."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(map(str, self.shape))}]#{fingerprint(self)}"


Payload = TensorRecord | None | bool | int | float | complex | str | tuple["Payload", ...]


@dataclass(frozen=True)
class ValueRecord:
    """An extra value that the program asked to observe."""

    name: str
    value: Payload


@dataclass(frozen=True)
class GradRecord:
    """The `.grad` of one registered leaf when the program ended."""

    name: str
    value: Payload


@dataclass(frozen=True)
class StateRecord:
    """A tensor that the program may change, when the program ended: a leaf, a buffer, an input. `changes` is
    by how much autograd's version counter rose; None where the tensor has no counter.
    """

    name: str
    value: Payload
    changes: int | None = None


@dataclass(frozen=True)
class Invariant:
    """Something that must hold within one run, whatever the numbers are."""

    name: str
    holds: bool
    detail: str = ""


@dataclass(frozen=True)
class HookEvent:
    """One observed call: where (site), what kind of hook, and what it was given."""

    site: str
    kind: str
    payload: tuple[Payload, ...]

    @property
    def fingerprint(self) -> str:
        """A stable hash of the payload's bytes, shapes and dtypes."""
        return fingerprint(self.payload)

    def describe(self) -> str:
        """One readable line."""
        return f"{self.kind} {self.site} ({describe(self.payload)})"


@dataclass(frozen=True)
class Raised:
    """An exception that escaped the program: its type's qualified name, all base types' names, its text, and
    what it comes from: the innermost function of a package that raised (`where`), and the first line of the
    first exception in its chain of causes (`cause`).
    """

    type: str
    bases: tuple[str, ...]
    message: str
    where: str = ""
    cause: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """The record of an exception."""
        names = tuple(
            f"{t.__module__}.{t.__qualname__}".removeprefix("builtins.") for t in type(error).__mro__
        )
        first = _first_cause(error)
        line = next((line.strip() for line in str(first).splitlines() if line.strip()), "")
        return cls(names[0], names, str(error), _where(first), f"{type(first).__name__}: {line}")


@dataclass(frozen=True)
class WarningRecord:
    """A warning: category and text."""

    category: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """All that was observed of one run. `notes` hold what the subject says about itself (fallbacks, own
    warnings). `log` is what the program appended to `Probe.log`, and after it the lines
    that it printed; `random` fingerprints the state of the
    random number generators after the run, and `drew` says whether the run moved them.
    """

    grads: tuple[GradRecord, ...] = ()
    values: tuple[ValueRecord, ...] = ()
    events: tuple[HookEvent, ...] = ()
    state: tuple[StateRecord, ...] = ()
    log: tuple[Payload, ...] = ()
    invariants: tuple[Invariant, ...] = ()
    random: str = ""
    drew: bool = False
    raised: Raised | None = None
    warnings: tuple[WarningRecord, ...] = ()
    notes: tuple[str, ...] = ()
    compiles: int = 0
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


def snapshot(tensor: torch.Tensor, keep: int | None = None) -> TensorRecord:
    """Copies a tensor and its metadata.

    Arguments: the tensor; `keep`, the largest number of elements to copy (None: all).
    """
    strided = tensor.layout is torch.strided and not tensor.is_nested
    with torch.no_grad():
        live = _parts(tensor)
        parts = tuple(_own_copy(part, keep) for part in live)
        cut = keep is not None and any(part.numel() > keep for part in live)
        return TensorRecord(
            cls=_class_name(tensor),
            dtype=tensor.dtype,
            shape=_shape(tensor),
            strides=_plain_numbers(tensor.stride()) if strided else None,
            layout=str(tensor.layout),
            requires_grad=tensor.requires_grad,
            parts=parts,
            digest=_digest(live) if cut else None,
        )


def freeze(value: Any, keep: int | None = None) -> Payload:
    """Turns tensors, None, numbers, strings and (nested) containers of them into a Payload."""
    if isinstance(value, torch.Tensor):
        return snapshot(value, keep)
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item, keep) for item in value)
    if isinstance(value, dict):
        return ("dict", *(freeze(item, keep) for item in value.items()))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted((freeze(item, keep) for item in value), key=repr))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, torch.nn.Module):
        return "<Module>"  # what a compiler made of a module has a class of its own
    return f"<{type(value).__name__}>"


def tensors_of(payload: Payload) -> Iterable[TensorRecord]:
    """All tensor records of a payload, in order."""
    if isinstance(payload, TensorRecord):
        yield payload
    elif isinstance(payload, tuple):
        for item in payload:
            yield from tensors_of(item)


def fingerprint(payload: Payload) -> str:
    """A stable short hash of bytes, shapes, dtypes and structure."""
    return hashlib.blake2b(_canonical(payload), digest_size=6).hexdigest()


def describe(payload: Payload) -> str:
    """Readable text of a payload: small values in full, others as dtype[shape]#hash."""
    if isinstance(payload, TensorRecord):
        if payload.digest is None and sum(part.numel() for part in payload.parts) <= 4:
            numbers = " ".join(f"{x:.6g}" if isinstance(x, float) else str(x) for x in _numbers(payload))
            return f"{payload.describe().split('#')[0]}={numbers}"
        return payload.describe()
    if isinstance(payload, tuple):
        return ", ".join(f"({describe(x)})" if isinstance(x, tuple) else describe(x) for x in payload)
    return repr(payload)


def _first_cause(error: BaseException) -> BaseException:
    """The exception at the end of the chain of causes; Dynamo keeps some of them in an attribute."""
    seen = {id(error)}
    while True:
        cause = error.__cause__ or getattr(error, "inner_exception", None)
        if not isinstance(cause, BaseException) or id(cause) in seen:
            return error
        error = cause
        seen.add(id(error))


def _where(error: BaseException) -> str:
    """ "torch/_functorch/partitioners.py:cut", the innermost frame inside an installed package, or ""."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        head, site, path = frame.f_code.co_filename.replace("\\", "/").rpartition("/site-packages/")
        if site and head:
            found = f"{path}:{frame.f_code.co_name}"
    return found


def _numbers(record: TensorRecord) -> list[Any]:
    return [number for part in record.parts for number in part.reshape(-1).tolist()]


def _canonical(payload: Payload) -> bytes:
    if isinstance(payload, TensorRecord):
        head = f"T{payload.cls}{payload.dtype}{payload.shape}{payload.layout}"
        return f"{head}{payload.digest or _digest(payload.parts)}".encode()
    if isinstance(payload, tuple):
        return b"(" + b",".join(_canonical(item) for item in payload) + b")"
    return repr(payload).encode()


def _digest(parts: Iterable[torch.Tensor]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        flat = part.detach().cpu().contiguous().reshape(-1)
        if flat.dtype.is_floating_point or flat.dtype.is_complex:
            flat = torch.where(torch.isnan(flat), torch.full_like(flat, float("nan")), flat + 0)
        state.update(flat.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _own_copy(part: torch.Tensor, keep: int | None) -> torch.Tensor:
    if keep is not None and part.numel() > keep:
        return part.reshape(-1)[:keep].clone()
    if part.dtype is torch.complex32:  # hardly any operator exists for it, not even equality
        part = part.to(torch.complex64)
    return part.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    if tensor.is_nested:
        return [part for item in tensor.unbind() for part in _parts(item)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    return [tensor.as_subclass(torch.Tensor)]


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.is_nested and not _is_jagged(tensor) else _plain_numbers(tensor.shape)


def _plain_numbers(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Sizes or strides; -1 for what is no number: a symbol, which only a jagged tensor may have."""
    return tuple(int(size) if isinstance(size, int) else -1 for size in sizes)


def _is_jagged(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.jagged


def _class_name(tensor: torch.Tensor) -> str:
    cls = type(tensor)
    return "Tensor" if cls in (torch.Tensor, torch.nn.Parameter) else f"{cls.__module__}.{cls.__qualname__}"
