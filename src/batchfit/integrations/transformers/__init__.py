"""batchfit in Hugging Face's Trainer: `adapt(trainer)`, or `BatchfitTrainer` in place of `Trainer`.

    from batchfit.integrations.transformers import adapt
    adapt(trainer).train()

Before training, a search finds the largest microbatch that fits with the trainer's own step. A batch that is
out of memory is retried in smaller microbatches, with the gradients of the whole batch. The global batch size
stays `per_device_train_batch_size * gradient_accumulation_steps * ranks`, or follows `schedule=`.
"""

from __future__ import annotations

import importlib
import warnings

try:
    importlib.import_module("accelerate")  # Trainer needs it, and raises much later
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

# Methods of Trainer that are not public are overridden, in ways that were tested from this version on.
OLDEST = (4, 57)
# A name of ours; and one that came with 5.3, without which `train_runtime` includes the search.
_NOT_IN_ALL = {"found", "_prepare_for_training"}


def _check_version(version: str, trainer: type = transformers.Trainer) -> None:
    """Refuse a Trainer that would not call methods of ours; warn of a version below the tested ones."""
    oldest = ".".join(map(str, OLDEST))
    overridden = [name for name in vars(BatchfitMixin) if not name.startswith(("__", "_batchfit"))]
    missing = [name for name in overridden if name not in _NOT_IN_ALL and not hasattr(trainer, name)]
    if missing:
        raise ImportError(
            f"batchfit.integrations.transformers needs transformers {oldest} or later, and the Trainer of "
            f"{version} has no {', '.join(sorted(missing))}: pip install 'transformers>={oldest}'. With an "
            "older one use batchfit.Microbatcher in a training_step of your own"
        )
    parts = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if parts < OLDEST:
        warnings.warn(
            f"batchfit.integrations.transformers was tested with transformers {oldest} and later, not with "
            f"{version}",
            stacklevel=3,
        )


_check_version(transformers.__version__)
