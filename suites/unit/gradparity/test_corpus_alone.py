"""The corpus by itself: programs run, and show what they do, without the machinery of the tester."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from gradparity import corpus
from gradparity.errors import UnknownNameError

ALONE = """
import sys
from gradparity import corpus

(program,) = corpus.programs("scenarios", match="two_branches_tensor_hooks")
seen = corpus.run(program)
print(*(event.site for event in seen.events), all(grad.value is not None for grad in seen.grads()))
used = {name.split(".")[1] for name in sys.modules if name.startswith("gradparity.")}
print(*sorted(used - {"case", "corpus", "errors", "generate", "observe", "outcome", "probe"}))
"""


def test_a_scenario_runs_with_nothing_but_the_corpus_and_eager() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    hooks, others = done.stdout.split("\n")[:2]
    assert (hooks.split()[-1], len(hooks.split()) > 2) == ("True", True), done.stdout
    assert others.split() == []


class Mine(corpus.Way):
    """Eager, which counts."""

    def __init__(self) -> None:
        self.compiled, self.backwards = [], 0

    def compile(self, target):
        self.compiled.append(target)
        return target

    def backward(self):
        self.backwards += 1
        return nullcontext()


def test_a_compiler_of_ones_own_is_used() -> None:
    mine = Mine()
    (program,) = corpus.programs("demo", match="gradient_of_an_unused_output")
    seen, plain = corpus.run(program, mine), corpus.run(program, dtype=torch.float64)
    assert (len(mine.compiled), mine.backwards) == (1, 1)
    assert [grad.name for grad in seen.grads()] == [grad.name for grad in plain.grads()]


def test_names_that_are_not_there() -> None:
    with pytest.raises(UnknownNameError, match="unknown corpus"):
        next(corpus.programs("nothing"))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        corpus.nothing  # noqa: B018
    assert list(corpus.programs("demo", match="nothing")) == []
