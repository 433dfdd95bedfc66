"""Starts one run of a program with a probe in it, and says why none was seen.

Rule: what a run is started with has one form, whatever the run is for: a trial, a trace.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from batchfit._engine.device.device import read_ram, without_budget
from batchfit._program.command_run import CommandRun, ProbeFolder, new_token
from batchfit._program.config_copy import write_copies
from batchfit._program.disk_room import room_for
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.pure.variables import probe_variables
from batchfit.errors import ProgramError


def start_run(
    template: CommandTemplate,
    size: int,
    settings: Mapping[str, Any],
    *,
    variables: Mapping[str, str] | None = None,
    inputs: Mapping[str, str] | None = None,
) -> CommandRun:
    """Start the command at a size.

    `settings` are the probe's, `variables` more of its environment, `inputs` texts of files in its folder.
    """
    with room_for("a probe"):
        folder = ProbeFolder()
    try:
        with room_for("a probe"):
            for name, text in (inputs or {}).items():
                (folder.path / name).write_text(text, encoding="utf-8")
            files = write_copies(template, size, folder.path)
        token = new_token()
        own = {"socket": str(folder.path / "s"), "token": token, "ram_bytes": ram_bytes()}
        environment = probe_variables(
            {**_compile_cache(), **os.environ, **(variables or {}), **template.variables(size)},
            folder=str(folder.path),
            settings=json.dumps({**own, **settings}),
        )
        command = template.command(size, out=str(folder.path / "out"), files=files)
        return CommandRun(command, environment, folder, token)
    except BaseException:
        folder.remove()
        raise


def check_seen(run: CommandRun, words: Sequence[str], *, heard: bool, code: int | None) -> None:
    """Refuse a run of the command `words` in which no probe was heard."""
    failed, lines = run.found("failed"), run.tail.lines()
    if failed is not None and not heard:
        text = failed.strip().splitlines()[-1]
        raise ProgramError(f"the probe could not start in the program's Python: {text}", lines=lines)
    if heard or code != 0:
        return
    if run.found("python") is not None:
        text = f"the program never imported torch: {words[0]} ran to its end, with nothing to measure"
    else:
        text = (
            f"no Python was seen in the program: {words[0]} is none, or starts one that ignores PYTHONPATH "
            "(python -I, -E, -S), a container, or another machine"
        )
    raise ProgramError(text, lines=lines)


def ram_bytes() -> int:
    """What a program on the CPU may use without a budget."""
    return without_budget("cpu", read_ram().available_bytes * 9 // 10)


def _compile_cache() -> dict[str, str]:
    """Compiled kernels are kept where they always are, though a probe has a temporary folder of its own."""
    with contextlib.suppress(OSError, KeyError, ImportError):
        return {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"}
    return {}
