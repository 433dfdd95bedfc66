"""Lines that people are promised to see are said once, whoever has set up logging."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

LINE = "Epoch 20: Updating batch size from 256 to 512"
SAY = f"""
from batchfit.messages import say
say({LINE!r})
"""
SETUPS = {
    "nothing": "",
    "basicConfig": "logging.basicConfig()",
    "a root handler at WARNING": (
        "handler = logging.StreamHandler(); handler.setLevel(logging.WARNING)\n"
        "logging.basicConfig(level=logging.DEBUG, handlers=[handler])"
    ),
    "a handler that shows nothing": "logging.getLogger().addHandler(logging.NullHandler())",
    "an own handler at WARNING, as some libraries have": (
        "logging.getLogger('batchfit').propagate = False\n"
        "logging.getLogger('batchfit').addHandler(logging.NullHandler())"
    ),
    "INFO": "logging.basicConfig(level=logging.INFO)",
    "INFO of batchfit": "logging.basicConfig(); logging.getLogger('batchfit').setLevel(logging.INFO)",
    "INFO on stdout": "logging.basicConfig(level=logging.INFO, stream=sys.stdout)",
    "an own handler": (
        "logging.getLogger('batchfit').addHandler(logging.StreamHandler())\n"
        "logging.getLogger('batchfit').setLevel(logging.INFO)"
    ),
}
SILENT = {
    "WARNING of batchfit": "logging.getLogger('batchfit').setLevel(logging.WARNING)",
    "ERROR of batchfit, and INFO": (
        "logging.basicConfig(level=logging.INFO); logging.getLogger('batchfit').setLevel(logging.ERROR)"
    ),
    "logging is off": "logging.disable(logging.INFO)",
    "the logger is off": "logging.getLogger('batchfit').disabled = True",
    "another rank": "os.environ['RANK'] = '3'",
}


def said(setup: str) -> tuple[str, str]:
    code = f"import logging, os, sys\nos.environ.pop('RANK', None)\n{setup}\n{SAY}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout, ran.stderr


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_line_is_said_once(setup: str) -> None:
    out, err = said(setup)
    assert (out + err).count(LINE) == 1
    logged = "INFO" in setup
    assert (LINE in out) is (not logged or "stdout" in setup)


@pytest.mark.parametrize("setup", SILENT.values(), ids=SILENT)
def test_who_asked_for_silence_has_it(setup: str) -> None:
    assert said(setup) == ("", "")


def test_neither_torch_nor_pydantic_is_imported() -> None:
    code = f"{SAY}\nimport sys\nassert not {{'torch', 'pydantic'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_logger_that_listens_gets_a_record(caplog: pytest.LogCaptureFixture) -> None:
    from batchfit.messages import say

    with caplog.at_level(logging.INFO, logger="batchfit"):
        say(LINE)
    assert [record.getMessage() for record in caplog.records] == [LINE]
