"""The ``torch.compile`` backend ``retrograd``.

In: a graph that Dynamo made, its example inputs, the user's mode and options. Out: a callable over real
inputs, with eager's autograd structure. All stages run while Dynamo lowers, on Dynamo's own fakes, so that
each guard that they need stands in Dynamo's shape environment and is installed with Dynamo's.

>>> torch.compile(model, backend="retrograd", options={"backend": "eager", "partitioner": "save_all"})

Importing this module registers the backend where the distribution, whose entry point does so, is not
installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from retrograd._torch.dynamo_bridge import fake_mode_for, graph_inputs, register_once
from retrograd._torch.inductor import settings
from retrograd.aot.function import AotConfig, function
from retrograd.aot.graph_function import GraphFunction
from retrograd.aot.policies import Policy
from retrograd.aot.report import reason_of, report
from retrograd.backends.inductor import InductorBackend
from retrograd.backends.registry import find_backend
from retrograd.config import smallest_region
from retrograd.errors import BackendError, CaptureError
from retrograd.passes.aten import pass_named

__all__ = ["RetrogradBackend", "list_mode_options", "list_options", "retrograd"]

#: what options mean that are ours; any other must be one of Inductor's.
OPTIONS: Mapping[str, str] = {
    "backend": "'inductor', 'eager', 'aten', or a callable (gm, example_inputs) -> callable, for the graphs",
    "backward": "the same for the backward graphs, if another one",
    "partitioner": "'min_cut', 'save_all', 'recompute_all', or a callable in the form of torch's",
    "passes": "passes over the joint graph, in order: names, or callables (gm, example_inputs) -> gm",
    "cudagraphs": "record what the code does on a CUDA device, and replay it where that is safe",
    "regions": "compile what repeats itself once; a number: from so many autograd nodes on; False: never",
    "single_region": "differentiate all outputs together, as stock AOTAutograd does",
    "strict": "raise instead of running eagerly what cannot be captured",
}

_AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}
_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "max-autotune": _AUTOTUNE,
    "max-autotune-no-cudagraphs": _AUTOTUNE,
    "reduce-overhead": {},
}
_WITH_CUDA_GRAPHS = ("max-autotune", "reduce-overhead")
_CUDA_GRAPHS = ("triton.cudagraphs", "triton.cudagraph_trees")

#: answers of input checks: a wrong call of the backend, never a reason to run eagerly.
_ERRORS = ("fake-input", "real-input")


@dataclass(frozen=True)
class Options:
    """The user's choices, checked."""

    config: AotConfig = field(default_factory=AotConfig)

    @staticmethod
    def of(mode: str | None, options: Mapping[str, Any] | None) -> Options:
        """Check `mode` and `options`.

        Raises:
            BackendError: an unknown mode or option, or one that does not fit.
        """
        given = dict(options or {})
        own = {key: given.pop(key) for key in list(given) if key in OPTIONS}
        inner = _inner(mode, given)
        backend = own.get("backend", "inductor")
        find_backend(backend)
        if backend == "inductor":
            backend = InductorBackend(inner) if inner else backend
        elif given:
            raise BackendError(
                f"options {sorted(given)} are Inductor's, but options['backend'] is {backend!r}"
            )
        config = AotConfig(
            backend=backend,
            backward=own.get("backward"),
            partitioner=_partitioner(own.get("partitioner", "min_cut")),
            passes=_passes(own.get("passes", ())),
            strict=bool(own.get("strict", False)),
            single_region=bool(own.get("single_region", False)),
            cudagraphs=bool(own.get("cudagraphs", mode in _WITH_CUDA_GRAPHS)),
            regions=_regions(own.get("regions", True)),
        )
        if config.backward is not None:
            find_backend(config.backward)
        return Options(config)


