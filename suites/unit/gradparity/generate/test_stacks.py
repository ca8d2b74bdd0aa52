"""Stacks: programs whose layers are called many times, with and without a checkpoint, and walked twice."""

import re

from gradparity.generate.draw import drawn

WALK = re.compile(
    r"for _ in range\((\d)\):\n +(v\d+) = (checkpoint\((f\d+), \2, use_reentrant=False\)|(f\d+)\(\2\))"
)


def test_layers_are_walked_with_and_without_checkpoints_once_and_twice() -> None:
    walks = [WALK.findall(drawn("stacks", seed).source) for seed in range(20)]
    called = [one or other for walk in walks for *_, one, other in walk]
    is_checkpointed = {text.startswith("checkpoint") for walk in walks for _, _, text, *_ in walk}
    assert is_checkpointed == {True, False}
    assert {4 <= int(count) <= 8 for walk in walks for count, *_ in walk} == {True}
    assert len(called) > sum(len({one or other for *_, one, other in walk}) for walk in walks)


def test_some_layers_are_wider_inside_than_what_they_are_given() -> None:
    sources = [drawn("stacks", seed).source for seed in range(30)]
    assert sum("F.gelu(F.linear(t" in source for source in sources) >= 4
