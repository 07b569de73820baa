"""What a report says, and what it must never say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_builder import RunSpec, build_run
from run_sections import HOSTILE, SECRET

from harness.result_schema import ResultError
from reports import ReportError, render, render_together
from reports.text import DASH


class Page(HTMLParser):
    """Counts elements and collects ids and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.ids: list[str] = []
        self.words: list[str] = []
        self._silent = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.ids += [value for name, value in attrs if name == "id" and value]
        self._silent += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def rendered_with(folder: Path, change: Callable[[dict[str, Any]], None], spec: RunSpec | None = None) -> Page:
    build_run(folder, spec or RunSpec(requests=12, k=(1, 3), batch_sizes=(1, 16)))
    path = folder / "result.json"
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))
    render(folder)
    return page_of(folder)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("enable", "Turn speculative decoding on: draft model, K = 3"),
        ("enable_below_batch", "Turn speculative decoding on below batch size 17: draft model, K = 3"),
        ("skip", "Leave speculative decoding off"),
        ("no_clear_winner", "A tie: E2E p50 has a speed-up of 1.02×, and its 95 % interval 0.97× to 1.08× includes 1."),
        ("not_measurable", "Not measurable: there is no evidence for a verdict"),
    ],
)
def test_the_first_screen_says_the_verdict_in_words(tmp_path: Path, verdict: str, said: str) -> None:
    page = rendered_with(tmp_path, lambda result: None, RunSpec(requests=12, k=(1, 3), batch_sizes=(1, 16), verdict=verdict))
    assert said in page.text
    assert page.text.index(said) < page.text.index("All trials")


@pytest.mark.parametrize("speedup", [None, {"metric": "e2e_p50", "value": 1.06, "ci95": [0.92, 1.22]}])
def test_a_skip_that_no_interval_decided_says_what_did(tmp_path: Path, speedup: dict[str, Any] | None) -> None:
    def change(result: dict[str, Any]) -> None:
        result["decisions"][0].update(speedup=speedup, reasons=["Hardly a draft token is accepted."])

    page = rendered_with(tmp_path, change, RunSpec(requests=12, k=(1, 3), batch_sizes=(1, 16), verdict="skip"))
    assert "Leave speculative decoding off Hardly a draft token is accepted." in page.text
    assert "A tie" not in page.text


