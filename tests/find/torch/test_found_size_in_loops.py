"""The size that is found holds for loops as people write them: each is a plain loop, run for 30 steps at it.

python tests/find/torch/test_found_size_in_loops.py     # the table: each loop at the size and at 1.05 times
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from examples import some_slow
from torch import nn

import batchfit

BUDGET = "6MiB"
STEPS = 30
WIDTH, CLASSES = 64, 512

Loop = Callable[[int], None]
Made = tuple[Any, Loop]  # what is given to find, and the loop as somebody wrote it

criterion = nn.CrossEntropyLoss()


def make_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, WIDTH), torch.randint(0, CLASSES, (n,))


def loader(n: int, steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(steps):
        yield make_batch(n)


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = criterion(model(batch[0]), batch[1])
    return loss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def parts() -> tuple[nn.Sequential, torch.optim.AdamW]:
    model = network()
    return model, torch.optim.AdamW(model.parameters())


# --- the loops ----------------------------------------------------------------------------------


def zero_grad_after() -> Made:
    model, optimizer = parts()

    def loop(n: int) -> None:
        for x, y in loader(n):
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return batchfit.training(model, optimizer, loss_fn, make_batch), loop


def zero_grad_before() -> Made:
    model, optimizer = parts()

    def loop(n: int) -> None:
        for batch in loader(n):
            inputs, labels = batch
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()

    return batchfit.training(model, optimizer, loss_fn, make_batch), loop


def zero_grad_between() -> Made:
    """After the forward pass, which therefore runs beside the last step's gradients."""
    model, optimizer = parts()

    def loop(n: int) -> None:
        for x, y in loader(n):
            pred = model(x)
            loss = criterion(pred, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return batchfit.training(model, optimizer, loss_fn, make_batch, accumulate=2), loop


def zero_grad_in_place() -> Made:
    model, optimizer = parts()

    def loop(n: int) -> None:
        for x, y in loader(n):
            optimizer.zero_grad(set_to_none=False)
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()

    return batchfit.training(model, optimizer, loss_fn, make_batch, accumulate=2), loop


def accumulating(passes: int) -> Made:
    model, optimizer = parts()

    def loop(n: int) -> None:
        for number, (x, y) in enumerate(loader(n, STEPS * passes)):
            out = model(x)
            loss = criterion(out, y) / passes
            loss.backward()
            if (number + 1) % passes == 0:
                optimizer.step()
                optimizer.zero_grad()

    return batchfit.training(model, optimizer, loss_fn, make_batch, accumulate=passes), loop


def moving_average() -> Made:
    model, optimizer = parts()
    ema = copy.deepcopy(model).requires_grad_(False)
    last: dict[str, Any] = {}

    def update() -> None:
        with torch.no_grad():
            for ours, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.01)

    def step(n: int) -> None:
        last["batch"] = make_batch(n)
        optimizer.zero_grad()
        last["out"] = model(last["batch"][0])
        last["loss"] = criterion(last["out"], last["batch"][1])
        last["loss"].backward()
        optimizer.step()
        update()

    def loop(n: int) -> None:
        for x, y in loader(n):
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
            update()

    return batchfit.Workload(step, state=[model, optimizer, ema, last]), loop


