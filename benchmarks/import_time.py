"""What `import batchfit` and `batchfit --help` cost, beside a bare interpreter and `import torch`.

    python benchmarks/import_time.py run --out FILE.json [--rounds N]
    python benchmarks/import_time.py page FILE.json --to FILE.md

Each start is a process of its own. `typer with rich` imports what typer needs to draw a help text, and no
more: the least that a `--help` of this look can take. What a start has loaded is looked up, not assumed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from turns import IN_TURN, about, children_cpu_s, in_turn, made_by, median_ms, ratio

HEAVY = ("torch", "pydantic", "numpy", "typer", "rich", "typing")
HELP = "import sys; sys.argv = ['batchfit', '--help']; from batchfit._cli import main; main()"
STARTS = {
    "bare interpreter": "pass",
    "import batchfit": "import batchfit",
    "batchfit --help": HELP,
    "typer with rich": "import typer, typer.rich_utils",
    "import typing": "import typing",
}
TORCH = {"bare interpreter": "pass", "import batchfit": "import batchfit", "import torch": "import torch"}
TELL = """\
import atexit, sys
atexit.register(lambda: print([name for name in {!r} if name in sys.modules], file=sys.stderr))
"""


def start(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr


def loaded(code: str) -> list[str]:
    """Which of the heavy modules it has loaded at its end."""
    found = start(TELL.format(HEAVY) + code).splitlines()[-1]
    return [name for name in HEAVY if f"'{name}'" in found]


def measure(rounds: int) -> dict[str, Any]:
    def ways(some: dict[str, str]) -> dict[str, Any]:
        return {name: lambda code=code: start(code) for name, code in some.items()}

    light = in_turn(ways(STARTS), rounds, seconds=children_cpu_s, warm_up=1)
    heavy = in_turn(ways(TORCH), max(3, rounds // 5), seconds=children_cpu_s, warm_up=1)
    return {
        "loads": {name: loaded(STARTS[name]) for name in ("import batchfit", "batchfit --help")},
        "cpu_ms": {**median_ms(light), "import torch": median_ms(heavy)["import torch"]},
        "ratios": {
            "import batchfit / bare interpreter": ratio(light, "import batchfit", "bare interpreter"),
            "batchfit --help / bare interpreter": ratio(light, "batchfit --help", "bare interpreter"),
            "batchfit --help / typer with rich": ratio(light, "batchfit --help", "typer with rich"),
            "import batchfit / import torch": ratio(heavy, "import batchfit", "import torch"),
        },
        "rounds": rounds,
    }


def page(found: dict[str, Any]) -> str:
    lines = [
        "# What a start costs",
        "",
        f"{made_by(found['about'])}. {IN_TURN}",
        "",
        "| start | CPU ms, median | loads of " + ", ".join(HEAVY) + " |",
        "|---|---|---|",
    ]
    for name, cost in found["cpu_ms"].items():
        loads = found["loads"].get(name)
        lines.append(f"| {name} | {cost:.1f} | {'' if loads is None else ', '.join(loads) or 'none'} |")
    lines += ["", "| ratio | |", "|---|---|"]
    lines += [f"| {name} | {value:.3g} |" for name, value in found["ratios"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--rounds", type=int, default=25)
    running.add_argument("--out", type=Path, required=True)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    told = about("python benchmarks/import_time.py run")
    found = {"about": told, **measure(given.rounds)}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(page(found))


if __name__ == "__main__":
    main()
