"""Each test starts with nothing that Dynamo has compiled, and leaves nothing: up to torch 2.12 it counts the
compilations of a code object, whoever asked for them, and many tests share one step.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._dynamo


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
