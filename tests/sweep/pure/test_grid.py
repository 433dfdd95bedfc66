"""Configurations of a sweep: grids, zips, lists, where to start, and the estimates for each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._knobs import key_of, label
from batchfit._sweep.pure.estimates import CROPS, TOP_K, estimate_of
from batchfit._sweep.pure.grid import DONE, GridError, configurations, plan, without_done

CROPS_RUN = [2, 4, 6, 8, 10, 12, 13, 14]
names = st.text("abcde", min_size=1, max_size=3)
values = st.one_of(st.integers(-3, 3), st.booleans(), st.none(), st.sampled_from(["x", "1", 0.5, 2.0]))
lists = st.lists(values, min_size=1, max_size=4, unique_by=lambda value: key_of({"v": value}))


def test_a_grid_turns_its_last_knob_fastest() -> None:
    rows = configurations({"max_crops": [2, 4], "top_k": [1, 2]})
    assert [(row["max_crops"], row["top_k"]) for row in rows] == [(2, 1), (2, 2), (4, 1), (4, 2)]


def test_a_zip_and_a_list_are_the_same_rows() -> None:
    zipped = configurations({"layers": [2, 4], "width": [64, 32]}, mode="zip")
    assert zipped == configurations([{"layers": 2, "width": 64}, {"width": 32, "layers": 4}])
    assert list(zipped[1]) == ["layers", "width"]


def test_an_estimate_is_tried_on_every_configuration_beforehand() -> None:
    rows = [{"p": 4}, {"p": 0}, {"p": "a"}]

    def never(value: Any) -> float:
        raise AssertionError("a function of the user's was called")

    estimate_of({"p": "1 / p"}, ("p",), rows[:1])
    estimate_of({"p": never}, ("p",), rows)
    for spec, text in (
        ("1 / p", r"the estimate '1 / p' must have a value at p=0"),
        ("p", r"the estimate for 'p' must be a positive factor at p=0, not 0"),
        ("crops", r"an estimate must be made from numbers, not 'a'"),
    ):
        with pytest.raises(GridError, match=text) as caught:
            estimate_of({"p": spec}, ("p",), rows)
        assert caught.value.place == ("estimate", "p")


@given(st.dictionaries(names, lists, max_size=3))
@examples(80)
def test_a_grid_holds_every_combination_once(knobs: dict[str, list[Any]]) -> None:
    if not knobs:
        with pytest.raises(GridError, match="at least one knob"):
            configurations(knobs)
        return
    rows = configurations(knobs)
    count = 1
    for some in knobs.values():
        count *= len(some)
    keys = [key_of(row) for row in rows]
    assert len(rows) == count == len(set(keys))
    # what a file gives back is known again
    assert [key_of(json.loads(json.dumps(row))) for row in rows] == keys


def test_a_key_knows_a_configuration_again() -> None:
    assert key_of({"a": 1, "b": (2, 3.0)}) == key_of({"b": [2.0, 3], "a": 1.0})
    assert len({key_of({"a": value}) for value in (1, True, "1", None, [1])}) == 5
    assert label({"max_crops": 12, "top_k": 2}) == "max_crops=12, top_k=2"


@pytest.mark.parametrize(
    ("knobs", "mode", "text", "place"),
    [
        ({}, "grid", "knobs must name at least one knob, not none", ("knobs",)),
        ([], "grid", "knobs must hold at least one configuration, not none", ("knobs",)),
        ("abc", "grid", "knobs must map each knob to the list of its values, or be a list of configurations, "
         "not 'abc'", ("knobs",)),
        ({"a": []}, "grid", "the knob 'a' must have at least one value, not none", ("knobs", "a")),
        ({"a": "xyz"}, "grid", "the knob 'a' must have a list of values, not 'xyz'", ("knobs", "a")),
        ({"a": 3}, "grid", "the knob 'a' must have a list of values, not 3", ("knobs", "a")),
        ({"a": [1, 2, 1.0]}, "grid", "the knob 'a' must have each value once, not 1.0 twice",
         ("knobs", "a", 2)),
        ({"a b": [1]}, "grid", "a knob must have the name of a keyword of the factory, not 'a b'",
         ("knobs", "a b")),
        ({"a": [object]}, "grid", "the knob 'a' must have values that JSON can hold (numbers, text, true, "
         "false, null, lists and mappings of these), not <class 'object'>", ("knobs", "a", 0)),
        ({"a": [float("nan")]}, "grid", "the knob 'a' must have values that JSON can hold (numbers, text, "
         "true, false, null, lists and mappings of these), not nan", ("knobs", "a", 0)),
        ({"a": [1, 2], "b": [1]}, "zip",
         "knobs must have lists of one length with mode 'zip', not a: 2, b: 1", ("knobs", "b")),
        ({"a": [1, 1], "b": [2, 2]}, "zip",
         "each configuration must come once: number 2 is number 1 again (a=1, b=2)", ("knobs", "a", 1)),
        ([{"a": 1}, {"a": 2}, {"a": 1}], "grid",
         "each configuration must come once: number 3 is number 1 again (a=1)", ("knobs", 2)),
        ([{"a": 1}, {"b": 2}], "grid",
         "each configuration must have the knobs of the first (a), not b: a, b differs", ("knobs", 1)),
        ([{"a": 1}, 3], "grid", "each configuration must map knobs to values, not 3", ("knobs", 1)),
        ([{"a": 1}], "zip", "mode must be left out where knobs is a list of configurations, not 'zip'",
         ("mode",)),
        ({"a": [1]}, "random", "mode must be one of grid, zip, not 'random'", ("mode",)),
    ],
)  # fmt: skip
def test_wrong_knobs_are_refused_with_their_place(knobs: Any, mode: str, text: str, place: Any) -> None:
    with pytest.raises(GridError) as caught:
        configurations(knobs, mode=mode)
    assert (str(caught.value), caught.value.place) == (text, place)


def run_of(entries: Any) -> list[dict[str, Any]]:
    return [dict(entry.configuration) for entry in entries if not entry.why_not]


def test_start_from_is_the_seeds() -> None:
    entries = plan({"max_crops": CROPS_RUN}, start_from={"max_crops": 12})
    assert run_of(entries) == [{"max_crops": 12}, {"max_crops": 13}, {"max_crops": 14}]
    assert {entry.why_not for entry in entries[:5]} == {"it stands before max_crops=12"}
    assert plan({"max_crops": CROPS_RUN}, start_from=12) == entries


def test_in_a_grid_a_start_is_for_its_knob_alone() -> None:
    entries = plan({"top_k": [1, 2], "crops": [10, 12, 13]}, start_from={"crops": 12})
    assert run_of(entries) == [{"top_k": k, "crops": c} for k in (1, 2) for c in (12, 13)]
    both = plan({"top_k": [1, 2], "crops": [10, 12, 13]}, start_from={"crops": 13, "top_k": 2})
    assert run_of(both) == [{"top_k": 2, "crops": 13}]


def test_in_a_list_everything_before_the_start_is_skipped() -> None:
    rows = [{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 2}]
    assert run_of(plan(rows, start_from={"a": 2})) == rows[1:]
    assert run_of(plan(rows, start_from={"b": 2, "a": 1})) == rows[2:]


@pytest.mark.parametrize(
    ("start", "text", "place"),
    [
        ({"crops": 11}, "start_from must be among the values of 'crops' (10, 12), not 11",
         ("start_from", "crops")),
        ({"crop": 12}, "start_from must name knobs (crops, top_k), not 'crop'; did you mean crops?",
         ("start_from", "crop")),
        (12, "start_from must say which of the knobs (crops, top_k) it is for, such as {'crops': 12}, not 12",
         ("start_from",)),
        ({}, "start_from must name a knob or be left out, not {}", ("start_from",)),
    ],
)  # fmt: skip
def test_a_start_that_is_not_there_is_refused(start: Any, text: str, place: Any) -> None:
    with pytest.raises(GridError) as caught:
        plan({"crops": [10, 12], "top_k": [1, 2]}, start_from=start)
    assert (str(caught.value), caught.value.place) == (text, place)
    with pytest.raises(GridError, match="start_from must be among the configurations, not a=1, b=4"):
        plan([{"a": 1, "b": 2}, {"a": 3, "b": 4}], start_from={"a": 1, "b": 4})


@given(st.sets(st.integers(0, 7)), st.integers(0, 7))
@examples(50)
def test_what_is_done_is_not_run_again_and_nothing_is_lost(done: set[int], start: int) -> None:
    entries = plan({"a": list(range(8))}, start_from=start)
    after = without_done(entries, [key_of({"a": one}) for one in done])
    assert [row["a"] for row in run_of(after)] == [one for one in range(start, 8) if one not in done]
    assert [entry.why_not == DONE for entry in after] == [one >= start and one in done for one in range(8)]
    assert without_done(after, [key_of({"a": one}) for one in done]) == after


# Estimates


@pytest.mark.parametrize(
    ("max_crops", "size"),
    [(1, 64), (2, 64), (3, 51), (4, 51), (6, 38), (8, 32), (10, 25), (12, 19), (13, 16), (99, 16)],
)
def test_the_seeds_table_of_crops(max_crops: int, size: int) -> None:
    assert estimate_of({"max_crops": "crops"}, ("max_crops",))({"max_crops": max_crops}, 64) == size


@pytest.mark.parametrize(("top_k", "size"), [(1, 64), (2, 64), (4, 57), (8, 51), (9, 44)])
def test_the_seeds_table_of_top_k(top_k: int, size: int) -> None:
    assert estimate_of({"k": "top_k"}, ("k",))({"k": top_k}, 64) == size


@pytest.mark.parametrize(("active", "size"), [(24, 64), (12, 32), (8, 21), (1, 2), (30, 64)])
def test_the_seeds_share_of_blocks(active: int, size: int) -> None:
    assert estimate_of({"active": {"blocks": 24}}, ("active",))({"active": active}, 64) == size


def test_combined_knobs_multiply() -> None:
    estimate = estimate_of({"crops": "crops", "k": "top_k"}, ("crops", "k", "other"))
    assert estimate({"crops": 8, "k": 4, "other": 3}, 64) == int(64 * 0.5 * 0.9)
    assert estimate({"crops": 99, "k": 99, "other": 3}, 2) == 1  # never below 1


def test_tables_formulas_and_functions_of_ones_own() -> None:
    table = estimate_of({"p": {"512": 1.0, 128: 2.0, "else": 0.125}}, ("p",))
    assert [table({"p": p}, 64) for p in (100, 128, 512, 513)] == [64, 64, 64, 8]
    formula = estimate_of({"p": "min(1, 512 / p) ** 2 / sqrt(q)"}, ("p", "q"))
    assert [formula({"p": p, "q": q}, 64) for p, q in ((512, 1), (1024, 1), (512, 4))] == [64, 16, 32]
    function = estimate_of({"p": lambda value: 1 / value}, ("p",))
    assert function({"p": 4}, 64) == 16


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({}, "estimate must name a knob or be left out, not {}"),
        ({"x": "crops"}, r"estimate must name knobs \(p, crops\), not 'x'"),
        ({"crop": "crops"}, "did you mean crops"),
        ({"p": "blocks"}, r"must say of how many blocks, \{'blocks': 24\}"),
        ({"p": {"blocks": 0}}, "blocks must be how many there are in all, not 0"),
        ({"p": {1: 0.5}}, "must say 'else' for what is beyond its last value"),
        ({"p": {1: -0.5, "else": 1}}, "a factor for 'p' must be a positive number, not -0.5"),
        ({"p": {"many": 0.5, "else": 1}}, "must go from largest values to factors, .* not 'many'"),
        ({"p": "1 / prompt"}, "'prompt' is no knob"),
        ({"p": "top-k"}, "'top' is no knob"),
        ({"p": "1 /"}, "it cannot be read"),
        ({"p": "__import__('os')"}, "it may call min, max, sqrt only"),
        ({"p": "p.real"}, "Attribute is not arithmetic"),
        ({"p": "'a' * 9"}, "Constant is not arithmetic"),
        ({"p": "p" * 201}, "longer than 200 characters"),
        ({"p": 3}, "must be one of crops, top_k, .* a formula or a function, not 3"),
    ],
)
def test_wrong_estimates_are_refused(spec: Any, text: str) -> None:
    with pytest.raises(GridError, match=text) as caught:
        estimate_of(spec, ("p", "crops"))
    assert caught.value.place[0] == "estimate"


def test_a_formula_without_a_value_names_the_configuration() -> None:
    with pytest.raises(
        ValueError, match=r"the estimate '1 / p' must have a value at p=0: .*division by zero"
    ):
        estimate_of({"p": "1 / p"}, ("p",))({"p": 0}, 64)
    with pytest.raises(ValueError, match="must be a positive factor at p=-1, not -1"):
        estimate_of({"p": "p"}, ("p",))({"p": -1}, 64)
    with pytest.raises(ValueError, match="must be made from numbers, not 'a'"):
        estimate_of({"p": "crops"}, ("p",))({"p": "a"}, 64)
    with pytest.raises(ValueError, match="power is above 16"):
        estimate_of({"p": "9 ** p"}, ("p",))({"p": 99}, 64)


@given(st.integers(1, 4096), st.integers(1, 100), st.integers(1, 100))
@examples(60)
def test_an_estimate_is_between_one_and_the_full_size(batch_size: int, crops: int, top_k: int) -> None:
    both = estimate_of({"c": "crops", "k": "top_k"}, ("c", "k"))({"c": crops, "k": top_k}, batch_size)
    alone = estimate_of({"c": "crops"}, ("c",))({"c": crops}, batch_size)
    assert 1 <= both <= alone <= batch_size
    assert CROPS(crops, {}) <= 1
    assert TOP_K(top_k, {}) <= 1


@pytest.mark.parametrize("formula", ["min", "1 / max", "min(sqrt, 2)"])
def test_a_function_that_is_not_called_is_no_factor(formula: str) -> None:
    with pytest.raises(GridError, match=r"estimate for 'width' must be .* is no knob"):
        estimate_of({"width": formula}, ("width",))


def test_a_knob_may_be_called_like_a_function() -> None:
    assert estimate_of({"min": "min(1, 8 / min)"}, ("min",))({"min": 16}, 64) == 32
