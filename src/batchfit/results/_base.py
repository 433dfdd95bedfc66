"""How a result travels: a frozen value that goes to JSON and comes back.

Rules: a whole result carries its schema version and is readable by later versions; a text that cannot be read
says which field and why, and nothing is guessed. What results hold is elsewhere: no field is named here.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError

from batchfit._config_files import parse_json
from batchfit.errors import ResultFileError
from batchfit.results._docstrings import introduction, sections

SCHEMA_VERSION = 1


class Result(BaseModel):
    """Base of all results: a frozen value that goes to JSON and comes back.

    A result that stands alone (`FitResult`, `Prediction`, ...) carries `kind` and `schema_version`.
    `FitResult.model_json_schema()` is its JSON schema, with the sentences of its fields.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema with the sentences of the docstring, which is read here and at no other time."""
        made = handler(core_schema)
        schema: dict[str, Any] = handler.resolve_ref_schema(made)
        doc = cls.__doc__ or ""
        schema["description"] = introduction(doc)
        described = sections(doc).get("Attributes", {})
        for name, field in schema.get("properties", {}).items():
            if name in described:
                field["description"] = described[name]
        return made

    def to_json(self, *, indent: int | None = 2) -> str:
        """This result as JSON text; a whole result carries its schema version.

        Args:
            indent: spaces per level; None for one line.
        """
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The result that `to_json` wrote, by this version of batchfit or an earlier one.

        Args:
            text: the JSON text. Fields that this version does not know are left out.

        Returns:
            The result, equal to the one that was written.

        Raises:
            ResultFileError: the text is no JSON, of a later schema version, or a field of it is wrong; names
                the field.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ResultFileError(f"not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ResultFileError(f"a {cls.__name__} must be a JSON object, not {type(data).__name__}")
        version = data.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise ResultFileError(
                f"schema_version is {version!r}, and this batchfit reads up to {SCHEMA_VERSION}. "
                "Upgrade batchfit to read this file."
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or cls.__name__
            raise ResultFileError(
                f"field {field!r} of {cls.__name__}: {first['msg']} (found {first['input']!r:.80})"
            ) from None
