"""Graphs, equivariant networks, Gaussian processes, differential equations, audio, diffusion.

In: the package of each row. Out: recipes.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradparity.corpus.zoo.recipe import Recipe, Trained, trained
from gradparity.probe import Probe

#: name in torch_geometric.nn: arguments
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "GCNConv": {}, "GATv2Conv": {"heads": 2, "concat": False}, "SAGEConv": {}, "TransformerConv": {},
    "GraphConv": {},
}  # fmt: skip


class GraphNet(nn.Module):
    """Two convolutions and a mean over the nodes."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        make = getattr(importlib.import_module("torch_geometric.nn"), name)
        self.first, self.second = make(8, 16, **options), make(16, 4, **options)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Nodes float [N, 8], edges int64 [2, E]; returns [N, 4]."""
        result: torch.Tensor = self.second(functional.relu(self.first(nodes, edges)), edges)
        return result


def _graph(name: str, p: Probe) -> Trained:
    batch = (p.randn(10, 8), p.randint(10, 2, 30), p.randint(4, 10))
    return Trained(GraphNet(name, **CONVOLUTIONS[name]), [batch], _label_nodes)


def _label_nodes(model: Any, batch: Any) -> torch.Tensor:
    nodes, edges, labels = batch
    return functional.cross_entropy(model(nodes, edges), labels)


def _schnet(p: Probe) -> Trained:
    model = importlib.import_module("torch_geometric.nn").SchNet(
        hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8,
        interaction_graph=_all_pairs,
    )  # fmt: skip
    return Trained(model, [(p.randint(8, 6) + 1, p.randn(6, 3), p.randn(6, 3))], _forces)


def _all_pairs(position: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = position.shape[0]
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count)).t().to(position.device)
    pairs = pairs[:, pairs[0] != pairs[1]]
    return pairs, (position[pairs[0]] - position[pairs[1]]).norm(dim=-1)


def _forces(model: Any, batch: Any) -> torch.Tensor:
    """Energies whose gradient is fitted: a backward through a backward."""
    numbers, positions, forces = batch
    positions = positions.detach().requires_grad_()
    energy = model(numbers, positions).sum()
    (grad,) = torch.autograd.grad(energy, positions, create_graph=True)
    return functional.mse_loss(-grad, forces) + energy.pow(2) * 1e-3


def _equivariant(p: Probe) -> Trained:
    o3 = importlib.import_module("e3nn.o3")
    model = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "4x0e + 2x1o")
    return Trained(model, [(p.randn(5, 10), p.randn(5, 4), p.randn(5, 10))], _product)


def _product(model: Any, batch: Any) -> torch.Tensor:
    left, right, goal = batch
    return functional.mse_loss(model(left, right), goal)


class Process(nn.Module):
    """An exact Gaussian process and its marginal likelihood."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__()
        gp = importlib.import_module("gpytorch")

        class Model(gp.models.ExactGP):  # type: ignore[name-defined]
            def __init__(self, likelihood: Any) -> None:
                super().__init__(x, y, likelihood)
                self.mean_module = gp.means.ConstantMean()
                self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

            def forward(self, x: torch.Tensor) -> Any:
                return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

        self.likelihood = gp.likelihoods.GaussianLikelihood()
        self.model = Model(self.likelihood)
        self.objective = gp.mlls.ExactMarginalLogLikelihood(self.likelihood, self.model)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x float [N, 1], y float [N]; returns the negative marginal log likelihood."""
        result: torch.Tensor = -self.objective(self.model(x), y)
        return result


def _gaussian_process(p: Probe) -> Trained:
    x, y = p.rand(12, 1), p.randn(12)
    return Trained(Process(x, y), [(x, y)], lambda model, batch: model(*batch))


class Neural(nn.Module):
    """An ordinary differential equation whose right side is a network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, start: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Start float [N, 2], times float [T]; returns [T, N, 2]."""
        solve = importlib.import_module("torchdiffeq").odeint
        result: torch.Tensor = solve(lambda t, y: self.net(y), start, times, method="rk4")
        return result


def _differential_equation(p: Probe) -> Trained:
    batch = (p.randn(4, 2), p.tensor([0.0, 0.3, 0.7, 1.0]), p.randn(4, 4, 2))
    return Trained(Neural(), [batch], lambda model, b: functional.mse_loss(model(b[0], b[1]), b[2]))


def _conformer(p: Probe) -> Trained:
    model = importlib.import_module("torchaudio.models").Conformer(
        input_dim=16, num_heads=2, ffn_dim=32, num_layers=2, depthwise_conv_kernel_size=7
    )
    batch = (p.randn(2, 20, 16), p.tensor([20, 14]), p.randn(2, 20, 16))
    return Trained(model, [batch], lambda model, b: functional.mse_loss(model(b[0], b[1])[0], b[2]))


def _unet(p: Probe) -> Trained:
    model = importlib.import_module("diffusers").UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    batch = (p.randn(2, 3, 16, 16), p.tensor([10, 500]), p.randn(2, 3, 16, 16))
    return Trained(model, [batch], lambda model, b: functional.mse_loss(model(b[0], b[1]).sample, b[2]))


SCIENCE: dict[str, Recipe] = {
    **{f"torch_geometric/{name}": trained("torch_geometric", partial(_graph, name)) for name in CONVOLUTIONS},
    "torch_geometric/SchNet": trained("torch_geometric", _schnet, "energies fitted by their forces"),
    "e3nn/tensor_product": trained("e3nn", _equivariant, fp64=False),
    "gpytorch/exact_gp": trained("gpytorch", _gaussian_process),
    "torchdiffeq/neural_ode": trained("torchdiffeq", _differential_equation),
    "torchaudio/conformer": trained("torchaudio", _conformer),
    "diffusers/unet": trained("diffusers", _unet),
}
