"""The one run of a function's Python that a capture makes. It goes on eagerly where the trace cannot go on.

In: what a traced function calls of torch, one call after the other; the real inputs, where they are at hand.
Out: the function's result. As long as the trace can follow, each call is traced and written down. At the
first call that cannot be traced, all calls so far are computed on the real inputs, as eager computes them,
and from then on the function is given real tensors. So its Python runs once: no exception of the trace
reaches it, and nothing that it does is done twice.

Calls that are written down can be computed again only if all that made tensors was seen. Inside of a custom
``autograd.Function``, a checkpoint and a transform of ``torch.func`` it was not. There an exception that
``except Exception`` does not catch abandons the run, and the function has to be called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.errors import not_representable
from retrograd.runtime import pytree
from retrograd.runtime.modes import ThreadModes
from retrograd.trace.functional import is_traced
from retrograd.trace.graph_tracer import JointTracer

#: numbers that a trace does not know.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Abandoned(BaseException):
    """The trace cannot go on, and neither can the run of Python that it follows. Its `error` says why. It is
    no `Exception`, so that the handlers of the user's code leave it alone."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Call(NamedTuple):
    """A call of torch: of these arguments, under these modes of the thread, came these results."""

    func: Callable[..., Any]
    leaves: Sequence[Any]
    spec: Any
    modes: ThreadModes
    results: Sequence[Any]


