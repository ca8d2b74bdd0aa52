"""`retrograd.compile` where Dynamo fails, and what it computes in Python: numbers and optimizers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import retrograd


class Key:
    def __init__(self):
        self.factors = {"a": 2.0, "b": 3.0}


CACHE: weakref.WeakKeyDictionary[Key, tuple[weakref.ref[Key]]] = weakref.WeakKeyDictionary()


@pytest.fixture
def dies():
    """A backend under which the first key of the cache dies, so that the place of the second is another when
    Dynamo builds its guards. A garbage collection does that to any program with such a cache."""
    keys = [Key(), Key()]
    for key in keys:
        CACHE[key] = (weakref.ref(key),)
    second = keys[1]

    def scaled(x):
        for factor in CACHE[second][0]().factors.values():
            x = x * factor
        return x

    def backend(graph, inputs):
        keys.clear()
        gc.collect()
        return graph.forward

    return scaled, backend


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_python_runs_what_dynamo_fails_at(dies):
    scaled, backend = dies
    fast, x = retrograd.compile(scaled, backend=backend), torch.ones(3, requires_grad=True)
    for _ in range(3):
        fast(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 18.0))
    (reason,) = retrograd.explain().fallbacks
    assert reason.code == "not-compiled"
    assert "scaled" in reason.stage
    assert "list index out of range" in str(reason)


class Unsized(tuple[float, int]):
    """As an irrep of e3nn: a tuple whose class forbids the length, which Dynamo guards."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_python_runs_what_dynamo_cannot_guard():
    parts = [(2, Unsized((1.5, 1)))]

    def scaled(x):
        for count, part in parts:
            x = x * (count * part[0])
        return x

    x = torch.ones(3, requires_grad=True)
    retrograd.compile(scaled, backend="eager")(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert [reason.code for reason in retrograd.explain().fallbacks] == ["not-compiled"]


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"options": {"strict": True}}])
def test_a_failure_is_an_error_if_asked_for(dies, options):
    scaled, backend = dies
    with pytest.raises((IndexError, torch._dynamo.exc.InternalTorchDynamoError), match="out of range"):
        retrograd.compile(scaled, backend=backend, **options)(torch.ones(3))


def test_a_break_is_an_error_with_fullgraph():
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    assert torch.equal(retrograd.compile(broken, backend="eager")(torch.zeros(2)), torch.ones(2))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        retrograd.compile(broken, backend="eager", fullgraph=True)(torch.zeros(2))


def test_a_size_that_does_not_vary_as_the_user_says_is_an_error():
    x = torch.ones(4)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(torch.fx.experimental.symbolic_shapes.ConstraintViolationError):
        retrograd.compile(lambda x: x * (2 if x.shape[0] == 4 else 3), backend="eager")(x)


def test_a_recompilation_is_an_error_if_asked_for():
    fast = retrograd.compile(lambda x: x * 2, backend="eager", dynamic=False)
    fast(torch.ones(4))
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        pytest.raises(torch._dynamo.exc.RecompileError),
    ):
        fast(torch.ones(5))


def test_the_programs_own_error_is_eagers():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        retrograd.compile(fails, backend="eager")(torch.ones(2))


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_compute_as_in_python(dynamic):
    def shifted(x, number):
        return x * ((number + 1e16) - 1e16)

    fast, x = retrograd.compile(shifted, backend="eager", dynamic=dynamic), torch.ones(2)
    for number in (1.0, 2.5, 3.5, 4.25):
        assert torch.equal(fast(x, number), shifted(x, number))


def test_an_optimizer_inside_computes_as_eagers():
    def trained(compile):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        @compile
        def update(x):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = [update(torch.ones(2, 3)) for _ in range(4)]
        return [*losses, *model.parameters()]

    eager, fast = trained(lambda step: step), trained(retrograd.compile(backend="eager"))
    assert all(map(torch.equal, eager, fast))


def pickled(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_compiled_module_computes_the_same(copied):
    fast, x = retrograd.compile(nn.Linear(3, 3), backend="eager"), torch.ones(2, 3)
    assert torch.equal(copied(fast)(x), fast(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_deep_copy_of_a_compiled_module_has_parameters_of_its_own(copied):
    fast, x = retrograd.compile(nn.Linear(3, 3), backend="eager"), torch.ones(2, 3)
    other = copied(fast)
    assert torch.equal(other(x), fast(x))
    nn.init.zeros_(other.weight)
    assert not torch.equal(other(x), fast(x))


@pytest.mark.parametrize("is_module", [True, False])
def test_lazy_modules_are_initialised_in_eager(is_module):
    x = torch.ones(3, 5)

    def ensemble(prepare):
        torch.manual_seed(0)
        found = []
        for _ in range(3):
            member = nn.Sequential(nn.Dropout(), nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
            run = prepare(member if is_module else lambda x, member=member: member(x * 2))
            found += [run(x), run(x), *[parameter.detach() for parameter in member.parameters()]]
        return [*found, torch.rand(1)]

    found = ensemble(lambda member: retrograd.compile(member, backend="eager"))
    assert all(map(torch.equal, found, ensemble(lambda member: member)))
    assert not retrograd.explain().fallbacks
