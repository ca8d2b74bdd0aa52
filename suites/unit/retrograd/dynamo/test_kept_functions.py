"""Functions behind Dynamo: which are a node of its graph, which break it, and what each then does."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.autograd import Function

import retrograd
from retrograd.engine import PurityAnalysis

SCALE = 2.0


def doubled(x):
    return x * 2


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return doubled(grad) * x


class Counting(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.runs = 0
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.runs += 1
        return grad * ctx.runs


class ReadsGlobal(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * SCALE


class Logs(Function):
    log: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x):
        Logs.log.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Logs.log.append("backward")
        return grad * 2


class TakesList(Function):
    @staticmethod
    def forward(ctx, x, box):
        ctx.box = box
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.box[0], None


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class WritesGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        grad *= 3
        return grad


class AsksValue(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.scale = x.sum().item()
        return x * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale


class SetsAttribute(Function):
    @staticmethod
    def forward(ctx, x):
        x.mark = 1
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class Applies(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return Counting.apply(grad)


@pytest.fixture(autouse=True)
def forget():
    Logs.log.clear()


def compiled(fn, **options):
    return torch.compile(fn, backend="retrograd", options={"backend": "eager", "strict": True, **options})


def leaf():
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def breaks():
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Square, None),
        (Counting, "its backward changes something in place"),
        (ReadsGlobal, "its backward reads SCALE when it runs"),
        (Logs, "its forward reads Logs when it runs"),
        (TakesList, None),
        (Dirty, "it changes its inputs in place"),
        (WritesGradient, "its backward changes something in place"),
        (AsksValue, "it reads values"),
        (SetsAttribute, "its forward sets attributes"),
        (Applies, "its backward changes something in place"),
    ],
)
def test_what_the_code_of_a_function_tells(function, reason):
    assert PurityAnalysis.of(function).reason == reason


def test_what_torchs_decorators_hide_is_read():
    class Decorated(Counting):
        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            ctx.runs += 1
            return grad

    assert PurityAnalysis.of(Decorated).reason == "its backward changes something in place"


def test_a_function_that_only_computes_is_a_node_of_one_graph():
    x, y = leaf(), leaf()
    fast = torch.compile(
        lambda a: Square.apply(a.sin()) * 2, backend="retrograd", fullgraph=True, options={"backend": "eager"}
    )
    out = fast(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    grad.sum().backward()
    (expected,) = torch.autograd.grad((Square.apply(y.sin()) * 2).sum(), y, create_graph=True)
    expected.sum().backward()
    assert torch.equal(grad, expected)
    assert torch.equal(x.grad, y.grad)
    assert len(retrograd.explain().graphs) == 1
    assert not retrograd.explain().fallbacks


@pytest.mark.parametrize("function", [Counting, ReadsGlobal, Logs, WritesGradient, Applies])
def test_another_function_breaks_the_graph_and_runs_as_it_is(function):
    def run(a):
        return function.apply(a.sin()) * 2

    x, y = leaf(), leaf()
    before = breaks()
    out, expected = compiled(run)(x), run(y)
    logged = list(Logs.log)
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    logged_by_backward = Logs.log[len(logged) :]
    for _ in range(2):
        expected.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, y.grad)
    assert breaks() == before + 1
    assert not retrograd.explain().fallbacks
    if function is Logs:
        assert logged == ["forward", "forward"]
        assert logged_by_backward == ["backward", "backward"]


def test_a_list_is_no_constant():
    box = [1.0]
    x = leaf()
    out = compiled(lambda a: TakesList.apply(a, box) * 3)(x)
    box[0] = 5.0
    out.sum().backward()
    assert x.grad.tolist() == [15.0] * 3


def test_a_global_may_change_until_the_backward(monkeypatch):
    x = leaf()
    out = compiled(lambda a: ReadsGlobal.apply(a) * 3)(x)
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    out.sum().backward()
    assert x.grad.tolist() == [21.0] * 3


def test_a_helper_that_gets_another_value_is_noticed(monkeypatch):
    fast = compiled(lambda a: Square.apply(a))
    for helper, expected in ((doubled, 2.0), (lambda x: x * 50, 50.0)):
        monkeypatch.setitem(globals(), "doubled", helper)
        x = torch.ones(2, requires_grad=True)
        fast(x).sum().backward()
        assert x.grad.tolist() == [expected] * 2


def test_methods_that_are_replaced_are_noticed():
    class Local(Square):
        pass

    fast = compiled(lambda a: Local.apply(a))
    fast(leaf())
    Local.backward = staticmethod(lambda ctx, grad: grad * 50)
    x = leaf()
    fast(x).sum().backward()
    assert x.grad.tolist() == [50.0] * 3


def test_a_class_made_in_each_call():
    def run(a, factor):
        class Local(Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

            @staticmethod
            def backward(ctx, grad):
                return grad * factor * 2

        return Local.apply(a)

    fast = compiled(run)
    for factor in (2.0, 3.0):
        x = leaf()
        fast(x, factor).sum().backward()
        assert x.grad.tolist() == [factor * 2] * 3


def test_without_gradients_dynamo_may_take_a_function_apart():
    before = breaks()
    with torch.no_grad():
        assert torch.equal(compiled(lambda a: Counting.apply(a) + 1)(leaf()), leaf() * 2 + 1)
    assert breaks() == before


def test_fullgraph_says_how_to_go_on():
    fast = torch.compile(
        lambda a: Counting.apply(a), backend="retrograd", fullgraph=True, options={"backend": "eager"}
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)Counting is kept whole.*stock_dynamo"):
        fast(leaf())


def test_stock_dynamo_leaves_functions_to_dynamo():
    x = leaf()
    out = compiled(lambda a: Counting.apply(a), stock_dynamo=True)(x)
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    assert x.grad.tolist() == [2.0] * 3, "Dynamo runs the Python of a backward once"


def test_other_backends_keep_dynamos_own_way():
    def never(gm, example_inputs):
        return gm.forward

    before = breaks()
    torch.compile(lambda a: Counting.apply(a), backend=never)(leaf())
    assert breaks() == before


def test_a_backend_is_found_behind_what_torch_wraps_it_in():
    x = leaf()
    out = torch.compile(lambda a: Counting.apply(a), backend=functools.partial(retrograd.dynamo.retrograd))(x)
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    assert x.grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("is_stock", [False, True])
def test_a_step_keeps_functions_whole(is_stock):
    x = leaf()

    @retrograd.compile_step(backend="eager", stock_dynamo=is_stock)
    def step():
        x.grad = None
        out = Counting.apply(x * 2).sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)

    for _ in range(3):
        step()
    assert x.grad.tolist() == ([4.0] * 3 if is_stock else [6.0] * 3)


def test_a_function_inside_a_transform_is_differentiated_by_its_own_backward():
    class Odd(Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad * 7

    fast = compiled(lambda x: torch.func.grad(lambda z: Odd.apply(z).sum())(x) * 2)
    assert fast(torch.ones(3)).tolist() == [14.0] * 3


class Waits(Function):
    @staticmethod
    def forward(ctx, x):
        torch.cuda.current_stream().synchronize() if x.is_cuda else None
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class UsesFuture(Waits):
    @staticmethod
    def forward(ctx, x):
        done = torch.futures.Future()
        done.set_result(x * 2)
        return done.wait()


class Reduces(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("function", [Waits, UsesFuture])
def test_code_that_names_streams_or_futures_is_told(function):
    assert "waits" in str(PurityAnalysis.of(function).reason)


@pytest.mark.parametrize("is_fullgraph", [False, True])
def test_a_collective_breaks_the_graph(one_rank, is_fullgraph):
    fast = retrograd.compile(lambda x: Reduces.apply(x * 1) * 2, backend="eager", fullgraph=is_fullgraph)
    x = torch.ones(2, requires_grad=True)
    if is_fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"c10d\.allreduce_"):
            fast(x)
        return
    fast(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    assert any("c10d.allreduce_" in graph.ended_by for graph in retrograd.explain().graphs)


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_no_trace_takes_a_collective(one_rank):
    def reduced(x):
        dist.all_reduce(total := x * 2)
        return total

    assert torch.equal(retrograd.aot.function(reduced, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
    assert [reason.code for reason in retrograd.explain().fallbacks] == ["asynchronous"]
