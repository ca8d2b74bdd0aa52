"""Attribution: what stock's own forward does is stock's, and everything else is the subject's."""

from dataclasses import replace

import pytest
import torch

from gradparity.differential import compare
from gradparity.oracles.attribution import not_stocks_own
from gradparity.oracles.evidence import Evidence, Reference
from gradparity.outcome import GradRecord, HookEvent, Outcome, Raised, ValueRecord, freeze
from gradparity.signature import Signature, signature_of
from gradparity.subjects.base import Blame, Subject
from gradparity.subjects.registry import resolve
from gradparity.verdict import Verdict

CPU = torch.device("cpu")


def outcome(calls: str = "", **grads: object) -> Outcome:
    """An outcome with one event a letter and these gradients."""
    return Outcome(
        grads=tuple(GradRecord(name, _frozen(value)) for name, value in grads.items()),
        events=tuple(HookEvent(letter, "tensor", ()) for letter in calls),
    )


def _frozen(value: object):
    return None if value is None else freeze(torch.tensor(value, dtype=torch.float32))


def symptom(eager: Outcome, subject: Outcome, stock: Outcome, silent: bool = False) -> str | None:
    found = not_stocks_own(Evidence(eager, subject, bitwise=True), stock, silent)
    return None if found is None else found.symptom


@pytest.mark.parametrize(
    ("eager", "stock", "subject", "found"),
    [
        ("abc", "cba", "cba", None),
        ("abc", "cba", "bac", "hook-order"),
        ("abc", "ca", "ac", None),  # stock lost a call and turned the rest round; the subject keeps the order
        ("abc", "ca", "ca", None),
        ("abc", "ac", "ab", "hook-count"),
        ("abc", "cbad", "abcd", None),
        ("abc", "cbad", "bacd", "hook-count"),
        ("abc", "cba", "ab", "hook-count"),
    ],
)
def test_order_is_eagers_or_stocks(eager: str, stock: str, subject: str, found: str | None) -> None:
    assert symptom(outcome(eager), outcome(subject), outcome(stock)) == found


@pytest.mark.parametrize(
    ("subject", "found"),
    [
        ({"x": 1.0, "y": 0.0}, None),  # y as in stock, x put right
        ({"x": 3.0, "y": 0.0}, None),
        ({"x": 3.0, "y": None}, None),
        ({"x": 2.0, "y": 0.0}, "grad-values-bits"),  # x as nowhere
        ({"x": 1.0, "y": 5.0}, "grad-none"),
    ],
)
def test_each_gradient_is_eagers_or_stocks(subject: dict[str, float], found: str | None) -> None:
    eager, stock = outcome(x=1.0, y=None), outcome(x=3.0, y=0.0)
    assert symptom(eager, outcome(**subject), stock) == found


def test_where_stock_rounds_the_subject_may_round_too() -> None:
    eager, stock = outcome(x=1.0), outcome(x=1.0 + 2e-6)
    assert symptom(eager, outcome(x=1.0 + 1e-6), stock) is None
    assert symptom(eager, outcome(x=1.1), stock) == "grad-values-bits"
    assert symptom(eager, outcome(x=1.0 + 1e-6), outcome(x=1.0)) == "grad-values-bits"


def test_payloads_are_compared_call_by_call() -> None:
    def calls(**payloads: float) -> Outcome:
        return Outcome(
            events=tuple(HookEvent(site, "tensor", (_frozen(value),)) for site, value in payloads.items())
        )

    eager, stock = calls(a=1.0, b=2.0), calls(b=0.0, a=1.0)
    assert symptom(eager, calls(b=0.0, a=1.0), stock) is None
    assert symptom(eager, calls(a=1.0, b=0.0), stock) is None
    assert symptom(eager, calls(b=0.0, a=7.0), stock) == "hook-payload-bits"


def test_a_call_that_only_eager_lacks_may_show_tuples() -> None:
    """A node's hook is given tuples."""
    eager, mine = Outcome(), Outcome(events=(HookEvent("a", "node_post", ((_frozen(1.0),), (None,))),))
    other = Outcome(events=(HookEvent("a", "node_post", ((_frozen(7.0),), (None,))),))
    assert symptom(eager, mine, mine) is None
    assert symptom(eager, other, mine) == "event-none"


