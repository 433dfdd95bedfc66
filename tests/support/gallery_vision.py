"""Loops over images, video, points and graphs."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from gallery_case import F, conv_net, images, loop, mlp
from torch import Tensor, nn

import batchfit


class Critic(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)),
            *(nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)),
            *(nn.Flatten(), nn.Linear(4 * width * 64, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def generator(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        *(nn.ConvTranspose2d(64, 4 * width, 8), nn.BatchNorm2d(4 * width), nn.ReLU(True)),
        *(nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(True)),
        *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(True)),
        *(nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()),
    )


@loop()
def wgan_gp(device: str) -> batchfit.Workload:
    """Two optimizers, and a penalty on gradients that is differentiated once more."""
    make, critic = generator().to(device), Critic().to(device)
    opt_g = torch.optim.Adam(make.parameters(), lr=1e-4, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))

    def penalty(real: Tensor, fake: Tensor) -> Tensor:
        alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = critic(mixed)
        (gradients,) = torch.autograd.grad(
            scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True
        )
        return ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

    def step(n: int) -> None:
        real, _ = images(n, device)
        for _ in range(2):
            noise = torch.randn(n, 64, 1, 1, device=device)
            fake = make(noise).detach()
            loss_d = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
        loss_g = -critic(make(torch.randn(n, 64, 1, 1, device=device))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()

    return batchfit.Workload(step, state=[make, critic, opt_g, opt_d])


@loop()
def gan(device: str) -> batchfit.Workload:
    """The DCGAN tutorial's loop, with the losses that it writes down."""
    make, judge = generator().to(device), Critic().to(device)
    opt_g, opt_d = torch.optim.Adam(make.parameters()), torch.optim.Adam(judge.parameters())
    criterion = nn.BCEWithLogitsLoss()
    g_losses: list[float] = []

    def step(n: int) -> None:
        judge.zero_grad()
        real, _ = images(n, device)
        label = torch.full((n,), 1.0, device=device)
        err_real = criterion(judge(real).view(-1), label)
        err_real.backward()
        fake = make(torch.randn(n, 64, 1, 1, device=device))
        label.fill_(0.0)
        err_fake = criterion(judge(fake.detach()).view(-1), label)
        err_fake.backward()
        opt_d.step()
        make.zero_grad()
        label.fill_(1.0)
        err_g = criterion(judge(fake).view(-1), label)
        err_g.backward()
        opt_g.step()
        g_losses.append(err_g.item())

    return batchfit.Workload(step, state=[make, judge, opt_g, opt_d])


class MoCo(nn.Module):
    queue: Tensor
    pointer: Tensor

    def __init__(self, size: int = 65536, width: int = 128) -> None:
        super().__init__()
        self.query = conv_net(classes=width)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(width, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self, momentum: float = 0.999) -> None:
        for one, two in zip(self.query.parameters(), self.key.parameters(), strict=True):
            two.data = two.data * momentum + one.data * (1.0 - momentum)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        at = int(self.pointer)
        end = min(at + len(keys), self.queue.shape[1])
        self.queue[:, at:end] = keys.T[:, : end - at]
        self.pointer[0] = end % self.queue.shape[1]

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        query = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            self.follow()
            keys = F.normalize(self.key(two), dim=1)
        positive = torch.einsum("nc,nc->n", query, keys).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.07
        self.enqueue(keys)
        return logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)


@loop()
def moco(device: str) -> batchfit.Workload:
    """A momentum encoder and a queue with a pointer that the program reads: a counter, not data."""
    model = MoCo().to(device)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)

    def step(n: int) -> None:
        one, _ = images(n, device)
        two, _ = images(n, device)
        logits, labels = model(one, two)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def byol(device: str) -> batchfit.Workload:
    """A teacher that is a deep copy and follows by an exponential mean, in place."""
    student = nn.Sequential(conv_net(classes=256), mlp(256, 1024, 256)).to(device)
    predictor = mlp(256, 1024, 256).to(device)
    teacher = copy.deepcopy(student)
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=3e-4)

    def regression(x: Tensor, y: Tensor) -> Tensor:
        return 2 - 2 * F.cosine_similarity(x, y, dim=-1)

    def step(n: int) -> None:
        one, two = images(n, device)[0], images(n, device)[0]
        with torch.no_grad():
            target_one, target_two = teacher(one), teacher(two)
        loss = regression(predictor(student(one)), target_two) + regression(
            predictor(student(two)), target_one
        )
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(student.parameters(), teacher.parameters(), strict=True):
                its.mul_(0.99).add_(mine, alpha=0.01)

    return batchfit.Workload(step, state=[student, predictor, teacher, optimizer])


