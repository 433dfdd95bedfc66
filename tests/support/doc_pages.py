"""A page of the docs as steps: the files it shows, the code and commands it runs, and what they print.

What a page may say (`python tests/support/doc_pages.py docs/x.md` runs it; `--write` puts the outputs in):

- a fence with `title="train.py"` is a file; later steps of the page find it in their folder;
- a `python` fence runs, with warnings as errors; one with a title only if no `$` command names the file;
- a `$ batchfit ...` or `$ python ...` line of a `console` fence runs; the lines below it are its output;
- a `text` fence after a block of Python is what it prints; a line `...` stands for any lines; one before all
  that runs is free (the symptom that a page opens with);
- `<!-- not run: REASON -->` before a fence: it is not run, or compared with nothing;
- `<!-- output varies: REASON -->`: numbers are not compared, words are;
- `<!-- exits with 2 -->`: the exit status of the commands below;
- `<!-- slow test: REASON -->` anywhere: the page waits for `make test-all`.
"""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,})[ \t]*(?P<info>.*?)[ \t]*$")
MARK = re.compile(r"^\s*<!-- (not run|output varies|exits with|slow test):? (.+?) -->\s*$")
TITLE = re.compile(r'title="([^"]+)"')
RUNS = ("batchfit", "python")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
TIMED = re.compile(r"(s/step|ms/step|samples/s|tokens/s|seconds?|elapsed|time|spread|\+/?-.*)$")


@dataclass(frozen=True)
class Fence:
    line: int  # of its opening, from 1
    language: str
    title: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)
    first: int = 0  # index of the first line of its text, and of the line that closes it
    last: int = 0
    indent: str = ""


@dataclass(frozen=True)
class Step:
    """One thing to run, and what the page says that it prints (`None`: the page says nothing)."""

    line: int
    kind: str  # "file", "code", "command"
    text: str  # the file's or the code's text, or the command
    name: str = ""  # of the file
    expected: str | None = None
    marks: dict[str, str] = field(default_factory=dict)


def fences(text: str) -> list[Fence]:
    """All fenced blocks of a page, with the marks in the lines before each."""
    found: list[Fence] = []
    marks: dict[str, str] = {}
    lines = text.splitlines()
    opened: re.Match[str] | None = None
    start = 0
    for index, line in enumerate(lines):
        match = FENCE.match(line)
        if opened is not None:
            if match and match["ticks"].startswith(opened["ticks"]) and not match["info"]:
                body = textwrap.dedent("\n".join(lines[start + 1 : index]) + "\n")
                info = opened["info"]
                title = TITLE.search(info)
                language = re.split(r"[\s{]", info.lstrip("{. "), maxsplit=1)[0]
                place = {"first": start + 1, "last": index, "indent": opened["indent"]}
                found.append(Fence(start + 1, language, title[1] if title else "", body, marks, **place))
                opened, marks = None, {}
        elif match:
            opened, start = match, index
        elif mark := MARK.match(line):
            marks = {**marks, mark[1]: mark[2]}
        elif line.strip():
            marks = {}
    return found


def is_slow(text: str) -> bool:
    return any((mark := MARK.match(line)) and mark[1] == "slow test" for line in text.splitlines())


def commands(fence: Fence) -> list[tuple[str, str | None]]:
    """The `$` lines of a fence, each with the lines below it."""
    found: list[tuple[str, str | None]] = []
    output: list[str] = []
    lines = iter([*fence.text.splitlines(), "$ "])
    command = ""
    for line in lines:
        if not line.startswith("$ "):
            output.append(line)
            continue
        if command:
            while output and not output[-1].strip():
                output.pop()
            found.append((command, "\n".join(output) + "\n" if output else None))
        command, output = line[2:].strip(), []
        while command.endswith("\\"):
            command = command[:-1] + " " + next(lines).strip().removeprefix("> ")
    return found


def program(command: str) -> str:
    """`batchfit` of `CUDA_VISIBLE_DEVICES= batchfit find ...`."""
    return next((word for word in command.split() if "=" not in word), "")