class RetrogradBackend:
    """The backend: called by ``torch.compile``, or by hand with a graph module and inputs."""

    __name__ = "retrograd"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile `gm`.

        Args:
            gm: what Dynamo made.
            example_inputs: as Dynamo gives them. Under a fake mode each tensor must be fake, or one of which
                Dynamo made a fake; without one, the result is an ``aot.function``, which guards itself.
            mode: see `list_mode_options`.
            options: see `list_options`.

        Returns:
            A callable over real inputs; ``gm.forward`` if it cannot be captured, with the reason in
            ``aot.explain()``.

        Raises:
            BackendError: an unknown mode or option.
            CaptureError: a real input under a fake mode; with ``strict``, what cannot be captured.
        """
        config, fake_mode = Options.of(mode, options).config, fake_mode_for(example_inputs)
        if fake_mode is None:
            return _self_guarded(gm, config)
        try:
            return GraphFunction(gm, graph_inputs(gm, example_inputs), fake_mode, config)
        except Exception as error:
            reason = reason_of(error, "dynamo")
            if config.strict or (isinstance(error, CaptureError) and reason.code in _ERRORS):
                raise
            report.fell_back(reason)
            return gm.forward

    @staticmethod
    def check(mode: str | None, options: Mapping[str, Any] | None) -> AotConfig:
        """What a mode and options stand for; refuses them now rather than at the first call.

        Raises:
            BackendError: one that is unknown or does not fit.
        """
        return Options.of(mode, options).config

    def reset(self) -> None:
        """Forget what was reported. Called by ``torch._dynamo.reset()``, which forgets the code."""
        report.clear()


retrograd = RetrogradBackend()


def list_mode_options(mode: str | None = None, dynamic: bool | None = None) -> dict[str, Any]:
    """What each ``mode`` of ``torch.compile(backend="retrograd")`` stands for, in Inductor's settings.

    Args:
        mode: only this one.
        dynamic: accepted as Inductor's function of this name accepts it; modes do not depend on it.

    Raises:
        BackendError: an unknown mode.
    """
    modes = {name: dict(values) for name, values in sorted(_MODES.items())}
    return modes if mode is None else modes[_known_mode(mode)]


def list_options() -> list[str]:
    """The keys that ``options`` may have: ours, then those of Inductor's settings."""
    return [*sorted(OPTIONS), *sorted(set(settings()) - set(_CUDA_GRAPHS))]


def _inner(mode: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a mode and options that are not ours."""
    names = {key: key.replace("-", "_") for key in given}
    if refused := sorted(set(names.values()) & set(_CUDA_GRAPHS)):
        raise BackendError(
            f"option {refused[0]!r}: retrograd records CUDA graphs itself\n  try    'cudagraphs': True"
        )
    known = set(settings()) if given else set()
    if unknown := sorted(key for key, name in names.items() if name not in known):
        raise BackendError(
            f"unknown option {unknown[0]!r}\n  expected one of {', '.join(sorted(OPTIONS))}, or one of "
            "torch._inductor.list_options()"
        )
    return {**_MODES[_known_mode(mode or "default")], **{names[key]: value for key, value in given.items()}}


def _known_mode(mode: str) -> str:
    if mode not in _MODES:
        raise BackendError(f"unknown mode {mode!r}\n  expected one of {', '.join(sorted(_MODES))}")
    return mode


def _partitioner(policy: Any) -> Policy:
    names = ("min_cut", "recompute_all", "save_all")
    if policy not in names and not callable(policy):
        raise BackendError(
            f"unknown partitioner {policy!r}\n  expected one of {', '.join(names)}, or a callable"
        )
    chosen: Policy = policy
    return chosen


def _regions(regions: Any) -> bool | int:
    try:
        smallest_region(regions)
    except ValueError as error:
        raise BackendError(f"option 'regions': {error}") from error
    chosen: bool | int = regions
    return chosen


def _passes(passes: Any) -> tuple[Callable[..., Any], ...]:
    if isinstance(passes, str) or not isinstance(passes, Sequence):
        raise BackendError(f"option 'passes' must be a sequence of names and callables, got {passes!r}")
    try:
        return tuple(pass_named(one) if isinstance(one, str) else one for one in passes)
    except ValueError as error:
        raise BackendError(str(error)) from error


def _self_guarded(gm: fx.GraphModule, config: AotConfig) -> Callable[..., Any]:
    return function(
        gm,
        backend=config.backend,
        backward=config.backward,
        partitioner=config.partitioner,
        passes=config.passes,
        strict=config.strict,
        single_region=config.single_region,
        cudagraphs=config.cudagraphs,
        regions=config.regions,
    )


register_once("retrograd", retrograd)
