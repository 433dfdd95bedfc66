"""What is optional may be missing, each alone: the pip line where it is needed, all else as before.

The finders on the meta path do not find the package, in a process of its own: `import`, `find_spec` and
`importlib.metadata` are as without it. Where it is really absent (`tests/environments.py`, no extras), the
same tests hold.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

INTEGRATIONS = ("accelerate", "lightning", "torchtune", "transformers")
# Packages that are refused -> integrations that cannot do without them.
REFUSED = {
    "accelerate": (["accelerate"], ["accelerate", "transformers"]),
    "lightning": (["lightning", "pytorch_lightning", "lightning_fabric"], ["lightning"]),
    "torchtune": (["torchtune"], ["torchtune"]),
    "transformers": (["transformers"], ["transformers"]),
    "all of them": (
        ["accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "torchtune", "transformers",
         "ray", "matplotlib", "pandas", "yaml"],
        list(INTEGRATIONS),
    ),
}  # fmt: skip
PROGRAM = """
import importlib, sys, warnings

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {refused!r} else self.finder.find_spec(name, path, target)

    def find_distributions(self, *given):  # some ask what is installed before they import it
        found = getattr(self.finder, "find_distributions", lambda *given: ())(*given)
        return (one for one in found if one.name.lower().replace("-", "_") not in {refused!r})

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import batchfit
"""


def run_without(refused: list[str], code: str, folder: Path) -> str:
    program = PROGRAM.format(refused=set(refused)) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.slow
def test_an_integration_without_its_framework_says_the_pip_line_and_the_others_work(
    name: str, tmp_path: Path
) -> None:
    refused, broken = REFUSED[name]
    here = [one for one in INTEGRATIONS if one not in broken and _installed(one)]
    code = f"""
    for name in {broken!r}:
        try:
            importlib.import_module(f"batchfit.integrations.{{name}}")
        except ImportError as error:
            print(name, error)
    warnings.simplefilter("ignore")  # of the frameworks themselves
    for name in {here!r}:
        importlib.import_module(f"batchfit.integrations.{{name}}")
        print(name, "is here")
    """
    lines = [f'{one} pip install "batchfit[{one}]" to use batchfit.integrations.{one}' for one in broken]
    lines += [f"{one} is here" for one in here]
    told = run_without(refused, code, tmp_path).splitlines()
    assert [line for line in told if line.split(" ")[0] in INTEGRATIONS] == lines


def _installed(integration: str) -> bool:
    needed = {"transformers": ("transformers", "accelerate")}.get(integration, (integration,))
    return all(find_spec(one) is not None for one in needed)


def test_everything_else_works_without_any_of_them(tmp_path: Path) -> None:
    code = """
    import torch
    for name in batchfit.__all__:
        getattr(batchfit, name)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    workload = batchfit.training(model, optimizer, lambda model, x: model(x).mean(), torch.randn(2, 64))
    fit = batchfit.find_batch_size(workload, budget="1MiB", soak_steps=3)
    print(batchfit.report(fit, "report.html"), fit.batch_size > 100)
    batchfit.Microbatcher(model).backward(lambda x: model(x).mean(), torch.randn(8, 64))
    print(batchfit.BatchSizeScheduler("0:8 1:16").get_batch_size(1))
    print(not [name for name in sys.modules if name.split(".")[0] in {"matplotlib", "pandas", "ray", "yaml"}])
    """
    assert run_without(REFUSED["all of them"][0], code, tmp_path).splitlines() == [
        "report.html True",
        "16",
        "True",
    ]


@pytest.mark.parametrize(
    ("package", "code", "line"),
    [
        (
            "matplotlib",
            "from batchfit._cli import main; sys.argv = ['batchfit', 'schedule', 'show', '0:8 1:16',"
            " '--samples', '64', '--epochs', '2', '--plot', 'it.png']; main()",
            'pip install "batchfit[plot]"',
        ),
        ("yaml", "batchfit.load_schedule('it.yaml')", 'pip install "batchfit[yaml]" (or pyyaml) to read'),
        (
            "yaml",
            "from batchfit._cli import main; sys.argv = ['batchfit', 'sweep', 'it.yaml']; main()",
            "pip install \"batchfit[yaml]\" (or pyyaml) to read 'it.yaml', or write it as JSON",
        ),
        pytest.param(
            "yaml",
            "from batchfit._cli import main; sys.argv = ['batchfit', 'find', '--set', 'it.yaml:gamma', '--',"
            " 'python', 'it.yaml']; main()",
            'pip install "batchfit[yaml]" (or pyyaml) to change a value in it.yaml',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_an_option_needs_is_reported(package: str, code: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text("type: step\nstep_size: 2\ngamma: 2\n", encoding="utf-8")
    program = PROGRAM.format(refused={package}) + code
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert line in " ".join(done.stderr.split())
