"""Runs the steps of pages: one process imports torch and batchfit, and each step is a fork of it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from doc_pages import Step, command_words, difference, steps, written

SECONDS = 240


def _child(order: dict[str, Any]) -> None:
    """In the forked process: become the program that the page names."""
    os.setpgid(0, 0)
    os.chdir(order["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(order["environment"])
    words = order["words"]
    sys.path.insert(0, order["folder"])
    code = 0
    try:
        if words[0] == "batchfit":
            import batchfit._cli

            sys.argv = words
            batchfit._cli.main()
        elif words[1] == "-m":
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words[1:]
            if order["strict"]:
                warnings.simplefilter("error")
            runpy.run_path(words[1], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the process ends here, as a program would
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    import torch
    import torch._dynamo  # as a first optimizer does

    import batchfit
    import batchfit._cli.app

    for name in batchfit.__all__:
        getattr(batchfit, name)
    torch.ones(2, 2).sum()
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(order)
        end = time.monotonic() + SECONDS
        while True:
            pid, status, used = os.wait4(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
        answer = {"code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
        print(json.dumps(answer), flush=True)


class Pages:
    """The process that runs the steps; `with Pages() as pages: pages.run(text, folder)`."""

    def __init__(self) -> None:
        own = os.pathsep.join(path for path in sys.path if path)
        settings = {
            "PYTHONPATH": own,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONIOENCODING": "utf-8",
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _run(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def run_step(self, step: Step, folder: Path, *, strict: bool = True) -> dict[str, Any]:
        """Exit status, outputs and CPU seconds of one step in `folder`."""
        if step.kind == "file":
            (folder / step.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / step.name).write_text(step.text, encoding="utf-8")
            return {"code": 0, "stdout": "", "stderr": "", "both": "", "cpu_s": 0.0}
        environment, words, into = {}, ["python", step.name or f"block_at_line_{step.line}.py"], ""
        if step.kind == "command":
            environment, words, into = command_words(step.text)
        else:
            (folder / words[1]).write_text(step.text, encoding="utf-8")
        outputs = folder / ".outputs"
        outputs.mkdir(exist_ok=True)
        place = {name: outputs / f"{len(list(outputs.iterdir()))}.{name}" for name in ("stdout", "stderr")}
        environment = {"BATCHFIT_CACHE": str(folder / ".store"), **environment}
        order = {"folder": str(folder), "words": words, "environment": environment, "strict": strict}
        done = self._run({**order, **{name: str(path) for name, path in place.items()}})
        for name, path in place.items():
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            done[name] = text.replace(f"{folder}/", "").replace(str(folder), ".")
        if into:
            (folder / into).write_text(done["stdout"], encoding="utf-8")
            done["stdout"] = ""
        return done


def wrong_with(step: Step, done: dict[str, Any]) -> str:
    """Empty where a step ended as its page says."""
    wanted = int(step.marks.get("exits with", 0))
    if done["code"] != wanted:
        printed = f"{done['stdout'][-1000:]}\n{done['stderr'][-3000:]}"
        return f"{step.text[:100]!r} ends with {done['code']}:\n{printed}"
    if step.expected is None:
        return ""
    varies = "output varies" in step.marks
    streams = [done["stdout"], done["stderr"], done["stderr"] + done["stdout"]]
    if step.kind == "code":
        streams = streams[:1]
    wrong = [difference(step.expected, stream, varies=varies) for stream in streams]
    return "" if "" in wrong else wrong[0] or wrong[-1]


def run_from_shell(pages: list[Path], write: bool) -> int:
    failed = 0
    with Pages() as server:
        for page in pages:
            text = page.read_text(encoding="utf-8")
            todo, wrong = steps(text)
            outputs: dict[tuple[int, int], str] = {}
            spent = 0.0
            with tempfile.TemporaryDirectory() as folder:
                for step in todo:
                    done = server.run_step(step, Path(folder))
                    spent += done["cpu_s"]
                    number = sum(line == step.line for line, _ in outputs)
                    if step.kind != "file":
                        printed = done["stdout"] or (done["stderr"] if step.kind == "command" else "")
                        outputs[step.line, number] = printed
                    if found := wrong_with(step, done):
                        wrong.append(f"line {step.line}: {found}\nit prints:\n{printed}")
            if write:
                page.write_text(written(text, outputs), encoding="utf-8")
            failed += bool(wrong)
            print(f"{page}: {len(todo)} steps, {spent:.1f} s of CPU time, {len(wrong)} wrong")
            print("\n".join(wrong))
    return int(failed > 0 and not write)


if __name__ == "__main__":
    _serve()
