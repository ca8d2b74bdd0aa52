"""The probe: the same numbers in every run, recording hooks, leaves."""

import gc
import weakref

import pytest
import torch

from gradparity.case import Case
from gradparity.errors import CaseError
from gradparity.probe import Probe
from gradparity.subjects.eager import Eager


def probe(dtype: torch.dtype = torch.float32, seed: int = 0) -> Probe:
    return Probe(Case("test", "p", None, seed), Eager("eager"), dtype, torch.device("cpu"))


def test_the_reference_run_sees_the_same_numbers_in_float64() -> None:
    one, two = probe(), probe(torch.float64)
    for make in (lambda p: p.randn(3, 2), lambda p: p.rand(4), lambda p: p.tensor([0.1, 0.2])):
        narrow, wide = make(one), make(two)
        assert (narrow.dtype, wide.dtype) == (torch.float32, torch.float64)
        assert torch.equal(narrow.double(), wide)
    assert torch.equal(one.randint(9, 5), two.randint(9, 5))
    assert two.tensor([1, 2]).dtype is torch.int64


def test_the_seed_decides_the_numbers() -> None:
    assert not torch.equal(probe(seed=0).randn(8), probe(seed=1).randn(8))


def test_two_leaves_of_one_name_are_a_mistake_of_the_case() -> None:
    p = probe()
    p.leaf("x", p.randn(2))
    with pytest.raises(CaseError, match="two leaves"):
        p.leaf("x", p.randn(2))


def test_a_module_is_converted_and_its_parameters_are_leaves() -> None:
    p = probe(torch.float64)
    module = p.module(torch.nn.Linear(2, 1), "layer")
    module(p.randn(1, 2)).sum().backward()
    assert [grad.name for grad in p.grads()] == ["layer.weight", "layer.bias"]
    assert module.weight.dtype is torch.float64


def test_hooks_record_and_return_what_the_function_returns() -> None:
    p = probe()
    x = p.leaf("x", p.randn(2, requires_grad=True))
    x.register_hook(p.hook("plain"))
    x.register_hook(p.hook("double", lambda grad: grad * 2))
    x.register_post_accumulate_grad_hook(p.hook("acc", kind="post_acc"))
    x.sum().backward()
    p.event("by hand", 1, None)
    assert [(e.kind, e.site) for e in p.events] == [
        ("tensor", "plain"),
        ("tensor", "double"),
        ("post_acc", "acc"),
        ("event", "by hand"),
    ]
    assert p.events[2].payload[0].parts[0].tolist() == [2.0, 2.0]


def test_module_hooks_leave_the_module_out_of_the_payload() -> None:
    p = probe()
    module = p.module(torch.nn.Linear(2, 1))
    module.register_full_backward_hook(p.hook("full", kind="module"))
    module(p.randn(1, 2, requires_grad=True)).sum().backward()
    assert len(p.events[0].payload) == 2


class WithoutSetter(torch.Tensor):
    """Its gradient cannot be set from outside."""

    grad = property(lambda self: None)


class Refusing(torch.Tensor):
    """It lets nobody set its attributes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ == "__set__":
            raise RuntimeError("no")
        return super().__torch_function__(func, types, args, kwargs or {})


def of_class(cls: type) -> torch.Tensor:
    return torch.ones(2).as_subclass(cls).requires_grad_()


def view_without_a_graph() -> torch.Tensor:
    with torch.no_grad():
        return torch.ones(4)[:2].requires_grad_()


def made_by_an_operator() -> torch.Tensor:
    made = torch.ones(2, requires_grad=True) * 1
    made.retain_grad()
    return made


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


LEAVES = {
    "plain": lambda: torch.ones(2, requires_grad=True),
    "no gradient": lambda: torch.ones(2),
    "inference": in_inference_mode,
    "a view": view_without_a_graph,
    "no leaf": made_by_an_operator,
    "a subclass": lambda: of_class(WithoutSetter),
    "a subclass that refuses": lambda: of_class(Refusing),
    "sparse": lambda: torch.eye(2).to_sparse().requires_grad_(),
}


def holding(*held):
    """A hook that keeps these alive."""
    return lambda *_: held[:0] or None


def released(make) -> list[weakref.ref]:
    """What a probe with this leaf held, after its release."""
    p = probe()
    leaf = p.leaf("x", make())
    if leaf.requires_grad:
        leaf.register_hook(holding(leaf, p))
        if leaf.is_leaf:
            leaf.register_post_accumulate_grad_hook(holding(leaf, p))
        (leaf * leaf).sum().backward(create_graph=True)
    p.release()
    return [weakref.ref(leaf), weakref.ref(p)]


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_a_released_probe_frees_every_kind_of_leaf(make) -> None:
    gone = released(make)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def released_after_a_hook_raised() -> list[weakref.ref]:
    p = probe()
    leaf, hold = p.leaf("x", p.randn(2, requires_grad=True)), holding(p)

    def raising(grad: torch.Tensor) -> None:
        raise ValueError(hold(grad))

    leaf.register_hook(raising)
    with pytest.raises(ValueError, match="None"):
        leaf.sum().backward()
    p.release()
    return [weakref.ref(leaf), weakref.ref(p)]


def test_a_hook_that_raises_is_released() -> None:
    gone = released_after_a_hook_raised()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
