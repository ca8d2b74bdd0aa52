"""The torch.compile backend: what it takes from Dynamo, what it gives back, when it is compiled again."""

from __future__ import annotations

import functools
import gc
import importlib
import tomllib
import weakref
from contextlib import nullcontext
from pathlib import Path

import functorch.compile
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._guards import DuplicateInputs, TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import retrograd as package
from retrograd.dynamo import config_of, graph_function, list_mode_options, list_options, retrograd
from retrograd.errors import CaptureError, FallbackWarning, OptionError
from retrograd.report import process_report

stages = importlib.import_module("retrograd.aot.compiler")  # its package has a function of that name

EAGER = {"backend": "eager"}
STRICT = {"backend": "eager", "strict": True}


@pytest.fixture(autouse=True)
def grad_mode():
    yield
    torch.set_grad_enabled(True)


def compiled(fn, options=STRICT, **kwargs):
    """`fn` under torch.compile, and how often Dynamo has called the backend so far."""
    counter = CompileCounterWithBackend("eager")
    counter.backend = "retrograd"

    def backend(gm, example_inputs):
        counter.frame_count += 1
        counter.graphs.append(gm)
        return retrograd(gm, example_inputs, options=options)

    return torch.compile(fn, backend=backend, **kwargs), counter


def leaf(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def outcome(fn, *inputs, seed=0):
    """Output and gradients of `fn`, from fresh copies of `inputs`."""
    copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(seed)
    out = fn(*copies)
    out.sum().backward()
    return [out.detach(), *(x.grad for x in copies)]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


# how it is found


def test_it_is_listed_and_the_distribution_declares_it():
    assert "retrograd" in torch._dynamo.list_backends()
    project = Path(__file__).parents[4] / "packages" / "retrograd" / "pyproject.toml"
    declared = tomllib.loads(project.read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    assert declared == {"retrograd": "retrograd.dynamo:retrograd"}


def test_by_name_with_options():
    x = leaf(4)
    fn = torch.compile(lambda a: a.sin() * a, backend="retrograd", options=STRICT)
    assert_same(outcome(fn, x), outcome(lambda a: a.sin() * a, x))
    assert len(process_report.graphs) == 1


def test_dynamo_reset_leaves_the_report():
    """It tells backends to let go of compiled code. The report belongs to the process."""
    torch.compile(lambda a: a.sin(), backend="retrograd", options=STRICT)(leaf(2))
    torch._dynamo.reset()
    assert len(process_report.graphs) == 1


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
def test_an_input_that_begins_elsewhere_in_its_memory():
    """``as_strided`` names a place in the memory, so its derivative depends on where the input begins."""

    def strided(memory, begin, fn):
        memory.grad = None
        fn(memory[begin : begin + 4]).sum().backward()
        return memory.grad

    def fn(x):
        return x.as_strided((2,), (1,), 3) * 2

    compiled = torch.compile(fn, backend="retrograd", options={"backend": "eager"})
    memory = torch.arange(10.0, requires_grad=True)
    for begin in (2, 3, 2):
        assert torch.equal(strided(memory, begin, compiled).clone(), strided(memory, begin, fn))
    assert [reason.code for reason in process_report.fallbacks] == ["begins-elsewhere"]


# options


def test_an_unknown_option_is_refused_with_the_sorted_valid_ones():
    with pytest.raises(OptionError) as refused:
        retrograd(torch.fx.GraphModule({}, torch.fx.Graph()), [], options={"partitoner": "min_cut"})
    assert str(refused.value) == (
        "option 'partitoner': there is no such option; did you mean 'partitioner'?\n"
        "  expected  one of backend, backward, compile_timeout, cudagraphs, partitioner, passes, regions, "
        "single_region, stock_dynamo, strict, whole_after, or one of torch._inductor.list_options()"
    )


def test_the_backend_of_a_whole_is_a_parameter_and_no_option():
    """It would be overlooked: the parameter says Inductor where nothing is given."""
    with pytest.raises(OptionError, match="option 'options': got 'backend': 'eager'\n  expected  backend="):
        package.compile(torch.sin, options={"backend": "eager"})


def test_regions_that_are_no_number_of_nodes_are_refused():
    with pytest.raises(OptionError, match="option 'regions': got 'all'\n  expected  True, False, or"):
        retrograd(torch.fx.GraphModule({}, torch.fx.Graph()), [], options={"regions": "all"})


def test_an_unknown_mode_is_refused_with_the_sorted_valid_ones():
    with pytest.raises(
        OptionError, match="expected  one of default, max-autotune, max-autotune-no-cudagraphs, "
    ):
        retrograd(torch.fx.GraphModule({}, torch.fx.Graph()), [], mode="fastest")
    with pytest.raises(OptionError, match="option 'mode': got 'fastest'"):
        list_mode_options("fastest")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"partitioner": "most"}, "option 'partitioner': got 'most'"),
        ({"passes": ["no_such_pass"]}, "unknown pass 'no_such_pass'"),
        ({"passes": "remove_dead_code"}, "a sequence of pass names"),
        ({"backend": "nvcc"}, "option 'backend': got 'nvcc'"),
        ({"backend": "eager", "max_autotune": True}, "a setting of Inductor"),
        ({"triton.cudagraphs": True}, "retrograd records CUDA graphs itself"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, text):
    with pytest.raises(OptionError, match=text):
        retrograd(torch.fx.GraphModule({}, torch.fx.Graph()), [], options=options)


