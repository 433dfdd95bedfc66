"""What Accelerate keeps for a whole process, for tests that begin without it."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState


def reset_accelerate() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def prepared_models(accelerator: Any) -> list[Any]:
    return accelerator._models  # type: ignore[no-any-return]
