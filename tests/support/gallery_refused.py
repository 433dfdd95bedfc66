"""Loops whose memory, or whose way, depends on their data: a trace must say so and where."""

from __future__ import annotations

import math
from typing import Any

import torch
from gallery_case import F, conv_net, images, loop, mlp, next_token_loss, tokens
from torch import Tensor, nn

import batchfit


def classifier(device: str, after: Any = None, before: Any = None) -> batchfit.Workload:
    """A plain loop with something between loss and backward, or after the step."""
    model = conv_net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(n: int) -> None:
        x, y = images(n, device)
        loss = F.cross_entropy(model(x), y)
        if before is not None and before(loss):
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after is not None:
            after(model, loss)

    return batchfit.Workload(step, state=[model, optimizer])


class Routed(nn.Module):
    """Each expert sees the tokens that chose it: how many, the data say."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.route = nn.Linear(width, 4)
        self.experts = nn.ModuleList(mlp(width, 256, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.route(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            index = (chosen == i).nonzero(as_tuple=True)[0]
            out.index_add_(0, index, expert(flat[index]) * weights[index, None])
        return out.view_as(x)


@loop(refused="(chosen == i).nonzero")
def routed_experts(device: str) -> batchfit.Workload:
    model = nn.Sequential(nn.Embedding(4096, 128), Routed(), nn.Linear(128, 4096)).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(n: int) -> None:
        ids = tokens(n, device)
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop(refused="boxes = made[..., :4][positive]")
def detection(device: str) -> batchfit.Workload:
    """Losses over the boxes that are positive."""
    body = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 5, 3, 2, 1)).to(device)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)

    def step(n: int) -> None:
        x, _ = images(n, device)
        made = body(x).flatten(2).transpose(1, 2)
        positive = made[..., 4].detach().sigmoid() > 0.5
        boxes = made[..., :4][positive]
        loss = boxes.abs().mean() + made[..., 4].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[body, optimizer])


@loop(refused="if torch.isnan(loss):")
def nan_guard(device: str) -> batchfit.Workload:
    def before(loss: Tensor) -> bool:
        if torch.isnan(loss):
            print("loss is nan, skipping the batch")
            return True
        return False

    return classifier(device, before=before)


@loop(refused="if not math.isfinite(loss.item()):")
def finite_guard(device: str) -> batchfit.Workload:
    """torchvision's detection reference."""

    def before(loss: Tensor) -> bool:
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"Loss is {loss.item()}, stopping training")
        return False

    return classifier(device, before=before)


@loop(refused="if loss.item() < best[0]:")
def best_so_far(device: str) -> batchfit.Workload:
    """A copy of the best weights, on the device."""
    best: list[Any] = [float("inf"), None]

    def after(model: nn.Module, loss: Tensor) -> None:
        if loss.item() < best[0]:
            best[:] = loss.item(), {name: one.clone() for name, one in model.state_dict().items()}

    return classifier(device, after=after)


@loop(refused="if loss > 1e4:")
def guarded_with_a_way_out(device: str) -> batchfit.Workload:
    """The program catches whatever the comparison raises: a trace must not take the way out for the way."""

    def before(loss: Tensor) -> bool:
        try:
            if loss > 1e4:
                return True
        except Exception:  # noqa: BLE001
            return True
        return False

    return classifier(device, before=before)


@loop(refused="kept = losses[losses > losses.mean()]")
def hard_samples(device: str) -> batchfit.Workload:
    model = conv_net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(n: int) -> None:
        x, y = images(n, device)
        losses = F.cross_entropy(model(x), y, reduction="none")
        kept = losses[losses > losses.mean()]
        optimizer.zero_grad()
        kept.mean().backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop(refused="optimizer.step(closure)")
def lbfgs(device: str) -> batchfit.Workload:
    """How often the closure runs, its line search decides."""
    model = mlp(64, 128, 1).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def step(n: int) -> None:
        x = torch.randn(64 * n, 64).to(device)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return batchfit.Workload(step, state=[model, optimizer])


@loop(refused="words(ids).square().mean().backward()")
def sparse_adam(device: str) -> batchfit.Workload:
    """Gradients are coalesced: as many rows as the batch has different words."""
    words = nn.Embedding(100_000, 64, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(words.parameters())

    def step(n: int) -> None:
        ids = torch.randint(0, 100_000, (256 * n,)).to(device)
        optimizer.zero_grad()
        words(ids).square().mean().backward()
        optimizer.step()

    return batchfit.Workload(step, state=[words, optimizer])


@loop(refused="if divergence > 0.02:")
def ppo_early_stop(device: str) -> batchfit.Workload:
    """Epochs over a batch until the policy has moved too far."""
    policy = mlp(64, 256, 8).to(device)
    optimizer = torch.optim.Adam(policy.parameters())

    def step(n: int) -> None:
        seen, actions = torch.randn(64 * n, 64).to(device), torch.randint(0, 8, (64 * n, 1)).to(device)
        with torch.no_grad():
            old = policy(seen).log_softmax(-1).gather(1, actions)
        for _ in range(4):
            new = policy(seen).log_softmax(-1).gather(1, actions)
            divergence = (old - new).mean().item()
            if divergence > 0.02:
                break
            optimizer.zero_grad()
            (new - old).exp().mean().backward()
            optimizer.step()

    return batchfit.Workload(step, state=[policy, optimizer])


@loop(refused="classes = torch.unique(y)")
def prototypes(device: str) -> batchfit.Workload:
    """One centre for each class that is in the batch, by what the model says the classes are."""
    model = conv_net(classes=64).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(n: int) -> None:
        x, _ = images(n, device)
        features = model(x)
        y = features.argmax(1)
        classes = torch.unique(y)
        centres = torch.stack([features[y == one].mean(0) for one in classes])
        optimizer.zero_grad()
        torch.cdist(features, centres).mean().backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop(refused="if norm > 1e9:")
def skipped_by_norm(device: str) -> batchfit.Workload:
    """The step is left out where the gradient is too large."""
    model = conv_net().to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(n: int) -> None:
        x, y = images(n, device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 1e9:
            return
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop(refused="halves = x.numpy")
def numpy_outputs(device: str) -> batchfit.Workload:
    """Outputs handed to NumPy, which counts them."""
    model = conv_net(classes=100).to(device)

    @torch.no_grad()
    def step(n: int) -> None:
        x, _ = images(n, device)
        x = model(x).softmax(-1).cpu()
        halves = x.numpy() > 0.5
        halves.sum()

    return batchfit.Workload(step, state=[model])
