"""How a result travels: a frozen value that goes to JSON and comes back.

Rules: a whole result carries its schema version and is readable by later versions; a text that cannot be read
says which field and why, and nothing is guessed. What results hold is elsewhere: no field is named here.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from batchfit._documents import parse_json
from batchfit.errors import ResultFileError

SCHEMA_VERSION = 1


class Result(BaseModel):
    """Base of all results: JSON both ways."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def to_json(self, *, indent: int | None = 2) -> str:
        """This result as JSON text; a whole result carries its schema version."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The result that `to_json` wrote, by this version of batchfit or an earlier one."""
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