def two_optimizers() -> Made:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh())
    judge = nn.Sequential(nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
    for_g = torch.optim.Adam(generator.parameters())
    for_d = torch.optim.Adam(judge.parameters())
    bce = nn.functional.binary_cross_entropy_with_logits
    last: dict[str, Any] = {}

    def step(n: int) -> None:
        last["real"] = torch.randn(n, 256)
        for_d.zero_grad()
        last["fake"] = generator(torch.randn(n, 32))
        last["on_real"], last["on_fake"] = judge(last["real"]), judge(last["fake"].detach())
        ones, zeros = torch.ones(n, 1), torch.zeros(n, 1)
        last["loss_d"] = bce(last["on_real"], ones) + bce(last["on_fake"], zeros)
        last["loss_d"].backward()
        for_d.step()
        for_g.zero_grad()
        last["judged"] = judge(last["fake"])
        last["loss_g"] = bce(last["judged"], ones)
        last["loss_g"].backward()
        for_g.step()

    def loop(n: int) -> None:
        ones, zeros = torch.ones(n, 1), torch.zeros(n, 1)
        for _ in range(STEPS):
            real = torch.randn(n, 256)
            for_d.zero_grad()
            fake = generator(torch.randn(n, 32))
            on_real = judge(real)
            on_fake = judge(fake.detach())
            loss_d = bce(on_real, ones) + bce(on_fake, zeros)
            loss_d.backward()
            for_d.step()
            for_g.zero_grad()
            judged = judge(fake)
            loss_g = bce(judged, ones)
            loss_g.backward()
            for_g.step()

    return batchfit.Workload(step, state=[generator, judge, for_g, for_d, last]), loop


def mixed_precision() -> Made:
    model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu")

    def loop(n: int) -> None:
        for x, y in loader(n):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
                loss = criterion(out, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return batchfit.training(
        model, optimizer, loss_fn, make_batch, autocast=torch.bfloat16, scaler=scaler, clip_norm=1.0
    ), loop


def evaluating_between() -> Made:
    model, optimizer = parts()

    def evaluate(n: int) -> int:
        model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in loader(n, 3):
                pred = model(x)
                correct += int((pred.argmax(1) == y).sum())
        return correct

    def loop(n: int) -> None:
        for _ in range(3):
            model.train()
            for x, y in loader(n, STEPS // 3):
                out = model(x)
                loss = criterion(out, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            evaluate(n)

    return batchfit.training(model, optimizer, loss_fn, make_batch), loop


class Output(dict[str, Any]):
    """As transformers' models return it: the loss beside the logits."""


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.network(x)
        return Output(loss=criterion(logits, labels), logits=logits)


def loss_in_the_outputs() -> Made:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loop(n: int) -> None:
        total = 0.0
        for x, y in loader(n):
            outputs = model(x, labels=y)
            loss = outputs["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()

    return batchfit.training(model, optimizer, lambda m, b: m(b[0], labels=b[1])["loss"], make_batch), loop


def inferring() -> Made:
    model = network().eval()

    def loop(n: int) -> None:
        with torch.inference_mode():
            for _ in range(STEPS):  # labels would be bytes that the workload does not have
                x = torch.randn(n, WIDTH)
                out = model(x)
        assert len(out) == n

    return batchfit.inference(model, lambda n: torch.randn(n, WIDTH)), loop


class Decoder(nn.Module):
    """A cache that grows by a token in each pass, and the scores of all passes in what it returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def generate(
        self, ids: torch.Tensor, *, max_new_tokens: int, min_new_tokens: int | None = None
    ) -> dict[str, Any]:
        cache, scores = self.embed(ids), []
        for _ in range(max_new_tokens):
            scores.append(self.head(cache.mean(1)))
            ids = torch.cat([ids, scores[-1].argmax(-1, keepdim=True)], 1)
            cache = torch.cat([cache, self.embed(ids[:, -1:])], 1)
        return {"sequences": ids, "scores": scores, "cache": cache}


def generating() -> Made:
    model = Decoder().eval()

    def prompts(n: int) -> torch.Tensor:
        return torch.randint(0, 64, (n, 8))

    def loop(n: int) -> None:
        for _ in range(STEPS):
            ids = prompts(n)
            with torch.inference_mode():
                out = model.generate(ids, max_new_tokens=16)
        assert out["sequences"].shape == (n, 24)

    return batchfit.generation(model, prompts, max_new_tokens=16), loop


LOOPS: dict[str, Callable[[], Made]] = {
    "zero_grad after the step": zero_grad_after,
    "zero_grad before the forward pass": zero_grad_before,
    "zero_grad after the forward pass": zero_grad_between,
    "zero_grad(set_to_none=False)": zero_grad_in_place,
    "accumulation of 2": lambda: accumulating(2),
    "accumulation of 8": lambda: accumulating(8),
    "EMA": moving_average,
    "GAN, two optimizers": two_optimizers,
    "AMP with a scaler and clipping": mixed_precision,
    "evaluation between epochs": evaluating_between,
    "loss in the model's outputs": loss_in_the_outputs,
    "inference": inferring,
    "generation": generating,
}


def survives(make: Callable[[], Made], size: int, *, budget: str = BUDGET) -> bool:
    """Whether the loop runs for 30 steps of `size` samples, from the beginning."""
    _, loop = make()
    gc.collect()
    with batchfit.virtual_memory(budget), contextlib.suppress(torch.OutOfMemoryError):
        loop(size)
        return True
    return False


# Like others, but for where the gradients go; what is left has each kind of loop once.
SLOW = ("zero_grad before the forward pass", "zero_grad(set_to_none=False)", "accumulation of 8")


@pytest.mark.parametrize("name", some_slow(LOOPS, is_slow=lambda name: name in SLOW))
def test_a_loop_runs_at_the_size_that_was_found(name: str) -> None:
    # All of the first program is gone when the second begins: what is alive counts.
    fit = batchfit.find_batch_size(LOOPS[name]()[0], budget=BUDGET)
    assert survives(LOOPS[name], fit.batch_size)
    # And it is no timid answer: a tenth more does not run. (Gradients that are gone before the backward pass
    # need less room than accumulated ones.)
    more = 1.3 if name == "zero_grad after the forward pass" else 1.1
    assert not survives(LOOPS[name], round(more * fit.batch_size))


def main() -> None:
    print("| loop | found | 30 steps | 1.05 times | 30 steps |", "|---" * 5 + "|", sep="\n")
    for name, make in LOOPS.items():
        size = batchfit.find_batch_size(make()[0], budget=BUDGET).batch_size
        more = round(1.05 * size)
        ran = ["survives" if survives(make, one) else "OOM" for one in (size, more)]
        print(f"| {name} | {size} | {ran[0]} | {more} | {ran[1]} |", flush=True)


if __name__ == "__main__":
    main()
