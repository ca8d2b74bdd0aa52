"""The ``torch.compile`` backend ``retrograd``.

In: a graph from Dynamo, its example inputs, the user's mode and options. Out: a callable over real inputs,
with eager's autograd structure. All stages run while Dynamo lowers, on Dynamo's own fake tensors. So every
guard that they add is in Dynamo's shape environment, and Dynamo installs it.
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

#: codes of input checks. They mean that the backend was called wrongly, and are no reason to run eagerly.
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
            gm: the graph from Dynamo.
            example_inputs: as Dynamo passes them. Under a fake mode each tensor must be fake, or one that
                Dynamo has a fake for. Without a fake mode the result is an `AotFunction`, which has guards of
                its own.
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
        """The same for choices that are checked already. `report` receives the result."""
        fake_mode = fake_mode_for(example_inputs)
        if fake_mode is None:
            return AotFunction(gm, replace(config, dynamic=None), report)
        guard_what_dynamo_does_not()
        try:
            return GraphFunction(gm, graph_inputs(gm, example_inputs), fake_mode, config, report)
        except Exception as error:
            reason = reason_of(error, "dynamo")
            if config.strict or (isinstance(error, CaptureError) and reason.code in _ERRORS):
                raise
            report.fell_back(reason, "a graph of Dynamo's runs eagerly")
            return gm.forward


retrograd = RetrogradBackend()