class FirstRun:
    """See above.

    Args:
        leaves: the real inputs of the function, flat.
        why_not: why it may not go on eagerly; None if it may.

    Attributes:
        why_not: why its calls cannot be computed again; None if they can.
        stopped: the error at which the trace could not go on; None if it could.
        has_ended: whether the function has returned or raised, without being abandoned.
        is_computing: whether calls are computed right now.
    """

    def __init__(self, leaves: Sequence[Any], why_not: str | None = None) -> None:
        self.leaves, self._why_not_at_all = leaves, why_not
        self.begin((), None)

    def begin(self, seen: Sequence[Any], tracer: JointTracer | None, is_repeated: bool = False) -> None:
        """The function is called with `seen` in place of the inputs, in the trace of `tracer`. Its calls are
        written down also after they could no longer be traced, if `is_repeated`."""
        self._around = ExitStack()
        self._tracer, self.why_not, self._is_repeated = tracer, self._why_not_at_all, is_repeated
        self.stopped: Exception | None = None
        self.has_ended = self.is_computing = False
        self._end: tuple[Any, Exception | None] = None, None
        self._seen, self._calls, self._computed = seen, list[_Call](), 0
        #: by identity of a tensor of the trace, the real one; None if it is not computed yet.
        self._real: dict[int, Any] = _by_identity(seen, self.leaves)

    @property
    def is_eager(self) -> bool:
        """Whether the function is given real tensors by now."""
        return self.stopped is not None

    def ended(self, result: Any, error: Exception | None) -> None:
        """The function has returned `result`, or raised `error`, with tensors of the trace."""
        self.has_ended, self._end = True, (result, error)

    @property
    def can_be_finished(self) -> bool:
        """Whether `outcome` knows what the function has done."""
        return self.has_ended and self.why_not is None

    def finished(self, tree: Any) -> Any:
        """`tree` with real tensors, after all calls have been computed; None if the run does not count."""
        try:
            if self.can_be_finished:
                self.compute()
                return self.real(tree)
        except (Exception, Abandoned):
            self.why_not = "an operator fails on real tensors only, or a tensor was made where nobody sees it"
        return None

    def outcome(self) -> Any:
        """What the function returns, or raises, as eager has it. It can be asked once.

        Raises:
            Exception: whatever the function raised.
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
        """Let go of all tensors: what the trace leaves behind may refer to this run."""
        self.leaves = ()
        self.begin((), None)

    def given(self, seen: torch.Tensor) -> torch.Tensor | None:
        """The real tensor behind what the function sees; None if it is no input, nor free."""
        return self._real.get(_key(seen)) if is_traced(seen) else seen

    # the calls

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write down a call."""
        if torch._C._functorch.maybe_current_level() is not None:
            self.why_not = "it calls a transform of torch.func"
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if callable(leaf) and not isinstance(leaf, (type, torch.dtype)):
                    self.why_not = "it gives a function to torch"
            elif is_traced(leaf) and _key(leaf) not in self._real:
                self.why_not = "it computes with a tensor that was made by code which a trace does not see"
        self._calls.append(_Call(func, leaves, spec, ThreadModes.now(), pytree.tree_leaves(result)))
        if self.is_eager:
            self._computed = len(self._calls)
        else:
            self._real |= {_key(one): None for one in self._calls[-1].results if _key(one) not in self._real}

    # real tensors

    def real(self, tree: Any) -> Any:
        """`tree` with real tensors in place of the trace's, and numbers in place of symbolic ones."""
        return _mapped(self._real_leaf, tree)

    def _real_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, SYMBOLIC):
            return leaf.node.hint
        if isinstance(leaf, slice):
            return slice(*map(self._real_leaf, (leaf.start, leaf.stop, leaf.step)))
        if isinstance(leaf, torch.Size):
            return torch.Size([*map(self._real_leaf, leaf)])
        if not isinstance(leaf, torch.Tensor) or not is_traced(leaf):
            return leaf
        if (real := self._real.get(_key(leaf))) is None:
            raise Abandoned(not_representable("it keeps a tensor of the trace that nobody has seen"))
        return real

    def compute(self) -> None:
        """Compute the calls that were written down, as far as that is not done.

        Raises:
            Exception: one of them fails on real tensors, which a trace could not know.
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
        """Make the same calls in another trace, without the function's Python; what the function returned.

        Args:
            stand_ins: what is seen now in place of the inputs.

        Raises:
            Refusal: a call tells something else than it told.
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
        """Whether `retrace` knows all calls, and nothing symbolic, which is another in each trace."""
        leaves = (leaf for call in self._calls for leaf in (*call.leaves, *call.results))
        is_symbolic = any(isinstance(leaf, (*SYMBOLIC, slice, torch.Size)) for leaf in leaves)
        return self.has_ended and self.why_not is None and not is_symbolic

    def go_on_eagerly(self, error: Exception) -> None:
        """The trace cannot go on because of `error`. From now on the function is given real tensors.

        Raises:
            Abandoned: the calls so far cannot be computed again.
        """
        if self.is_eager:
            return
        self.stopped = error
        if self.why_not is not None or self._tracer is None:
            raise Abandoned(error) from error
        self.is_computing = True
        try:
            with self._tracer.generators_given_back():
                self.compute()
        except Exception:
            raise Abandoned(error) from error
        finally:
            self.is_computing = False
        self._around.enter_context(_eagerly())

    def leave(self) -> None:
        """The function has ended; the trace's modes are active again."""
        self._around.close()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` as eager does. What it raises is the program's own error."""
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
    """The identity of a value; of a functional tensor that of the one inside, on which methods of its class
    call torch."""
    return id(value.elem if isinstance(value, FunctionalTensor) else value)


def _by_identity(seen: Sequence[Any], others: Sequence[Any]) -> dict[int, Any]:
    """What stands in `others` in the place of each tensor that is seen, by its identity."""
    pairs = zip(seen, others, strict=False)
    return {_key(one): other for one, other in pairs if isinstance(one, torch.Tensor) and one is not other}


def _mapped(of: Callable[[Any], Any], tree: Any) -> Any:
    leaves, spec = pytree.tree_flatten(tree, lambda value: isinstance(value, torch.Size))
    return pytree.tree_unflatten([*map(of, leaves)], spec)


def _is_told(now: Any, then: Any) -> bool:
    if isinstance(then, torch.Tensor):
        return isinstance(now, torch.Tensor)
    return type(now) is type(then) and (now is then or bool(now == then))


def _repeated(calls: Sequence[_Call], leaf: Callable[[Any], Any]) -> Iterator[tuple[_Call, list[Any]]]:
    """Make `calls` again, each with `leaf` of its leaves and under its modes; with their results."""
    with ExitStack() as around:
        modes: ThreadModes | None = None
        for call in calls:
            # Autocast keeps the casts of parameters until its outermost block ends.
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
