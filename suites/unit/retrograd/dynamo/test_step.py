"""Steps that train: bit for bit what eager does, after every call, with nothing that runs eagerly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.testing._internal.two_tensor import TwoTensor

import retrograd
from unit.retrograd.dynamo.twins import Program, assert_compiled, run_twins


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count=4, size=5):
    return [(torch.randn(size, 4), torch.randint(3, (size,))) for _ in range(count)]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True, weight_decay=0.1),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    def build():
        model = mlp()
        opt = OPTIMIZERS[name](model.parameters())

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return Program(step, batches(), [model], [opt])

    step = run_twins(build)
    assert_compiled(step)
    assert step.explain().left_to_python == {"optimizer"}


def test_optimizers_of_wrapper_subclasses_are_left_to_python():
    def trained(prepare):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(TwoTensor(torch.randn(3), torch.randn(3)))
        opt = torch.optim.AdamW([weight], foreach=True)

        @prepare
        def step(x):
            opt.zero_grad()
            (weight * x).square().sum().backward()
            opt.step()

        for number in range(1, 5):
            step(torch.full((3,), float(number)))
        return step, [weight.a.detach(), weight.b.detach()]

    step, ours = trained(lambda fn: retrograd.compile_step(fn, backend="aten"))
    torch.testing.assert_close(ours, trained(lambda fn: fn)[1])
    assert step.explain().left_to_python == {"optimizer"}


def test_an_optimizer_may_be_made_in_the_step():
    def trained(prepare):
        weight = torch.nn.Parameter(torch.ones(3))

        @prepare
        def step(x):
            opt = torch.optim.SGD([weight], lr=0.1)
            opt.zero_grad()
            (weight * x).square().sum().backward()
            opt.step()

        for number in range(1, 4):
            step(torch.full((3,), number / 8))
        return weight.detach()

    ours = trained(lambda fn: retrograd.compile_step(fn, backend="aten"))
    torch.testing.assert_close(ours, trained(lambda fn: fn))


def simple(model, opt, after=lambda: None):
    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        after()
        opt.step()
        return loss

    return step


def test_gradients_are_accumulated_in_place_into_what_is_there():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            for part in (0, 1):
                F.cross_entropy(model(x[part::2]), y[part::2]).backward()
            opt.step()
            opt.zero_grad(set_to_none=False)

        return Program(step, batches(), [model], [opt])

    run_twins(build)


def test_the_same_gradient_tensor_is_kept():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        F.cross_entropy(model(x), y).backward()
        opt.step()

    compiled = retrograd.compile_step(step, backend="eager", strict=True)
    compiled(*batches(1)[0])
    before = [p.grad for p in model.parameters()]
    compiled(*batches(1)[0])
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_gradients_that_come_and_go():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        def before(i):
            if i == 3:  # somebody leaves a gradient
                model[0].weight.grad = torch.ones_like(model[0].weight)

        return Program(step, batches(5), [model], [opt], before=before)

    assert_compiled(run_twins(build))


def test_clipping():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        norms = []

        def step(x, y):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            return {"norm": norm}

        return Program(step, batches(), [model], [opt], norms)

    assert_compiled(run_twins(build))


def test_clipping_that_reads_the_norm():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def clip():
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)

        return Program(simple(model, opt, clip), batches(), [model], [opt])

    run_twins(build)


def test_two_optimizers():
    def build():
        model, head = nn.Linear(4, 4), nn.Linear(4, 3)
        first = torch.optim.Adam(model.parameters(), 0.01)
        second = torch.optim.SGD(head.parameters(), 0.1, momentum=0.5)

        def step(x, y):
            first.zero_grad()
            second.zero_grad()
            loss = F.cross_entropy(head(model(x)), y)
            loss.backward()
            first.step()
            second.step()
            return loss

        return Program(step, batches(), [model, head], [first, second])

    assert_compiled(run_twins(build))


def test_frozen_parameters_and_one_without_gradient():
    def build():
        model = mlp()
        model[0].weight.requires_grad_(False)
        model.unused = nn.Parameter(torch.ones(3))
        opt = torch.optim.Adam(model.parameters(), 0.01)
        return Program(simple(model, opt), batches(), [model], [opt])

    assert_compiled(run_twins(build))


def test_freezing_between_calls():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.01)

        def before(i):
            if i == 3:
                model[0].weight.requires_grad_(False)

        return Program(simple(model, opt), batches(5), [model], [opt], before=before)

    assert_compiled(run_twins(build))


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw-foreach"])
def test_a_schedule_between_calls(kind):
    def build():
        model = mlp()
        opt = OPTIMIZERS[kind](model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

        def before(i):
            if i:
                schedule.step()

        return Program(simple(model, opt), batches(7), [model], [opt], before=before)

    step = run_twins(build)
    assert_compiled(step)
    assert len(step.explain().pieces.backwards) == 1  # the rate concerns the optimizer only


def test_a_schedule_inside():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
        return Program(simple(model, opt, schedule.step), batches(), [model], [opt])

    run_twins(build)


def test_a_rate_that_is_a_tensor():
    def build():
        model = mlp()
        lr = torch.tensor(0.1)
        opt = torch.optim.Adam(model.parameters(), lr, foreach=False)

        def before(i):
            lr.mul_(0.5)

        return Program(simple(model, opt), batches(5), [model], [opt], before=before)

    run_twins(build)


def test_train_and_eval():
    def build():
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def before(i):
            model.train(i % 4 < 2)

        return Program(simple(model, opt), batches(9), [model], [opt], before=before)

    assert_compiled(run_twins(build))


def test_a_parameter_replaced():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def before(i):
            if i == 3:
                model[0].weight = nn.Parameter(torch.ones(8, 4))
                opt.param_groups[0]["params"] = list(model.parameters())

        return Program(simple(model, opt), batches(5), [model], [opt], before=before)

    assert_compiled(run_twins(build))


def test_another_batch_size():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        calls = [*batches(2, 5), *batches(2, 7), *batches(2, 9), *batches(1, 5)]
        return Program(simple(model, opt), calls, [model], [opt])

    assert_compiled(run_twins(build))
    assert_compiled(run_twins(build, dynamic=False))
    assert_compiled(run_twins(build, dynamic=True))


def test_dropout_draws_what_eager_draws():
    def build():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.1))
        opt = torch.optim.SGD(model.parameters(), 0.1)
        return Program(simple(model, opt), batches(), [model], [opt])

    assert_compiled(run_twins(build))


def test_results_of_all_kinds():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            opt.zero_grad()
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            opt.step()
            right = (logits.argmax(1) == y).sum()
            return {
                "loss": loss,
                "right": right,
                "x": x,
                "weight": model[0].weight,
                "n": (len(x), None, "text"),
            }

        return Program(step, batches(), [model], [opt])

    assert_compiled(run_twins(build))


def test_a_number_that_is_returned():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        inner = simple(model, opt)
        return Program(lambda x, y: inner(x, y).item(), batches(), [model], [opt])

    assert_compiled(run_twins(build))


def test_autocast_inside_and_outside():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            opt.step()
            return loss

        return Program(step, batches(), [model], [opt])

    assert_compiled(run_twins(build))


class Trainer:
    def __init__(self, model, opt):
        self.model, self.opt, self.scale, self.seen_elsewhere = model, opt, 1.0, 0

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y) * self.scale

    def train_step(self, x, y):
        self.opt.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.opt.step()
        return loss


def test_a_method():
    def build():
        model = mlp()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1))

        def before(i):
            trainer.seen_elsewhere += 1  # no code of the step speaks of it
            if i == 3:
                trainer.scale = 0.5

        return Program(trainer.train_step, batches(5), [model], [trainer.opt], before=before)

    assert_compiled(run_twins(build))


GLOBAL_MODEL = mlp()
GLOBAL_OPT = torch.optim.SGD(GLOBAL_MODEL.parameters(), 0.1)
GLOBAL_SCALE = 1.0


def global_step(x, y):
    GLOBAL_OPT.zero_grad()
    loss = F.cross_entropy(GLOBAL_MODEL(x), y) * GLOBAL_SCALE
    loss.backward()
    GLOBAL_OPT.step()
    return loss


def test_globals():
    start = [p.detach().clone() for p in GLOBAL_MODEL.parameters()]

    def build():
        global GLOBAL_SCALE
        with torch.no_grad():
            for p, value in zip(GLOBAL_MODEL.parameters(), start, strict=True):
                p.copy_(value)
                p.grad = None
        GLOBAL_SCALE = 1.0

        def before(i):
            global GLOBAL_SCALE
            if i == 3:
                GLOBAL_SCALE = 3.0

        return Program(global_step, batches(5), [GLOBAL_MODEL], [GLOBAL_OPT], before=before)

    assert_compiled(run_twins(build))


def test_arguments_that_are_modules_keyword_arguments_and_leaves():
    def build():
        w = torch.randn(4, 3, requires_grad=True)

        def step(x, y):
            w.grad = None
            loss = F.cross_entropy(x @ w, y)
            loss.backward()
            with torch.no_grad():
                w.sub_(w.grad, alpha=0.1)
                x.add_(1)
            return loss

        return Program(step, batches(), tensors=[w])

    assert_compiled(run_twins(build))


def test_a_leaf_that_is_an_argument_gets_a_gradient():
    def build():
        model = mlp()
        calls = [(x.requires_grad_(), y) for x, y in batches()]

        def step(x, y):
            F.cross_entropy(model(x), y).backward()
            return x.grad

        return Program(step, calls, [model], tensors=[x for x, _ in calls])

    assert_compiled(run_twins(build))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * 2

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w * 2, grad * x * 3


BOUND = Double.apply


@pytest.mark.parametrize("is_bound_before", [False, True])
def test_a_function_of_the_users_on_a_leaf(is_bound_before):
    def build():
        w = torch.randn(4, requires_grad=True)

        def step(x, y):
            w.grad = None
            loss = (BOUND if is_bound_before else Double.apply)(x, w).sum()
            loss.backward()
            return loss

        return Program(step, batches(), tensors=[w])

    assert_compiled(run_twins(build))


def leaves_grad_to_python() -> bool:
    """Whether Dynamo compiles no part of a function that calls ``requires_grad_`` and ``autograd.grad``: so
    since 2.15."""
    counter = CompileCounter()

    def norm(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0].norm()

    torch.compile(norm, backend=counter)(torch.ones(2))
    torch._dynamo.reset()
    return counter.frame_count == 0


def test_grad_of_inner_values_and_gradients_of_gradients():
    def build():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.Adam(model.parameters(), 0.01)

        def step(x, y):
            opt.zero_grad()
            x = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = (grad.norm(dim=1) - 1).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return Program(step, batches(), [model], [opt])

    compiled = run_twins(build)
    if not leaves_grad_to_python():
        assert_compiled(compiled)


def test_checkpointed_layers():
    from torch.utils.checkpoint import checkpoint

    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)
            loss.backward()
            opt.step()
            return loss

        return Program(step, batches(), [model], [opt])

    assert_compiled(run_twins(build))


def test_arguments_that_are_no_tensors():
    def build():
        model, other = mlp(), mlp()
        opt = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)

        def step(which, x, y, scale=1.0, *, twice=False):
            opt.zero_grad()
            loss = F.cross_entropy(which(x), y) * scale
            if twice:
                loss = loss * 2
            loss.backward()
            opt.step()
            return loss

        (x, y), *_ = batches(1)
        calls = [
            (model, x, y),
            (model, x, y),
            (other, x, y),
            (model, x, y, 0.5),
            (model, x, y),
            (other, x, y),
        ]
        return Program(step, calls, [model, other], [opt])

    run_twins(build)


def test_the_same_tensor_twice():
    def build():
        w = torch.randn(4, 4, requires_grad=True)

        def step(a, b):
            w.grad = None
            ((a @ w) + b if a is b else (a @ w) - b).sum().backward()

        x, y = torch.randn(4, 4), torch.randn(4, 4)
        return Program(step, [(x, y), (x, y), (x, x), (y, y), (x, y)], tensors=[w])

    assert_compiled(run_twins(build))


def test_an_argument_that_the_step_reaches_too():
    def build():
        w = torch.randn(4, 4, requires_grad=True)

        def step(a):
            (a @ w).sum().backward()

        return Program(step, [(torch.ones(4, 4),)] * 3 + [(w,)] * 2, tensors=[w])

    run_twins(build)


def test_dropout_of_what_is_not_laid_out_in_order():
    def build():
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            opt.zero_grad()
            noise = torch.empty(8, 4, 5).mT.uniform_()
            loss = (F.dropout(model(x).transpose(0, 2), 0.5) * noise).sum()
            loss.backward()
            opt.step()
            return loss

        return Program(step, [(torch.randn(4, 5, 8),) for _ in range(4)], [model], [opt])

    assert_compiled(run_twins(build))


class Settings:
    def __init__(self):
        self.alpha = 1.0


@pytest.mark.parametrize("read", [lambda s: getattr(s, "al" + "pha"), lambda s: sum(vars(s).values())])
def test_attributes_that_no_code_names(read):
    def build():
        model, settings = mlp(), Settings()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * read(settings)
            loss.backward()
            opt.step()

        def before(i):
            settings.alpha = 1.0 + i // 3

        return Program(step, batches(5), [model], [opt], before=before)

    assert_compiled(run_twins(build))


def test_two_numbers_that_change():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)

        def before(i):
            if i:
                schedule.step()

        return Program(simple(model, opt), batches(6), [model], [opt], before=before)

    assert_compiled(run_twins(build))


def test_data_written_in_place():
    def build():
        model = mlp()

        def step(x, y):
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.data -= 0.1 * p.grad.data
                p.grad.zero_()

        return Program(step, batches(), [model])

    run_twins(build)


def test_two_networks_that_are_trained_in_turn():
    def build():
        maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
        first = torch.optim.Adam(maker.parameters(), 0.01)
        second = torch.optim.Adam(judge.parameters(), 0.01)

        def step(x, y):
            made = maker(torch.randn(5, 4))
            second.zero_grad()
            judged = F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()
            judged.backward()
            second.step()
            first.zero_grad()
            fooled = F.softplus(-judge(made)).mean()
            fooled.backward()
            first.step()
            return judged, fooled

        return Program(step, batches(), [maker, judge], [first, second])

    assert_compiled(run_twins(build))


def test_a_compiled_module_inside():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        return Program(simple(torch.compile(model, backend="eager"), opt), batches(), [model], [opt])

    assert_compiled(run_twins(build))


def test_hooks_on_saved_tensors():
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            opt.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, 1), lambda packed: packed[0]):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()

        return Program(step, batches(), [model], [opt])

    run_twins(build)


def test_no_hook_of_the_first_step_stays() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = dict(_global_optimizer_pre_hooks)
    seen = []

    @retrograd.compile_step(backend="eager", cudagraphs=True)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        seen.append(len(_global_optimizer_pre_hooks) - len(before))

    for _ in range(2):
        step(torch.ones(2, 2))
    assert seen == [1, 0]
    assert _global_optimizer_pre_hooks == before