def steps(text: str) -> tuple[list[Step], list[str]]:
    """What a page runs, in order; and what is wrong with its blocks."""
    blocks = fences(text)
    wrong: list[str] = []
    typed = [command for block in blocks if block.language == "console" for command, _ in commands(block)]
    found: list[Step] = []
    previous = ""  # what a text fence would be the output of
    for block in blocks:
        marks = block.marks
        if block.title:
            found.append(Step(block.line, "file", block.text, block.title))
        if "not run" in marks:
            previous = "not run"
            if len(marks["not run"].split()) < 3:
                wrong.append(f"line {block.line}: say why it is not run, in a few words")
        elif block.language == "console":
            previous = "command"
            for command, output in commands(block):
                if program(command) in RUNS:
                    found.append(Step(block.line, "command", command, expected=output, marks=marks))
                else:
                    wrong.append(f"line {block.line}: {command!r} is not run: mark it, with the reason")
        elif block.language == "python":
            named = block.title and any(block.title in command for command in typed)
            previous = "file" if named else "code"
            if not named:
                found.append(Step(block.line, "code", block.text, block.title, marks=marks))
        elif block.language == "text":
            if previous == "code":
                last = found.pop()
                found.append(
                    Step(last.line, "code", last.text, last.name, block.text, {**last.marks, **marks})
                )
            elif previous != "not run" and any(step.kind != "file" for step in found):
                wrong.append(f"line {block.line}: output of nothing: mark it `not run`, with the reason")
            previous = ""
        else:
            previous = ""
            if block.language.lower() in ("py", "python3", "pycon"):
                wrong.append(f"line {block.line}: say `python`, and mark it if it cannot run")
            elif block.language in ("", "sh", "bash", "shell") and re.search(
                r"^(\$ |batchfit (?!\|))", block.text, re.MULTILINE
            ):
                wrong.append(f"line {block.line}: a command of batchfit goes into `console`, after `$ `")
    return found, wrong


def _without_times(text: str) -> list[str]:
    """Lines without seconds, and without bars and columns, whose lengths are the numbers beside them."""
    kept = []
    columns: list[tuple[int, int]] = []
    for line in text.splitlines():
        heads = list(re.finditer(r"\S+(?: \S+)*", line))
        if not line.strip():
            columns = []
        elif len(heads) > 1 and not NUMBER.search(line):
            ends = [0, *(head.end() for head in heads)]
            columns = [(ends[n], ends[n + 1]) for n, head in enumerate(heads) if TIMED.search(head[0])]
        elif line.strip() != "...":
            for start, end in reversed(columns):
                line = f"{line[:start]} T {line[end:]}"
        line = re.sub(r"[█▏▎▍▌▋▊▉]+", "", line)
        line = re.sub(r"(\+/?-|±) ?[\d.]+ ?%", "+-T", line)
        line = re.sub(r"[\d.,]+(?:e[+-]?\d+)?k? ?(\w+/s)\b", r"T \1", line)
        line = re.sub(r"[\d.,]+(?:e[+-]?\d+)? ?(?:s|ms|µs|us|min|seconds|minutes)(?![\w/])", "T", line)
        kept.append(" ".join(line.split()))
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _same_line(shown: str, printed: str, *, varies: bool) -> bool:
    if NUMBER.sub("N", shown) != NUMBER.sub("N", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    # Versions of torch differ a little in what they allocate.
    return varies or all(abs(float(a) - float(b)) <= max(0.2, 0.05 * abs(float(b))) for a, b in pairs)


def difference(shown: str, printed: str, *, varies: bool = False) -> str:
    """Empty where the page shows what was printed; else the first line that differs."""
    here, there = _without_times(shown), _without_times(printed)
    at = 0
    skipping = False
    for line in here:
        if line == "...":
            skipping = True
            continue
        while at < len(there) and not _same_line(line, there[at], varies=varies):
            if not skipping:
                return f"the page says {line!r}, and it is {there[at]!r}"
            at += 1
        if at == len(there):
            return f"the page says {line!r}, which is not printed"
        at += 1
        skipping = False
    return "" if at == len(there) or skipping else f"the page leaves out {there[at]!r}"


def command_words(command: str) -> tuple[dict[str, str], list[str], str]:
    """Environment, words, and the file that takes the output (`> fit.json`)."""
    words = shlex.split(command)
    into = ""
    if len(words) > 2 and words[-2] == ">":
        into, words = words[-1], words[:-2]
    environment = {}
    while words and re.match(r"^\w+=", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    return environment, words, into


def written(text: str, outputs: dict[tuple[int, int], str]) -> str:
    """The page with `outputs`: (line of the fence, number of its command) -> what it prints."""
    lines = text.splitlines()
    blocks: list[Fence | None] = [*fences(text), None]
    for block, after in reversed(list(itertools.pairwise(blocks))):
        if block is None or "not run" in block.marks:
            continue
        if block.language == "console" and commands(block):
            shown: list[str] = []
            for number, (command, output) in enumerate(commands(block)):
                printed = outputs.get((block.line, number), "") if output is not None else ""
                shown += [
                    *([""] if output and shown else []),
                    f"$ {command}",
                    *printed.rstrip("\n").splitlines(),
                ]
            lines[block.first : block.last] = [f"{block.indent}{line}".rstrip() for line in shown]
        elif (
            (block.line, 0) in outputs
            and after is not None
            and after.language == "text"
            and "not run" not in after.marks
        ):
            shown = outputs[block.line, 0].rstrip("\n").splitlines()
            lines[after.first : after.last] = [f"{after.indent}{line}".rstrip() for line in shown]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from doc_runner import run_from_shell

    sys.exit(run_from_shell([Path(name) for name in sys.argv[1:] if name[0] != "-"], "--write" in sys.argv))
