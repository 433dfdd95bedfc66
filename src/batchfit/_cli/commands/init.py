"""`batchfit init`: the lines to add to a program, as a diff.

Rules: the diff is alone on stdout, everything else goes to stderr; nothing is written without `--write`, and
then the whole file or nothing; line ends stay as they are. Torch is not loaded, and the program is not run.
"""

from __future__ import annotations

import difflib
import stat
import sys
from pathlib import Path

from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.output import check_writable
from batchfit._files import write_atomically
from batchfit._init.advice import advise

_NAMES = {
    "accelerate": "Accelerate's find_executable_batch_size",
    "lightning": "a Trainer of Lightning's",
    "transformers": "a Trainer of Hugging Face's",
    "loop": "a training loop",
    "torchtune": "a config of torchtune's",
}


def propose(file: Path, *, write: bool) -> Code:
    """Read the file, show what would change, and change it where that was asked for."""
    text = _read(file)
    if write:
        check_writable(file, name="FILE")
    mark = "\ufeff" * text.startswith("\ufeff")  # what some editors put first
    plain = text.removeprefix(mark).replace("\r\n", "\n")
    try:
        advice = advise(plain, file=str(file))
    except SyntaxError as error:
        raise CommandFailed(
            Code.USAGE, f"{file} must be a program that Python can read: line {error.lineno}: {error.msg}"
        ) from None
    if advice.kind in _NAMES:
        sys.stderr.write(f"{file} has {_NAMES[advice.kind]}\n")
    changed = advice.text != plain
    if changed:
        sys.stdout.writelines(_diff(plain, advice.text, file))
        sys.stdout.flush()
    for note in advice.notes:
        sys.stderr.write(f"note: {note}\n")
    if changed and write:
        ends = "\r\n" if "\r\n" in text else "\n"
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
            write_atomically(file, mark + advice.text.replace("\n", ends))
            file.chmod(mode)
        except OSError as error:
            raise CommandFailed(
                Code.BROKEN, f"{file} could not be written: {error.strerror or error}"
            ) from None
        sys.stderr.write(f"{file} is changed\n")
    elif changed:
        sys.stderr.write("nothing is written without --write\n")
    else:
        sys.stderr.write("there is nothing to change\n")
    return Code.FOUND


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise CommandFailed(
            Code.USAGE, f"FILE must be a script or a config, not {str(file)!r}: {why}"
        ) from None


def _diff(before: str, after: str, file: Path) -> list[str]:
    """A unified diff that `git apply` and `patch -p1` take."""
    name = file.as_posix().lstrip("/")
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        fromfile=f"a/{name}",
        tofile=f"b/{name}",
    )
    marked = []
    for line in lines:
        marked.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return marked
