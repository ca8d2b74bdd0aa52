"""Small real models over several steps: recurrent, attention, experts, checkpoints, adapters, norms.

In: a probe. Out: the moments at which gradients arrive, buffers, and gradients that must stay absent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.watch import watch_parameters
from gradparity.probe import Probe


@scenario(tags=("steps", "training", "hooks", "shapes"), fp64=False)
def lstm_over_packed_sequences(p: Probe) -> None:
    """Sequences are packed, run through an LSTM and padded again, with other lengths in every step."""
    model = p.module(nn.LSTM(2, 3, num_layers=2))
    watch_parameters(p, model)
    for lengths in ((4, 3, 1), (2, 2, 2), (5, 1)):
        x = p.randn(max(lengths), len(lengths), 2)
        packed, state = model(pack_padded_sequence(x, torch.tensor(lengths)))
        padded, _ = pad_packed_sequence(packed)
        padded.register_hook(p.hook("padded"))
        model.zero_grad()
        with p.backward():
            (padded.pow(2).mean() + state[0].sin().sum()).backward()


@scenario(tags=("steps", "training", "hooks", "shapes"))
def gru_with_a_carried_state(p: Probe) -> None:
    """Truncated backpropagation through time: the state is carried on, its history is cut."""
    cell, head = p.module(nn.GRU(2, 3)), p.module(nn.Linear(3, 1), "head")
    watch_parameters(p, cell)
    state = torch.zeros(1, 2, 3, dtype=p.dtype, device=p.device)
    for length in (3, 2, 3):
        out, state = cell(p.randn(length, 2, 2), state)
        state.register_hook(p.hook(f"state{length}"))
        with p.backward():
            (head(out).pow(2).mean() + state.mean()).backward()
        state = state.detach()


class _Tied(nn.Module):
    """An attention block whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.qkv, self.out, self.norm = nn.Linear(4, 12), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        h = h + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return h @ self.embedding.weight.t()


@scenario(tags=("steps", "training", "hooks", "shared", "shapes"))
def transformer_with_tied_embeddings(p: Probe) -> None:
    """The embedding gets its gradient once, as a sum of both uses, although batch and length change."""
    model = p.module(_Tied())
    watch_parameters(p, model)
    run = p.compile(model)
    for batch, length in ((2, 5), (3, 4), (1, 6)):
        tokens = p.randint(7, batch, length)
        model.zero_grad()
        with p.backward():
            functional.cross_entropy(run(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()


class _Experts(nn.Module):
    """A router and three experts, of which the first of a sample's choice is used."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor, allowed: int) -> Tensor:
        gates = self.router(x).softmax(-1)
        chosen = gates[:, :allowed].argmax(-1)
        out = x.new_zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * gates[rows, number, None])
        return out


@scenario(tags=("steps", "training", "hooks", "unused", "data-dependent"))
def experts_that_are_not_chosen(p: Probe) -> None:
    """Experts that no sample chose keep `.grad` None, and the momentum of the others does not touch them."""
    model = p.module(_Experts())
    watch_parameters(p, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False)
    for allowed in (1, 2, 3):
        optimizer.zero_grad()
        with p.backward():
            model(p.randn(6, 3), allowed).pow(2).sum().backward()
        p.event("absent", *(name for name, param in model.named_parameters() if param.grad is None))
        optimizer.step()
    p.value("experts", tuple(expert.weight.detach() for expert in model.experts))


@scenario(tags=("steps", "training", "hooks", "checkpoint", "module"))
def checkpointed_residual_blocks(p: Probe) -> None:
    """Convolutions with batch norm are computed again in the backward; hooks inside run once per backward."""
    blocks = [nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU()) for _ in range(2)]
    model = p.module(nn.Sequential(*blocks))
    watch_parameters(p, model)
    for number, block in enumerate(model):
        block[0].register_full_backward_hook(p.hook(f"conv{number}", kind="module"))
    for size in (4, 5):
        h = p.randn(2, 2, size, size)
        for block in model:
            h = h + checkpoint(block, h, use_reentrant=False)
        with p.backward():
            h.pow(2).mean().backward()


class _LowRank(nn.Module):
    """A frozen layer with a trained correction of rank two."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@scenario(tags=("steps", "training", "hooks", "module"))
def low_rank_adapters_on_frozen_layers(p: Probe) -> None:
    """Frozen weights stay without gradient, and adapters below a frozen layer get theirs through it."""
    model = p.module(nn.Sequential(_LowRank(), nn.GELU(), nn.Linear(3, 4).requires_grad_(False), _LowRank()))
    watch_parameters(p, model)
    run = p.compile(model)
    optimizer = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=0.01, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        with p.backward():
            run(p.randn(5, 4)).pow(2).mean().backward()
        optimizer.step()


@scenario(tags=("steps", "training", "hooks", "module"))
def weight_norm_parametrization(p: Probe) -> None:
    """The gradient arrives at length and direction, from which the weight is computed in every forward."""
    model = p.module(parametrizations.weight_norm(nn.Linear(4, 3)))
    watch_parameters(p, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        with p.backward():
            model(p.randn(5, 4)).pow(2).mean().backward()
        optimizer.step()


@scenario(tags=("steps", "training", "hooks", "module"))
def spectral_norm_parametrization(p: Probe) -> None:
    """The power iteration changes its buffers in every forward; the gradient goes through their clones."""
    model = p.module(parametrizations.spectral_norm(nn.Linear(4, 3)))
    watch_parameters(p, model)
    for _ in range(3):
        with p.backward():
            model(p.randn(5, 4)).exp().mean().backward()
    p.value("buffers", tuple(buffer.clone() for buffer in model.buffers()))


@scenario(tags=("steps", "training", "hooks", "module"))
def batch_norm_in_training_and_evaluation(p: Probe) -> None:
    """Batch norm uses the batch's statistics in training and its buffers in evaluation."""
    model = p.module(nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.ReLU()))
    watch_parameters(p, model)
    run = p.compile(model)
    for training, size in ((True, 4), (False, 3), (True, 2)):
        model.train(training)
        x = p.leaf(f"x{size}", p.randn(size, 2, 5, requires_grad=True))
        x.register_hook(p.hook(f"x{size}"))
        with p.backward():
            run(x).pow(2).mean().backward()
        p.value("running mean", model[1].running_mean.clone())
