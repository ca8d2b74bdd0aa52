"""Every oracle in both directions: silent where all is well, and a finding where it is not."""

from dataclasses import replace

import pytest
import torch

from gradparity.oracles.evidence import Reference
from gradparity.oracles.exceptions import exceptions
from gradparity.oracles.grad_metadata import grad_metadata
from gradparity.oracles.hook_order import hook_order
from gradparity.oracles.judge import ORACLES, judge
from gradparity.oracles.tolerances import TABLE, tolerance
from gradparity.oracles.values import errors, values
from gradparity.outcome import GradRecord, HookEvent, Outcome, Raised, ValueRecord, freeze
from gradparity.probe import Probe
from gradparity.verdict import Verdict


def grads(**tensors: torch.Tensor | None) -> Outcome:
    return Outcome(grads=tuple(GradRecord(name, freeze(tensor)) for name, tensor in tensors.items()))


def events(*names: str) -> Outcome:
    return Outcome(events=tuple(HookEvent(name, "tensor", (freeze(torch.ones(2)),)) for name in names))


def raising(error: BaseException) -> Outcome:
    return Outcome(raised=Raised.of(error))


def test_all_oracles_are_silent_on_equal_outcomes(bench, hooked_body) -> None:
    evidence = bench.evidence(bench.outcome(hooked_body), bench.outcome(hooked_body))
    assert [oracle(evidence) for oracle in ORACLES] == [None] * len(ORACLES)
    assert judge(evidence).verdict is Verdict.AGREE


class TestExceptions:
    def test_the_same_type_agrees_and_is_noted(self, bench) -> None:
        evidence = bench.evidence(raising(ValueError("a")), raising(ValueError("b")))
        assert exceptions(evidence) is None
        assert evidence.notes == ["eager raises ValueError"]

    def test_another_type_diverges(self, bench) -> None:
        found = exceptions(bench.evidence(raising(ValueError("a")), raising(KeyError("a"))))
        assert (found.verdict, found.symptom) == (Verdict.DIVERGE, "raises KeyError for ValueError")

    def test_one_raising_and_not_the_other_diverges(self, bench) -> None:
        assert exceptions(bench.evidence(raising(ValueError("a")), Outcome())).symptom == "no-exception"
        assert exceptions(bench.evidence(Outcome(), raising(ValueError("a")))).verdict is Verdict.DIVERGE

    @pytest.mark.parametrize("error", [AssertionError("x"), RuntimeError("x INTERNAL ASSERT FAILED y")])
    def test_internal_errors_are_crashes(self, bench, error) -> None:
        assert exceptions(bench.evidence(Outcome(), raising(error))).verdict is Verdict.CRASH

    def test_refusals_count_as_such_only_for_subjects_that_may_refuse(self, bench) -> None:
        evidence = bench.evidence(Outcome(), raising(RuntimeError("double backward is not supported")))
        assert exceptions(evidence).verdict is Verdict.DIVERGE
        evidence.may_refuse = True
        assert exceptions(evidence).verdict is Verdict.UNSUPPORTED


class TestHookOrder:
    def test_order(self, bench) -> None:
        found = hook_order(bench.evidence(events("a", "b", "c"), events("a", "c", "b")))
        assert (found.verdict, found.symptom) == (Verdict.HOOK_ORDER, "hook-order")
        assert found.reason == "call 1: eager tensor b, subject tensor c"

    def test_count(self, bench) -> None:
        found = hook_order(bench.evidence(events("a", "b"), events("a")))
        assert found.symptom == "hook-count"
        assert found.reason.startswith("1 call(s) missing (tensor b)")
        assert "too many (tensor b)" in hook_order(bench.evidence(events("a"), events("a", "b"))).reason

    def test_the_payload_is_compared_once_the_order_agrees(self, bench) -> None:
        changed = Outcome(events=(HookEvent("a", "tensor", (freeze(torch.ones(2) * 3),)),))
        found = judge(bench.evidence(events("a"), changed))
        assert (found.verdict, found.symptom) == (Verdict.DIVERGE, "hook-payload-bits")

    def test_none_in_a_payload(self, bench) -> None:
        changed = Outcome(events=(HookEvent("a", "tensor", (None,)),))
        assert judge(bench.evidence(events("a"), changed)).symptom == "event-none"


