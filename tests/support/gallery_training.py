"""Ways to train: optimizers, precision, several passes a step, functional transforms, hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from gallery_case import F, Language, conv_net, images, loop, mlp, next_token_loss, tokens
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import batchfit


@loop()
def accumulation(device: str) -> batchfit.Workload:
    """A batch in four parts; what the last part left is alive while the next one runs."""
    model = Language().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(n: int) -> None:
        ids = tokens(n, device)
        optimizer.zero_grad(set_to_none=True)
        for part in ids.chunk(4):
            loss = next_token_loss(model(part), part) / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def scaled_fp16(device: str) -> batchfit.Workload:
    """A scaler with unscaling and clipping; the schedule goes on only if the scaler did not skip the step."""
    model = Language(depth=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    scaler = torch.amp.GradScaler(device)

    def step(n: int) -> None:
        ids = tokens(n, device, 64)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = next_token_loss(model(ids), ids)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale_before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale_before:
            scheduler.step()

    return batchfit.Workload(step, state=[model, optimizer, scheduler, scaler])


@loop()
def scaled_penalty(device: str) -> batchfit.Workload:
    """The gradient penalty of torch's own page on AMP: gradients are divided by the scale that it reads."""
    model = mlp(256, 1024, 1024, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device)

    def step(n: int) -> None:
        x, y = torch.randn(8 * n, 256).to(device), torch.randint(0, 10, (8 * n,)).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inv_scale = 1.0 / scaler.get_scale()
        gradients = [one * inv_scale for one in scaled]
        with torch.autocast(device, dtype=torch.float16):
            norm = sum((one.pow(2).sum() for one in gradients), torch.zeros((), device=device)).sqrt()
            loss = loss + norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return batchfit.Workload(step, state=[model, optimizer, scaler])


@loop()
def plateau(device: str) -> batchfit.Workload:
    """A schedule that looks at the loss. It changes a learning rate and nothing else."""
    model = conv_net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

    def step(n: int) -> None:
        x, y = images(n, device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())

    return batchfit.Workload(step, state=[model, optimizer, scheduler])


