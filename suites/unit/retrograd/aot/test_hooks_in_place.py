"""Hooks of leaves that change a gradient in place, in code compiled ahead of time."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import retrograd
from retrograd.engine import writes_in_place

DOORS = {
    "dynamo": lambda fn, **more: torch.compile(fn, backend="retrograd", options={"backend": "eager", **more}),
    "aot": lambda fn, **more: retrograd.aot.function(fn, backend="eager", **more),
}


def doubled(grad):
    grad.mul_(2)


def cleared(grad):
    grad[0] = 0


def through_another(hook):
    return lambda grad: hook(grad)


HOOKS = {
    "a method": doubled,
    "an item": cleared,
    "a method of torch": torch.Tensor.zero_,
    "bound": functools.partial(lambda by, grad: grad.mul_(by), 3),
    "closed over": through_another(doubled),
}
USES = {
    "a sum": lambda y, r, s: y + r,
    "a sum of three": lambda y, r, s: (y + r) + s,
    "a view": lambda y, r, s: y + r.view(6).view(2, 3),
}


def gradients(door, use, hook):
    torch.manual_seed(0)
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    r, s = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    call = door(lambda x, r, s: use(linear(x), r, s))
    call(x, r, s).square().sum().backward()
    r.register_hook(hook)
    for _ in range(2):
        call(x, r, s).square().sum().backward()
    return [None if t.grad is None else t.grad.tolist() for t in (linear.weight, linear.bias, r, s)]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
def test_other_branches_see_what_a_hook_has_changed(hook, use, door):
    found = gradients(DOORS[door], USES[use], HOOKS[hook])
    assert found == gradients(lambda fn: fn, USES[use], HOOKS[hook])


def test_the_report_names_it():
    with pytest.warns(retrograd.FallbackWarning, match="changes the gradient in place"):
        gradients(DOORS["aot"], USES["a sum"], doubled)


def test_other_hooks_and_gradients_of_their_own_are_no_fallback():
    for use, hook in ((USES["a sum"], lambda grad: grad * 2), (lambda y, r, s: y * r, doubled)):
        found = gradients(functools.partial(DOORS["aot"], strict=True), use, hook)
        assert found == gradients(lambda fn: fn, use, hook)


def test_what_code_tells_of_a_hook():
    seen = []
    assert not any(
        map(writes_in_place, (seen.append, lambda grad: seen.append(grad.clone()), None, 3, print))
    )


@pytest.mark.parametrize("hook", [doubled, None], ids=["a function", "one made inside"])
@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
def test_a_hook_that_the_function_sets_on_an_input_is_set_before_the_graph_that_uses_it(hook):
    def hooked(y, r, s):
        r.register_hook(hook or (lambda grad: grad.mul_(2)))
        return y + r

    assert gradients(DOORS["dynamo"], hooked, doubled) == gradients(lambda fn: fn, hooked, doubled)
