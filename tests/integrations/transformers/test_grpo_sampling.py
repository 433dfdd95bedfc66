"""Parts of a batch draw the random numbers of the whole."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs transformers")

from batchfit.integrations.transformers.rl.sampling import SharedDraws  # noqa: E402

ROWS, WORDS, STEPS = 7, 33, 5
CPU = torch.device("cpu")


def weights() -> torch.Tensor:
    return torch.rand(STEPS, ROWS, WORDS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("order", [[(0, 3, STEPS), (3, 7, 2)], [(0, 3, 1), (3, 7, STEPS)]])
def test_the_draws_of_parts_are_those_of_the_whole(order: list[tuple[int, int, int]]) -> None:
    """A part may end early; random numbers go on where the whole batch would have left them."""
    torch.manual_seed(2)
    whole = torch.stack([torch.multinomial(one, num_samples=1) for one in weights()])
    after = torch.rand(3)
    torch.manual_seed(2)
    draws = SharedDraws(CPU)
    for begin, end, steps in order:
        with draws.of_rows(begin, end, ROWS):
            drawn = [torch.multinomial(one[begin:end], num_samples=1) for one in weights()[:steps]]
        assert torch.equal(torch.stack(drawn), whole[:steps, begin:end])
    draws.close()
    assert torch.equal(torch.rand(3), after)


def test_a_part_that_failed_is_drawn_again_from_the_beginning() -> None:
    torch.manual_seed(2)
    whole = torch.multinomial(weights()[0], num_samples=1)
    torch.manual_seed(2)
    draws = SharedDraws(CPU)

    def fails() -> None:
        with draws.of_rows(0, 4, ROWS):
            torch.multinomial(weights()[0][:4], num_samples=1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    with draws.of_rows(0, 4, ROWS):
        assert torch.equal(torch.multinomial(weights()[0][:4], num_samples=1), whole[:4])


def test_other_draws_are_left_alone() -> None:
    """Beams and several tokens per row draw as they always do."""
    for given in ({"num_samples": 2}, {"num_samples": 1, "replacement": True}):
        torch.manual_seed(2)
        expected = torch.multinomial(weights()[0][:3], **given)
        torch.manual_seed(2)
        with SharedDraws(CPU).of_rows(0, 3, ROWS):
            assert torch.equal(torch.multinomial(weights()[0][:3], **given), expected)
    torch.manual_seed(2)
    expected = torch.multinomial(weights()[0], num_samples=1)
    torch.manual_seed(2)
    with SharedDraws(CPU).of_rows(0, 3, ROWS):  # more rows than the part has
        assert torch.equal(torch.multinomial(weights()[0], num_samples=1), expected)


def test_a_batch_that_was_not_cut_is_left_where_it_drew() -> None:
    torch.manual_seed(2)
    draws = SharedDraws(CPU)
    torch.rand(5)
    state = torch.get_rng_state()
    draws.close()
    assert torch.equal(torch.get_rng_state(), state)
