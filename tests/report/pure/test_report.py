"""The report: every kind of result, one file without a request, and nothing of the user's that runs."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from notebook import notebook_html
from typer.testing import CliRunner

import batchfit
from batchfit._charts.figures import (
    Memory,
    memory_chart,
    of_one_order,
    path_chart,
    throughput_chart,
    timeline_chart,
)
from batchfit._cli.app import app
from batchfit._cli.exits import Code
from batchfit._report.files import KINDS, Source, read_file, results_in, sources_of
from batchfit._report.page import page
from batchfit._report.sweep import sweep_charts
from batchfit._report.verdict import facts_of, verdict
from batchfit.errors import ResultFileError
from batchfit.results import (
    FitResult,
    MemoryExplanation,
    Prediction,
    SweepRecord,
    ThroughputProfile,
    Trial,
)

DATA = Path(__file__).parents[2] / "data" / "report"
FILES = {name: DATA / f"{name}.json" for name in ("fit", "cards", "why", "profile", "schedule", "sweep")}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
VOID = {"meta", "br"}
NUMBERS = [0, -1, 1, 2**63, 10**30, -(10**20), 0.0, 1e308, 5e-324, -2.5]
ANYTHING = [*NUMBERS, None, True, "", "x", [], {}, float("nan")]


class Elements(HTMLParser):
    """Elements with their attributes; fails where one is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def made(*names: str, title: str | None = None) -> str:
    return page(sources_of([FILES[name] for name in names]), title=title)


def result(name: str) -> Any:
    return results_in(TEXTS[name])[0]


