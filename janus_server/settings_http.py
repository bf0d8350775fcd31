"""The settings of the HTTP side: keys, addresses, limits and times of requests. A part of `settings.SETTINGS`.

In the order in which --help shows them. `config` resolves them like all others.
"""

from __future__ import annotations

from typing import Final

from janus_server import units
from janus_server.knob import Setting
from janus_server.readers import (
    auto,
    between,
    file,
    names_of,
    positive_seconds,
    truth,
)

HTTP: Final[tuple[Setting, ...]] = (
    Setting(
        "shutdown_timeout",
        "shutdown_timeout_s",
        units.parse_seconds,
        ("--shutdown-timeout",),
        "how long running answers may take to finish after Ctrl-C (default 30s)",
        "DURATION",
    ),
    Setting(
        "api_key_file",
        "api_key_file",
        file,
        ("--api-key-file",),
        "keys that clients must send, one a line or in TOML with names and limits; read again on SIGHUP. A single key "
        "can come in JANUS_API_KEY instead, the admin key in JANUS_ADMIN_KEY",
        "FILE",
    ),
    Setting(
        "insecure",
        "insecure",
        truth,
        ("--insecure",),
        "serve on an address that other machines reach without any key (default: refuse to start)",
    ),
    Setting(
        "allowed_hosts",
        "allowed_hosts",
        names_of("host names such as api.example.org", r"[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\]"),
        ("--allowed-hosts",),
        "more host names that requests may be addressed to; on this machine alone, localhost and its addresses always "
        "may. On other addresses any name may unless some are listed",
        "HOST,…",
    ),
    Setting(
        "allowed_origins",
        "allowed_origins",
        names_of(
            "origins such as https://chat.example.org",
            r"[a-z][a-z0-9+.-]{0,31}://([a-z0-9.-]{1,253}|\[[0-9a-f:.]+\])(:\d+)?",
        ),
        ("--allowed-origins",),
        "web pages of other origins that may call the API from a browser, which turns CORS on for exactly those "
        "(default none)",
        "ORIGIN,…",
    ),
    Setting(
        "ssl_certfile",
        "ssl_certfile",
        file,
        ("--ssl-certfile",),
        "certificate chain in PEM form: serve HTTPS (TLS 1.2 or later)",
        "FILE",
    ),
    Setting("ssl_keyfile", "ssl_keyfile", file, ("--ssl-keyfile",), "the certificate's private key", "FILE"),
    Setting(
        "max_connections",
        "max_connections",
        between(1, 1 << 20, "a number of connections"),
        ("--max-connections",),
        "open connections beyond which new ones are refused (default 4096)",
        "N",
    ),
    Setting(
        "header_timeout",
        "header_timeout_s",
        positive_seconds,
        ("--header-timeout",),
        "how long a request's headers may take to arrive (default 20s)",
        "DURATION",
    ),
    Setting(
        "idle_timeout",
        "idle_timeout_s",
        positive_seconds,
        ("--idle-timeout",),
        "how long a connection may stay open without a request (default 75s)",
        "DURATION",
    ),
    Setting(
        "request_timeout",
        "request_timeout_s",
        auto(positive_seconds),
        ("--request-timeout",),
        "how long an answer may take in all before it ends with an error (default auto: as long as it needs)",
        "DURATION",
    ),
    Setting(
        "max_queued_requests",
        "max_queued_requests",
        auto(between(1, 1 << 24, "a number of requests")),
        ("--max-queued-requests",),
        "choices that may wait for their first token before calls are refused; half of it for one of several models "
        "(default auto: 32 for each of --max-num-seqs, at least 4096)",
        "N",
    ),
    Setting(
        "max_queued_tokens",
        "max_queued_tokens",
        auto(between(1, 1 << 32, "a number of tokens")),
        ("--max-queued-tokens",),
        "prompt tokens that may wait likewise (default auto: --max-num-batched-tokens for each queued request)",
        "N",
    ),
    Setting(
        "frozen_after",
        "frozen_after_s",
        positive_seconds,
        ("--frozen-after",),
        "not ready once work waits and no step has ended for so long; more than the longest step (default 60s)",
        "DURATION",
    ),
)
