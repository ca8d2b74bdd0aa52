"""Hooks that pack and unpack the tensors that autograd saves.

In: a probe. Out: when packing and unpacking happen, how often, and that unpacked values are the ones used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


def _same(value: Any) -> Any:
    """Return the argument: what a pack or unpack hook does that only watches."""
    return value


def _hooks(
    p: Probe, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], name: str = ""
) -> saved_tensors_hooks:
    """Return saved-tensor hooks that record every call and do what the two functions do."""
    return saved_tensors_hooks(
        p.hook(f"{name}pack", pack, kind="pack"), p.hook(f"{name}unpack", unpack, kind="unpack")
    )


def _watch(p: Probe, name: str = "") -> saved_tensors_hooks:
    """Return saved-tensor hooks that record every call and keep the values."""
    return _hooks(p, _same, _same, name)


@scenario(tags=("hooks", "saved"), issue="pytorch#134361")
def unpack_hooks_between_tensor_hooks(p: Probe) -> None:
    """A tensor is unpacked when its node runs: after the tensor hooks above it, before those below."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with _watch(p):
        y = x.sin()
        z = y.exp()
        w = z * y
    for name, tensor in (("y", y), ("z", z), ("w", w)):
        tensor.register_hook(p.hook(name))
    with p.backward():
        w.sum().backward()


@scenario(tags=("hooks", "saved", "order"), issue="pytorch#134361")
def unpack_hooks_between_node_and_accumulate_hooks(p: Probe) -> None:
    """Unpacking comes after a node's pre hooks, before its post hooks; leaves are accumulated in between."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    with _watch(p):
        out = model(x)
    node_of(out).register_prehook(p.hook("out.pre", kind="node_pre"))
    node_of(out).register_hook(p.hook("out.post", kind="node_post"))
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    with p.backward():
        out.pow(2).sum().backward()


@scenario(tags=("hooks", "saved"), issue="pytorch#148222")
def unpack_only_where_the_backward_goes(p: Probe) -> None:
    """Tensors that were saved for a branch outside the backward are never unpacked."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    with _watch(p):
        left = x.sin() * y.exp()
        right = (y * y).cos()
    with p.backward():
        (left.sum() + 0 * right.detach().sum()).backward(inputs=[x])


@scenario(tags=("hooks", "saved"), issue="pytorch#116221")
def unpack_changes_the_value(p: Probe) -> None:
    """The gradient is computed from what unpack returns, even if that is not what was packed."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with _hooks(p, _same, lambda t: t * 2):
        y = x.pow(2)
    with p.backward():
        y.sum().backward()


@scenario(tags=("hooks", "saved"))
def packed_as_rounded_integers(p: Probe) -> None:
    """Activations that are packed as 8-bit integers give the gradient of the rounded activations."""
    x = p.leaf("x", p.randn(4, 4, requires_grad=True))

    def pack(t: Tensor) -> tuple[Tensor, torch.dtype]:
        return (t * 16).round().to(torch.int8), t.dtype

    def unpack(packed: tuple[Tensor, torch.dtype]) -> Tensor:
        return packed[0].to(packed[1]) / 16

    with _hooks(p, pack, unpack):
        y = (x.tanh() * x).sigmoid()
    with p.backward():
        y.sum().backward()


@scenario(tags=("hooks", "saved"))
def packed_as_a_name(p: Probe) -> None:
    """What pack returns need not be a tensor: an offloader keeps a name and finds the tensor again by it."""
    x = p.leaf("x", p.randn(3, 3, requires_grad=True))
    store: dict[str, Tensor] = {}

    def pack(t: Tensor) -> str:
        store[f"tensor{len(store)}"] = t.detach().clone()
        return f"tensor{len(store) - 1}"

    with _hooks(p, pack, store.__getitem__):
        y = (x @ x.sin()).exp()
    with p.backward():
        y.mean().backward()


@scenario(tags=("hooks", "saved"))
def nested_saved_tensor_hooks(p: Probe) -> None:
    """Of nested pairs of hooks only the innermost is used, for packing and for unpacking."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with _watch(p, "outer."):
        y = x.sin()
        with _watch(p, "inner."):
            z = y.exp()
        w = z.cos()
    with p.backward():
        w.sum().backward()


@scenario(tags=("hooks", "saved"))
def unpacked_again_in_a_second_backward(p: Probe) -> None:
    """With `retain_graph` every backward unpacks anew; the values may differ from call to call."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    calls: list[int] = []

    def unpack(t: Tensor) -> Tensor:
        calls.append(1)
        return t * len(calls)

    with _hooks(p, _same, unpack):
        y = x.sin()
    with p.backward():
        for _ in range(3):
            y.sum().backward(retain_graph=True)


@scenario(tags=("hooks", "saved", "errors"))
def unpack_raises(p: Probe) -> None:
    """An exception from unpack comes out of backward with its type; earlier leaves keep their gradients."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))

    def refuse(packed: Any) -> Tensor:
        raise FileNotFoundError("lost")

    with _hooks(p, _same, refuse):
        inner = x.sin()
    with p.backward():
        (inner + y).sum().backward()


@scenario(tags=("hooks", "saved", "errors"))
def unpack_returns_no_tensor(p: Probe) -> None:
    """Unpack must return a tensor; a number is a TypeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with _hooks(p, _same, lambda t: 1.0):
        y = x.sin()
    with p.backward():
        y.sum().backward()


@scenario(tags=("saved",))
def save_on_cpu_round_trip(p: Probe) -> None:
    """Saved tensors that were moved to the CPU come back with the right values and devices."""
    model = p.module(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)))
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    with save_on_cpu():
        out = model(x)
    with p.backward():
        out.sum().backward()


@scenario(tags=("saved", "errors"))
def saved_tensor_hooks_disabled(p: Probe) -> None:
    """Where saved-tensor hooks are disabled, setting them is a RuntimeError."""
    with disable_saved_tensors_hooks("not here"), _watch(p):
        p.randn(1)


@scenario(tags=("hooks", "saved"))
def unpack_hooks_set_by_hand(p: Probe) -> None:
    """Hooks registered on one raw saved tensor of one node are used for that tensor only."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y.exp()
    node: Any = node_of(y)
    unpack = p.hook("unpack", lambda t: t * 0, kind="unpack")
    node._raw_saved_self.register_hooks(p.hook("pack", _same, kind="pack"), unpack)
    with p.backward():
        z.sum().backward()
