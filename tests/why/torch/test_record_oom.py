"""`record_oom`: a snapshot at an OOM that nothing survived, and at no other; on a CPU, and CUDA's calls."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_cases import PLANTED
from torch import nn

import batchfit
from batchfit._engine.torch_private import allocator
from batchfit.errors import NothingFitsError

MIB = 2**20


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return model, torch.optim.AdamW(model.parameters())


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def leak(model: nn.Module, optimizer: torch.optim.Optimizer, record: batchfit.OomRecorder) -> None:
    kept = []
    for step in range(1000):
        batch = {"x": torch.randn(256, 64)}
        record.note(step=step, batch=batch)
        optimizer.zero_grad()
        loss = loss_of(model, batch["x"])
        loss.backward(retain_graph=True)
        optimizer.step()
        kept.append(loss)


def test_an_oom_that_ends_the_block_is_written_with_its_step_and_batch(tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    model, optimizer = make()
    with (
        batchfit.virtual_memory("16MiB"),
        pytest.raises(torch.OutOfMemoryError) as refused,
        batchfit.record_oom(path) as record,
    ):
        leak(model, optimizer, record)
    assert record.written == path
    found = batchfit.explain_oom(path)
    assert found.is_virtual
    assert [one.name for one in found.causes] == ["leak"]
    assert [one.name.partition(" ")[2] for one in found.growth] == ["loss_of", "leak"]
    assert found.step is not None
    assert found.step > 10
    assert found.batch == {"x": "float32 (256, 64)"}
    assert found.batch_size == 256
    assert found.total_bytes == 16 * MIB
    assert found.torch_version == str(torch.__version__)
    assert found.live_bytes <= 16 * MIB < found.live_bytes + (found.requested_bytes or 0)
    assert not found.settings  # there is no allocator to replay
    note = "\n".join(refused.value.__notes__)
    assert f"batchfit why {path}" in note
    assert "leak; most of it: test_record_oom.py" in note


def test_what_is_live_is_what_the_virtual_memory_counts(tmp_path: Path) -> None:
    model, optimizer = make()
    with batchfit.virtual_memory("64MiB") as memory:
        before = torch.randn(1000, 100)
        with batchfit.record_oom(tmp_path / "now.pickle") as record:
            held = [torch.randn(n, 100) for n in range(100, 120)]
            del held[::2]
            loss_of(model, torch.randn(256, 64)).backward()
            optimizer.step()
            live = memory.allocated_bytes
            written = record.save()
    assert written is not None
    found = batchfit.explain_oom(written)
    assert found.live_bytes == found.reserved_bytes == live
    assert found.requested_bytes is None
    assert sum(one.peak_bytes for one in found.lines) == live
    assert {"before recording", "optimizer", "gradients"} <= {one.name for one in found.kinds}
    assert before.numel()


def test_an_oom_that_is_caught_inside_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    model, _ = make()
    microbatcher = batchfit.Microbatcher(model)
    batch = torch.randn(6000, 64)
    with batchfit.virtual_memory("5MiB"), batchfit.record_oom(path) as record:
        report = microbatcher.backward(lambda micro: loss_of(model, micro), batch)
        assert report.retries
        assert record.written is None
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(100 * MIB)
    assert not path.exists()


@pytest.mark.parametrize("error", [ValueError("other"), KeyboardInterrupt()])
def test_another_error_is_not_written(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    with pytest.raises(type(error)), batchfit.record_oom(path):
        raise error
    assert not path.exists()
    assert not getattr(error, "__notes__", [])


def test_what_nothing_fits_in_names_who_holds_the_most(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 1024), *(nn.Linear(1024, 1024) for _ in range(2)))
    microbatcher = batchfit.Microbatcher(model)
    path = tmp_path / "oom.pickle"
    with (
        batchfit.virtual_memory("10MiB"),
        pytest.raises(NothingFitsError) as refused,
        batchfit.record_oom(path),
    ):
        microbatcher.backward(lambda micro: loss_of(model, micro), torch.randn(64, 256))
    weights, batch, _ = refused.value.holders
    assert weights == ("Linear", 1025 * 1024 * 4 * 2 + 257 * 1024 * 4)
    assert batch == ("the batch", 64 * 256 * 4)
    assert "Most of what was held: Linear 9.01 MiB, the batch 64.0 KiB" in str(refused.value)
    assert "batchfit why oom.pickle" in str(refused.value)
    assert path.exists()
    assert any("memory snapshot in" in one for one in refused.value.__notes__)


def test_without_a_block_an_uncaught_oom_is_written_once(tmp_path: Path) -> None:
    """In a program of its own: the error comes out as it would, with the note below it."""
    program = (
        "import torch, batchfit\n"
        "batchfit.record_oom('oom.pickle').note(step=3)\n"
        "def train():\n"
        "    with batchfit.virtual_memory('1MiB'):\n"
        "        torch.zeros(10_000_000)\n"
        "train()\n"
    )
    (tmp_path / "train.py").write_text(program)
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory" in ran.stderr
    assert "Look further with: batchfit why oom.pickle" in ran.stderr
    found = batchfit.explain_oom(tmp_path / "oom.pickle")
    assert (found.step, found.requested_at) == (3, "train.py:5 train")


def test_the_hook_of_others_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *rest: called.append(kind))
    theirs = sys.excepthook
    record = batchfit.record_oom(tmp_path / "oom.pickle")
    sys.excepthook(ValueError, ValueError("x"), None)
    assert called == [ValueError]
    record.close()
    assert sys.excepthook is theirs
    with batchfit.record_oom(tmp_path / "oom.pickle"):
        assert sys.excepthook is theirs


def test_a_file_that_cannot_be_written_does_not_hide_the_oom(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    record = batchfit.record_oom(folder / "oom.pickle")
    folder.rmdir()
    error = torch.OutOfMemoryError("CUDA out of memory.")
    record.failed(error)
    record.close()
    assert record.written is None
    assert "could not be written" in error.__notes__[-1]


def test_each_rank_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for name, written in (("oom.pickle", "oom_rank3.pickle"), ("r{rank}.pickle", "r3.pickle")):
        with batchfit.record_oom(tmp_path / name) as record:
            assert record.save() == tmp_path / written
    with (tmp_path / "r3.pickle").open("rb") as file:
        assert pickle.load(file)["batchfit"]["rank"] == 3


def test_nothing_of_a_batch_is_kept(tmp_path: Path) -> None:
    import weakref

    batch = {"x": [torch.randn(4, 3), (torch.zeros(4, dtype=torch.int64),)]}
    seen = weakref.ref(batch["x"][0])
    with batchfit.record_oom(tmp_path / "oom.pickle") as record:
        record.note(batch=batch)
        record.note(batch=torch.randn(2))
        del batch
        assert seen() is None


def test_a_history_forgets_the_oldest(tmp_path: Path) -> None:
    with (
        batchfit.virtual_memory("64MiB"),
        batchfit.record_oom(tmp_path / "a.pickle", max_entries=50) as record,
    ):
        for _ in range(100):
            torch.randn(100)
        path = record.save()
    assert path is not None
    assert batchfit.explain_oom(path).entries == 50


@pytest.mark.parametrize("entries", [0, -1, 1.5, True])
def test_wrong_arguments(entries: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match="max_entries must"):
        batchfit.record_oom(tmp_path / "x", max_entries=entries)
    with pytest.raises(ValueError, match="path must be a file that can be written"):
        batchfit.record_oom(tmp_path / "no" / "x")


def test_on_cuda_it_is_pytorchs_own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: the calls of PyTorch are stood in for, and what they would give is written."""
    calls: list[dict[str, Any]] = []
    value = PLANTED["leak"]().snapshot()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 160 * MIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: value)
    is_on = lambda: bool(calls) and calls[-1].get("enabled", "all") is not None  # noqa: E731
    monkeypatch.setattr(allocator, "history_is_recorded", is_on)
    path = tmp_path / "oom.pickle"
    with pytest.raises(torch.OutOfMemoryError), batchfit.record_oom(path, max_entries=7):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 MiB")
    assert calls == [{"max_entries": 7, "stacks": "python"}, {"enabled": None}]
    found = batchfit.explain_oom(path)
    assert not found.is_virtual
    assert found.total_bytes == 160 * MIB
    assert [one.name for one in found.causes] == ["leak"]
    # A history that the program records itself is left as it is.
    monkeypatch.setattr(allocator, "history_is_recorded", lambda: True)
    with batchfit.record_oom(path):
        pass
    assert len(calls) == 2
