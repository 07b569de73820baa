"""From a URL that the user gives to an endpoint that can be measured."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from backends.endpoints import connect, parse_endpoint
from backends.types import BackendError, ConfigError

MODELS = json.dumps({"data": [{"id": "llama"}]})


@contextmanager
def serving(pages: Mapping[str, str], key: str | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
            status = 401 if not allowed else 200 if self.path in pages else 404
            data = pages.get(self.path, "").encode() if status == 200 else b"no"
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("eagle3=http://gpu:8000", ("eagle3", "http://gpu:8000")),
        ("http://gpu:8000/v1/", (None, "http://gpu:8000")),
        ("off=https://host/path?a=b", ("off", "https://host/path?a=b")),
        ("https://host/path?a=b", (None, "https://host/path?a=b")),
    ],
)
def test_an_endpoint_is_a_setting_and_a_url(text: str, parsed: tuple[str | None, str]) -> None:
    assert parse_endpoint(text) == parsed


@pytest.mark.parametrize("text", ["off=gpu:8000", "ftp://gpu", "off=", "nothing"])
def test_what_is_no_url_is_one_clear_line(text: str) -> None:
    with pytest.raises(ConfigError, match="give a URL such as"):
        parse_endpoint(text)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="--api-key-env") as error:
        parse_endpoint("off=http://user:hunter2@gpu:8000")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("metrics", "backend"),
    [
        ('# HELP vllm:x\nvllm:num_requests_running{engine="0"} 0\n', "vllm"),
        ("sglang:num_running_reqs 0\n", "sglang"),
        ("python_gc 1\nspectune:requests_running 0\n", "reference"),
    ],
)
def test_the_dialect_is_told_from_the_statistics_page(metrics: str, backend: str) -> None:
    with serving({"/v1/models": MODELS, "/metrics": metrics, "/version": '{"version": "0.32.0"}'}) as url:
        endpoint = connect(url)
    assert (endpoint.backend, endpoint.model, endpoint.version, endpoint.warnings) == (backend, "llama", "0.32.0", ())


def test_a_server_without_statistics_is_named_in_a_warning() -> None:
    with serving({"/v1/models": MODELS}) as url:
        endpoint = connect(url)
    assert endpoint.backend == "unknown"
    assert "no statistics page" in endpoint.warnings[0]


def test_the_key_travels_from_its_variable_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "hunter2")
    with serving({"/v1/models": MODELS, "/metrics": "vllm:x 0\n"}, key="hunter2") as url:
        endpoint = connect(url, api_key_env="TEST_KEY")
        assert endpoint.api_key_env == "TEST_KEY"
        assert "hunter2" not in repr(endpoint)
        with pytest.raises(BackendError, match="refuses requests without a key"):
            connect(url)
        monkeypatch.setenv("TEST_KEY", "wrong")
        with pytest.raises(BackendError, match="refuses the key in TEST_KEY"):
            connect(url, api_key_env="TEST_KEY")


def test_a_model_must_be_chosen_among_several() -> None:
    two = json.dumps({"data": [{"id": "a"}, {"id": "b"}]})
    with serving({"/v1/models": two, "/metrics": "vllm:x 0\n"}) as url:
        with pytest.raises(BackendError, match=r"serves 2 models \(a, b\)"):
            connect(url)
        assert connect(url, model="b").model == "b"
        with pytest.raises(BackendError, match="does not serve 'c'"):
            connect(url, model="c")


def test_no_server_and_no_openai_server_are_one_clear_line() -> None:
    with pytest.raises(BackendError, match="no server answers at"):
        connect("http://127.0.0.1:1")
    with serving({"/v1/models": "<html>"}) as url, pytest.raises(BackendError, match="names no model"):
        connect(url)
