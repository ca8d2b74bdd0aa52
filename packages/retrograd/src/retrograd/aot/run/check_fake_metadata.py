"""Does a graph give what tracing predicted?

In: a partition, and what its forward gave in its first call. Out: nothing, or an `UnlikeTracedError`: fake
kernels of torch are not always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrograd.errors import Reason, UnlikeTracedError
from retrograd.graph.partition import Partition


def expected_results(partition: Partition, saved_too: bool) -> list[Any]:
    """A fake for each result of the forward graph (with what is saved, if code is made for that); None for
    what is no tensor."""
    results: Any = partition.forward.graph.output_node().args[0]
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in results]
    if not saved_too:
        values = values[: partition.joint.signature.forward_count]
    return [value if isinstance(value, torch.Tensor) else None for value in values]


def refuse_unlike_traced(results: Sequence[Any], expected: Sequence[Any], name: str) -> None:
    """Compare shapes and types.

    Raises:
        UnlikeTracedError: a result is not what was predicted.
    """
    for number, (result, fake) in enumerate(zip(results, expected, strict=False)):
        if fake is None or not isinstance(result, torch.Tensor):
            continue
        sizes_differ = result.dim() != fake.dim() or any(
            type(size) is int and size != now for size, now in zip(fake.shape, result.shape, strict=True)
        )
        if sizes_differ or result.dtype != fake.dtype:
            raise UnlikeTracedError(
                Reason(
                    "unlike-traced",
                    f"result {number} of {name} is {result.dtype} {list(result.shape)}, and a fake tensor of "
                    f"torch's said {fake.dtype} {list(fake.shape)}",
                    "aot.call",
                    way_out="this is a wrong fake kernel in torch: keep its operator out of the function",
                )
            )
