"""Pages are made from JSON, never by hand: the command of each script, and one over all that is committed.

    python benchmarks/pages.py check    # exit code 1 where a page in results/ is not what its JSON says
    python benchmarks/pages.py write    # makes those pages again

Rules: a page lies beside its JSON under the same name, and `PAGES` says which script makes it. A picture of
the same name beside it stands at its end; `write` leaves it as it is, `page` of its script draws it again.
A page without JSON is told: nobody can make it again.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGES = {  # how a page's name begins: the script that makes it
    "check_cpu": "check_cpu",
    "cost_cpu": "cost_cpu",
    "expandable": "expandable_gpu",
    "find": "find_gpu",
    "growth": "growth",
    "import_time": "import_time",
    "integrations": "integrations_gpu",
    "loader": "loader",
    "microbatch": "microbatch_gpu",
    "noise_planted": "noise_planted",
    "noise": "noise_gpu",
    "own_cost": "own_cost",
    "plan_peers": "plan_peers",
    "plan_time": "plan_time",
    "plan": "plan_gpu",
    "plan_speeds": "plan_speeds",
    "prediction_versions": "prediction_versions",
    "prediction": "prediction_gpu",
    "profile": "profile_gpu",
    "program": "program_cpu",
    "ragged": "ragged_gpu",
    "ranks": "ranks_gpu",
    "record_oom": "record_oom_gpu",
    "schedules": "schedules_gpu",
    "search_ablation": "search_ablation",
    "search_crowded": "search_crowded",
    "search_programs": "search_programs",
    "search_replayed": "search_replayed",
    "search_simulated": "search_simulated",
    "shards_cpu": "shards_cpu",
    "snapshot_reading": "snapshot_reading",
    "soak_length": "soak_length",
    "soak": "soak",
    "stack_cpu": "stack_cpu",
    "stack": "stack_gpu",
    "sweep": "sweep_gpu",
    "trace_cost": "trace_cost",
    "trainer_suites": "trainer_suites",
    "virtual": "virtual_vs_gpu",
}
ELSEWHERE = {"search_simulated": "search_simulated.json"}  # JSON of another name


def add_page(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The flags of `page RESULTS [--to FILE]`."""
    paging = commands.add_parser("page")
    paging.add_argument("results", type=Path)
    paging.add_argument("--to", type=Path)


def write_page(
    given: argparse.Namespace,
    page: Callable[[Any], str],
    draw: Callable[[Any, Path], None] | None = None,
) -> None:
    """What it does: the page of the results into the file, or to stdout; a picture only beside a file."""
    found = json.loads(given.results.read_text())
    text = page(found)
    if given.to is None:
        print(text, end="")
        return
    if draw is not None:
        draw(found, given.to.with_suffix(".svg"))
    given.to.write_text(with_picture(text, given.to))


def with_picture(text: str, to: Path) -> str:
    """The page, and at its end the picture that lies beside it."""
    picture = to.with_suffix(".svg")
    title = text.partition("\n")[0].lstrip("# ")
    return text + (f"\n![{title}]({picture.name})\n" if picture.exists() else "")


def as_it_should_be(page: Path) -> str | None:
    """What a committed page should say; None without its JSON."""
    named = [name for name in PAGES if page.name.startswith(f"{name}_")]
    begins = max(named, key=len, default=None)
    if begins is None:
        raise ValueError(f"PAGES must name the script of {page.name}, and does not")
    made_by = importlib.import_module(PAGES[begins])
    if begins == "virtual":
        both = [page.with_name(f"virtual_{kind}.json") for kind in ("gpu", "cpu")]
        return str(made_by.compare(*(json.loads(one.read_text()) for one in both)))
    kept = page.with_name(ELSEWHERE.get(begins, f"{page.stem}.json"))
    if not kept.exists():
        return None
    return with_picture(made_by.page(json.loads(kept.read_text())), page)


def wrong(results: Path) -> Iterator[tuple[Path, str | None]]:
    """The pages that say something else than their JSON, with what they should say."""
    for page in sorted(results.glob("*.md")):
        text = as_it_should_be(page)
        if text != page.read_text(encoding="utf-8"):
            yield page, text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "write"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    failed = False
    for page, text in wrong(given.results):
        if given.command == "write" and text is not None:
            page.write_text(text, encoding="utf-8")
            print(f"{page.name}: made again")
            continue
        failed = True
        told = "has no JSON beside it" if text is None else "is not what its JSON says"
        print(f"{page.name}: {told}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
