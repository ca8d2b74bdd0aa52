"""The ``mode`` and ``options`` of ``torch.compile(backend="retrograd")``.

In: what the user gave to ``torch.compile``. Out: a `Config`. Other options are settings of Inductor, in the
form that stock accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd._torch.inductor import settings
from retrograd.aot.compile import find_named
from retrograd.backends.registry import InductorBackend
from retrograd.config import Config
from retrograd.errors import OptionError

#: our own options; `Config` says what they mean. Any other option must be one of Inductor's.
OPTIONS = (
    "backend", "backward", "compile_timeout", "cudagraphs", "partitioner", "passes", "regions",
    "single_region", "stock_dynamo", "strict",
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
    """The choices, checked.

    Raises:
        OptionError: an unknown mode or option, or a value that it cannot have.
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
    """What each ``mode`` of ``torch.compile(backend="retrograd")`` stands for, in Inductor's settings.

    Args:
        mode: only this one.
        dynamic: accepted as Inductor's function of this name accepts it; modes do not depend on it.

    Raises:
        OptionError: an unknown mode.
    """
    modes = {name: dict(values) for name, values in sorted(_MODES.items())}
    return modes if mode is None else modes[_known_mode(mode)]


def list_options() -> list[str]:
    """The keys that ``options`` may have: ours, then those of Inductor's settings."""
    return [*OPTIONS, *sorted(set(settings()) - set(_CUDA_GRAPHS))]


def _inner(mode: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a mode and options that are not ours."""
    names = {key: key.replace("-", "_") for key in given}
    if refused := sorted(set(names.values()) & set(_CUDA_GRAPHS)):
        raise OptionError(refused[0], "retrograd records CUDA graphs itself", "'cudagraphs': True instead")
    known = set(settings()) if given else set()
    if unknown := sorted(key for key, name in names.items() if name not in known):
        expected = f"one of {', '.join(OPTIONS)}, or one of torch._inductor.list_options()"
        raise OptionError(unknown[0], "there is no such option", expected)
    return {**_MODES[_known_mode(mode or "default")], **{names[key]: value for key, value in given.items()}}


def _known_mode(mode: str) -> str:
    if mode not in _MODES:
        raise OptionError("mode", f"got {mode!r}", f"one of {', '.join(sorted(_MODES))}")
    return mode
