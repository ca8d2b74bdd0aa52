"""Run all stages in one call, with a cache.

In: a function or module, and the user's options. Out: a callable that captures and compiles itself for each
kind of input. A call that cannot be captured runs eagerly, and the report says why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from retrograd.aot.compiler import find_named, run_stages
from retrograd.aot.holdings import has_attributes
from retrograd.aot.modules import FlatCall, ModuleState
from retrograd.aot.state import HOOKS, Dynamic, state_of_flat
from retrograd.backends.registry import find_backend
from retrograd.config import Config, Policy, check, checked
from retrograd.engine import has_waiting_hooks
from retrograd.errors import CaptureError
from retrograd.events import AOT_LOGS
from retrograd.graph.structure import constant_key
from retrograd.report import Report, process_report, reason_of
from retrograd.runtime import pytree
from retrograd.runtime.decorated import Decorated
from retrograd.runtime.modes import ThreadModes
from retrograd.specialize.callable import Specialized, Variant
from retrograd.specialize.guard import CallGuard
from retrograd.trace import FirstRun, changed_sizes, tracer_here, why_not_fakeable

_STAGE = "aot.function"

#: how arguments are nested: their number if no argument is a container, otherwise their pytree spec.
_Form = int | pytree.TreeSpec

_HOOKS = replace(HOOKS, stage=_STAGE)
_FLAT = frozenset({torch.Tensor, nn.Parameter, int, float, bool, str, type(None)})


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], _Form]:
    if not kwargs and _FLAT.issuperset(map(type, args)):
        return args, len(args)
    return pytree.tree_flatten((args, kwargs))


_FUNCTION = callable, "a function or another callable"


class AotFunction(Decorated):
    """A function that compiles itself. `function` and `module` make one.

    Args:
        fn: the function or module.
        config: the user's options.
        report: records what was compiled and what runs eagerly; by default, a new one.
    """

    @checked(fn=_FUNCTION, config=(Config, "a retrograd.Config; aot.function makes one of its options"))
    def __init__(self, fn: Callable[..., Any], config: Config, report: Report | None = None) -> None:
        super().__init__(fn, config)
        self._report = report = report or Report(above=process_report)
        self._own = tuple(filter(has_attributes, (fn, getattr(fn, "__self__", None))))
        self._specialized = Specialized(self.__name__, _STAGE, config, report, self._variant)
        self._states: dict[tuple[int, ...], ModuleState] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, compiled if possible."""
        if torch.compiler.is_dynamo_compiling() or tracer_here():
            return self.fn(*args, **kwargs)
        eagerly = functools.partial(self.fn, *args, **kwargs)
        if (now := self._specialized.why_not_now()) is not None:
            return self._specialized.run_eagerly(now, eagerly)
        flat, form = _flattened(args, kwargs)
        try:
            state = self._state_of(flat)
        except CaptureError as error:
            return self._specialized.run_eagerly(error.reason, eagerly)
        if state.has_hooks():
            return self._specialized.run_eagerly(_HOOKS, eagerly)
        leaves = [*state.current(), *flat, state.token]
        constants = tuple([constant_key(leaf) for leaf in flat if not isinstance(leaf, torch.Tensor)])
        roots, switches = tuple(map(id, state.given)), (len(leaves), *state.switches())
        key = form, ThreadModes.now(), roots, switches, has_waiting_hooks(leaves), constants
        return self._specialized(key, leaves, eagerly)

    def explain(self) -> Report:
        """What was compiled for this function, and what ran eagerly and why."""
        return self._report

    def reset(self) -> None:
        """Drop all compiled code."""
        self._specialized.clear()
        self._states.clear()

    def _state_of(self, flat: Sequence[Any]) -> ModuleState:
        """The state of all modules and plain objects in this call. A state that has changed becomes a new
        one, which guards see as another input.

        Raises:
            CaptureError: a module is not initialised yet.
        """
        given = (*self._own, *(leaf for leaf in flat if type(leaf) not in _FLAT and has_attributes(leaf)))
        key = tuple(map(id, given))
        state = self._states.get(key)
        if state is None or not state.is_intact():
            while len(self._states) >= self.config.cache_size:
                self._states.pop(next(iter(self._states)))
            state = self._states[key] = ModuleState(*given)
        return state

    def _variant(self, key: Any, leaves: Sequence[Any], known: Sequence[Variant]) -> Variant:
        form, _, roots, _, split_at_leaf_grads, _ = key
        state = self._states[roots]
        spec = pytree.tree_structure(((0,) * form, {})) if isinstance(form, int) else form
        why_not = "it must not run eagerly" if self.config.strict else None
        given = (one for part in spec.children() for one in part.children())
        first = FirstRun(leaves, why_not, any(map(pytree.is_mutable, given)))
        outcome: Callable[[], Any] | None = None
        try:
            call = FlatCall(self.fn, state, spec)
            if any(place >= len(state.tensors) for place in call.shown(leaves)):
                call = replace(call, shows_arguments=True)
            described = state_of_flat(
                call,
                leaves,
                name=self.__name__,
                names=call.names(leaves),
                kinds=call.kinds(leaves),
                dynamic=self._dynamic(leaves, known),
                decompositions=find_backend(self.config.backend).decompositions(),
            )
            code = run_stages(
                described, self.config, self._report, split_at_leaf_grads=split_at_leaf_grads, first=first
            )
            guard = CallGuard.for_joint(leaves, code.partition.joint)
            self._tell(guard, leaves, known)
            outcome = first.outcome if first.is_eager else None
            return Variant(guard, code, outcome=outcome)
        except Exception as error:
            if self.config.strict or any(isinstance(x, torch.Tensor) and why_not_fakeable(x) for x in leaves):
                raise  # no guard can describe such inputs
            reason = reason_of(error, "aot.compile")
            outcome = first.outcome if first.can_be_finished else None
            return Variant(CallGuard.exact(leaves), None, reason, outcome=outcome)
        finally:
            if outcome is None:
                first.forget()

    def _tell(self, guard: CallGuard, leaves: Sequence[Any], known: Sequence[Variant]) -> None:
        AOT_LOGS["guards"].debug("%s: %s", self.__name__, guard.inputs)
        if known and AOT_LOGS["recompiles"].isEnabledFor(logging.INFO):
            assert known[-1].guard is not None
            why = known[-1].guard.why_not(leaves)
            AOT_LOGS["recompiles"].info("%s is compiled again: %s", self.__name__, why)

    def _dynamic(self, leaves: Sequence[Any], known: Sequence[Variant]) -> Dynamic:
        """The sizes to make symbolic: by default, those that differ from earlier inputs."""
        if self.config.dynamic is not None or not known:
            return self.config.dynamic
        changed: dict[int, frozenset[int]] = {}
        for variant in known:
            assert variant.guard is not None
            for i, dims in changed_sizes(variant.guard.inputs.args_metadata[: len(leaves)], leaves).items():
                if isinstance(leaves[i], torch.Tensor):
                    changed[i] = changed.get(i, frozenset()) | dims
        return changed or None