class TestPage:
    @pytest.mark.parametrize(
        ("names", "figures", "said"),
        [
            (("fit",), ["memory-0", "search-0"], "Batch size 20 is the largest that lasts on cpu"),
            (("cards",), ["memory-0"], "Predicted to fit are 4,088 on rtx4090 (23.1 GiB) and 12,816 on h100"),
            (("why",), ["memory-0", "timeline-0"], "Batch size 32 needs 256.3 MiB of 128.0 MiB"),
            (("profile",), ["throughput", "memory-0"], "Batch size 128 is the smallest within 5%"),
            (
                ("sweep",),
                [f"sweep-0-{n}" for n in range(4)],
                "Batch sizes go from 628 (width=512, layers=8) to 3,276 (width=64, layers=4) in 12 of 12",
            ),
            (
                ("schedule",),
                ["schedule-0", "rate-0"],
                "The schedule makes 6,860 updates in 60 epochs, 41.7% fewer",
            ),
            (("fit", "cards"), ["memory-0", "memory-1", "search-0"], "Predicted to fit are"),
            (("fit", "fit"), ["memory-0", "search-0", "search-1"], "Batch size 20"),
            (
                ("fit", "cards", "why", "profile", "schedule"),
                ["throughput", "memory-0", "memory-1", "search-0", "timeline-0", "schedule-0", "rate-0"],
                "And 2 more below",
            ),
        ],
    )
    def test_each_kind_has_its_figures_and_its_sentence(
        self, names: tuple[str, ...], figures: list[str], said: str
    ) -> None:
        text = made(*names)
        elements = Elements(text)
        assert [values.get("id") for tag, values in elements.found if tag == "figure"] == figures
        ids = [values["id"] for _, values in elements.found if "id" in values]
        assert len(ids) == len(set(ids))
        assert said in "".join(elements.said)
        assert "Environment" in elements.said

    def test_what_a_schedule_asks_for_in_vain_is_said(self) -> None:
        data = json.loads(TEXTS["schedule"])
        asked = {"more_than_fits": ["512 is more than fits"], "more_than_an_epoch": ["9,999 & more"]}
        (plan,) = results_in(json.dumps({**data, **asked}))
        said = Elements(page([Source(plan, "x")], title="x")).said
        assert {"512 is more than fits", "9,999 & more"} <= set(said)

    def test_a_report_is_small(self) -> None:
        for name in FILES:
            assert len(made(name).encode()) < 64 * 1024, name
        assert len(made("fit", "cards", "why").encode()) < 3 * 35 * 1024

    def test_nothing_is_asked_of_the_network(self) -> None:
        text = made(*FILES)
        assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|<link|<iframe|<img", text)
        assert not [tag for tag, values in Elements(text).found if {"src", "href", "style"} & values.keys()]

    def test_the_policy_names_the_only_script_and_style(self) -> None:
        text = made("fit")
        elements = Elements(text)
        policy = next(
            v["content"] for tag, v in elements.found if v.get("http-equiv") == "Content-Security-Policy"
        )
        assert policy is not None
        assert policy.startswith("default-src 'none';")
        for tag in ("script", "style"):
            (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy

    def test_the_same_results_give_the_same_bytes(self) -> None:
        assert made("fit", "cards") == made("fit", "cards")

    @pytest.mark.parametrize("name", sorted(FILES))
    @pytest.mark.parametrize(
        "bad", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</title></style>&lt;"]
    )
    def test_texts_of_the_user_are_texts(self, name: str, bad: str) -> None:
        def spoiled(value: Any, key: str = "") -> Any:
            if isinstance(value, dict):
                return {k: spoiled(v, k) for k, v in value.items()}
            if isinstance(value, list):
                return [spoiled(one) for one in value]
            fixed = key in ("kind", "based_on", "outcome", "failed_in")
            return bad if isinstance(value, str) and not fixed else value

        data = spoiled(json.loads(TEXTS[name]))
        if name == "why":
            data["timeline"] = [{**m, "kinds": {bad: 5, "weights": 7}} for m in data["timeline"]]
        if name == "sweep":  # a knob and a measure may be called anything
            for record in data["records"]:
                record["knobs"] = {bad: record["knobs"]["width"], "layers": record["knobs"]["layers"]}
                record["measures"] = {bad + "!": 1.5}
        text = page([Source(one, bad) for one in results_in(json.dumps(data))], title=bad)
        elements = Elements(text)
        assert [tag for tag, _ in elements.found].count("script") == 1
        assert not [tag for tag, values in elements.found if tag == "img" or "onerror" in values]
        assert bad in "".join(elements.said)  # shown as it is, not left out

    def test_the_table_has_every_number_of_the_chart(self) -> None:
        said = "".join(Elements(made("fit")).said)
        for trial in result("fit").trials:
            assert f"{trial.size}" in said
        assert "123.6 MiB" in said


class TestCharts:
    def test_an_outcome_has_its_own_shape_and_what_was_out_of_memory_stands_on_the_budget(self) -> None:
        outcomes = ("fits", "oom", "too_large", "killed", "timeout")
        trials = [
            Trial(size=n + 1, outcome=one, steps_run=1, peak_bytes=2**20)  # type: ignore[arg-type]
            for n, one in enumerate(outcomes)
        ]
        trials.append(Trial(size=1, outcome="fits", steps_run=25, peak_bytes=2**20, soak=True))
        fit = result("fit").model_copy(
            update={"trials": tuple(trials), "batch_size": 1, "budget_bytes": 2**21}
        )
        path = [one for one in path_chart(fit).series if not one.line]
        looks = {(mark.shape, one.role) for one in path for mark in one.marks}
        assert len(looks) == len(path) == 6
        memory = memory_chart(Memory(fits=(("", fit),)))
        heights = {one.name: {mark.y for mark in one.marks} for one in memory.series}
        assert heights["ran out of memory"] == heights["killed"] == {2.0}
        assert heights["fits"] == {1.0}
        assert [rule.at for rule in memory.rules] == [2.0]

    def test_a_prediction_lies_in_the_chart_of_the_search_that_followed(self) -> None:
        fit, prediction = result("fit"), result("cards")
        near = prediction.model_copy(update={"budget_bytes": fit.budget_bytes * 2})
        assert len(of_one_order(Memory(fits=(("", fit),), predictions=(("", near),)))) == 1
        assert len(of_one_order(Memory(fits=(("", fit),), predictions=(("", prediction),)))) == 2
        chart = memory_chart(Memory(fits=(("", fit),), predictions=(("", near),)))
        assert {"predicted peak", "ran out of memory"} <= {one.name for one in chart.series}

    @given(budgets=st.lists(st.integers(0, 2**45), min_size=1, max_size=8))
    @examples(50, suppress_health_check=[HealthCheck.too_slow])
    def test_every_result_is_in_exactly_one_group(self, budgets: list[int]) -> None:
        fit = result("fit")
        given_fits = tuple(
            (str(n), fit.model_copy(update={"budget_bytes": b})) for n, b in enumerate(budgets)
        )
        groups = of_one_order(Memory(fits=given_fits))
        assert sorted(pair[0] for group in groups for pair in group.fits) == sorted(n for n, _ in given_fits)
        for group in groups:
            assert max(group.budgets()) <= 8 * max(min(group.budgets()), 1)

    def test_the_recommended_size_is_marked(self) -> None:
        profile = result("profile")
        (series,) = throughput_chart([("", profile)]).series
        (chosen,) = [mark for mark in series.marks if mark.label]
        assert (chosen.x, chosen.shape, chosen.label) == (profile.recommended, "diamond", "recommended 128")
        assert all(m.low is not None and m.high is not None and m.low <= m.y <= m.high for m in series.marks)

    def test_sizes_that_a_profile_could_not_run_stand_on_the_budget(self) -> None:
        profile = result("profile").model_copy(update={"too_large": (256,)})
        lost = [
            one
            for one in memory_chart(Memory(profiles=(("", profile),))).series
            if "out of memory" in one.name
        ]
        assert [(mark.x, mark.y, mark.shape) for one in lost for mark in one.marks] == [(256, 128, "cross")]

    def test_kinds_lie_on_each_other_up_to_the_peak(self) -> None:
        reported = result("why")
        areas = [one for one in timeline_chart(reported).series if one.line == "area"]
        highest = max(mark.y for mark in areas[-1].marks) * 2**20
        assert highest == max(sum(moment.kinds.values()) for moment in reported.timeline)
        for lower, upper in pairwise(areas):
            assert [mark.y for mark in lower.marks] == [mark.low for mark in upper.marks]

    def test_results_beside_each_other_have_their_own_colours(self) -> None:
        one, profile = result("cards"), result("profile")
        memory = Memory(predictions=tuple((f"{n}: ", one) for n in range(6)))
        for chart in (memory_chart(memory), throughput_chart([(f"{n}: ", profile) for n in range(6)])):
            colours: dict[str, set[str]] = {}
            for series in chart.series:
                colours.setdefault(series.name.split(":")[0], set()).add(series.role)
            assert len(colours) == 6
            assert all(len(roles) == 1 for roles in colours.values()), colours
            assert len({role for roles in colours.values() for role in roles}) == 6

    @pytest.mark.parametrize("name", ["fit", "cards", "why", "profile"])
    def test_notebooks_show_the_same_charts(self, name: str) -> None:
        cell = notebook_html(result(name))
        assert '<svg class="bf-chart wide' in cell
        assert "<script" not in cell

    def test_a_cell_without_numbers_has_no_chart(self) -> None:
        bare = result("fit").model_copy(update={"trials": ()})
        assert "<svg" not in notebook_html(bare)


class TestSweep:
    def test_sizes_over_each_knob_and_the_rest_over_the_one_with_the_most_values(self) -> None:
        charts = sweep_charts(result("sweep"))
        assert [chart.title for chart in charts] == [
            "Batch size over width", "Batch size over layers", "Samples/s over width", "Loss over width",
        ]  # fmt: skip
        by_layers = {one.name: [(m.x, m.y) for m in one.marks] for one in charts[0].series}
        assert by_layers["layers=8"] == [(64, 3276), (128, 2871), (256, 1720), (512, 628)]
        assert len(by_layers["layers=12"]) == 3  # the one that failed is in no chart
        looks = [{one.name: (one.role, one.line) for one in charts[n].series} for n in (0, 2)]
        assert all(looks[0][name] == look for name, look in looks[1].items())
        assert len(set(looks[0].values())) == 3

    def test_every_configuration_is_in_the_table_with_what_went_wrong(self) -> None:
        said = Elements(made("sweep")).said
        assert "ValueError: 12 layers of 512 are not built yet (at gen.py:4)" in said
        assert "the measurement ran out of memory at 3589, and ran at 2871" in said
        assert "width=64, layers=2: it stands before layers=4" in said
        assert "failed" in said  # in the table of both knobs

    def test_many_series_are_single_marks_and_words_make_no_chart(self) -> None:
        sweep = result("sweep")

        def of(knobs: list[dict[str, Any]]) -> Any:
            records = [SweepRecord(knobs=one, batch_size_used=n + 1) for n, one in enumerate(knobs)]
            return sweep.model_copy(update={"records": tuple(records), "planned": len(records)})

        (many, _) = sweep_charts(of([{"a": a, "b": b} for a in (1, 2) for b in range(9)]))[::-1]
        assert [(one.line, len(one.marks)) for one in many.series] == [("", 18)]
        assert sweep_charts(of([{"a": "x"}, {"a": "y"}])) == []
        assert sweep_charts(of([{"a": True}, {"a": False}])) == []
        wide = sweep_charts(of([{"a": 1}, {"a": 1024}]))[0]
        assert (wide.x.log, wide.x.whole) == (True, True)
        assert verdict([of([{"a": "x"}])]) == ["1 of 1 configurations were run: batch size 1 in all of them."]

    def test_a_sweep_that_goes_on_says_what_is_left(self) -> None:
        sweep = result("sweep").model_copy(update={"planned": 20})
        assert "8 of 20 configurations are still to be run." in Elements(page([Source(sweep)])).said
        nothing = sweep.model_copy(update={"records": ()})
        assert verdict([nothing]) == ["0 of 20 configurations were run, and none has a batch size."]
        assert "<figure" not in page([Source(nothing)])


class TestVerdict:
    def test_a_search_on_a_gpu_is_set_against_its_prediction(self) -> None:
        fit = result("fit").model_copy(update={"device": "cuda:0"})
        reported = result("cards").model_copy(update={"budget_bytes": fit.budget_bytes, "batch_size": 21})
        assert verdict([reported, fit])[0].startswith(
            "Batch size 20 is the largest that lasts on cuda:0 (21 was predicted):"
        )
        assert "was predicted" not in verdict([reported, fit.model_copy(update={"device": "cpu"})])[0]
        assert "was predicted" not in verdict([result("cards"), fit])[0]

    def test_without_a_soak_nothing_is_said_to_last(self) -> None:
        fit = result("fit")
        trials = tuple(trial.model_copy(update={"soak": False}) for trial in fit.trials)
        assert "fits on cpu" in verdict([fit.model_copy(update={"trials": trials})])[0]

    def test_what_is_recommended_comes_first(self) -> None:
        results = [result("fit"), result("profile")]
        assert verdict(results)[0].startswith("Batch size 128")
        assert facts_of(results)[0].value == "128"
        terse = result("profile").model_copy(update={"reason": "3 is the smallest size within 5%."})
        assert verdict([terse]) == ["Batch size 3 is the smallest size within 5%."]

    def test_gpus_on_which_nothing_fits_are_reported(self) -> None:
        data = [json.loads(TEXTS["cards"])[0], {"kind": "nothing_fits", "card": "t4", "budget_bytes": 2**34}]
        text = page([Source(one) for one in results_in(json.dumps(data))])
        assert "Not even a batch of 1 is predicted to fit in 16.0 GiB on t4" in text


class TestReading:
    @pytest.mark.parametrize("name", sorted(FILES))
    def test_a_file_that_is_cut_short_says_so(self, name: str, tmp_path: Path) -> None:
        text = TEXTS[name].rstrip()
        for length in {0, 1, 20, len(text) // 2, len(text) - 1}:
            path = tmp_path / "cut.json"
            path.write_text(text[:length])
            with pytest.raises(ResultFileError, match=r"cut\.json: not JSON, or cut short"):
                read_file(path)

    @pytest.mark.parametrize("name", ["fit", "why", "profile", "schedule", "sweep"])
    def test_a_file_of_a_newer_version_says_so(self, name: str) -> None:
        data = {**json.loads(TEXTS[name]), "schema_version": 99}
        with pytest.raises(ResultFileError, match=r"schema_version is 99, .* Upgrade batchfit"):
            results_in(json.dumps(data))

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("{}", "field 'kind' is missing"),
            ('{"kind": "cake"}', "field 'kind' must be one of fit, .* not 'cake'"),
            ('{"kind": ["fit"]}', "field 'kind' must be one of"),
            ("[]", "an empty list"),
            ("7", "a int where an object must be"),
            ('[{"kind": "fit"}]', "result 1 of 1: field 'batch_size' of FitResult: Field required"),
            ('{"kind": "schedule", "schema_version": 1}', "field 'schedule' of SchedulePlan"),
            ("[" * 100_000, "not JSON"),
        ],
    )
    def test_what_is_not_ours_says_which_field(self, text: str, why: str) -> None:
        with pytest.raises(ResultFileError, match=why):
            results_in(text)

    def test_a_wrong_field_is_named_with_its_place(self) -> None:
        data = json.loads(TEXTS["fit"])
        data["trials"][2]["size"] = -4
        with pytest.raises(ResultFileError, match=r"field 'trials\.2\.size' of FitResult: .* \(found -4\)"):
            results_in(json.dumps(data))

    def test_binary_and_missing_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ResultFileError, match="no text in UTF-8"):
            read_file(tmp_path / "a.json")
        with pytest.raises(ResultFileError, match="No such file"):
            read_file(tmp_path / "b.json")
        with pytest.raises(ResultFileError, match="Is a directory"):
            read_file(tmp_path)

    def test_a_pipe_is_read_and_one_without_an_end_is_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def through_a_pipe(text: str) -> list[Source]:
            there, here = os.pipe()
            with os.fdopen(here, "w") as writer:
                writer.write(text)
            try:
                return read_file(Path(f"/dev/fd/{there}"))
            finally:
                os.close(there)

        text = TEXTS["fit"]
        assert [one.result for one in through_a_pipe(text)] == [result("fit")]
        monkeypatch.setattr("batchfit._report.files.LARGEST_FILE_BYTES", len(text) - 1)
        with pytest.raises(ResultFileError, match="bytes are too many for a result"):
            through_a_pipe(text)

    @pytest.mark.parametrize("wrong", [None, 7, [], {}, [7], b"fit.json", [None]])
    def test_what_is_no_result_is_refused(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match="result must be a result of batchfit"):
            sources_of(wrong)

    def test_every_kind_reads_what_it_says_it_is(self) -> None:
        for kind, reader in KINDS.items():
            assert kind in str(reader.model_fields["kind"].annotation)

    @given(data=st.data())
    @examples(200, suppress_health_check=[HealthCheck.too_slow])
    def test_a_file_with_anything_changed_is_a_page_or_an_error_of_ours(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(FILES)))
        whole = copy.deepcopy(json.loads(TEXTS[name]))
        for _ in range(data.draw(st.integers(1, 3))):
            holder, last = [whole], 0
            for _ in range(data.draw(st.integers(1, 4))):
                value = holder[last]
                if not isinstance(value, dict | list) or not value:
                    break
                at = data.draw(
                    st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value)))
                )
                holder, last = value, at  # type: ignore[assignment]
            number = isinstance(holder[last], int | float)
            # Numbers for numbers are read more often than not: those reach the charts.
            holder[last] = data.draw(st.sampled_from(NUMBERS if number else ANYTHING))
        try:
            results = results_in(json.dumps(whole))
        except ResultFileError:
            return
        Elements(page([Source(one) for one in results]))


