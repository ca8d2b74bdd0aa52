"""Follow the one run of a function's Python during a capture, and let it continue eagerly if tracing fails.

In: the traced function's calls of torch, one by one, and the real inputs if they are available. Out: the
function's result. As long as tracing works, each call is traced and recorded. At the first call that cannot
be traced, we compute all recorded calls on the real inputs, as eager would, and from then on give the
function real tensors. So its Python runs once: it sees no exception of the trace, and none of its side
effects happens twice.

We can replay the recorded calls only if we saw every call that made a tensor. We do not see those inside a
custom ``autograd.Function``, a checkpoint or a transform of ``torch.func``. There, an exception that ``except
Exception`` does not catch abandons the run, and the function must be called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CellType
from typing import Any, NamedTuple, NoReturn

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from retrograd.errors import not_representable
from retrograd.facts.patches import handled_here
from retrograd.runtime import pytree
from retrograd.runtime.modes import ThreadModes
from retrograd.trace.functional import is_traced
from retrograd.trace.graph_tracer import JointTracer

_TO = "torch._subclasses.functional_tensor:FunctionalTensor.to"

#: Types of the numbers whose value a trace does not know.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Abandoned(BaseException):
    """Neither the trace nor the run of Python that it follows can continue; `error` says why.

    It is not an `Exception`, so that handlers in user code do not catch it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Call(NamedTuple):
    """A recorded call of torch: its arguments, the thread's modes, and its results."""

    func: Callable[..., Any]
    leaves: Sequence[Any]
    spec: Any
    modes: ThreadModes
    results: Sequence[Any]