@loop()
def simclr(device: str) -> batchfit.Workload:
    """All samples against all: memory grows as a square."""
    model = conv_net(width=8, classes=64).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)

    def step(n: int) -> None:
        views = torch.cat([images(n, device)[0], images(n, device)[0]])
        features = F.normalize(model(views), dim=1)
        labels = torch.cat([torch.arange(n) for _ in range(2)]).to(device)
        same = (labels[None] == labels[:, None]).float()
        similar = features @ features.T
        itself = torch.eye(2 * n, dtype=torch.bool, device=device)
        same = same.masked_fill(itself, 0.0)
        similar = similar.masked_fill(itself, -1e9) / 0.07
        log_probability = similar - torch.logsumexp(similar, dim=1, keepdim=True)
        loss = -(same * log_probability).sum(1).div(same.sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


class Down(nn.Module):
    def __init__(self, inside: int, outside: int, time: int = 128) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.Conv2d(outside, outside, 3, padding=1),
        )
        self.norm1, self.norm2 = nn.GroupNorm(8, inside), nn.GroupNorm(8, outside)
        self.time = nn.Linear(time, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.one(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        out: Tensor = self.skip(x) + self.two(F.silu(self.norm2(h)))
        return out


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = mlp(128, 128, 128)
        self.begin, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down1, self.down2 = Down(width, width), Down(width, 2 * width)
        self.middle = Down(2 * width, 2 * width)
        self.up2, self.up1 = Down(4 * width, width), Down(2 * width, width)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        rate = torch.exp(-torch.arange(64, device=x.device) * (9.2 / 64))
        angle = when[:, None].float() * rate[None]
        time = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))
        one = self.down1(self.begin(x), time)
        two = self.down2(F.avg_pool2d(one, 2), time)
        mid = self.middle(F.avg_pool2d(two, 2), time)
        up = F.interpolate(mid, scale_factor=2, mode="nearest")
        up = self.up2(torch.cat([up, two], dim=1), time)
        up = F.interpolate(up, scale_factor=2, mode="nearest")
        out: Tensor = self.end(self.up1(torch.cat([up, one], dim=1), time))
        return out


@loop()
def diffusion(device: str) -> batchfit.Workload:
    """Random times, a table of noise levels in the closure, an exponential mean in a dict of tensors."""
    model = UNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    levels = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to(device)
    ema = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def step(n: int) -> None:
        x, _ = images(n, device)
        t = torch.randint(0, 1000, (n,), device=device)
        noise = torch.randn_like(x)
        level = levels[t][:, None, None, None]
        noisy = level.sqrt() * x + (1 - level).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                ema[name].lerp_(value, 0.001)

    return batchfit.Workload(step, state=[model, optimizer, ema])


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = conv_net(classes=2 * 64), generator()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(z[:, :, None, None]), mean, log_variance


@loop()
def vae(device: str) -> batchfit.Workload:
    model = VAE().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total = 0.0

    def step(n: int) -> None:
        nonlocal total
        x, _ = images(n, device)
        again, mean, log_variance = model(x)
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        loss = F.mse_loss(again, x, reduction="sum") + divergence
        optimizer.zero_grad()
        loss.backward()
        total += loss.item()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


