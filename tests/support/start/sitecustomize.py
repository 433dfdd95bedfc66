"""Every Python that a test starts: no garbage is collected while torch is imported, a quarter of that time.

Rules: a program finds all else as it would be without it. A `sitecustomize` that this one hides is run.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

LARGE = frozenset({"torch", "torch._dynamo", "transformers", "lightning", "accelerate", "trl", "peft", "ray"})


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            if was_enabled:
                gc.enable()


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in LARGE else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _run_hidden() -> None:
    own = os.path.dirname(__file__)
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != own]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(ModuleType("sitecustomize"))


# Behind finders of others, such as that of a probe.
place = sys.meta_path.index(PathFinder)
sys.meta_path.insert(place, _Finder)  # type: ignore[arg-type]
_run_hidden()
