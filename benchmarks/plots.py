"""Pictures of the results for the docs, drawn from committed JSON.

    python benchmarks/plots.py write    # results/plot_<subject>.svg, of all that was measured
    python benchmarks/plots.py check    # exit code 1 where a picture is of other figures than the JSON's

Rules: nothing is drawn that is not in the JSON; of a subject that was measured several times the last month
counts. A picture carries the digest of its JSON, so that whether it is still right can be told without
matplotlib (whose versions draw the same figures differently). Only drawing imports it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import goals

RESULTS = Path(__file__).parent / "results"
OURS, OTHERS, LIGHT = "#1763b6", "#8a8f98", "#a9c6e8"
Results = dict[str, Any]


def canvas() -> Any:
    """matplotlib's pyplot, set so that the same figures give the same small file."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "batchfit", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    return pyplot


def search(found: Results) -> Any:
    """What each search costs, and how near it comes; its failures beside."""
    runs = sorted(found["groups"]["beside"], key=lambda one: one["ooms_mean"], reverse=True)
    names = [one["name"].replace("batchfit guided", "batchfit") for one in runs]
    colours = [OURS if one["name"].startswith("batchfit") else OTHERS for one in runs]
    figure, panels = canvas().subplots(1, 3, figsize=(12, 4.2), layout="constrained", sharey=True)
    shown = (("trials_mean", "trials, mean", 1), ("ooms_mean", "of them out of memory, mean", 1))
    for panel, (key, label, by) in zip(
        panels, (*shown, ("share_of_max_mean", "answer, % of the maximum", 100)), strict=True
    ):
        bars = panel.barh(names, [by * one[key] for one in runs], color=colours)
        panel.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        panel.set(xlabel=label, xlim=(0, 1.15 * max(by * one[key] for one in runs)))
    figure.suptitle(f"search over {len(found['maxima'])} simulated maxima")
    return figure


def lasting(found: Results) -> Results:
    """The cases with peers whose largest size that lasts is known."""
    import find_gpu

    return {
        name: one
        for name, one in found["cases"].items()
        if find_gpu.sustained(one) and set(one["find"]) - set(find_gpu.OURS)
    }


def find(found: Results) -> Any:
    """How near each finder's answer is to the largest size that lasts, and what it took to get it."""
    import find_gpu

    cases = lasting(found)
    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure, panels = canvas().subplots(
        rows, columns, figsize=(4 * columns, 2.9 * rows), layout="constrained", squeeze=False, sharey=True
    )
    names = [one for one in reversed(find_gpu.FINDERS) if any(one in case["find"] for case in cases.values())]
    for panel in panels.flat[len(cases) :]:
        panel.set_axis_off()
    for panel, (name, case) in zip(panels.flat, cases.items(), strict=False):
        best = find_gpu.sustained(case)
        for at, finder in enumerate(names):
            one = case["find"].get(finder, {"error": "not run"})
            if "error" in one:
                continue
            share = 100 * (one["answer"] or 0) / best
            dies = bool(one["answer"]) and find_gpu.lasts(case, one["answer"])[0] is False
            colour = OURS if finder in find_gpu.OURS else OTHERS
            panel.barh(at, share, color=colour, alpha=0.35 if dies else 1)
            ooms = f", {one['ooms']} OOM{'s' * (one['ooms'] > 1)}" if one["ooms"] else ""
            text = f"{one['answer'] or 'none'}{', dies' if dies else ''}: {one['seconds']:.1f} s{ooms}"
            panel.annotate(text, (max(share, 100) + 3, at), fontsize=7, va="center")
        panel.axvline(100, color="black", linewidth=0.5)
        panel.set(title=titled(name, "{} GiB"), xlim=(0, 185), xticks=(0, 50, 100), yticks=range(len(names)))
        panel.set_yticklabels([FINDERS.get(one, one) for one in names])
        panel.set_xlabel("answer, % of the largest that lasts")
    return figure


