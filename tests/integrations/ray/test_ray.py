"""Ray: configurations as tasks of a local cluster, workers that are killed, and the same file everywhere."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sweep_targets as targets
from child_path import CHILD_PATH

import batchfit
from batchfit import SweepResult
from conftest import need

TARGETS = Path(targets.__file__).parent

need("ray", present=importlib.util.find_spec("ray") is not None)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray

    from batchfit.integrations.ray import RayEngine

QUICK: dict[str, Any] = {"soak_steps": 0, "steps": 2, "batch_size": 4, "budget": "64MiB"}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with two workers on this machine; none of its processes is left."""
    environment = {"env_vars": {"PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            runtime_env=environment,
        )
        yield
        ray.shutdown()


@pytest.mark.slow
def test_200_configurations_with_a_worker_killed(cluster: None, tmp_path: Path) -> None:
    """All are recorded and none twice; the one that the worker had is run again."""
    killed: list[int] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not killed:
            place = tmp_path / "made-5"
            if place.exists() and place.read_text().endswith("\n"):
                pid = int(place.read_text().split()[0])
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.02)

    killer = threading.Thread(target=kill_one)
    killer.start()
    records: list[int] = []
    result = batchfit.sweep(
        targets.noted,
        {"number": list(range(200)), "folder": [str(tmp_path)]},
        engine="ray",
        output=tmp_path / "out.json",
        on_record=lambda record: records.append(record.knobs["number"]),
        **QUICK,
    )
    killer.join()
    assert killed
    assert sorted(records) == list(range(200))
    assert [one.knobs["number"] for one in result.records] == list(range(200))
    assert not result.failed
    assert len(set((tmp_path / "made-5").read_text().split())) == 2
    assert SweepResult.from_json((tmp_path / "out.json").read_text()) == result


@pytest.mark.slow
def test_a_configuration_that_kills_every_worker_is_recorded(cluster: None) -> None:
    result = batchfit.sweep(targets.deadly, {"number": [1, 2, 3]}, engine="ray", max_retries=1, **QUICK)
    one, two, three = result.records
    assert two.error is not None
    assert two.error.startswith("WorkerCrashedError")
    assert (one.batch_size_used, three.batch_size_used) == (4, 4)


@pytest.mark.slow
def test_the_file_is_the_same_whatever_the_engine(cluster: None, tmp_path: Path) -> None:
    asked = {
        "factory": f"{TARGETS / 'sweep_targets.py'}:make",
        "measure": f"{TARGETS / 'sweep_targets.py'}:measure",
        "knobs": targets.KNOBS,
        **targets.SETTINGS,
    }
    (tmp_path / "sweep.json").write_text(json.dumps(asked))
    results = {
        name: batchfit.sweep(**asked, output=tmp_path / f"{name}.json", **how)
        for name, how in {"here": {}, "devices": {"devices": "cpu,cpu"}, "ray": {"engine": "ray"}}.items()
    }
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "batchfit"]
    files = [str(tmp_path / "sweep.json"), "--output", str(tmp_path / "torchrun.json")]
    command = [sys.executable, *launcher, "sweep", *files]
    subprocess.run(command, env=environment, capture_output=True, timeout=200, check=False)
    results["torchrun"] = SweepResult.from_json((tmp_path / "torchrun.json").read_text())
    here = results["here"].without_timings()
    assert here["records"]
    for name, result in results.items():
        assert result.without_timings() == here, name
        assert SweepResult.from_json((tmp_path / f"{name}.json").read_text()) == result


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"num_gpus": -1}, "num_gpus must be a number of at least 0, not -1"),
        ({"num_cpus": "2"}, "num_cpus must be a number of at least 0, not '2'"),
        ({"max_retries": 1.5}, "max_retries must be an integer of at least 0, not 1.5"),
        ({"ray_address": 3}, "ray_address must be text or None, not 3"),
    ],
)
def test_wrong_settings_are_refused_before_ray_starts(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        batchfit.sweep(targets.deadly, {"number": [1]}, engine="ray", **wrong, **QUICK)
    assert str(caught.value) == text


def test_a_part_of_a_gpu_needs_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connected(Exception): ...

    def connect(self: RayEngine) -> bool:
        raise Connected

    monkeypatch.setattr(RayEngine, "_connect", connect)
    how: dict[str, Any] = {"engine": "ray", "num_gpus": 0.5, **QUICK}
    with pytest.raises(Connected):
        batchfit.sweep(targets.deadly, {"number": [1]}, **how)
    with pytest.raises(ValueError, match=r"^budget must be given with a part of a GPU \(num_gpus 0\.5\)"):
        batchfit.sweep(targets.deadly, {"number": [1]}, **{**how, "budget": None})


def test_a_task_that_no_node_could_run_is_refused(cluster: None) -> None:
    with pytest.raises(ValueError, match=r"num_gpus must be at most what the cluster has \(0 GPU\), not 1"):
        batchfit.sweep(targets.deadly, {"number": [1]}, engine="ray", num_gpus=1, **QUICK)
    with pytest.raises(ValueError, match=r"num_cpus must be at most what the cluster has \(2 CPU\), not 64"):
        batchfit.sweep(targets.deadly, {"number": [1]}, engine=RayEngine(num_cpus=64), **QUICK)


def test_without_ray_the_pip_line_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "batchfit.integrations.ray")
    with pytest.raises(ImportError, match=r'pip install "batchfit\[ray\]" to use batchfit.integrations.ray'):
        batchfit.sweep(targets.deadly, {"number": [1]}, engine="ray", **QUICK)
