"""Axes: what programs that nobody here wrote have met is drawn, and how often."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gradparity.case import Case
from gradparity.generate import draw as drawing
from gradparity.generate.draw import drawn
from gradparity.generate.load import body_of
from gradparity.generate.script import Script
from gradparity.observe import Observed, observe

COUNT = 60

#: by axis: the policy that draws it most, what its source contains, and the least share of programs with it.
AXES = {
    "cotangents for three outputs": ("shared", r"backward\(\[\w+, \w+, \w+", 0.1),
    "a backward for each of several outputs": ("outputs", r"(?s)\.backward\(.*?\.backward\(", 0.15),
    "gradients of some inputs only": ("hooks", r"backward\(inputs=", 0.03),
    "a gradient penalty": ("second_order", r"create_graph=True", 0.2),
    "one grad mode in another":
        ("grad_modes", r"with torch\.\w*grad.*\n( {8}.*\n)*? {8,}with torch\.\w*grad", 0.1),
    "a call under no_grad":
        ("grad_modes", r"with torch\.(no_grad|set_grad_enabled)\(\w*\):\n +y\d.* = f\(", 0.2),
    "results that go into another call": ("shared", r"z\d.* = f\([^)]*\by\d", 0.05),
    "a parameter of a class of its own": ("modules", r"class Weight", 0.2),
    "a class of parameters that an optimizer sees": ("steps_optimizer", r"isinstance\(each, Own\)", 0.03),
    "a whole step": ("steps_mixed", r"p\.training_step\(whole\)", 0.3),
    "tensors made by old constructors": ("python", r"torch\.(Float|Long|Double|Bool)?Tensor\(\[", 0.03),
    "gradients of outputs are kept": ("shared", r"retain_grad\(\)", 0.02),
    "results changed with grad": ("phases", r"# between\n(.*\n)*? +y\d\.mul_\(2\)", 0.02),
    "memory formats": ("formats", r"channels_last", 0.5),
    "a weight that is cast twice": ("autocast", r"F\.linear\(F\.linear\(", 0.01),
}  # fmt: skip


@cache
def scripts(policy: str) -> list[Script]:
    return [drawn(policy, seed) for seed in range(COUNT)]


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_usual(axis: str) -> None:
    policy, pattern, least = AXES[axis]
    found = sum(re.search(pattern, script.source) is not None for script in scripts(policy))
    assert found >= least * COUNT


class Watching(Observed):
    """Eager, but it remembers the results of calls."""

    def __init__(self) -> None:
        self.braided = False

    def compile(self, target: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[override]
        """The target, whose results are looked at."""

        def call(*args: Any) -> Any:
            result = target(*args)
            ends = [each.grad_fn for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            self.braided |= any(braids([end for end in dict.fromkeys(ends) if end is not None]))
            return result

        return call


def below(end: Any) -> list[Any]:
    seen = {end: None}
    for node in seen.copy():
        waiting = [node]
        while waiting:
            for following, _ in waiting.pop().next_functions:
                if following is not None and following not in seen:
                    seen[following] = None
                    waiting.append(following)
    return list(seen)


def braids(ends: list[Any]) -> Iterator[bool]:
    """For each value: whether one output reaches it before and after another, in eager's order."""
    reach: dict[Any, set[int]] = {}
    for number, end in enumerate(ends):
        for node in below(end):
            reach.setdefault(node, set()).add(number)
    uses: dict[Any, list[Any]] = {}
    for node in sorted(reach, key=lambda node: -node._sequence_nr()):
        for edge in node.next_functions:
            uses.setdefault(edge, []).append(reach[node])
    for edge, ways in uses.items():
        for output in range(len(ends)) if edge[0] is not None else ():
            text = "".join("x" if output in way else "-" for way in ways)
            yield re.search("x-+x", text) is not None


def test_outputs_reach_one_value_by_turns() -> None:
    found = 0
    for script in scripts("shared"):
        watching = Watching()
        with drawing._own_state():
            case = Case("generated", "shared", script.seed)
            observe(case, body_of(script), watching, torch.float32, torch.device("cpu"))
        found += watching.braided
    assert found >= 0.2 * COUNT
