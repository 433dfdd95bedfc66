"""The reference of the command line, from the commands themselves.

Rules: usage, flags, defaults and examples are what `--help` shows; the keyword of a flag is the field of the
options value that the flag is made from (`_options.flag`), or is written here where a command has none.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import typer.main

from batchfit._check.pure.options import CheckOptions
from batchfit._cli.app import app
from batchfit._cli.commands.schedule_flags import ShowSettings
from batchfit._cli.exits import MEANINGS
from batchfit._explain.pure.options import ExplainOptions
from batchfit._find.pure.options import FindOptions
from batchfit._options import flags_in
from batchfit._predict.pure.options import PredictOptions
from batchfit._profile.pure.options import ProfileOptions
from batchfit._sweep.pure.options import SweepOptions
from batchfit._why.pure.options import WhyOptions

# The function of each command, and the value that holds its keywords.
FUNCTIONS: dict[str, tuple[str, Any]] = {
    "find": ("find_batch_size", FindOptions),
    "predict": ("predict_batch_size", PredictOptions),
    "explain": ("explain_memory", ExplainOptions),
    "check": ("check_memory", CheckOptions),
    "why": ("explain_oom", WhyOptions),
    "profile": ("profile_throughput", ProfileOptions),
    "sweep": ("sweep", SweepOptions),
    "report": ("report", None),
}
REPORT_KEYWORDS = {"results": "result", "output": "path", "title": "title"}
PAGES = {"find_batch_size": "find", "predict_batch_size": "predict", "explain_memory": "explain"}
PAGES |= {"check_memory": "check"}
PAGES |= {"explain_oom": "why"}
PAGES |= {"profile_throughput": "profile", "sweep": "sweep", "report": "report"}


@dataclass(frozen=True)
class Flag:
    """One flag or argument, as `--help` shows it."""

    spelling: str  # "--budget BYTES"
    help: str
    default: str  # empty where there is none
    keyword: str  # in Python; empty where there is none
    group: str
    is_argument: bool
    names: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """One command of the command line."""

    name: str  # "schedule show"
    usage: str
    text: str  # what it is for
    examples: tuple[str, ...] = ()
    more: tuple[tuple[str, str], ...] = ()  # title and text of further blocks
    flags: tuple[Flag, ...] = field(default=())

    @property
    def function(self) -> str:
        """The function of batchfit that it calls; empty where there is none."""
        return FUNCTIONS.get(self.name, ("", None))[0]

    @property
    def purpose(self) -> str:
        """The first sentence."""
        return self.text.split("\n\n")[0].replace("\n", " ")


def root() -> tuple[Any, Any]:
    """The group of all commands, and its context."""
    group: Any = typer.main.get_command(app)
    return group, group.context_class(group, info_name="batchfit")


def commands() -> tuple[Command, ...]:
    """All commands, in the order of `batchfit --help`."""
    group, context = root()
    return tuple(_found(group, context, ()))


def _found(group: Any, context: Any, path: tuple[str, ...]) -> Iterator[Command]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = command.context_class(command, info_name=name, parent=context)
        if hasattr(command, "commands"):
            yield from _found(command, inner, (*path, name))
        else:
            yield _described(" ".join((*path, name)), command, inner)


def _described(name: str, command: Any, context: Any) -> Command:
    text, examples, more = _parts(command.help or "")
    flags = tuple(_flag(name, one) for one in command.get_params(context) if one.name != "help")
    usage = " ".join(command.get_usage(context).removeprefix("Usage:").split())
    return Command(name, usage, text, examples, more, flags)


def _parts(text: str) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
    """What a help text says: prose, examples, and other blocks. Exit codes have a section of their own."""
    prose: list[str] = []
    examples: tuple[str, ...] = ()
    more: list[tuple[str, str]] = []
    for block in re.split(r"\n\s*\n", text.replace("\b", "").strip("\n")):
        head, _, rest = block.partition("\n")
        body = "\n".join(line.removeprefix("  ") for line in rest.splitlines())
        if head == "Examples:":
            examples = tuple(body.splitlines())
        elif head == "Exit codes:":
            continue
        elif head.endswith(":") and rest.startswith("  "):
            more.append((head, body))
        else:
            prose.append(block)
    return "\n\n".join(prose), examples, tuple(more)


def _flag(command: str, one: Any) -> Flag:
    is_argument = not one.opts[0].startswith("-")
    names = () if is_argument else (*one.opts, *one.secondary_opts)
    metavar = one.metavar or ""
    spelling = metavar if is_argument else ", ".join(one.opts) + (f" {metavar}" if metavar else "")
    if getattr(one, "secondary_opts", ()):
        spelling += f" / {', '.join(one.secondary_opts)}"
    if getattr(one, "multiple", False):
        spelling += " ..."
    group = "Arguments" if is_argument else getattr(one, "rich_help_panel", None) or "Options"
    words = _plain(one.help or "")
    keyword = _keyword(command, one.name)
    return Flag(spelling, words, "" if is_argument else _default(one), keyword, group, is_argument, names)


def _default(one: Any) -> str:
    shown = getattr(one, "show_default", True)
    if isinstance(shown, str):
        return shown
    if one.required:
        return "required"
    if shown is False or one.default is None or one.default is False:
        return ""
    return "on" if one.default is True else str(one.default)


def _plain(text: str) -> str:
    """Without the marks of rich."""
    return re.sub(r"\\\[", "[", re.sub(r"\[/?(?:bold|dim|italic|cyan|green|yellow|red)[^\]]*\]", "", text))


def _keyword(command: str, name: str) -> str:
    if command == "report":
        return REPORT_KEYWORDS.get(name, "")
    options = FUNCTIONS.get(command, ("", None))[1]
    return name if options is not None and name in {one.name for one in fields(options)} else ""


def keywords_of(options: Any) -> set[str]:
    """Names of the fields of an options value that are flags."""
    return {name for name, _, _ in flags_in(options)}


def schedule_keywords() -> set[str]:
    """What `schedule show` reads, none of which is a keyword of one function."""
    return keywords_of(ShowSettings)


def anchor(command: str, name: str = "") -> str:
    """`find`, `find--budget`: the anchor of a command, or of a flag of it."""
    return command.replace(" ", "-") + name


def commands_part() -> str:
    """A section per command, for reference/cli.md."""
    found = commands()
    rows = "\n".join(f"| [`batchfit {one.name}`](#{anchor(one.name)}) | {one.purpose} |" for one in found)
    sections = "\n\n".join(_section(one) for one in found)
    return f"| command | what it does |\n|---|---|\n{rows}\n\n{sections}"


def _section(command: Command) -> str:
    parts = [f"## batchfit {command.name} {{#{anchor(command.name)}}}", _escaped(command.text)]
    if command.function:
        page = PAGES[command.function]
        parts.append(f"In Python: [`batchfit.{command.function}`]({page}.md#batchfit.{command.function}).")
    parts.append(f"```text\n{command.usage}\n```")
    if command.examples:
        shown = "\n".join(f"$ {line}" for line in command.examples)
        parts.append(f"```console\n{shown}\n```")
    for title, text in command.more:
        parts.append(f"{_escaped(title)}\n\n```{'yaml' if '.yaml' in title else 'python'}\n{text}\n```")
    groups = dict.fromkeys(one.group for one in command.flags)
    for group in sorted(groups, key=lambda name: name != "Arguments"):
        several = [one for one in command.flags if one.group == group]
        parts.append(f"**{group}**\n\n{_list(command.name, several)}")
    return "\n\n".join(parts)


def _list(command: str, flags: Sequence[Flag]) -> str:
    lines = ['<dl class="flags">']
    for one in flags:
        name = one.names[0] if one.names else f"-{one.spelling.strip('[]').lower().rstrip('.')}"
        place = anchor(command, name)
        code = html.escape(one.spelling)
        link = f'<a class="headerlink" href="#{place}" title="Permanent link">&para;</a>'
        facts = [f"Default: {_code(one.default)}" if one.default not in ("", "required") else ""]
        facts += ["Required" if one.default == "required" else ""]
        facts += [f"Python: <code>{one.keyword}=</code>" if one.keyword and not one.is_argument else ""]
        shown = ". ".join(fact for fact in facts if fact)
        lines.append(f'<dt id="{place}"><code>{code}</code>{link}</dt>')
        lines.append(f"<dd>{html.escape(one.help)}{f'<br><small>{shown}.</small>' if shown else ''}</dd>")
    return "\n".join([*lines, "</dl>"])


def _code(default: str) -> str:
    return html.escape(default) if " " in default else f"<code>{html.escape(default)}</code>"


def _escaped(text: str) -> str:
    """Prose of a terminal as Markdown."""
    return re.sub(r"(?<!`)(\{[^}\n]*\}|<[^>\n]*>|(?<!\w)--(?:[a-z][\w-]*)?(?!\w))(?!`)", r"`\1`", text)


def exit_codes_part() -> str:
    """The table of exit codes."""
    rows = "\n".join(f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items())
    return f"| code | meaning |\n|---|---|\n{rows}"