def test_modes_and_options_are_listed():
    assert list_mode_options("default") == {}
    assert list_mode_options("max-autotune-no-cudagraphs") == {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
    }
    assert set(list_mode_options()) == {
        "default",
        "max-autotune",
        "max-autotune-no-cudagraphs",
        "reduce-overhead",
    }
    listed = list_options()
    own = [
        "backend",
        "backward",
        "compile_timeout",
        "cudagraphs",
        "partitioner",
        "passes",
        "regions",
        "single_region",
        "stock_dynamo",
        "strict",
        "whole_after",
    ]
    assert listed[: len(own)] == own
    assert "max_autotune" in listed
    assert "triton.cudagraphs" not in listed


@pytest.mark.parametrize(
    "chosen",
    [
        {"mode": "reduce-overhead"},
        {"mode": "reduce-overhead", "options": {"backend": "eager"}},
        {"options": {"backend": "aten", "cudagraphs": True}},
    ],
)
def test_without_a_cuda_device_the_code_runs_without_cuda_graphs_and_says_so(chosen):
    fn = torch.compile(lambda a: a.sin(), backend=functools.partial(retrograd, **chosen))
    with pytest.warns(FallbackWarning, match="no CUDA graph is recorded: it has tensors on cpu"):
        out = fn(torch.ones(3))
    torch.testing.assert_close(out, torch.ones(3).sin())
    assert "no CUDA graph is recorded" in str(process_report)


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("reduce-overhead", {}, True),
        ("max-autotune", {}, True),
        ("max-autotune-no-cudagraphs", {}, False),
        (None, {}, False),
        ("reduce-overhead", {"cudagraphs": False}, False),
        ("default", {"cudagraphs": True}, True),
    ],
)
def test_which_modes_ask_for_cuda_graphs(mode, options, expected):
    assert config_of(mode, options).cudagraphs is expected


def test_inductors_settings_hold_while_it_compiles():
    seen = []

    def note(gm, example_inputs):
        seen.append(torch._inductor.config.max_fusion_size)
        return gm

    fn = torch.compile(
        lambda a: a.sin() * 2,
        backend="retrograd",
        options={"max-fusion-size": 7, "post_grad_custom_post_pass": None, "passes": [note]},
    )
    x = leaf(3)
    torch.testing.assert_close(outcome(fn, x), outcome(lambda a: a.sin() * 2, x))
    assert seen
    assert torch._inductor.config.max_fusion_size != 7