class FirstRun:
    """The run of a function's Python during a capture.

    Args:
        leaves: the function's real inputs, flattened.
        why_not: why the run may not continue eagerly; None if it may.
        has_copies: whether the function received copies of mutable containers. What it stores in them, or
            keeps of them, would be lost if it continued eagerly.

    Attributes:
        why_not: why the recorded calls cannot be replayed; None if they can.
        stopped: the error that ended tracing; None while tracing works.
        has_ended: whether the function has returned or raised. False after it was abandoned.
        is_computing: whether recorded calls are being replayed now.
    """

    def __init__(self, leaves: Sequence[Any], why_not: str | None = None, has_copies: bool = False) -> None:
        self.leaves, self._why_not_at_all, self._has_copies = leaves, why_not, has_copies
        self.begin((), None)

    def begin(self, seen: Sequence[Any], tracer: JointTracer | None, is_repeated: bool = False) -> None:
        """Start a run. `tracer` traces it, and the function receives `seen` in place of the inputs.

        If `is_repeated`, calls are recorded even after tracing has stopped.
        """
        self._around, self._modes = ExitStack(), _get_current_dispatch_mode_stack()
        self._tracer, self.why_not, self._is_repeated = tracer, self._why_not_at_all, is_repeated
        self.stopped: Exception | None = None
        self.has_ended = self.is_computing = False
        self._end: tuple[Any, Exception | None] = None, None
        self._seen, self._calls, self._computed = seen, list[_Call](), 0
        #: Identities of the variables that are being filled: a function may close over itself.
        self._filling = set[int]()
        #: By identity of a tensor of the trace, the real tensor; None if it is not computed yet.
        self._real: dict[int, Any] = _by_identity(seen, self.leaves)

    @property
    def is_eager(self) -> bool:
        """Whether the function now receives real tensors."""
        return self.stopped is not None

    def ended(self, result: Any, error: Exception | None) -> None:
        """Record that the function returned `result` or raised `error`. Both may hold tensors of the
        trace."""
        self.has_ended, self._end = True, (result, error)

    @property
    def can_be_finished(self) -> bool:
        """Whether `outcome` can reproduce what the function did."""
        return self.has_ended and self.why_not is None

    def finished(self, tree: Any) -> Any:
        """Replay all calls and return `tree` with real tensors; None if the run cannot be used."""
        try:
            if self.can_be_finished:
                self.compute()
                return self.real(tree)
        except (Exception, Abandoned):
            self.why_not = "an operator fails on real tensors only, or a tensor was made where nobody sees it"
        return None

    def outcome(self) -> Any:
        """Return or raise what the function does in eager. Callable once.

        Raises:
            Exception: what the function raised.
        """
        try:
            self.compute()
            result, error = self._end
            if error is not None:
                raise error
            return self.real(result)
        finally:
            self.forget()

    def forget(self) -> None:
        """Release all tensors, because objects that outlive the trace may refer to this run."""
        self.leaves = ()
        self.begin((), None)

    def given(self, seen: torch.Tensor) -> torch.Tensor | None:
        """The real tensor behind `seen`; None if it is neither an input nor a closure tensor."""
        return self._real.get(_key(seen)) if is_traced(seen) else seen

    # the calls

    def hides(self, why: str) -> bool:
        """Note that the function does what recorded calls do not tell. While tracing works, they cannot be
        replayed from then on. Once it has stopped, they cannot be made again in another trace. Returns
        `is_eager`."""
        if self.is_eager:
            self._is_repeated = False
        else:
            self.why_not = why
        return self.is_eager

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call."""
        if torch._C._functorch.maybe_current_level() is not None:
            self.hides("it calls a transform of torch.func")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if callable(leaf) and not isinstance(leaf, (type, torch.dtype)):
                    self.hides("it gives a function to torch")
            elif is_traced(leaf) and _key(leaf) not in self._real:
                self.hides("it computes with a tensor that was made by code which a trace does not see")
        self._calls.append(_Call(func, leaves, spec, ThreadModes.now(), pytree.tree_leaves(result)))
        if self.is_eager:
            self._computed = len(self._calls)
        else:
            self._real |= {_key(one): None for one in self._calls[-1].results if _key(one) not in self._real}

    # real tensors

    def real(self, tree: Any) -> Any:
        """`tree` with real tensors in place of the trace's, and plain numbers in place of symbolic ones. What
        needs no change is the same object. Functions in it close over real tensors afterwards: torch may call
        them later.

        Raises:
            Abandoned: there is no real tensor; or the function has caught an earlier `Abandoned`.
        """
        if self.stopped is not None and self.why_not is not None:
            self._abandon(self.stopped)
        return _mapped(self._real_leaf, tree)

    def _real_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, SYMBOLIC):
            return leaf.node.hint
        if isinstance(leaf, slice):
            return slice(*map(self._real_leaf, (leaf.start, leaf.stop, leaf.step)))
        if isinstance(leaf, torch.Size):
            return torch.Size([*map(self._real_leaf, leaf)])
        if isinstance(leaf, partial):
            parts = (leaf.func, leaf.args, leaf.keywords)
            func, args, kwargs = real = self.real(parts)
            return leaf if real is parts else partial(func, *args, **kwargs)
        for cell in getattr(leaf, "__closure__", None) or ():
            if id(cell) not in self._filling:
                self._fill(cell)
        if not isinstance(leaf, torch.Tensor) or not is_traced(leaf):
            return leaf
        if (real := self._real.get(_key(leaf))) is None:
            unseen = not_representable("it keeps a tensor of the trace that nobody has seen")
            self._abandon(self.stopped or unseen)
        return real

    def _fill(self, cell: CellType) -> None:
        """Put real tensors into a variable that a function closes over."""
        try:
            held = cell.cell_contents
        except ValueError:  # it has no value
            return
        self._filling.add(id(cell))
        try:
            if (real := self.real(held)) is not held:
                cell.cell_contents = real
        finally:
            self._filling.remove(id(cell))

    def compute(self) -> None:
        """Replay the recorded calls that were not replayed yet.

        Raises:
            Exception: a call fails on real tensors, although it could be traced.
        """
        pending, self._computed = self._calls[self._computed :], len(self._calls)
        before, self.is_computing = self.is_computing, True
        try:
            with _eagerly():
                for call, results in _repeated(pending, self._real_leaf):
                    for one, real in zip(call.results, results, strict=True):
                        if self._real[_key(one)] is None:
                            self._real[_key(one)] = real
        except Exception:
            self.why_not = "an operator fails on real tensors only"
            raise
        finally:
            self.is_computing = before

    def retrace(self, stand_ins: Sequence[Any]) -> Any:
        """Make the same calls in another trace, without running the function's Python. Returns the function's
        result.

        Args:
            stand_ins: the tensors that replace the inputs in this trace.

        Raises:
            Refusal: a call returns a number or another plain value that differs from the recorded one.
        """
        now = _by_identity(self._seen, stand_ins)
        for call, results in _repeated(self._calls, lambda leaf: now.get(_key(leaf), leaf)):
            if len(results) != len(call.results) or not all(map(_is_told, results, call.results)):
                raise not_representable("it looks at what depends on elements, or on what it was not given")
            for one, other in zip(call.results, results, strict=True):
                if isinstance(one, torch.Tensor):
                    now.setdefault(_key(one), other)
        result, error = self._end
        if error is not None:
            raise error
        return _mapped(lambda leaf: now.get(_key(leaf), leaf), result)

    @property
    def can_be_retraced(self) -> bool:
        """Whether `retrace` works: all calls are recorded, and none uses symbolic numbers, which differ in
        each trace."""
        leaves = (leaf for call in self._calls for leaf in (*call.leaves, *call.results))
        is_symbolic = any(isinstance(leaf, (*SYMBOLIC, slice, torch.Size)) for leaf in leaves)
        is_complete = self._is_repeated or not self.is_eager
        return self.has_ended and self.why_not is None and is_complete and not is_symbolic

    def go_on_eagerly(self, error: Exception) -> None:
        """Continue eagerly after `error` stopped tracing: from now on the function receives real tensors.

        Raises:
            Abandoned: the recorded calls cannot be replayed.
        """
        if self.is_eager:
            return
        # Inside a dispatch mode that the function entered, we cannot leave the trace's modes below it.
        if self._modes != _get_current_dispatch_mode_stack():
            self.hides("it is inside a dispatch mode of its own")
        self.stopped = error
        if self.why_not is not None or self._has_copies or self._tracer is None:
            self._abandon(error)
        self.is_computing = True
        try:
            with self._tracer.generators_given_back():
                self.compute()
        except Exception:
            self._abandon(error)
        finally:
            self.is_computing = False
        self._around.enter_context(_eagerly())
        self._around.enter_context(
            handled_here(_TO, lambda _, *args, **kwargs: torch.Tensor.to(*args, **kwargs))
        )

    def _abandon(self, error: Exception) -> NoReturn:
        """Abandon the run. If the function catches `Abandoned`, what it does then does not count: every
        further call raises it again."""
        self.why_not = self.why_not or "it was abandoned"
        raise Abandoned(error) from error

    def leave(self) -> None:
        """The function has ended: make the trace's modes active again."""
        self._around.close()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` as eager does. An exception it raises belongs to the user's program."""
        real_args, real_kwargs = self.real((args, kwargs))
        try:
            result = func(*real_args, **real_kwargs)
        except Exception:
            self._is_repeated = False
            raise
        if self._is_repeated:
            self.record(func, args, kwargs, result)
        return result


def _key(value: Any) -> int:
    """The identity of a value.

    For a functional tensor, it is the identity of the inner tensor: methods of its class call torch on that
    one.
    """
    return id(value.elem if isinstance(value, FunctionalTensor) else value)


def _by_identity(seen: Sequence[Any], others: Sequence[Any]) -> dict[int, Any]:
    """Map the identity of each tensor of `seen` to the value at the same position in `others`."""
    pairs = zip(seen, others, strict=False)
    return {_key(one): other for one, other in pairs if isinstance(one, torch.Tensor) and one is not other}


def _mapped(of: Callable[[Any], Any], tree: Any) -> Any:
    leaves, spec = pytree.tree_flatten(tree, lambda value: isinstance(value, torch.Size))
    mapped = [*map(of, leaves)]
    is_same = all(one is other for one, other in zip(mapped, leaves, strict=True))
    return tree if is_same else pytree.tree_unflatten(mapped, spec)


def _is_told(now: Any, then: Any) -> bool:
    if isinstance(then, torch.Tensor):
        return isinstance(now, torch.Tensor)
    return type(now) is type(then) and (now is then or bool(now == then))


def _repeated(calls: Sequence[_Call], leaf: Callable[[Any], Any]) -> Iterator[tuple[_Call, list[Any]]]:
    """Make `calls` again, under the modes of each. `leaf` maps each argument. Yields each call with its new
    results."""
    with ExitStack() as around:
        modes: ThreadModes | None = None
        for call in calls:
            # Autocast caches casts of parameters until its outermost block ends, so calls with the same modes
            # share one.
            if modes is None or call.modes._replace(grad=True) != modes._replace(grad=True):
                around.close()
                modes = call.modes
                around.enter_context(modes.restored())
            args, kwargs = pytree.tree_unflatten([*map(leaf, call.leaves)], call.spec)
            with torch.set_grad_enabled(call.modes.grad):
                results = pytree.tree_leaves(call.func(*args, **kwargs))
            yield call, results


@contextmanager
def _eagerly() -> Iterator[None]:
    """Inside, on this thread, nothing is traced."""
    with no_python_dispatcher(), unset_fake_temporarily(), _disable_current_modes():
        yield
