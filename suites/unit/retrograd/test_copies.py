"""What compiles itself can be copied and pickled once it has run: a model that holds it is, as in eager."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import types

import pytest
import torch
from torch import nn

import retrograd


def loss_of(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def step_of(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    loss.backward()
    return loss.detach()


def _staged(model: nn.Linear, x: torch.Tensor) -> None:
    model.made(model, x).backward()


def _step(model: nn.Linear, x: torch.Tensor) -> None:
    model.made(model, x)


def _context(model: nn.Linear, x: torch.Tensor) -> None:
    with model.made:
        step_of(model, x)


@retrograd.compile_step
def decorated_step(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return step_of(model, x)


@retrograd.aot.function
def decorated_function(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return loss_of(model, x)


class Trainer:
    """It compiles a step of its own."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        self.made = retrograd.compile_step(self.step, backend="eager", strict=True)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return step_of(self.model, x)


WAYS = {
    "aot.function": (lambda: retrograd.aot.function(loss_of, backend="eager", strict=True), _staged),
    "compile_step": (lambda: retrograd.compile_step(step_of, backend="eager", strict=True), _step),
    "compiled_autograd": (lambda: retrograd.compiled_autograd(backend="eager", strict=True), _context),
}


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_copied_with_what_it_holds(way, again):
    make, run = WAYS[way]
    eager = nn.Linear(3, 2)
    model = copy.deepcopy(eager)
    model.made = make()
    for _ in range(3):
        run(model, torch.ones(4, 3))
    model.made = again(model.made)
    other = copy.deepcopy(model)
    assert type(other.made) is type(model.made)
    assert other.made is not model.made
    assert other.made.config == model.made.config
    for each in (model, other, eager):
        each.zero_grad()
    step_of(eager, torch.full((4, 3), 2.0))
    for each in (model, other):
        run(each, torch.full((4, 3), 2.0))
        assert torch.equal(each.weight.grad, eager.weight.grad)
        assert torch.equal(each.bias.grad, eager.bias.grad)


@pytest.mark.parametrize("made", [decorated_step, decorated_function])
def test_a_decorated_function_is_known_by_its_name(made):
    assert copy.deepcopy(made) is made
    assert pickle.loads(pickle.dumps(made)) is made


def test_a_copy_of_a_bound_step_trains_the_copy():
    trainer = Trainer()
    for _ in range(3):
        trainer.made(torch.ones(4, 3))
    other = copy.deepcopy(trainer)
    for each in (trainer, other):
        each.model.zero_grad()
    for _ in range(3):
        other.made(torch.ones(4, 3))
    assert trainer.model.weight.grad is None
    assert other.model.weight.grad is not None


def test_a_copy_has_the_same_backend_and_imports_nothing(tmp_path, monkeypatch):
    module = types.ModuleType("of_nobody")
    (tmp_path / "of_nobody.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    exec("def double(x): return x * 2", vars(module))
    lock = threading.Lock()

    def backend(gm, inputs):
        with lock:
            return gm

    made = retrograd.aot.function(module.double, backend=functools.partial(backend))
    assert torch.equal(copy.deepcopy(made)(torch.ones(2)), torch.full((2,), 2.0))
    assert copy.deepcopy(made).config is made.config
