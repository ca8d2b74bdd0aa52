"""Shrinking: programs of thirty operators end at a handful, and still diverge alike."""

from __future__ import annotations

import time

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus.generated import scripted
from gradparity.differential import Comparison, compare
from gradparity.generate.draw import drawn
from gradparity.generate.script import Script, Step
from gradparity.shrink import Shrinker, from_source, still_diverges
from gradparity.shrink.parsed import Parsed, nodes
from gradparity.signature import signature_of
from gradparity.subjects.registry import resolve

CPU = torch.device("cpu")
CASE = Case("generated", "hand", 0)
LONG = Script(
    definitions=(
        "def program(x, y, z):\n    "
        + "\n    ".join(f"x = torch.sin(x * {number}.5) + y" for number in range(2, 17))
        + "\n    z = z.view(-1)\n    z.mul_(3)\n    return x, z",
    ),
    steps=(
        Step(
            title="inputs",
            lines=(
                'x = p.leaf("x", p.randn(4, 17).requires_grad_())',
                'y = p.leaf("y", p.randn(17).requires_grad_())',
                'z = p.watch("z", p.randn(8, 3))',
            ),
        ),
        Step(title="forward", lines=("f = p.compile(program)", "a, b = f(x, y, z)", 'p.value("a", a)')),
        Step(title="backward", lines=("with p.backward():\n    a.sum().backward()",)),
    ),
)


def shrunk(script: Script, subject: str, seconds: float = 30) -> Script:
    found = compare(scripted(CASE, script), resolve(subject), CPU)
    assert found.row.is_find
    question = still_diverges(found, CASE, resolve(subject), CPU, timeout=20)
    return Shrinker(question, seconds).shrink(script).script


def operators(script: Script) -> int:
    kinds = ("Call", "BinOp", "AugAssign")
    trees = Parsed.of(Script(definitions=script.definitions)).trees
    return sum(type(node).__name__ in kinds for node in nodes(trees))


def test_thirty_operators_end_at_a_handful_within_a_minute() -> None:
    begun = time.monotonic()
    found = shrunk(LONG, "planted:input-mutation-lost", 60)
    assert time.monotonic() - begun < 60
    assert operators(LONG) > 30
    assert operators(found) <= 3
    assert "mul_" in found.source
    assert "sin" not in found.source
    assert "17" not in found.source


@pytest.mark.parametrize(
    ("policy", "fault"),
    [("mixed", "scale-grad"), ("steps_mixed", "grad-overwritten"), ("python", "python-effects-lost")],
)
def test_symptom_place_and_what_eager_raises_stay(policy: str, fault: str) -> None:
    def compared(script: Script) -> Comparison:
        return compare(scripted(CASE, script), resolve(f"planted:{fault}"), CPU)

    script = next(each for seed in range(20) if compared(each := drawn(policy, seed)).row.is_find)
    small = shrunk(script, f"planted:{fault}")
    before, after = compared(script), compared(small)
    assert signature_of(before.row) == signature_of(after.row)
    assert before.evidence.eager.raised == after.evidence.eager.raised
    assert len(small.source.splitlines()) <= 0.6 * len(script.source.splitlines())


def test_it_ends_when_time_is_up_with_what_it_has() -> None:
    def slow(script: Script) -> bool:
        time.sleep(0.1)
        return "sin" in script.source

    found = Shrinker(slow, 0.5).shrink(LONG)
    assert 1 <= found.tried <= 6
    assert not found.done
    assert len(found.script.source) < len(LONG.source)


def test_a_script_that_only_itself_is_interesting_stays_as_it_is() -> None:
    found = Shrinker(lambda script: False, 30).shrink(LONG)
    assert found.script == LONG
    assert found.done


def test_nothing_is_asked_twice() -> None:
    asked: list[str] = []

    def question(script: Script) -> bool:
        asked.append(script.source)
        return "mul_" in script.source and "def program" in script.source

    Shrinker(question, 30).shrink(LONG)
    assert len(asked) == len(set(asked))


def test_imports_of_a_users_program_stay() -> None:
    text = (
        "import torch\nimport os.path as path\nfrom math import pi\n\n\ndef run(p):\n    p.value('pi', pi)\n"
    )
    script = from_source(text)
    assert script.definitions == ("import os.path as path", "from math import pi")
    assert compare(scripted(CASE, script), resolve("eager"), CPU).evidence.eager.raised is None
