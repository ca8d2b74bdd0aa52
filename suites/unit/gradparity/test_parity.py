"""check and assert_parity: a function or module of the user's, without a corpus."""

import pytest
import torch

import gradparity
from gradparity.parity import ParityError, Target, check
from gradparity.verdict import Verdict

AOT = "compile:aot_eager"


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sin()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, requires_grad=True), torch.randn(3)


def test_a_function_that_agrees() -> None:
    row = gradparity.assert_parity(product, inputs(), subject=AOT)
    assert (row.case, row.verdict) == ("check::product", Verdict.AGREE)


@pytest.mark.parametrize(
    "given",
    [{"x": torch.ones(2, requires_grad=True), "y": torch.ones(2)}, [torch.ones(2, requires_grad=True)] * 2],
)
def test_inputs_may_be_a_dictionary_or_a_list(given) -> None:
    assert gradparity.assert_parity(product, given, subject="eager")


def test_a_divergence_is_an_assertion_error_that_says_what() -> None:
    with pytest.raises(
        ParityError, match=r"DIVERGE: planted:none-grad and eager differ in check::product: grad-none"
    ):
        gradparity.assert_parity(product, inputs(), subject="planted:none-grad")


def test_hooks_of_a_module_are_watched_if_asked_for_and_both_timelines_are_told() -> None:
    x = torch.randn(2, 3)
    assert check(network(), x, subjects=[AOT])[0].verdict is Verdict.AGREE
    with pytest.raises(ParityError, match="HOOK_ORDER") as caught:
        gradparity.assert_parity(network(), x, subject=AOT, hooks=True)
    assert ">>   0  tensor m.2.bias" in str(caught.value)


def test_it_is_told_if_stock_shows_the_same() -> None:
    with pytest.raises(ParityError, match=r"\n  stock's own: it is already with aot_eager"):
        gradparity.assert_parity(network(), torch.randn(2, 3), subject="stock-passes:inductor", hooks=True)


def test_some_hooks_by_name_and_what_they_return() -> None:
    double = {"input 0": lambda grad: grad * 2}
    assert gradparity.assert_parity(product, inputs(), subject="eager", hooks=double)
    with pytest.raises(ParityError, match=r"no leaf 'input 7' to hook\n  known  input 0"):
        gradparity.assert_parity(product, inputs(), subject="eager", hooks=["input 7"])


def test_the_users_module_and_tensors_are_left_alone() -> None:
    module, x = network(), torch.randn(2, 3, requires_grad=True)
    check(module, x, subjects=["eager"])
    assert x.grad is None
    assert all(
        parameter.grad is None and parameter.dtype is torch.float32 for parameter in module.parameters()
    )


def test_further_checks_are_made_of_what_agrees() -> None:
    (row,) = check(product, inputs(), subjects=["eager"], checks=("metamorphic", "leaks"))
    assert row.verdict is Verdict.AGREE


def test_a_function_without_tensors_is_no_case() -> None:
    with pytest.raises(ParityError, match="it returned no tensor"):
        gradparity.assert_parity(lambda: 3, subject="eager")


def test_a_case_that_compares_no_gradient_is_none() -> None:
    with pytest.raises(ParityError, match="nothing requires grad, so no gradient would be compared"):
        gradparity.assert_parity(torch.tanh, torch.randn(4), subject="eager")
    (row,) = gradparity.check(torch.nn.Tanh(), torch.randn(4), subjects=["eager"])
    assert row.verdict is not Verdict.AGREE


def test_cases_are_named_for_functions_and_classes() -> None:
    assert Target(product).case.name == "product"
    assert Target(network()).case.name == "Sequential"
