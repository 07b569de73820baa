"""Servers that already run: from a URL to an `Endpoint`."""

from __future__ import annotations

from urllib.parse import urlsplit

from backends.http_client import Reply, call
from backends.types import BackendError, ConfigError, Endpoint

# First match wins: the prefix of the names on an engine's statistics page, and the dialect they belong to.
_DIALECTS = (
    ("vllm:", "vllm"),
    ("sglang:", "sglang"),
    ("spectune:", "reference"),
    ("trtllm_", "tensorrt_llm"),
)
_VERSION_PATHS = ("/version", "/get_server_info")


def parse_endpoint(text: str) -> tuple[str | None, str]:
    """``eagle3=http://host:8000`` -> (eagle3, URL); a bare URL has no setting. The URL comes without a trailing slash or /v1.

    Raises:
        ConfigError: no HTTP URL, or one that carries a password.
    """
    name, equals, url = text.partition("=")
    if not equals or "/" in name:  # the = of a query string
        name, url = "", text
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"endpoint '{text}': give a URL such as http://127.0.0.1:8000, or SETTING=URL")
    if parts.password or parts.username:
        raise ConfigError(
            f"endpoint '{parts.hostname}': no credentials in the URL; name an environment variable with --api-key-env"
        )
    return name or None, url.rstrip("/").removesuffix("/v1").rstrip("/")


def connect(url: str, *, api_key_env: str | None = None, model: str | None = None) -> Endpoint:
    """The server at `url` with its model's name, version, and the dialect of its statistics page (`unknown` without one).

    `model` chooses among several; a server with one needs none.

    Raises:
        BackendError: no answer, a refused key, or not an OpenAI-compatible server.
    """
    models = call(f"{url}/v1/models", api_key_env=api_key_env, timeout_s=15)
    if models is None:
        raise BackendError(f"no server answers at {url}: start it, or check host and port")
    if models.status in (401, 403):
        detail = f"the key in {api_key_env}" if api_key_env else "requests without a key: name its variable with --api-key-env"
        raise BackendError(f"{url} refuses {detail} (HTTP {models.status})")
    names = _model_names(models)
    if not names:
        raise BackendError(f"{url}/v1/models names no model (HTTP {models.status}): is it an OpenAI-compatible server?")
    if model is None and len(names) > 1:
        raise BackendError(f"{url} serves {len(names)} models ({', '.join(names[:5])}): choose one with --model")
    if model is not None and model not in names:
        raise BackendError(f"{url} does not serve '{model}', it has: {', '.join(names[:5])}")
    dialect = _dialect(call(f"{url}/metrics", api_key_env=api_key_env))
    warnings = (
        () if dialect != "unknown" else (f"{url}/metrics is no statistics page of a known engine: tau comes from the stream",)
    )
    return Endpoint(
        base_url=url,
        model=model or names[0],
        backend=dialect,
        version=_version(url, api_key_env),
        warnings=warnings,
        api_key_env=api_key_env,
    )


def _model_names(reply: Reply) -> list[str]:
    body = reply.json()
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        return []
    return [entry["id"] for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _dialect(page: Reply | None) -> str:
    if page is None or page.status != 200:
        return "unknown"
    lines = [line for line in page.body.split("\n") if line and not line.startswith("#")]
    for prefix, name in _DIALECTS:
        if any(line.startswith(prefix) for line in lines):
            return name
    return "unknown"


def _version(url: str, api_key_env: str | None) -> str | None:
    for path in _VERSION_PATHS:
        reply = call(f"{url}{path}", api_key_env=api_key_env)
        body = reply.json() if reply is not None and reply.status == 200 else None
        if isinstance(body, dict) and isinstance(body.get("version"), str):
            return str(body["version"])
    return None
