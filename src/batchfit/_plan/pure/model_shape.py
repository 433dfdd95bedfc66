"""What a model is built from: the fields of its configuration.

Rules: facts only, those of the published configuration; no weights are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

Task = Literal["causal", "masked", "image", "seq2seq", "speech", "diffusion"]


@final
@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model: its name, what it is trained to do, and the fields of its configuration.

    `config` has `model_type` (of diffusers: `_class_name`) and what differs from that type's defaults.
    `parameters` is the published number, 0 where the model came from a file. `length` is what one sample
    holds unless it is asked for otherwise: tokens, or the side of an image.
    """

    name: str
    task: Task
    config: Mapping[str, Any]
    parameters: int = 0
    length: int = 2048
    also: tuple[str, ...] = field(default=())

    @property
    def kind(self) -> str:
        """The type of the model, as its library calls it."""
        return str(self.config.get("model_type") or self.config["_class_name"])

    @property
    def short_name(self) -> str:
        """Without the owner."""
        return self.name.rpartition("/")[2]
