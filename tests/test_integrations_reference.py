"""What each integration exports has a sentence, with each parameter, field, return and error."""

from __future__ import annotations

import pytest
from public_api import gaps, integrations, public

# torchtune has an environment of its own (tests/integrations/torchtune). The others export nothing.
HERE = [name for name in integrations() if not name.endswith(("torchtune", "sentence_transformers", "trl"))]


@pytest.mark.parametrize("module", HERE)
def test_every_name_of_an_integration_has_a_sentence(module: str) -> None:
    framework = module.rpartition(".")[2]
    pytest.importorskip(framework, reason=f"needs {framework}")
    found = public((module,))
    missing = [gap for address, value in found.items() for gap in gaps(address, value)]
    assert not missing, "; ".join(missing)


def test_every_integration_is_looked_at() -> None:
    names = {name.rpartition(".")[2] for name in HERE}
    assert names >= {"accelerate", "lightning", "ray", "transformers"}