class TestMetadata:
    @pytest.mark.parametrize(
        ("subject", "symptom"),
        [
            (None, "grad-none"),
            (torch.ones(2, 3, dtype=torch.float64), "grad-dtype"),
            (torch.ones(3, 2), "grad-shape"),
            (torch.ones(3, 2).t(), "grad-strides"),
            (torch.ones(2, 3).to_sparse(), "grad-layout"),
            (torch.ones(2, 3, requires_grad=True), "grad-requires_grad"),
            (torch.nn.Buffer(torch.ones(2, 3)).as_subclass(type("Sub", (torch.Tensor,), {})), "grad-class"),
        ],
    )
    def test_differences(self, bench, subject, symptom) -> None:
        found = grad_metadata(bench.evidence(grads(x=torch.ones(2, 3)), grads(x=subject), bitwise=False))
        assert (found.verdict, found.symptom) == (Verdict.DIVERGE, symptom)

    def test_a_tensor_where_eager_has_none(self, bench) -> None:
        assert grad_metadata(bench.evidence(grads(x=None), grads(x=torch.zeros(2)))).symptom == "grad-none"

    def test_strides_of_short_dimensions_count_for_bitwise_subjects_only(self, bench) -> None:
        one, two = torch.ones(1, 3), torch.ones(3, 1).t()
        assert one.stride() != two.stride()
        assert grad_metadata(bench.evidence(grads(x=one), grads(x=two))).symptom == "grad-strides"
        assert grad_metadata(bench.evidence(grads(x=one), grads(x=two), bitwise=False)) is None

    def test_a_value_that_the_subject_never_showed(self, bench) -> None:
        eager = Outcome(values=(ValueRecord("v", 1),))
        assert grad_metadata(bench.evidence(eager, Outcome())).symptom == "values-observed"


class TestValues:
    def test_nan_equals_nan_and_zeros_are_equal_with_a_note(self, bench) -> None:
        one, two = torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), -0.0])
        evidence = bench.evidence(grads(x=one), grads(x=two))
        assert values(evidence) is None
        assert evidence.notes == ["grad x: the sign of a zero differs"]

    def test_the_last_bit_counts_for_bitwise_subjects_only(self, bench) -> None:
        one = torch.ones(3)
        two = one.nextafter(torch.tensor(2.0))
        assert values(bench.evidence(grads(x=one), grads(x=two))).symptom == "grad-values-bits"
        assert values(bench.evidence(grads(x=one), grads(x=two), bitwise=False)) is None

    def test_nan_in_another_place_diverges(self, bench) -> None:
        one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
        assert values(bench.evidence(grads(x=one), grads(x=two), bitwise=False)).verdict is Verdict.DIVERGE

    def test_against_float64(self, bench, hooked_body) -> None:
        eager = bench.outcome(hooked_body)
        for factor, verdict in ((1 + 1e-6, Verdict.AGREE), (1 + 1e-3, Verdict.DIVERGE)):
            changed = tuple(
                replace(g, value=replace(g.value, parts=(g.value.parts[0] * factor,))) for g in eager.grads
            )
            evidence = bench.evidence(eager, replace(eager, grads=changed), bitwise=False, body=hooked_body)
            assert judge(evidence).verdict is verdict

    def test_an_unstable_reference_sets_the_case_aside(self, bench) -> None:
        reference, eager = grads(x=torch.ones(2).double()), grads(x=torch.tensor([1.0, 5.0]))
        evidence = bench.evidence(eager, grads(x=torch.tensor([1.0, 7.0])), bitwise=False)
        evidence.reference = lambda: Reference(reference)
        assert values(evidence).verdict is Verdict.REF_UNSTABLE

    def test_the_reference_is_run_only_when_bits_differ(self, bench) -> None:
        evidence = bench.evidence(grads(x=torch.ones(2)), grads(x=torch.ones(2)), bitwise=False)
        evidence.reference = lambda: pytest.fail("not needed")
        assert judge(evidence).verdict is Verdict.AGREE

    def test_integers_must_be_equal(self, bench) -> None:
        one, two = torch.tensor([1]), torch.tensor([2])
        assert values(bench.evidence(grads(x=one), grads(x=two), bitwise=False)).verdict is Verdict.DIVERGE

    def test_a_large_payload_is_judged_by_its_hash(self, bench) -> None:
        one = torch.zeros(1 << 17)
        two = one.clone()
        two[-1] = 1
        payloads = [Outcome(events=(HookEvent("a", "tensor", (freeze(t, 1 << 16),)),)) for t in (one, two)]
        assert values(bench.evidence(*payloads)).symptom == "hook-payload-bits"

    def test_errors_give_one_line_per_tensor(self, bench, hooked_body) -> None:
        outcome = bench.outcome(hooked_body)
        labels = [item.label for item in errors(bench.evidence(outcome, outcome))]
        assert labels == ["grad x", "grad w", "value z (0)"]


