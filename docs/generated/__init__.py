"""Parts of pages that are made from the package itself, when the site is built: they cannot go stale.

A page says `<!-- generated: NAME -->` where such a part goes. Torch is not imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from generated import cli, llms, results, tables

MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
PARTS: dict[str, Callable[[], str]] = {
    "commands": cli.commands_part,
    "exit-codes": cli.exit_codes_part,
    "errors": tables.errors_part,
    "gpus": tables.gpus_part,
    "reasons": tables.reasons_part,
    "results": results.results_part,
    "schedule-fields": results.schedule_fields_part,
    "llms": llms.shown_part,
}


def filled(markdown: str) -> str:
    """The page with its generated parts; an unknown name is an error."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), markdown)


def site_files() -> dict[str, str]:
    """Path in the site -> text, of all that is generated and is no page."""
    return {
        **{f"reference/schemas/{name}": text for name, text in results.schema_files().items()},
        "llms.txt": llms.llms_txt(),
        "llms-full.txt": llms.llms_full_txt(),
    }
