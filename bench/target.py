"""Where requests go and what their bytes are: the address, the head and the JSON body of each request.

`serve` makes a Target from the flags and a Caller from it; `load` asks the Caller for the bytes of one plan at a time.
The few blocking look-ups before a run (name resolution, /v1/models) live here too.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from janus_server.errors import BadConfig

from .records import Drawn, Endpoint, Plan, Written
from .wording import Wording

_PATHS: Final = {Endpoint.COMPLETIONS: "/v1/completions", Endpoint.CHAT: "/v1/chat/completions"}
_HEADER: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)[=:]\s*([^\r\n\0]*)")
# What the body consists of; an --extra-body may replace a value but not these.
_FIXED: Final = frozenset({"model", "prompt", "messages", "stream"})
_ASK_S: Final = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A server: its resolved address, the path that is called, and the TLS context for https."""

    url: str
    host: str
    port: int
    address: str
    path: str
    endpoint: Endpoint
    tls: ssl.SSLContext | None
    headers: tuple[tuple[str, str], ...]


def make_target(base_url: str, endpoint: str, headers: Sequence[str], api_key: str | None, *, insecure: bool) -> Target:
    """From the flags. The name is resolved once: a look-up per connection would be measured as the server's time."""
    if "://" not in base_url:
        base_url = f"http://{base_url}"
    url = urllib.parse.urlsplit(base_url)
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:
        port = 0
    if url.scheme not in ("http", "https") or not url.hostname or not port or url.query or url.fragment:
        raise BadConfig(f"--base-url: {base_url!r}; write http://HOST:PORT or https://HOST[:PORT]")
    kind, path = _endpoint(endpoint)
    prefix = url.path.rstrip("/").removesuffix("/v1")
    pairs = [_header(word) for word in headers]
    if api_key and not any(name.lower() == "authorization" for name, _ in pairs):
        pairs.append(_header(f"Authorization=Bearer {api_key}"))
    tls = None
    if url.scheme == "https":
        tls = ssl.create_default_context()
        if insecure:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    shown = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{prefix}"
    return Target(shown, url.hostname, port, _resolve(url.hostname, port), prefix + path, kind, tls, tuple(pairs))


def served_models(target: Target, wait_s: float) -> list[str]:
    """The ids of /v1/models, asked for again for wait_s seconds while the server does not answer; [] if it has none."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            return _ask_models(target)
        except (OSError, urllib.error.HTTPError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404, 405):
                if error.code in (401, 403):
                    raise BadConfig(f"{target.url}: {error.code}; set OPENAI_API_KEY or --header") from None
                return []
            if time.monotonic() >= end_s:
                reason = getattr(error, "reason", None) or error
                raise BadConfig(f"{target.url} does not answer ({reason}); is the server running?") from None
        time.sleep(0.25)


class Caller:
    """Makes the bytes of requests. Everything that is the same for all of them is made once."""

    def __init__(
        self,
        target: Target,
        wording: Wording,
        *,
        sampling: Mapping[str, Any],
        ignore_eos: bool,
        running_usage: bool,
        extra_body: Mapping[str, Any],
        id_prefix: str,
    ) -> None:
        check_extra(extra_body, "--extra-body")
        self._target = target
        self._wording = wording
        self._id_prefix = id_prefix
        self._extra = extra_body
        options: dict[str, Any] = {"include_usage": True}
        if running_usage:
            options["continuous_usage_stats"] = True
        self._common = {"stream": True, "stream_options": options, **sampling}
        if ignore_eos:
            self._common["ignore_eos"] = True
        host = f"[{target.host}]" if ":" in target.host else target.host
        lines = [
            f"POST {target.path} HTTP/1.1",
            f"Host: {host}:{target.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Accept-Encoding: identity",
            "User-Agent: janus-bench",
            *(f"{name}: {value}" for name, value in target.headers),
        ]
        self._head = "\r\n".join(lines).encode()

    def encode(self, plan: Plan, number: int) -> bytes:
        """Head and body of one request; `number` becomes its x-request-id."""
        body = msgspec.json.encode(self.body(plan))
        return b"%b\r\nx-request-id: %b%d\r\nContent-Length: %d\r\n\r\n%b" % (
            self._head, self._id_prefix.encode(), number, len(body), body,
        )  # fmt: skip

    def body(self, plan: Plan) -> dict[str, Any]:
        chat = self._target.endpoint is Endpoint.CHAT
        prompt = self._content(plan.prompt)
        content: object = prompt
        if chat and isinstance(prompt, str):
            content = ({"role": "user", "content": prompt},)
        return {
            "model": plan.app.model,
            "messages" if chat else "prompt": content,
            "max_completion_tokens" if chat else "max_tokens": plan.output_tokens,
            **self._common,
            **self._extra,
            **plan.app.extra_body,
        }

    def _content(self, prompt: Drawn | Written) -> object:
        return prompt.content if isinstance(prompt, Written) else self._wording.render(prompt)


def check_extra(extra: Mapping[str, Any], where: str) -> None:
    """Refuse what would make the figures mean something else."""
    for key in extra:
        if key in _FIXED:
            raise BadConfig(f"{where}: {key!r} is set by the benchmark")
    if extra.get("n", 1) != 1 or extra.get("best_of", 1) not in (None, 1):
        raise BadConfig(f"{where}: n and best_of must be 1: times are measured per stream")


def parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadConfig(f"{where}: it is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise BadConfig(f"{where}: {text[:60]!r} is not a JSON object")
    return found


def _endpoint(text: str) -> tuple[Endpoint, str]:
    """ "completions", "chat", or a path that ends like one of theirs."""
    for kind, path in _PATHS.items():
        if text == kind.value:
            return kind, path
    if text.startswith("/") and re.fullmatch(r"[!-~]+", text):
        return (Endpoint.CHAT if text.rstrip("/").endswith("/chat/completions") else Endpoint.COMPLETIONS), text
    raise BadConfig(f"--endpoint: {text!r}; write completions, chat, or a path such as /v1/completions")


def _header(word: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(word)
    if found is None or not word.isascii():
        raise BadConfig(f"--header: {word.partition('=')[0]!r} …; write NAME=VALUE in ASCII")
    return found[1], found[2]


def _resolve(host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadConfig(f"--base-url: {host}: {error.strerror or error}") from None
    # A server on localhost listens more often on IPv4 than on IPv6.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def _ask_models(target: Target) -> list[str]:
    request = urllib.request.Request(f"{target.url}/v1/models", headers=dict(target.headers))
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if target.tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=target.tls))
    with urllib.request.build_opener(*handlers).open(request, timeout=_ASK_S) as reply:
        try:
            listed = json.loads(reply.read())["data"]
            return [str(entry["id"]) for entry in listed]
        except (ValueError, TypeError, KeyError):
            raise BadConfig(f"{target.url}/v1/models does not answer as an OpenAI-compatible server does") from None