class AotModule(nn.Module):
    """A module whose calls are compiled. Otherwise it behaves as the given module: it shares its attributes,
    parameters, buffers, submodules and hooks, and is an instance of its class. `module` makes one."""

    _compiled: AotFunction

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, compiled if possible."""
        return self._compiled(*args, **kwargs)

    @property
    def compiled(self) -> AotFunction:
        """The function that runs the calls."""
        return self._compiled

    def __reduce__(self) -> Any:
        """A copy or a pickle holds the module and the options, and compiles itself again."""
        return _module_of, (self._compiled.fn, self._compiled.config)


def _module_of(mod: nn.Module, config: Config) -> AotModule:
    compiled = AotFunction(mod, config)
    own = {"_compiled": compiled, "__doc__": type(mod).__doc__}
    made: AotModule = object.__new__(type(type(mod).__name__, (AotModule, type(mod)), own))
    object.__setattr__(made, "__dict__", vars(mod))
    return made


@checked(fn=_FUNCTION)
def function(  # noqa: PLR0913 - one parameter per option
    fn: Callable[..., Any],
    *,
    backend: str | Callable[..., Any] = "inductor",
    backward: str | Callable[..., Any] | None = None,
    partitioner: Policy = "min_cut",
    dynamic: bool | None = None,
    passes: Sequence[str | Callable[..., Any]] = (),
    strict: bool = False,
    recompile_limit: int = 8,
    single_region: bool = False,
    cache_size: int = 64,
    cudagraphs: bool = False,
    regions: bool | int = True,
    whole_after: int | None = 2_000,
    compile_timeout: float | None = None,
) -> AotFunction:
    """Capture and compile `fn` for each kind of input that it is called with.

    `fn` must be a pure function of its arguments, as for ``jax.jit`` and torch's ``aot_function``. Its Python
    runs once for each kind of input, and once more if that input cannot be captured. Python values that it
    reads besides its arguments are constants. Its Python side effects happen at capture only, except that a
    function which changes attributes of its arguments, or draws Python's or NumPy's random numbers, runs
    eagerly. For any other function use ``torch.compile(backend="retrograd")``: Dynamo sees what Python reads.

    Every call checks:

    - tensors: their metadata, and how they share memory if `fn` writes to one of them;
    - numbers, strings and NumPy arrays by value, containers by their contents, other objects by identity;
    - `fn` and arguments that are modules: structure, ``training`` flags, hooks and attributes;
    - an argument of a plain class, such as `self` of a method: its attributes, and modules among them;
    - what such attributes hold: objects of the same packages, short containers and small arrays;
    - the thread's modes.

    Tensors that `fn` closes over are inputs like any other, and get gradients if they require grad.

    Args:
        fn: a function of pytrees and dataclasses of tensors and constants.
        backend, backward: as in ``aot.compile``.
        partitioner: as in ``aot.partition``.
        passes: names, or ``pass(gm, example_inputs) -> gm``, applied to the joint graph in order.
        cudagraphs, regions: as in ``aot.compile``.
        dynamic, strict, recompile_limit, compile_timeout: as in `compiled_autograd`.
        single_region, cache_size, whole_after: as in `Config`.

    Raises:
        OptionError: an option has an invalid value.
        CaptureError: if `strict`, raised by a call that cannot be captured.
    """
    config = Config(**{name: value for name, value in locals().items() if name != "fn"})
    find_named(config)
    return AotFunction(fn, config)


def module(mod: nn.Module, **options: Any) -> AotModule:
    """Capture and compile a module. Parameters and buffers are inputs; tied ones are one input.

    The contract is that of `function`. The module's Python runs once for each kind of input. Every call
    checks the module's structure, ``training`` flags, hooks and plain attributes. The result shares its state
    with `mod`, is an instance of its class, and can be copied and pickled like it.

    Args:
        mod: the module; we do not change it.
        options: as in `function`.

    Raises:
        OptionError: `mod` is no module, or an option has an invalid value.
    """
    check("mod", mod, (nn.Module, "a torch.nn.Module; aot.function takes functions"))
    return _module_of(mod, function(mod, **options).config)
