"""Packed rows as units of whole sequences."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs transformers")

from examples import examples  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from batchfit.integrations.trl.packed import joined_sequences, units_of  # noqa: E402

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@examples(200)
@given(LENGTHS, st.integers(0, 20))
def test_units_hold_each_sequence_once_and_are_nearly_full(lengths: list[int], more: int) -> None:
    capacity = max(lengths) + more
    units = units_of(lengths, capacity)
    assert sorted(one for unit in units for one in unit) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[one] for one in unit) for unit in units)
    assert sizes[-1] <= capacity
    # Any two would not fit together.
    assert len(sizes) < 2 or sizes[0] + sizes[1] > capacity


@examples(50)
@given(LENGTHS, st.data())
def test_a_row_of_some_sequences_is_as_the_collator_makes_it(lengths: list[int], data: st.DataObject) -> None:
    sft = pytest.importorskip("trl.trainer.sft_trainer", reason="needs trl")
    collate = sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    samples = [{"input_ids": list(range(1, length + 1))} for length in lengths]
    row = collate(samples)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    found = joined_sequences(row, row["cu_seq_lens_q"].tolist(), chosen)
    wanted = collate([samples[one] for one in chosen])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(found[name]) is type(value)
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
        assert not isinstance(value, torch.Tensor) or found[name].dtype == value.dtype