# Keys of the JSON -> what a reader knows.
FINDERS = {
    "batchfit_predict": "batchfit",
    "batchfit": "batchfit, no prediction",
    "accelerate": "Accelerate",
    "accelerate_4096": "Accelerate, from 4096",
    "lightning_power": "Lightning, power",
    "lightning_binsearch": "Lightning, binsearch",
    "torch_max_mem": "torch-max-mem",
    "batch_finder": "batch-finder",
}
MODELS = {
    "gpt2": "GPT-2 small",
    "resnet50": "ResNet-50",
    "vit": "ViT-B/16",
    "t5_small": "T5-small",
    "convnext": "ConvNeXt",
    "llama110m": "Llama-110M",
}
RAGGED_WAYS = {
    "ours": "batchfit",
    "by_hand": "packed by hand",
    "fixed_8": "fixed microbatches of 8",
    "fixed_12": "fixed microbatches of 12",
    "one_shape": "one length, no padding (the limit)",
    "halving": "halved after each OOM",
}


def titled(case: str, memory: str) -> str:
    """`gpt2/24` as "GPT-2 small, 24 GiB"."""
    model, _, size = case.partition("/")
    return f"{MODELS.get(model, model)}, {memory.format(size)}"


def ragged(found: Results) -> Any:
    """Tokens per second by each way, cold and warm, with the same switch for all."""
    ways = list(dict.fromkeys(name.split("/")[0] for name, one in found.items() if "cold" in one))
    figure, panels = canvas().subplots(
        1, 2, figsize=(12, 3.4), layout="constrained", sharex=True, sharey=True
    )
    for panel, flags, title in zip(
        panels,
        ("default", "no_cudnn_attention"),
        ("torch's defaults", "cuDNN's attention off for all"),
        strict=True,
    ):
        there = [way for way in reversed(ways) if "cold" in found.get(f"{way}/{flags}", {})]
        for shift, phase in ((0.2, "cold"), (-0.2, "warm")):
            speeds = [found[f"{way}/{flags}"][phase]["tokens_per_s"] / 1e3 for way in there]
            light = ["#c5c8cd" if way != "ours" else LIGHT for way in there]
            dark = [OTHERS if way != "ours" else OURS for way in there]
            places = [at + shift for at in range(len(there))]
            bars = panel.barh(places, speeds, height=0.38, color=dark if phase == "cold" else light)
            panel.bar_label(bars, fmt=f"%.0fk {phase}", padding=2, fontsize=7)
        names = [RAGGED_WAYS.get(way, way) for way in there]
        panel.set(yticks=range(len(there)), yticklabels=names, title=title, xlabel="thousand tokens/s")
        panel.margins(x=0.18)
    return figure


def prediction(found: Results) -> Any:
    """The signed error of each predicted size, by what the prediction had to go by."""
    modes = (
        ("none", "no GPU", 10),
        ("gpu", "GPU there,\nnot run", 6),
        ("calibrated", "calibrated", 5),
    )
    figure, panel = canvas().subplots(figsize=(9, 3), layout="constrained")
    for row, (mode, _, worst) in enumerate(modes):
        panel.barh(row, 2 * worst, left=-worst, height=0.8, color="#eef2f7")
        errors = sorted(
            (100 * (one["raw"] / truth["sustained"] - 1), abs(one["raw"] - truth["sustained"]) <= 1)
            for key, truth in found["truth"].items()
            for one in [found.get(mode, {}).get(key, {})]
            if "@" not in key and "sustained" in truth and "raw" in one
        )
        for near, colour in ((True, LIGHT), (False, OURS)):
            some = [(error, at) for at, (error, close) in enumerate(errors) if close is near]
            heights = [row + 0.7 * (at + 0.5) / len(errors) - 0.35 for _, at in some]
            label = ("within one sample" if near else "further") if row == 0 else None
            panel.scatter([error for error, _ in some], heights, s=10, color=colour, label=label)
    panel.set(
        yticks=range(len(modes)),
        yticklabels=[name for _, name, _ in modes],
        xlabel="error of the predicted size, % (shaded: the goal for the worst case)",
    )
    panel.legend(fontsize=8, loc="upper right")
    return figure


