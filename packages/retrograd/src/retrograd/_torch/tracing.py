"""Trace a segment to ATen under fake tensors. No Dynamo, no AOTAutograd.

In: a boxed function, the values that it is called with, and which sizes are to be symbolic. Out: a
`Traced` graph that mutates nothing, its fake inputs and the shape environment with the guards that
tracing left there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from retrograd._torch.garbage import no_garbage_search
from retrograd._torch.history import History, history_of, saved_tensors_unseen
from retrograd._torch.lazy_modules import lazily
from retrograd._torch.provenance import noting
from retrograd._torch.subclasses import is_wrapper

__all__ = [
    "NotTraceableError",
    "Traced",
    "arguments_read",
    "is_batched",
    "is_operator",
    "quiet_fakes",
    "trace",
    "why_not_traceable",
]

Boxed = Callable[[list[Any]], Sequence[Any]]


class NotTraceableError(Exception):
    """The segment cannot be expressed as a functional ATen graph; the text says why."""


@dataclass(frozen=True)
class Traced:
    """A traced segment.

    Attributes:
        gm: the functional ATen graph; returns a tuple of the outputs that are not None.
        example_inputs: fake tensors and symbolic integers, one per value of `fed`.
        fed: positions of the arguments that the graph takes.
        given: for each output of the segment, its position in the graph's result, or None.
        shape_env: has the guards; None when every size is static.
        history: what eager's autograd would record; None outside of grad mode.
    """

    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    shape_env: ShapeEnv | None
    history: History | None = None


def is_batched(value: Any) -> bool:
    """Whether the value is a tensor of torch's older vmap, which ``is_grads_batched`` uses."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def is_operator(target: Any) -> bool:
    """Whether a call's target is an operator of torch, of ATen or of higher order."""
    return isinstance(target, torch._ops.OperatorBase)


def why_not_traceable(value: Any) -> str | None:
    """Why a segment with this input has to be interpreted; None if it can be traced."""
    if not isinstance(value, torch.Tensor):
        return (
            None if value is None or isinstance(value, (int, float)) else f"{type(value).__name__} argument"
        )
    if is_wrapper(value):
        names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(value, name) for name in names]
        return next(filter(None, (why_not_traceable(p) for p in parts if isinstance(p, torch.Tensor))), None)
    if not _dispatches_as_plain(value):
        return f"tensor subclass {type(value).__name__}"
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "tensor wrapped by a functorch transform"
    if value.layout is not torch.strided:
        return f"{value.layout} tensor"
    if value.is_quantized or value.is_nested:
        return "quantized tensor" if value.is_quantized else "nested tensor"
    return None


def _dispatches_as_plain(value: torch.Tensor) -> bool:
    """Whether the dispatcher treats the tensor as a plain one, whatever its Python class adds to it."""
    return type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def trace(
    fn: Boxed,
    args: Sequence[Any],
    symbolic: Mapping[int, frozenset[int]] | None,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Traced:
    """Trace `fn`, in grad mode if that is on.

    Args:
        fn: runs the segment on a list of values.
        args: the values, each one that `why_not_traceable` has nothing against; None for undefined
            gradients.
        symbolic: for each argument, which dimensions are symbolic (dimension 0 of an int is its value);
            None to make every size static.
        decompositions: applied while tracing.

    Raises:
        NotTraceableError: an operation that a functional ATen graph cannot hold.
        NoHistoryError: in grad mode, an output that is a view.
        Exception: whatever an operation raises on fake tensors.
    """
    shape_env = ShapeEnv() if symbolic is not None else None
    fakes = _Fakes(shape_env, symbolic or {}).of(args)
    fed = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, (torch.Tensor, torch.SymInt)))
    given: list[int | None] = []

    def flat(*inputs: Any) -> tuple[Any, ...]:
        values = dict(zip(fed, inputs, strict=True))
        results = fn([values.get(i, args[i]) for i in range(len(args))])
        present = [result for result in results if result is not None]
        count = iter(range(len(present)))
        given[:] = [None if result is None else next(count) for result in results]
        return tuple(present)

    example_inputs = tuple(fakes[i] for i in fed)
    with no_garbage_search:
        with enable_python_dispatcher(), quiet_fakes():
            history = history_of(fn, fakes) if torch.is_grad_enabled() else None
        gm = _functional_graph(flat, example_inputs, decompositions)
    if history is not None and (drawn := _random(gm)):
        raise NotTraceableError(
            f"{drawn[0].target} draws random numbers, which its derivative would draw anew"
        )
    return Traced(gm, example_inputs, fed, tuple(given), shape_env, history)


