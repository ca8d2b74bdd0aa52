"""Training as people write it around a model: hooks, scalers, trainers, adapters.

In: a small convolutional or language model. Out: recipes whose body is the pattern.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradparity.corpus.zoo.recipe import STEPS, Recipe, Trained, trained
from gradparity.corpus.zoo.transformers import VOCABULARY
from gradparity.probe import Probe

CLASSES = 4


def _net(p: Probe) -> nn.Sequential:
    torch.manual_seed(p.seed)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, CLASSES),
    )  # fmt: skip
    return p.module(layers).train()


def _batch(p: Probe) -> tuple[torch.Tensor, torch.Tensor]:
    return p.randn(4, 3, 8, 8), p.randint(CLASSES, 4)


def _losses(p: Probe, step: Callable[..., torch.Tensor]) -> None:
    """Three calls of a step with two batches in turn."""
    run, batches = p.training_step(step), [_batch(p), _batch(p)]
    for number in range(STEPS):
        p.value(f"loss {number}", run(*batches[number % 2]).clone())


def optimizer_in_backward(p: Probe) -> None:
    """Each parameter is updated, and its gradient freed, as soon as it is complete."""
    net = _net(p)
    model = p.compile(net)
    optimizers = {one: torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in net.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(images), labels)
        backward(loss)
        return loss.detach()

    _losses(p, step)


def grad_cam(p: Probe) -> None:
    """Activations and their gradients, seen by module hooks, weight each other."""
    net = _net(p)
    seen: dict[str, Any] = {}
    net[4].register_forward_hook(lambda module, args, output: seen.update(activation=output.detach()))

    def note(module: nn.Module, before: Any, after: Any) -> None:
        seen.update(gradient=after[0].detach())

    net[4].register_full_backward_hook(note)
    model = p.compile(net)

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = model(images)
        backward(scores.gather(1, labels[:, None]).sum())
        weights = seen["gradient"].mean((2, 3), keepdim=True)
        return functional.relu((weights * seen["activation"]).sum(1)).mean()

    _losses(p, step)


def gradient_penalty(p: Probe) -> None:
    """The norm of the input's gradient is part of the loss."""
    net = _net(p)
    model = p.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        images = images.detach().requires_grad_()
        loss = functional.cross_entropy(model(images), labels)
        (grad,) = torch.autograd.grad(loss, images, create_graph=True)
        loss = loss + (grad.flatten(1).norm(dim=1) - 1).pow(2).mean()
        backward(loss)
        optimizer.step()
        return loss.detach()

    _losses(p, step)


