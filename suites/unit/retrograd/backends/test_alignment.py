"""Inputs that begin elsewhere in memory than Inductor's code relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from retrograd.backends.inductor.alignment import aligned


class Code:
    """Stands for Inductor's: doubles its second input in place, and notes where its inputs begin."""

    mutated_input_idxs = (1,)

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.called = 0

    def __call__(self, args: list[Any]) -> list[torch.Tensor]:
        self.called += 1
        return self.current_callable(args)

    def current_callable(self, args: list[Any]) -> list[torch.Tensor]:
        self.seen.append([value.data_ptr() % 16 for value in args if isinstance(value, torch.Tensor)])
        first, second, *_ = args
        args.clear()
        second.mul_(2)
        return [first + second]


def odd(*sizes: int) -> torch.Tensor:
    """A tensor that begins four bytes behind a multiple of 16."""
    count = torch.Size(sizes).numel()
    return torch.arange(count + 1.0)[1:].view(sizes)


def test_code_gets_copies_of_what_is_not_aligned() -> None:
    code = Code()
    run = aligned(code, [0, 1])
    even = torch.ones(2, 3)
    for first, second in [(odd(2, 3), even), (even.clone(), odd(2, 3)), (odd(3, 2).t(), odd(2, 3))]:
        wanted = first + 2 * second, 2 * second
        (result,) = run([first, second])
        torch.testing.assert_close((result, second), wanted, rtol=0, atol=0)
    assert code.seen == [[0, 0]] * 3


def test_inputs_that_may_lie_anywhere_are_handed_on() -> None:
    code = Code()
    aligned(code, [1])([odd(3), torch.ones(3), 7])
    aligned(code, [])([odd(3), odd(3), 7])
    assert code.seen == [[4, 0], [4, 4]]


def test_what_surrounds_the_code_serves_the_first_call_and_the_profiler() -> None:
    code = Code()
    run = aligned(code, [0, 1])
    for _ in range(3):
        run([torch.ones(3), torch.ones(3)])
    assert (code.called, len(code.seen)) == (1, 3)
    with profile(activities=[ProfilerActivity.CPU]):
        run([torch.ones(3), torch.ones(3)])
    assert (code.called, len(code.seen)) == (2, 4)
