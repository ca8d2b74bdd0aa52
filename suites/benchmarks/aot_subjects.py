"""The ways to compile a function together with its backward that the benchmarks compare.

In: a subject's name. Out: a function that wraps a function or module. `trace` stops where the backend's own
compile would begin; `aot` of stock is its AOTAutograd called directly, without Dynamo and its guards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Wrapper = Callable[[Any], Any]


def without_compile(gm: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that compiles nothing."""

    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return gm.forward(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def retrograd_aot(backend: Any) -> Wrapper:
    """retrograd's stages in one call; raises what it cannot capture."""

    def wrap(target: Any) -> Any:
        from retrograd import aot

        make = aot.module if isinstance(target, nn.Module) else aot.function
        return make(target, backend=backend, strict=True)

    return wrap


def stock_aot(target: Any) -> Any:
    """Stock AOTAutograd, its minimum cut, no compile."""
    from torch._functorch.aot_autograd import aot_function, aot_module
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    make = aot_module if isinstance(target, nn.Module) else aot_function
    return make(target, without_compile, partition_fn=min_cut_rematerialization_partition)


def retrograd_compile(mode: str | None = None, options: dict[str, Any] | None = None) -> Wrapper:
    """`torch.compile` with retrograd as its backend, through Inductor if `options` do not say otherwise."""

    def wrap(target: Any) -> Any:
        importlib.import_module("retrograd.dynamo")  # registers it where the distribution is not installed
        return torch.compile(target, backend="retrograd", mode=mode, options=options)

    return wrap


SUBJECTS: dict[str, Wrapper] = {
    "eager": lambda target: target,
    "retrograd-aot-trace": retrograd_aot(without_compile),
    "retrograd-aot-eager": retrograd_aot("eager"),
    "retrograd-aot-inductor": retrograd_aot("inductor"),
    "stock-aot": stock_aot,
    "stock-compile-aot_eager": lambda target: torch.compile(target, backend="aot_eager"),
    "stock-compile-inductor": lambda target: torch.compile(target, backend="inductor"),
    "stock-compile-inductor-cudagraphs": lambda target: torch.compile(target, mode="reduce-overhead"),
    "retrograd-compile-eager": retrograd_compile(options={"backend": "eager"}),
    "retrograd-compile-inductor": retrograd_compile(),
    "retrograd-compile-inductor-cudagraphs": retrograd_compile("reduce-overhead"),
}
