"""The options of `adapt`, and the settings of a Trainer that contradict them.

Rules: arguments are checked when they are given, settings of the trainer before it trains; an error names
both settings and says what to do.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, final

import torch

import batchfit
from batchfit.errors import BatchfitError
from batchfit.integrations.transformers.rl.checks import check_generating, generates
from batchfit.integrations.transformers.sharding import check_sharding
from batchfit.integrations.trl.trainers import check_trl


@final
@dataclass(frozen=True, kw_only=True)
class Options:
    """How batchfit works inside a Trainer.

    Args:
        find: search for the largest microbatch before training. Without it sizes are learned while training,
            from the full batch downwards.
        budget: bytes that the program may use ("20GiB"); default: all that is free.
        schedule: a batch-size schedule (a config, its text "0:256 1000:512", a mapping or a file): the batch
            over all ranks, from `per_device_train_batch_size * gradient_accumulation_steps * ranks` on.
        lr: how the learning rate follows a schedule: "none", "linear", "sqrt", "seesaw", "power(0.6)".
        tokens_per_sample: for schedules in tokens.
        weight: what a microbatch counts in the batch's mean, where the loss is a mean of your own:
            `weight(micro) -> number`. Default: the labels that count, or else samples.
        lengths: "attention_mask", say: samples of about one length share a microbatch and are trimmed to it.
        sync: under DDP, "safe" survives an out-of-memory on any rank; "overlap" keeps DDP's overlap.
        compared: what to do with a loss that is neither a mean nor a sum over samples (in-batch negatives)
            where a batch has to be cut: "error", "warn" once and cut it, or "ignore" without a check. With
            "error", losses of sentence-transformers that compare samples are those of the whole batch.
        state: what else a step changes (a list of metrics), to be restored after the search.
        record_oom: a file for the memory snapshot of an OOM that ends the training, for `batchfit why`; off
            by default.
        stream_samples: how many samples of an iterable dataset are read for the search, which runs the
            longest of them; the dataset is iterated again for training.
        search: more keywords for `batchfit.find_batch_size`. `{"soak_steps": 25}` makes the size found
            survive 25 steps (stability check); by default it need not, since a later OOM costs one retry.
    """

    find: bool = True
    budget: int | str | None = None
    schedule: Any = None
    lr: str | Sequence[str] | None = None
    tokens_per_sample: int | None = None
    weight: Callable[[Any], Any] | None = None
    lengths: str | None = None
    sync: Literal["safe", "overlap"] = "safe"
    compared: Literal["error", "warn", "ignore"] = "error"
    state: Sequence[object] = ()
    record_oom: str | Path | None = None
    stream_samples: int = 1024
    search: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.find) is not bool:
            raise TypeError(f"find must be True or False, not {self.find!r}")
        if self.weight is not None and not callable(self.weight):
            raise TypeError(f"weight must be a callable weight(micro) or None, not {self.weight!r}")
        if self.record_oom is not None and not isinstance(self.record_oom, str | Path):
            raise TypeError(f"record_oom must be a file or None, not {self.record_oom!r}")
        if type(self.stream_samples) is not int or self.stream_samples < 1:
            raise ValueError(f"stream_samples must be a positive integer, not {self.stream_samples!r}")
        if self.sync not in ("safe", "overlap"):
            raise ValueError(f"sync must be one of 'safe', 'overlap', not {self.sync!r}")
        if not isinstance(self.search, Mapping):
            raise TypeError(f"search must be keywords of find_batch_size, not {self.search!r}")
        known = list(inspect.signature(batchfit.find_batch_size).parameters)[1:]
        for name in self.search:
            if name not in known:
                raise ValueError(f"search must hold keywords of find_batch_size, not {name!r}: {known}")
        if isinstance(self.state, str) or not isinstance(self.state, Sequence):
            raise TypeError(f"state must be a list of what a step changes, not {self.state!r:.80}")
        if self.lr is not None and self.schedule is None:
            raise ValueError(f"lr must be None without a schedule that it follows, not {self.lr!r}")
        self._check_values()
        # Frozen: the schedule is checked here, once, and kept as what it means.
        config = batchfit.load_schedule(self.schedule, name="schedule")
        if isinstance(config, batchfit.NoiseBatchSizeConfig):
            raise ValueError(
                "schedule must be known ahead inside a Trainer, which fixes its number of steps before it "
                "begins, not a NoiseBatchSizeConfig: use it with a loop of your own"
            )
        object.__setattr__(self, "schedule", config)

    def _check_values(self) -> None:
        """Let the objects that will get the values check them now, not when the trainer trains."""
        try:
            batchfit.Microbatcher(torch.nn.Identity(), budget=self.budget)
        except ValueError as error:
            if "must not exceed" not in str(error):  # the memory of a device, which is not known here
                raise
        batchfit.Microbatcher(torch.nn.Identity(), lengths=self.lengths, compared=self.compared)
        batchfit.Workload(lambda batch_size: None, state=list(self.state))
        rules: Any = [self.lr] if self.lr is None or isinstance(self.lr, str) else self.lr
        for rule in rules:
            optimizer = None if rule is None else torch.optim.SGD([torch.zeros(1)], lr=1.0)
            batchfit.BatchSizeScheduler(
                None,
                1,
                lr=rule,
                optimizer=optimizer,
                world_size=1,
                tokens_per_sample=self.tokens_per_sample,
            )


def check_names(given: Iterable[str]) -> None:
    """Refuse an unknown option with a message for users of `adapt`, which takes options as keywords."""
    known = [one.name for one in fields(Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"adapt() has no option {name!r}: {hint}")


def check_trainer(trainer: Any, options: Options) -> None:
    """Refuse settings of the trainer that contradict ours, before anything runs."""
    args = trainer.args
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size must be False with batchfit.integrations.transformers, not True: both "
            "would catch the same out-of-memory, and theirs begins again at step 0 with trained weights"
        )
    if args.n_gpu > 1:
        raise BatchfitError(
            f"Trainer would use DataParallel over {args.n_gpu} GPUs, each with a memory of its own. Start "
            "one process per GPU (torchrun --nproc-per-node N), or set CUDA_VISIBLE_DEVICES"
        )
    check_sharding(trainer)
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and getattr(parallel, "non_data_parallel_size", 1) > 1:
        raise BatchfitError(
            "tensor, context and sequence parallelism have collectives in forward: a rank that retries would "
            "wait for the others. Use data parallelism (DDP or FSDP2)"
        )
    if "backward" in vars(trainer.accelerator):
        raise BatchfitError(
            "accelerator.backward was replaced, and batchfit calls backward itself, so that a batch can be "
            "retried: yours would not be called. Put what it does into compute_loss, or into hooks of "
            "parameters (Tensor.register_post_accumulate_grad_hook)"
        )
    check_generating(trainer, options)
    if not generates(type(trainer)):
        check_trl(trainer, weight=options.weight, lengths=options.lengths)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise BatchfitError(
            f"optim={optimizer!r} steps inside backward, on a part of the batch. Use another optimizer"
        )
    if options.schedule is not None and getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy must not be 'batch_rebalance' with schedule=...: it makes batches "
            "of one size, and the schedule changes it"
        )
