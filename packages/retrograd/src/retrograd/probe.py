"""Checks that the installed torch has the features we need, by testing them rather than the version.

In: the imported torch. Out: nothing; or one warning, for a release that we have not tested; or one
`UnsupportedTorchError` that names what is missing. If a module's top-level import of a torch name fails,
``retrograd.__init__`` raises that error.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._dynamo.compiled_autograd import AutogradCompilerInstance
from torch.utils.checkpoint import checkpoint

from retrograd.config import Config
from retrograd.engine.protocol import EngineProtocol
from retrograd.errors import CaptureError, UnsupportedTorchError, first_line
from retrograd.facts import read_table
from retrograd.facts.patches import COLLECTING, TABLE, handled_here, owner_and_attribute
from retrograd.facts.releases import CHECKPOINT
from retrograd.live.contexts import enter, leave
from retrograd.live.session import Session
from retrograd.report import Report

#: The releases under which all tests ran.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

#: Attributes that we neither import by name nor replace, but look up when needed: owner -> attributes.
REQUIRED: dict[str, str] = read_table("patches")["required"]


def required_names() -> tuple[str, ...]:
    """All required attributes, in the form that `owner_and_attribute` takes."""
    table = [name for name, row in TABLE.items() if "only" not in row]
    table += [CHECKPOINT, *([COLLECTING] if torch.distributed.is_available() else ())]
    return (*table, *(owner + each for owner, names in REQUIRED.items() for each in names.split()))


def missing_names() -> Iterator[str]:
    """The private names that this torch does not have, fully qualified."""
    for name in required_names():
        try:
            owner_and_attribute(name)
        except (ImportError, AttributeError):
            yield name.replace(":", ".")


def unlike_calls() -> Iterator[str]:
    """Protocol methods whose parameters in torch's own capture object differ from ours."""
    for name, ours in vars(EngineProtocol).items():
        theirs = getattr(AutogradCompilerInstance, name, None)
        if not name.startswith("_") and theirs is not None:
            try:
                inspect.signature(ours).bind(*inspect.signature(theirs).parameters)
            except TypeError as error:
                yield f"AutogradCompilerInstance.{name} as it was ({error})"


def unlike_backward() -> Iterator[str]:
    """How the engine's protocol differs from what we expect, in the backward of ``x.sin()``."""
    report, root = Report(), _leaf().sin()
    session = Session(Config(backend="eager", strict=True), report)
    enter(session, session)
    try:
        root.backward()
        told = [call.name for backward in report.backwards for call in backward.graph.node_calls]
        if told != _SINE:
            yield f"the engine's protocol as it was (of {_SINE} it tells {told})"
    except CaptureError as error:
        if error.reason.code != "engine-busy":  # another thread is in a backward: skip this check
            yield f"the engine's protocol as it was ({first_line(error.__cause__ or error)})"
    except Exception as error:
        yield f"the engine's protocol as it was ({first_line(error)})"
    finally:
        leave(session)


_SINE = ["torch::autograd::GraphRoot", "SinBackward0", "torch::autograd::AccumulateGrad"]


def unused_entrances() -> Iterator[str]:
    """Entry points that we replace but that this torch no longer calls."""
    for name, go in _ENTRANCES.items():
        seen: list[str] = []

        def passed(original: Any, *args: Any, seen: list[str] = seen, **kwargs: Any) -> Any:
            seen.append("")
            return original(*args, **kwargs)

        with handled_here(name, passed):
            go(_leaf())
        if not seen:
            yield f"{name.replace(':', '.')} where it was (nothing calls it)"


_ENTRANCES: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch.autograd:_engine_run_backward": lambda x: x.sin().backward(),
    "torch.utils.checkpoint:CheckpointFunction.apply": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    CHECKPOINT: lambda x: checkpoint(torch.sin, x, use_reentrant=False),
}


def _leaf() -> torch.Tensor:
    return torch.ones((), device="cpu", requires_grad=True)


@functools.cache
def check_supported() -> None:
    """Raise `UnsupportedTorchError` unless this torch offers the protocol. Runs once per process.

    We run test backwards only for untested releases: after them, a process with devices may no longer fork.

    Raises:
        UnsupportedTorchError: a private name is missing, or the engine's protocol differs.
    """
    is_tested = torch.__version__.startswith(tuple(f"{release}." for release in TESTED))
    missing = [*missing_names(), *unlike_calls()]
    if not missing and not is_tested:
        with ThreadPoolExecutor(1) as thread:  # a new thread, which has no modes
            missing += thread.submit(lambda: [*unlike_backward(), *unused_entrances()]).result()
    if missing:
        raise UnsupportedTorchError(torch.__version__, missing)
    if not is_tested:
        text = f"torch {torch.__version__} is untested with retrograd, which knows {', '.join(TESTED)}"
        warnings.warn(f"{text}; all that it asks of torch is there", stacklevel=3)
