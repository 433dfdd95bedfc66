"""A check of memory on one screen, and as Markdown for a comment on a pull request.

Rules: the verdict first, then the lines of the program that changed the peak, the largest change first, then
modules and kinds. Nothing is printed here (as in `memory_page`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchfit._charts.memory_page import WIDTH, fact, operation_name
from batchfit._charts.text_charts import Line, shortened
from batchfit._units import format_bytes, format_change

if TYPE_CHECKING:
    from batchfit.results import MemoryChange, MemoryCheck

_LINES = 8  # changes that are shown
_OTHERS = 4  # modules, and kinds


def check_headline(check: MemoryCheck) -> str:
    """`train.py:workload needs 5.55 GiB at batch size 8: +1.20 GiB (+27.6 %)`."""
    text = f"{check.name} needs {format_bytes(check.peak_bytes)} at batch size {check.batch_size}"
    if check.change_bytes is not None:
        text += ": "
        text += _change(check.change_bytes, check) if check.change_bytes else "as in the baseline"
    if check.largest is not None:
        was = check.baseline_largest
        text += f"; the largest batch is {check.largest}"
        text += f", was {was}" if was not in (None, check.largest) else ""
    return text


def check_lines(check: MemoryCheck, *, width: int = WIDTH, plain: bool = False) -> list[Line]:
    """A check as lines of at most `width` characters (60 at least)."""
    width = max(width, 60)
    lines: list[Line] = [
        [(verdict(check), "good" if check.passed else "warn")],
        *([(part, "strong")] for part in textwrap.wrap(check_headline(check), width)),
        *fact("peak", f"in {check.peak_phase}, {operation_name(check.peak_operation)}", width),
        *fact("traced", f"for {check.card}, no GPU; {versions_text(check.versions)}", width),
    ]
    for one in check.failures:
        lines += fact("failed", one, width)
    for one in check.reasons:
        lines += fact("reason", one, width)
    lines += _changed_lines(check, width)
    for title, changes in (("modules", check.modules), ("kinds", check.kinds)):
        if changes:
            lines += [[], [(f"  {title}", "head")]]
            lines += [_row(one, check, width, plain=plain) for one in changes[:_OTHERS]]
            lines += _rest(changes[_OTHERS:], check)
    if not check.lines and check.holders:
        lines += [[], [("  source lines that hold the most", "head")]]
        for holder in check.holders[:_OTHERS]:
            name = shortened(holder.name, width - 14, plain=plain)
            lines.append([(f"  {format_bytes(holder.peak_bytes):>9}  ", ""), (name, "")])
    for note in check.unseen:
        parts = textwrap.wrap(f"caveat: {note}", width - 2, break_on_hyphens=False)
        lines += [[("  " + part, "warn")] for part in parts]
    return lines


def verdict(check: MemoryCheck) -> str:
    """`PASSED`, `FAILED`, or that this is the baseline now."""
    if check.updated:
        return "UPDATED: this is the baseline now"
    return "PASSED" if check.passed else "FAILED"


def versions_text(versions: dict[str, str]) -> str:
    """`batchfit 0.1.0, torch 2.13.0`."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def change_text(change: MemoryChange, check: MemoryCheck) -> str:
    """`+1.20 GiB (+8.1 %): losses.py:42 cross_entropy: logits in fp32`."""
    what = f": {change.what}" if change.what else ""
    return f"{_change(change.change_bytes, check)}: {change.name}{what}"


def _change(change_bytes: int, check: MemoryCheck) -> str:
    return format_change(change_bytes, check.baseline_bytes or 0)


def _changed_lines(check: MemoryCheck, width: int) -> list[Line]:
    if not check.lines:
        return []
    lines: list[Line] = [[], [("  source lines", "head")]]
    for one in check.lines[:_LINES]:
        parts = textwrap.wrap(
            change_text(one, check), width - 2, subsequent_indent="    ", break_on_hyphens=False
        )
        role = "warn" if one.change_bytes > 0 else "good"
        lines += [[("  " + part, role)] for part in parts]
        if one.code:
            lines.append([(f"      {shortened(one.code, width - 6)}", "")])
        if one.code_before:
            lines.append([(f"      was: {shortened(one.code_before, width - 11)}", "dim")])
        if one.called_from:
            called = f"called from {' > '.join(one.called_from)}"
            lines.append([(f"      {shortened(called, width - 6)}", "dim")])
    return lines + _rest(check.lines[_LINES:], check)


def _row(one: MemoryChange, check: MemoryCheck, width: int, *, plain: bool) -> Line:
    change = _change(one.change_bytes, check)
    return [(f"  {change:<24}", ""), (shortened(one.name, width - 28, plain=plain), "")]


def _rest(changes: Sequence[MemoryChange], check: MemoryCheck) -> list[Line]:
    if not changes:
        return []
    total = sum(one.change_bytes for one in changes)
    return [[(f"  {len(changes)} more: {_change(total, check)}", "dim")]]


# -- Markdown


def check_markdown(check: MemoryCheck) -> str:
    """A check as Markdown; a long list is folded."""
    mark = "⚠️" if not check.passed else "✅"
    parts = [f"### {mark} Peak memory: {_cell(check_headline(check))}", ""]
    if check.updated:
        parts += [f"{verdict(check)}.", ""]
    parts += [f"- **{_cell(one)}**" for one in check.failures]
    parts += [f"- {_cell(one)}" for one in check.reasons]
    if check.failures or check.reasons:
        parts.append("")
    if check.lines:
        parts += ["| change | line | what | code |", "|---:|---|---|---|"]
        parts += [_table_row(one, check) for one in check.lines[:_LINES]]
        rest = check.lines[_LINES:]
        if rest:
            total = _change(sum(one.change_bytes for one in rest), check)
            parts.append(f"| {total} | {len(rest)} more | | |")
        parts.append("")
    groups = [(title, found) for title, found in (("module", check.modules), ("kind", check.kinds)) if found]
    if groups:
        parts += ["<details><summary>By module and kind</summary>", ""]
        for title, found in groups:
            parts += [f"| change | {title} |", "|---:|---|"]
            parts += [f"| {_change(one.change_bytes, check)} | {_cell(one.name)} |" for one in found]
            parts.append("")
        parts += ["</details>", ""]
    parts += [f"> caveat: {_cell(one)}" for one in check.unseen]
    ends = f"Traced for {check.card}, without a GPU; {versions_text(check.versions)}."
    return "\n".join([*parts, f"<sub>{_cell(ends)}</sub>", ""])


def check_error_markdown(name: str, error: str) -> str:
    """That one of several targets could not be checked, as Markdown."""
    return f"### ❌ Peak memory: {_cell(name)} was not checked\n\n- **{_cell(error)}**\n"


def _table_row(one: MemoryChange, check: MemoryCheck) -> str:
    name = _cell(one.name)
    if one.called_from:
        name += f"<br><sub>called from {_cell(' > '.join(one.called_from))}</sub>"
    code = f"`` {one.code.replace('|', chr(92) + '|')} ``" if one.code else ""
    return f"| {_change(one.change_bytes, check)} | {name} | {_cell(one.what)} | {code} |"


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, in a table too."""
    for mark in "\\`*_|[]<>~#":
        text = text.replace(mark, f"\\{mark}")
    return text
