"""The ``torch.compile`` backend ``retrograd``.

In: a graph that Dynamo made, its example inputs, the user's mode and options. Out: a callable over real
inputs, with eager's autograd structure. All stages run while Dynamo lowers, on Dynamo's own fakes, so that
each guard that they need stands in Dynamo's shape environment and is installed with Dynamo's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd._torch.dynamo import fake_mode_for, graph_inputs, guard_what_dynamo_does_not
from retrograd.aot.function import AotFunction
from retrograd.config import Config
from retrograd.dynamo.graph_function import GraphFunction
from retrograd.dynamo.options import config_of
from retrograd.errors import CaptureError
from retrograd.report import Report, process_report, reason_of

#: answers of input checks: a wrong call of the backend, never a reason to run eagerly.
_ERRORS = ("fake-input", "real-input")


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
            ``retrograd.explain()``.

        Raises:
            OptionError: an unknown mode or option, or a value that it cannot have.
            CaptureError: a real input under a fake mode; with ``strict``, what cannot be captured.
        """
        return self.compile(gm, example_inputs, config_of(mode, options), process_report)

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], config: Config, report: Report
    ) -> Callable[..., Any]:
        """The same for choices that are checked already; `report` is told what comes of it."""
        fake_mode = fake_mode_for(example_inputs)
        if fake_mode is None:
            return AotFunction(gm, replace(config, dynamic=None))
        guard_what_dynamo_does_not()
        try:
            return GraphFunction(gm, graph_inputs(gm, example_inputs), fake_mode, config, report)
        except Exception as error:
            reason = reason_of(error, "dynamo")
            if config.strict or (isinstance(error, CaptureError) and reason.code in _ERRORS):
                raise
            report.fell_back(reason, "a graph of Dynamo's runs eagerly")
            return gm.forward

    def reset(self) -> None:
        """Called by ``torch._dynamo.reset()``, which forgets the code: forget what was reported of it."""
        process_report.graphs.clear()


retrograd = RetrogradBackend()
