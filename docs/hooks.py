"""What the site has beside the pages of docs/: made from the files themselves, copied nowhere by hand.

Rules: a page is in one place. README.md is the first page until there is a docs/index.md; ARCHITECTURE.md,
CONTRIBUTING.md, CHANGELOG.md, each example and each page of benchmark results are pages. Links between them,
written so that they work in the repository, are turned into links of the site. What a page of the reference
says is made from the package (docs/generated): building the site imports batchfit, and not torch.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from generated import filled, site_files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\(|<img src=\")([^)#\"\s]+)(?=[)#\"])")
TOP = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
}


def _top(root: Path) -> dict[str, str]:
    """Files at the top of the repository that are pages, unless a page of docs/ has taken the place."""
    return {source: page for source, page in TOP.items() if not (root / "docs" / page).exists()}


def _title(text: str) -> str:
    return text.split("\n", 1)[0].removeprefix("#").strip()


def _example(path: Path) -> str:
    """An example as a page: the file as it is."""
    text = path.read_text(encoding="utf-8")
    kind = "python" if path.suffix == ".py" else "yaml"
    where = path.relative_to(ROOT).as_posix()
    return f"# {path.name}\n\n`{where}`\n\n```{kind}\n{text}```\n"


def places(root: Path = ROOT) -> dict[str, str]:
    """File of the repository -> page of the site, for all that does not lie in docs/."""
    found = _top(root)
    for path in sorted((root / "examples").rglob("*")):
        if path.suffix in (".py", ".yaml", ".yml"):
            name = path.relative_to(root / "examples").as_posix()
            found[f"examples/{name}"] = f"examples/{name.replace('/', '_').replace('.', '_')}.md"
    for path in sorted((root / "benchmarks" / "results").iterdir()):
        if path.suffix in (".md", ".svg"):
            found[f"benchmarks/results/{path.name}"] = f"benchmarks/{path.name}"
    return found


def site_links(text: str, source: str, page: str, moved: dict[str, str]) -> str:
    """The links of `source` (a file of the repository) as links of `page` (its place in the site).

    One to a file that is no page of the site stays broken: the strict build fails, and says where.
    """

    def turned(match: re.Match[str]) -> str:
        opening, target = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        place = normpath(f"{dirname(source)}/{target}".lstrip("/"))
        there = moved.get(place) or TOP.get(place) or place.removeprefix("docs/")
        return f"{opening}{relpath(there, dirname(page) or '.')}"

    return LINK.sub(turned, text)


def on_config(config: Any) -> Any:
    """Examples and benchmarks into the navigation."""
    found = list(places().items())
    sections = [entry for section in config.nav for entry in next(iter(section.values())) if entry]
    for entry in (entry for entry in sections if isinstance(entry, dict)):
        if "Examples" in entry:
            entry["Examples"] = [
                {Path(source).name: page} for source, page in found if source.startswith("examples/")
            ]
        elif "Benchmarks" in entry:
            entry["Benchmarks"] = ["benchmarks/index.md"] + [
                {_title((ROOT / source).read_text(encoding="utf-8")): page}
                for source, page in found
                if source.startswith("benchmarks/") and source.endswith(".md")
            ]
    return config


def on_files(files: Files, config: Any) -> Files:
    moved = places()
    rows = []
    for source, page in moved.items():
        path = ROOT / source
        if path.suffix == ".svg":
            files.append(File.generated(config, page, abs_src_path=str(path)))
            continue
        if source.startswith("examples/"):
            text = _example(path)
        else:
            text = site_links(path.read_text(encoding="utf-8"), source, page, moved)
        if source.startswith("benchmarks/"):
            rows.append(f"- [{_title(text)}]({path.name})")
        files.append(File.generated(config, page, content=text))
    index = (
        "# Benchmarks\n\nEach page names its hardware, versions and command; the raw numbers lie beside it "
        "in `benchmarks/results/`. `make bench` runs those that a CPU can.\n\n" + "\n".join(rows) + "\n"
    )
    files.append(File.generated(config, "benchmarks/index.md", content=index))
    for name, text in site_files().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    if page.file.generated_by is not None:
        return markdown
    return filled(site_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri, places()))
