"""Lightning: find the batch size, survive an OOM, change the batch size while training.

    from batchfit.integrations.lightning import BatchSizeFinder, BatchSizeSchedule, OomProofTraining, Tuner
    trainer = Trainer(callbacks=[BatchSizeFinder()])

Callbacks for `lightning` and `pytorch_lightning` alike: they belong to whichever the program has imported.
"""

from __future__ import annotations

from batchfit.integrations.lightning.finder import BatchSizeFinder
from batchfit.integrations.lightning.microbatches import OomProofTraining
from batchfit.integrations.lightning.schedule import BatchSizeSchedule
from batchfit.integrations.lightning.tuner import Tuner

__all__ = ["BatchSizeFinder", "BatchSizeSchedule", "OomProofTraining", "Tuner"]
