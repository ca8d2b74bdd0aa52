"""Random numbers that a backward computes again from a seed, as stock's do.

In: a joint graph and one of its random calls. Out: a seed that the forward draws and saves, and a call that
computes the numbers from it wherever they are needed. Generated code fuses such a call with what reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config, inductor_prims
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.backends.inductor.compile import compile_graph
from retrograd.graph.fx import add_call

#: how Inductor names what these operators draw.
_DISTRIBUTIONS: dict[Any, str] = {torch.ops.aten.rand.default: "rand", torch.ops.aten.randn.default: "randn"}
#: what Inductor draws itself, unless it is told to draw as eager does.
_OWN = frozenset({*map(str, _DISTRIBUTIONS), "aten.randint.low", "prims.inductor_seed.default"})


def draws_own_numbers() -> bool:
    """Whether generated code draws other random numbers than eager's kernels."""
    return not (config.fallback_random or getattr(config, "align_random_eager", False))


def has_own_numbers(targets: Collection[str]) -> bool:
    """Whether generated code for calls of `targets` draws other random numbers than eager's kernels."""
    return not config.fallback_random and not _OWN.isdisjoint(targets)


def draw_from_seed(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Replace a random call by one that computes the numbers from a seed.

    Returns:
        The seed, a scalar of int64, and twice the call that computes the numbers; None if generated code
        calls eager's kernel, as for attention. A call of a kernel that starts from a saved generator state
        cannot be part of a CUDA graph, and costs the host tens of microseconds: its results are saved.
    """
    example, name = node.meta["val"], _DISTRIBUTIONS.get(node.target)
    if name is None or node.kwargs.get("pin_memory"):
        return None
    with graph.inserting_before(node):
        seed = add_call(graph, inductor_prims.seed, (example.device,))
        numbers = add_call(graph, inductor_prims.random, (node.args[0], seed, name))
        value = add_call(graph, torch.ops.prims.convert_element_type.default, (numbers, example.dtype))
    for made in (seed, numbers, value):
        made.meta = dict(node.meta)
    with example.fake_mode:
        seed.meta["val"] = torch.empty((), dtype=torch.int64, device=example.device)
        numbers.meta["val"] = torch.empty_like(example, dtype=torch.float32)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    return seed, value, value


def numbers_of_seed(size: Sequence[int], seed: torch.Tensor, distribution: str) -> torch.Tensor:
    """What generated code computes from a seed. A graph that is interpreted calls this. Its other half may be
    generated code, and torch's own kernel of this call draws other numbers."""
    result: torch.Tensor = _code(tuple(size), distribution, seed.device)([seed])[0]
    return result


@functools.lru_cache(64)
def _code(size: tuple[int, ...], distribution: str, device: torch.device) -> Any:
    """Compiled code for one call, of the same numbers wherever it is compiled."""
    graph = fx.Graph()
    seed = graph.placeholder("seed")
    numbers = graph.call_function(inductor_prims.random, (list(size), seed, distribution))
    graph.output((numbers,))
    with FakeTensorMode():
        seed.meta["val"] = torch.empty((), dtype=torch.int64, device=device)
        numbers.meta["val"] = torch.empty(size, device=device)
    return compile_graph(fx.GraphModule({}, graph), [seed.meta["val"]])
