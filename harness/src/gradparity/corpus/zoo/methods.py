"""Packages whose method is autograd itself: attributions, gradients for each example, curvature, inference.

In: the package of each row, and small networks. Out: recipes, which use it as its own first example does.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradparity.corpus.zoo.recipe import STEPS, Recipe, Trained, trained
from gradparity.probe import Probe

CLASSES = 3


def _perceptron(p: Probe) -> nn.Sequential:
    torch.manual_seed(p.seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, CLASSES))


def _rows(p: Probe) -> tuple[torch.Tensor, torch.Tensor]:
    return p.randn(4, 6), p.randint(CLASSES, 4)


def _classify(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def attributions(p: Probe) -> None:
    """Integrated gradients, and Grad-CAM under noise: hooks, and gradients of inputs that are made inside."""
    captum = importlib.import_module("captum.attr")
    torch.manual_seed(p.seed)
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)
    )
    net = p.module(layers).eval()
    model = p.compile(net)
    along = captum.IntegratedGradients(model)
    around = captum.NoiseTunnel(captum.LayerGradCam(model, net[0]))

    def step(backward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = along.attribute(images, target=labels, n_steps=3)
        second = around.attribute(images, target=labels, nt_samples=2)
        return torch.cat([first.flatten(), second.flatten()]).detach()

    run = p.training_step(step)
    for number in range(STEPS):
        with p.backward():
            p.value(f"attribution {number}", run(p.randn(2, 3, 8, 8), p.randint(CLASSES, 2)))


def private_training(p: Probe) -> None:
    """Gradients of each example by hooks on modules, clipped, and noise."""
    opacus, optimizers = (importlib.import_module(name) for name in ("opacus", "opacus.optimizers"))
    net = p.module(_perceptron(p)).train()
    model = p.compile(opacus.GradSampleModule(net))
    optimizer = optimizers.DPOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=4, generator=torch.Generator(p.device).manual_seed(p.seed),
    )  # fmt: skip

    def step(backward: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        backward(loss)
        optimizer.step()
        return loss.detach()

    run, batch = p.training_step(step), _rows(p)
    for number in range(STEPS):
        p.value(f"loss {number}", run(*batch).clone())


def curvature(p: Probe) -> None:
    """Variances of gradients and the Gauss-Newton diagonal, by hooks that walk back along the modules."""
    backpack, extensions = (importlib.import_module(name) for name in ("backpack", "backpack.extensions"))
    net, criterion = p.module(_perceptron(p)).train(), nn.CrossEntropyLoss()
    backpack.extend(net), backpack.extend(criterion)
    model = p.compile(net)
    wanted = [extensions.BatchGrad(), extensions.Variance(), extensions.DiagGGNExact(), extensions.KFAC()]

    def step(backward: Any, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = criterion(model(inputs), labels)
        with backpack.backpack(*wanted):
            backward(loss)
        parameters: list[Any] = [*net.parameters()]
        found = [(one.variance, one.diag_ggn_exact, *one.kfac) for one in parameters]
        return loss.detach(), *(tensor for tensors in found for tensor in tensors)

    run, batch = p.training_step(step), _rows(p)
    for number in range(STEPS):
        for place, value in enumerate(run(*batch)):
            p.value(f"{number}: {place}", value.clone())


def variational_inference(p: Probe) -> None:
    """Pyro's stochastic variational inference around a network."""
    pyro, infer, guides = (importlib.import_module(f"pyro{n}") for n in ("", ".infer", ".infer.autoguide"))
    pyro.clear_param_store()
    inputs, goals = p.randn(6, 6), p.randn(6)
    network = p.compile(p.module(_perceptron(p)).train())

    def model(inputs: torch.Tensor, goals: torch.Tensor) -> None:
        scale = pyro.sample("scale", pyro.distributions.HalfNormal(inputs.new_tensor(1.0)))
        with pyro.plate("rows", len(inputs)):
            pyro.sample("goal", pyro.distributions.Normal(network(inputs)[:, 0], scale), obs=goals)

    trainer = infer.SVI(model, guides.AutoNormal(model), pyro.optim.Adam({"lr": 0.01}), infer.Trace_ELBO())
    for number in range(STEPS):
        with p.backward():
            p.value(f"loss {number}", trainer.step(inputs, goals))


class Sphere(nn.Module):
    """A weight whose rows stay on a sphere."""

    def __init__(self) -> None:
        super().__init__()
        geoopt = importlib.import_module("geoopt")
        start = functional.normalize(torch.randn(5, 3), dim=-1)
        self.points = geoopt.ManifoldParameter(start, manifold=geoopt.Sphere())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs float [N, 3]; returns a number."""
        return (inputs @ self.points.t()).logsumexp(-1).mean()


def manifold(p: Probe) -> None:
    """Riemannian descent: the optimizer asks its parameters what they are."""
    torch.manual_seed(p.seed)
    net = p.module(Sphere())
    model, batch = p.compile(net), p.randn(4, 3)
    optimizer = importlib.import_module("geoopt").optim.RiemannianSGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(backward: Any, inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs)
        backward(loss)
        optimizer.step()
        found: torch.Tensor = loss.detach()
        return found

    run = p.training_step(step)
    for number in range(STEPS):
        p.value(f"loss {number}", run(batch).clone())


class Sparse(nn.Module):
    """Attention with exact zeros, by Functions, one of which learns how sparse it is."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.alpha = nn.Linear(6, 5), nn.Parameter(torch.tensor(1.4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs float [N, 6]; returns float [N, 5]."""
        entmax, scores = importlib.import_module("entmax"), self.project(inputs)
        learned = entmax.entmax_bisect(scores, self.alpha, n_iter=20)
        found: torch.Tensor = entmax.sparsemax(scores) * 0.5 + entmax.entmax15(scores) + learned
        return found


def _sparse(p: Probe) -> Trained:
    return Trained(Sparse(), [(p.randn(4, 6), p.randint(5, 4))], _classify)


def _spline(p: Probe) -> Trained:
    flow = importlib.import_module("zuko").flows.NSF(2, 2, transforms=1, bins=4, hidden_features=[8])
    batches = [(p.randn(6, 2), p.randn(6, 2)) for _ in range(2)]
    return Trained(flow, batches, lambda model, batch: -model(batch[1]).log_prob(batch[0]).mean())


METHODS: dict[str, Recipe] = {
    "captum/attributions": Recipe("captum", attributions, attributions.__doc__ or ""),
    "opacus/private_training": Recipe("opacus", private_training, private_training.__doc__ or ""),
    "backpack/curvature": Recipe("backpack", curvature, curvature.__doc__ or ""),
    "pyro/variational_inference": Recipe("pyro", variational_inference, fp64=False),
    "geoopt/manifold": Recipe("geoopt", manifold, manifold.__doc__ or ""),
    "entmax/attention": trained("entmax", _sparse, "attention with exact zeros"),
    "zuko/spline": trained("zuko", _spline, "a flow of rational splines"),
}
