"""The machine's RAM, as far as this process may use it: the system's figure, under each container's limit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ram:
    """The machine's RAM, as far as this process may use it."""

    total_bytes: int
    available_bytes: int


def read_ram(root: Path = Path("/")) -> Ram:
    """RAM under the limits of the control groups (containers) around this process; `root` is for tests."""
    lines = _read(root / "proc/meminfo").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    total = kib["MemTotal"] * 1024 if "MemTotal" in kib else physical_bytes()
    available = kib["MemAvailable"] * 1024 if "MemAvailable" in kib else total
    for limit, used in _control_groups(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Ram(total, available)


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each memory control group around this process."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_file, used_file, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit_file, used_file = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        inner = Path(path.strip("/"))
        for group in (inner, *inner.parents):  # every group around ours limits it too
            limit = _read(base / group / limit_file).strip()
            used = _read(base / group / used_file).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(one.split() for one in _read(base / group / "memory.stat").splitlines())
                yield int(limit), max(0, int(used) - int(stat.get(cache, 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def physical_bytes() -> int:
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = ctypes.c_ulonglong()  # Windows
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kib))  # type: ignore[attr-defined]
    return kib.value * 1024
