"""The reference is complete: what is public has a sentence and a page; generated pages have all of it.

Integrations: tests/test_integrations_reference.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from generated import api, cli, filled, llms
from generated import results as results_page
from public_api import MODULES, exported, gaps, integrations, public

import batchfit
from batchfit import errors
from batchfit._cli.exits import Code, CommandFailed
from batchfit._engine.allocator.gpus import GPUS
from batchfit.results import FitResult, Trial
from batchfit.results._docstrings import introduction, sections


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_parameter_field_return_and_error_has_a_sentence(module: str) -> None:
    found = public((module,))
    assert found, f"{module} has no public name"
    missing = [gap for address, value in found.items() for gap in gaps(address, value)]
    assert not missing, "say in the docstring (Args:, Attributes:, Returns:, Raises:): " + "; ".join(missing)


# What a docstring can leave out, each as a case that must be found.


def _whole(size: int, *, budget: int | None = None) -> int:
    """Find a size.

    More about it. And more.

    Args:
        size: the first one,
            on two lines.
        budget: bytes (all: None).

    Returns:
        The size.

    Raises:
        ValueError: it is negative.
    """
    if size < 0:
        raise ValueError("size must not be negative")
    return size


def _broken(out: str, into: str = "") -> Any:
    function = type(_whole)(_whole.__code__, _whole.__globals__, "f", None, None)
    function.__annotations__ = {"return": int}
    assert out in (_whole.__doc__ or "")
    function.__doc__ = (_whole.__doc__ or "").replace(out, into)
    return function


def _gaps_of(value: Any) -> list[str]:
    return gaps("f", value)


def test_a_whole_docstring_has_no_gap() -> None:
    assert _gaps_of(_whole) == []


@pytest.mark.parametrize(
    ("out", "into", "gap"),
    [
        ("        size: the first one,\n            on two lines.\n", "", "f(size)"),
        ("        budget: bytes (all: None).\n", "", "f(budget)"),
        ("size: the first", "size, budget: the first", "f(size)"),
        ("budget: bytes", "budgets: bytes", "f(budgets) is described, and is not there"),
        ("    Returns:\n        The size.\n", "", "f: what it returns"),
        ("        ValueError: it is negative.\n", "", "f: raises ValueError"),
    ],
)
def test_a_gap_is_found(out: str, into: str, gap: str) -> None:
    assert gap in _gaps_of(_broken(out, into))


def test_a_function_and_a_class_without_docstring_are_found() -> None:
    @dataclass
    class Bare:
        size: int

    @dataclass
    class Half:
        """A size and a budget.

        Attributes:
            size: samples.
        """

        size: int
        budget: int = 0

        def half(self) -> int:
            return self.size // 2

    Bare.__module__ = Half.__module__ = "batchfit.made_up"
    assert gaps("Bare", Bare) == ["Bare: no docstring"]
    assert gaps("Half", Half) == ["Half: budget", "Half.half: no docstring"]


def test_sections_are_read() -> None:
    doc = inspect.cleandoc(_whole.__doc__ or "")
    found = sections(doc)
    assert found["Args"] == {"size": "the first one, on two lines.", "budget": "bytes (all: None)."}
    assert found["Returns"] == {"": "The size."}
    assert introduction(doc).endswith("And more.")


# The pages of docs/reference, and what is put into them when the site is built.

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(REFERENCE.rglob("*.md"))}
BLOCK = re.compile(r"^::: (batchfit\.[\w.]+)$", re.MULTILINE)


def _named(address: str) -> Any:
    """What a `:::` line names."""
    try:
        return importlib.import_module(address)
    except ImportError:
        parent, _, name = address.rpartition(".")
        return getattr(_named(parent), name)


def test_every_public_object_is_on_a_page_of_the_reference() -> None:
    shown: list[Any] = []
    for text in PAGES.values():
        for address in BLOCK.findall(filled(text)):
            if not address.startswith("batchfit.integrations."):
                value = _named(address)
                shown += exported(value).values() if inspect.ismodule(value) else [value]
    wanted = public(MODULES)
    # Helpers that print a table: exported, and no part of the reference.
    plain = {"html_table", "text_table", "trial_row"}
    missing = [
        address
        for address, value in wanted.items()
        if value not in shown and address.rpartition(".")[2] not in plain
    ]
    assert not missing, f"give each a ::: line in docs/reference: {missing}"
    twice = [one.__name__ for one in shown if inspect.isclass(one) and shown.count(one) > 1]
    assert not twice, f"on two pages: {twice}"


def test_every_name_of_an_integration_is_on_its_page() -> None:
    for module in integrations():
        name = module.rpartition(".")[2]
        if name in ("sentence_transformers", "trl"):  # they export nothing
            continue
        blocks = set(BLOCK.findall(PAGES[f"{name}.md"]))
        assert blocks, f"{name}.md shows nothing"
        for address in blocks:
            api.definition(address)  # raises where there is none
        tree = api.definition(module)
        assert isinstance(tree, ast.Module)
        listed = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        for one in listed[0] if listed else ():
            assert f"{module}.{one}" in blocks


def test_the_page_of_commands_has_every_flag_and_argument() -> None:
    page = filled(PAGES["cli.md"])
    group, context = cli.root()
    names = [one.name for one in cli.commands()]
    assert {name.split()[0] for name in names} == set(group.list_commands(context))
    for command in cli.commands():
        assert f"## batchfit {command.name} {{#" in page
        assert command.purpose
        assert command.usage.startswith(f"batchfit {command.name} ")
        assert command.examples, f"{command.name} has no example"
        for flag in command.flags:
            assert flag.help, f"{command.name} {flag.spelling} says nothing"
            for name in flag.names[:1]:
                assert f'id="{cli.anchor(command.name, name)}"' in page
    for code in Code:
        assert f"\n| {int(code)} | " in page


def test_a_flag_names_the_keyword_of_the_function() -> None:
    for command in cli.commands():
        keywords = [flag.keyword for flag in command.flags if flag.keyword]
        if not command.function:
            assert not keywords
            continue
        known = inspect.signature(getattr(batchfit, command.function)).parameters
        assert set(keywords) <= set(known)
        assert len(keywords) >= 3, command.name


def test_defaults_of_the_commands_are_those_of_the_functions() -> None:
    found = {
        (command.name, flag.keyword): flag.default
        for command in cli.commands()
        for flag in command.flags
        if flag.keyword and command.function and not flag.is_argument
    }
    assert found["find", "tolerance"] == "0.02"
    assert found["find", "steps"] == "3"
    assert found["find", "store"] == "on"  # and off in Python: `_cli/app.py` says why
    assert found["find", "isolate"] == ""
    assert found["explain", "batch_size"] == "required"
    assert found["profile", "within"] == "0.05"


@pytest.mark.parametrize("kind", list(results_page.WRITTEN), ids=lambda kind: str(kind.__name__))
def test_every_field_of_a_schema_has_a_description(kind: Any) -> None:
    schema = results_page.schema_of(kind)
    assert json.loads(results_page.schema_files()[results_page.schema_name(kind)]) == schema
    for name, part in {kind.__name__: schema, **schema.get("$defs", {})}.items():
        assert "Attributes:" not in part["description"]
        silent = [key for key, one in part["properties"].items() if not one.get("description")]
        assert not silent, f"{name}: {silent}"
        assert f"{name} {{#{name.lower()}}}" in filled(PAGES["results.md"])


def test_results_are_as_their_schemas_say() -> None:
    trial = Trial(size=4, outcome="fits", steps_run=3, soak=True)
    fit = FitResult(
        batch_size=4,
        trials=(trial,),
        survived_steps=3,
        stopped_because="max_size",
        budget_bytes=100,
        peak_bytes=None,
        device="cpu",
        strategy="guided",
        elapsed_s=0.1,
    )
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schema = results_page.schema_of(FitResult)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(fit.to_json()), schema)
    for wrong in ({"batch_size": 0}, {"schema_version": 2}, {"kind": "prediction"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**json.loads(fit.to_json()), **wrong}, schema)


def test_the_page_of_errors_has_each_with_the_code_that_a_command_ends_with() -> None:
    from batchfit._cli.commands.find import _failed
    from batchfit._cli.target import TargetCall, _explained

    page = PAGES["errors.md"]
    job: Any = None
    for name, kind in vars(errors).items():
        if not inspect.isclass(kind) or not issubclass(kind, errors.BatchfitError):
            continue
        if kind is errors.BatchfitError:
            continue
        row = re.search(rf"^\| \[`{name}`\].* \| (\d+) \|$", page, re.MULTILINE)
        assert row, f"errors.md has no row for {name}"
        error = kind.__new__(kind)
        for attribute in ("lines", "raised"):
            if f"{attribute}:" in (kind.__doc__ or ""):
                setattr(error, attribute, ())
        if kind is errors.UntraceableError:
            given: Any = type("Given", (), {"full_traceback": False, "target": None})
            with pytest.raises(CommandFailed) as failed, _explained(TargetCall("x", {}), given, "predict"):
                raise error
            assert int(failed.value.code) == int(row[1])
        elif kind is errors.ChildRaisedError:
            assert int(row[1]) == Code.RAISED  # as the user's own: `SearchJob.explain`
        else:
            ended = _failed(error, job, job)
            assert ended is not None
            assert int(ended.code) == int(row[1]), name


def test_the_page_of_environment_variables_has_all_of_them() -> None:
    found = set()
    for path in (ROOT / "src" / "batchfit").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "environ" not in text and path.name != "variables.py":
            continue
        for node in ast.walk(ast.parse(text)):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", node.value):
                found.add(node.value)
    found -= {"TYPE_CHECKING"}
    assert {"BATCHFIT_CACHE", "WORLD_SIZE", "PYTORCH_CUDA_ALLOC_CONF"} <= found
    missing = [name for name in sorted(found) if f"`{name}`" not in PAGES["environment.md"]]
    assert not missing, f"say in environment.md what these do: {missing}"


def test_the_page_of_gpus_has_each_with_its_source() -> None:
    page = filled(PAGES["gpus.md"])
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(GPUS)
    assert sum("measured" in source for _, source in rows) == sum(gpu.measured for gpu in GPUS.values())


def test_no_mark_of_a_generated_part_is_left() -> None:
    for name, text in PAGES.items():
        assert "<!-- generated" not in filled(text), name
    with pytest.raises(KeyError):
        filled("<!-- generated: nothing -->\n")


# llms.txt


def test_llms_txt_is_short_and_in_the_form_of_its_convention() -> None:
    text = llms.llms_txt()
    assert len(text.encode()) < 7000
    assert text.startswith("# batchfit\n\n> ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Commands", "Python", "Docs"]
    for page in re.findall(r"\]\(([^)]+)\.html\)", text):
        assert (ROOT / "docs" / f"{page}.md").exists(), page


def test_every_command_and_flag_that_llms_txt_names_exists() -> None:
    known = {command.name: command for command in cli.commands()}
    text = llms.llms_txt()
    named = re.findall(r"`batchfit ([^`]+)`", text)
    for line in named:
        own = line.partition(" -- ")[0]
        name = next((one for one in known if f"{own} ".startswith(f"{one} ")), None)
        assert name, f"batchfit {line}"
        flags = {spelling for flag in known[name].flags for spelling in flag.names}
        for flag in re.findall(r"(?<!\S)(--?[a-z][\w-]*)", own):
            assert flag in flags, f"batchfit {line}: no {flag}"
    assert {name for name in known if any(f"{line} ".startswith(f"{name} ") for line in named)} == set(known)


def test_every_name_and_field_that_llms_txt_names_exists() -> None:
    text = llms.llms_txt()
    names = re.findall(r"`batchfit\.(\w+)", text)
    assert set(names) <= set(batchfit.__all__)
    for kind, *keys in llms.READ.values():
        assert set(keys) <= {*getattr(batchfit, kind).model_json_schema(mode="serialization")["properties"]}
    for name, methods in llms.CLASSES.items():
        assert all(callable(getattr(getattr(batchfit, name), method)) for method in methods)


def test_the_full_file_has_every_flag_and_every_public_name() -> None:
    text = llms.llms_full_txt()
    for command in cli.commands():
        for flag in command.flags:
            assert all(name in text for name in flag.names)
    for name in batchfit.__all__:
        assert f"batchfit.{name}" in text
    assert ":::" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)