@loop()
def plateau_item(device: str) -> batchfit.Workload:
    """The same, by a mean of numbers that `item()` gave."""
    model = conv_net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

    def step(n: int) -> None:
        running = 0.0
        for _ in range(2):
            x, y = images(n, device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            running += loss.item() * x.size(0)
        scheduler.step(running / (2 * n))

    return batchfit.Workload(step, state=[model, optimizer, scheduler])


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + (x @ self.a.T) @ self.b.T * 2.0
        return out


@loop()
def lora(device: str) -> batchfit.Workload:
    """Adapters by hand on frozen bf16 weights."""
    model: Any = Language().requires_grad_(False).to(torch.bfloat16)
    for block in model.blocks:
        block.qkv, block.out = Lora(block.qkv), Lora(block.out)
    model.to(device)
    learned = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-3)

    def step(n: int) -> None:
        ids = tokens(n, device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = next_token_loss(model(ids), ids)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def optimizer_in_backward(device: str) -> batchfit.Workload:
    """Each parameter has an optimizer that steps as soon as its gradient is there (torch's tutorial)."""
    model = mlp(256, 2048, 4096, 256).to(device)
    optimizers = {one: torch.optim.Adam([one], foreach=False) for one in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(update)

    def step(n: int) -> None:
        model(torch.randn(16 * n, 256).to(device)).square().mean().backward()

    return batchfit.Workload(step, state=[model, *optimizers.values()])


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as its most used implementation writes it."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norm = self.grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base.step()
        self.zero_grad()

    def grad_norm(self) -> Tensor:
        shared = self.param_groups[0]["params"][0].device
        norms = [p.grad.norm(p=2).to(shared) for group in self.param_groups for p in group["params"]]
        return torch.norm(torch.stack(norms), p=2)

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


@loop()
def sharpness_aware(device: str) -> batchfit.Workload:
    model = conv_net(48).to(device)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(n: int) -> None:
        x, y = images(n, device)
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def maml(device: str) -> batchfit.Workload:
    """Gradients through an inner step, by functional_call."""
    model = conv_net(16, norm=False).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(n: int) -> None:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for _ in range(2):
            x, y = images(n, device)
            query, wanted = images(n, device)
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(functional_call(model, fast, (x,)), y)
                gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: one - 0.01 * g for (name, one), g in zip(fast.items(), gradients, strict=True)}
            total = total + F.cross_entropy(functional_call(model, fast, (query,)), wanted)
        total.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def private_gradients(device: str) -> batchfit.Workload:
    """DP-SGD: a gradient for each sample by vmap of grad, clipped, noise added."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8192, 64),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    def step(n: int) -> None:
        x, y = images(n, device)
        parameters = {name: one.detach() for name, one in model.named_parameters()}
        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in each.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, one in model.named_parameters():
            summed = torch.einsum("n,n...->...", factor, each[name])
            one.grad = (summed + torch.randn_like(summed)) / n
        optimizer.step()
        optimizer.zero_grad()

    return batchfit.Workload(step, state=[model, optimizer])


class Clamped(torch.autograd.Function):
    """A ReLU6 that saves its input as bits, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward((x > 0) & (x < 6))
        return x.clamp(0, 6)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.two.weight
        scale = weight.abs().amax((1, 2, 3), keepdim=True) / 127
        rounded = weight + ((weight / scale).round() * scale - weight).detach()  # straight through
        x = Clamped.apply(self.one(x))
        x = Clamped.apply(F.conv2d(x, rounded, self.two.bias, padding=1))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@loop()
def own_function(device: str) -> batchfit.Workload:
    model = Quantized().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True)

    def step(n: int) -> None:
        x, y = images(n, device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.value = mlp(128, 512, 512), nn.Linear(512, 16), nn.Linear(512, 1)

    def forward(self, seen: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        x = self.body(seen).relu()
        return torch.distributions.Categorical(logits=self.act(x)), self.value(x).squeeze(-1)


@loop()
def ppo(device: str) -> batchfit.Workload:
    """A rollout into tensors on the device, then epochs of minibatches, as CleanRL writes it."""
    agent = Policy().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

    def step(n: int) -> None:
        steps = 16
        seen = torch.zeros(steps, n, 128, device=device)
        actions, log_probs, rewards, values = (torch.zeros(steps, n, device=device) for _ in range(4))
        now = torch.randn(n, 128).to(device)
        for t in range(steps):
            seen[t] = now
            with torch.no_grad():
                chosen, value = agent(now)
                action = chosen.sample()
            actions[t], log_probs[t], values[t] = action, chosen.log_prob(action), value
            now, rewards[t] = torch.randn(n, 128).to(device), torch.randn(n).to(device)
        with torch.no_grad():
            advantages, last = torch.zeros_like(rewards), torch.zeros(n, device=device)
            for t in reversed(range(steps - 1)):
                last = rewards[t] + 0.99 * values[t + 1] - values[t] + 0.99 * 0.95 * last
                advantages[t] = last
            returns = advantages + values
        b_seen, b_actions, b_log_probs = seen.flatten(0, 1), actions.flatten(), log_probs.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()
        for _ in range(2):
            for index in torch.randperm(steps * n).to(device).chunk(4):
                chosen, value = agent(b_seen[index])
                ratio = (chosen.log_prob(b_actions[index]) - b_log_probs[index]).exp()
                gain = b_advantages[index]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                value_loss = 0.5 * (value - b_returns[index]).pow(2).mean()
                loss = policy_loss - 0.01 * chosen.entropy().mean() + 0.5 * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()

    return batchfit.Workload(step, state=[agent, optimizer])


@loop(uncounted="its buffer, on the CPU, cannot be told from the host's")
def dqn(device: str) -> batchfit.Workload:
    """A replay buffer on the device, a target network that is copied now and then."""
    net = mlp(512, 1024, 1024, 16).to(device)
    target = mlp(512, 1024, 1024, 16).to(device)
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4)
    buffer = torch.randn(10_000, 512, device=device)
    taken = 0

    def step(n: int) -> None:
        nonlocal taken
        index = torch.randint(0, 10_000, (64 * n,), device=device)
        now, later = buffer[index], buffer[(index + 1) % 10_000]
        actions = torch.randint(0, 16, (64 * n, 1), device=device)
        value = net(now).gather(1, actions).squeeze(1)
        with torch.no_grad():
            wanted = 0.99 * target(later).max(1)[0]
        loss = F.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 100)
        optimizer.step()
        taken += 1
        if taken % 2 == 0:
            target.load_state_dict(net.state_dict())

    return batchfit.Workload(step, state=[net, target, optimizer])


