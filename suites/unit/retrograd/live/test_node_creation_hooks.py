"""Hooks on the making of autograd nodes (torch 2.14) see none of ours; callbacks have a public name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import retrograd

graph: Any = torch.autograd.graph


def there(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hasattr(graph, name), reason=f"this torch has no {name}")


def seen(is_live: bool) -> list[str]:
    """What happens in a first backward, hooks put on every node that is made."""
    events: list[str] = []

    def made(node: Any) -> None:
        events.append(f"made {node.name()}")
        node.register_hook(lambda *_: events.append(f"ran {node.name()}"))

    w = torch.ones(3, requires_grad=True)
    with retrograd.compiled_autograd("eager") if is_live else contextlib.nullcontext():
        with graph.node_creation_hook(made):
            (w * 2).sin().sum().backward()
    return events


@there("node_creation_hook")
def test_they_see_what_they_see_in_eager() -> None:
    assert seen(is_live=True) == seen(is_live=False)


@there("queue_callback")
def test_callbacks_queued_by_the_public_name_run_at_the_end() -> None:
    events: list[str] = []
    w = torch.ones(3, requires_grad=True)
    w.register_hook(lambda _: graph.queue_callback(lambda: events.append("callback")))
    w.register_post_accumulate_grad_hook(lambda _: events.append("accumulated"))
    with retrograd.compiled_autograd("eager"):
        w.sin().sum().backward()
    assert events == ["accumulated", "callback"]
