"""Pictures of the docs' pages, for light and dark: a search, the wait after a change of size, schedules.

    python benchmarks/drawings.py write    # docs/images/<subject>-light.svg and -dark.svg
    python benchmarks/drawings.py check    # exit code 1 where one is not what the JSON says

Rules: as in `hero.py`, whose colours these are. Nothing is drawn that is not in the newest JSON of its
subject, and the same figures give the same text, so that a test can compare it. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import find_gpu
import goals
from hero import COLOURS, FONT, IMAGES, NAMES, RESULTS, WIDTH

Results = dict[str, Any]
Colours = dict[str, str]
GIB = 2**30
CASE = f"resnet50/{find_gpu.CAP}"
OTHERS = ("bisection", "accelerate_4096", "lightning_binsearch", "batch_finder")
CHANGES = {  # keys of the JSON -> what a reader knows
    "no change": "no change",
    "planned": "planned, by a schedule",
    "set, larger": "set, to a larger size",
    "set, smaller": "set, to a smaller size",
    "re-created": "a new DataLoader",
}
WAYS = {
    "constant": "one size, rate decayed",
    "smith": "batch doubled instead (Smith et al.)",
    "seesaw": "Seesaw",
    "noise": "by the noise scale",
    "noise, bound": "by its lower bound",
}
LABEL_LEFT = {"noise, bound", "constant"}


def text(x: float, y: float, words: str, colour: str, size: int = 13, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}"{more}>{words}</text>'


def line(points: Iterable[tuple[float, float]], colour: str, more: str = "") -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{colour}"{more}/>'


def dot(x: float, y: float, colour: str, title: str = "", radius: float = 4.6) -> str:
    inside = f"<title>{title}</title>" if title else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">{inside}</circle>'


END, MIDDLE, BOLD = ' text-anchor="end"', ' text-anchor="middle"', ' font-weight="600"'


def framed(height: int, says: str, lines: list[str]) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="{FONT}" role="img" aria-label="{says}">'
    )
    return "\n".join([opening, *lines, "</svg>"]) + "\n"


def search(found: Results, colours: Colours) -> str:
    """Memory of each trial of one search, and below it the sizes that other finders tried."""
    case = found["cases"][CASE]
    trials = case["find"]["batchfit"]["trials"]
    left, right, top, bottom = 190, 700, 84, 284
    most = 1050
    budget = float(find_gpu.CAP)

    def at(size: float, gib: float) -> tuple[float, float]:
        return left + (right - left) * size / most, bottom - (bottom - top) * gib / (budget * 1.1)

    answer = case["find"]["batchfit"]["answer"]
    lines = [
        text(
            18,
            26,
            "How find works: a few readings, then a jump to the size that they allow",
            colours["text"],
            16,
            BOLD,
        ),
        text(
            18,
            48,
            f"ResNet-50 under {find_gpu.CAP} GiB of an H200: {len(trials)} sizes, no OOM, answer {answer}",
            colours["faint"],
        ),
    ]
    for gib in (0, 8, 16, 24):
        x, y = at(0, gib)
        stroke = colours["text"] if gib == budget else colours["grid"]
        dash = "" if gib == budget else ' stroke-dasharray="2 4"'
        lines.append(line([(x, y), (right, y)], stroke, dash))
        label = f"budget {gib} GiB" if gib == budget else f"{gib} GiB"
        lines.append(text(left - 12, y + 4.5, label, colours["faint"], 12, END))
    peaks = [at(one["size"], one["peak_bytes"] / GIB) for one in trials]
    held = at(0, trials[0]["held_bytes"] / GIB)
    ray = [held, *peaks]
    lines.append(line(ray, colours["ours"], ' stroke-width="1.4" stroke-dasharray="5 4"'))
    for number, (one, (x, y)) in enumerate(zip(trials, peaks, strict=True), 1):
        title = f"size {one['size']}: {one['peak_bytes'] / GIB:.1f} GiB, {one['steps_run']} steps"
        lines.append(dot(x, y, colours["ours"], title))
        beside = (-9, END) if number % 2 else (9, "")  # the last two lie close together
        lines.append(text(x + beside[0], y - 5, str(number), colours["ours"], 12, beside[1] + BOLD))
    last = peaks[-1]
    lines.append(
        text(
            last[0] + 10,
            last[1] + 22,
            f"{answer}: {trials[-1]['steps_run']} steps (stability check)",
            colours["text"],
            12,
        )
    )
    lines.append(
        text(
            peaks[1][0] + 12,
            peaks[1][1] + 16,
            f"{trials[1]['size']}: says how memory grows",
            colours["text"],
            12,
        )
    )
    lines.append(text(18, bottom + 32, "sizes tried", colours["faint"], 12))
    y = bottom + 52.0
    for name in ("batchfit", *OTHERS):
        one = case["find"][name]
        ours = name == "batchfit"
        label = "batchfit" if ours else NAMES[name]
        lines.append(text(left - 12, y + 4.5, label, colours["text"], 13, END + BOLD * ours))
        for size in one["sizes"]:
            x, _ = at(min(size, most), 0)
            lines.append(dot(x, y, colours["ours" if ours else "others"], f"{label}: {size}", 3.4))
        tried = f"{len(one['sizes'])} sizes, {one['ooms']} OOMs"
        lines.append(text(right + 16, y + 4.5, tried, colours["text"], 12))
        lines.append(line([(left, y + 12), (right, y + 12)], colours["grid"], ' stroke-width="0.6"'))
        y += 27
    for size in (0, 250, 500, 750, 1000):
        lines.append(text(at(size, 0)[0], y + 10, str(size), colours["faint"], 12, MIDDLE))
    lines.append(text(left - 12, y + 10, "batch size", colours["faint"], 12, END))
    beyond = [size for name in OTHERS for size in case["find"][name]["sizes"] if size > most]
    if beyond:
        lines.append(
            text(right, y + 28, f"sizes above {most} are drawn at the right edge", colours["faint"], 11, END)
        )
    says = f"batchfit tries {len(trials)} sizes on ResNet-50 and answers {answer} without an OOM"
    return framed(int(y + 40), says, lines)


def loader(found: Results, colours: Colours) -> str:
    """How long the loop waits for the first batch after a change."""
    left, right, top = 210, 740, 86
    most = max(statistics.median(o[0] for o in one["changes"]["re-created"]) for one in found["cases"])
    lines = [
        text(18, 26, "The wait for the first batch after the batch size changes", colours["text"], 16, BOLD),
        text(18, 48, "4 workers, median of 5 rounds; milliseconds", colours["faint"]),
    ]
    y = float(top)
    names = {"512 floats": "samples of 512 floats", "3x224x224": "images of 3 x 224 x 224"}
    for case in found["cases"]:
        lines.append(text(18, y, names.get(case["name"], case["name"]), colours["text"], 13, BOLD))
        y += 26
        for key, label in CHANGES.items():
            wait = 1e3 * statistics.median(one[0] for one in case["changes"][key])
            width = max(2.0, (right - left) * wait / (1e3 * most))
            colour = colours["others" if key == "re-created" else "ours"]
            lines.append(text(left - 12, y + 4.5, label, colours["text"], 13, END))
            lines.append(
                f'<rect x="{left}" y="{y - 8:.1f}" width="{width:.1f}" height="16" rx="2" fill="{colour}"/>'
            )
            lines.append(text(left + width + 8, y + 4.5, f"{wait:.1f} ms", colours["text"], 12))
            y += 25
        y += 16
    return framed(int(y), "A planned change costs nothing; a new DataLoader costs about 100 ms", lines)


def schedules(found: Results, colours: Colours) -> str:
    """Held-out loss against seconds, a dot per seed."""
    runs: dict[str, list[Results]] = {}
    for key, one in found["runs"].items():
        runs.setdefault(key.rpartition("/")[0], []).append(one)
    left, right, top, bottom = 84, 830, 76, 340
    low, high, longest = 1.72, 1.96, 44.0

    def at(seconds: float, loss: float) -> tuple[float, float]:
        down = (loss - low) / (high - low)
        return left + (right - left) * seconds / longest, bottom - (bottom - top) * down

    lines = [
        text(18, 26, "Do schedules pay? Held-out loss against training time", colours["text"], 16, BOLD),
        text(
            18,
            48,
            "10.9M parameters, 25.2M tokens each, one H200; a dot per seed, a ring at the mean",
            colours["faint"],
        ),
    ]
    for loss in (1.75, 1.80, 1.85, 1.90, 1.95):
        x, y = at(0, loss)
        lines.append(line([(x, y), (right, y)], colours["grid"], ' stroke-dasharray="2 4"'))
        lines.append(text(left - 12, y + 4.5, f"{loss:.2f}", colours["faint"], 12, END))
    for seconds in (0, 10, 20, 30, 40):
        lines.append(text(at(seconds, low)[0], bottom + 20, f"{seconds} s", colours["faint"], 12, MIDDLE))
    for way, label in WAYS.items():
        some = runs[way]
        colour = colours["others" if way == "constant" else "ours"]
        for one in some:
            lines.append(dot(*at(one["seconds"], one["loss"]), colour, f"{label}: {one['loss']:.3f}", 3.6))
        mean = at(*(statistics.mean(one[key] for one in some) for key in ("seconds", "loss")))
        ring = f'cx="{mean[0]:.1f}" cy="{mean[1]:.1f}" r="8"'
        lines.append(f'<circle {ring} fill="none" stroke="{colour}" stroke-width="1.6"/>')
        down = 24 if way in LABEL_LEFT else -14
        anchor, shift = (END, -6) if way in LABEL_LEFT else ("", 12)
        lines.append(text(mean[0] + shift, mean[1] + down, label, colours["text"], 12, anchor))
    worst = runs["constant x4"]
    loss, seconds = (statistics.mean(one[key] for one in worst) for key in ("loss", "seconds"))
    lines.append(
        text(
            right,
            bottom + 44,
            f"not drawn: four times the batch throughout, loss {loss:.2f} after {seconds:.0f} s",
            colours["faint"],
            12,
            END,
        )
    )
    return framed(bottom + 58, "Growing the batch in place of a decay reached the lowest loss", lines)


DRAWN: dict[str, tuple[str, Callable[[Results, Colours], str]]] = {
    "search": ("find_h200_*.json", search),
    "loader": ("loader_h200_*.json", loader),
    "schedules": ("schedules_h200_*.json", schedules),
}


def pictures(results: Path = RESULTS) -> dict[str, str]:
    """File name -> its text."""
    drawn = {}
    for subject, (pattern, draw) in DRAWN.items():
        kept = goals.newest(results, pattern)
        if kept is None:
            raise FileNotFoundError(f"{results} has no {pattern}")
        found = json.loads(kept.read_text(encoding="utf-8"))
        drawn |= {f"{subject}-{scheme}.svg": draw(found, colours) for scheme, colours in COLOURS.items()}
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("--images", type=Path, default=IMAGES)
    given = parser.parse_args()
    wrong = []
    for name, content in pictures().items():
        file = given.images / name
        if given.command == "write":
            file.write_text(content, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != content:
            wrong.append(name)
    if wrong:
        print(f"{', '.join(wrong)}: not what the JSON says. Run: python benchmarks/drawings.py write")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
