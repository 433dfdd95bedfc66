"""Copies of the config files that a command is given, with the batch size in its place."""

from __future__ import annotations

from pathlib import Path

from batchfit._config_files import with_value
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.pure.toml_place import with_toml_value


def write_copies(template: CommandTemplate, size: int, folder: Path) -> dict[str, str]:
    """Write the copies for this size into the folder; their paths by the names in the command."""
    copies: dict[str, str] = {}
    for number, (name, text) in enumerate(changed_files(template, size).items()):
        copy = folder / str(number) / Path(name).name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        copies[name] = str(copy)
    return copies


def changed_files(template: CommandTemplate, size: int) -> dict[str, str]:
    """The texts of the files with the size in them; what is wrong with a setting is a `ValueError`."""
    texts: dict[str, str] = {}
    for one in template.sets:
        if one.file not in texts:
            try:
                texts[one.file] = Path(one.file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"set must name a file that can be read, not {one.file!r}: {error}"
                ) from None
        if one.file.endswith(".toml"):
            texts[one.file] = with_toml_value(texts[one.file], one.keys, size, name=one.file)
        else:
            texts[one.file] = with_value(texts[one.file], one.keys, str(size), name=one.file)
    return texts
