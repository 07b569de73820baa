"""Text that grows token by token equals the text decoded at once; stop strings never get out."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS, save_tokenizer
from transformers import AutoTokenizer

from backends.reference.tokenizer import TextStream, Tokenizer
from backends.serving import RequestError
from backends.types import ConfigError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte: every character beyond ASCII is split over tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    save_tokenizer(folder)
    return Tokenizer(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_streamed_text_is_the_whole_text_and_never_splits_a_character(text: str, cuts: list[int], tokenizer: Tokenizer) -> None:
    ids, stream, sent, at = tokenizer.encode(text), TextStream(tokenizer), [], 0
    for size in [*cuts, len(ids)]:
        sent.append(stream.push(ids[at : at + size])[0])
        at += size
    assert all("\ufffd" not in piece for piece in sent if "\ufffd" not in text)
    assert "".join(sent) + stream.finish() == text


@settings(max_examples=200, deadline=None)
@given(text=st.text("abé", max_size=30), stop=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str], tokenizer: Tokenizer) -> None:
    ids, stream = tokenizer.encode(text), TextStream(tokenizer, stop)
    sent, used = "", 0
    while used < len(ids) and not stream.stopped:
        more, n = stream.push(ids[used : used + 3])
        sent, used = sent + more, used + n
    sent += stream.finish()
    # the stop string that is complete first ends the text; of those that end there, the one that begins first
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert stream.stopped == bool(ends)
    if ends:
        first = min(end for end, _ in ends)
        assert tokenizer.decode(ids[:used]) == text[:first]
        assert sent == text[: min(start for end, start in ends if end == first)]
    else:
        assert sent == text


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(tokenizer.encode("aE")) == ("a", 2)
    assert stream.push(tokenizer.encode("Nb")) == ("ENb", 2)
    assert stream.push(tokenizer.encode("cENDx")) == ("c", 4)
    assert stream.stopped


def test_a_character_that_never_ends_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("é")[:1]) == ("", 1)
    assert stream.finish() == "\ufffd"


def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    assert TextStream(tokenizer).push([*tokenizer.encode("a"), EOS]) == ("a", 2)


def test_the_chat_template_gives_what_transformers_gives(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "<b>"}]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, add_generation_prompt=True)
    assert Tokenizer(tmp_path).encode_chat(messages) == list(expected["input_ids"])


def _with_template(folder: Path, template: str | None) -> Tokenizer:
    save_tokenizer(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return Tokenizer(folder)


def test_a_template_may_refuse_and_cannot_reach_python(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="roles must alternate"):
        _with_template(tmp_path, "{{ raise_exception('roles must alternate') }}").encode_chat(messages)
    with pytest.raises(RequestError, match="unsafe"):
        _with_template(tmp_path, "{{ messages.__class__.__base__ }}").encode_chat(messages)
    with pytest.raises(RequestError, match="no chat template"):
        _with_template(tmp_path, None).encode_chat(messages)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer(tmp_path)
