"""Makes the pictures that are of a report: `python docs/images/make.py`, with Chromium and the `test` extra.

`report.png` is the demo's small GPT, traced for two GPUs. `step-light.png` and `step-dark.png` are the memory
of one step of the program on how-to/memory-breakdown.md. Pictures of results are drawn by
`benchmarks/hero.py` and `benchmarks/drawings.py`.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

import batchfit
from batchfit._cli.commands.demo import OTHER_GPUS, small_gpt_training

WIDTH, HEIGHT = 900, 965
HERE = Path(__file__).parent
DARK = "@media screen and (prefers-color-scheme:dark)"


def photograph(page: Path, picture: Path, width: int, height: int, scale: int = 1) -> Image.Image:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium must be installed to make the picture (apt-get install chromium)")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--user-data-dir={picture.parent}/chromium", f"--window-size={width},{height}"]
    flags += [f"--force-device-scale-factor={scale}", f"--screenshot={picture}", page.as_uri()]
    subprocess.run([chromium, *flags], check=True, timeout=120, stderr=subprocess.DEVNULL)
    return Image.open(picture).convert("RGB")


def report(folder: Path) -> None:
    workload = small_gpt_training("cpu")
    predictions = [batchfit.predict_batch_size(workload, gpu=gpu) for gpu in OTHER_GPUS]
    why = batchfit.explain_memory(workload, batch_size=predictions[0].batch_size, gpu=OTHER_GPUS[0])
    page = batchfit.report([*predictions, why], folder / "report.html", title="A small GPT")
    # Few colours are enough for lines and letters, and a third of the bytes.
    photograph(page, folder / "report.png", WIDTH, HEIGHT).quantize(96).save(
        HERE / "report.png", optimize=True
    )


def step(folder: Path) -> None:
    """The figure "Memory over one step" alone, for both colour schemes of the site."""
    source = (HERE.parent / "how-to" / "memory-breakdown.md").read_text(encoding="utf-8")
    (program,) = re.findall(r'^```python title="train.py"\n(.*?)^```', source, re.DOTALL | re.MULTILINE)
    (folder / "train.py").write_text(program, encoding="utf-8")
    workload = runpy.run_path(str(folder / "train.py"))["workload"]()
    why = batchfit.explain_memory(workload, batch_size=32, gpu="rtx4090", what_if=False)
    text = batchfit.report(why, folder / "step.html").read_text(encoding="utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (figure,) = re.findall(r'<figure id="timeline-0".*?</figure>', text, re.DOTALL)
    figure = re.sub(r'<div class="tools">.*?</div>|<details>.*?</details>', "", figure, flags=re.DOTALL)
    for scheme, background in (("light", "#ffffff"), ("dark", "#1e2129")):
        rules = style.replace(DARK, "@media all" if scheme == "dark" else "@media not all")
        rules += f"body{{background:{background};padding:12px 24px}}"
        rules += "figure{border:0;background:none;box-shadow:none}"
        page = folder / f"step-{scheme}.html"
        page.write_text(
            f'<!DOCTYPE html><meta charset="utf-8"><style>{rules}</style>{figure}', encoding="utf-8"
        )
        shown = photograph(page, folder / f"step-{scheme}.png", 860, 520, scale=2)
        edge = ImageChops.difference(shown, Image.new("RGB", shown.size, shown.getpixel((0, 0)))).getbbox()
        shown = shown.crop((0, 0, shown.width, edge[3] + 24))
        shown.quantize(64).save(HERE / f"step-{scheme}.png", optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder))
        step(Path(folder))


if __name__ == "__main__":
    main()
