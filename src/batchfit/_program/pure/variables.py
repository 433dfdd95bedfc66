"""The environment of a probe: what says that it is one, and what keeps it from writing elsewhere.

Rules: each tool is switched off by its own documented variable, and a value that the user has set stays for
those that only choose a place. Reads are not cut off: a program may need a model from the hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import batchfit

_PACKAGE = Path(batchfit.__file__).parent
INJECT = str(_PACKAGE / "_program" / "probe" / "inject")
# Trackers and uploads, off in probes.
QUIET = {
    "BATCHFIT_PROBE": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 refuses a folder otherwise, such as ours
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",  # the last lines of a program that is killed
}


def probe_variables(environment: Mapping[str, str], *, folder: str, settings: str) -> dict[str, str]:
    """The environment of a probe whose own files are in `folder`."""
    return {
        **_with_inject(environment),
        **QUIET,
        "MLFLOW_TRACKING_URI": f"file:{folder}/t/mlruns",
        "TRACKIO_DIR": f"{folder}/t/trackio",
        "TMPDIR": f"{folder}/t",
        "PATH": os.pathsep.join([f"{folder}/b", environment.get("PATH", os.defpath)]),
        "BATCHFIT_PROBE_FOLDER": folder,
        "BATCHFIT_PROBE_SETTINGS": settings,
    }


def exit_variables(environment: Mapping[str, str], *, file: str) -> dict[str, str]:
    """The environment of a real run whose processes are to note in `file` what ended them."""
    return {**_with_inject(environment), "BATCHFIT_EXIT_FILE": file}


def limit_variables(environment: Mapping[str, str], *, budget_bytes: int) -> dict[str, str]:
    """The environment of a real run whose processes may use so much memory each."""
    return {**_with_inject(environment), "BATCHFIT_LIMIT_BYTES": str(budget_bytes)}


def _with_inject(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with our `sitecustomize` first, and with where this process has batchfit."""
    path = environment.get("PYTHONPATH", "")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([INJECT, path]) if path else INJECT,
        "BATCHFIT_PROBE_SOURCE": str(_PACKAGE.parent),
    }
