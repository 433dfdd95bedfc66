"""Waits, in the program's Python, for the import of torch, and starts the probe then.

Rules: light and of the standard library, since every Python of the command pays for it. A `sitecustomize` of
the user's own runs as it would without this one. Nothing here raises into the program: what fails is written
to a file beside the socket, where the parent finds it. A program that starts others with an environment of
its own starts them with the probe.
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
_NAMES = ("BATCHFIT_PROBE", "BATCHFIT_LIMIT_BYTES")
_OURS = {name: text for name, text in os.environ.items() if name.startswith(_NAMES)}
_LIMIT_BYTES = os.environ.get("BATCHFIT_LIMIT_BYTES", "")  # of `batchfit run --budget`, which has no probe
_EXIT_FILE = os.environ.get("BATCHFIT_EXIT_FILE", "")  # of `batchfit run --restarts`, which has no probe


def mark(name: str, text: str = "") -> None:
    """Leave a small file for the parent of a probe."""
    if not _FOLDER:
        return
    try:
        number = os.open(os.path.join(_FOLDER, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(number, text.encode(errors="replace"))
        os.close(number)
    except OSError:
        pass


class ImportWatch:
    """Finds modules as Python would; once the code of one has run, what is to be done after it is done."""

    def __init__(self, after: dict[str, Any]) -> None:
        self._after = after
        self._asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a module that is expected, with a loader that calls back; None for all others."""
        if name not in self._after or self._asking:
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
                after = self._after.pop(name, None)
                if after is not None:
                    after(module)

            loader.exec_module = exec_module
        return spec


def start(_torch: ModuleType) -> None:
    """Start the probe, from the batchfit that the parent runs, whatever this Python has installed."""
    if sys.version_info < (3, 11):  # noqa: UP036  the program's Python is not the parent's
        mark("failed", "it is Python {}.{}, and the probe needs 3.11 or later".format(*sys.version_info[:2]))
        return
    try:
        find_ours()
        from batchfit._program.probe.start import start_probe

        start_probe()
    except Exception as error:  # noqa: BLE001  the program must not fail of its probe; the parent says it
        mark("failed", f"{type(error).__name__}: {error}\n")


def limit_memory(_torch: ModuleType) -> None:
    """Limit the memory of a real run; one that cannot be limited does not run."""
    try:
        find_ours()
        from batchfit._program.probe.limit import MemoryLimit

        MemoryLimit(int(_LIMIT_BYTES))
    except Exception as error:  # noqa: BLE001  whatever it is, there would be no limit
        sys.stderr.write(f"batchfit: the budget cannot be kept: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(4)


def limit_side_effects(module: ModuleType) -> None:
    """Keep a tracker or an upload of the program from writing where its real runs do."""
    try:
        find_ours()
        from batchfit._program.probe.side_effects import redirect

        redirect(module, _FOLDER)
    except Exception as error:  # noqa: BLE001  as above
        mark("side_effects", f"{module.__name__}: {error}\n")


def follow_children(subprocess: Any) -> None:
    """Give the probe to the processes of `subprocess`, whatever environment they get."""
    plain = subprocess.Popen.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        env = kwargs.get("env")
        path = (os.environ if env is None else env).get("PYTHONPATH") or ""
        if _HERE not in path.split(os.pathsep):
            whole = os.pathsep.join([_HERE, path]) if path else _HERE
            kwargs["env"] = {**(os.environ if env is None else env), **_OURS, "PYTHONPATH": whole}
        plain(self, *args, **kwargs)

    subprocess.Popen.__init__ = __init__


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
    """Let `import batchfit` find the package where the parent has it."""
    if "batchfit" not in sys.modules and not any(isinstance(one, OurFinder) for one in sys.meta_path):
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
    after: dict[str, Any] = {"torch": start, "subprocess": follow_children}
    if os.environ.get("BATCHFIT_PROBE"):
        trackers = ("torch.utils.tensorboard.writer", "tensorboardX.writer", "huggingface_hub.hf_api")
        after.update(dict.fromkeys(trackers, limit_side_effects))
    sys.meta_path.insert(0, ImportWatch(after))
elif _LIMIT_BYTES:
    sys.meta_path.insert(0, ImportWatch({"torch": limit_memory, "subprocess": follow_children}))
elif _EXIT_FILE:
    atexit.register(note_exit, os.getpid())
chain()
