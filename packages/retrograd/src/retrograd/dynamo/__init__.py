"""The ``torch.compile`` backend ``retrograd``, and whole training steps.

>>> torch.compile(model, backend="retrograd", options={"backend": "eager", "partitioner": "save_all"})

The entry point of the installed distribution registers the backend. If the distribution is not installed,
importing this package registers it.
"""

from __future__ import annotations

from retrograd.dynamo.backend import RetrogradBackend, config_of, list_mode_options, list_options, retrograd
from retrograd.dynamo.eager_breaks import watch_dynamo
from retrograd.dynamo.frames import register_once
from retrograd.dynamo.opaque_functions import keep_calls_whole
from retrograd.dynamo.step import CompiledStep, StepReport, compile_step
from retrograd.dynamo.wrappers import keep_hooks_of_wrappers

__all__ = [
    "CompiledStep",
    "RetrogradBackend",
    "StepReport",
    "compile_step",
    "config_of",
    "list_mode_options",
    "list_options",
    "retrograd",
]

register_once("retrograd", retrograd)
watch_dynamo()
keep_calls_whole()
keep_hooks_of_wrappers()
