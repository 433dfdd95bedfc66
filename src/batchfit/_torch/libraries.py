"""What libraries do differently when they see that they are being traced.

transformers looks for fake tensors and then leaves out decisions that depend on values (whether positions
are one sequence, so that no mask is needed): right for an exported graph, wrong for a picture of the program
as it runs. While a trace lasts it is told that a tensor is fake only where its values are not known: a check
of the data for padding is left out, the decision about a mask is taken.

Rules: nothing is imported that the program did not import; what was there before is put back.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def not_called_a_trace(known: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, transformers takes its decisions as in an eager run, about values that are `known`."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if before is None:
        yield
        return
    module.is_fake_tensor = lambda value: before(value) and not known(value)
    try:
        yield
    finally:
        module.is_fake_tensor = before
