"""Twins of programs given as text: what may be rewritten is, and means the same; what may not is left."""

import pytest
import torch

from gradparity.case import Case
from gradparity.checks.metamorphic import metamorphic, relation, twins
from gradparity.corpus.generated import generated, scripted
from gradparity.generate.script import Script, Step
from gradparity.generate.twins import twins as rewritten
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager

CPU = torch.device("cpu")
PROGRAM = """
def program(x0, x1):
    a = x0.sin()
    b = x1.cos()
    c = a + b
    return c, a
"""
RUN = (
    'x0 = p.leaf("x0", p.randn(3, requires_grad=True))',
    'x1 = p.leaf("x1", p.randn(3, requires_grad=True))',
    "y0, y1 = p.compile(program)(x0, x1)",
    "with p.backward():\n    (y0.sum() + (y1 * 2).sum()).backward()",
)
SCRIPT = Script(definitions=(PROGRAM.strip(),), steps=(Step(title="", lines=RUN),))


def test_each_edit_has_its_text() -> None:
    found = rewritten(SCRIPT.source)
    assert "b = x1.cos()\n    a = x0.sin()\n    c = a + b" in found["unrelated statements reordered"]
    assert "c = b + a" in found["commuted operands"]
    assert "y0.sum().backward(retain_graph=True)\n        (y1 * 2).sum().backward()" in found["split losses"]


@pytest.mark.parametrize(
    "line",
    ["a = x0.sin_()", "a = torch.dropout(x0, 0.5, True)", "x0[0] = 1", "x0 += 1", "a = torch.rand_like(x0)"],
)
def test_where_an_order_means_something_nothing_is_moved(line: str) -> None:
    source = SCRIPT.source.replace("a = x0.sin()", f"a = x0.sin()\n    {line}")
    assert set(rewritten(source)) == {"split losses"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("torch.sin(x0)", "x0.sin()"),
        ("torch.sum(x0, 0)", "x0.sum(0)"),
        ("x0 @ x1", "torch.matmul(x0, x1)"),
        ("x0 - x1", "x0 + -x1"),
        ("x0 ** 2", "x0 * x0"),
        ("x0.exp().mT", "x0.exp().transpose(-2, -1)"),
    ],
)
def test_another_spelling_means_the_same(one: str, other: str) -> None:
    source = SCRIPT.source.replace("x0.sin()", one)
    assert f"a = {other}\n" in rewritten(source)["equivalent operators"]
    tensors = {name: torch.randn(3, 3, dtype=torch.float64) for name in ("x0", "x1")}
    assert torch.equal(eval(one, {"torch": torch, **tensors}), eval(other, {"torch": torch, **tensors}))


def test_roots_are_split_with_their_cotangents() -> None:
    source = (
        "def run(p):\n    torch.autograd.backward([a, b], [c, d])\n    torch.autograd.backward([a], [c])\n"
    )
    assert rewritten(source)["split losses"] == (
        "def run(p):\n    torch.autograd.backward([a], [c], retain_graph=True)\n"
        "    torch.autograd.backward([b], [d])\n    torch.autograd.backward([a], [c])"
    )


def test_a_program_without_other_forms_has_none() -> None:
    assert rewritten("def run(p):\n    pass\n") == {}


class Biased(Subject):
    """Wrong in a second backward."""

    def __init__(self) -> None:
        super().__init__("biased")
        self.backwards = 0

    def compile(self, target):
        def run(*args):
            results = target(*args)
            results[0].register_hook(self._hook)
            results[1].register_hook(self._hook)
            return results

        return run

    def reset(self, cold: bool) -> None:
        self.backwards = 0

    def _hook(self, grad: torch.Tensor) -> torch.Tensor:
        self.backwards += 1
        return grad * (2 if self.backwards > 2 else 1)


def test_a_subject_that_keeps_a_relation_no_more_is_found() -> None:
    program = scripted(Case("c", "n"), SCRIPT)
    assert len(twins(program)) == 4
    assert metamorphic(program, Eager("eager"), CPU) is None
    assert metamorphic(program, Biased(), CPU).symptom == "metamorphic split losses"


@pytest.mark.parametrize("name", ["elementwise", "views", "outputs"])
def test_twins_of_generated_programs_mean_the_same_in_eager(name: str) -> None:
    for index in range(8):
        program = generated(Case("generated", name, index))
        found = {
            which: relation(program, twin, Eager("eager"), CPU) for which, twin in twins(program).items()
        }
        assert {which: each for which, each in found.items() if each.verdict.is_divergence} == {}
