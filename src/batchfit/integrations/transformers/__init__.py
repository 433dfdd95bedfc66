"""batchfit in Hugging Face's Trainer: `adapt(trainer)`, or `BatchfitTrainer` in place of `Trainer`.

    from batchfit.integrations.transformers import adapt
    adapt(trainer).train()

Before training the largest microbatch that fits is found with the trainer's own step; a batch that runs out
of memory is done again in smaller pieces, with the gradients of the whole; the batch of an optimizer step
stays `per_device_train_batch_size * gradient_accumulation_steps * ranks`, or follows `schedule=`.
"""

from __future__ import annotations

import importlib
import warnings

try:
    importlib.import_module("accelerate")  # Trainer cannot do without it, and says so much later
    import transformers
except ImportError as error:
    raise ImportError(
        'pip install "batchfit[transformers]" to use batchfit.integrations.transformers'
    ) from error

from batchfit.integrations.transformers.options import Options
from batchfit.integrations.transformers.trainer import (
    BatchfitMixin,
    BatchfitSeq2SeqTrainer,
    BatchfitTrainer,
    adapt,
)

__all__ = ["BatchfitMixin", "BatchfitSeq2SeqTrainer", "BatchfitTrainer", "Options", "adapt"]

# Methods of Trainer that are not public are overridden here: other versions may have others.
TESTED = ((5, 17), (5, 22))


def _check_version(version: str, trainer: type = transformers.Trainer) -> None:
    """Say it where nobody has tried this version; refuse one whose Trainer would call nothing of ours."""
    low, high = (".".join(map(str, one)) for one in TESTED)
    taken_over = [name for name in vars(BatchfitMixin) if not name.startswith(("__", "_batchfit"))]
    missing = [name for name in taken_over if name != "found" and not hasattr(trainer, name)]
    if missing:
        raise ImportError(
            f"batchfit.integrations.transformers was tested with transformers {low} to {high}, and the "
            f"Trainer of {version} has no {', '.join(sorted(missing))}: pip install 'transformers>={low}'"
        )
    parts = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if not TESTED[0] <= parts <= TESTED[1]:
        warnings.warn(
            f"batchfit.integrations.transformers was tested with transformers {low} to {high}, not with "
            f"{version}",
            stacklevel=3,
        )


_check_version(transformers.__version__)
