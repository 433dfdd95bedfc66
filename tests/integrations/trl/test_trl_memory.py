"""The peak that a trace predicts for a step of a trainer of TRL, and the live peak of its real step here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from examples import some_slow  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {"SFT packed", "DPO", "KTO"}
CASES = ("SFT", "SFT packed", "SFT chunked_nll", "DPO", "KTO", "Reward", "ORPO")


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("trl", reason="needs trl")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", some_slow(CASES, is_slow=lambda name: name not in QUICK))
def test_the_peak_of_a_real_step(name: str, tmp_path: Path) -> None:
    from cpu_truth import measured, predicted
    from trl_memory import SIZE, plain, searched

    kept: list[Any] = []
    work, truth = measured(lambda: searched(name, tmp_path, kept), SIZE)
    told = predicted(work, SIZE)
    assert told.peak == pytest.approx(truth.peak, rel=0.01)
    assert told.held == pytest.approx(truth.held, rel=0.01)
    _, real = measured(lambda: plain(name, tmp_path, kept), SIZE)
    assert told.peak == pytest.approx(real.peak, rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "GRPO loss",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("GRPO loss, entropy", "RLOO loss")),
    ],
)
def test_the_peak_of_a_real_loss_phase(name: str, tmp_path: Path) -> None:
    """Completions are generated before; what a trace knows is that they have their full length."""
    from cpu_truth import measured, predicted
    from trl_memory import SIZE, plain_loss, searched_loss

    kept: list[Any] = []
    work, truth = measured(lambda: searched_loss(name, tmp_path, kept), SIZE)
    told = predicted(work, SIZE)
    assert told.peak == pytest.approx(truth.peak, rel=0.01)
    assert told.held == pytest.approx(truth.held, rel=0.01)
    _, real = measured(lambda: plain_loss(name, tmp_path, kept), SIZE)
    assert told.peak == pytest.approx(real.peak, rel=0.01)
