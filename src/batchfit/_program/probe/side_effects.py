"""What trackers and uploads do in a probe that no variable of theirs switches off.

Rules: only in probes, never in a program's real run. TensorBoard writes to the probe's own folder; on the
Hugging Face Hub no repository is made and nothing is uploaded, while reading goes on.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

_UPLOADS = (
    "upload_file",
    "upload_folder",
    "upload_large_folder",
    "create_commit",
    "create_branch",
    "create_tag",
)


def redirect(module: ModuleType, folder: str) -> None:
    """Change a module of a tracker or of the Hub that the program has just imported."""
    if module.__name__ == "huggingface_hub.hf_api":
        _make_no_repositories(module)
    else:
        _write_into(module, os.path.join(folder, "t", "tensorboard"))


def _write_into(module: Any, place: str) -> None:
    plain = module.SummaryWriter.__init__

    @functools.wraps(plain)
    def __init__(self: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        kwargs.pop("logdir", None)
        plain(self, place, *args, **kwargs)

    module.SummaryWriter.__init__ = __init__


def _make_no_repositories(module: Any) -> None:
    def create_repo(self: Any, repo_id: str, *_: Any, **__: Any) -> Any:
        return module.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload(self: Any, *_: Any, **__: Any) -> None:
        return None

    module.HfApi.create_repo = create_repo
    for name in _UPLOADS:
        if hasattr(module.HfApi, name):
            setattr(module.HfApi, name, upload)
    api = getattr(module, "api", None)  # the functions of the module are methods of this one, bound before
    for name in ("create_repo", *_UPLOADS):
        if api is not None and hasattr(module, name):
            setattr(module, name, getattr(api, name))