@loop()
def master_weights(device: str) -> batchfit.Workload:
    """bf16 weights, and fp32 copies of them that the optimizer works on."""
    model = Language(depth=4).to(device, torch.bfloat16)
    masters = [one.detach().clone().float().requires_grad_(True) for one in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-4)

    def step(n: int) -> None:
        ids = tokens(n, device)
        loss = next_token_loss(model(ids).float(), ids)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for master, one in zip(masters, model.parameters(), strict=True):
            master.grad = one.grad.float() if one.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            for master, one in zip(masters, model.parameters(), strict=True):
                one.copy_(master)

    return batchfit.Workload(step, state=[model, optimizer, *masters])


def optimized(device: str, make: Any, **zeroed: Any) -> batchfit.Workload:
    """Weights of 40 MiB, so that what an optimizer takes is seen."""
    model = mlp(256, 2048, 4096, 256).to(device)
    optimizer = make(model.parameters())
    losses: list[float] = []

    def step(n: int) -> None:
        x = torch.randn(16 * n, 256).to(device)
        optimizer.zero_grad(**zeroed)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def adafactor(device: str) -> batchfit.Workload:
    return optimized(device, torch.optim.Adafactor)


@loop()
def nesterov(device: str) -> batchfit.Workload:
    return optimized(
        device, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    )


@loop()
def fused_adamw(device: str) -> batchfit.Workload:
    return optimized(device, lambda p: torch.optim.AdamW(p, fused=True))


@loop()
def adam_one_by_one(device: str) -> batchfit.Workload:
    return optimized(device, lambda p: torch.optim.Adam(p, foreach=False, amsgrad=True))


@loop()
def zeroed_gradients(device: str) -> batchfit.Workload:
    """Gradients are filled with zeros, not let go."""
    return optimized(device, torch.optim.NAdam, set_to_none=False)


class Lion(torch.optim.Optimizer):
    """Written by hand, one parameter at a time."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                update = average.clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


@loop()
def lion(device: str) -> batchfit.Workload:
    return optimized(device, Lion)


@loop()
def muon(device: str) -> batchfit.Workload:
    """Momentum made orthogonal by products of matrices in bf16."""
    model = mlp(512, 1024, 1024, 512).to(device)
    matrices = [one for one in model.parameters() if one.ndim == 2]
    rest = torch.optim.AdamW([one for one in model.parameters() if one.ndim < 2])
    momentum = [torch.zeros_like(one) for one in matrices]

    def orthogonal(g: Tensor) -> Tensor:
        x = g.bfloat16()
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x

    def step(n: int) -> None:
        x = torch.randn(64 * n, 512).to(device)
        F.mse_loss(model(x), x).backward()
        with torch.no_grad():
            for one, kept in zip(matrices, momentum, strict=True):
                kept.mul_(0.95).add_(one.grad)
                one.add_(orthogonal(kept).to(one.dtype), alpha=-0.02)
        rest.step()
        model.zero_grad()

    return batchfit.Workload(step, state=[model, rest, momentum])


@loop(refused="loss.backward()")
def sparse_gradients(device: str) -> batchfit.Workload:
    """A word2vec of sparse gradients under plain SGD, which adds them as they are."""
    words, around = (nn.Embedding(100_000, 128, sparse=True).to(device) for _ in range(2))
    optimizer = torch.optim.SGD([*words.parameters(), *around.parameters()], lr=0.1)

    def step(n: int) -> None:
        center = torch.randint(0, 100_000, (256 * n,)).to(device)
        context = torch.randint(0, 100_000, (256 * n, 6)).to(device)
        score = torch.bmm(around(context), words(center)[:, :, None]).squeeze(-1)
        loss = -F.logsigmoid(score[:, 0]).mean() - F.logsigmoid(-score[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[words, around, optimizer])


@loop()
def several_losses(device: str) -> batchfit.Workload:
    """Two heads, the graph kept between their backward passes, losses weighed by learned uncertainties."""
    body = conv_net(32, classes=256).to(device)
    heads = nn.ModuleList([nn.Linear(256, 10), nn.Linear(256, 4)]).to(device)
    weights = nn.Parameter(torch.zeros(2, device=device))
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters(), weights])

    def step(n: int) -> None:
        x, y = images(n, device)
        features = body(x)
        optimizer.zero_grad()
        one = F.cross_entropy(heads[0](features), y) * torch.exp(-weights[0]) + weights[0]
        one.backward(retain_graph=True)
        two = F.smooth_l1_loss(heads[1](features), torch.zeros(n, 4, device=device))
        (two * torch.exp(-weights[1]) + weights[1]).backward()
        optimizer.step()

    return batchfit.Workload(step, state=[body, heads, optimizer, weights])


@loop()
def ensemble(device: str) -> batchfit.Workload:
    """Models and optimizers in lists."""
    models = [conv_net(24).to(device) for _ in range(3)]
    optimizers = [torch.optim.Adam(one.parameters()) for one in models]

    def step(n: int) -> None:
        x, y = images(n, device)
        outputs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            out = model(x)
            optimizer.zero_grad()
            F.cross_entropy(out, y).backward()
            optimizer.step()
            outputs.append(out.detach().softmax(-1))
        torch.stack(outputs).mean(0)

    return batchfit.Workload(step, state=[*models, *optimizers])


@loop()
def stacked_ensemble(device: str) -> batchfit.Workload:
    """Many models at once, by vmap over their stacked parameters."""
    members = [mlp(256, 512, 512, 10).to(device) for _ in range(8)]
    parameters, buffers = stack_module_state(members)
    skeleton = copy.deepcopy(members[0]).to("meta")
    optimizer = torch.optim.AdamW(list(parameters.values()))

    def outputs_of(one: Any, two: Any, x: Tensor) -> Any:
        return functional_call(skeleton, (one, two), (x,))

    def step(n: int) -> None:
        x, y = torch.randn(64 * n, 256).to(device), torch.randint(0, 10, (64 * n,)).to(device)
        logits = vmap(outputs_of, in_dims=(0, 0, None))(parameters, buffers, x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.repeat(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[optimizer, parameters])


@loop()
def averaged_model(device: str) -> batchfit.Workload:
    """torch's own exponential mean of weights and buffers."""
    model = conv_net(48).to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(n: int) -> None:
        x, y = images(n, device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)

    return batchfit.Workload(step, state=[model, ema, optimizer])