class Codes(nn.Module):
    """A codebook that follows its codes by exponential means (VQ-VAE)."""

    book: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, many: int = 512, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(many, width))
        self.register_buffer("counts", torch.ones(many))
        self.register_buffer("sums", self.book.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.book.T + self.book.pow(2).sum(1)
        index = distance.argmin(1)
        one_hot = F.one_hot(index, len(self.book)).type(flat.dtype)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.99).add_(one_hot.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(one_hot.T @ flat, alpha=0.01)
                self.book.copy_(self.sums / self.counts.clamp(min=1e-5).unsqueeze(1))
        near = F.embedding(index, self.book).view(x.shape[0], x.shape[2], x.shape[3], -1).permute(0, 3, 1, 2)
        return x + (near - x).detach(), F.mse_loss(near.detach(), x)


@loop()
def vq_vae(device: str) -> batchfit.Workload:
    """Straight-through gradients, one-hot codes by `F.one_hot`."""
    encode = nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1),
        nn.ReLU(True),
        nn.Conv2d(64, 64, 4, 2, 1),
        nn.ReLU(True),
        nn.Conv2d(64, 64, 1),
    ).to(device)
    decode = nn.Sequential(
        nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.ReLU(True), nn.ConvTranspose2d(64, 3, 4, 2, 1)
    ).to(device)
    codes = Codes().to(device)
    optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=2e-4)

    def step(n: int) -> None:
        x, _ = images(n, device)
        quantized, commitment = codes(encode(x))
        loss = F.mse_loss(decode(quantized), x) + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[encode, decode, codes, optimizer])


@loop()
def distillation(device: str) -> batchfit.Workload:
    """A frozen teacher in eval mode that nobody declares, softened logits."""
    teacher, student = conv_net(48, classes=100).to(device).eval(), conv_net(24, classes=100).to(device)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def step(n: int) -> None:
        student.train()
        x, y = images(n, device, 100)
        with torch.no_grad():
            wanted = teacher(x)
        given = student(x)
        soft = F.kl_div(
            F.log_softmax(given / 4.0, dim=1), F.softmax(wanted / 4.0, dim=1), reduction="batchmean"
        )
        loss = 16.0 * soft * 0.7 + F.cross_entropy(given, y) * 0.3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[student, optimizer])


