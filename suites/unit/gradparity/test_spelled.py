"""Samples of torch's databases as programs that name their shapes and arguments."""

from itertools import islice

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus import registry as corpora
from gradparity.corpus.generated import scripted
from gradparity.corpus.spelled import spelled
from gradparity.fuzzing.smaller import written
from gradparity.observe import Observed, observe
from gradparity.outcome import describe
from gradparity.shrink.read import from_source
from gradparity.subjects.registry import resolve

CPU = torch.device("cpu")


def texts(address: str) -> list[str]:
    return list(spelled(corpora.program(Case.parse(address), CPU)))


CONVOLUTION = """import torch


def run(p):
    x = p.leaf('input x', p.randn(2, 4, 8, 8).requires_grad_())
    y = p.leaf('input y', p.randn(2, 2, 3, 3).requires_grad_())
    z = p.leaf('input z', p.randn(2).requires_grad_())
    out = p.compile(lambda x, y, z: CONV(x, y, z, stride=(3, 2), padding=(2, 1), groups=2, dilation=(4, 4)))(x, y, z)
    p.value('output 0', out)
    with p.backward():
        (out * p.randn(2, 2, 2, 1)).sum().backward()
"""  # noqa: E501


def test_shapes_and_arguments_are_named() -> None:
    assert texts("op_db::nn.functional.conv2d::2")[0] == CONVOLUTION.replace(
        "CONV", "torch.nn.functional.conv2d"
    )


def test_numbers_are_written_out_in_one_of_the_texts() -> None:
    normal, uniform, literal = texts("op_db::cumsum::0")[0], *texts("op_db::index_select::0")[1:]
    assert "p.randn(" in normal
    assert "p.rand(" in uniform
    assert "p.randn(" not in literal.partition("compile")[0]


def test_a_module_is_built_by_its_arguments() -> None:
    text = texts("module_db::nn.Linear::0")[0]
    assert "module = p.module(torch.nn.Linear(10, 8))" in text


@pytest.mark.parametrize("corpus", ["op_db", "module_db", "op_db:complex64"])
def test_what_is_written_runs(corpus: str) -> None:
    source, ran = corpora.corpus(corpus), 0
    for chunk in source.chunks()[:: len(source.chunks()) // 8]:
        for program in islice(source.programs(chunk, CPU, 0), 1):
            for text in spelled(program):
                case = scripted(program.case, from_source(text))
                seen = observe(case.case, case.body, Observed(), torch.float32, CPU)
                ran += seen.raised is None and bool(seen.grads)
    assert ran >= 8


def test_a_literal_shows_what_the_sample_shows() -> None:
    program = corpora.program(Case("op_db", "dot", 0), CPU)
    text = list(spelled(program))[-1]
    assert "p.tensor([" in text
    outcomes = [
        observe(each.case, each.body, Observed(), torch.float32, CPU)
        for each in (program, scripted(program.case, from_source(text)))
    ]
    one, two = ([describe(item.value) for item in outcome.values] for outcome in outcomes)
    assert one == two


def test_the_shrinker_begins_with_the_text_that_diverges_alike() -> None:
    script, found = written(corpora.program(Case("op_db", "sin", 0), CPU), resolve("planted:scale-grad"), CPU)
    assert "torch.sin(x)" in script.source
    assert found.row.symptom == "grad-values-bits"