@loop()
def offloaded(device: str) -> batchfit.Workload:
    """What backward needs waits in the host's memory."""
    model = Language().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(n: int) -> None:
        ids = tokens(n, device)
        optimizer.zero_grad()
        with save_on_cpu(pin_memory=device == "cuda"):
            hidden = model.hidden(ids)
        next_token_loss(model.head(hidden), ids).backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def packed_activations(device: str) -> batchfit.Workload:
    """Saved in half precision by hooks of one's own."""
    model = mlp(128, 1024, 1024, 128).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def pack(x: Tensor) -> Any:
        return x.to(torch.bfloat16) if x.is_floating_point() and x.numel() > 1024 else x

    def unpack(x: Tensor) -> Tensor:
        return x.float() if x.dtype is torch.bfloat16 else x

    def step(n: int) -> None:
        x = torch.randn(64 * n, 128).to(device)
        optimizer.zero_grad()
        with saved_tensors_hooks(pack, unpack):
            loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


class Meter:
    """The running mean that half of all training scripts contain."""

    def __init__(self) -> None:
        self.value: Any = 0
        self.average: Any = 0
        self.sum: Any = 0
        self.count = 0

    def update(self, value: Any, n: int = 1) -> None:
        self.value = value
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count


class Trainer:
    """A loop that is a class, with meters, a log and a gradient norm for it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = conv_net(32).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses, self.accuracy = Meter(), Meter()
        self.history: dict[str, list[Any]] = {"loss": [], "norm": []}
        self.lines: list[str] = []
        self.last_output: Tensor | None = None

    def step(self, n: int) -> None:
        x, y = images(n, self.device)
        out = self.model(x)
        loss = F.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        norm = sum(p.grad.norm(2).item() ** 2 for p in self.model.parameters() if p.grad is not None) ** 0.5
        self.optimizer.step()
        self.losses.update(loss.item(), n)
        self.accuracy.update((out.argmax(1) == y).float().mean().item() * 100.0, n)
        self.history["loss"].append(loss.item())
        self.history["norm"].append(norm)
        self.last_output = out
        self.lines.append(f"loss {self.losses.average:.4f} acc {self.accuracy.average:.1f} norm {norm:.2f}")


@loop()
def trainer_class(device: str) -> batchfit.Workload:
    trainer = Trainer(device)
    return batchfit.Workload(trainer.step, state=[trainer.model, trainer.optimizer])
