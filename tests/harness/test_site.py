from dataclasses import replace
from pathlib import Path

import numpy as np

from backends.types import ServingConfig
from harness.settings import RunSettings
from harness.site import checkpoint_identity, site_of


def write(folder: Path, seed: int, size: int) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(np.random.default_rng(seed).bytes(size))
    return str(folder)


def test_the_same_files_are_the_same_checkpoint_wherever_they_lie(tmp_path: Path) -> None:
    a, b = (checkpoint_identity(write(tmp_path / name, 0, 1000)) for name in "ab")
    assert a == b
    (tmp_path / "b" / "config.json").write_text("[]")
    assert checkpoint_identity(str(tmp_path / "b")) != a


def test_a_head_that_was_trained_again_in_place_is_another_checkpoint(tmp_path: Path) -> None:
    for size in (1000, 20 << 20):  # hashed whole, and by blocks
        before = checkpoint_identity(write(tmp_path / "head", 0, size))
        assert checkpoint_identity(write(tmp_path / "head", 1, size)) != before


def test_a_hub_id_is_its_own_identity_and_a_world_is_its_file(tmp_path: Path) -> None:
    assert checkpoint_identity("meta-llama/Llama-3.3-70B-Instruct") == "meta-llama/Llama-3.3-70B-Instruct"
    world = tmp_path / "world.json"
    world.write_text("1")
    before = checkpoint_identity(str(world))
    world.write_text("2")
    assert checkpoint_identity(str(world)) != before


def test_two_sites_differ_by_the_first_thing_that_does_and_a_kernel_is_no_hardware(tmp_path: Path) -> None:
    head = write(tmp_path / "head", 0, 10)
    settings = RunSettings(("t",), "o", model="hub/model", drafts={"eagle3": head}, variants=("off", "eagle3"))
    here = site_of(settings)
    assert here.difference(here) is None
    assert here.engines["reference"]
    newer = replace(here, environment={**here.environment, "host": {**here.environment["host"], "kernel": "99"}})
    assert newer.hardware == here.hardware
    assert here.difference(newer) == f"kernel: 99 instead of {here.environment['host']['kernel']}"
    write(tmp_path / "head", 1, 10)
    trained = site_of(settings)
    assert (here.difference(trained) or "").startswith(f"{head}: ")
    off = ServingConfig("reference", "hub/model")
    on = replace(off, variant="eagle3", k=2, draft=head)
    assert here.identity(off) == trained.identity(off)  # a new head leaves off's trials as they are
    assert here.identity(on) != trained.identity(on)
