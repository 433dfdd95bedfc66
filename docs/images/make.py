"""Makes docs/images/report.png: `python docs/images/make.py`, with Chromium and the `test` extra installed.

What it shows is real: the demo's small GPT, traced for two cards, and what holds its memory on one of them.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

import batchfit
from batchfit._cli.commands.demo import OTHER_GPUS, small_gpt_training

WIDTH, HEIGHT = 900, 965
HERE = Path(__file__).parent


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium must be installed to make the picture (apt-get install chromium)")
    workload = small_gpt_training("cpu")
    predictions = [batchfit.predict_batch_size(workload, gpu=card) for card in OTHER_GPUS]
    told = batchfit.explain_memory(workload, batch_size=predictions[0].batch_size, gpu=OTHER_GPUS[0])
    with tempfile.TemporaryDirectory() as folder:
        page = batchfit.report([*predictions, told], Path(folder) / "report.html", title="A small GPT")
        picture = Path(folder) / "report.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={folder}/chromium", f"--window-size={WIDTH},{HEIGHT}"]
        subprocess.run(
            [chromium, *flags, f"--screenshot={picture}", page.as_uri()],
            check=True,
            timeout=120,
            stderr=subprocess.DEVNULL,
        )
        # Few colours are enough for lines and letters, and a third of the bytes.
        Image.open(picture).convert("RGB").quantize(96).save(HERE / "report.png", optimize=True)


if __name__ == "__main__":
    main()
