"""What the store keeps a command's answer by, and the size that it holds from an earlier search.

Rules: a command is known by its words, its places for the size, its folder, and what around it changes its
memory; no file of it is read. A stored size is confirmed by one run, so a shared key costs a run and never a
wrong answer.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import torch

from batchfit._engine.store.key import ALLOCATOR_VARIABLES, digest_of
from batchfit._find.recall import key_of_search, stored_size

if TYPE_CHECKING:
    from batchfit._find.pure.options import FindOptions
    from batchfit._find.pure.search import Search
    from batchfit._program.pure.stored_name import StoredName
    from batchfit._program.pure.template import CommandTemplate

KEY_VERSION = 1  # to be raised where a key means something else than it did
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def command_digest(name: StoredName, template: CommandTemplate, options: FindOptions) -> str:
    """A command's part of the key: under a name of the user's, or by what the command says."""
    command: list[object] = ["named", name.key]
    if name.key is None:
        words = list(template.words)
        words[0] = shutil.which(words[0]) or words[0]  # another environment has another python
        sets = [[one.file, list(one.keys)] for one in template.sets]
        command = [words, list(template.env), sets, os.getcwd()]
    around = {one: os.environ[one] for one in (*ALLOCATOR_VARIABLES, *_VISIBLE) if one in os.environ}
    device = None if options.device is None else str(options.device)
    parts = ["program", KEY_VERSION, command, around, device, options.budget_bytes, torch.__version__]
    return digest_of(parts)


def stored_before(digest: str, search: Search, options: FindOptions) -> int | None:
    """The size that an earlier search of the same command has found; None where there was none."""
    key = key_of_search(
        [digest], search, steps=options.steps, soak_steps=options.soak_steps, predict=options.predict
    )
    return stored_size(key, search)
