"""Every setting as a user meets it: key, flags, help, and the reader that turns a raw value into the field's type.

`config` resolves them into one record and `cli` makes flags of them. Those of the HTTP side are in `settings_http`.
"""

from __future__ import annotations

import enum
from typing import Final

from janus_server import units
from janus_server.knob import Setting as Setting
from janus_server.readers import (
    auto,
    between,
    bytes_or_none,
    choice,
    collector,
    file,
    folder,
    host,
    never,
    node_name,
    page_bytes,
    positive_seconds,
    switch,
    truth,
)
from janus_server.settings_cluster import CLUSTER
from janus_server.settings_http import HTTP


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


class OracleChoice(enum.Enum):
    """Whether what models with a promise will need and attain is predicted; AUTO where there is one."""

    AUTO = "auto"
    OFF = "off"


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.Enum):
    """How log lines look: a sentence each, or a JSON object each."""

    HUMAN = "human"
    JSON = "json"


# For experiments: no help lists it.
HIDDEN: Final = "==SUPPRESS=="

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
        "limit (default 256MiB; at full speed while nothing runs)",
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
    *HTTP,
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
        "oracle",
        "oracle",
        choice(OracleChoice),
        ("--oracle",),
        "auto or off: predict from what is measured how many requests will be on time and what that takes; for models "
        "with a promise only, where a process of some 400 MB learns beside the server (default auto)",
    ),
    Setting("paced", "paced", file, ("--paced",), HIDDEN),
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
    *CLUSTER,
    Setting(
        "cache_dir",
        "cache_dir",
        folder,
        ("--cache-dir",),
        "where compiled kernels are kept (default ~/.cache/janus/kernels)",
        "FOLDER",
    ),
)
