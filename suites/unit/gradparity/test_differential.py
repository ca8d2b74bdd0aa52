"""One case under one subject: planted faults must be found, and what eager itself does not repeat is set
aside.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus import registry as corpora
from gradparity.differential import ONLY_SET, compare
from gradparity.errors import CaseError
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.subjects.registry import resolve
from gradparity.verdict import Verdict

CPU = torch.device("cpu")

FOUND = {
    "scale-grad": (Verdict.DIVERGE, "grad-values-bits"),
    "last-bit": (Verdict.DIVERGE, "grad-values-bits"),
    "none-grad": (Verdict.DIVERGE, "grad-none"),
    "strides": (Verdict.DIVERGE, "grad-strides"),
    "swap-hooks": (Verdict.HOOK_ORDER, "hook-order"),
    "drop-event": (Verdict.HOOK_ORDER, "hook-count"),
    "raise": (Verdict.DIVERGE, "raises LookupError"),
}


@pytest.mark.parametrize("fault", FOUND)
def test_planted_faults_are_found(bench, hooked_body, fault: str) -> None:
    row = compare(bench.program(hooked_body), resolve(f"planted:{fault}"), CPU).row
    assert (row.verdict, row.symptom) == FOUND[fault]


@pytest.mark.parametrize(("fault", "verdict"), [("scale-grad", Verdict.DIVERGE), ("last-bit", Verdict.AGREE)])
def test_a_subject_without_the_promise_of_bits_is_judged_against_float64(
    bench, hooked_body, fault, verdict
) -> None:
    subject = resolve(f"planted:{fault}")
    subject.bitwise = False
    assert compare(bench.program(hooked_body), subject, CPU).row.verdict is verdict


def test_another_exception_type_is_found(bench) -> None:
    def body(p) -> None:
        x = p.leaf("x", p.randn(2, requires_grad=True))
        with p.backward():
            raise ValueError("eager's own")
        x.sum().backward()

    assert compare(bench.program(body), Eager("eager"), CPU).row.verdict is Verdict.AGREE
    row = compare(bench.program(body), resolve("planted:raise"), CPU).row
    assert row.symptom == "raises LookupError for ValueError"


@pytest.mark.parametrize("untried", [False, True])
def test_what_nobody_has_tried_is_set_aside_where_eager_raises(bench, untried) -> None:
    def body(p) -> None:
        raise ValueError("no such size")

    row = compare(replace(bench.program(body), untried=untried), Eager("eager"), CPU).row
    assert row.set_aside is untried
    if untried:
        assert (row.symptom, row.reason) == ("eager-raises", "eager raises ValueError: no such size")


def test_a_program_that_eager_does_not_repeat_is_set_aside(bench) -> None:
    runs = []

    def body(p) -> None:
        runs.append(None)
        p.value("how often", len(runs))

    row = compare(bench.program(body), Eager("eager"), CPU).row
    assert (row.verdict, row.set_aside) == (Verdict.NONDETERMINISTIC, True)


def test_a_divergence_is_confirmed_by_running_eager_again(bench) -> None:
    runs = []

    def body(p) -> None:
        runs.append(None)
        p.value("changes in the third run", len(runs) >= 3)

    row = compare(bench.program(body), Eager("eager"), CPU).row
    assert row.verdict is Verdict.NONDETERMINISTIC


def test_random_numbers_are_the_same_in_every_run(bench) -> None:
    def body(p) -> None:
        x = p.leaf("x", p.randn(64, requires_grad=True))
        with p.backward():
            torch.dropout(x, 0.5, True).sum().backward()

    assert compare(bench.program(body), Eager("eager"), CPU).row.verdict is Verdict.AGREE


def test_a_skipped_case_is_set_aside_with_its_reason(bench, hooked_body) -> None:
    row = compare(bench.program(hooked_body, skip={"eager": "because"}), Eager("eager"), CPU).row
    assert (row.symptom, row.reason, row.set_aside) == ("set-aside", "because", True)


def test_a_broken_case_is_no_agreement(bench) -> None:
    def body(p) -> None:
        raise CaseError("wrong use")

    row = compare(bench.program(body), Eager("eager"), CPU).row
    assert (row.verdict, row.symptom) == (Verdict.CRASH, "broken-case")


def test_notes_of_the_subject_mark_fallbacks(bench, hooked_body) -> None:
    class Falling(Subject):
        def notes(self) -> tuple[str, ...]:
            return ("fallback: [why-not] because",)

    row = compare(bench.program(hooked_body), Falling("falling"), CPU).row
    assert (row.verdict, row.fell_back, row.notes) == (
        Verdict.AGREE,
        True,
        ("fallback: [why-not] because",),
    )
    assert row.fallbacks == ("why-not",)


def test_a_case_without_a_float64_run_is_judged_by_the_plain_tolerance(bench) -> None:
    def body(p) -> None:
        x = p.leaf("x", torch.full((3,), 0.1, requires_grad=True))
        if p.is_reference:
            raise RuntimeError("float32 only")
        with p.backward():
            x.exp().sum().backward()

    for fault, verdict in (("last-bit", Verdict.AGREE), ("scale-grad", Verdict.DIVERGE)):
        subject = resolve(f"planted:{fault}")
        subject.bitwise = False
        row = compare(bench.program(body), subject, CPU).row
        assert row.verdict is verdict
        assert ("no float64 reference: float64 raises RuntimeError" in row.reason) is (
            verdict is Verdict.DIVERGE
        )


@pytest.mark.parametrize(
    ("fault", "verdict"), [("last-bit", Verdict.NONDETERMINISTIC), ("scale-grad", Verdict.DIVERGE)]
)
def test_a_last_bit_of_an_operation_that_torch_declares_nondeterministic_is_set_aside(
    bench, fault, verdict
) -> None:
    def body(p) -> None:
        x = p.leaf("x", p.randn(4, requires_grad=True))
        y = (x * 2).put(torch.tensor([0, 1]), p.randn(2))
        with p.backward():
            y.sin().sum().backward()

    row = compare(bench.program(body), resolve(f"planted:{fault}"), CPU).row
    assert row.verdict is verdict
    assert not torch.are_deterministic_algorithms_enabled()


PARTITIONED = """
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

def plain(gm, inputs):
    return make_boxed_func(gm.forward)

def larger(gm, inputs):
    return make_boxed_func(lambda *args: [one * 1.01 for one in gm(*args)])

default = aot_autograd(fw_compiler=plain, bw_compiler=plain)
wrong = aot_autograd(fw_compiler=plain, bw_compiler=larger)
"""


@pytest.mark.parametrize(("function", "verdict"), [("default", Verdict.AGREE), ("wrong", Verdict.DIVERGE)])
def test_a_backend_is_not_blamed_for_a_setting_that_we_made(
    tmp_path: Path, function: str, verdict: Verdict
) -> None:
    """Under fallback_random, AOTAutograd's default partitioner leaves a second draw in the backward."""
    (tmp_path / "partitioned.py").write_text(PARTITIONED)
    program = corpora.program(Case("scenarios", "aot_draw_dropout_channels_last"), CPU)
    row = compare(program, resolve(f"compile:{tmp_path}/partitioned.py:{function}"), CPU).row
    assert (row.verdict, row.stocks_own, ONLY_SET in row.notes) == (
        verdict,
        False,
        verdict is Verdict.AGREE,
    )
