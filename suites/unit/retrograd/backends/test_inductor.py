"""What stands around Inductor: joint passes that its cache can spare, and rows that it would mix."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Event, current_thread
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torch._inductor import config, cpu_vec_isa
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

import retrograd
from retrograd import aot
from retrograd.backends.inductor import compile_graph, decompositions, get_ready, with_joint_passes
from retrograd.backends.inductor.compile import _probe_processor, _stride_at
from unit.retrograd.engine.forks import answer_of_a_child


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


_POOLED = """
import sys, torch, retrograd.aot as aot
from retrograd.backends.inductor import decompositions
assert "torch._inductor.lowering" not in sys.modules
x = torch.randn(1, 2, 8, 8, requires_grad=True)
pooled = lambda x: torch.nn.functional.max_pool2d(x.sin(), 2).sum()
graph = aot.capture(aot.create_state(pooled, (x,), decompositions=decompositions())).gm.graph
assert "low_memory" in str(graph), graph
"""


def test_pools_are_decomposed_before_inductor_is_there() -> None:
    """In a fresh process: its decomposition of pools reads a module that it does not import."""
    subprocess.run([sys.executable, "-c", _POOLED], check=True, timeout=120)


def _row_taken_out(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the backward of an assignment to a row: it copies the gradient, takes the row, and zeroes it."""
    aten = torch.ops.aten
    whole = aten.copy.default(aten.new_empty_strided.default(x, [4, 2], [2, 1]), x * 2)
    row = aten.as_strided.default(whole, [2], [1], 6)
    taken = aten.clone.default(row, memory_format=torch.contiguous_format)
    zeros = aten.copy.default(row, aten.full.default([2], 0.0))
    return aten.as_strided_scatter.default(whole, zeros, [2], [1], 6), taken * 3


def _traced(mode: FakeTensorMode) -> tuple[fx.GraphModule, torch.Tensor]:
    fake = mode.from_tensor(torch.ones(4, 2))
    with mode:
        return make_fx(_row_taken_out)(fake), fake


