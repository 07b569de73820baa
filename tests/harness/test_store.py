from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from backends.types import ConfigError, ServingConfig, SpecCounters
from harness.store import RunStore, Trial, trial_key
from harness.types import Load

CONFIG = ServingConfig(backend="reference", model="m", variant="ngram", k=2, extra={"ngram_max": 3})
LOAD = Load(mode="closed", trace="t.jsonl", concurrency=4)


def trial(number: int, state: str = "COMPLETE", key: str = "k", **fields: object) -> Trial:
    metrics = {"e2e_s": {"p50": 1.0}} if state == "COMPLETE" else None
    return Trial(number, state, "search", CONFIG, LOAD, key, "search", (0, 2), metrics=metrics, **fields)  # type: ignore[arg-type]


def test_a_trial_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    written = store.add(trial(0, warnings=("w",)), records=pa.table({"index": [0, 2]}), counters=SpecCounters(decode_steps=3))
    store.close()
    again = RunStore(tmp_path)
    assert again.trials == [written]
    assert again.records(written)["index"].to_pylist() == [0, 2]
    assert sorted(p.name for p in (tmp_path / "trials" / "0000").iterdir()) == [
        "counters.json",
        "requests.parquet",
        "trial.json",
    ]


def test_a_half_written_trial_is_forgotten_and_its_number_used_again(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add(trial(0))
    store.close()
    (tmp_path / "trials" / "0001.partial").mkdir()
    again = RunStore(tmp_path)
    assert again.next_number() == 1
    assert not list(tmp_path.glob("trials/*.partial"))


def test_only_a_completed_trial_is_found_again(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add(trial(0, "FAIL", key="a", reason="died"))
    done = store.add(trial(1, key="b"))
    assert store.find("a") is None
    assert store.find("b") == done


def test_a_pruned_trial_keeps_its_measurement_and_is_found_again(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    pruned = store.update(replace(store.add(trial(0), records=pa.table({"index": [0, 2]})), state="PRUNED", reason="slower"))
    store.close()
    again = RunStore(tmp_path)
    assert again.find("k") == pruned
    assert pruned.measured
    assert again.records(pruned)["index"].to_pylist() == [0, 2]


def test_one_run_at_a_time_works_in_a_directory(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    with pytest.raises(ConfigError, match="another run works in this directory"):
        RunStore(tmp_path)
    store.close()
    RunStore(tmp_path).close()


@pytest.mark.parametrize(
    "change",
    [
        {"config": ServingConfig(backend="reference", model="m", variant="ngram", k=3)},
        {"load": Load(mode="closed", trace="t.jsonl", concurrency=5)},
        {"trace_sha256": "other"},
        {"requests": (0, 1)},
        {"conditions": {"seed": 1}},
    ],
)
def test_the_key_changes_with_everything_that_shapes_the_numbers(change: dict[str, object]) -> None:
    same = {"config": CONFIG, "load": LOAD, "trace_sha256": "s", "requests": (0, 2), "conditions": {"seed": 0}}
    assert trial_key(**same) == trial_key(**same)  # type: ignore[arg-type]
    assert trial_key(**{**same, **change}) != trial_key(**same)  # type: ignore[arg-type]


def test_a_result_is_replaced_whole(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write_json("result.json", {"schema": 1})
    store.write_json("result.json", {"schema": 1, "trials": ()})
    assert (tmp_path / "result.json").read_text().startswith("{")
    assert not (tmp_path / "result.json.partial").exists()
