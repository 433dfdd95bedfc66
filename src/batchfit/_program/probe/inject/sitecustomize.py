"""Waits, in the program's Python, for the import of torch, and starts the probe then.

Rules: light and of the standard library, since every Python of the command pays for it. A `sitecustomize` of
the user's own runs as it would without this one. Nothing here raises into the program: what fails is written
to a file beside the socket, where the parent finds it.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.environ.get("BATCHFIT_PROBE_FOLDER", "")
_EXIT_FILE = os.environ.get("BATCHFIT_EXIT_FILE", "")  # of `batchfit run --restarts`, which has no probe


def mark(name: str, text: str = "") -> None:
    """Leave a small file for the parent."""
    try:
        number = os.open(os.path.join(_FOLDER, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(number, text.encode(errors="replace"))
        os.close(number)
    except OSError:
        pass


class TorchWatch:
    """Finds torch as Python would; once its code has run, the probe starts."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of torch, with a loader that starts the probe afterwards; None for all others."""
        if name != "torch" or self._asking:
            return None
        self._asking = True
        try:
            spec = PathFinder.find_spec(name, path, target)
        finally:
            self._asking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            plain = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    start()

            loader.exec_module = exec_module
        return spec


def start() -> None:
    """Start the probe, from the batchfit that the parent runs, whatever this Python has installed."""
    try:
        find_ours()
        from batchfit._program.probe.start import start_probe

        start_probe()
    except Exception as error:  # noqa: BLE001  the program must not fail of its probe; the parent says it
        mark("failed", f"{type(error).__name__}: {error}\n")


def note_exit(owner: int) -> None:
    """Note what ended this process, where it is one that torch was loaded in."""
    if os.getpid() != owner or "torch" not in sys.modules:
        return
    try:
        find_ours()
        from batchfit._program.probe import exit_note

        exit_note.note_exit(_EXIT_FILE)
    except Exception as error:  # noqa: BLE001  as above; without a note there is no restart
        mark("failed", f"{type(error).__name__}: {error}\n")


def find_ours() -> None:
    """Let the package be found, from now on."""
    if "batchfit" not in sys.modules:
        sys.meta_path.insert(0, OurFinder())


class OurFinder:
    """Finds the package batchfit where the parent has it, and nothing else of the parent's environment."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the package; its modules are found through its path."""
        if name != "batchfit":
            return None
        return PathFinder.find_spec(name, [os.environ["BATCHFIT_PROBE_SOURCE"]], target)


def chain() -> None:
    """Run the `sitecustomize` that this one hides, if there is one."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None and spec.origin != __file__:
        module = type(sys)("sitecustomize")
        module.__file__, module.__spec__ = spec.origin, spec
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
if _FOLDER and os.path.isdir(_FOLDER):
    mark("python")
    sys.meta_path.insert(0, TorchWatch())
elif _EXIT_FILE:
    atexit.register(note_exit, os.getpid())
chain()
