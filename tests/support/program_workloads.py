"""The steps of the programs in tests/program/programs as workloads. What their loops' variables hold is held.

Each is run in the program's own folder, so that its modules are found.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from batchfit import Workload

sys.path.insert(0, ".")


class Kept(dict[str, Any]):
    """The variables of the program's loop."""

    def begin(self, size: int) -> None:
        """A step begins: another trial is another start of the program, and has none of the one before."""
        if self.get("size") != size:
            self.clear()
            self["size"] = size


def nanogpt() -> Workload:
    import numpy as np

    model_of = importlib.import_module("model")
    model = model_of.GPT(
        model_of.GPTConfig(
            vocab_size=256, n_layer=2, n_head=2, n_embd=64, block_size=64, bias=False, dropout=0.1
        )
    )
    optimizer = model.configure_optimizers(1e-1, 6e-4, (0.9, 0.95), "cpu")
    kept = Kept()

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap("data/chars/train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - 64, (size,))
        x = torch.stack([torch.from_numpy(data[i : i + 64].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 65].astype(np.int64)) for i in starts])
        return x, y

    def step(size: int) -> None:
        kept.begin(size)
        if "X" not in kept:
            kept["X"], kept["Y"] = batch(size)
        kept["logits"], kept["loss"] = model(kept["X"], kept["Y"])
        kept["X"], kept["Y"] = batch(size)
        kept["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Workload(step, state=[model, optimizer])


def _classifying(model: nn.Module, optimizer: Any, images: Any, *, zero_first: bool) -> Workload:
    kept = Kept()
    criterion = nn.CrossEntropyLoss()

    def step(size: int) -> None:
        kept.begin(size)
        kept["images"], kept["labels"] = images(size), torch.zeros(size, dtype=torch.long)
        if zero_first:
            optimizer.zero_grad()
        kept["outputs"] = model(kept["images"])
        kept["loss"] = criterion(kept["outputs"], kept["labels"])
        if not zero_first:
            optimizer.zero_grad()
        kept["loss"].backward()
        optimizer.step()

    return Workload(step, state=[model, optimizer])


def _stacked(shape: tuple[int, ...]) -> Any:
    """Batches as a loader collates them: the samples live beside the batch for a moment."""
    return lambda size: torch.stack([torch.zeros(shape) for _ in range(size)])


def dotted() -> Workload:
    train = importlib.import_module("train")
    model = train.build(train.compose("config.yaml", []))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return _classifying(model, optimizer, _stacked((3, 32, 32)), zero_first=True)


def hydrated() -> Workload:
    layers: list[nn.Module] = [nn.Linear(64, 256)]
    for _ in range(3):
        layers += [nn.SiLU(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers, nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    kept = Kept()

    def step(size: int) -> None:
        kept.begin(size)
        x = kept["x"] = torch.randn(size, 64)
        kept["loss"] = (model(x).squeeze(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        kept["loss"].backward()
        optimizer.step()

    return Workload(step, state=[model, optimizer])


def run_clm() -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    return _trainer_step(model, 64)


def _trainer_step(model: Any, length: int, loss_of: Callable[[Kept], torch.Tensor] | None = None) -> Workload:
    """What transformers.Trainer does in a step; the loss is the model's own, or that of `loss_of`."""
    optimizer = torch.optim.AdamW(model.parameters(), 5e-5)
    kept = Kept()

    def step(size: int) -> None:
        kept.begin(size)
        ids = torch.zeros((size, length), dtype=torch.long)
        kept["inputs"] = {"input_ids": ids, "labels": ids.clone()}
        loss = loss_of(kept["inputs"]) if loss_of else model(**kept["inputs"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    model.train()
    return Workload(step, state=[model, optimizer])


def lit() -> Workload:
    module = importlib.import_module("lit").LitAutoEncoder()
    optimizer = module.configure_optimizers()
    kept = Kept()

    def closure() -> torch.Tensor:
        # Lightning divides by its accumulation. What mse_loss returns has a storage as large as its input,
        # and is given up here.
        loss = module.loss_of(kept["batch"]) / 1
        optimizer.zero_grad()
        loss.backward()
        return loss.detach().clone()

    def step(size: int) -> None:
        kept.begin(size)
        kept["batch"] = (_stacked((1, 28, 28))(size), torch.zeros(size, dtype=torch.long))
        optimizer.step(closure)

    return Workload(step, state=[module, optimizer])


lit_cli = lit  # the same module and data, started by LightningCLI


def accelerated() -> Workload:
    model = importlib.import_module("accelerated").Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-5)
    kept = Kept()

    def step(size: int) -> None:
        kept.begin(size)
        ids = torch.stack([torch.zeros(48, dtype=torch.long) for _ in range(size)])
        # prepare()'s loader fetches the next batch before it hands one out.
        kept["batch"], kept["next"] = kept.get("next", ids), ids
        kept["loss"], _ = model(ids, torch.zeros(size, dtype=torch.long))
        kept["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return Workload(step, state=[model, optimizer])


def sft() -> Workload:
    """What TRL's SFTTrainer does in a step: its fused head's tile is 32,768 columns wide on a CPU."""
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained("model")
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))

    def loss_of(inputs: Kept) -> torch.Tensor:
        outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        return -outputs.log_probs.sum() / outputs.label_mask.sum()

    return _trainer_step(model, 64, loss_of)


def ddp() -> Workload:
    """One of the two ranks; the group is of one process, so that the reducer has its buckets."""
    import socket

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    program = importlib.import_module("ddp")
    plain = program.build_model()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(2000, 64), torch.randint(0, 8, (2000,))
    kept = Kept()

    def step(size: int) -> None:
        kept.begin(size)
        kept["x"], kept["y"] = x[:size].clone(), y[:size].clone()
        kept["loss"] = nn.functional.cross_entropy(model(kept["x"]), kept["y"])
        optimizer.zero_grad()
        kept["loss"].backward()
        optimizer.step()

    return Workload(step, state=[model, optimizer])


def gan() -> Workload:
    program = importlib.import_module("gan")
    g, d = program.Generator(32, 16), program.Discriminator(16)
    optimizer_d, optimizer_g = (torch.optim.Adam(one.parameters(), lr=2e-4) for one in (d, g))
    criterion = nn.BCELoss()
    kept = Kept()

    def step(size: int) -> None:
        kept.begin(size)
        kept["real"], kept["label"] = _stacked((3, 32, 32))(size), torch.zeros(size, dtype=torch.long)
        program.train_one(g, d, optimizer_g, optimizer_d, criterion, kept["real"], 32)

    return Workload(step, state=[g, d, optimizer_g, optimizer_d])


def evaluate() -> Workload:
    model = importlib.import_module("evaluate").build_model().eval()
    kept = Kept()

    def step(size: int) -> None:
        kept.begin(size)
        with torch.inference_mode():
            kept["images"] = _stacked((3, 32, 32))(size)
            kept["labels"] = torch.zeros(size, dtype=torch.long)
            kept["logits"] = model(kept["images"])
            nn.functional.cross_entropy(kept["logits"], kept["labels"], reduction="sum")

    return Workload(step, state=[model])


def generate() -> Workload:
    program = importlib.import_module("generate")
    model = program.load_model()
    kept = Kept()

    def step(size: int) -> None:
        kept.begin(size)
        with torch.no_grad():
            kept["outputs"] = model.generate(
                program.prompts(size), max_new_tokens=48, do_sample=False, pad_token_id=0
            )

    return Workload(step, state=[model])


def catches_oom() -> Workload:
    program = importlib.import_module("catches_oom")
    trainer = program.Trainer(SimpleNamespace())
    kept = Kept()

    def step(size: int) -> None:
        kept.begin(size)
        kept["source"] = torch.zeros((size, 32), dtype=torch.long)
        kept["target"] = torch.zeros((size, 32), dtype=torch.long)
        trainer.model.train()
        trainer.optimizer.zero_grad()
        logits = trainer.model(kept["source"], kept["target"])
        loss = trainer.criterion(logits.flatten(0, 1), kept["target"].flatten())
        loss.backward()
        trainer.optimizer.step()

    return Workload(step, state=[trainer.model, trainer.optimizer])


def loader_workers() -> Workload:
    model = importlib.import_module("loader_workers").build_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    def images(size):
        return torch.zeros((size, 3, 32, 32))  # collated in the worker

    return _classifying(model, optimizer, images, zero_first=False)