def test_the_first_finding_decides_and_the_others_are_noted(bench) -> None:
    eager = replace(events("a", "b"), grads=grads(x=torch.ones(2)).grads)
    subject = replace(events("b", "a"), grads=grads(x=None).grads)
    found = judge(bench.evidence(eager, subject))
    assert found.verdict is Verdict.HOOK_ORDER
    assert found.notes[0].startswith("also grad-none")


def test_the_table_of_tolerances_orders_dtypes_by_precision() -> None:
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    floors = [TABLE[dtype].floor for dtype in order]
    assert floors == sorted(floors)
    assert tolerance(torch.int64) is None
    assert tolerance(torch.float8_e4m3fn) == TABLE[torch.bfloat16]


@pytest.mark.parametrize(
    ("eager", "subject", "shown", "verdict"),
    [
        (0.0, 4e-7, 1.0, Verdict.AGREE),  # what rounding leaves of nothing
        (0.0, 1e-4, 1.0, Verdict.DIVERGE),
        (0.0, 4e-7, 0.01, Verdict.DIVERGE),  # large beside what the program shows
        (1e-3, 1e-3 + 4e-7, 1.0, Verdict.DIVERGE),  # a gradient that is there is its own scale
    ],
)
def test_gradients_that_cancel_are_judged_by_the_scale_of_the_values(
    bench, eager: float, subject: float, shown: float, verdict: Verdict
) -> None:
    def outcome(grad: float) -> Outcome:
        value = ValueRecord("y", freeze(torch.tensor([shown])))
        return replace(grads(x=torch.tensor([grad])), values=(value,))

    evidence = bench.evidence(outcome(eager), outcome(subject), bitwise=False)
    evidence.reference = lambda: Reference(outcome(eager))
    assert judge(evidence).verdict is verdict


@pytest.mark.parametrize(("rounds_to", "off", "verdict"), [
    (None, 0.001, Verdict.DIVERGE),
    (torch.bfloat16, 0.001, Verdict.AGREE),
    (torch.bfloat16, 0.2, Verdict.DIVERGE),
])  # fmt: skip
def test_without_a_reference_what_rounds_to_a_lower_precision_is_judged_by_it(
    bench, rounds_to: torch.dtype | None, off: float, verdict: Verdict
) -> None:
    def body(p: Probe, more: float = 0.0) -> None:
        p.value("x", torch.ones(3) + more)

    eager, subject = bench.outcome(body), bench.outcome(lambda p: body(p, off))
    for bitwise in (False, True):
        evidence = replace(bench.evidence(eager, subject, bitwise), rounds_to=rounds_to)
        assert judge(evidence).verdict is (Verdict.DIVERGE if bitwise else verdict)


@pytest.mark.parametrize(("dtype", "low"), [
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.float32, torch.float16),
    (torch.complex128, torch.complex64),
])  # fmt: skip
@pytest.mark.parametrize("length", [3, 8])
def test_values_that_went_through_a_lower_dtype_diverge_however_near_they_are(
    bench, dtype, low, length
) -> None:
    grad = torch.linspace(0.1, 0.9, length, dtype=dtype)
    noisy = grads(x=grad * (1 + torch.finfo(low).eps))  # eager's own error lets anything nearby pass
    for subject, symptom in ((grad.to(low).to(dtype), "grad-values-rounded"), (grad * 1, "")):
        evidence = bench.evidence(grads(x=grad), grads(x=subject), bitwise=False)
        evidence.reference = lambda: Reference(noisy)
        assert judge(evidence).symptom == symptom


def test_a_subject_that_computes_more_exactly_than_eager_was_not_rounded(bench) -> None:
    eager = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * (1 + 4e-7)
    evidence = bench.evidence(grads(x=eager), grads(x=eager.round()), bitwise=False)
    evidence.reference = lambda: Reference(grads(x=eager.round().double()))
    assert judge(evidence).verdict is Verdict.AGREE


def test_a_single_number_of_float64_that_was_rounded_diverges(bench) -> None:
    grad = torch.tensor([1 / 3], dtype=torch.float64)
    evidence = bench.evidence(grads(x=grad), grads(x=grad.float().double()), bitwise=False)
    evidence.reference = lambda: Reference(grads(x=grad * (1 + 1e-7)))
    assert judge(evidence).symptom == "grad-values-rounded"


def test_another_speck_where_gradients_cancel_was_not_rounded(bench) -> None:
    specks, others = torch.tensor([[3.1e-17, -2.3e-17], [2.0**-54, 0.0]], dtype=torch.float64)
    evidence = bench.evidence(grads(x=specks, w=specks + 1), grads(x=others, w=specks + 1), bitwise=False)
    evidence.reference = lambda: Reference(grads(x=specks * 0, w=specks + 1))
    assert judge(evidence).verdict is Verdict.AGREE
