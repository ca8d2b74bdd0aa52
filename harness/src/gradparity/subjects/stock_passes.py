"""Inductor up to its code generator: AOTAutograd, decompositions, partitioner and all graph passes, whose
result runs operator by operator.

In: nothing. Out: the subject "stock-passes:inductor". It shows what the graph passes do wrong, among them the
one that makes operators write in place, in a tenth of the time that generated code takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from gradparity.errors import ReproError
from gradparity.subjects.stock import DynamoSubject, StockCompile

T = TypeVar("T")


class StockPasses(DynamoSubject):
    """torch.compile with Inductor's graph passes and without its code."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "inductor")
        self.stage, self.accountable = "passes", True
        self.stock = StockCompile("stock-compile:aot_eager", "aot_eager")

    @property
    def script(self) -> str:
        """There is none: nobody would call it so."""
        raise ReproError(f"subject {self.name} has no form of its own\n  try    compile:inductor")

    def compile(self, target: T) -> T:
        """The function or module under torch.compile."""
        compiler: Any = torch.compile
        compiled: T = compiler(target, backend=_compile)
        return compiled


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, inner_compile=_interpreted)


def _interpreted(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """What Inductor does with a graph before it generates code."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(module)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(module, inputs)
    with V.set_fake_mode(fake_mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=bool(options.get("is_inference")))
    module.recompile()
    return make_boxed_func(module.forward)
