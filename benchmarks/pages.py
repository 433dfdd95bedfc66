"""`page RESULTS [--to FILE]`: a benchmark's page is made from its JSON, never by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_page(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's flags."""
    paging = commands.add_parser("page")
    paging.add_argument("results", type=Path)
    paging.add_argument("--to", type=Path)


def write_page(given: argparse.Namespace, page: Callable[[Any], str]) -> None:
    """What it does: the page of the results into the file, or to stdout."""
    text = page(json.loads(given.results.read_text()))
    if given.to is None:
        print(text, end="")
    else:
        given.to.write_text(text)