class TestFunction:
    def test_writes_a_page_for_values_and_paths(self, tmp_path: Path) -> None:
        where = batchfit.report([result("fit"), FILES["cards"]], tmp_path / "r.html", title="mine & yours")
        assert where == tmp_path / "r.html"
        text = where.read_text(encoding="utf-8")
        assert "<h1>mine &amp; yours</h1>" in text
        assert "cards.json" in text
        batchfit.report(result("profile"), str(where))
        assert "mine" not in where.read_text(encoding="utf-8")
        assert list(tmp_path.iterdir()) == [where]

    def test_an_output_that_cannot_be_written_is_refused_before_the_work(self, tmp_path: Path) -> None:
        for path, why in ((tmp_path, "it is a folder"), (tmp_path / "no" / "r.html", "does not exist")):
            with pytest.raises(ValueError, match=f"path must be a file that can be written, not .*{why}"):
                batchfit.report(tmp_path / "missing.json", path)
        with pytest.raises(TypeError, match="path must be"):
            batchfit.report(result("fit"), None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="title must be text or None, not 7"):
            batchfit.report(result("fit"), tmp_path / "r.html", title=7)  # type: ignore[arg-type]

    def test_what_cannot_be_read_leaves_the_old_page(self, tmp_path: Path) -> None:
        old = tmp_path / "r.html"
        old.write_text("old")
        (tmp_path / "bad.json").write_text('{"kind": "fit"}')
        with pytest.raises(ResultFileError, match=r"bad\.json: field 'batch_size'"):
            batchfit.report([FILES["fit"], tmp_path / "bad.json"], old)
        assert old.read_text() == "old"