def meta_learning(p: Probe) -> None:
    """MAML: the loss after an inner step is differentiated through it."""
    net = _net(p)
    names = [name for name, _ in net.named_parameters()]

    def loss_of(values: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(net, dict(zip(names, values, strict=True)), (images,))
        return functional.cross_entropy(output, labels)

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = list(net.parameters())
        inner = loss_of(values, images[:2], labels[:2])
        grads = torch.autograd.grad(inner, values, create_graph=True)
        outer = loss_of(
            [value - 0.1 * grad for value, grad in zip(values, grads, strict=True)], images[2:], labels[2:]
        )
        backward(outer)
        return outer.detach()

    _losses(p, step)


def per_sample_gradients(p: Probe) -> None:
    """Gradients of each example by `vmap`, clipped and averaged."""
    torch.manual_seed(p.seed)
    net = p.module(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, CLASSES)))

    def loss_of(values: Any, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(net, values, (image[None],))
        return functional.cross_entropy(output, label[None])

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = {name: value.detach() for name, value in net.named_parameters()}
        grads = each(values, images, labels)
        for name, parameter in net.named_parameters():
            clipped = grads[name] / grads[name].flatten(1).norm(dim=1).clamp(min=1).reshape(
                -1, *[1] * parameter.dim()
            )
            parameter.grad = clipped.mean(0)
        loss = functional.cross_entropy(net(images), labels)
        backward(loss)
        return loss.detach()

    _losses(p, step)


def offloading(p: Probe) -> None:
    """Saved tensors are copied away and back by hooks on packing and unpacking."""
    net = _net(p)
    model = p.compile(net)
    optimizer = torch.optim.AdamW(net.parameters())

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        return tensor.device, tensor.to("cpu", copy=True)

    def unpack(kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        return kept[1].to(kept[0])

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = functional.cross_entropy(model(images), labels)
        backward(loss)
        optimizer.step()
        return loss.detach()

    _losses(p, step)


def scaled(p: Probe) -> None:
    """Autocast to bfloat16 with a gradient scaler."""
    net = _net(p)
    model = p.compile(net)
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler(p.device.type, init_scale=256.0, growth_interval=1)

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(p.device.type, torch.bfloat16, enabled=not p.is_reference):
            loss = functional.cross_entropy(model(images), labels)
        backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    _losses(p, step)


def accumulated(p: Probe) -> None:
    """Two micro-batches a step, clipping, a schedule, and an average of the weights."""
    net = _net(p)
    model = p.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    average = [parameter.detach().clone() for parameter in net.parameters()]

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = images.new_zeros(())
        for part in (slice(0, 2), slice(2, 4)):
            loss = functional.cross_entropy(model(images[part]), labels[part]) / 2
            backward(loss)
            total += loss.detach()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        torch._foreach_lerp_(average, [one.detach() for one in net.parameters()], 0.1)
        return total

    _losses(p, step)


def _llama(p: Probe) -> Any:
    library = importlib.import_module("transformers")
    torch.manual_seed(p.seed)
    config = library.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, use_cache=False,
    )  # fmt: skip
    return library.LlamaForCausalLM(config)


def _adapters(p: Probe) -> Trained:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    tokens = p.randint(VOCABULARY, 2, 12)
    model = peft.get_peft_model(_llama(p), config)
    return Trained(model, [tokens], lambda model, ids: model(input_ids=ids, labels=ids).loss)


def accelerate_loop(p: Probe) -> None:
    """A loop of accelerate: accumulation, clipping, its own backward."""
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=p.device.type == "cpu")
    net = _net(p)
    optimizer = torch.optim.AdamW(net.parameters())
    model, optimizer = accelerator.prepare(p.compile(net), optimizer)
    for number in range(STEPS):
        images, labels = _batch(p)
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(images), labels)
            with p.backward():
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        p.value(f"loss {number}", loss.detach())


def transformers_trainer(p: Probe) -> None:
    """transformers' Trainer with its defaults: accumulation, clipping, schedule."""
    library = importlib.import_module("transformers")
    model = p.module(_llama(p))
    rows = [{"input_ids": row, "labels": row} for row in p.randint(VOCABULARY, 6, 10)]
    with tempfile.TemporaryDirectory() as folder:
        options = library.TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=p.device.type == "cpu", seed=p.seed,
            dataloader_pin_memory=False, logging_strategy="no",
        )  # fmt: skip
        trainer = library.Trainer(model=p.compile(model), args=options, train_dataset=rows)
        with p.backward():
            p.value("loss", trainer.train().training_loss)


def lightning_trainer(p: Probe) -> None:
    """Lightning's Trainer with clipping and accumulation."""
    lightning = importlib.import_module("lightning")
    net = _net(p)
    model = p.compile(net)
    losses: list[torch.Tensor] = []

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            images, labels = batch
            loss = functional.cross_entropy(model(images), labels)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters())

    trainer = lightning.Trainer(
        accelerator="cpu" if p.device.type == "cpu" else "gpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=0.5, accumulate_grad_batches=2,
    )  # fmt: skip
    with p.backward():
        trainer.fit(Module(), [_batch(p) for _ in range(4)])
    for number, loss in enumerate(losses):
        p.value(f"loss {number}", loss)


_PLAIN = (
    optimizer_in_backward, grad_cam, gradient_penalty, meta_learning, per_sample_gradients, offloading, scaled,
    accumulated,
)  # fmt: skip

PATTERNS: dict[str, Recipe] = {
    **{f"patterns/{body.__name__}": Recipe("torch", body, body.__doc__ or "") for body in _PLAIN},
    "patterns/adapters": trained("peft", _adapters, "LoRA on a language model"),
    "patterns/accelerate": Recipe("accelerate", accelerate_loop, "a loop of accelerate"),
    "patterns/transformers_trainer": Recipe(
        "transformers", partial(transformers_trainer), "Trainer", fp64=False
    ),
    "patterns/lightning": Recipe("lightning", lightning_trainer, "Lightning's Trainer", fp64=False),
}
