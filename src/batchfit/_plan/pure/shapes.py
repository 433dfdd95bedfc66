"""Finds a public model by its name, in the tables `known_decoders.py` and `known_others.py`.

Rules: a name is found however it is written: with or without its owner, in any case, `Qwen/Qwen3-8B` or
`qwen3-8b`. The number of parameters is the published one, and a test builds each model and counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from batchfit._plan.pure.known_decoders import DECODERS
from batchfit._plan.pure.known_others import OTHERS
from batchfit._plan.pure.model_shape import ModelShape
from batchfit.errors import TargetError

SHAPES: tuple[ModelShape, ...] = (*DECODERS, *OTHERS)
_SUFFIX = re.compile(r"-(instruct|chat|it|base|hf|v0\.\d|\d{4})(?=-|$)")


def shape_named(text: str) -> ModelShape:
    """The model of that name; of one that is not known, the names that are close."""
    names = dict(_names())
    key = _plain(text)
    found = names.get(key) or names.get(_SUFFIX.sub("", key))
    if found is not None:
        return found
    close = list(dict.fromkeys(names[one].name for one in get_close_matches(key, names, n=6, cutoff=0.5)))[:4]
    near = f" Close names: {', '.join(close)}." if close else ""
    raise TargetError(
        f"{text!r} is none of the {len(SHAPES)} models that batchfit knows without a download.{near} Give "
        "the path of its config.json instead, or a workload (file.py:name); `batchfit plan --list-models` "
        "lists all names"
    )


def model_lines() -> list[str]:
    """The known models, a line each."""
    wide = max(len(one.name) for one in SHAPES)
    return [f"{one.name:<{wide}}  {format_parameters(one.parameters):>6}" for one in SHAPES]


def format_parameters(count: int) -> str:
    """As people say it: 124M, 8.0B."""
    return f"{count / 1e9:.1f}B" if count >= 999_500_000 else f"{count / 1e6:.0f}M"


def _names() -> Iterator[tuple[str, ModelShape]]:
    for shape in SHAPES:
        for name in (shape.name, *shape.also):
            yield _plain(name), shape
            yield _SUFFIX.sub("", _plain(name)), shape


def _plain(name: str) -> str:
    return name.strip().rpartition("/")[2].lower().replace("_", "-")