def test_passes_by_name_and_by_hand_run_in_order():
    seen = []

    def count(gm, example_inputs):
        seen.append(sum(node.op == "call_function" for node in gm.graph.nodes))
        return gm

    def unread(gm, example_inputs):
        first, second, *_ = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        second.replace_all_uses_with(first)
        return gm

    def sines(a):
        return a.sin() + (a * 1).sin()

    fn, _ = compiled(sines, {**STRICT, "passes": [unread, count, "remove_dead_code", count]})
    assert_same(outcome(fn, leaf(3)), outcome(sines, leaf(3)))
    assert seen[1] < seen[0]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": functorch.compile.nop},
        {"backend": functorch.compile.make_boxed_compiler(lambda gm, inputs: gm.forward)},
        {"backend": lambda gm, inputs: functorch.compile.make_boxed_func(gm.forward)},
        {"backend": "eager", "partitioner": functorch.compile.min_cut_rematerialization_partition},
        {"backend": "eager", "partitioner": functorch.compile.default_partition},
        {"backend": "eager", "partitioner": "save_all"},
        {"backend": "eager", "partitioner": "recompute_all"},
        {"backend": "eager", "backward": functorch.compile.nop},
    ],
)
def test_compilers_and_partitioners_of_functorch(options):
    def fn(a, b):
        return (a @ b).sin().exp()

    inputs = leaf(3, 3), leaf(3, 3, seed=1)
    assert_same(outcome(compiled(fn, {**options, "strict": True})[0], *inputs), outcome(fn, *inputs))


def test_without_dynamo_the_result_guards_itself():
    gm = torch.fx.symbolic_trace(lambda a: a.sin() * a)
    fn = retrograd(gm, [torch.ones(3)], options=STRICT)
    assert_same(outcome(fn, leaf(3)), outcome(gm, leaf(3)))
    assert_same(outcome(fn, leaf(5, 2)), outcome(gm, leaf(5, 2)))


# fakes and guards


