"""Scripts: programs as data, with one source that is executed."""

import linecache
import sys

import pytest
import torch

from gradparity.case import Case
from gradparity.errors import CaseError
from gradparity.generate.intended import INTENDED, is_intended
from gradparity.generate.load import KEEP, body_of, namespace
from gradparity.generate.script import Script, Step
from gradparity.observe import Observed, observe
from gradparity.outcome import Outcome, Raised

CPU = torch.device("cpu")
DOUBLED = Script(
    doc="twice",
    settings=("torch.no_grad()",),
    definitions=("def program(x):\n    return F.relu(x) * 2",),
    steps=(
        Step(title="inputs", lines=("x = p.randn(3)",)),
        Step(title="", lines=("y = p.compile(program)(x)", 'p.value("y", y)')),
        Step(title="nothing"),
    ),
)


def ran(script: Script, dtype: torch.dtype = torch.float32) -> Outcome:
    return observe(Case("test", "script"), body_of(script), Observed(), dtype, CPU)


def test_a_source_reads_like_a_program_that_somebody_wrote() -> None:
    assert DOUBLED.source == (
        "import torch\n"
        "import torch.nn.functional as F\n"
        "\n"
        "\n"
        "def program(x):\n"
        "    return F.relu(x) * 2\n"
        "\n"
        "\n"
        "@torch.no_grad()\n"
        "def run(p):\n"
        "    # inputs\n"
        "    x = p.randn(3)\n"
        "    y = p.compile(program)(x)\n"
        '    p.value("y", y)\n'
    )


def test_the_source_is_what_runs() -> None:
    (value,) = ran(DOUBLED).values
    assert value.name == "y"
    assert (value.value.parts[0] >= 0).all()


def test_json_gives_the_same_script_back() -> None:
    assert Script.from_text(DOUBLED.to_text()) == DOUBLED


@pytest.mark.parametrize("text", ["", "[]", '{"unknown": 1}', '{"steps": [{"lines": []}]}'])
def test_what_is_no_script_is_refused(text: str) -> None:
    with pytest.raises(CaseError, match="not a script"):
        Script.from_text(text)


def test_the_reference_run_widens_every_dtype_that_is_named() -> None:
    lines = (
        'x = p.randn(2, dtype="bfloat16")',
        'p.value("x", x.to(torch.float16) * torch.ones(2, dtype=torch.int8))',
    )
    script = Script(steps=(Step(title="", lines=lines),))
    assert ran(script).values[0].value.dtype is torch.float16
    wide = ran(script, torch.float64).values[0].value
    assert wide.dtype is torch.float64
    assert torch.equal(wide.parts[0], wide.parts[0].bfloat16().double())


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(CaseError, match="no Python"):
        namespace("def run(p)\n")


def test_few_sources_stay_known_by_name() -> None:
    for number in range(KEEP + 9):
        namespace(f"number = {number}")
    assert sum(name.startswith("<gradparity") for name in linecache.cache) <= KEEP
    assert sum(name.startswith("gradparity_program") for name in sys.modules) <= KEEP


def test_an_intended_error_is_known_by_its_text() -> None:
    product = torch.ones(2, requires_grad=True).sigmoid()
    product.detach().add_(1)
    with pytest.raises(RuntimeError) as caught:
        product.sum().backward()
    found = Raised.of(caught.value)
    assert is_intended(found, ["freed", "version"])
    assert not is_intended(found, [name for name in INTENDED if name != "version"])