def test_views_share_memory_with_what_the_joint_passes_put_in_place_of_their_base() -> None:
    """Later passes write in place where they see no view that is read afterwards."""
    mode = FakeTensorMode()
    gm, _ = _traced(mode)
    with with_joint_passes(), V.set_fake_mode(mode):
        passes: Any = config.post_grad_custom_pre_pass
        passes(gm.graph)
    (row,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    base = row.args[0]
    assert base.target is torch.ops.aten.mul.Tensor
    assert row.meta["val"].untyped_storage()._cdata == base.meta["val"].untyped_storage()._cdata


def test_a_row_is_read_before_it_is_overwritten() -> None:
    """Wrong with torch 2.11 and 2.12: a neural differential equation had wrong gradients."""
    gm, fake = _traced(FakeTensorMode())
    x = torch.rand(4, 2)
    results = compile_graph(gm, [fake])([x.clone()])
    for result, wanted in zip(results, _row_taken_out(x), strict=True):
        torch.testing.assert_close(result, wanted)


def _rows_summed_and_used_again(
    x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, slope: torch.Tensor
) -> torch.Tensor:
    """As the backward of ``fmax(x, group_norm(x))``, where `slope` is the cotangent."""
    rows, wide = x.shape[0], x.float()
    norm = ((wide.reshape(rows, 1, 1, -1) - mean) * scale).reshape(x.shape)
    one, other = torch.where(wide >= norm, 0.0, slope), torch.where(wide < norm, 0.0, slope)
    total = (one * wide).reshape(rows, 1, -1).sum(2)
    return other + (one.reshape(rows, 1, 1, -1) * total[:, :, None, None]).reshape(x.shape)


#: of the layouts of four dimensions those that stock compiled wrong with torch 2.13, then some others.
ORDERS = ((1, 2, 3, 0), (2, 1, 3, 0), (2, 3, 0, 1), (2, 3, 1, 0), (0, 1, 2, 3), (0, 2, 3, 1), (3, 0, 1, 2))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_rows_of_a_transposed_tensor_are_not_mixed(order: tuple[int, ...]) -> None:
    """Inductor's C++ up to torch 2.14, where a kernel takes several rows at a time."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, 1, 4, 3)
    x, mean, scale = (torch.randn(s, generator=generator) for s in (shape, (8, 1, 1, 1), (8, 1, 1, 1)))
    slope = torch.randn([shape[i] for i in order], generator=generator)
    given = (x.half(), mean, scale.abs(), slope.permute([order.index(i) for i in range(4)]))
    found = retrograd.compile(_rows_summed_and_used_again, backend="inductor")(*given)
    torch.testing.assert_close(found, _rows_summed_and_used_again(*given))


class Asking(CustomGraphPass):
    """While a graph is compiled, asks on this thread and on another whether tiled loops may be fused."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def __call__(self, graph: fx.Graph) -> None:
        nest = SimpleNamespace(loops=[SimpleNamespace(steps=8)])
        kernel = SimpleNamespace(loop_nest=nest, ranges=[sympy.Integer(8), sympy.Integer(12)])
        may_fuse = partial(OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr, None, [kernel], 1)
        with ThreadPoolExecutor(1) as other:
            self.answers = [may_fuse(), other.submit(may_fuse).result()]

    def uuid(self) -> Any:
        """None: what asks must run each time."""


def test_other_threads_keep_inductors_own_rule_meanwhile() -> None:
    mode, asking = FakeTensorMode(), Asking()
    gm, fake = _traced(mode)
    with config.patch(post_grad_custom_pre_pass=asking):
        compile_graph(gm, [fake])
    assert asking.answers == [False, True]


def _head_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of a linear layer whose rows the joint passes have padded for the first one alone."""
    aten = torch.ops.aten
    grad = grad * 2
    for_weight = aten.mm.default(aten.permute.default(grad, [1, 0]), x)
    wide = aten.constant_pad_nd.default(grad, [0, 3, 0, 0])
    for_x = aten.mm.default(wide, aten.constant_pad_nd.default(weight, [0, 0, 0, 3]))
    return for_x, for_weight.cos()


def _head(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear layer with padded rows, read by a sum."""
    aten = torch.ops.aten
    wide = aten.mm.default(x, aten.constant_pad_nd.default(weight, [0, 3]))
    out = aten.slice.Tensor(wide, 1, 0, weight.shape[1])
    return out, out.exp().sum(1)


def _passed(fn: Any, *shapes: tuple[int, ...], seen: int = 0) -> tuple[fx.Graph, list[Any]]:
    """The graph of `fn` behind the joint passes, and what its code gives beside what `fn` gives."""
    mode, generator = FakeTensorMode(), torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    with mode:
        fakes = [mode.from_tensor(value) for value in inputs]
        gm = make_fx(fn)(*fakes)
    results = [*zip(compile_graph(gm, fakes, visible=seen)([*inputs]), fn(*inputs), strict=True)]
    output = gm.graph.output_node()
    output.meta["user_visible_output_idxs"] = [*range(seen)]
    made = [node.meta["val"] for node in output.args[0]]  # type: ignore[union-attr]
    output.meta["original_output_strides"] = [(value.shape[1], 1) for value in made[:seen]] + [None] * 9
    with with_joint_passes(), V.set_fake_mode(mode):
        passes: Any = config.post_grad_custom_pre_pass
        passes(gm.graph)
    return gm.graph, results


def test_a_product_of_a_transposed_matrix_reads_it_padded_as_another_one_does() -> None:
    graph, results = _passed(_head_backward, (6, 5), (6, 4), (5, 4))
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert sorted(tuple(node.meta["val"].shape) for node in products) == [(6, 4), (8, 4)]
    graph.lint()
    for found, wanted in results:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("seen", [0, 1])
def test_what_the_user_gets_of_a_padded_product_is_copied_in_the_graph(seen: int) -> None:
    graph, results = _passed(_head, (6, 4), (4, 5), seen=seen)
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert [node.meta["val"].stride() for node in copies] == [(5, 1)] * seen
    for found, wanted in results:
        torch.testing.assert_close(found, wanted)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The search for vector instructions, which ends when `go` is set, or raises `error`."""
    control = SimpleNamespace(began=Event(), go=Event(), error=None)
    original = cpu_vec_isa.valid_vec_isa_list

    def search() -> Any:
        if current_thread().name == "retrograd-probe":
            control.began.set()
            control.go.wait(60)
            if control.error is not None:
                raise control.error
        return original()

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", search)
    _probe_processor.cache_clear()
    yield control
    control.go.set()
    _probe_processor.cache_clear()


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU is it probed ahead")


@no_gpu
def test_what_compiles_waits_for_the_probe_that_began_ahead(probe: SimpleNamespace) -> None:
    get_ready()
    assert probe.began.wait(60)
    with ThreadPoolExecutor(2) as pool:
        gm, fake = _traced(FakeTensorMode())
        compiling = pool.submit(compile_graph, gm, [fake])
        with pytest.raises(TimeoutError):
            compiling.result(0.2)
        pool.submit(get_ready).result(60)  # asked once more, it goes on at once
        probe.go.set()
        assert callable(compiling.result(60))


@no_gpu
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_probe_that_fails_is_left_to_what_compiles(probe: SimpleNamespace) -> None:
    probe.error = RuntimeError("no compiler")
    get_ready()
    probe.go.set()
    gm, fake = _traced(FakeTensorMode())
    assert callable(compile_graph(gm, [fake]))


@no_gpu
def test_a_forked_child_does_not_wait_for_its_parents_probe(probe: SimpleNamespace) -> None:
    get_ready()
    assert probe.began.wait(60)
    probing = _probe_processor()
    assert probing is not None
    assert answer_of_a_child(lambda: probing.join(30) or "went on") == "went on"


@pytest.mark.parametrize("regions", [True, False])
def test_inductor_knows_that_only_what_was_saved_is_free_once_it_is_read(
    regions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import memory

    freeable, free = memory.get_freeable_input_buf, set[str]()

    def noting(*args: Any) -> Any:
        found = freeable(*args)
        free.update(found)
        return found

    def fn(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = (x @ weight.to(torch.bfloat16)).sin()
        return x

    monkeypatch.setattr(memory, "get_freeable_input_buf", noting)
    x, weights = torch.ones(4, 4, dtype=torch.bfloat16), torch.randn(6, 4, 4).requires_grad_().unbind()
    with config.patch(force_disable_caches=True):
        options = {"regions": 4 if regions else False}
        retrograd.compile(fn, options=options)(x, *weights).sum().backward()
    assert free
    assert not {name for name in free if name.startswith(("primal", "cotangent", "tangent"))}


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_put_into_an_expanded_row_is_in_one_row(dynamic: bool) -> None:
    def fn(x: torch.Tensor, there: torch.Tensor) -> list[torch.Tensor]:
        row, some = torch.zeros(1, x.shape[1]), x[there]
        return [
            row.expand(x.shape).index_put((there,), some),
            row.expand(x.shape).index_put((there,), some, accumulate=True),
            (x[:1] * 0).expand(x.shape).index_add(0, there, some),
            (x[:1] + 1).expand(x.shape).index_copy(0, there, some),
            row.expand(x.shape).index_fill(0, there, 2.0),
            torch.zeros(x.shape[0] + 3).as_strided((2, 4), (1, 1)).index_put((there,), some),
        ]

    x, there = torch.randn(2, 4), torch.tensor([1])
    found = retrograd.compile(fn, dynamic=dynamic)(x, there)
    assert not retrograd.explain().fallbacks
    for one, other in zip(found, fn(x, there), strict=True):
        assert torch.equal(one, other)


def _sum_of_a_transposed_and_padded(x: torch.Tensor) -> torch.Tensor:
    """As in https://github.com/pytorch/pytorch/issues/196681, with a product that becomes a sum."""
    grown = (x * 0.5) * (torch.erf(x * 0.7071067811865476) + 1)
    turned = torch.nn.functional.pad(grown.permute(3, 2, 1, 0), (0, 0, 0, 58), value=0.5)
    return torch.matmul(torch.nn.functional.pad(grown, (0, 0, 0, 0, 0, 58), value=0.5), turned)


def test_a_sum_over_tiles_writes_no_further_than_its_rows() -> None:
    """66 is no multiple of the elements taken at a time: it wrote behind the memory of the result."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 66, 66).contiguous(memory_format=torch.channels_last)
    found = retrograd.compile(_sum_of_a_transposed_and_padded, backend="inductor")(x)
    torch.testing.assert_close(found, _sum_of_a_transposed_and_padded(x))


d0, d1, s0 = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("d0", "d1", "s0"))


@pytest.mark.parametrize(
    ("index", "var", "stride"),
    [
        (80 * d0 + d1 + 32, d0, 80),
        (80 * d0 + d1 + 32, d1, 1),
        (80 * d0, d1, 0),
        (d0 * s0 * (s0 + 1) + d1 * s0, d0, s0 * (s0 + 1)),
        (FloorDiv(d0, 16) + 4 * d1, d1, 4),
        (FloorDiv(d0, 16), d0, 0),
        (ModularIndexing(d0, 1, 32) + 64 * d1, d0, 1),
        (d0 * d0, d0, 2 * d0 + 1),
        (d0 >= s0, d1, 0),
    ],
    ids=str,
)
def test_the_stride_of_an_index_is_the_one_that_inductor_finds(index: Any, var: Any, stride: Any) -> None:
    from torch._inductor.codegen.cpp import stride_at_vec_range

    assert _stride_at(stride_at_vec_range, index, var, 16) == stride_at_vec_range(index, var, 16) == stride


def test_an_index_that_is_a_sum_of_products_is_not_simplified(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took a third of the time of a compilation."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(torch.ones(shape)) for shape in ((37, 53), (53, 37))]
    with mode:
        gm = make_fx(lambda x, y: ((x + y.permute(1, 0)).sin(),))(*fakes)
    simplified: list[Any] = []
    given = sympy.simplify

    def recorded(index: Any, *args: Any, **kwargs: Any) -> Any:
        simplified.append(index)
        return given(index, *args, **kwargs)

    monkeypatch.setattr(sympy, "simplify", recorded)
    x, y = torch.randn(37, 53), torch.randn(53, 37)
    with config.patch(force_disable_caches=True):
        (result,) = compile_graph(gm, fakes)([x, y])
    torch.testing.assert_close(result, (x + y.t()).sin())
    assert simplified == []


UPSAMPLED = [
    ("linear", (2, 3, 7), {"size": 20}),
    ("linear", (2, 3, 20), {"size": 7}),
    ("linear", (2, 3, 8), {"scale_factor": 1.7}),
    ("bilinear", (2, 3, 7, 5), {"size": (20, 11)}),
    ("bilinear", (2, 3, 8, 6), {"scale_factor": (1.7, 0.6)}),
    ("bilinear", (2, 3, 8, 6), {"scale_factor": 2.0, "recompute_scale_factor": True}),
    ("bilinear", (2, 3, 1, 1), {"size": (4, 3)}),
    ("bilinear", (2, 3, 7, 5), {"size": (1, 1)}),
    ("trilinear", (1, 2, 3, 4, 5), {"size": (6, 5, 9)}),
]


class Decomposed(TorchDispatchMode):
    """Calls the decompositions that Inductor gets, where they are ours or torch's."""

    def __init__(self):
        super().__init__()
        self.table, self.used = decompositions(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "upsample" in str(func):
            result = self.table[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                self.used.add(str(func))
                return result
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "shape", "to"), UPSAMPLED, ids=str)
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear_interpolation_is_decomposed_forward_and_backward(mode, shape, to, corners, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    for layout in (torch.contiguous_format, torch.channels_last)[: 2 if x.dim() == 4 else 1]:
        found = []
        for mode_of_torch, given in (
            (nullcontext(), x.double()),
            (nullcontext(), x.clone()),
            (Decomposed(), x.clone()),
        ):
            given = given.contiguous(memory_format=layout).requires_grad_()
            with mode_of_torch:
                out = torch.nn.functional.interpolate(given, mode=mode, align_corners=corners, **to)
                (grad,) = torch.autograd.grad(out.sin().sum(), given)
            found.append((out.detach(), grad))
        assert len(mode_of_torch.used) == (1 if to.get("size") == (1, 1) else 2)
        for exact, expected, ours in zip(*found, strict=True):
            assert ours.stride() == expected.stride()
            bound = max((expected - exact).abs().max(), torch.finfo(dtype).eps * exact.abs().max())
            assert (ours - exact).abs().max() <= 8 * bound


def test_generated_code_interpolates_without_calling_a_kernel_of_torch():
    x = torch.randn(1, 2, 4, 4, requires_grad=True)

    def double(x):
        return torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")

    state = aot.create_state(double, (x,), decompositions=decompositions())
    assert "upsample" not in aot.capture(state).print_readable()
    (grad,) = torch.autograd.grad(aot.function(double, strict=True)(x).sin().sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(double(x).sin().sum(), x)[0])


def test_where_matrix_products_may_round_interpolation_keeps_its_kernel(monkeypatch):
    backward = decompositions()[torch.ops.aten.upsample_linear1d_backward.default]
    grad = torch.ones(1, 1, 6)
    assert backward(grad, [6], [1, 1, 3], False).tolist() == [[[2.0, 2.0, 2.0]]]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert backward(grad, [6], [1, 1, 3], False) is NotImplemented