class TestCommand:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["report", *arguments])

    def test_says_what_is_in_the_page_in_80_columns(self) -> None:
        ran = self.run(*map(str, FILES.values()))
        assert ran.exit_code == Code.FOUND, ran.output
        assert Path("report.html").read_text(encoding="utf-8") == made(*FILES)
        lines = ran.stdout.splitlines()
        assert lines[0].startswith("Batch size 128 is the smallest")
        assert lines[-1] == "  saved      report.html"
        assert max(map(len, lines)) <= 80

    def test_output_and_title(self) -> None:
        assert self.run(str(FILES["fit"]), "-o", "a.html", "--title", "mine").exit_code == Code.FOUND
        assert "<h1>mine</h1>" in Path("a.html").read_text(encoding="utf-8")

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (("bad.json",), "bad.json: not a result of batchfit: field 'kind' is missing"),
            (("good.json", "bad.json"), "bad.json"),
            (("missing.json",), "missing.json: No such file"),
            (("missing.json", "-o", "no/r.html"), "output must be a file that can be written"),
            (("good.json", "-o", "good.json"), "output must end in .html, not 'good.json'"),
            (("good.html", "-o", "good.html"), "output must be another file than the results"),
            (("good.json", "--plot", "a.pdf"), "plot must end in .png or .svg"),
        ],
    )
    def test_bad_input_is_exit_code_2_and_overwrites_nothing(
        self, arguments: tuple[str, ...], why: str
    ) -> None:
        Path("bad.json").write_text("{}")
        for name in ("good.json", "good.html"):
            Path(name).write_text(TEXTS["fit"])
        Path("report.html").write_text("old")
        ran = self.run(*arguments)
        assert ran.exit_code == Code.USAGE
        assert why in " ".join(ran.output.split())
        assert Path("report.html").read_text() == "old"
        assert sorted(path.name for path in Path().iterdir()) == [
            "bad.json",
            "good.html",
            "good.json",
            "report.html",
        ]

    @pytest.mark.parametrize("suffix", [".png", ".svg"])
    def test_the_charts_as_a_picture(self, suffix: str) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib")
        ran = self.run(*map(str, FILES.values()), "--plot", f"a{suffix}")
        assert ran.exit_code == Code.FOUND, ran.output
        assert f"report.html, a{suffix}" in ran.stdout
        picture = Path(f"a{suffix}").read_bytes()
        assert picture.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
        if suffix == ".svg":  # one pair of axes for each figure of the page
            assert len(set(re.findall(rb'id="axes_\d+"', picture))) == made(*FILES).count("<figure")

    def test_a_picture_that_cannot_be_saved_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib")

        def full(charts: object, path: Path) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("batchfit._cli.png.draw_charts", full)
        ran = self.run(str(FILES["fit"]), "--plot", "a.png")
        assert ran.exit_code == Code.BROKEN
        assert "could not be saved to a.png: No space left" in " ".join(ran.output.split())

    def test_no_file_at_all_is_wrong_usage(self) -> None:
        assert self.run().exit_code == Code.USAGE


def test_files_of_every_function_are_the_kinds_that_are_read() -> None:
    kinds = {
        FitResult: "fit",
        Prediction: "prediction",
        MemoryExplanation: "memory",
        ThroughputProfile: "throughput",
    }
    assert {KINDS[kind]: kind for kind in kinds.values()} == kinds
