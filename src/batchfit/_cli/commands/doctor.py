"""`batchfit doctor`: what is on this machine, and whether batchfit works on it.

Rules: it always answers, and whatever is broken is a line of the answer; what was never run on real
hardware is called untested; the self-test is a real search with a known answer. Exit 1 if something is
broken; a note is no break.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import batchfit
from batchfit._cli.exits import Code
from batchfit._cli.output import stdout_for_results
from batchfit._cli.progress import is_terminal, progress_here, speaks
from batchfit._cli.torch_features import known_features
from batchfit._units import format_bytes

REQUIRED = ("torch", "pydantic", "typer", "rich")
OPTIONAL = ("numpy", "transformers", "accelerate", "lightning", "torchtune", "ray", "matplotlib")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
OLDEST_TORCH = (2, 6)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
SELF_TEST_BUDGET = "64MiB"


@dataclass(kw_only=True)
class Findings:
    """All that doctor found; `broken` decides the exit code."""

    versions: dict[str, str | None] = field(default_factory=dict)
    extras: dict[str, str | None] = field(default_factory=dict)
    allocator: dict[str, str] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    store: dict[str, Any] = field(default_factory=dict)
    features: list[dict[str, str]] = field(default_factory=list)
    self_test: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def examine(*, as_json: bool) -> Code:
    """Inspect this machine, test batchfit on it, and show the findings."""
    findings = Findings()
    with stdout_for_results(alone=as_json) as stdout:
        with progress_here(steps=3, soak_steps=None) as progress:
            progress.doing("loading torch")
            look_at_packages(findings)
            look_at_torch(findings)
            look_at_store(findings)
            look_at_features(findings)
            progress.doing("running a small search")
            test_a_search(findings)
        if speaks() and as_json:
            stdout.write(json.dumps({"ok": not findings.broken, **asdict(findings)}, indent=2) + "\n")
        elif speaks():
            show_findings(findings, stdout)
    return Code.BROKEN if findings.broken else Code.FOUND


def look_at_packages(findings: Findings) -> None:
    """What is installed, read from the packages' metadata: nothing is imported."""
    findings.versions = {"batchfit": batchfit.__version__, "python": platform.python_version()}
    findings.versions |= {name: _installed(name) for name in REQUIRED}
    findings.extras = {name: _installed(name) for name in OPTIONAL}
    findings.allocator = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    findings.broken += [f"{name} is not installed" for name in REQUIRED if findings.versions[name] is None]
    findings.notes += allocator_notes(findings.allocator)
    if DRIVER_FILE.is_file():
        findings.versions["nvidia driver"] = _driver_version(DRIVER_FILE.read_text())


def allocator_notes(settings: dict[str, str]) -> list[str]:
    """What a person should know about the allocator's settings."""
    from batchfit._engine.allocator.caching import AllocatorSettings

    notes = []
    if len(set(settings.values())) > 1:
        notes.append(f"{' and '.join(settings)} differ, and torch reads one of them only")
    if any("cudaMallocAsync" in value for value in settings.values()):
        notes.append(
            "with cudaMallocAsync a budget counts live tensors only: the program may take more of the GPU, "
            "and find measures without a prediction"
        )
    for name, value in settings.items():
        try:
            AllocatorSettings.from_environment(value)
        except ValueError as error:
            notes.append(f"{name}: {error}")
    return notes


def look_at_torch(findings: Findings) -> None:
    """Import torch, and ask it for its devices."""
    try:
        import torch

        from batchfit._engine.device.gpu import spills_to_ram
        from batchfit._engine.device.resolve import known_devices
    except Exception as error:  # noqa: BLE001  a broken build fails in many ways (OSError, RuntimeError)
        findings.broken.append(f"torch cannot be imported: {type(error).__name__}: {error}")
        return
    findings.versions["torch"] = str(torch.__version__)
    built_with = torch.version.cuda or getattr(torch.version, "hip", None)
    findings.versions["torch built with"] = f"CUDA {built_with}" if built_with else "CPU only"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        findings.broken.append(f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}")
    if "nvidia driver" in findings.versions and not torch.cuda.is_available():
        if built_with:
            findings.broken.append(
                "there is an NVIDIA driver, and torch cannot use it (torch.cuda.is_available())"
            )
        else:
            findings.notes.append("there is an NVIDIA driver, and this torch is built without CUDA")
    try:
        findings.devices = [asdict(device) for device in known_devices()]
    except Exception as error:  # noqa: BLE001  a sick driver raises whatever it likes
        findings.broken.append(f"devices cannot be listed: {type(error).__name__}: {error}")
    if torch.cuda.is_available() and spills_to_ram():
        findings.notes.append(
            "the GPU driver of Windows and WSL takes RAM when the GPU is full: find keeps to what is free"
        )
    for device in findings.devices:
        if device["total_bytes"] is None:
            findings.broken.append(f"{device['name']} {device['description']}: {device['note']}")
        elif device["note"]:
            findings.notes.append(f"{device['name']}: {device['note']}")


def look_at_features(findings: Findings) -> None:
    """What works with this torch, what with a caveat, and what not at all."""
    try:
        findings.features = [asdict(one) for one in known_features()]
    except Exception as error:  # noqa: BLE001  torch may be missing or broken: that is said by now
        findings.notes.append(f"features cannot be looked at: {type(error).__name__}: {error}")


