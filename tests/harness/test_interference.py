"""The interference probe tells schedulers apart whose order is known."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.process import Server, free_port
from backends.simulated import adapter
from backends.simulated.world import Draft, Limits, TargetCost, World, dump_world
from backends.types import BackendError, Endpoint, ServingConfig
from harness.interference import interference
from harness.interference_probe import probe_interference
from harness.types import RequestRecord
from workloads.types import Request


def decoder(times: list[float], sizes: list[int] | None = None) -> RequestRecord:
    sizes = sizes or [1] * len(times)
    return RequestRecord(
        0, "completed", first_token_s=times[0], chunk_s=tuple(times), chunk_tokens=tuple(sizes), input_tokens=10
    )


def long_prompt(arrive: float, first: float) -> RequestRecord:
    return RequestRecord(1, "completed", intended_s=arrive, first_token_s=first, chunk_s=(first,), input_tokens=2000)


def test_a_pause_of_decoding_is_prefill_first() -> None:
    # a token every 0.1 s until 1.0, nothing until the long prompt has its token at 3.0, then on
    times = [0.1 * i for i in range(1, 11)] + [3.05, 3.15, 3.25]
    found = interference([decoder(times)], [long_prompt(1.0, 3.0)])
    assert found.order == "prefill first"
    assert found.tpot_during_s is None
    assert found.tpot_before_s == pytest.approx(0.1)
    assert found.largest_gap_during_s == pytest.approx(2.05)
    assert found.long_ttft_s == pytest.approx(2.0)
    assert found.long_prompt_tokens == 2000


def test_decoding_that_goes_on_is_decode_first_and_slower_decoding_is_shared() -> None:
    steady = [0.1 * i for i in range(1, 51)]
    assert interference([decoder(steady)], [long_prompt(1.0, 3.0)]).order == "decode first"
    slowed = [0.1 * i for i in range(1, 11)] + [1.4, 1.8, 2.2, 2.6, 3.0, 3.1, 3.2]
    found = interference([decoder(slowed)], [long_prompt(1.0, 3.0)])
    assert found.order == "shared"
    assert found.pace_during_share == pytest.approx(0.25)
    assert found.tpot_during_s == pytest.approx(0.4)
    assert found.tpot_after_s == pytest.approx(0.1)


def test_chunks_of_several_tokens_count_as_several() -> None:
    times = [0.1 * i for i in range(1, 51)]
    found = interference([decoder(times, [1] + [2] * 49)], [long_prompt(1.0, 3.0)])
    assert found.tpot_before_s == pytest.approx(0.05)


def test_a_probe_that_missed_its_phases_or_failed_says_so() -> None:
    with pytest.raises(ValueError, match="had ended"):
        interference([decoder([0.1, 0.2])], [long_prompt(1.0, 3.0)])
    with pytest.raises(ValueError, match="1 of 2 requests did not complete"):
        interference([RequestRecord(0, "failed", failure="timeout")], [long_prompt(1.0, 3.0)])


REQUESTS = [Request(index=i, arrival_s=None, prompt=f"some words to begin with, number {i} " * 8) for i in range(4)]


@pytest.fixture(params=[True, False], ids=["chunked", "whole"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[bool, Endpoint]]:
    """A step takes 5 ms and a prompt token 0.2 ms; with chunks a step prefills at most 28 tokens beside 4 decoding sequences."""
    limits = Limits(max_batched_tokens=32 if request.param else 8192, chunked_prefill=request.param, prefix_caching=False)
    world = World("known", TargetCost(0.004, 0.001, 0, 2e-4), drafts={"ngram": Draft({"default": (0.5,)})}, limits=limits)
    (tmp_path / "world.json").write_text(dump_world(world))
    config = ServingConfig("simulated", str(tmp_path / "world.json"), chunked_prefill=request.param)
    port = free_port()
    launch = adapter.launch(config, port=port, command=adapter.DEFAULT_COMMAND, base_args=())
    server = Server.start(launch, port=port, folder=tmp_path, backend="simulated")
    yield request.param, server.endpoint
    server.stop()


def test_the_probe_tells_a_decode_first_from_a_prefill_first_scheduler(served: tuple[bool, Endpoint]) -> None:
    chunked, endpoint = served
    found = probe_interference(endpoint, REQUESTS)
    assert found.tpot_before_s == pytest.approx(0.005, rel=0.3)
    if chunked:  # a step of 28 prompt tokens takes 10.6 ms instead of 5: decoding goes on at nearly half its pace
        assert found.order in ("decode first", "shared")
        assert found.pace_during_share > 0.3
        assert found.largest_gap_during_s < 0.1
    else:  # 2,000 tokens at 0.2 ms: decoding stands for at least 0.4 s
        assert found.order == "prefill first"
        assert found.largest_gap_during_s > 0.3


def test_a_server_that_is_gone_is_an_error_in_one_line() -> None:
    with pytest.raises(BackendError):
        probe_interference(Endpoint("http://127.0.0.1:9", "m", "simulated"), REQUESTS)
