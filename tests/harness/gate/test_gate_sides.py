"""What `--baseline` and `--candidate` may be, and how a wrong one is refused."""

import pytest

from backends.types import ConfigError
from harness.gate.run import GateSettings
from harness.gate.sides import parse_side


def test_quoted_options_become_a_configuration() -> None:
    side = parse_side("--candidate", "--model /models/m --variant ngram --k 3 --max-num-seqs 8 --base-args '--dtype float32'")
    assert side.config is not None
    assert (side.config.variant, side.config.k, side.config.max_num_seqs) == ("ngram", 3, 8)
    assert side.base_args == ("--dtype", "float32")
    assert side.url is None


def test_a_url_is_a_server_that_already_runs() -> None:
    side = parse_side("--baseline", "http://127.0.0.1:8000/", endpoint_backend="sglang")
    assert (side.url, side.backend, side.config) == ("http://127.0.0.1:8000", "sglang", None)


def test_an_engine_is_given_with_or_without_its_name() -> None:
    named = parse_side("--candidate", "--backend vllm --model m --engine vllm=/opt/vllm/bin/python")
    bare = parse_side("--candidate", "--backend vllm --model m --engine /opt/vllm/bin/python")
    assert named.command == bare.command == ("/opt/vllm/bin/python",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--variant nonsense --model m", "--candidate: unknown variant 'nonsense'"),
        ("--variant off --k 3 --model m", "off has K = 0"),
        ("--speed 3", "No such option"),
        ("--k many", "not a valid integer"),
        ("--backend nosuch", "unknown backend 'nosuch'"),
        ("--backend vllm --revision main", "--revision is for the reference engine"),
        ("--help", "give options such as"),
    ],
)
def test_a_side_that_cannot_work_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_side("--candidate", text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"baseline": "x"}, "needs --baseline A and --candidate B"),
        ({"baseline": "x", "candidate": "y", "record": "f"}, "without --candidate"),
        ({"baseline": "x", "candidate": "y", "profile": "weekly"}, "unknown 'weekly'"),
        ({"baseline": "x", "candidate": "y", "band": 3.0}, "0.03 is 3 %"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GateSettings(**given)  # type: ignore[arg-type]  # wrong on purpose


def test_what_is_not_given_comes_from_the_profile() -> None:
    limits = GateSettings(baseline="x", candidate="y", budget_s=60.0).limits
    assert (limits.budget_s, limits.batch_sizes) == (60.0, (4,))
