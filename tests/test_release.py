"""What a release says of itself: one version everywhere, a citation, templates for issues.

`make release-check` builds, installs and runs it all in new environments; this is what needs none.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from doc_pages import Step

import batchfit
import release_check

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# In a source archive there is no .github: nobody opens an issue there.
need_templates = pytest.mark.skipif(not TEMPLATES, reason="not in a source archive")


def test_all_that_says_the_version_says_the_same_one() -> None:
    assert set(release_check.versions().values()) == {batchfit.__version__}


def test_another_version_and_a_missing_one_are_seen(tmp_path: Path) -> None:
    for name in release_check.versions():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text("utf-8").replace("## 0.", "## 9.", 1), "utf-8")
    (tmp_path / "CITATION.cff").write_text("title: batchfit\n", "utf-8")
    found = release_check.versions(tmp_path)
    assert found["CHANGELOG.md"].startswith("9.")
    assert found["CITATION.cff"] == "none"


def test_the_citation_has_what_its_format_asks_for() -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert told["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(told)
    assert told["license"] == project["license"]
    assert [one["name"] for one in told["authors"]] == [one["name"] for one in project["authors"]]


@need_templates
@pytest.mark.parametrize(
    "path", [one for one in TEMPLATES if one.name != "config.yml"], ids=lambda one: one.stem
)
def test_a_template_for_issues_is_a_form(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    told = yaml.safe_load(path.read_text("utf-8"))
    assert {"name", "description", "body"} <= set(told)
    ids = [part["id"] for part in told["body"]]
    assert len(ids) == len(set(ids))
    for part in told["body"]:
        assert part["type"] in ("textarea", "input", "dropdown")
        assert part["attributes"]["label"]
        assert part["type"] != "dropdown" or part["attributes"]["options"]


def test_links_of_the_project_are_real_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for name, address in project.get("urls", {}).items():
        assert re.match(r"https://(?!.*(example|localhost|127\.0))", address), name
    asked = " ".join(release_check.open_questions())
    assert ("project.urls" in asked) != bool(project.get("urls"))


def test_a_step_of_the_readme_runs_with_the_environment_that_it_is_given(tmp_path: Path) -> None:
    venv = Path(sys.executable).parents[1]
    assert release_check.run_step(Step(1, "file", "x = 3\n", "here.py"), venv, tmp_path)["code"] == 0
    done = release_check.run_step(
        Step(2, "command", "python -c 'import here; print(here.x)'"), venv, tmp_path
    )
    assert (done["code"], done["stdout"]) == (0, "3\n")
    failed = release_check.run_step(Step(3, "code", "raise SystemExit(7)"), venv, tmp_path)
    assert failed["code"] == 7
    assert release_check.wrong_with(Step(3, "code", ""), failed)