def test_no_tensor_is_made_fake_a_second_time(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    made = []
    original = FakeTensorMode.from_tensor

    def backend(gm, example_inputs):
        with monkeypatch.context() as watched:

            def from_tensor(mode, tensor, **kwargs):
                made.append(tensor)
                return original(mode, tensor, **kwargs)

            watched.setattr(FakeTensorMode, "from_tensor", from_tensor)
            return retrograd(gm, example_inputs, options=STRICT)

    torch.compile(model, backend=backend)(torch.randn(5, 3)).sum().backward()
    assert made == []
    assert len(process_report.graphs) == 1


def test_capture_works_in_dynamos_shape_environment(monkeypatch):
    environments = []
    original = stages.capture_graph

    def capture(state, manner):
        environments.append((state.fake_mode.shape_env, TracingContext.get().fake_mode.shape_env))
        return original(state, manner)

    monkeypatch.setattr(stages, "capture_graph", capture)
    compiled(lambda a: a.sin(), dynamic=True)[0](leaf(4, 3))
    ((ours, dynamos),) = environments
    assert ours is dynamos


def graph_of_two(fake, other=None):
    graph = torch.fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    graph.output((graph.call_function(torch.mul, (first, second)),))
    for node, value in zip((first, second), (fake, fake if other is None else other), strict=True):
        if value is not None:
            node.meta["example_value"] = value
    return torch.fx.GraphModule(nn.Module(), graph)


def test_a_real_input_under_a_fake_mode_is_an_error():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm = graph_of_two(mode.from_tensor(torch.ones(2)))
    second = next(node for node in gm.graph.nodes if node.name == "second")
    del second.meta["example_value"]
    with tracing(TracingContext(mode)), pytest.raises(CaptureError, match=r"input second .* is real"):
        retrograd(gm, [torch.ones(2), torch.ones(2)], options=EAGER)


def test_a_fake_input_of_another_mode_is_an_error():
    mode, other = FakeTensorMode(shape_env=ShapeEnv()), FakeTensorMode(shape_env=ShapeEnv())
    gm = graph_of_two(mode.from_tensor(torch.ones(2)), other.from_tensor(torch.ones(2)))
    with tracing(TracingContext(mode)), pytest.raises(CaptureError, match="not of the given fake mode"):
        retrograd(gm, [torch.ones(2), torch.ones(2)], options=EAGER)


def test_one_tensor_given_twice_is_guarded_in_the_tracing_context():
    from torch._dynamo.source import LocalSource

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = torch.full((2,), 3.0)
    gm = graph_of_two(mode.from_tensor(x))
    sources = LocalSource("first"), LocalSource("second")
    for node, source in zip(gm.graph.find_nodes(op="placeholder"), sources, strict=True):
        node._dynamo_source = source
    context = TracingContext(mode)
    with tracing(context):
        fn = retrograd(gm, [x, x], options=STRICT)
    assert context.guards_context.aotautograd_guards == [DuplicateInputs(*sources)]
    assert torch.equal(fn(x, x)[0], torch.full((2,), 9.0))


@torch.library.custom_op("retrograd_test::scaled_by_size", mutates_args=())
def scaled_by_size(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@scaled_by_size.register_fake
def _(x):
    return torch.empty_like(x)


@functools.partial(scaled_by_size.register_autograd)
def _backward(ctx, grad):
    return grad * 2 if grad.shape[0] > 5 else grad * 3


def test_a_guard_made_by_the_backward_alone_is_installed_by_dynamo():
    """The forward does not care how long its input is; the backward does: only the joint trace sees it."""
    fn, counter = compiled(scaled_by_size, dynamic=True)
    for length, factor, compiles in ((8, 2.0, 1), (9, 2.0, 1), (4, 3.0, 2), (5, 3.0, 2), (30, 2.0, 2)):
        x = torch.ones(length, requires_grad=True)
        fn(x).sum().backward()
        assert torch.equal(x.grad, torch.full((length,), factor)), length
        assert counter.frame_count == compiles, length


def test_the_same_guard_with_inductors_backward_compiled_while_dynamo_lowers():
    fn, counter = compiled(
        lambda a: scaled_by_size(a) * a, {"backend": "inductor", "strict": True}, dynamic=True
    )
    for length, factor, compiles in ((8, 2.0, 1), (12, 2.0, 1), (4, 3.0, 2)):
        x = torch.ones(length, requires_grad=True)
        fn(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((length,), factor + 1))
        assert counter.frame_count == compiles, length


@pytest.mark.parametrize(("dynamic", "compiles"), [(None, [1, 2, 2]), (True, [1, 1, 1]), (False, [1, 2, 3])])
def test_recompiles_follow_dynamos_rules(dynamic, compiles):
    def fn(a):
        return a.sin() * a.shape[0]

    fast, counter = compiled(fn, dynamic=dynamic)
    for length, expected in zip((4, 6, 7), compiles, strict=True):
        assert_same(outcome(fast, leaf(length)), outcome(fn, leaf(length)))
        assert counter.frame_count == expected


def test_mark_dynamic():
    fast, counter = compiled(lambda a: a.exp() * 2)
    for length in (4, 6, 9):
        x = leaf(length, 3)
        torch._dynamo.mark_dynamic(x, 0)
        fast(x).sum().backward()
        assert torch.equal(x.grad, x.detach().exp() * 2)
    assert counter.frame_count == 1


def test_what_inputs_are_to_the_user(monkeypatch):
    kinds = {}
    original = stages.capture_graph

    def capture(state, manner):
        kinds.update({leaf.name: leaf.kind.value for leaf in state.leaves})
        return original(state, manner)

    monkeypatch.setattr(stages, "capture_graph", capture)
    model = nn.Linear(3, 4, bias=False)
    model.register_buffer("scale", torch.ones(4))
    model.forward = lambda x: (x @ model.weight.T) * model.scale
    compiled(model, dynamic=True)[0](torch.randn(5, 3))
    assert sorted(kinds.values()) == ["argument", "buffer", "parameter", "size"]
    assert all("weight" in name for name, kind in kinds.items() if kind == "parameter")
    assert all("scale" in name for name, kind in kinds.items() if kind == "buffer")


def test_inputs_are_not_kept():
    fn, _ = compiled(lambda a: a.sin() * 2)
    x = leaf(100)
    fn(x).sum().backward()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_parameters_that_the_graph_holds_itself():
    """As Dynamo gives them where modules are not inlined: attributes of the graph module."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    root = nn.Module()
    root.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    root.register_buffer("seen", torch.zeros(2))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    weight, seen = graph.get_attr("weight"), graph.get_attr("seen")
    graph.call_method("add_", (seen, 1))
    graph.output((graph.call_function(torch.mul, (x, weight)),))
    given = torch.tensor([3.0, 4.0])
    x.meta["example_value"] = mode.from_tensor(given)
    gm = torch.fx.GraphModule(root, graph)
    with tracing(TracingContext(mode)):
        fn = retrograd(gm, [given], options=STRICT)
    assert isinstance(fn, graph_function.GraphFunction)
    fn(given)[0].sum().backward()
    assert torch.equal(gm.weight.grad, given)
    assert torch.equal(gm.seen, torch.ones(2))


# whole programs


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.last.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.last(torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training))


@pytest.mark.parametrize("dynamic", [None, True])
def test_training_equals_eager_bit_for_bit(dynamic):
    def train(wrap):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = wrap(model)
        for number in range(4):
            x = torch.randn(5 + number % 2, 6, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            step(x).square().mean().backward()
            optimizer.step()
        return [*model.parameters(), *model.buffers()]

    eager = train(lambda model: model)
    ours = train(lambda model: torch.compile(model, backend="retrograd", options=STRICT, dynamic=dynamic))
    assert_same([t.detach() for t in ours], [t.detach() for t in eager])


def test_an_unused_output_leaves_none():
    fn, _ = compiled(lambda a, b: (a * 2, b * 3))
    a, b = leaf(3), leaf(3)
    fn(a, b)[0].sum().backward()
    assert b.grad is None


def test_graph_breaks_and_fullgraph():
    def broken(a):
        b = a.sin()
        torch._dynamo.graph_break()
        return b.exp()

    fn, counter = compiled(broken)
    assert_same(outcome(fn, leaf(3)), outcome(broken, leaf(3)))
    assert counter.frame_count == 2
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(broken, fullgraph=True)[0](leaf(3))


def test_a_backward_inside_the_compiled_function():
    def fn(a):
        (a.sin() * 2).sum().backward()
        return a.grad * 3

    x, y = leaf(4), leaf(4)
    assert torch.equal(compiled(fn)[0](x), fn(y))


def test_grad_mode_that_the_function_leaves_switched():
    def fn(a):
        b = a * 2
        torch.set_grad_enabled(False)
        return b

    out = compiled(fn, fullgraph=True)[0](leaf(3))
    assert not torch.is_grad_enabled()
    assert out.requires_grad


def test_whether_an_input_has_a_history_is_seen_though_dynamo_does_not_guard_it():
    def fn(a):
        a.mul_(2)
        return a.sin()

    fast, counter = compiled(fn, EAGER)
    assert_same(outcome(lambda x: fast(x * 1), leaf(3)), outcome(lambda x: fn(x * 1), leaf(3)))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        fast(leaf(3))
    assert_same(outcome(lambda x: fast(x * 1), leaf(3)), outcome(lambda x: fn(x * 1), leaf(3)))
    assert counter.frame_count == 1


def test_a_function_compiled_for_leaves_is_compiled_for_others_too():
    fast, counter = compiled(lambda a: (a * 2).sin() + a)
    assert_same(outcome(fast, leaf(3)), outcome(lambda a: (a * 2).sin() + a, leaf(3)))
    order = []
    x = leaf(3)
    y = x.exp()
    y.register_hook(lambda grad: order.append("y"))
    fast(y).sum().backward()
    assert order == ["y"]
    assert counter.frame_count == 1
    assert len(process_report.graphs) == 2


def test_memory_shared_only_later_is_compiled_again():
    def fn(a, b):
        a.add_(1)
        return a * b

    fast, counter = compiled(fn)
    assert torch.equal(fast(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))
    for call in (fast, fn):
        memory = torch.ones(6)
        assert torch.equal(call(memory[:4], memory[1:5]), torch.tensor([4.0, 4.0, 4.0, 2.0]))
    assert counter.frame_count == 2


def test_memory_shared_otherwise_runs_as_eager():
    def fn(a, b):
        a.add_(1)
        return a * b

    fast, _ = compiled(fn, EAGER)
    expected = {1: [4.0, 4.0, 4.0, 2.0], 2: [4.0, 4.0, 2.0, 2.0]}
    for start in (1, 2):
        memory = torch.ones(6)
        with pytest.warns(FallbackWarning) if start == 2 else nullcontext():
            assert fast(memory[:4], memory[start : start + 4]).tolist() == expected[start]


# higher-order operators


def dropped(a, b):
    return torch.nn.functional.dropout((a @ b).sin(), 0.5).exp()


def save_products(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    )


def test_a_checkpoint_is_recomputed_with_the_same_mask_and_saves_nothing():
    def fn(a, b):
        return checkpoint(dropped, a, b, use_reentrant=False)

    inputs = leaf(4, 4), leaf(4, 4, seed=1)
    assert_same(outcome(compiled(fn)[0], *inputs), outcome(fn, *inputs))
    assert process_report.graphs[0].saved_bytes == torch.random.get_rng_state().numel()  # nothing else


def test_a_policy_of_selective_checkpointing_decides_what_is_saved(monkeypatch):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)

    def fn(a, b):
        return checkpoint(lambda x, y: (x @ y).sin().exp(), a, b, use_reentrant=False, context_fn=contexts)

    saved = []
    original = stages.partition_for

    def partition(*args):
        parts = original(*args)
        saved.extend(entry.name for entry in parts.saved)
        return parts

    monkeypatch.setattr(stages, "partition_for", partition)
    inputs = leaf(4, 4), leaf(4, 4, seed=1)
    assert_same(outcome(compiled(fn)[0], *inputs), outcome(fn, *inputs))
    assert "mm" in saved
    assert not {"sin", "exp", "cos"} & set(saved)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 2


@pytest.mark.parametrize(
    "fn",
    [
        Doubled.apply,
        lambda a: torch.cond(a.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (a,)),
        lambda a: torch.vmap(lambda x: x.sin() * x)(a),
        lambda a: torch.func.grad(lambda x: x.sin().sum())(a),
        lambda a: checkpoint(lambda x: Doubled.apply(x * 2).exp(), a, use_reentrant=False),
    ],
    ids=["function", "cond", "vmap", "func_grad", "function_in_checkpoint"],
)
def test_higher_order_operators(fn):
    assert_same(outcome(compiled(fn, fullgraph=True)[0], leaf(3, 3)), outcome(fn, leaf(3, 3)))
    assert not process_report.fallbacks


def test_nodes_know_where_they_come_from():
    seen = []

    def look(gm, example_inputs):
        seen.extend(node for node in gm.graph.nodes if node.op == "call_function")
        return gm

    compiled(Model().eval(), {**STRICT, "passes": [look]})[0](torch.ones(1, 6))
    relu = next(node for node in seen if node.target is torch.ops.aten.relu.default)
    product = next(node for node in seen if node.target is torch.ops.aten.addmm.default)
    assert "self.last(torch.nn.functional.dropout(self.norm(self.first(x))" in relu.meta["stack_trace"]
    assert any(kind is nn.Linear for _, kind in product.meta["nn_module_stack"].values())


# what cannot be captured


def emptying(a, scale):
    b = a.sin() + scale
    scale.untyped_storage().resize_(0)
    return b


def test_what_cannot_be_captured_runs_eagerly_and_says_why():
    results = []
    for call in (compiled(emptying, EAGER)[0], emptying):
        scale, x = torch.ones(3), leaf(3)
        with pytest.warns(FallbackWarning, match="resize_storage_bytes_") if not results else nullcontext():
            out = call(x, scale)
        out.sum().backward()
        assert scale.untyped_storage().nbytes() == 0
        results.append([out.detach(), x.grad])
    assert_same(*results)
    assert [reason.code for reason in process_report.fallbacks] == ["not-representable"]


def test_strict_raises():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="resize_storage_bytes_"):
        compiled(emptying, STRICT)[0](leaf(3), torch.ones(3))


def test_saved_tensor_hooks_around_a_call_see_what_eager_saves():
    def fn(a):
        return a.sin().exp()

    fast, _ = compiled(fn, EAGER)
    fast(leaf(3))
    packed = {}
    for name, call in (("eager", fn), ("ours", fast)):
        packed[name] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, name=name: packed[name].append(x.clone()) or x, lambda x: x
        ):
            if name == "ours":
                with pytest.warns(FallbackWarning, match="saved-tensor hooks"):
                    call(leaf(3))
            else:
                call(leaf(3))
    assert_same(packed["ours"], packed["eager"])


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_weights_are_cast_anew_after_an_error_under_autocast(backend):
    weight = torch.ones(2, 2, requires_grad=True)

    def raises(x):
        with torch.autocast("cpu", torch.float16):
            return torch.linalg.cholesky((x @ weight).float() - 9)

    compiled = torch.compile(raises, backend="retrograd", options={"backend": backend})
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.ones(2, 2))
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found.append((torch.ones(2, 2) @ weight).sum().item())
        with torch.no_grad():
            weight += 1
    assert found == [8, 16]
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
