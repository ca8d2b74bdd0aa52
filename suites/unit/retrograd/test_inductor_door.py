"""What stands around Inductor: kernels compiled in threads, joint passes that its cache can spare."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import async_compile, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.custom_graph_pass import CustomGraphPass

from retrograd._torch.inductor_passes import with_joint_passes
from retrograd._torch.triton_threads import in_threads


@pytest.fixture
def compiled_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads on which kernels were compiled; no workers are there."""
    threads: list[str] = []

    def triton(self: AsyncCompile, name: str, source: str) -> str:
        threads.append(threading.current_thread().name)
        return f"{name} of {source}"

    monkeypatch.setattr(AsyncCompile, "triton", triton)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: False))
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 4)
    return threads


def test_kernels_are_compiled_in_threads_until_the_workers_are_there(
    compiled_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler: Any = AsyncCompile()
    with in_threads():
        future = compiler.triton("kernel", "text")
        assert isinstance(future, Future)
        assert future.result(60) == "kernel of text"
        monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: True))
        assert compiler.triton("next", "text") == "next of text"
    assert compiler.triton("last", "text") == "last of text"
    mine = threading.current_thread().name
    assert compiled_on[0].startswith("retrograd-triton")
    assert compiled_on[1:] == [mine, mine]


def test_one_compile_thread_means_one(compiled_on: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    compiler: Any = AsyncCompile()
    with in_threads():
        assert compiler.triton("kernel", "text") == "kernel of text"
    assert compiled_on == [threading.current_thread().name]


class Doubling(CustomGraphPass):
    """A user's pass in the place that the joint passes take: multiplies the result by two."""

    def __call__(self, graph: fx.Graph) -> None:
        result = graph.output_node()
        value = result.args[0][0]  # type: ignore[index]
        with graph.inserting_before(result):
            doubled = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2))
        doubled.meta["val"] = value.meta["val"]  # type: ignore[union-attr]
        result.args = ((doubled,),)

    def uuid(self) -> Any:
        return "doubling"


def test_a_users_pass_runs_after_the_joint_passes_and_is_part_of_the_cache_key() -> None:
    with with_joint_passes():
        alone: Any = config.post_grad_custom_pre_pass
    with config.patch(post_grad_custom_pre_pass=Doubling()), with_joint_passes():
        both: Any = config.post_grad_custom_pre_pass
    assert alone.uuid() != both.uuid()
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    graph.output((x,))
    gm = fx.GraphModule({}, graph)
    both(gm.graph)
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.mul.Tensor
    ]


def test_a_pass_that_cannot_tell_what_it_is_keeps_graphs_out_of_the_cache() -> None:
    with config.patch(post_grad_custom_pre_pass=lambda graph: None), with_joint_passes():
        made: Any = config.post_grad_custom_pre_pass
    assert made.uuid() is None
