"""The baseline file (`memory.json`): reads it, and writes one record, safe with several processes."""

from __future__ import annotations

from pathlib import Path

from batchfit._check.pure.baseline import baseline_text, read_baseline
from batchfit._check.pure.record import PeakRecord
from batchfit._files import locked, write_atomically
from batchfit.errors import ResultFileError

_WAIT_S = 60.0  # for other processes that write their record: each takes milliseconds


def records_in(path: Path) -> dict[str, PeakRecord]:
    """The records in a file; none where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ResultFileError(f"{path}: {why}") from None
    try:
        return read_baseline(text)
    except ResultFileError as error:
        raise ResultFileError(f"{path}: {error}") from None


def put_record(path: Path, name: str, record: PeakRecord) -> None:
    """Write one record into a file, and leave the others in it as they are."""
    with locked(path, wait_s=_WAIT_S):
        records = records_in(path)
        if records.get(name) != record:
            write_atomically(path, baseline_text({**records, name: record}))
