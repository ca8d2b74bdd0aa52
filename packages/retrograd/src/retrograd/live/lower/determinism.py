"""Does eager have anything to say about a segment under ``torch.use_deterministic_algorithms``?

In: torch's settings. Out: whether such an operation raises, or warns, in its own kernel. Decomposed code
would do neither, so a segment runs as eager runs it first, and always where torch only warns.
"""

from __future__ import annotations

import torch


def determinism_is_on() -> bool:
    """Whether operations without a deterministic form raise or warn."""
    return torch.are_deterministic_algorithms_enabled()


def operations_may_warn() -> bool:
    """Whether such operations warn. Torch hands a warning to Python only inside a backward of its own."""
    return determinism_is_on() and torch.is_deterministic_algorithms_warn_only_enabled()
