"""The picture of the README: what each finder answers, as a share of the largest size that trains.

    python benchmarks/hero.py write    # docs/images/finders-light.svg and -dark.svg
    python benchmarks/hero.py check    # exit code 1 where they are not what the JSON says

Rules: a row per finder, a dot per model, a red cross where the answer dies in training; nothing is drawn that
is not in the newest `results/find_h200_*.json`. The file is written by hand, not by a plotting library, so
that the same figures give the same text, and a test can compare it. Standard library only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import find_gpu
import goals

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
Results = dict[str, Any]
NAMES = {  # finders as readers know them
    "batchfit_predict": "batchfit",
    "accelerate_4096": "Accelerate, from 4096",
    "lightning_binsearch": "Lightning, binsearch",
    "toma": "toma",
    "lightning_power": "Lightning, power",
    "accelerate": "Accelerate, from 128",
    "bisection": "double, then bisect",
    "torch_max_mem": "torch-max-mem",
    "batch_finder": "batch-finder",
}
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS = {
    "light": {"text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0", "band": "#eaf2fb",
              "ours": "#0969da", "others": "#818b98", "dies": "#d1242f"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d", "band": "#15233a",
             "ours": "#4493f8", "others": "#9198a1", "dies": "#f85149"},
}  # fmt: skip
WIDTH, LEFT, RIGHT = 860, 178, 660  # of the picture, and of the axis from 0 to 110 %
TOP, ROW = 78, 32
END = 110.0  # of the axis, in %


@dataclass(frozen=True)
class Dot:
    """One answer: its share of the largest size that trains, in %, and whether it dies in training."""

    model: str
    share: float
    dies: bool


@dataclass(frozen=True)
class Finder:
    """One row."""

    name: str
    dots: tuple[Dot, ...]
    ooms: int  # in all searches together


def finders(found: Results) -> list[Finder]:
    """The rows: those that answered for at least one model, in the order of `NAMES`."""
    cases = {name: one for name, one in found["cases"].items() if name.endswith(f"/{find_gpu.CAP}")}
    rows = []
    for key, name in NAMES.items():
        answered = {
            model: case
            for model, case in cases.items()
            if case["find"].get(key, {}).get("answer") is not None
        }
        dots = tuple(
            Dot(
                model.split("/")[0],
                100 * case["find"][key]["answer"] / find_gpu.sustained(case),
                find_gpu.lasts(case, case["find"][key]["answer"])[0] is False,
            )
            for model, case in answered.items()
        )
        if dots:
            rows.append(Finder(name, dots, sum(case["find"][key]["ooms"] for case in answered.values())))
    return rows


def _x(share: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * share / END, 1)


def _apart(dots: tuple[Dot, ...]) -> Iterator[tuple[Dot, float]]:
    """Dots from left to right, those that would cover each other above and below the middle of the row."""
    last, at = -100.0, 0
    for dot in sorted(dots, key=lambda one: (one.share, one.model)):
        at = at + 1 if dot.share - last < 2.4 else 0
        last = dot.share
        yield dot, (0, -7, 7, -3.5, 3.5, 0)[at % 6]


def _text(x: float, y: float, words: str, colour: str, *, size: int = 13, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}"{more}>{words}</text>'


def _row(row: Finder, y: float, colours: dict[str, str]) -> Iterator[str]:
    ours = row.name == "batchfit"
    weight = ' font-weight="600"' if ours else ""
    yield _text(LEFT - 14, y + 4.5, row.name, colours["text"], more=f' text-anchor="end"{weight}')
    for dot, down in _apart(row.dots):
        x, middle = _x(dot.share), round(y + down, 1)
        title = f"<title>{row.name}, {dot.model}: {dot.share:.1f} %{', dies in training' * dot.dies}</title>"
        if dot.dies:
            arms = f"M{x - 4.5} {middle - 4.5}l9 9m0 -9l-9 9"
            yield f'<path d="{arms}" stroke="{colours["dies"]}" stroke-width="2.6">{title}</path>'
        else:
            fill = colours["ours" if ours else "others"]
            yield f'<circle cx="{x}" cy="{middle}" r="4.6" fill="{fill}">{title}</circle>'
    dead = sum(dot.dies for dot in row.dots)
    middle = ' text-anchor="middle"' + weight
    colour = colours["dies"] if dead else colours["text"]
    yield _text(RIGHT + 50, y + 4.5, f"{dead} of {len(row.dots)}", colour, more=middle)
    yield _text(RIGHT + 142, y + 4.5, str(row.ooms), colours["text"], more=middle)


def draw(rows: list[Finder], scheme: str) -> str:
    """The picture, as the text of an SVG file."""
    colours = COLOURS[scheme]
    bottom = TOP + ROW * len(rows)
    height = bottom + 64
    models = len({dot.model for row in rows for dot in row.dots})
    ours = next(row for row in rows if row.name == "batchfit")
    low, high = (pick(dot.share for dot in ours.dots) for pick in (min, max))
    dead = sum(dot.dies for row in rows for dot in row.dots if row is not ours)
    says = (
        f"batchfit answers {low:.0f} to {high:.0f} % of the largest batch size that trains, without an OOM; "
        f"{dead} answers of other finders die in training"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="{FONT}" role="img" aria-label="{says}">',
        _text(LEFT - 160, 24, "Answer, as % of the largest batch size that trains", colours["text"],
              size=16, more=' font-weight="600"'),
        _text(LEFT - 160, 46, f"{models} models in bf16 with AdamW, {find_gpu.CAP} GiB of an H200",
              colours["faint"]),
        _text(RIGHT + 50, 44, "dies in", colours["faint"], size=12, more=' text-anchor="middle"'),
        _text(RIGHT + 50, 60, "training", colours["faint"], size=12, more=' text-anchor="middle"'),
        _text(RIGHT + 142, 44, "OOMs in", colours["faint"], size=12, more=' text-anchor="middle"'),
        _text(RIGHT + 142, 60, f"{models} searches", colours["faint"], size=12, more=' text-anchor="middle"'),
        f'<rect x="8" y="{TOP}" width="{WIDTH - 16}" height="{ROW}" rx="6" fill="{colours["band"]}"/>',
    ]  # fmt: skip
    for share in (0, 25, 50, 75):
        x = _x(share)
        lines.append(f'<path d="M{x} {TOP}V{bottom}" stroke="{colours["grid"]}" stroke-dasharray="2 4"/>')
    full = _x(100)
    lines.append(f'<path d="M{full} {TOP - 8}V{bottom}" stroke="{colours["text"]}" stroke-width="1.4"/>')
    for share in (0, 25, 50, 75, 100):
        lines.append(_text(_x(share), bottom + 18, f"{share} %", colours["faint"], size=12,
                           more=' text-anchor="middle"'))  # fmt: skip
    for number, row in enumerate(rows):
        lines += _row(row, TOP + ROW * (number + 0.5), colours)
    key = bottom + 50
    lines += [
        f'<circle cx="{LEFT + 6}" cy="{key - 4}" r="4.6" fill="{colours["others"]}"/>',
        _text(LEFT + 18, key, f"one of {models} models", colours["faint"], size=12),
        f'<path d="M{LEFT + 140} {key - 8.5}l9 9m0 -9l-9 9" stroke="{colours["dies"]}" stroke-width="2.6"/>',
        _text(LEFT + 157, key, "the answer runs out of memory within 200 steps", colours["faint"], size=12),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def pictures(results: Path = RESULTS) -> dict[str, str]:
    """File name -> its text."""
    kept = goals.newest(results, "find_h200_*.json")
    if kept is None:
        raise FileNotFoundError(f"{results} has no find_h200_*.json")
    rows = finders(json.loads(kept.read_text(encoding="utf-8")))
    return {f"finders-{scheme}.svg": draw(rows, scheme) for scheme in COLOURS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("--images", type=Path, default=IMAGES)
    given = parser.parse_args()
    wrong = []
    for name, text in pictures().items():
        file = given.images / name
        if given.command == "write":
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            wrong.append(name)
    if wrong:
        print(f"{' and '.join(wrong)}: not what the JSON says. Run: python benchmarks/hero.py write")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
