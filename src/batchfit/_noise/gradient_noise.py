"""GradientNoise: the gradient noise scale of a training run, measured while it trains.

Rules
- Gradients are measured as the loss makes them: unscaled, and before they are clipped. Cheap mode takes two
  norms per step, of the first microbatch's gradient and of the whole one; no copy and no hook is needed.
- Nothing forces a CUDA synchronization before `reading()`.
- A pass that an OOM retry repeats leaves nothing here: only the pass that stayed counts.
- An estimate comes with how sure it is (`_noise.pure.estimate`); where there is nothing to compare, that is
  said.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn

from batchfit._engine.device.tensors import leaves_of
from batchfit._noise.gradient_norms import Later, Parts, RankNorms, together
from batchfit._noise.pure.estimate import MIN_STEPS, NoiseReading, NoiseState, joined_reading, observe

if TYPE_CHECKING:
    from batchfit._engine.sizing.interface import PassWatch

log = logging.getLogger("batchfit")

Mode = Literal["cheap", "exact"]


@final
class GradientNoise:
    """The gradient noise scale (B_simple, McCandlish et al. 2018) of a model in training.

        noise = GradientNoise(model)
        mb = Microbatcher(model, microbatch_size=8, noise=noise)    # nothing else to write
        ...
        print(noise.reading())      # noise scale 412 samples (95 %: 371 to 460) from 200 steps

    In a loop of one's own:

        for micro in micros:
            (loss_fn(model, micro) * len(micro) / len(batch)).backward()
            noise.microbatch(len(micro))
        noise.total()               # before clipping, after `scaler.unscale_`

    A batch needs two parts that can be compared: two microbatches or more, or two ranks (`watch_ranks`).
    Microbatches must be random parts of the batch. Where they are sorted (by length, as `lengths=` does),
    what long and short samples do differently counts as noise too, and the scale comes out larger.

    Args:
        models: the modules or parameters whose gradients count.
        decay_samples: the averages' memory: after this many samples a step counts 1/e of what it did.
            Default: 200 times the samples of the first step.
        mode: "cheap" or "exact". Exact takes the norm of every microbatch, for which it keeps a copy of the
            gradients on the device and runs over them three times a microbatch: the standard error of the
            signal is up to a quarter smaller.
        min_steps: steps before there is an estimate.
    """

    def __init__(
        self,
        *models: nn.Module | torch.Tensor,
        decay_samples: float | None = None,
        mode: Mode = "cheap",
        min_steps: int = MIN_STEPS,
    ) -> None:
        if not models:
            raise TypeError("models must be at least one module or parameter, not none")
        for model in models:
            if not isinstance(model, nn.Module | torch.Tensor):
                raise TypeError(f"models must be modules or parameters, not {model!r:.80}")
        if mode not in ("cheap", "exact"):
            raise ValueError(f"mode must be 'cheap' or 'exact', not {mode!r}")
        _check_count("min_steps", min_steps, 2)
        if decay_samples is not None and not _is_number(decay_samples):
            raise TypeError(f"decay_samples must be a number, not {decay_samples!r}")
        self._models = models
        self._min_steps = min_steps
        self._state = NoiseState(decay_samples=decay_samples)
        self._parts = Parts(copies=mode == "exact")
        self._later = Later()
        self._ranks: RankNorms | None = None
        self._open: list[tuple[int, float | None]] = []  # samples and shares of the step that runs
        self._watched: Watching | None = None
        self._warned_of_order = False

    def microbatch(self, samples: int, *, share: float | None = None, scaler: Any = None) -> None:
        """Call after the backward of each microbatch; in cheap mode all but the first cost nothing.

        Gradients must have been cleared before the first.

        Args:
            samples: samples of the microbatch.
            share: the factor that its mean loss had in the backward, where that is not its part of the
                batch's samples (tokens: the estimate is then for the token mean, in samples of average
                length). With `watch_ranks` it is the factor of this rank's loss, such as `loader.weight`, and
                1 if it is not given.
            scaler: the `GradScaler` whose `scale` was applied.

        Raises:
            ValueError: `share` is no number above 0, or given for some microbatches of a step only.
        """
        _check_count("samples", samples, 1)
        if share is not None and not (_is_number(share) and math.isfinite(share) and share > 0):
            raise ValueError(f"share must be a number above 0, not {share!r}")
        if self._open and (share is None) != (self._open[0][1] is None):
            raise ValueError(f"share must be given for all microbatches of a step or for none, not {share!r}")
        if not self._open:
            self._parts.begin(self._leaves())
        self._open.append((samples, share))
        if self._ranks is None:
            self._parts.measure(scaler)
        else:  # what is in `.grad` is of all ranks by now
            self._ranks.measure(scaler)

    def total(self, *, norm: torch.Tensor | float | None = None, scaler: Any = None) -> None:
        """Call when the whole gradient is there, before it is clipped.

        With `watch_ranks` only one call of `microbatch` is needed, with the samples of this rank's batch.

        Args:
            norm: the norm that `clip_grad_norm_` returned, to save computing it twice.
            scaler: the `GradScaler`, only where the gradients are still scaled.

        Raises:
            RuntimeError: the step had no `microbatch(samples)`.
        """
        if not self._open:
            raise RuntimeError(
                "total() ends a step that had no microbatch(samples): call that after each backward. "
                "With Microbatcher(noise=...) neither is needed"
            )
        given, self._open = self._open, []
        sizes = [samples for samples, _ in given]
        whole = self._parts.whole(scaler, norm)
        if self._ranks is not None:
            self._observe_ranks(given, whole)
            return
        shares = [share for _, share in given if share is not None]
        factors = shares or [size / sum(sizes) for size in sizes]
        self._send(sizes, factors, together(self._parts.take(), whole))

    def discard(self) -> None:
        """Forget the step that runs: its gradients are not used."""
        self._open = []
        self._parts.take()
        if self._ranks is not None:
            self._ranks.take()

    def watch_ranks(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Compare the gradients of the ranks of a DDP model, which needs no microbatches.

            noise.watch_ranks(ddp)
            ...
            loss.backward()
            noise.microbatch(len(batch))        # of this rank
            noise.total()

        Registers a communication hook, of which DDP allows one, that takes the norm of each bucket before it
        is reduced. Costs one small all-reduce per step. Readings are equal on all ranks.

        Args:
            model: the model under DDP.

        Raises:
            TypeError: `model` is no DistributedDataParallel.
        """
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise TypeError(f"model must be a DistributedDataParallel, not {type(model).__name__}")
        self._ranks = RankNorms(model)

    def reading(self, *, group: Any = None) -> NoiseReading:
        """What is known now; forces a synchronization.

        With `group` (`torch.distributed.group.WORLD`), all ranks of it call this, and all get one reading
        from what each has seen of its own batches. With `watch_ranks` that is so anyway.

        Args:
            group: a process group, all ranks of which call this: one reading from what each has seen of its
                own batches. With `watch_ranks` that is so anyway.

        Returns:
            A `NoiseReading`, which has no `scale` where there is no estimate yet.

        Raises:
            ValueError: `group` was given with `watch_ranks`.
        """
        self._later.wait()
        if group is None:
            return self._state.reading(min_steps=self._min_steps)
        if self._ranks is not None:
            raise ValueError("group must be None with watch_ranks, whose readings are of all ranks already")
        import torch.distributed as dist

        states: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(states, self._state.to_dict(), group=group)
        return joined_reading(map(NoiseState.from_dict, states), min_steps=self._min_steps)

    def state_dict(self) -> dict[str, Any]:
        """The averages, as plain data; forces a synchronization."""
        self._later.wait()
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another run's averages.

        Args:
            state: what `state_dict()` returned.
        """
        loaded = NoiseState.from_dict(state)
        self._later.forget()
        self._state = loaded

    # ---- what Microbatcher calls

    def watching(
        self, inner: PassWatch, sizes: Sequence[int], factors: Sequence[float], scaler: Any
    ) -> Watching:
        """What watches one pass over a batch, in place of what watched the pass before.

        Args:
            inner: the watch of the pass itself.
            sizes: samples of each microbatch.
            factors: factor of each microbatch's mean loss.
            scaler: the `GradScaler`, or None.
        """
        self._watched = Watching(self, inner, sizes, factors, scaler)
        return self._watched

    def keep(self, *, is_sorted: bool) -> None:
        """Count the pass that was watched last.

        Args:
            is_sorted: microbatches were sorted by length.
        """
        seen, self._watched = self._watched, None
        if seen is None:
            return
        if is_sorted and not self._warned_of_order:
            self._warned_of_order = True
            log.warning(
                "microbatches are sorted by length: what long and short samples do differently counts as "
                "noise too, so the noise scale comes out too large"
            )
        if seen.values is not None:
            self._send(seen.sizes, seen.factors, seen.values)

    def _leaves(self) -> list[torch.Tensor]:
        return leaves_of(self._models)[0]

    def _send(self, sizes: Sequence[int], factors: Sequence[float], values: torch.Tensor) -> None:
        """Send a step's squared norms to the host, the whole one last, each with its gradient's factor."""
        if len(sizes) < 2:
            self._state = self._state.with_single()
            return
        full = math.fsum(factors)

        def use(numbers: list[float]) -> None:
            means = [number / factor**2 for number, factor in zip(numbers[:-1], factors, strict=False)]
            self._observe(sizes, means, numbers[-1] / full**2, factors)

        self._later.send(values, use)

    def _observe_ranks(self, given: Sequence[tuple[int, float | None]], whole: torch.Tensor) -> None:
        assert self._ranks is not None
        count = self._ranks.world_size
        if count < 2:
            self._state = self._state.with_single()
            self._ranks.take()
            return
        samples = float(sum(size for size, _ in given))
        shares = [share for _, share in given if share is not None]
        factor = math.fsum(shares) if shares else 1.0
        if len(shares) > 1:  # as many samples of equal weight would be as precise
            samples = factor**2 / math.fsum(share**2 / size for size, share in given if share is not None)
        gathered = self._ranks.gathered(samples, factor, whole.device)

        def use(numbers: list[float]) -> None:
            sizes, factors, norms = (numbers[row * count : (row + 1) * count] for row in range(3))
            means = [norm / factor**2 for norm, factor in zip(norms, factors, strict=True)]
            # DDP averages ranks, whatever they hold.
            self._observe(sizes, means, numbers[-1] / (math.fsum(factors) / count) ** 2, factors)

        self._later.send(together([gathered], whole), use)

    def _observe(
        self, sizes: Sequence[float], norms: Sequence[float], whole: float, weights: Sequence[float]
    ) -> None:
        try:
            seen = observe(sizes, norms, whole, weights=weights)
        except ValueError:  # one microbatch has nearly all the weight: it is no smaller a part than the batch
            self._state = self._state.with_single()
        else:
            self._state = self._state.with_step(seen)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@final
class Watching:
    """Measures the gradients of one pass: after the first microbatch (or each), and at its end."""

    def __init__(
        self,
        noise: GradientNoise,
        inner: PassWatch,
        sizes: Sequence[int],
        factors: Sequence[float],
        scaler: Any,
    ) -> None:
        # A microbatch without weight is not run.
        pairs = [(size, factor) for size, factor in zip(sizes, factors, strict=True) if factor]
        self.sizes = [size for size, _ in pairs]
        self.factors = [factor for _, factor in pairs]
        self.values: torch.Tensor | None = None  # made while the pass runs: they take memory, if little
        self._inner = inner
        self._scaler = scaler
        self._ended = 0
        self._parts = noise._parts
        self._parts.begin(noise._leaves())

    def begin(self, index: int) -> None:
        self._inner.begin(index)

    def end(self, index: int) -> None:
        self._inner.end(index)
        self._ended += 1
        if len(self.sizes) > 1:
            self._parts.measure(self._scaler)
        if self._ended == len(self.sizes):
            whole = self._parts.whole(self._scaler) if len(self.sizes) > 1 else torch.zeros(())
            self.values = together(self._parts.take(), whole)
