"""What is asked of the CUDA allocator, and which variables a version reads its settings from."""

from __future__ import annotations

import pytest
import torch

from batchfit._cli.torch_features import known_features
from batchfit._engine.torch_private import allocator
from batchfit._engine.trace.oracle import allocator_rules
from batchfit._engine.trace.trace import trace_caveats

NAMES = ("_cuda_isHistoryEnabled", "_cuda_clearCublasWorkspaces")


def test_what_is_there_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(torch._C, NAMES[0], lambda: True, raising=False)
    monkeypatch.setattr(torch._C, NAMES[1], lambda: called.append(1), raising=False)
    assert allocator.history_is_recorded()
    assert allocator.clear_cublas_workspaces()
    assert called == [1]


def test_what_is_missing_is_not_recorded_and_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delattr(torch._C, name, raising=False)
    assert not allocator.history_is_recorded()
    assert not allocator.clear_cublas_workspaces()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert not allocator.history_is_known()
    assert not allocator.can_clear_workspaces()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert allocator.history_is_known()  # nothing to tell in a build without CUDA
    assert allocator.can_clear_workspaces()


@pytest.mark.parametrize(
    ("version", "any_name", "cuda_name", "grows"),
    [
        ("2.6.0+cu124", "expandable_segments:True", None, False),
        ("2.6.0+cu124", None, "expandable_segments:True", True),
        ("2.6.0+cu124", "expandable_segments:False", "expandable_segments:True", True),
        ("2.9.0", "expandable_segments:True", None, True),
        ("2.13.0+cpu", "expandable_segments:False", "expandable_segments:True", False),
        ("2.15.0a0+git12", None, "expandable_segments:True", True),
        ("3.0.1", "expandable_segments:True", None, True),
        ("2.13.0", None, None, False),
    ],
)
def test_settings_are_those_that_this_torch_reads(
    monkeypatch: pytest.MonkeyPatch, version: str, any_name: str | None, cuda_name: str | None, grows: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for name, value in (("PYTORCH_ALLOC_CONF", any_name), ("PYTORCH_CUDA_ALLOC_CONF", cuda_name)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert allocator_rules().expandable_segments is grows
    assert ("PYTORCH_ALLOC_CONF" in allocator.settings_variables()) is not version.startswith("2.6")


@pytest.mark.parametrize(
    ("version", "cached", "keeps"),
    [
        ("2.14.1+cu130", None, True),
        ("2.15.0+cu132", None, False),
        ("2.15.0", "1", True),
        ("3.0.0", "0", False),
    ],
)
def test_predictions_say_where_workspaces_of_cublas_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, version: str, cached: str | None, keeps: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    name = "TORCH_CUBLAS_WORKSPACE_CACHE"
    monkeypatch.delenv(name, raising=False) if cached is None else monkeypatch.setenv(name, cached)
    assert allocator.keeps_cublas_workspaces() is keeps
    notes = [note for note in trace_caveats(()) if note.startswith("cuBLAS:")]
    assert notes == [] if keeps else "65 MiB" in notes[0]
    (feature,) = [one for one in known_features() if one.name == "workspaces of cuBLAS in predictions"]
    assert feature.state == ("works" if keeps else "caveat")
