"""Hooks set on what each way in returns for a module: they run as eager runs those of the module."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import retrograd

WAYS = {
    "eager": lambda module: module,
    "compile": lambda module: retrograd.compile(module, backend="eager"),
    "backend": lambda module: torch.compile(module, backend="retrograd", options={"backend": "eager"}),
    "aot": lambda module: retrograd.aot.module(module, backend="eager"),
}
pytestmark = pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x, scale=1):
        return self.second(self.first(x).relu()) * scale


#: what all hooks of a program note.
_events = []


class Noting:
    """A hook of any kind that notes what it is given; it can be copied and pickled."""

    def __init__(self, name, change=lambda *given: None):
        self.name, self.change = name, change

    def __call__(self, module, *given):
        _events.append((self.name, "" if "dict" in self.name else _seen(given)))
        return self.change(*given)

    def __reduce__(self):
        return _noting, (self.name,)


def _noting(name):
    return Noting(name, *KINDS[name][2:])


def _seen(given):
    if isinstance(given, torch.Tensor):
        return given.tolist()
    if isinstance(given, (tuple, list)):
        return [_seen(each) for each in given]
    return sorted(map(str, given)) if isinstance(given, dict) else str(type(given))


def _twice(grads):
    return tuple(None if grad is None else grad * 2 for grad in grads)


#: by name: how a hook is set, and what it returns.
KINDS = {
    "forward_pre": (nn.Module.register_forward_pre_hook, {}, lambda args: (args[0] * 2,)),
    "forward_pre_kwargs": (
        nn.Module.register_forward_pre_hook,
        {"with_kwargs": True},
        lambda args, kwargs: (args, {**kwargs, "scale": 3}),
    ),
    "forward": (nn.Module.register_forward_hook, {}, lambda args, out: out * 3),
    "forward_always": (
        nn.Module.register_forward_hook,
        {"with_kwargs": True, "always_call": True},
        lambda args, kwargs, out: out * 3,
    ),
    "backward_pre": (nn.Module.register_full_backward_pre_hook, {}, _twice),
    "backward": (nn.Module.register_full_backward_hook, {}, lambda before, after: _twice(before)),
    "state_dict_pre": (nn.Module.register_state_dict_pre_hook, {}, lambda *given: None),
    "load_state_dict_post": (nn.Module.register_load_state_dict_post_hook, {}, lambda keys: None),
}


def observed(way, then):
    """Events and results of a program with hooks of every kind, set after the first call."""
    torch._dynamo.reset()
    _events.clear()
    wrapper, results = WAYS[way](Net()), []

    def call(called):
        x = torch.ones(2, 3, requires_grad=True)
        y = called(x, scale=2)
        y.sum().backward()
        results.append((y.tolist(), x.grad.tolist()))
        called.load_state_dict(called.state_dict())

    call(wrapper)
    handles = [setter(wrapper, _noting(name), **options) for name, (setter, options, _) in KINDS.items()]
    call(wrapper)
    call(wrapper.eval().to(torch.float64).to(torch.float32).train())
    if then == "removed":
        for handle in handles:
            handle.remove()
    else:
        wrapper = copy.deepcopy(wrapper) if then == "copied" else pickle.loads(pickle.dumps(wrapper))
    call(wrapper)
    return results, list(_events)


@pytest.mark.parametrize("way", list(WAYS)[1:])
@pytest.mark.parametrize("then", ["removed", "copied", "pickled"])
def test_hooks_of_a_wrapper_run_as_those_of_the_module(then, way):
    results, events = observed("eager", then)
    assert {name for name, _ in events} == {*KINDS}
    assert observed(way, then) == (results, events)


@pytest.mark.parametrize("way", ["compile", "backend"])
def test_what_is_set_on_a_wrapper_reaches_the_module(way):
    wrapper = WAYS[way](module := Net())
    wrapper.mark = 3
    wrapper.second = replacement = nn.Linear(3, 2)
    assert module.mark == wrapper.mark == 3
    assert module.second is wrapper.second is replacement
    wrapper.eval()
    assert not module.training
    assert not wrapper.training


def test_hooks_of_a_wrapper_can_be_assigned():
    wrapper = WAYS["compile"](Net())
    wrapper.register_forward_hook(Noting("forward"))
    wrapper._forward_hooks = {}
    _events.clear()
    wrapper(torch.ones(2, 3))
    assert _events == []


@pytest.mark.parametrize("is_full_first", [False, True])
def test_full_and_other_backward_hooks_exclude_each_other(is_full_first):
    wrapper = WAYS["compile"](Net())
    setters = [wrapper.register_backward_hook, wrapper.register_full_backward_hook]
    first, second = reversed(setters) if is_full_first else setters
    first(Noting("first"))
    with pytest.raises(RuntimeError, match="Cannot use both"):
        second(Noting("second"))


def test_wrappers_of_other_backends_stay_as_torch_made_them():
    wrapper, other = WAYS["compile"](Net()), torch.compile(module := Net(), backend="eager")
    seen = []

    def elsewhere():
        other.register_full_backward_hook(Noting("backward"))
        seen.append((vars(other)["_is_full_backward_hook"], module._is_full_backward_hook))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    wrapper.register_full_backward_hook(Noting("backward"))
    assert seen == [(None, True)]
    assert vars(wrapper)["_is_full_backward_hook"] is True
    assert copy.deepcopy(other)._backward_hooks == {}


@pytest.mark.parametrize("is_step", [False, True])
def test_a_wrapper_inside_compiled_code_keeps_its_hooks(is_step):
    def events(wrapped, compiled):
        torch._dynamo.reset()
        outer = nn.Sequential(inner := wrapped(Net()), nn.Tanh())
        grads = []
        _events.clear()

        def step(x):
            outer(x).sum().backward()

        called = compiled(step) if is_step else step
        if not is_step:
            outer = compiled(outer)

        def call():
            called(x := torch.ones(2, 3, requires_grad=True))
            grads.append(x.grad.tolist())

        call()
        handle = inner.register_full_backward_hook(_noting("backward"))
        call()
        call()
        handle.remove()
        call()
        return list(_events), grads

    def compiled(called):
        make = retrograd.compile_step if is_step else retrograd.compile
        return make(called, backend="eager")

    expected = events(WAYS["eager"], lambda called: called)
    assert [name for name, _ in expected[0]] == ["backward"] * 2
    assert events(WAYS["compile"], compiled) == expected
    assert events(WAYS["backend"], compiled) == expected
