"""What kernels copy and hold: the rules of a trace against what an H200 was seen to do."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_private import safe_softmax

import batchfit
from batchfit._engine.allocator.gpus import GPUS
from batchfit._engine.cuda_model import library_kernels
from batchfit._engine.cuda_model.workspaces import BY_SOURCE, RULES, Extra
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for

aten = torch.ops.aten
SEEN = Path(__file__).parents[2] / "data/h200_kernels.json.gz"
# cuDNN chooses by heuristics of its own; a top-k of many rows counts digits in memory that no rule knows.
INEXACT = {"aten.convolution.default", "aten.convolution_backward.default", "aten.topk.default"}
NOISE = 256 << 10


def rows_by_operation() -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in json.loads(gzip.decompress(SEEN.read_bytes()))["rows"]:
        found[row["op"]].append(row)
    return dict(found)


SURVEY = rows_by_operation()
# An operation that this torch does not have is in no step of its programs.
ROWS = {name: rows for name, rows in SURVEY.items() if hasattr(aten, name.split(".")[1])}


def read(value: Any) -> Any:
    """An argument as it was: tensors without memory."""
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta")
    return [read(one) for one in value] if isinstance(value, list) else value


def operation(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def extra(func: Any, args: Any) -> Extra:
    rule = library_kernels.RULES.get(func)
    return (rule(args, GPUS["h200"]) if rule else None) or Extra()


def told(row: dict[str, Any]) -> Extra:
    return extra(operation(row["op"]), read(row["args"]))


def beside(extra: Extra) -> int:
    brief = max([*extra.after.values(), *extra.plans.values()], default=0)
    return sum(extra.together) + sum(extra.before.values()) + brief


@pytest.mark.parametrize("name", sorted(ROWS.keys() - INEXACT))
def test_an_operation_holds_what_it_was_seen_to_hold(name: str) -> None:
    for row in ROWS[name]:
        extra = told(row)
        longer = max(0, sum(extra.outputs.values()) - row["results"])
        stays = row["kept"] - row["results"]
        assert beside(extra) + longer == pytest.approx(row["beside"] + stays, rel=0.02, abs=NOISE), row
        if stays > NOISE:  # the last result of a case is dropped with what it keeps
            assert longer == pytest.approx(stays, rel=0.02), row


def test_the_survey_reaches_what_is_reported() -> None:
    """Rows with and without a copy: a rule that always, or never, says one would be noticed."""
    for name in ("aten._log_softmax.default", "aten.mm.default", "aten.avg_pool2d.default"):
        copies = {row["beside"] > NOISE for row in ROWS[name]}
        assert copies == {True, False}, name
    assert sum(len(rows) for rows in ROWS.values()) > 2000


def test_every_rule_was_seen_or_says_that_it_was_not() -> None:
    seen = {operation(name) for name in ROWS}
    assert set(RULES) - seen <= BY_SOURCE


def test_few_digits_are_counted_beside_a_top_k() -> None:
    """What no rule knows of it is no more than the survey saw: half of the input."""
    for row in ROWS["aten.topk.default"]:
        size = math.prod(row["args"][0]["shape"]) * getattr(torch, row["args"][0]["dtype"]).itemsize
        assert beside(told(row)) <= row["beside"] + NOISE <= beside(told(row)) + 1.6 * size


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "roll of all": lambda x: x.roll(3),
    "roll of a number": lambda x: x.sum().roll(1) + x,
    "sum of a number": lambda x: x.sum().sum(0) + x.sum().sum(-1, keepdim=True) + x.sum().mean(0) + x,
    "norm of a number": lambda x: torch.linalg.vector_norm(x.sum(), dim=0) + x,
    "softmax of a number": lambda x: safe_softmax(x.sum(), 0) + x.sum().softmax(0) + x,
    "sum of small numbers": lambda x: x * (x > 0).to(torch.int32).sum(1, keepdim=True),
    "nothing": lambda x: x[:0].softmax(0).sum() + x[:0].logsumexp(1).sum() + x,
    "one index": lambda x: x.index_put((torch.zeros(1, dtype=torch.long),), x[:1], accumulate=True),
    "vectors": lambda x: (x @ x[0]).outer(x[0]) + torch.mv(x, x[0])[:, None],
    "loss without reduction": lambda x: nn.functional.mse_loss(x, x * 2, reduction="none"),
    "loss of numbers": lambda x: nn.functional.mse_loss(x.sum(), x.sum() * 2) + x,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_uses_are_traced(name: str) -> None:
    model = nn.Linear(6, 6)
    work = batchfit.training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda m, x: ODD[name](m(x)).sum(),
        lambda n: torch.randn(n, 6),
    )
    assert trace(work, 4, rules=rules_for(work), steps=1).events


def test_a_loss_of_every_element_keeps_nothing() -> None:
    x = torch.empty(64, 64, device="meta")
    assert extra(aten.mse_loss.default, (x, x)).outputs == {0: 64 * 64 * 4}
    assert not extra(aten.mse_loss.default, (x, x, 0)).outputs
