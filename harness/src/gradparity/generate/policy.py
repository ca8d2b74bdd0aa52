"""Policy: what a drawing prefers. Policies differ so that each makes something else likely.

In: weights. Out: a frozen value. The named policies stand in `policies.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SIZES: Mapping[int, float] = {
    3: 6,
    2: 5,
    4: 5,
    1: 3,
    5: 3,
    6: 3,
    8: 2,
    0: 0.3,
    16: 1,
    17: 1,
    32: 0.7,
    33: 0.7,
}
"""Sizes of dimensions: small ones, and what stands at the edges of vectors and blocks."""

EDGES: Mapping[int, float] = {
    size + step: 1 for size in (32, 64, 128, 256, 1024) for step in (-1, 0, 1)
}  # fmt: skip
"""Sizes around those of vectors, warps and blocks."""

LAYOUTS: Mapping[str, float] = {
    "plain": 8, "turned": 3, "gapped": 1.5, "offset": 1, "expanded": 1, "channels_last": 1, "inner": 0.5,
}  # fmt: skip

DTYPES: Mapping[str, float] = {"float32": 12, "float64": 1, "bfloat16": 1, "float16": 0.3}

LARGEST = 1e4
"""No value is larger, so that gradients stay well conditioned."""

NUMBERS: Mapping[str, float] = {"drawn": 12, "ties": 1}

LOSSES: Mapping[str, float] = {
    "sum": 4, "cotangents": 4, "weighted": 2, "square": 1.5, "grad": 1, "some": 0.4, "twice": 0.3,
    "each": 0.5, "double": 0.4, "inputs": 0.5,
}  # fmt: skip

COTANGENTS: Mapping[str, float] = {
    "plain": 3, "expanded": 3, "turned": 3, "gapped": 2, "channels_last": 1, "zero": 1, "offset": 1,
    "lazy": 0.7,
}  # fmt: skip

OUTPUTS: Mapping[str, float] = {
    "one": 5, "some": 4, "views": 1, "inputs": 0.7, "nested": 0.7, "twice": 0.3, "family": 0.7, "shared": 0.3,
    "all": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """Weights of all choices.

    `kinds`: of statements, by the names in `statements.py`. `length`: how many statements. `numbers`: what
    stands in the inputs, by the names in `inputs.py`. `aliased`: share
    of inputs that share memory with another. `changed`: share of inputs that may be changed in place.
    `without_grad`: share of programs in which nothing requires grad. `hub`: share of operands that are one of
    the first few results, so that these have many uses. `fresh`: share of operands that are inputs, so that
    what one statement makes of its numbers is not lost in the next. `hooks`: how many, on average.
    `between`: share of programs that change something between forward and backward. `calls`: how often the
    function is called. `called`: how, by the names in `around/calls.py`, each in this share of programs.
    `largest`: no value is larger; infinity: NaN is allowed too. `longest`: no tensor has more elements.
    `areas`: of changes between two steps, by the names in `steps/changes.py`. `form`: of
    the program, by the names in `forms.py`. `turns`: how many turns it has in one round of a campaign.
    """

    name: str
    doc: str
    kinds: Mapping[str, float]
    length: tuple[int, int] = (2, 7)
    inputs: tuple[int, int] = (1, 3)
    ranks: Mapping[int, float] = field(default_factory=lambda: {2: 5, 1: 3, 3: 3, 4: 1, 0: 0.3})
    sizes: Mapping[int, float] = field(default_factory=lambda: SIZES)
    layouts: Mapping[str, float] = field(default_factory=lambda: LAYOUTS)
    dtypes: Mapping[str, float] = field(default_factory=lambda: DTYPES)
    numbers: Mapping[str, float] = field(default_factory=lambda: NUMBERS)
    losses: Mapping[str, float] = field(default_factory=lambda: LOSSES)
    cotangents: Mapping[str, float] = field(default_factory=lambda: COTANGENTS)
    outputs: Mapping[str, float] = field(default_factory=lambda: OUTPUTS)
    settings: Mapping[str, float] = field(default_factory=dict)
    aliased: float = 0.05
    changed: float = 0.05
    without_grad: float = 0.03
    hub: float = 0.05
    fresh: float = 0.0
    hooks: float = 0.3
    between: float = 0.03
    calls: tuple[int, int] = (1, 1)
    called: Mapping[str, float] = field(default_factory=dict)
    areas: Mapping[str, float] = field(default_factory=dict)
    largest: float = LARGEST
    longest: int = 1 << 13
    form: str = "function"
    turns: int = 2