def test_exceptions_are_eagers_or_stocks() -> None:
    def raising(name: str) -> Outcome:
        return Outcome(raised=Raised(name, (name,), "why"))

    eager = outcome(x=1.0)
    assert symptom(eager, raising("RuntimeError"), raising("RuntimeError")) is None
    assert symptom(eager, raising("RuntimeError"), raising("ValueError")) == "raises RuntimeError"
    assert symptom(eager, raising("RuntimeError"), eager) == "raises RuntimeError"
    assert symptom(raising("ValueError"), Outcome(), Outcome()) is None
    late = replace(raising("RuntimeError"), grads=outcome(x=None).grads)
    early = replace(raising("RuntimeError"), grads=outcome(x=7.0).grads)
    assert symptom(eager, late, early) is None  # the program ended before the gradient was there
    assert symptom(eager, early, late) == "grad-values-bits"


def test_other_values_shown() -> None:
    def showing(*names: str) -> Outcome:
        return Outcome(values=tuple(ValueRecord(name, 1) for name in names))

    assert symptom(showing("a"), showing("b"), showing("b")) is None
    assert symptom(showing("a"), showing("c"), showing("b")) == "values-observed"


@pytest.mark.parametrize(("found", "log"), [(None, (2,)), ("log", (1,)), ("log", (3,))])
def test_what_is_beside_gradients_is_stocks_only_if_stock_shows_it(found: str | None, log: object) -> None:
    eager, subject, stock = (Outcome(log=one) for one in ((1,), (2,), log))
    assert symptom(eager, subject, stock) == found


SILENT = {
    "value": (outcome(x=1.0), outcome(x=3.0), "grad-values-bits"),
    "none": (outcome(x=1.0), outcome(x=None), "grad-none"),
    "shown": (Outcome(values=(ValueRecord("a", 1),)), Outcome(), "values-observed"),
    "log": (Outcome(log=(1,)), Outcome(log=(2,)), "log"),
    "no error": (Outcome(raised=Raised("RuntimeError", ("RuntimeError",), "why")), Outcome(), "no-exception"),
    "error": (outcome(x=1.0), Outcome(raised=Raised("RuntimeError", ("RuntimeError",), "why")), None),
    "order": (outcome("abc"), outcome("acb"), None),
    "last bits": (outcome(x=1.0), outcome(x=1.0 + 1e-6), None),
}


@pytest.mark.parametrize("what", SILENT)
def test_a_subject_may_answer_for_what_is_silent_in_stock(what: str) -> None:
    eager, subject, found = SILENT[what]
    assert symptom(eager, subject, subject) is None
    assert symptom(eager, subject, subject, silent=True) == found


@pytest.mark.parametrize("name", ["retrograd-compile:eager", "retrograd-step:eager"])
def test_whoever_is_called_in_place_of_dynamo_answers_for_it(name: str) -> None:
    assert resolve(name).answers_for_silent
    assert not resolve("retrograd-live+aot_eager:eager").answers_for_silent


@pytest.mark.parametrize("silent", [False, True])
def test_the_row_of_a_silent_divergence_that_stock_shares(bench, hooked_body, silent: bool) -> None:
    subject = resolve("planted:scale-grad")
    subject.stock, subject.answers_for_silent = resolve("planted:scale-grad"), silent
    assert compare(bench.program(hooked_body), subject, CPU).row.stocks_own is not silent


@pytest.mark.parametrize(("fault", "own"), [("scale-grad", True), ("none-grad", False), (None, False)])
def test_a_divergence_of_stocks_own_is_shown_and_marked(bench, hooked_body, fault, own) -> None:
    subject = resolve("planted:scale-grad")
    subject.stock = resolve(f"planted:{fault}") if fault else Subject("stock")
    row = compare(bench.program(hooked_body), subject, CPU).row
    assert (row.verdict, row.symptom, row.stocks_own) == (Verdict.DIVERGE, "grad-values-bits", own)


