"""The probes of low acceptance against a running simulated server whose acceptance is known."""

from collections.abc import Iterator

import pytest

from backends.process import Server, free_port
from backends.simulated import adapter
from backends.simulated.world import Draft, TargetCost, World, dump_world
from backends.types import Endpoint, ServingConfig
from harness.probes import first_position_of, probe
from harness.store import Trial
from harness.types import Load
from workloads.types import Request

FIRST = 0.4


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("server")
    world = World("low", TargetCost(1e-4, 1e-4, 0, 0), drafts={"eagle3": Draft({"default": (FIRST, 0.2)})})
    (folder / "world.json").write_text(dump_world(world))
    config = ServingConfig("simulated", str(folder / "world.json"), "eagle3", k=2)
    port = free_port()
    launch = adapter.launch(config, port=port, command=adapter.DEFAULT_COMMAND, base_args=())
    server = Server.start(launch, port=port, folder=folder, backend="simulated")
    yield server.endpoint
    server.stop()


def test_probes_count_first_draft_tokens_under_each_condition(endpoint: Endpoint) -> None:
    raw = [
        Request(index=i, arrival_s=None, prompt=f"a raw prompt, number {i}", sampling={"temperature": 0.8}) for i in range(8)
    ]
    found = probe(endpoint, raw)
    assert set(found) == {"probe", "greedy", "other_template"}
    for rate in found.values():
        assert rate is not None
        assert rate.steps > 200  # 8 answers of 64 tokens at 1.6 a step
        assert rate.value == pytest.approx(FIRST, abs=4 * (FIRST * (1 - FIRST) / rate.steps) ** 0.5)


def test_chat_traces_have_no_other_template_to_try(endpoint: Endpoint) -> None:
    chat = [Request(index=0, arrival_s=None, messages=[{"role": "user", "content": "hello"}])]
    assert probe(endpoint, chat)["other_template"] is None


def test_the_rate_of_a_load_is_over_its_drafted_steps() -> None:
    spec = {"position_rates": (0.3, 0.1), "verify_steps": 1000, "drafted_steps": 750}
    config = ServingConfig("vllm", "m", "eagle3", k=2)
    trial = Trial(0, "COMPLETE", "confirm", config, Load("closed", "t", 1), "k", "confirm", (), metrics={}, speculation=spec)
    rate = first_position_of(trial)
    assert rate is not None
    assert (rate.accepted, rate.steps) == (300, 750)
