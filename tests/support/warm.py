"""Programs in Python that start at once: forks of the process that has torch imported (`launch`).

    ran = run_python("-m", "batchfit", "find", "train.py:make", folder=project)    # as `subprocess.run`
    assert ran.returncode == 0, ran.stderr

Rules: folder, environment, arguments, standard files and exit status are those of a process of its own. What
is about Python's start or end, an import, a signal or a terminal is tested with a real one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch
from launch import PRELOAD, end_process

STANDARD = ("stdout", "stderr")


def run_python(
    *words: str,
    folder: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """What `python WORDS` does in `folder`, `environment` in place of this process' own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    variables = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as outputs:
        process = context.Process(
            target=_become, args=(words, os.path.abspath(folder or "."), variables, outputs)
        )
        process.start()
        process.join(timeout_s)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        out, err = ((Path(outputs) / name).read_text(encoding="utf-8") for name in STANDARD)
    if late:
        raise subprocess.TimeoutExpired(list(words), timeout_s, out, err)
    assert code is not None
    return subprocess.CompletedProcess(list(words), code, out, err)


def _become(words: Sequence[str], folder: str, environment: Mapping[str, str], outputs: str) -> NoReturn:
    code = 1
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in enumerate(STANDARD, 1):
            os.dup2(os.open(f"{outputs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        multiprocessing.set_start_method(None, force=True)  # as in any program
        torch.set_num_threads(1)  # a pool of threads is not there after a fork
        _run(words, folder)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the process ends here, as a program would
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        end_process(code)


def _run(words: Sequence[str], folder: str) -> None:
    if words[0] == "-m":
        sys.path.insert(0, folder)
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, folder)
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(words[1], main.__dict__)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
