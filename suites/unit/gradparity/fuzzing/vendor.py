"""What the planted faults of a vendor's backend are made of.

In: kernels to replace, or functions of a call's arguments and results. Out: backends for `torch.compile` that
are stock's `aot_eager` with one thing wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
Kernels = Mapping[Any, Callable[..., Any]]
"""By operator, as `torch.ops.aten.sin`: what runs in its place. It gets the overload and its arguments."""


class Replaced(torch.fx.Interpreter):
    """Runs a graph with other kernels."""

    def __init__(self, gm: torch.fx.GraphModule, kernels: Kernels) -> None:
        super().__init__(gm)
        self.kernels = kernels

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One call of the graph."""
        kernel = self.kernels.get(getattr(target, "overloadpacket", None))
        return target(*args, **kwargs) if kernel is None else kernel(target, *args, **kwargs)


def plain(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A compiler that is right."""
    return make_boxed_func(gm.forward)


def with_kernels(kernels: Kernels) -> Compiler:
    """A compiler with other kernels."""
    return lambda gm, inputs: make_boxed_func(Replaced(gm, kernels).run)


def aot(forward: Compiler = plain, backward: Compiler = plain) -> Backend:
    """A backend behind AOTAutograd, as `aot_eager`."""
    made: Backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return made


def kernels(forward: Kernels, backward: Kernels | None = None) -> Backend:
    """A backend with other kernels; in both graphs the same ones, unless the backward has its own."""
    return aot(with_kernels(forward), with_kernels(forward if backward is None else backward))


def on_gradients(change: Callable[[torch.Tensor], Any]) -> Backend:
    """A backend that changes each gradient."""

    def compile(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(lambda *args: [one if one is None else change(one) for one in gm(*args)])

    return aot(backward=compile)


def around(call: Callable[[Callable[..., Any], list[Any]], Any], whole: Backend | None = None) -> Backend:
    """A backend that calls the compiled function by way of `call`, which gets it and the arguments."""

    def compile(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = (whole or aot())(gm, inputs)
        return lambda *args: call(compiled, list(args))

    return compile


def tensors_of(values: list[Any]) -> list[torch.Tensor]:
    """Those that are tensors."""
    return [one for one in values if isinstance(one, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    """Where its memory begins."""
    return tensor.untyped_storage().data_ptr()
