"""All stages in one call, with a cache.

In: a function or module, and the user's choices. Out: a callable that captures and compiles itself for each
kind of input that it meets, and runs eagerly, saying why, what cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retrograd._torch import pytree
from retrograd._torch.ambient import is_foreign_mode_active, modes_now
from retrograd._torch.fakes import why_not_fakeable
from retrograd._torch.guards import changed_sizes
from retrograd._torch.leaf_hooks import has_waiting_hooks
from retrograd._torch.saved_hooks import why_saved_hooks_matter
from retrograd.aot.calls import FlatCall
from retrograd.aot.capture import capture
from retrograd.aot.compile import compile as compile_partition
from retrograd.aot.modules import ModuleState
from retrograd.aot.partition import partition
from retrograd.aot.policies import Policy
from retrograd.aot.report import reason_of, report
from retrograd.aot.run_forward import CompiledFunction
from retrograd.aot.state import Dynamic, state_of_flat
from retrograd.aot.watch import Watched
from retrograd.backends.registry import find_backend
from retrograd.cache.call_guard import CallGuard
from retrograd.cache.lookup import GuardedCache
from retrograd.config import smallest_region
from retrograd.errors import CaptureError, Reason, RetrogradError, UnlikeTracedError

__all__ = ["AotConfig", "AotFunction", "AotModule", "function", "module"]


@dataclass(frozen=True)
class AotConfig:
    """What the user chose.

    Attributes:
        backend: for forward and backward.
        backward: for the backward, if another one.
        partitioner: as in ``aot.partition``.
        dynamic: ``None``: sizes are static until they change; ``True``: symbolic from the start; ``False``:
            static.
        passes: applied to the joint graph, in order.
        strict: raise instead of running eagerly.
        recompile_limit: kinds of input that are compiled before others run eagerly.
        single_region: as in ``aot.capture``.
        cache_size: kinds of input whose code is kept; the one that was not used for longest is given up
            first.
        cudagraphs: as in ``aot.compile``.
        regions: as in ``aot.compile``.
    """

    backend: str | Callable[..., Any] = "inductor"
    backward: str | Callable[..., Any] | None = None
    partitioner: Policy = "min_cut"
    dynamic: bool | None = None
    passes: tuple[Callable[..., Any], ...] = ()
    strict: bool = False
    recompile_limit: int = 8
    single_region: bool = False
    cache_size: int = 64
    cudagraphs: bool = False
    regions: bool | int = True

    def __post_init__(self) -> None:
        smallest_region(self.regions)


@dataclass(eq=False)
class _Entry:
    """One kind of input: what it must be like, and the code for it (None: run eagerly, for `reason`)."""

    guard: CallGuard
    code: CompiledFunction | None
    reason: Reason | None = None


def _guard_of(leaves: Sequence[Any]) -> CallGuard | None:
    """A guard for inputs that cannot be captured; None for those that it cannot describe."""
    if any(isinstance(leaf, torch.Tensor) and why_not_fakeable(leaf) for leaf in leaves):
        return None
    return CallGuard.exact(leaves)


#: how arguments are nested: how many there are if none is, else their spec.
_Form = int | pytree.TreeSpec

_FLAT = frozenset({torch.Tensor, nn.Parameter, int, float, bool, str, type(None)})


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], _Form]:
    if not kwargs and _FLAT.issuperset(map(type, args)):
        return args, len(args)
    return pytree.tree_flatten((args, kwargs))


def _spec(form: _Form) -> pytree.TreeSpec:
    return pytree.tree_structure(((0,) * form, {})) if isinstance(form, int) else form


@dataclass
class AotFunction:
    """A function that compiles itself. Made by `function` and `module`.

    Attributes:
        fn: the function.
        config: the choices.
    """

    fn: Callable[..., Any]
    config: AotConfig

    def __post_init__(self) -> None:
        self._entries: GuardedCache[_Entry] = GuardedCache(self.config.cache_size)
        self.__name__ = getattr(self.fn, "__name__", type(self.fn).__name__)
        self._watched: Watched | None = None
        self._state = ModuleState()

    def _watch(self) -> Watched:
        """What the function depends on; forgets what was compiled if that has changed.

        Raises:
            CaptureError: the module is not initialised yet.
        """
        if self._watched is None or not (self._watched.is_intact() and self._state.is_tied_as_before()):
            self._entries.clear()
            self._state = ModuleState.of(self.fn) if isinstance(self.fn, nn.Module) else ModuleState()
            self._watched = Watched(self.fn)
        return self._watched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, compiled if possible."""
        if torch.compiler.is_compiling():
            return self.fn(*args, **kwargs)
        try:
            watched = self._watch()
            if (reason := self._why_eager(watched)) is not None:
                return self._eagerly(reason, args, kwargs)
            flat, form = _flattened(args, kwargs)
            leaves = [*self._state.current(), *flat]
            modes = modes_now(), torch.get_default_dtype()
            key = form, modes, watched.switches(), has_waiting_hooks(leaves)
            entry = self._entry(leaves, key)
        except RetrogradError as error:
            if self.config.strict:
                raise
            return self._eagerly(reason_of(error, "aot.compile"), args, kwargs)
        if entry.code is None:
            assert entry.reason is not None
            return self._eagerly(entry.reason, args, kwargs)
        try:
            return entry.code(leaves)
        except UnlikeTracedError as error:  # in the first call, before anything was changed
            entry.code, entry.reason = None, error.reason
            return self._eagerly(error.reason, args, kwargs)

    def reset(self) -> None:
        """Forget what was compiled."""
        self._entries.clear()
        self._watched = None

    def _why_eager(self, watched: Watched) -> Reason | None:
        if is_foreign_mode_active():
            return _MODE
        if (why := why_saved_hooks_matter()) is not None:
            return Reason("saved-tensor-hooks", why, "aot.function", way_out="call it outside of the hooks")
        return _HOOKS if watched.has_hooks() else None

    def _eagerly(self, reason: Reason, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.config.strict:
            raise CaptureError(reason)
        report.fell_back(reason)
        return self.fn(*args, **kwargs)

    def _entry(self, leaves: Sequence[Any], key: tuple[Any, ...]) -> _Entry:
        if (found := self._entries.find(key, leaves)) is not None:
            return found
        known = self._entries.known(key)
        if len(known) >= self.config.recompile_limit:
            return _Entry(known[-1].guard, None, _LIMIT)
        made = self._compiled(leaves, _spec(key[0]), known, stepped=key[3])
        self._entries.add(key, made)
        return made

    def _compiled(self, leaves: Sequence[Any], spec: Any, known: Sequence[_Entry], stepped: bool) -> _Entry:
        dynamic = self._dynamic(leaves, known)
        try:
            if self._watched is not None:
                self._watched.note()
            code = self._stages(leaves, spec, dynamic, stepped)
            if self._watched is not None:
                self._watched.refuse_changes()
            return _Entry(CallGuard.for_joint(leaves, code.partition.joint), code)
        except Exception as error:
            if self.config.strict:
                raise
            if (guard := _guard_of(leaves)) is None:
                raise CaptureError(reason_of(error, "aot.compile")) from error
            return _Entry(guard, None, reason_of(error, "aot.compile"))

    def _dynamic(self, leaves: Sequence[Any], known: Sequence[_Entry]) -> Dynamic:
        """Sizes that changed since the inputs that were compiled before are symbolic from now on."""
        if self.config.dynamic is not None or not known:
            return self.config.dynamic
        changed: dict[int, frozenset[int]] = {}
        for entry in known:
            for i, dims in changed_sizes(entry.guard.inputs.args_metadata, leaves).items():
                if isinstance(leaves[i], torch.Tensor):
                    changed[i] = changed.get(i, frozenset()) | dims
        return changed or None

    def _stages(self, leaves: Sequence[Any], spec: Any, dynamic: Dynamic, stepped: bool) -> CompiledFunction:
        config, state = self.config, self._state
        backend = find_backend(config.backend)
        call = FlatCall(self.fn, state, spec)
        captured = capture(
            state_of_flat(
                call,
                leaves,
                name=self.__name__,
                names=call.names(leaves),
                kinds=call.kinds(leaves),
                dynamic=dynamic,
                decompositions=backend.decompositions(),
            ),
            single_region=config.single_region,
            stepped=stepped,
        )
        for change in config.passes:
            captured = captured.apply(change)
        parts = partition(captured, config.partitioner)
        code = compile_partition(
            parts,
            config.backend,
            config.backward,
            cudagraphs=config.cudagraphs,
            regions=config.regions,
        ).code
        report.captured(parts)
        return code


class AotModule(nn.Module):
    """A module whose calls are compiled. Everything else is the module's own."""

    def __init__(self, compiled: AotFunction) -> None:
        super().__init__()
        self._orig_mod: nn.Module = compiled.fn  # type: ignore[assignment]
        self.__dict__["compiled"] = compiled
        self.training = self._orig_mod.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, compiled if possible."""
        return self.__dict__["compiled"](*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._orig_mod[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._orig_mod)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_mod":
            return self._modules["_orig_mod"]
        return getattr(self._orig_mod, name)


def function(  # noqa: PLR0913 - as many parameters as there are choices
    fn: Callable[..., Any],
    *,
    backend: str | Callable[..., Any] = "inductor",
    backward: str | Callable[..., Any] | None = None,
    partitioner: Policy = "min_cut",
    dynamic: bool | None = None,
    passes: Sequence[Callable[..., Any]] = (),
    strict: bool = False,
    recompile_limit: int = 8,
    single_region: bool = False,
    cache_size: int = 64,
    cudagraphs: bool = False,
    regions: bool | int = True,
) -> AotFunction:
    """Capture and compile `fn` for each kind of input that it is called with.

    The function is captured as it runs once; what it does in Python, besides calling torch, happens then
    only. Tensors that it closes over are inputs like others, also if they require grad.

    Args:
        fn: of pytrees of tensors and constants.
        backend, backward: as in ``aot.compile``.
        partitioner: as in ``aot.partition``.
        dynamic: ``None``: sizes are static until they change; ``True``: symbolic from the start; ``False``:
            always static.
        passes: applied to the joint graph, in order; each is ``pass(gm, example_inputs) -> gm``.
        strict: raise instead of running eagerly what cannot be captured.
        recompile_limit: kinds of input that are compiled; others run eagerly.
        single_region: differentiate all outputs together, as stock AOTAutograd does.
        cache_size: kinds of input whose code is kept; the one that was not used for longest is given up
            first.
        cudagraphs: as in ``aot.compile``.
        regions: as in ``aot.compile``.

    Raises:
        UnknownBackendError: no such backend.
        ValueError: `regions` is neither True nor False nor a number of nodes.
        CaptureError: on a call, if `strict`: it cannot be captured.
    """
    find_backend(backend)
    config = AotConfig(
        backend,
        backward,
        partitioner,
        dynamic,
        tuple(passes),
        strict,
        recompile_limit,
        single_region,
        cache_size,
        cudagraphs,
        regions,
    )
    return AotFunction(fn, config)


def module(mod: nn.Module, **options: Any) -> AotModule:
    """The same for a module: parameters and buffers are inputs, tied ones once.

    Args:
        mod: the module; it stays as it is.
        options: those of `function`.

    Raises:
        TypeError: `mod` is no module.
    """
    if not isinstance(mod, nn.Module):
        raise TypeError(f"aot.module: expected a torch.nn.Module, got {type(mod).__name__}; use aot.function")
    return AotModule(function(mod, **options))


_MODE = Reason("dispatch-mode", "a dispatch mode or functorch transform is active", "aot.function")
_HOOKS = Reason(
    "module-hooks",
    "the module, or one inside it, has hooks, which a capture would call only once",
    "aot.function",
    way_out='torch.compile(backend="retrograd"), which sees the hooks',
)
_LIMIT = Reason(
    "recompile-limit",
    "more kinds of input than recompile_limit",
    "aot.function",
    way_out="dynamic=True, or a larger recompile_limit",
)
