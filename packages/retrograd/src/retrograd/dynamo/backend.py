"""The ``torch.compile`` backend ``retrograd``, with its ``mode`` and ``options``.

In: a graph from Dynamo, its example inputs, and the user's mode and options. Options that are not ours are
settings of Inductor, in the form that stock accepts. Out: a callable over real inputs, with eager's autograd
structure. All stages run while Dynamo lowers, on Dynamo's own fake tensors. So every guard that they add
lands in Dynamo's shape environment, and Dynamo installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo.exc import SkipFrame

from retrograd.aot.compiler import find_named
from retrograd.aot.staged_function import AotFunction
from retrograd.backends.inductor import settings
from retrograd.backends.registry import InductorBackend
from retrograd.config import Config
from retrograd.dynamo.frames import (
    fake_mode_for,
    graph_inputs,
    guard_what_dynamo_does_not,
    why_ended,
)
from retrograd.dynamo.graph_function import GraphFunction, as_it_is
from retrograd.dynamo.left_to_python import is_left_in_forward_mode
from retrograd.dynamo.small_subgraphs import kernels_of_small_piece
from retrograd.errors import CaptureError, OptionError, Reason
from retrograd.report import GraphReport, compiler_report, reason_of, running

#: our own options, documented in `Config`; any other option must be one of Inductor's
OPTIONS = (
    "backend", "backward", "compile_timeout", "cudagraphs", "partitioner", "passes", "regions",
    "single_region", "stock_dynamo", "strict", "whole_after",
)  # fmt: skip

_AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}
_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "max-autotune": _AUTOTUNE,
    "max-autotune-no-cudagraphs": _AUTOTUNE,
    "reduce-overhead": {},
}
_WITH_CUDA_GRAPHS = ("max-autotune", "reduce-overhead")
_CUDA_GRAPHS = ("triton.cudagraphs", "triton.cudagraph_trees")


def config_of(mode: str | None, options: Mapping[str, Any] | None) -> Config:
    """The settings for a mode and options, checked.

    Raises:
        OptionError: an unknown mode or option, or an invalid value.
    """
    given = dict(options or {})
    own = {key: given.pop(key) for key in list(given) if key in OPTIONS}
    own.setdefault("cudagraphs", mode in _WITH_CUDA_GRAPHS)
    inner = _inner(mode, given)
    config = Config(**own)
    find_named(config)
    if config.backend == "inductor":
        return Config(**{**own, "backend": InductorBackend(inner)}) if inner else config
    if given:
        raise OptionError(
            next(iter(sorted(given))),
            f"it is a setting of Inductor, but the backend is {config.backend!r}",
            f"one of {', '.join(OPTIONS)}",
        )
    return config


def list_mode_options(mode: str | None = None, dynamic: bool | None = None) -> dict[str, Any]:
    """The Inductor settings behind each ``mode`` of ``torch.compile(backend="retrograd")``.

    Args:
        mode: only this one.
        dynamic: accepted because Inductor's function of this name accepts it; has no effect.

    Raises:
        OptionError: an unknown mode.
    """
    modes = {name: dict(values) for name, values in sorted(_MODES.items())}
    return modes if mode is None else modes[_known_mode(mode)]


def list_options() -> list[str]:
    """The valid keys of ``options``: ours, then Inductor's settings."""
    return [*OPTIONS, *sorted(set(settings()) - set(_CUDA_GRAPHS))]