def test_a_launch_command_is_shown_as_it_is_to_be_pasted(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        result["decisions"][0]["launch"] = {
            "command": "vllm serve m --speculative-config '{\"k\": 3}'",
            "env": {"A": "b c"},
            "files": {},
        }

    assert "A='b c' vllm serve m --speculative-config '{\"k\": 3}'" in rendered_with(tmp_path, change).text


def test_null_is_a_dash_and_never_zero(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        for trial in result["trials"]:
            if trial["metrics"]:
                trial["metrics"]["output_tokens_per_s"] = trial["metrics"]["throughput_ci95"] = None

    page = rendered_with(tmp_path, change)
    assert "Throughput, output tokens/s closed loop, 1 at a time – – –" in page.text


def test_milliseconds_for_people(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        for trial in result["trials"]:
            if trial["metrics"] and trial["load"]["mode"] == "trace":
                trial["metrics"]["e2e_s"].update(p50=1.25 if trial["config"]["k"] == 0 else 0.5, p50_ci95=[0.4, 1.5])

    page = rendered_with(tmp_path, change)
    assert "E2E p50, ms trace's own arrivals 1,250 400 to 1,500 500 400 to 1,500 2.50×" in page.text


def test_a_run_without_a_completed_trial_still_has_a_report(rendered: dict[str, Path]) -> None:
    page = page_of(rendered["failed"])
    assert "No trial completed, so nothing was measured" in page.text
    assert "out_of_memory: the KV cache does not fit" in page.text
    assert not re.search(r"\d×", page.text.split("What the search cost")[0])


def test_failed_trials_have_a_cause_and_no_numbers(rendered: dict[str, Path]) -> None:
    html = (rendered["plain"] / "report.html").read_text(encoding="utf-8")
    failed = [row for row in html.split("<tr ") if row.startswith('class="s-FAIL"') or row.startswith('class="s-INFEASIBLE"')]
    assert len(failed) == 2
    for row in failed:
        cells = row.split("</tr>")[0].count("<td")
        assert cells == 4  # trial, configuration, load, and the cause across the rest


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    page = rendered_with(tmp_path, lambda result: None, RunSpec(requests=12, k=(1,), batch_sizes=(1,), extras=False))
    for title in ("Losslessness", "Diagnosis of low acceptance", "Capacity and cost", "Predictions", "Checks before the start"):
        assert title not in page.text


def test_a_section_of_open_shape_shows_whatever_it_holds(tmp_path: Path) -> None:
    value = {"highest_rate_per_s": {"off": 2.5, "on": None}, "rows": [{"ttft_p95_s": 0.25, "meets_slo": True}]}
    page = rendered_with(tmp_path, lambda result: result["environment"]["host"].update(rates=value))
    assert "Highest rate per s Off 2.50 On –" in page.text
    assert "TTFT p95 Meets SLO 250 ms yes" in page.text


def test_the_self_test_says_how_many_checks_passed_and_on_which_day(tmp_path: Path) -> None:
    page = rendered_with(tmp_path, lambda result: None)
    assert (
        "On this machine, 2026-01-02: 1 of 2 checks passed. A check of times fails on a machine that does other work"
        in page.text
    )


def test_predictions_are_marked(tmp_path: Path) -> None:
    html = (build_and_render(tmp_path) / "report.html").read_text(encoding="utf-8")
    section = html[html.index('<section id="predictions"') :]
    section = section[: section.index("</section>")]
    assert section.count('class="n predicted"') == 3 * 6


def build_and_render(folder: Path, *, show_text: bool = False) -> Path:
    build_run(folder, RunSpec(requests=12, k=(1, 3), batch_sizes=(1, 16)))
    render(folder, show_text=show_text)
    return folder


def test_text_of_the_workload_is_shown_only_when_asked_for(tmp_path: Path) -> None:
    hidden, shown = build_and_render(tmp_path / "a"), build_and_render(tmp_path / "b", show_text=True)
    for name in ("report.html", "report.md"):
        assert SECRET not in (hidden / name).read_text(encoding="utf-8")
    assert SECRET in (shown / "report.html").read_text(encoding="utf-8")


def test_hostile_names_are_inert(rendered: dict[str, Path]) -> None:
    html = (rendered["hostile"] / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert HOSTILE.split("\x1b")[0] in page.text  # shown as it is, template syntax unevaluated
    assert "\\x1b[31m\\x00\\u202egnp.exe" in page.text
    assert not set(html) & set("\x00\x1b\u202e")
    assert page.tags["script"] == html.count('<script type="application/json"') + 1
    assert "<script>window" not in html
    markdown = (rendered["hostile"] / "report.md").read_text(encoding="utf-8")
    assert "<script>" not in markdown


def test_ids_are_unique_so_that_figures_do_not_share_definitions(rendered: dict[str, Path]) -> None:
    for folder in rendered.values():
        ids = page_of(folder).ids
        assert len(ids) == len(set(ids))


def test_figures_use_the_pages_colours_and_have_names(rendered: dict[str, Path]) -> None:
    html = (rendered["plain"] / "report.html").read_text(encoding="utf-8")
    charts = re.findall(r"<svg .*?</svg>", html, flags=re.S)
    assert len(charts) == 8  # speed-up, positions, three distributions, latency-throughput, replicas, cost
    for chart in charts:
        assert re.match(
            r'<svg [^>]*role="img" aria-labelledby="\S+-title \S+-desc"[^>]*><title id="\S+-title">.+</title><desc', chart
        )
        assert not re.search(r"#0[1-6]0[1-6]0[1-9]", chart)  # every stand-in colour was replaced
        assert "var(--ink)" in chart


def test_the_page_refers_to_nothing_outside(rendered: dict[str, Path]) -> None:
    html = (rendered["plain"] / "report.html").read_text(encoding="utf-8")
    links = re.findall(r'(?:src|href|action)="([^"#][^"]*)"', html)
    assert links == ["data:,"]
    assert "url(" not in re.sub(r"url\(#", "", html)


def test_passwords_in_settings_are_cut_out(rendered: dict[str, Path]) -> None:
    html = (rendered["plain"] / "report.html").read_text(encoding="utf-8")
    assert "postgresql://db/optuna" in html
    assert "hunter2" not in html


def test_rendering_again_gives_the_same_bytes(tmp_path: Path) -> None:
    first = build_and_render(tmp_path / "run")
    before = [(first / name).read_bytes() for name in ("report.html", "report.md")]
    render(first)
    assert [(first / name).read_bytes() for name in ("report.html", "report.md")] == before
    assert not list(first.glob("*.partial"))


def test_markdown_is_short_and_starts_with_the_verdict(rendered: dict[str, Path]) -> None:
    markdown = (rendered["plain"] / "report.md").read_text(encoding="utf-8")
    assert markdown.startswith("## Turn speculative decoding on below batch size 17: draft model, K = 3\n")
    assert "**Warnings**" in markdown
    assert "| E2E p50, ms (trace's own arrivals) |" in markdown
    assert len(markdown.splitlines()) < 60


def test_a_directory_without_a_result_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no result\.json; give the --out directory"):
        render(tmp_path)


def test_a_result_that_is_not_json_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ReportError, match="not JSON"):
        render(tmp_path)


def test_a_result_that_breaks_the_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"schema": 2}')
    with pytest.raises(ResultError, match=r"result\.json"):
        render(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_what_stands_behind_the_verdict_is_shown_with_its_prediction_marked(rendered: dict[str, Path]) -> None:
    html = (rendered["plain"] / "report.html").read_text(encoding="utf-8")
    section = html[html.index('<section id="basis"') :]
    section = section[: section.index("</section>")]
    text = Page(section).text
    assert "between: twice the batch takes 1.41× the time of a step" in text
    assert "1.75×; drafting and the wider verification are 42.9 % of it" in text
    assert "65,536 and 58,982: room for 323 and 291 requests of mean length" in text
    assert "4.2 s and –" in text
    assert "load +50 % batch size about 24.0 0.94× 0.900 to 0.990 off changes" in text
    assert section.count('predicted"') == 2 * 2


def test_acceptance_by_group_is_shown_or_said_to_be_missing(rendered: dict[str, Path]) -> None:
    page = page_of(rendered["plain"])
    assert "By category chat 20 400 1.20 50.0 %" in page.text
    assert "By context at the step" not in page.text  # one group only: nothing to compare
    assert "Over the time of the load 1 of 4 20 400 1.90 50.0 %" in page.text
    assert "not available: the server merges steps into chunks." in page.text


def test_losslessness_and_diagnosis_are_told_with_their_figures(rendered: dict[str, Path]) -> None:
    text = page_of(rendered["plain"]).text
    assert "Equal answers, on against off 95.0 % of 40 (95 % interval 84.0 % to 99.0 %)" in text
    assert "First token that differs 16, 30 (median 23)" in text
    assert "token frequencies p = 0.410, lengths p = 0.700" in text
    assert "First draft token accepted: 41.0 %." in text
    assert "workload mismatch likely ordinary text is accepted at 0.71" in text


def test_capacity_says_what_passes_what_fails_and_what_it_costs(rendered: dict[str, Path]) -> None:
    text = page_of(rendered["plain"]).text
    assert "Limits: TPOT P95 40.0 ms." in text
    assert "off 1.65 1.46 trial 7 1.62 trial 8 TPOT P95" in text  # predicted, passed, failed
    assert "on 3.30 2.91 trial 7 – none: it may serve more" in text
    assert "off 1.50 4 in flight 1.80 16 in flight TPOT P95 1.90 requests/s: breaks TPOT P95 9.26" in text
    assert "on 3.00 4 in flight 3.60 16 in flight TPOT P95 1.90 requests/s: within the limits 4.63" in text
    assert "Replicas are worked out from the trace's minutes and the rate of the replay that passed." in text
    assert "time × p95 minute, off p95 minute, on busiest minute, off" in text
    assert "0.5 2 1 2 1 25.0 % 25.0 % 5.00 2.50" in text


def test_a_run_without_replays_at_other_rates_is_still_shown_with_its_closed_loops(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "old", RunSpec(requests=12, k=(1,), batch_sizes=(1, 16)))
    path = folder / "result.json"
    result = json.loads(path.read_text())
    for side in result["capacity"][0]["sides"]:
        for name in ("predicted_rps", "open_loop", "sized_by"):
            del side[name]
    path.write_text(json.dumps(result))
    render(folder)
    text = page_of(folder).text
    assert "on – – – not replayed" in text
    assert "leave headroom" in text


def test_the_launch_is_there_to_paste_into_a_container_and_with_its_schedule(rendered: dict[str, Path]) -> None:
    html = (rendered["plain"] / "report.html").read_text(encoding="utf-8")
    assert '<pre id="dockerfile-1" tabindex="0">FROM ENGINE_IMAGE' in html
    assert '<pre id="kubernetes-1" tabindex="0">containers: []' in html
    assert "--max-num-seqs 64 --k-schedule 1-16</pre>" in html
    assert 'data-copy="scheduled-1"' in html


def test_several_runs_are_shown_side_by_side_with_what_sets_them_apart(tmp_path: Path) -> None:
    small = RunSpec(requests=12, k=(1, 3), batch_sizes=(1, 16), extras=False)
    folders = [build_run(tmp_path / name / "run", small) for name in ("h100", "a100")]
    folders.append(build_run(tmp_path / "other", replace(small, verdict="skip", traces=(HOSTILE,))))
    path = folders[1] / "result.json"
    result = json.loads(path.read_text())
    result["environment"] |= {"gpu": [{"name": "A100"}], "fingerprint": "sha256:" + "c" * 64}
    path.write_text(json.dumps(result))
    (folders[1] / "config.yaml").write_text("k: [2, 4]\nseed: 0\n")
    render_together(folders, tmp_path / "out" / "together.html")
    html = (tmp_path / "out" / "together.html").read_text(encoding="utf-8")
    page = Page(html)
    assert "h100/run a100/run other" in page.text
    assert "GPU none A100 none" in page.text
    assert "K – 2, 4 –" in page.text
    assert "The runs are from different machines or software" in page.text
    assert "Turn speculative decoding on below batch size 17: draft model, K = 3" in page.text
    assert f"{DASH} {DASH} Leave speculative decoding off" in page.text
    assert "<script" not in html


def test_settings_read_back_are_told_once_where_equal_and_for_each_server_where_not(tmp_path: Path) -> None:
    def read_back(result: dict[str, Any]) -> None:
        for trial in result["trials"]:
            off = trial["config"]["variant"] == "off"
            trial["engine"]["resolved"] = {"page_size": 16, "cuda_graph_max_batch": 64 if off else 48}

    small = RunSpec(requests=12, k=(1,), batch_sizes=(1,), extras=False)
    text = rendered_with(tmp_path, read_back, small).text
    assert (
        "reference Server Cuda graph max batch off 64 n-gram, K = 1 48 draft model, K = 1 48 Page size 16 Environment" in text
    )


def test_interference_says_who_waits_for_whom(rendered: dict[str, Path]) -> None:
    text = page_of(rendered["plain"]).text
    assert "reference : draft model, K = 1 on 30.0 – 31.0 33.0 1,200 0.0 % 2,000 1,150 prefill first" in text


def test_an_interference_that_could_not_be_measured_says_why(tmp_path: Path) -> None:
    def refuse(result: dict[str, Any]) -> None:
        config = {**result["interference"][0]["config"], "chunked_prefill": False}
        result["interference"].append({"config": config, "problem": "needs a longer context"})

    page = rendered_with(tmp_path, refuse)
    assert "reference : draft model, K = 1 off not measured: needs a longer context" in page.text


def test_a_comparison_across_the_machines_drift_gets_a_caveat(tmp_path: Path) -> None:
    caveat = "so that comparison is only a hint"
    assert caveat not in rendered_with(tmp_path / "a", lambda result: None).text
    page = rendered_with(tmp_path / "b", lambda result: result["decisions"][0]["depth"].update(drift=1.37))
    assert "the machine changed by 37.0 % in between" in page.text


def test_how_the_search_narrowed_is_shown_as_predicted(rendered: dict[str, Path]) -> None:
    text = page_of(rendered["plain"]).text
    assert "fitted to 9 loads within 4.0 %; arithmetic outweighs memory from a batch size of about 6.50 on." in text
    assert "K = 1: 1.80, K = 3: 2.90" in text
    assert "Confirmed in 2 rounds: draft model, K = 1, without a clear winner." in text
