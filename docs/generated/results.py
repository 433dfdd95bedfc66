"""Result fields and JSON schemas, from the result types.

Rules: a schema is what `to_json` writes, and what `TYPE.model_json_schema()` says: with a sentence per field.
The version of a schema is in the name of its file and in each result (`schema_version`).
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticUndefined

from batchfit import results, schedules
from batchfit.results import SCHEMA_VERSION, Result
from batchfit.results._docstrings import sections

# Result -> (name of its schema, what writes it)
WRITTEN: dict[type[Result], tuple[str, str]] = {
    results.FitResult: ("fit", "`find`, `find_batch_size`"),
    results.Prediction: (
        "prediction",
        "`predict`, `predict_batch_size`; for several GPUs a list",
    ),
    results.MemoryExplanation: ("memory", "`explain`, `explain_memory`"),
    results.MemoryCheck: ("check", "`check`, `check_memory`; for several targets a list"),
    results.OomExplanation: ("oom", "`why`, `explain_oom`"),
    results.ThroughputProfile: ("throughput", "`profile`, `profile_throughput`"),
    results.SweepResult: ("sweep", "`sweep`, `sweep()`"),
    results.ProgramRun: ("run", "`run --output`"),
}
_OPTIONS = "    options:\n      members: false\n      show_docstring_attributes: false\n"
CONFIGS = (
    schedules.StepBatchSizeConfig,
    schedules.LinearBatchSizeConfig,
    schedules.ExponentialBatchSizeConfig,
    schedules.CosineBatchSizeConfig,
    schedules.MilestoneBatchSizeConfig,
    schedules.CustomBatchSizeConfig,
    schedules.IncreaseBatchSizeConfig,
    schedules.NoiseBatchSizeConfig,
)


def schema_name(kind: type[Result]) -> str:
    """`fit.v1.json`."""
    return f"{WRITTEN[kind][0]}.v{SCHEMA_VERSION}.json"


def schema_of(kind: type[Result]) -> dict[str, Any]:
    """The JSON schema of what `to_json` writes."""
    schema = kind.model_json_schema(mode="serialization")
    schema["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": schema_name(kind), **schema}


def schema_files() -> dict[str, str]:
    """Name -> text of each schema."""
    return {schema_name(kind): json.dumps(schema_of(kind), indent=2) + "\n" for kind in WRITTEN}


def results_part() -> str:
    """The table of results, and a table of fields for each type."""
    rows = "\n".join(
        f"| [`{kind.__name__}`](#{kind.__name__.lower()}) | `{name}` | {by} "
        f"| [{schema_name(kind)}](schemas/{schema_name(kind)}) |"
        for kind, (name, by) in WRITTEN.items()
    )
    parts = [f"| result | `kind` | written by | JSON schema |\n|---|---|---|---|\n{rows}"]
    shown: set[str] = set()
    for kind in WRITTEN:
        schema = schema_of(kind)
        parts.append(_section(kind.__name__, schema, page=True))
        for name, inner in schema.get("$defs", {}).items():
            if name not in shown:
                shown.add(name)
                parts.append(_section(name, inner))
    return "\n\n".join(parts)


def _section(name: str, schema: dict[str, Any], *, page: bool = False) -> str:
    about = schema.get("description", "").split("\n\n")[0].replace("\n", " ")
    rows = "\n".join(
        f"| `{key}` | {_type(one)} | {_cell(one.get('description', ''))} |"
        for key, one in schema["properties"].items()
    )
    table = f"| field | JSON | meaning |\n|---|---|---|\n{rows}"
    return f"{'##' if page else '###'} {name} {{#{name.lower()}}}\n\n{about}\n\n{table}"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of {_type(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(kind)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def schedule_fields_part() -> str:
    """All fields of the schedules with their defaults."""
    parts = []
    for config in CONFIGS:
        described: dict[str, str] = {}
        for base in reversed(config.__mro__):
            described |= sections(vars(base).get("__doc__") or "").get("Attributes", {})
        rows = "\n".join(
            f"| `{name}` | {_default(one)} | {_cell(described[name])} |"
            for name, one in sorted(config.model_fields.items(), key=lambda item: item[0] != "type")
        )
        table = f"| field | default | meaning |\n|---|---|---|\n{rows}"
        parts.append(f"::: batchfit.{config.__name__}\n{_OPTIONS}\n{table}")
    return "\n\n".join(parts)


def _default(one: Any) -> str:
    if one.default is PydanticUndefined:
        return "required"
    return f"`{json.dumps(one.default)}`" if one.default is not None else "none"
