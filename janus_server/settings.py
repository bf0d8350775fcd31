"""Every setting as a user meets it: key, flags, help, and the reader that turns a raw value into the field's type.

`config` resolves them into one record and `cli` makes flags of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

import msgspec

from janus_server import units
from janus_server.readers import (
    auto,
    between,
    bytes_or_none,
    choice,
    collector,
    file,
    folder,
    host,
    names_of,
    never,
    node_name,
    page_bytes,
    positive_seconds,
    switch,
    truth,
)


class DTypeChoice(enum.Enum):
    """What weights are held and computed in; AUTO follows the checkpoint."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class KernelChoice(enum.Enum):
    """Which kernel table runs the model; AUTO takes the native one where it builds."""

    AUTO = "auto"
    CPU = "cpu"
    TORCH_REF = "torch_ref"


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.Enum):
    """How log lines look: a sentence each, or a JSON object each."""

    HUMAN = "human"
    JSON = "json"


class Setting(msgspec.Struct, frozen=True):
    """One knob as a user meets it: its key in janus.toml, the field it fills, its reader, its flags and its help."""

    key: str
    field: str
    read: Callable[[Any], Any]
    flags: tuple[str, ...]
    help: str
    metavar: str | None = None


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("host", "host", host, ("--host",), "address to listen on (default 127.0.0.1, this machine only)"),
    Setting("port", "port", between(0, 65535, "a port"), ("--port",), "port to listen on (default 8000; 0: any free)"),
    Setting(
        "memory",
        "memory_bytes",
        units.parse_bytes,
        ("--memory",),
        "budget for weights and KV cache, such as 8GiB (default: half of RAM, at most 8GiB)",
        "SIZE",
    ),
    Setting(
        "host_memory",
        "host_memory_bytes",
        units.parse_bytes,
        ("--host-memory",),
        "budget for copies of models that sleep, from which they wake in a moment (default: a quarter of RAM)",
        "SIZE",
    ),
    Setting(
        "copy_rate",
        "copy_bytes_per_s",
        never(units.parse_bytes),
        ("--copy-rate",),
        "bytes a second at which weights are moved while requests run, so that streams do not stutter; never for no "
        "limit (default 512MiB; at full speed while nothing runs)",
        "SIZE",
    ),
    Setting(
        "page_size",
        "page_bytes",
        page_bytes,
        ("--page-size",),
        "size of a physical page, a power of two (default 2MiB)",
        "SIZE",
    ),
    Setting(
        "max_model_len",
        "max_model_len",
        auto(between(1, 1 << 24, "a number of tokens")),
        ("--max-model-len",),
        "longest prompt plus answer in tokens (default: what the model allows)",
        "TOKENS",
    ),
    Setting(
        "idle_after",
        "idle_after_s",
        never(positive_seconds),
        ("--idle-after",),
        "a model without a request for so long leaves the device (default never: only when others need its room)",
        "DURATION",
    ),
    Setting(
        "preload",
        "preload",
        truth,
        ("--preload",),
        "load models at start, as many as fit (default on; else each on its first request)",
    ),
    Setting(
        "dtype",
        "dtype",
        choice(DTypeChoice),
        ("--dtype",),
        "auto, float32 or bfloat16 (default auto: as the checkpoint)",
    ),
    Setting(
        "kernels", "kernels", choice(KernelChoice), ("--kernels",), "auto, cpu (native) or torch_ref (default auto)"
    ),
    Setting(
        "threads",
        "threads",
        between(1, 1024, "a number of threads"),
        ("--threads",),
        "threads that compute (default: physical cores allowed to this process)",
        "N",
    ),
    Setting(
        "max_num_seqs",
        "max_num_seqs",
        between(1, 4096, "a number of sequences"),
        ("--max-num-seqs",),
        "most sequences in one step (default 128)",
        "N",
    ),
    Setting(
        "max_num_batched_tokens",
        "max_num_batched_tokens",
        between(1, 1 << 20, "a number of tokens"),
        ("--max-num-batched-tokens",),
        "most tokens in one step (default 512)",
        "N",
    ),
    Setting(
        "prefix_cache",
        "prefix_cache",
        truth,
        ("--enable-prefix-caching",),
        "reuse the KV cache of shared prompt beginnings (default on)",
    ),
    Setting(
        "share_prefixes",
        "share_prefixes",
        truth,
        ("--share-prefixes",),
        "let requests of different keys reuse each other's prompt beginnings, whose speed tells what others asked "
        "(default off)",
    ),
    Setting(
        "prefix_idle",
        "prefix_idle_s",
        never(positive_seconds),
        ("--prefix-idle",),
        "how long an unused prompt beginning stays cached before its pages are free for anything (default 5min; never: "
        "until they are needed)",
        "DURATION",
    ),
    Setting(
        "one_prompt_at_a_time",
        "one_prompt_at_a_time",
        truth,
        ("--one-prompt-at-a-time",),
        "finish one prompt before the next starts (default off: long prompts share a step)",
    ),
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
    Setting(
        "log_level", "log_level", choice(LogLevel), ("--log-level",), "debug, info, warning or error (default info)"
    ),
    Setting(
        "log_format",
        "log_format",
        choice(LogFormat),
        ("--log-format",),
        "human, or json for one object a line (default human)",
    ),
    Setting(
        "access_log",
        "access_log",
        switch,
        ("--access-log",),
        "on or off: a log line for each request (default on)",
        "on|off",
    ),
    Setting(
        "log_prompts",
        "log_prompts",
        truth,
        ("--log-prompts",),
        "write the text of every prompt to the log (default off)",
    ),
    Setting(
        "otlp_endpoint",
        "otlp_endpoint",
        collector,
        ("--otlp-endpoint",),
        "OpenTelemetry collector that traces go to, such as http://127.0.0.1:4318",
        "URL",
    ),
    Setting(
        "journal",
        "journal",
        file,
        ("--journal",),
        "file that the leader's decisions are written to, for janus replay (default: none)",
        "FILE",
    ),
    Setting(
        "prepare",
        "prepare_bytes",
        bytes_or_none,
        ("--prepare",),
        "budget for tokenizers, templates and layouts of models that are cold, so that their first request, or a copy "
        "from another node, need not wait for those (default 256MiB; 0: off)",
        "SIZE",
    ),
    Setting(
        "node",
        "node",
        node_name,
        ("--node",),
        "this server's name among your others on this machine: those that have one copy weights from each other's "
        "memory instead of reading checkpoints (default: no name, nothing is shared)",
        "NAME",
    ),
    Setting(
        "run_dir",
        "run_dir",
        folder,
        ("--run-dir",),
        "where servers with a --node name meet; yours alone (default $XDG_RUNTIME_DIR/janus or ~/.cache/janus/run)",
        "FOLDER",
    ),
    Setting(
        "cache_dir",
        "cache_dir",
        folder,
        ("--cache-dir",),
        "where compiled kernels are kept (default ~/.cache/janus/kernels)",
        "FOLDER",
    ),
)
