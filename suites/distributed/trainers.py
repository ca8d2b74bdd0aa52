"""Ten public ways to train on two ranks, each in eager and with one added line: parameters, hooks, fallbacks.

In: names of ways to train and of added lines. Out: for each, what differs from eager on any rank after twenty
steps, and the codes of what ran in eager, as JSON.

``python -m distributed.trainers`` (in ``suites``) runs them on two gloo ranks. The lowering keeps eager's
kernels, so all values have to be equal to the bit. The added line is ``retrograd.compiled_autograd()`` around
the training, or ``compile(backend="retrograd")`` of the model or its blocks, once they are made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import retrograd
from distributed.cells import WIDTH, fsdp2, network
from distributed.group import joined, spawned
from distributed.outcomes import Outcome, difference, end, hashed, on_all_ranks

RANKS, STEPS, BATCH, CPU = 2, 20, 4, torch.device("cpu")
#: called with a model once it is made: sets hooks, and may compile it
Prepare = Callable[[nn.Module], nn.Module]
PLAIN: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def batches(count: int = STEPS) -> list[Tensor]:
    """Inputs of this rank, of shape (BATCH, WIDTH)."""
    numbers = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(BATCH, WIDTH, generator=numbers) for _ in range(count)]


def loss_of(y: Tensor) -> Tensor:
    """A scalar."""
    return y.float().square().mean()


# loops of one's own


def run_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, before_step: Callable[[], object] = lambda: None
) -> None:
    """Train on the batches of this rank."""
    for x in batches():
        loss_of(model(x)).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def accumulating(prepare: Prepare) -> nn.Module:
    """As nanoGPT does it: DDP, microbatches under ``no_sync``, autocast, clipped gradients, a schedule."""
    net = prepare(network())
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for x in batches():
        for number, part in enumerate(x.chunk(2)):
            quiet = model.no_sync() if number == 0 else contextlib.nullcontext()
            with quiet:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model(part)) / 2
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return net


def sharded(prepare: Prepare) -> nn.Module:
    """As torchtitan does it: checkpoints, then FSDP2 for each block in mixed precision, clipped gradients."""
    net = prepare(nn.Sequential(*map(checkpoint_wrapper, network())))
    fsdp2(net, CPU, True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
    run_on(net, optimizer, lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True))
    return net


def in_the_backward(prepare: Prepare) -> nn.Module:
    """As torchtune does it: FSDP2, and an optimizer for each parameter in a hook."""
    net = prepare(network())
    fsdp2(net, CPU, False)
    optimizers = {one: torch.optim.AdamW([one], lr=0.01) for one in net.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for x in batches():
        loss_of(net(x)).backward()
    return net


class Copied(torch.autograd.Function):
    """Megatron's f: what it is given; the sum of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Reduced(torch.autograd.Function):
    """Megatron's g: the sum of what all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Split(nn.Module):
    """Two layers, of which each rank has a part, between Megatron's functions f and g."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + Reduced.apply(self.down(nn.functional.gelu(self.up(Copied.apply(self.norm(x))))))