def look_at_store(findings: Findings) -> None:
    """Where found sizes are kept, and how many there are."""
    try:
        from batchfit._engine.store.sqlite import Store

        findings.store = asdict(Store().state())
    except Exception as error:  # noqa: BLE001  pydantic may be missing or broken
        findings.store = {
            "path": "",
            "answers": 0,
            "file_bytes": 0,
            "note": f"the store cannot be read: {error}",
        }
    if findings.store["note"]:
        findings.notes.append(findings.store["note"])


def test_a_search(findings: Findings) -> None:
    """Find a size that is known beforehand, under virtual memory on the CPU, and check what it left."""
    begun = time.perf_counter()
    passed, detail = False, ""
    try:
        size, unchanged = _small_search()
        passed = size in EXPECTED_SIZES and unchanged
        detail = f"found a batch size of {size} in {SELF_TEST_BUDGET} of virtual memory"
        if not unchanged:
            detail += ", and a parameter was not restored"
    except Exception as error:  # noqa: BLE001  the self-test reports whatever it meets
        detail = f"{type(error).__name__}: {error}"
    elapsed_s = round(time.perf_counter() - begun, 2)
    findings.self_test = {"passed": passed, "detail": detail, "elapsed_s": elapsed_s}
    if not passed:
        findings.broken.append(f"the self-test failed: {detail}")


# A sample is 1 MiB and a step holds two such tensors besides a little state. In blocks of 2 MiB, as the CUDA
# allocator rounds large tensors, 30 fit into 64 MiB; in exact bytes 31 would.
EXPECTED_SIZES = (30, 31)


def _small_search() -> tuple[int, bool]:
    import torch

    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(batch_size: int) -> None:
        batch = torch.ones(batch_size, 2**18)
        doubled = batch * 2
        optimizer.zero_grad()
        (weight.sum() * doubled[0, 0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    workload = batchfit.Workload(step, state=[weight, optimizer])
    # The limits are for a machine with enough memory: the test must fail there, not fill it.
    limits: dict[str, Any] = {"max_size": 64, "time_limit_s": 20.0, "steps": 2, "soak_steps": 5}
    fit = batchfit.find_batch_size(workload, budget=SELF_TEST_BUDGET, device="cpu", tolerance=0.0, **limits)
    return fit.batch_size, bool((weight == 1).all())


def show_findings(findings: Findings, stream: TextIO) -> None:
    """The findings as a person reads them."""
    colour = is_terminal(stream) and not os.environ.get("NO_COLOR")

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colour else text

    lines = [("", "versions")]
    lines += [(name, version or "not installed") for name, version in findings.versions.items()]
    lines += [("", "devices")]
    lines += [(device["name"], _device_line(device)) for device in findings.devices] or [("none", "")]
    lines += [("", "allocator")]
    lines += list(findings.allocator.items()) or [
        ("defaults", f"neither {' nor '.join(ALLOCATOR_VARIABLES[:2])} is set")
    ]
    lines += [("", "found sizes")]
    lines += [("store", findings.store["path"] or "none"), ("holds", _store_line(findings.store))]
    lines += [("", "optional packages")]
    lines += [(name, version or "-") for name, version in findings.extras.items()]
    lines += [("", "features")]
    lines += [(one["state"], one["name"]) for one in findings.features] or [("unknown", "")]
    lines += [("", "self-test")]
    verdict = paint("passed", "32") if findings.self_test["passed"] else paint("failed", "31")
    lines += [(verdict, f"{findings.self_test['detail']}, {findings.self_test['elapsed_s']:.2f} s")]
    width = max(len(name) for name, _ in lines[:-1])
    for name, text in lines:
        pad = " " * max(0, width - (len(name) if "\x1b" not in name else len("passed")))
        stream.write(f"  {name}{pad}  {text}\n" if name else f"{paint(text, '1')}\n")
    for one in findings.features:
        if one["state"] != "works":
            stream.write(f"{paint(one['state'] + ':', '33')} {one['name']}: {one['detail']}\n")
    for note in findings.notes:
        stream.write(f"{paint('note:', '33')} {note}\n")
    for fault in findings.broken:
        stream.write(f"{paint('broken:', '1;31')} {fault}\n")
    if not findings.broken:
        stream.write(f"{paint('batchfit works here.', '1;32')}\n")
    stream.flush()


def _device_line(device: dict[str, Any]) -> str:
    total, free = device["total_bytes"], device["free_bytes"]
    memory = "memory unknown" if total is None else format_bytes(total)
    if free is not None:
        memory += f", {format_bytes(free)} free"
    uuid = f", {device['uuid']}" if device["uuid"] else ""
    return f"{device['description']}, {memory}{uuid}" + ("" if device["tested"] else " (untested)")


def _store_line(store: dict[str, Any]) -> str:
    if not store["file_bytes"]:
        return "nothing yet" if not store["note"] else "unknown"
    count = store["answers"]
    return f"{count} answer{'' if count == 1 else 's'}, {format_bytes(store['file_bytes'])}"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver_version(text: str) -> str:
    """The number in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...`."""
    numbers = [word for word in text.split() if word[:1].isdigit() and word.count(".") >= 1]
    return numbers[0] if numbers else "unknown"
