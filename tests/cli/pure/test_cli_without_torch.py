"""The command line without torch: help, targets, tracebacks, files, progress."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchfit._cli import help_texts
from batchfit._cli.commands import schedule_flags
from batchfit._cli.commands.find_answer import facts, headline, memory_label, show_answer
from batchfit._cli.exits import MEANINGS, Code, CommandFailed, codes_of
from batchfit._cli.output import check_writable, complain
from batchfit._cli.progress import (
    COLUMNS,
    Live,
    ProgressDisplay,
    TrialLines,
    _layout,
    is_terminal,
    progress_here,
    speaks,
    trial_line,
)
from batchfit._engine.workload import user_errors as failure
from batchfit._engine.workload.target import home_of, load_target, parse_target
from batchfit._files import write_atomically
from batchfit.errors import TargetError
from batchfit.results import FitResult, Trial

MIB = 2**20


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    """A loaded target changes `sys.path` and `sys.modules`: put both back."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


def batchfit_light(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; stderr ends with the heavy modules that were imported."""
    program = (
        "import atexit, sys\n"
        "heavy = ('torch', 'pydantic', 'numpy', 'batchfit._cli.commands.schedule')\n"
        "atexit.register(lambda: print('HEAVY', [n for n in heavy if n in sys.modules], file=sys.stderr))\n"
        "from batchfit._cli import main\n"
        "assert 'typer' not in sys.modules and 'rich' not in sys.modules\n"
        "main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"},
    )


class TestHelp:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("--help",),
            ("find", "--help"),
            ("run", "--help"),
            ("predict", "--help"),
            ("explain", "-h"),
            ("why", "--help"),
            ("doctor", "-h"),
            ("demo", "--help"),
            ("report", "--help"),
            ("schedule", "--help"),
            ("schedule", "show", "--help"),
            ("--version",),
            ("predict", "--list-gpus"),
        ],
    )
    def test_imports_nothing_heavy(self, arguments: tuple[str, ...]) -> None:
        ran = batchfit_light(*arguments)
        assert ran.returncode == 0
        assert ran.stderr.splitlines() == ["HEAVY []"]
        assert "\x1b" not in ran.stdout

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("find",),
            ("run",),
            ("predict",),
            ("explain",),
            ("why",),
            ("profile",),
            ("sweep",),
            ("report",),
            ("init",),
            ("doctor",),
            ("demo",),
            ("schedule",),
            ("schedule", "show"),
        ],
    )
    def test_lists_the_exit_codes_of_the_command(self, arguments: tuple[str, ...]) -> None:
        lines = [line.split() for line in batchfit_light(*arguments, "--help").stdout.splitlines()]
        listed = [code for code in Code if [str(int(code)), *MEANINGS[code].split()] in lines]
        assert listed == list(codes_of("".join(arguments[:1])))
        assert len(codes_of("find")) < len(Code)

    def test_no_line_is_wider_than_a_terminal_shows(self) -> None:
        texts = [value for name, value in vars(help_texts).items() if name.endswith("_HELP")]
        assert len(texts) >= 12
        for line in "\n".join([*texts, schedule_flags.HELP, schedule_flags.SHOW_HELP]).splitlines():
            assert len(line) <= 78, line  # of 80, a space on either side

    @pytest.mark.parametrize("arguments", [(), ("find",), ("predict",), ("schedule",), ("schedule", "show")])
    def test_no_type_stands_beside_a_flag_without_a_value(self, arguments: tuple[str, ...]) -> None:
        text = batchfit_light(*arguments, "--help").stdout
        assert "Show this message" in text
        assert "<bool>" not in text
        assert "BOOLEAN" not in text

    def test_show_may_be_left_out_before_a_schedule(self, tmp_path: Path) -> None:
        file = tmp_path / "s.json"
        file.write_text('{"type": "milestone", "milestones": "0:32 2:64"}')
        rest = ("--samples", "500", "--epochs", "4")
        expected = batchfit_light("schedule", "show", "0:32 2:64", *rest).stdout
        assert "64" in expected
        for config in ("0:32 2:64", str(file)):
            assert batchfit_light("schedule", config, *rest).stdout == expected
        assert "No such command 'shwo'" in batchfit_light("schedule", "shwo", "0:32", *rest).stderr

    def test_the_numbers_are_a_promise(self) -> None:
        promised = {
            "FOUND": 0, "BROKEN": 1, "USAGE": 2, "NOTHING_FITS": 3, "RAISED": 4, "STOPPED": 5,
            "UNTRACEABLE": 6, "SOME_FAILED": 7, "MORE_MEMORY": 8, "INTERRUPTED": 130, "TERMINATED": 143,
        }  # fmt: skip
        assert {code.name: int(code) for code in Code} == promised

    def test_has_examples_and_says_what_a_budget_is_on_a_cpu(self) -> None:
        text = batchfit_light("find", "--help").stdout
        assert "batchfit find train.py:make_workload --budget 24GiB" in text
        assert "virtual" in text

    def test_version(self) -> None:
        import batchfit

        assert batchfit_light("--version").stdout == f"batchfit {batchfit.__version__}\n"

    @pytest.mark.parametrize(
        "arguments",
        [
            ("find",),
            ("find", "train.py:make", "--steps", "three"),
            ("find", "train.py:make", "--no-such-flag"),
            ("no-such-command",),
            ("find", "train.py:make", "--budget", "24 gigs"),
            ("find", "train.py:make", "--strategy", "magic"),
            ("find", "train.py:make", "--min-size", "0"),
            ("find", "train.py:make", "--min-size", "9", "--max-size", "8"),
            ("find", "no_such_file.py:make"),
            ("find", "train.py"),
            ("find", "no/such/folder/x.py:make", "--output", "no/such/folder/fit.json"),
            ("predict",),
            ("predict", "train.py:make", "--budget", "24GiB", "--budget", "24 gigs"),
            ("predict", "train.py:make", "--gpu", "h100", "--gpu", "toaster"),
            ("predict", "train.py:make", "--gpu", "a100 24GB"),
            ("predict", "train.py:make", "--gpu", "h100", "--margin", "1"),
            ("predict", "train.py:make", "--gpu", "h100", "--max-size", "0"),
            ("predict", "train.py:make", "--gpu", "h100", "--calibrate"),
            ("predict", "train.py:make", "--gpu", "h100", "--plot", "memory.gif"),
            ("predict", "no_such_file.py:make", "--gpu", "h100", "--expandable-segments"),
            ("why",),
            ("why", "no_such_file.pickle"),
            ("why", "no_such_file.pickle", "--gpu", "toaster"),
            ("why", "no_such_file.pickle", "--batch-size", "0"),
            ("why", "no_such_file.pickle", "--report", "why.pdf"),
            ("explain", "train.py:make"),
            ("explain", "train.py:make", "--batch-size", "0"),
            ("explain", "train.py:make", "--batch-size", "8", "--budget", "much"),
            ("explain", "train.py:make", "--batch-size", "8", "--gpu", "toaster"),
            ("explain", "no_such_file.py:make", "--batch-size", "8"),
        ],
    )
    def test_bad_usage_is_2_and_needs_no_torch(self, arguments: tuple[str, ...]) -> None:
        ran = batchfit_light(*arguments)
        assert ran.returncode == Code.USAGE
        assert ran.stdout == ""
        assert "Traceback" not in ran.stderr
        assert "torch" not in ran.stderr.splitlines()[-1]

    def test_a_bad_budget_is_said_before_the_target_is_looked_at(self) -> None:
        ran = batchfit_light("find", "no_such_file.py:make", "--budget", "24 gigs")
        assert "budget must be bytes" in ran.stderr
        assert "24 gigs" in ran.stderr
        assert "no_such_file" not in ran.stderr

    def test_an_unknown_gpu_is_answered_with_the_known_ones(self) -> None:
        ran = batchfit_light("predict", "train.py:make", "--gpu", "toaster")
        assert "gpu must be one of those that" in ran.stderr
        assert "'toaster'" in ran.stderr
        assert "predict --list-gpus" in ran.stderr

    def test_the_gpus_are_listed_with_what_is_known_of_them(self) -> None:
        rows = batchfit_light("predict", "--list-gpus").stdout.splitlines()
        listed = [" ".join(row.split()) for row in rows]
        assert "h200 139.3 GiB 9.0 measured" in listed
        assert "t4 14.1 GiB 7.5 reported" in listed
        assert "rtx4070 11.0 GiB 8.9 nominal figure, derived" in listed


class TestTargetText:
    @pytest.mark.parametrize("text", ["train", "train:", ":make", "", "a b:make", "pkg..mod:make", "dir/x"])
    def test_wrong_forms(self, text: str, project: Path) -> None:
        with pytest.raises(TargetError, match=r"target must be file.py:name"):
            parse_target(text)

    def test_a_forgotten_function_is_suggested(self, project: Path) -> None:
        write(project / "train.py", "def make(): ...\ndef step(size): ...\ndef _private(): ...\n")
        with pytest.raises(TargetError) as caught:
            parse_target("train.py")
        assert "did you mean train.py:make?" in str(caught.value)

    def test_a_missing_file_suggests_its_neighbour(self, project: Path) -> None:
        write(project / "code" / "train.py", "")
        with pytest.raises(TargetError, match="does not exist") as caught:
            parse_target("code/tran.py:make")
        assert "did you mean code/train.py:make?" in str(caught.value)
        with pytest.raises(TargetError, match="is a folder"):
            parse_target("code/:make")

    def test_the_last_colon_counts(self, project: Path) -> None:
        write(project / "a:b.py", "def make(): ...")
        assert parse_target("a:b.py:make").source == "a:b.py"


class TestLoading:
    def test_a_file_is_a_real_module(self, project: Path) -> None:
        write(project / "elsewhere" / "sibling.py", "VALUE = 7\n")
        write(
            project / "elsewhere" / "my_train.py",
            """
            from __future__ import annotations
            import sys
            from dataclasses import dataclass
            from sibling import VALUE
            ARGV = list(sys.argv)

            @dataclass
            class Config:
                size: int = VALUE

            def make():
                return Config()

            if __name__ == "__main__":
                raise RuntimeError("a target's main part must not run")
            """,
        )
        loaded = load_target(parse_target("elsewhere/my_train.py:make", ["--width", "8"]))
        made = loaded.make()
        assert made.size == 7  # type: ignore[attr-defined]
        assert pickle.loads(pickle.dumps(made)) == made
        assert sys.modules["my_train"].ARGV == ["elsewhere/my_train.py", "--width", "8"]
        assert sys.argv[0] != "elsewhere/my_train.py"
        assert loaded.line == "elsewhere/my_train.py:11"

    def test_a_module_is_found_in_the_current_folder(self, project: Path) -> None:
        write(project / "pkg_a" / "__init__.py", "")
        write(project / "pkg_a" / "train.py", "class Makers:\n    @staticmethod\n    def make(): return 1\n")
        assert load_target(parse_target("pkg_a.train:Makers.make")).make() == 1
        assert home_of(parse_target("pkg_a.train:Makers.make")) == str(project / "pkg_a")

    def test_relative_imports_of_a_file_in_a_package(self, project: Path) -> None:
        write(project / "pkg_b" / "__init__.py", "")
        write(project / "pkg_b" / "parts.py", "VALUE = 3\n")
        write(project / "pkg_b" / "train.py", "from .parts import VALUE\ndef make(): return VALUE\n")
        assert load_target(parse_target("pkg_b/train.py:make")).make() == 3

    def test_a_file_does_not_displace_a_loaded_module(self, project: Path) -> None:
        write(project / "json.py", "def make(): return 'mine'\n")
        assert load_target(parse_target("json.py:make")).make() == "mine"
        assert sys.modules["json"] is json

    def test_a_failed_file_leaves_no_module_behind(self, project: Path) -> None:
        write(project / "half.py", "def make(): ...\nraise KeyError('half')\n")
        with pytest.raises(KeyError, match="half"):
            load_target(parse_target("half.py:make"))
        assert "half" not in sys.modules

    def test_a_missing_function_is_suggested(self, project: Path) -> None:
        write(project / "train_c.py", "def make_workload(): ...\nVALUE = 1\n")
        with pytest.raises(TargetError, match=r"did you mean train_c.py:make_workload\?"):
            load_target(parse_target("train_c.py:make_worklod"))
        with pytest.raises(TargetError, match="it defines make_workload"):
            load_target(parse_target("train_c.py:zzz"))
        with pytest.raises(
            TargetError, match=r"VALUE is a int \(train_c.py\): a target is a Workload, a step"
        ):
            load_target(parse_target("train_c.py:VALUE"))

    def test_required_arguments_are_named_with_the_line(self, project: Path) -> None:
        write(project / "train_d.py", "import os\ndef step(batch_size): ...\ndef many(a, *, b, c=1): ...\n")
        step = load_target(parse_target("train_d.py:step"))
        assert step.line == "train_d.py:2"
        assert step.make() is sys.modules["train_d"].step, "one argument: the step itself"
        with pytest.raises(TargetError, match=r"train_d.py:3 needs arguments \(a, b\)"):
            load_target(parse_target("train_d.py:many"))

    def test_a_missing_module_is_suggested(self, project: Path) -> None:
        write(project / "pkg_e" / "__init__.py", "")
        write(project / "pkg_e" / "train.py", "")
        with pytest.raises(TargetError, match=r"no module 'pkg_e.tran'.*did you mean pkg_e.train:make\?"):
            load_target(parse_target("pkg_e.tran:make"))
        with pytest.raises(TargetError, match=r"no module 'pkg_f'.*did you mean pkg_e.train:make\?"):
            load_target(parse_target("pkg_f.train:make"))
        with pytest.raises(TargetError, match=r"'pkg_e.train' is no package"):
            load_target(parse_target("pkg_e.train.more:make"))

    def test_a_module_that_the_users_code_misses_is_the_users_error(self, project: Path) -> None:
        write(project / "train_g.py", "import not_installed_anywhere\n")
        for text in ("train_g:make", "train_g.py:make"):
            with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
                load_target(parse_target(text))

    def test_a_script_that_ends_the_program(self, project: Path) -> None:
        write(
            project / "script.py",
            """
            import argparse
            parser = argparse.ArgumentParser()
            parser.add_argument("data")
            parser.parse_args()
            """,
        )
        with pytest.raises(
            TargetError, match=r"SystemExit 2 at script.py:4.*__main__.*script.py:make -- --lr"
        ):
            load_target(parse_target("script.py:make"))
        with pytest.raises(TargetError, match="there is no 'make'"):  # its arguments were right
            load_target(parse_target("script.py:make", ["imagenet"]))


class TestFailure:
    def raised(self, project: Path, text: str) -> BaseException:
        write(project / "broken.py", text)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            load_target(parse_target("broken.py:make")).make()
        return caught.value

    def test_names_the_users_line_and_hides_libraries(self, project: Path) -> None:
        error = self.raised(
            project,
            "import json\ndef make():\n    return inner()\ndef inner():\n    return json.loads('{')\n",
        )
        home = str(project)
        assert failure.headline(error, what="broken.py:make", home=home) == (
            "broken.py:make raised JSONDecodeError at broken.py:5 (in inner)"
        )
        short = failure.details(error, home=home, full=False)
        assert 'broken.py", line 3' in short
        assert 'broken.py", line 5' in short
        assert "decoder.py" not in short
        assert "frames of libraries not shown" in short
        assert "decoder.py" in failure.details(error, home=home, full=True)

    def test_notes_and_causes_stay(self, project: Path) -> None:
        error = self.raised(
            project,
            """
            def make():
                try:
                    raise KeyError("first")
                except KeyError as error:
                    second = RuntimeError("second")
                    second.add_note("while trying 8")
                    raise second from error
            """,
        )
        text = failure.details(error, home=str(project), full=False)
        assert "KeyError: 'first'" in text
        assert "while trying 8" in text
        assert "line 3" in text

    def test_an_error_in_libraries_alone_still_has_a_frame(self) -> None:
        try:
            json.loads("{")
        except ValueError as error:
            text = failure.details(error, home="/nowhere", full=False)
        assert "line" in text

    def test_a_syntax_error_names_its_line(self, project: Path) -> None:
        error = self.raised(project, "x = 1\ndef make(:\n")
        assert "SyntaxError at broken.py:2" in failure.headline(error, what="broken.py:make", home=None)

    def test_whose_frame_it_is(self, tmp_path: Path) -> None:
        installed = tmp_path / "site-packages" / "lib" / "a.py"
        assert not failure.is_users(str(installed), home=None)
        assert not failure.is_users(str(installed), home=str(tmp_path))
        assert failure.is_users(str(installed), home=str(installed.parent))
        assert failure.is_users(str(tmp_path / "train.py"), home=None)
        assert not failure.is_users(json.__file__, home=None)
        assert not failure.is_users(failure.__file__, home=str(Path(failure.__file__).parents[3]))
        assert not failure.is_users("<string>", home=None)


class TestFiles:
    def test_whole_or_not_at_all(self, tmp_path: Path) -> None:
        path = tmp_path / "fit.json"
        write_atomically(path, "old")
        write_atomically(path, "new")
        assert path.read_text() == "new"
        with pytest.raises(UnicodeEncodeError):
            write_atomically(path, "new but broken \ud800")
        assert path.read_text() == "new"
        assert [file.name for file in tmp_path.iterdir()] == ["fit.json"]

    def test_who_reads_the_old_file_still_reads_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "fit.json"
        write_atomically(path, "old")
        with path.open() as reader:
            write_atomically(path, "new")
            assert reader.read() == "old"
        assert path.read_text() == "new"

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        real, link = tmp_path / "real.json", tmp_path / "link.json"
        real.write_text("old")
        link.symlink_to(real)
        write_atomically(link, "new")
        assert link.is_symlink()
        assert real.read_text() == "new"

    # Not with os.devnull: as root, a test that fails would take it from the whole machine.
    def test_a_pipe_stays_a_pipe(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
        reader.start()
        check_writable(pipe)
        write_atomically(pipe, "through the pipe")
        reader.join(timeout=10)
        assert read == ["through the pipe"]
        assert pipe.is_fifo()

    @pytest.mark.parametrize(
        ("name", "why"), [("-", "--json"), (".", "folder"), ("missing/fit.json", "does not exist")]
    )
    def test_refused_beforehand(self, name: str, why: str, project: Path) -> None:
        with pytest.raises(CommandFailed, match="output must be a file that can be written") as caught:
            check_writable(Path(name))
        assert caught.value.code == Code.USAGE
        assert why in caught.value.text

    def test_a_folder_without_the_right_to_write(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
        with pytest.raises(CommandFailed, match="permission denied; --output names another"):
            check_writable(Path("report.html"))
        with pytest.raises(CommandFailed, match=r"permission denied$"):
            check_writable(Path("train.py"), name="FILE")

    def test_the_folder_is_made_on_demand(self, project: Path) -> None:
        check_writable(Path("a/b/fit.json"), make_folder=True)
        write_atomically(Path("a/b/fit.json"), "x")
        (project / "file").write_text("")
        with pytest.raises(CommandFailed, match="; --output names another"):
            check_writable(Path("file/fit.json"), make_folder=True)


def trial(size: int = 24, outcome: str = "fits", **more: object) -> Trial:
    values = {"steps_run": 3, "peak_bytes": 18 * MIB, "step_s": 0.1, "elapsed_s": 0.4, **more}
    return Trial(size=size, outcome=outcome, **values)  # type: ignore[arg-type]


def fit(**more: object) -> FitResult:
    values: dict[str, object] = {
        "batch_size": 24,
        "trials": (trial(), trial(32, "oom", steps_run=1), trial(soak=True, steps_run=25)),
        "survived_steps": 25,
        "stopped_because": "bracketed",
        "budget_bytes": 24 * MIB,
        "peak_bytes": 18 * MIB,
        "device": "cpu",
        "strategy": "guided",
        "elapsed_s": 1.5,
        **more,
    }
    return FitResult(**values)  # type: ignore[arg-type]


class TestProgress:
    def test_a_plain_line_has_the_numbers_and_no_codes(self) -> None:
        stream = io.StringIO()
        with TrialLines(stream) as lines:
            lines.doing("not shown")
            lines.step(24, 1)
            lines.trial(1, trial(), 24 * MIB)
            lines.trial(2, trial(32, "oom", steps_run=1, phase="backward", peak_bytes=None), 24 * MIB)
        assert stream.getvalue().splitlines() == [
            "trial 1: size 24: fits, 3 steps, 18.0 MiB of 24.0 MiB (75.0%), 0.40 s",
            "trial 2: size 32: oom in backward, 1 step, no memory reading, 0.40 s",
        ]

    def test_reserved_memory_counts_where_it_is_known(self) -> None:
        assert "20.0 MiB of 40.0 MiB (50.0%)" in trial_line(1, trial(reserved_bytes=20 * MIB), 40 * MIB)

    def test_only_rank_0_speaks(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        assert speaks()
        assert isinstance(progress_here(steps=3, soak_steps=25), TrialLines)
        monkeypatch.setenv("RANK", "3")
        assert not speaks()
        progress = progress_here(steps=3, soak_steps=25)
        assert type(progress) is ProgressDisplay
        with progress:
            progress.note("a note")
            progress.trial(1, trial(), 24 * MIB)
        complain(CommandFailed(Code.USAGE, "the same on every rank"))
        assert capsys.readouterr().err == ""
        complain(CommandFailed(Code.RAISED, "true of this rank alone", every_rank=True))
        assert capsys.readouterr().err == "rank 3: error: true of this rank alone\n"

    def test_a_dumb_terminal_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        monkeypatch.setenv("TERM", "xterm")
        assert is_terminal(Terminal())
        assert not is_terminal(io.StringIO())
        monkeypatch.setenv("TERM", "dumb")
        assert not is_terminal(Terminal())

    @pytest.mark.parametrize("width", [20, 60, 70, 80, 90, 100, 200])
    def test_rows_fit_the_terminal(self, width: int) -> None:
        from rich.console import Console

        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, width=width, markup=False, color_system=None)
        with Live(steps=3, soak_steps=25, console=console) as live:
            live.doing("loading [bold]x[/bold]" + "y" * 300)
            live.note("[red]train.py[/red]:make")
            live.step(24, 1)
            live.step(24, 9)
            live.trial(1, trial(), 24 * MIB)
            live.trial(2, trial(123456, "oom", peak_bytes=None, step_s=None), 24 * MIB)
        shown = stream.getvalue()
        assert "[red]train.py[/red]:make" in shown.replace("\n", "")
        columns, bar = _layout(width)
        used = sum(COLUMNS[name] + 2 for name in columns) - 2 + (bar + 2 if bar else 0)
        assert used <= max(width, 53)

    def test_the_running_line_distinguishes_a_soak_from_a_trial(self) -> None:
        from rich.console import Console

        live = Live(steps=3, soak_steps=25, console=Console(file=io.StringIO(), width=100))
        live.step(24, 3)
        assert "trying 24  step 3 of 3" in live.picture().plain
        live.step(24, 4)
        assert "soaking 24  step 4 of 25" in live.picture().plain
        live.doing("choosing")
        assert "choosing" in live.picture().plain

    def test_the_bar_is_as_long_as_the_share(self) -> None:
        from rich.console import Console

        live = Live(steps=3, soak_steps=25, console=Console(file=io.StringIO(), width=100))
        for share in (0.0, 0.001, 0.5, 0.999, 1.0, 1.7):
            used, free = live.bar(share)
            assert len(used) + len(free) == live.bar_width
        assert live.bar(0.0)[0] == ""
        assert live.bar(1.0)[1] == ""
        assert len(live.bar(0.5)[0]) == live.bar_width // 2


class TestAnswer:
    def test_plain_answer_has_table_reason_and_use(self) -> None:
        stream = io.StringIO()
        show_answer(fit(), stream, with_table=True, saved=Path("fit.json"))
        text = stream.getvalue()
        assert "batch size 24 survived 25 steps\n" in text
        assert "sustained" in text.splitlines()[3]
        assert "device   cpu, virtual memory of 24.0 MiB\n" in text
        assert "trials   3 in 1.5 s, 1 ran out of memory\n" in text
        assert "stopped  because the next larger size was tried and does not fit\n" in text
        assert "use it   DataLoader(dataset, batch_size=24)\n" in text
        assert text.endswith("saved    fit.json\n")
        assert "\x1b" not in text

    def test_a_size_is_each_ranks_own(self) -> None:
        reported = dict(facts(fit(), saved=None, ranks=2))
        assert reported["use it"] == "DataLoader(dataset, batch_size=24) on each of 2 ranks"

    def test_says_no_more_than_was_run(self) -> None:
        assert headline(fit(trials=(trial(),), survived_steps=1)) == "batch size 24 ran 1 step"
        assert headline(fit(stopped_because="interrupted")).startswith("interrupted: 24 is the largest")
        assert "memory" not in dict(facts(fit(trials=(trial(peak_bytes=None),)), saved=None))

    def test_what_failed_just_above_is_the_reason(self) -> None:
        """Not the memory that is left, of which there is a lot where a size has timed out."""
        near = (trial(), trial(99, "oom"), trial(25, "timeout", steps_run=0, peak_bytes=None))
        reported = dict(facts(fit(stopped_because="within_tolerance", trials=near), saved=None))
        assert reported["stopped"] == "because 25, little larger, was tried and does not run"
        far = (trial(), trial(99, "oom"))
        reported = dict(facts(fit(stopped_because="within_tolerance", trials=far), saved=None))
        assert reported["stopped"].startswith("because the memory left is too little")
        slow = (trial(), trial(99, "timeout"))
        reported = dict(facts(fit(stopped_because="within_tolerance", trials=slow), saved=None))
        assert reported["stopped"] == "because 99 was tried and does not run"
        alone = fit(stopped_because="within_tolerance", trials=(trial(),))
        assert dict(facts(alone, saved=None))["stopped"] == f"because {alone.reason}"

    def test_virtual_memory_is_named_on_a_cpu_only(self) -> None:
        assert memory_label("cpu", 512 * MIB) == "cpu, virtual memory of 512.0 MiB"
        assert memory_label("cuda:0", 512 * MIB) == "cuda:0, 512.0 MiB"
