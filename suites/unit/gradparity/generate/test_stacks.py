"""Stacks: large programs whose layers are called many times, checkpointed or not, and walked again."""

import re
from collections import Counter

from gradparity.generate.draw import drawn

WALK = re.compile(
    r"for _ in range\((\d+)\):\n +(v\d+) = (checkpoint\((f\d+), \2, use_reentrant=False\)|(f\d+)\(\2\))"
)
SOURCES = [drawn("stacks", seed).source for seed in range(30)]


def test_layers_are_walked_one_to_four_times_with_and_without_checkpoints() -> None:
    walks = [WALK.findall(source) for source in SOURCES]
    is_checkpointed = {text.startswith("checkpoint") for walk in walks for _, _, text, *_ in walk}
    assert is_checkpointed == {True, False}
    times = [Counter(one or other for *_, one, other in walk) for walk in walks]
    assert {count for layers in times for count in layers.values()} == {1, 2, 3, 4}
    calls = [sum(int(count) for count, *_ in walk) for walk in walks]
    assert sum(map(bool, calls)) > len(SOURCES) / 2
    assert max(calls) <= 2 * 12


def test_some_layers_are_wider_inside_than_what_they_are_given() -> None:
    assert sum("F.gelu(F.linear(t" in source for source in SOURCES) >= 4


def test_inputs_are_large_enough_for_the_peak_of_memory() -> None:
    sizes = [re.findall(r"p\.randn\((\d+), (\d+)\)", source) for source in SOURCES]
    assert sum(max(int(one) * int(other) for one, other in each) >= 1 << 13 for each in sizes if each) > 25
