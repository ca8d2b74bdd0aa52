"""Ablation: the first rung that diverges names the stage; hashes of values name the operator."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gradparity.ablation import ablate as ablation
from gradparity.ablation.ablate import Ablation, ablate
from gradparity.ablation.inductor import bisected
from gradparity.ablation.ladders import ladder
from gradparity.ablation.operators import Call, compare_calls, parting, recorded
from gradparity.case import Case
from gradparity.corpus import registry as corpora
from gradparity.probe import Probe
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.subjects.registry import resolve
from gradparity.work import with_ablation

CPU = torch.device("cpu")

LADDERS = {
    "compile:inductor": "dynamo aot_eager aot_eager_decomp_partition inductor",
    "stock-compile:aot_eager": "dynamo aot_eager",
    "compile:own": "dynamo aot_eager aot_eager_decomp_partition own",
    "stock-ca:aot_eager": "capture aot_eager",
    "retrograd-live:eager": "capture and order",
    "retrograd-live:inductor+cudagraphs": "capture and order, lowering, backend, CUDA graphs",
    "retrograd-aot:inductor": "capture backend",
    "retrograd-compile:inductor": "dynamo capture backend",
    "retrograd-compile+live:eager": "dynamo capture live",
    "retrograd-live+aot_eager:inductor": "dynamo aot_eager backward",
    "planted:scale-grad": "subject",
    "import:m:C": "subject",
}


@pytest.mark.parametrize("subject", LADDERS)
def test_a_ladder_leads_up_to_the_subject(subject: str) -> None:
    rungs = ladder(subject)
    separator = ", " if "," in LADDERS[subject] else None
    wanted = [LADDERS[subject]] if subject == "retrograd-live:eager" else LADDERS[subject].split(separator)
    assert [rung.stage for rung in rungs] == wanted
    assert rungs[-1].subject == subject


@pytest.mark.parametrize(
    "subject", ["stock-ca:inductor", "compile:inductor", "retrograd-live:inductor+regions"]
)
def test_every_rung_is_a_subject(subject: str) -> None:
    assert all(isinstance(resolve(rung.subject), Subject) for rung in ladder(subject))


def small(p) -> None:
    """Two operators and their backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda x: x.sin().exp())(x)
    with p.backward():
        y.sum().backward()


class WrongCosine(Subject):
    """In the backward, the derivative of sin is off."""

    def backward(self):
        class Mode(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                wrong = func is torch.ops.aten.cos.default
                return torch.sin(*args) if wrong else func(*args, **(kwargs or {}))

        return Mode()


def test_the_operator_is_the_first_whose_result_the_subject_never_has(bench) -> None:
    program = bench.program(small)
    found = parting(program, WrongCosine("w"), CPU)
    assert found.operator == "aten.cos.default (backward)"
    assert parting(program, Eager("eager"), CPU).operator == ""


def test_calls_are_recorded_with_their_phase(bench) -> None:
    calls = recorded(bench.program(small), Eager("eager"), CPU)
    phases = {call.name: call.phase for call in calls}
    assert (phases["aten.sin.default"], phases["aten.cos.default"]) == ("forward", "backward")


def test_a_call_that_takes_what_the_other_side_has_goes_before_one_that_follows_from_it() -> None:
    late, first = Call("late", "backward", ("x",), ("y",)), Call("first", "forward", ("a",), ("x",))
    assert compare_calls([late, first], [Call("other", "forward", ("a",), ("z",))]).eager == first


class TellsNone(torch.autograd.Function):
    """Its backward adds one where an output took no part: Dynamo gives it zeros there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor:
        first, second = grads
        assert first is not None
        return first + 1 if second is None else first * second.cos()


def without_the_second(p: Probe) -> None:
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a: TellsNone.apply(a)[0])(x)
    with p.backward():
        out.sum().backward()


def test_the_stage_and_the_operator_of_a_real_divergence(bench) -> None:
    found = ablate(bench.program(without_the_second), "compile:aot_eager", CPU)
    assert (found.stage, [step.verdict for step in found.steps]) == ("dynamo", ["DIVERGE"])
    assert found.operator
    assert Ablation.from_json(found.to_json()) == found


BACKENDS = """
import torch
from torch._dynamo.backends.common import aot_autograd
from functorch.compile import make_boxed_func


def plain(gm, inputs):
    return make_boxed_func(gm.forward)


def wrong_cosine(gm, inputs):
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.cos.default:
            node.target = torch.ops.aten.sin.default
    gm.recompile()
    return plain(gm, inputs)


def native(gm, inputs):
    code = plain(gm, inputs)

    def run(args):
        with torch._C._DisableTorchDispatch():
            return [one * 1.01 if isinstance(one, torch.Tensor) else one for one in code(args)]

    run._boxed_call = True
    return run


seen = aot_autograd(fw_compiler=wrong_cosine, bw_compiler=wrong_cosine)
unseen = aot_autograd(fw_compiler=plain, bw_compiler=native)
"""


@pytest.mark.parametrize(("function", "operator"), [("seen", "aten.cos.default (backward)"), ("unseen", "")])
def test_a_backend_from_a_file_names_an_operator_if_it_calls_operators(
    bench, tmp_path: Path, function: str, operator: str
) -> None:
    """A code generator's own kernels are no ATen calls: nothing of them is blamed."""
    file = tmp_path / "backends_to_ablate.py"
    file.write_text(BACKENDS)
    found = ablate(bench.program(small), f"compile:{file}:{function}", CPU)
    assert (found.stage, found.operator) == (f"{file}:{function}", operator)


def test_a_row_carries_its_ablation() -> None:
    program = corpora.program(Case("demo", "gradient_of_an_unused_output"), CPU)
    row = ablation.compare(program, resolve("compile:aot_eager"), CPU).row
    row = with_ablation(row, program, CPU)
    assert (row.stage, len(row.exhibit["ablation"]["steps"]), bool(row.signature)) == ("aot_eager", 2, True)


def test_a_stage_that_is_not_installed_is_passed_over(bench, monkeypatch) -> None:
    def missing(name: str) -> Subject:
        raise ablation.GradparityError(f"{name} is not available")

    monkeypatch.setattr(ablation, "resolve", missing)
    found = ablate(bench.program(small), "compile:aot_eager", CPU)
    assert (found.stage, [step.symptom for step in found.steps]) == ("", ["set-aside", "set-aside"])


@pytest.mark.slow
def test_torchs_bisector_names_the_pass_of_inductor() -> None:
    """Inductor puts the zeroing of an input before the copy that reads it (pytorch#198094)."""

    def program(compiler):
        def fn(x, s):
            y = torch.slice_scatter(x, s[1:3], dim=0, start=1, end=3)
            x.zero_()
            return y

        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        return compiler(fn)(*(torch.randn(4, 6, generator=generator) for _ in range(2)))

    wanted = program(lambda fn: fn)
    if torch.equal(program(torch.compile), wanted):
        pytest.skip("this torch does not reinplace the scatter wrongly")
    found = bisected(lambda: torch.equal(program(torch.compile), wanted))
    assert found.describe() == "post_grad_passes: reinplace_inplaceable_ops"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Ablation(), "broken by: nothing"),
        (Ablation(stage="inductor", operator="aten.sin"), "broken by: inductor aten.sin"),
        (
            Ablation(stage="b.py:compile_graph"),
            "broken by: b.py:compile_graph; no operator can be named: "
            "its calls cannot be seen one by one, or no value differs",
        ),
    ],
)
def test_the_last_line_names_the_operator_or_says_why_not(found: Ablation, told: str) -> None:
    assert found.describe() == told