def swept(found: Results) -> list[str]:
    return [row for row, one in found.items() if row.endswith("/sweep") and "points" in one]


def profile(found: Results) -> Any:
    """Throughput against the batch size: every size of a sweep, those that a profile tried, its advice."""
    rows = swept(found)
    across = min(3, len(rows))
    down = -(-len(rows) // across)
    figure, panels = canvas().subplots(
        down, across, figsize=(4 * across, 3 * down), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(rows) :]:
        panel.set_visible(False)
    for panel, row in zip(panels.flat, rows, strict=False):
        model, cap, _ = row.split("/")
        points = found[row]["points"]
        sizes, rates = [one["size"] for one in points], [one["samples_per_s"] for one in points]
        panel.plot(sizes, rates, color=OTHERS, marker=".", label="full sweep")
        ours = found.get(f"{model}/{cap}/ours/1", {})
        if "points" in ours:
            tried = [(one["size"], one["samples_per_s"]) for one in ours["points"]]
            panel.scatter(*zip(*tried, strict=True), color=OURS, s=14, label="timed by batchfit", zorder=3)
            panel.axvline(ours["recommended"], color=OURS, linewidth=0.8, linestyle="--", label="recommended")
        panel.set(
            xscale="log",
            xlabel="batch size",
            ylabel="samples/s",
            title=titled(f"{model}/{cap.replace('GiB', ' GiB')}", "{}"),
        )
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
    return figure


@dataclass(frozen=True)
class Plot:
    """A subject, its JSON, and what its picture shows."""

    subject: str
    pattern: str
    draw: Callable[[Results], Any]
    shows: str
    ready: Callable[[Results], object] = bool  # whether there is something to draw

    def file(self, results: Path) -> Path:
        return results / f"plot_{self.subject}.svg"


PLOTS = (
    Plot("search", "search_simulated.json", search, "Trials, failures and answers of simulated searches"),
    Plot(
        "find", "find_h200_*.json", find, "Finders: each answer beside the largest size that lasts", lasting
    ),
    Plot("prediction", "prediction_h200_*.json", prediction, "The error of each predicted size"),
    Plot("profile", "profile_h200_*.json", profile, "Throughput against the batch size", swept),
    Plot("ragged", "ragged_h200_*.json", ragged, "Tokens per second on ragged lengths, by each way"),
)


def digest(kept: Path) -> str:
    return f"<!-- of {kept.name}, sha256 {hashlib.sha256(kept.read_bytes()).hexdigest()[:16]} -->"


def wanted(results: Path) -> Iterator[tuple[Plot, Path, Results]]:
    """The pictures that there should be, each with its JSON."""
    for plot in PLOTS:
        kept = goals.newest(results, plot.pattern)
        found = json.loads(kept.read_text()) if kept is not None else {}
        if kept is not None and plot.ready(found):
            yield plot, kept, found


def stale(results: Path) -> list[str]:
    """Names of pictures that are missing, were drawn from other figures, or have none."""
    right = {plot.file(results): digest(kept) for plot, kept, _ in wanted(results)}
    wrong = [file for file in results.glob("plot_*.svg") if file not in right]
    wrong += [
        file for file, told in right.items() if not file.exists() or told not in file.read_text("utf-8")
    ]
    return sorted(file.name for file in wrong)


def write(results: Path) -> None:
    for plot, kept, found in wanted(results):
        file = plot.file(results)
        save(plot.draw(found), file)
        file.write_text(file.read_text(encoding="utf-8") + digest(kept) + "\n", encoding="utf-8")
        print(file.name)


def save(figure: Any, to: Path) -> None:
    figure.savefig(to, metadata={"Date": None})
    canvas().close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.command == "write":
        write(given.results)
    elif wrong := stale(given.results):
        print(f"{', '.join(wrong)}: not of the newest JSON. Run: python benchmarks/plots.py write")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