def split_layers(prepare: Prepare) -> nn.Module:
    """As Megatron-LM does it: tensor parallelism with collectives in Functions."""
    torch.manual_seed(dist.get_rank())
    net = prepare(nn.Sequential(Split(), Split()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    numbers = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        loss_of(net(torch.randn(BATCH, WIDTH, generator=numbers))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def divided_states(prepare: Prepare) -> nn.Module:
    """ZeRO's first stage: DDP, and an optimizer whose states are divided among the ranks."""
    net = prepare(network())
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    run_on(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))
    return net


def compressed(prepare: Prepare) -> nn.Module:
    """DDP with gradients that are sent in half precision."""
    net = prepare(network())
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, fp16_compress_hook)
    run_on(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return net


# loops of libraries


def with_accelerate(prepare: Prepare) -> nn.Module:
    """accelerate's loop, with two microbatches for each step."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = prepare(network())
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    for x in batches(2 * STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(x)))
            optimizer.step()
            optimizer.zero_grad()
    return net


def with_trainer(prepare: Prepare) -> nn.Module:
    """transformers' Trainer, which wraps a small Llama by DDP."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    net = prepare(LlamaForCausalLM(config))
    tokens = torch.randint(32, (4 * RANKS * STEPS, 8), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, ddp_backend="gloo",
            report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        Trainer(net, options, train_dataset=[{"input_ids": one, "labels": one} for one in tokens]).train()
    return net


def with_lightning(prepare: Prepare) -> nn.Module:
    """Lightning's Trainer with its strategy "ddp"."""
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = prepare(network())

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            return loss_of(self.net(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    task = Task()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_steps=STEPS, use_distributed_sampler=False,
        enable_model_summary=False, **PLAIN,
    )  # fmt: skip
    trainer.fit(task, torch.utils.data.DataLoader(batches(), batch_size=None))
    return task.net


def with_fabric(prepare: Prepare) -> nn.Module:
    """A loop of one's own on Lightning Fabric."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    net = prepare(network())
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    for x in batches():
        fabric.backward(loss_of(model(x)))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return net


def with_sft(prepare: Prepare) -> nn.Module:
    """TRL's SFTTrainer: LoRA adapters of a small Llama with checkpointed layers, under DDP."""
    from ecosystem.sft import train as train_adapters

    return train_adapters(prepare, steps=STEPS)


TRAINERS: dict[str, Callable[[Prepare], nn.Module]] = {
    "accumulation, as nanoGPT": accumulating,
    "FSDP2, as torchtitan": sharded,
    "optimizer in the backward, as torchtune": in_the_backward,
    "split layers, as Megatron-LM": split_layers,
    "ZeroRedundancyOptimizer": divided_states,
    "compressed gradients": compressed,
    "accelerate": with_accelerate,
    "Trainer": with_trainer,
    "Lightning": with_lightning,
    "Fabric": with_fabric,
}
if find_spec("trl"):  # where `nox -s ecosystem` has installed it
    TRAINERS["TRL"] = with_sft


def compiled_in_place(net: nn.Module) -> nn.Module:
    """The added line of the forward path, for the model or for each of its blocks."""
    for module in net if isinstance(net, nn.Sequential) else [net]:
        module.compile(backend="retrograd", options={"backend": "eager"})
    return net


#: by added line: the context of the training, and what it makes of the model
LINES: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[object]], Prepare]] = {
    "eager": (contextlib.nullcontext, lambda net: net),
    "compiled_autograd": (partial(retrograd.compiled_autograd, backend="eager"), lambda net: net),
    "model.compile": (contextlib.nullcontext, compiled_in_place),
}


#: Dynamo leaves a checkpoint to Python if a module in it has a backward hook, so nothing is compiled there.
#: And transformers repeats the heads of keys only where it is compiled, so last bits differ.
KNOWN = {("FSDP2, as torchtitan", "model.compile"), ("TRL", "model.compile")}


def outcome(trainer: str, line: str) -> Outcome:
    """Train with hooks on each normalisation and parameter."""
    torch._dynamo.reset()
    retrograd.reset()
    context, prepare = LINES[line]
    found = Outcome()

    def prepared(net: nn.Module) -> nn.Module:
        found.log_hooks(net)
        return prepare(net)

    torch.manual_seed(0)
    with context():
        net = TRAINERS[trainer](prepared)
    found.parameters = [hashed(parameter) for parameter in net.parameters()]
    report = retrograd.explain()
    found.fallbacks = sorted({reason.code for reason in report.fallbacks})
    if line != "eager" and not any(one.runs for one in report.backwards) and not report.graphs:
        found.fallbacks.append("nothing was compiled")
    return found


def train(rank: int, ranks: int, rendezvous: str, chosen: argparse.Namespace, port: int, out: str) -> None:
    """Run on one rank; the first writes what all have found."""
    warnings.simplefilter("ignore")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "trainers"}
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update(address, **{name: str(number) for name, number in places.items()})
    found: dict[str, Any] = {}
    with joined(rank, ranks, rendezvous):
        for trainer in chosen.trainers.split(";"):
            eager = outcome(trainer, "eager")
            found[trainer] = {"hooks": len(eager.hooks)}
            for line in LINES:
                ours = outcome(trainer, line)
                found[trainer][line] = on_all_ranks(difference(eager, ours), ours.fallbacks)
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def unexpected(found: dict[str, dict[str, Any]]) -> list[str]:
    """The ways and lines that are not as `KNOWN` says. Each way must have run hooks."""
    silent = [f"{trainer}: no hook ran" for trainer, lines in found.items() if not lines["hooks"]]
    return silent + [
        f"{trainer}, {line}: {lines[line]}"
        for trainer, lines in found.items()
        for line in LINES
        if bool(lines[line]["differs"] or lines[line]["fallbacks"]) != ((trainer, line) in KNOWN)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Spawn the ranks, print the table as JSON, and end with 1 and a list if something is unexpected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", default=";".join(TRAINERS))
    parser.add_argument("--out")
    chosen = parser.parse_args(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile() as out:
        spawned(train, RANKS, chosen, port, out.name)
        found = json.loads(Path(out.name).read_text())
    end("trainers", found, unexpected(found), chosen.out)


if __name__ == "__main__":
    main()