def arguments_read(fn: Boxed, args: Sequence[Any]) -> frozenset[int]:
    """Positions of the tensors whose values `fn`, differentiated or not, reads.

    Raises:
        Exception: as `trace`.
    """
    fakes = _Fakes(None, {}).of(args)
    fed = [i for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)]

    def flat(*inputs: Any) -> tuple[Any, ...]:
        values = dict(zip(fed, inputs, strict=True))
        results = fn([values.get(i, value) for i, value in enumerate(args)])
        return tuple(result for result in results if result is not None)

    read: set[int] = set()
    for mode in (False, True):
        with torch.set_grad_enabled(mode):
            gm = _make_fx(flat, tuple(fakes[i] for i in fed), {})
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        read.update(i for i, node in zip(fed, placeholders, strict=True) if node.users)
    return frozenset(read)


def _functional_graph(
    fn: Callable[..., Any], example_inputs: tuple[Any, ...], decompositions: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """Trace as it is; if the graph mutates, functionalise the graph. (Not the function: functionalisation
    would hide from it which of its arguments require grad, and would meet tensor subclasses.)"""
    gm = _make_fx(fn, example_inputs, decompositions)
    if _mutations(gm):
        with torch.no_grad():
            mutating = gm
            functional = torch.func.functionalize(lambda *args: mutating(*args), remove="mutations")
            gm = _make_fx(functional, example_inputs, decompositions)
    if left := _mutations(gm):
        raise NotTraceableError(f"{left[0].target} changes one of the segment's inputs in place")
    return gm


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """torch logs an operation that fails on fake tensors as an error; here it becomes a reason."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _make_fx(
    fn: Callable[..., Any], example_inputs: tuple[Any, ...], decompositions: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    with enable_python_dispatcher(), quiet_fakes(), saved_tensors_unseen(), noting(), lazily():
        gm = make_fx(fn, decomposition_table=dict(decompositions), tracing_mode="real")(*example_inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _random(gm: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
    ]


def _mutations(gm: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]


class _Fakes:
    """Fake tensors and symbolic integers for real values, in one fake mode."""

    def __init__(self, shape_env: ShapeEnv | None, symbolic: Mapping[int, frozenset[int]]) -> None:
        self._shape_env = shape_env
        self._symbolic = symbolic
        self._mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
        self._seen: dict[int, Any] = {}

    def of(self, values: Sequence[Any]) -> list[Any]:
        """One fake per value; the same tensor twice gives the same fake; None and static numbers stay."""
        return [self._fake(i, value) for i, value in enumerate(values)]

    def _fake(self, index: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._seen:
                with torch._C.DisableTorchFunctionSubclass():
                    plain = value.detach()
                fake = self._tensor(index, plain)
                # Some formulas ask their saved tensors (linalg.solve: which gradients are wanted).
                self._seen[id(value)] = fake.requires_grad_(value.requires_grad)
            return self._seen[id(value)]
        if type(value) is int and self._symbolic.get(index):
            return self._integer(index, value)
        return value

    def _tensor(self, index: int, value: torch.Tensor) -> torch.Tensor:
        source = LocalSource(f"t{index}")
        if self._shape_env is None:
            return self._mode.from_tensor(value, static_shapes=True, source=source)
        dims = self._symbolic.get(index, frozenset())
        kinds = [DimDynamic.DUCK if dim in dims else DimDynamic.STATIC for dim in range(value.dim())]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
        return self._mode.from_tensor(value, symbolic_context=context, source=source)

    def _integer(self, index: int, value: int) -> torch.SymInt | int:
        assert self._shape_env is not None
        source = LocalSource(f"t{index}")
        symbol = self._shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DUCK)
        return self._shape_env.create_symintnode(symbol, hint=value, source=source)