def _inner(mode: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a mode and for options that are not ours."""
    names = {key: key.replace("-", "_") for key in given}
    if refused := sorted(set(names.values()) & set(_CUDA_GRAPHS)):
        raise OptionError(refused[0], "retrograd records CUDA graphs itself", "'cudagraphs': True instead")
    known = set(settings()) if given else set()
    if unknown := sorted(key for key, name in names.items() if name not in known):
        expected = f"one of {', '.join(OPTIONS)}, or one of torch._inductor.list_options()"
        raise OptionError.unknown(unknown[0], {*OPTIONS, *known}, expected)
    return {**_MODES[_known_mode(mode or "default")], **{names[key]: value for key, value in given.items()}}


def _known_mode(mode: str) -> str:
    if mode not in _MODES:
        raise OptionError("mode", f"got {mode!r}", f"one of {', '.join(sorted(_MODES))}")
    return mode


#: Codes of input checks. They mean that the caller used the backend wrongly, so we raise instead of running
#: eagerly.
_ERRORS = ("fake-input", "real-input")


@dataclass(frozen=True)
class ConfiguredBackend:
    """The backend for settings that have been checked.

    Two with equal `options` and `key` are equal, so Dynamo shares code between callables that differ in
    nothing else, such as the layers of a model.

    Attributes:
        config: the settings.
        options: the user's options, from which `config` was made.
        key: what else tells backends apart.
    """

    config: Config = field(compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    key: tuple[Hashable, ...] = ()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile `gm`, see `RetrogradBackend`. The callable for which Dynamo compiles reports it."""
        config, report = self.config, compiler_report()
        fake_mode = fake_mode_for(example_inputs)
        if fake_mode is None:
            return AotFunction(gm, replace(config, dynamic=None), report)
        if is_left_in_forward_mode("a frame of Dynamo's", config.strict, report):
            raise SkipFrame("forward mode")  # under ``torch.compile``, Python runs the code from now on
        try:
            inputs = graph_inputs(gm, example_inputs)
            guard_what_dynamo_does_not(gm, inputs, module_hooks=not config.stock_dynamo)
            if (kernels := kernels_of_small_piece(gm, [item.value for item in inputs])) is not None:
                report.compiled(GraphReport("a piece that runs as it is", kernels, 0, 0, 0, why_ended(gm)))
                return partial(as_it_is, gm)
            return GraphFunction(gm, inputs, fake_mode, config, report)
        except Exception as error:
            reason = reason_of(error, "dynamo")
            if config.strict or (isinstance(error, CaptureError) and reason.code in _ERRORS):
                raise
            report.fell_back(reason, _EAGERLY)
            return partial(_as_it_is_because, reason, gm)

    def keeps_eager(self, _: Mapping[str, Any]) -> bool:
        """Like `RetrogradBackend.keeps_eager`."""
        return not self.config.stock_dynamo


_EAGERLY = "a graph of Dynamo's runs eagerly"


def _as_it_is_because(reason: Reason, gm: fx.GraphModule, *args: Any) -> Any:
    """Run a graph that was not compiled. A callable that shares it is told why in its first call."""
    if reason not in (report := running.get()).fallbacks:
        report.fell_back(reason, _EAGERLY)
    return as_it_is(gm, *args)


class RetrogradBackend:
    """The backend. ``torch.compile`` calls it, or a user with a graph module and inputs."""

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
            gm: the graph from Dynamo.
            example_inputs: as Dynamo passes them. Under a fake mode, each tensor must be fake, or Dynamo must
                have a fake for it. Without a fake mode, the result is an `AotFunction`, which has its own
                guards.
            mode: see `list_mode_options`.
            options: see `list_options`.

        Returns:
            A callable over real inputs. It runs `gm` as it is in two cases: if `gm` cannot be captured, with
            the reason in ``retrograd.explain()``; and if `gm` is a piece of one kernel, in which nothing can
            be fused.

        Raises:
            OptionError: an unknown mode or option, or an invalid value.
            CaptureError: a real input under a fake mode; with ``strict``, any graph that cannot be captured.
        """
        return ConfiguredBackend(config_of(mode, options))(gm, example_inputs)

    def keeps_eager(self, options: Mapping[str, Any]) -> bool:
        """Whether to preserve eager behaviour that Dynamo loses. Asked while Dynamo traces."""
        return not options.get("stock_dynamo", False)


retrograd = RetrogradBackend()
