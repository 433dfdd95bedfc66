"""The report's HTML page: head, content policy, verdict, sections.

Rules: one file that needs nothing else, not even JavaScript; its policy lets no request out and runs no
script but ours, which it knows by its hash, so that a text that was not escaped could still do nothing. The
same results give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

import batchfit
from batchfit._charts.svg import chart_css, escaped
from batchfit._report.files import Source
from batchfit._report.markup import facts
from batchfit._report.sections import sections
from batchfit._report.verdict import facts_of, verdict


def page(sources: Sequence[Source], *, title: str | None = None) -> str:
    """The report as HTML."""
    results = [source.result for source in sources]
    here = resources.files("batchfit._report")
    style = chart_css() + (here / "page.css").read_text(encoding="utf-8")
    script = (here / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    headlines = verdict(results)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escaped(title or headlines[0])}</title><style>{style}</style></head>\n<body>"
        f'<header><p class="brand">batchfit report</p>{_head(headlines, title)}</header>\n'
        f"<main>{facts(facts_of(results))}{sections(sources)}</main>\n"
        f"<footer>Made by batchfit {escaped(batchfit.__version__)}.</footer>"
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def _head(headlines: Sequence[str], title: str | None) -> str:
    """Title and headlines; without a title the first headline is the page's first heading."""
    name = "verdict long" if len(headlines) > 1 or len(headlines[0]) > 130 else "verdict"
    heading = ' role="heading" aria-level="1"' if title is None else ""
    shown = [f'<p class="{name}"{heading}>{escaped(headlines[0])}</p>']
    shown += [f'<p class="{name}">{escaped(one)}</p>' for one in headlines[1:]]
    return (f"<h1>{escaped(title)}</h1>" if title is not None else "") + "".join(shown)


def _hash(text: str) -> str:
    """How a Content-Security-Policy names a text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
