"""Functions without a backward write new elements into inputs themselves; nothing else is seen of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import retrograd
from retrograd import aot
from retrograd.aot.reinplacing import writing_ahead
from retrograd.backends.registry import AtenBackend
from retrograd.errors import Refusal
from retrograd.repeats.divide import divided
from retrograd.trace.undeclared_writes import declaring_its_writes
from unit.retrograd.aot.against_eager import agree, captured, leaf, plain, tensor


def adds_up(total, x):
    total.mul_(0.9)
    total.add_(x)


def swaps(x, y):
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def hands_over(x, y):
    x.copy_(y)
    y.mul_(2)


def reads_through_a_view(x, y):
    row = x[0]
    y.add_(x.sum(0))
    x.add_(1)
    return row * y


def returns_what_it_has_written(x, y):
    x.add_(y)
    return x, x * 2


def writes_one_value_twice(x, y):
    both = x + y
    x.copy_(both)
    y.copy_(both)


def writes_a_part(x, y):
    x[0].mul_(y[1])


def reads_pieces_after_the_new_value_is_there(x, y):
    first, second = x.split(2)
    new = x + y
    rest = first.sin() + second.cos()
    x.copy_(new)
    return rest


def in_a_list(x, y):
    torch._foreach_mul_([x, y], 2.0)
    torch._foreach_add_([x, y], [y, y])


def of_another_type(x, y):
    x.copy_(y.double())


#: a function, and which of its inputs the graph writes.
WRITES = [
    (adds_up, {0}),
    (swaps, {0, 1}),
    (hands_over, {0, 1}),
    (reads_through_a_view, {0, 1}),
    (returns_what_it_has_written, {0}),
    (writes_one_value_twice, {0, 1}),
    (writes_a_part, {0}),
    (reads_pieces_after_the_new_value_is_there, {0}),
    (in_a_list, {0, 1}),
    (of_another_type, {0}),
]


def inputs():
    return tensor(3, 3), tensor(3, 3, seed=4)


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("fn", [fn for fn, _ in WRITES])
def test_it_does_what_eager_does(fn, backend):
    agree(fn, plain(*inputs()), backend=backend, is_differentiated=False)


@pytest.mark.parametrize(("fn", "written"), WRITES)
def test_the_graph_gives_nothing_in_place_of_what_it_writes(fn, written):
    made = aot.partition(captured(fn, *inputs()))
    ahead = writing_ahead(made)
    assert ahead.written_ahead == written
    assert [i for i, one in enumerate(ahead.ahead.summary.results) if one is None] == sorted(written)
    assert not made.written_ahead
    assert None not in made.ahead.summary.results


def test_what_is_read_later_is_written_later():
    def fn(x):
        new = x + 1
        rest = x[0].sin() * 2
        x.copy_(new)
        return rest

    made = writing_ahead(aot.partition(captured(fn, tensor(3, 3))))
    calls = [str(node.target) for node in made.forward.graph.nodes if node.op == "call_function"]
    places = [calls.index(f"aten.{name}") for name in ("add.Tensor", "sin.default", "copy_.default")]
    assert places == sorted(places)


@pytest.mark.parametrize("fn", [fn for fn, _ in WRITES])
def test_versions_count_the_changes_that_eager_makes(fn):
    x, y = inputs()
    fn(x, y)
    once = x._version, y._version
    call, (x, y) = aot.function(fn, backend="aten", strict=True), inputs()
    for times in (1, 2, 3):
        call(x, y)
        assert (x._version, y._version) == tuple(times * version for version in once)


def test_inference_tensors_have_no_versions():
    with torch.inference_mode():
        x, y = inputs()
        expected = x * 0.9 + y
        aot.function(adds_up, backend="aten", strict=True)(x, y)
        assert torch.equal(x, expected)


def test_an_update_with_history_is_not_the_graphs():
    def fn(x, y):
        x.mul_(y)

    made = aot.partition(captured(fn, tensor(3), leaf(3)))
    assert writing_ahead(made) is made


def test_parts_of_an_input_of_a_subclass_or_of_shared_memory_are_not_the_graphs():
    whole = tensor(6)
    made = aot.partition(captured(adds_up, whole[:4], whole[2:]))
    assert writing_ahead(made) is made


class Failing(AtenBackend):
    """Raises in its `nth` run, behind the first write."""

    def __init__(self, nth):
        self.left = nth

    def compile(self, gm, example_inputs, half=None):
        code = super().compile(gm, example_inputs)

        def run(args):
            self.left -= 1
            if not self.left:
                args[0].fill_(5.0)
                raise RuntimeError("no kernel")
            return code(args)

        return run


def test_a_first_run_that_raises_is_undone_and_made_by_eager():
    x, y = inputs()
    expected = x * 0.9 + y
    aot.function(adds_up, backend=Failing(1))(x, y)
    assert torch.equal(x, expected)
    assert x._version == 2
    assert "no kernel" in str(retrograd.explain())


def test_a_later_run_that_raises_is_an_error_because_nobody_knows_what_was_written():
    x, y = inputs()
    call = aot.function(adds_up, backend=Failing(2))
    call(x, y)
    with pytest.raises(RuntimeError, match="no kernel"):
        call(x, y)


def layers(count=8, width=4):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_behind_dynamo(foreach):
    def trained(wrap):
        torch.manual_seed(3)
        model = layers()
        opt = torch.optim.AdamW(model.parameters(), 0.1, foreach=foreach)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        step = wrap(lambda: opt.step())
        for _ in range(3):
            step()
        parameters = list(model.parameters())
        state = [value for one in opt.state.values() for value in one.values()]
        return parameters, state, [one._version for one in parameters]

    backend = {"backend": "aten", "strict": True, "regions": 6}
    mine = trained(lambda step: torch.compile(step, backend="retrograd", options=backend))
    eager = trained(lambda step: step)
    torch.testing.assert_close(mine[:2], eager[:2])
    assert mine[2] == eager[2]


def test_a_part_that_repeats_has_its_writes():
    def fn(*values):
        for value in values:
            value.mul_(value.sin().cos().exp() + 1)

    made = writing_ahead(aot.partition(captured(fn, *[tensor(4, seed=i) for i in range(8)])))
    parts = divided(made.forward.graph, 6, 0)
    assert len({part.key for part in parts}) == 1
    assert [len(part.outputs) for part in parts] == [0] * len(parts)
    assert len(parts) > 3


# operators whose schemas do not say what they write


def statistics(features=4):
    return torch.zeros(features), torch.ones(features)


@pytest.mark.parametrize("operator", [torch.cudnn_batch_norm, torch.miopen_batch_norm])
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_written_by_the_call_not_by_its_graph(operator, training):
    def fn(x, weight, bias, mean, var):
        return operator(x, weight, bias, mean, var, training, 0.1, 1e-5)[0].relu()

    graph = captured(fn, leaf(2, 4, 6, 6), leaf(4), leaf(4), *statistics())
    assert {update.primal for update in graph.updates} == ({3, 4} if training else set())
    calls = {str(node.target): node for node in graph.gm.graph.nodes}
    assert ("aten._batch_norm_with_update_functional.default" in calls) is training
    if training:
        assert calls[f"aten.{operator.__name__}_backward.default"].args[3:5] == (None, None)


def test_without_running_statistics_nothing_is_written():
    def fn(x, weight):
        return torch.cudnn_batch_norm(x, weight, None, None, None, True, 0.1, 1e-5)[0]

    assert not captured(fn, leaf(2, 4, 6, 6), leaf(4)).updates


#: take running statistics, without saying that they write, and do not, or are made of the others.
READING = {
    "native_batch_norm", "batch_norm", "instance_norm", "_batch_norm_impl_index", "_batch_norm_no_update",
    "_native_batch_norm_legit_no_training", "_batch_norm_with_update_functional",
    "_native_batch_norm_legit_functional",
}  # fmt: skip


def test_every_operator_that_takes_running_statistics_is_known():
    taking = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and not schema.is_mutable
        and any(argument.name == "running_mean" for argument in schema.arguments)
    }
    assert {name for name in taking if not name.endswith("_backward")} == READING | {
        "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    }  # fmt: skip


def test_what_cannot_be_said_otherwise_is_refused():
    given, numbers = (tensor(2, 4), tensor(1, 4), tensor(1, 4)), (0.1, 1e-5, 2)
    gather = torch.ops.aten.batch_norm_gather_stats.default
    with pytest.raises(Refusal, match="writes running statistics without saying so"):
        declaring_its_writes(gather, (*given, *statistics(), *numbers))
    assert declaring_its_writes(gather, (*given, None, None, *numbers)) is None


RESHAPES = [("unsqueeze_", 0), ("t_",), ("squeeze_",), ("transpose_", 0, 1), ("swapaxes_", 0, 1)]


@pytest.mark.parametrize("compiled", [aot.function, retrograd.compile])
@pytest.mark.parametrize("wanted", [slice(0, 1), slice(1, 2), slice(2)])
@pytest.mark.parametrize("is_input", [False, True])
@pytest.mark.parametrize(("reshape", "numbers"), [(name, numbers) for name, *numbers in RESHAPES])
def test_a_view_that_gets_another_shape_without_autograd(compiled, wanted, is_input, reshape, numbers):
    def function(x):
        base = x if is_input else x * 1.5
        view = base[:]
        with torch.no_grad():
            getattr(view, reshape)(*numbers)
        return view, view * 3

    def gradient(fn):
        x = torch.arange(1.0, 4.0).view(1, 3).clone().requires_grad_()
        outputs = fn(x)[wanted]
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        return x.grad, [out.shape for out in outputs]

    torch.compiler.reset()
    assert str(gradient(compiled(function, backend="eager"))) == str(gradient(function))