@loop()
def mixup(device: str) -> batchfit.Workload:
    """Pairs mixed by a number of NumPy's, label smoothing, top-k accuracy for the log."""
    model = conv_net(classes=100).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)
    correct, seen = 0, 0

    def step(n: int) -> None:
        nonlocal correct, seen
        x, y = images(n, device, 100)
        lam = float(np.random.beta(0.4, 0.4))
        index = torch.randperm(n, device=device)
        x = lam * x + (1 - lam) * x[index]
        out = model(x)
        loss = lam * F.cross_entropy(out, y, label_smoothing=0.1)
        loss = loss + (1 - lam) * F.cross_entropy(out, y[index], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        _, top = out.topk(5, 1)
        correct += top.eq(y.view(-1, 1)).sum().item()
        seen += y.size(0)

    return batchfit.Workload(step, state=[model, optimizer, scheduler])


class Dropped(nn.Module):
    """Residual blocks of which a Python random number leaves out some."""

    def __init__(self, depth: int = 8, width: int = 48) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, width, 3, 2, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for i, block in enumerate(self.blocks):
            if self.training and random.random() < 0.05 * i:
                continue
            x = x + block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@loop()
def stochastic_depth(device: str) -> batchfit.Workload:
    model = Dropped().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(n: int) -> None:
        x, y = images(n, device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def channels_last(device: str) -> batchfit.Workload:
    model = conv_net(64).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(n: int) -> None:
        x, y = images(n, device)
        x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def video(device: str) -> batchfit.Workload:
    model = nn.Sequential(
        *(nn.Conv3d(3, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d((1, 2, 2))),
        *(nn.Conv3d(16, 32, 3, padding=1), nn.BatchNorm3d(32), nn.ReLU(), nn.AdaptiveAvgPool3d(1)),
        *(nn.Flatten(), nn.Linear(32, 400)),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(n: int) -> None:
        clips = torch.randn(n, 3, 8, 56, 56).to(device)
        labels = torch.randint(0, 400, (n,)).to(device)
        optimizer.zero_grad()
        F.cross_entropy(model(clips), labels).backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


class Graph(nn.Module):
    """Messages along edges, gathered by `index_add` and by `scatter_add`."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.message, self.update = mlp(2 * width, 128, width), nn.GRUCell(width, width)
        self.embed, self.head = nn.Linear(16, width), nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor, graphs: int) -> Tensor:
        h = self.embed(nodes)
        source, target = edges
        for _ in range(3):
            messages = self.message(torch.cat([h[source], h[target]], dim=-1))
            gathered = torch.zeros_like(h).index_add_(0, target, messages)
            h = self.update(gathered, h)
        pooled = torch.zeros(graphs, h.shape[1], device=h.device)
        pooled = pooled.scatter_add(0, graph[:, None].expand_as(h), h)
        out: Tensor = self.head(pooled).squeeze(-1)
        return out


@loop()
def graph_network(device: str) -> batchfit.Workload:
    """Graphs of 100 nodes and 400 edges, put side by side as PyG does."""
    model = Graph().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(n: int) -> None:
        nodes = torch.randn(100 * n, 16).to(device)
        begins = 100 * torch.arange(n).repeat_interleave(400)
        edges = (torch.randint(0, 100, (2, 400 * n)) + begins).to(device)
        graph = torch.arange(n).repeat_interleave(100).to(device)
        loss = F.l1_loss(model(nodes, edges, graph, n), torch.randn(n).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop(uncounted="a product by its input, which is the host's")
def physics(device: str) -> batchfit.Workload:
    """A PINN: second derivatives by the input inside the loss."""
    model = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(n: int) -> None:
        points = torch.rand(n * 64, 2).to(device).requires_grad_(True)
        u = model(points)
        ones = torch.ones_like(u)
        (first,) = torch.autograd.grad(u, points, ones, create_graph=True)
        (second,) = torch.autograd.grad(first[:, :1], points, ones, create_graph=True)
        residual = first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]
        loss = residual.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def triplets(device: str) -> batchfit.Workload:
    """Batch-hard triplets: all distances, the hardest of each row."""
    model = conv_net(16, classes=128).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(n: int) -> None:
        x, y = images(n, device)
        features = F.normalize(model(x), dim=1)
        distance = torch.cdist(features, features)
        same = y[:, None] == y[None, :]
        positive = (distance * same).max(1).values
        negative = (distance + same * 1e6).min(1).values
        loss = F.relu(positive - negative + 0.2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def feature_hooks(device: str) -> batchfit.Workload:
    """Forward hooks that keep features for a perceptual loss."""
    frozen = conv_net(32, norm=False).to(device).eval().requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1)).to(
        device
    )
    optimizer = torch.optim.Adam(model.parameters())
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            kept[name] = out

        return hook

    for name in ("2", "6"):
        frozen.get_submodule(name).register_forward_hook(keep(name))

    def step(n: int) -> None:
        x, _ = images(n, device)
        frozen(x)
        wanted = dict(kept)
        frozen(model(x + 0.1 * torch.randn_like(x)))
        loss = sum(
            (F.mse_loss(kept[name], one) for name, one in wanted.items()), torch.zeros((), device=device)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.clear()

    return batchfit.Workload(step, state=[frozen, model, optimizer])


@loop()
def evaluation(device: str) -> batchfit.Workload:
    """Outputs gathered on the CPU."""
    model = conv_net(64, classes=1000).to(device)

    @torch.no_grad()
    def step(n: int) -> None:
        model.eval()
        predictions, total = [], 0
        for _ in range(2):
            x, y = images(n, device)
            out = model(x)
            predictions.append(out.softmax(-1).cpu())
            total += (out.argmax(1) == y).sum().item()
        torch.cat(predictions)

    return batchfit.Workload(step, state=[model])


@loop()
def embeddings(device: str) -> batchfit.Workload:
    """Inference mode, half precision weights."""
    half = torch.float16 if device == "cuda" else torch.bfloat16
    model = conv_net(64, classes=512).to(device, half).eval()
    store: list[Tensor] = []

    def step(n: int) -> None:
        store.clear()
        with torch.inference_mode():
            x, _ = images(n, device)
            store.append(F.normalize(model(x.to(half)), dim=-1).float().cpu())

    return batchfit.Workload(step, state=[model])