@pytest.mark.parametrize(("generator", "own"), [("scale-grad", True), (None, False)])
def test_values_may_be_as_far_off_as_stocks_with_the_same_code_generator(
    bench, hooked_body, generator, own
) -> None:
    subject = resolve("planted:scale-grad")
    subject.bitwise, subject.stock = False, Subject("stock")
    subject.rounds_as = resolve(f"planted:{generator}") if generator else Subject("stock")
    row = compare(bench.program(hooked_body), subject, CPU).row
    assert (row.verdict, row.symptom, row.stocks_own) == (Verdict.DIVERGE, "grad-values", own)


@pytest.mark.parametrize(
    ("subject", "reference", "found"),
    [
        (1.00005, None, None),
        (1.001, None, "grad-values"),  # both may have drawn other numbers
        (1.001, 1.0005, None),
        (float("nan"), None, "grad-values"),
    ],
)
def test_what_a_code_generator_rounds_is_near_to_eager_or_has_a_reference(
    subject: float, reference: float | None, found: str | None
) -> None:
    run = Reference(None, "none") if reference is None else Reference(outcome(x=reference))
    evidence = Evidence(outcome(x=1.0), outcome(x=subject), bitwise=False, reference=lambda: run)
    left = not_stocks_own(evidence, outcome(x=subject), only_rounds=True)
    assert (None if left is None else left.symptom) == found


def test_only_values_ask_the_code_generator(bench, hooked_body) -> None:
    subject = resolve("planted:none-grad")
    subject.bitwise, subject.rounds_as = False, resolve("planted:none-grad")
    row = compare(bench.program(hooked_body), subject, CPU).row
    assert (row.verdict, row.stocks_own) == (Verdict.DIVERGE, False)


def test_only_a_divergence_asks_stock(bench, hooked_body) -> None:
    class Never(Subject):
        def begin(self) -> None:
            raise AssertionError

    subject = Subject("fine")
    subject.stock = Never("never")
    assert compare(bench.program(hooked_body), subject, CPU).row.verdict is Verdict.AGREE


def test_the_notes_of_the_row_are_kept(bench, hooked_body) -> None:
    class Noting(Subject):
        bitwise = True

        def notes(self) -> tuple[str, ...]:
            return ("fallback: why",)

        def observed(self, seen: Outcome) -> Outcome:
            return replace(seen, events=())

    subject = Noting("noting")
    subject.stock = Subject("stock")
    row = compare(bench.program(hooked_body), subject, CPU).row
    assert (row.symptom, row.notes[0], row.stocks_own) == ("hook-count", "fallback: why", False)


class Tenth(Subject):
    """Of the gradients that stock gets wrong in its own way, it makes others a tenth larger."""

    stage = "own"

    def observed(self, outcome: Outcome) -> Outcome:
        return resolve("planted:scale-grad").observed(outcome)


@pytest.mark.parametrize(
    ("fault", "blame", "own"),
    [
        ("drop-event", Blame.own, False),
        ("drop-event", Blame.only_stock_free, True),
        ("drop-event", Blame.strict, False),
        (None, Blame.only_stock_free, False),
    ],
)
def test_policies_of_blame(bench, hooked_body, fault: str | None, blame: Blame, own: bool) -> None:
    subject = Tenth("tenth")
    subject.stock = resolve(f"planted:{fault}") if fault else Subject("stock")
    subject.stock.stage = "before"
    subject.answers_for(blame)
    row = compare(bench.program(hooked_body), subject, CPU).row
    stage = "" if blame is Blame.strict else "before" if own else "own"
    assert (row.symptom, row.stocks_own, row.stage) == ("grad-values", own, stage)


def test_a_backends_own_divergence_has_another_signature_than_stocks(bench, hooked_body) -> None:
    found = []
    for fault in ("scale-grad", None):
        subject = Tenth("tenth")
        subject.stock = resolve(f"planted:{fault}") if fault else Subject("stock")
        subject.stock.stage = "before"
        found.append(signature_of(compare(bench.program(hooked_body), subject, CPU).row))
    assert (found[0].stage, found[1].stage) == ("before", "own")
    assert found[0].digest != found[1].digest
    assert Signature.from_json(found[0].to_json()) == found[0]
