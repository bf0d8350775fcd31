"""Every setting of the server, resolved once: defaults, then janus.toml, then --set, then flags; frozen afterwards.

Called by `cli`. `ServeConfig` is what the rest of the process sees: numbers in base units, paths that exist. Unknown
keys are refused with the nearest known name. This is the only module that reads environment variables.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from janus_server import machine, modelref, units
from janus_server.errors import BadConfig
from janus_server.modelref import ModelEntry
from janus_server.packaged import DEFAULT_ALIAS
from janus_server.suggest import nearest


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


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `janus serve` runs with.

    memory_bytes is the whole budget of physical pages (weights, KV cache, scratch), a multiple of page_bytes. port 0
    means any free port. max_model_len None follows the checkpoint.
    """

    models: tuple[ModelEntry, ...]
    memory_bytes: int
    threads: int
    cache_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    page_bytes: int = 2 << 20
    host_memory_bytes: int = 1 << 30
    max_model_len: int | None = None
    dtype: DTypeChoice = DTypeChoice.AUTO
    kernels: KernelChoice = KernelChoice.AUTO
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    prefix_cache: bool = True
    one_prompt_at_a_time: bool = False
    shutdown_timeout_s: float = 30.0
    log_level: LogLevel = LogLevel.INFO


class Setting(msgspec.Struct, frozen=True):
    """One knob as a user meets it: its key in janus.toml, the field it fills, its reader, its flags and its help."""

    key: str
    field: str
    read: Callable[[Any], Any]
    flags: tuple[str, ...]
    help: str
    metavar: str | None = None


PAGE_BYTES_MIN: Final = 4096
MEMORY_CAP_BYTES: Final = 8 << 30


def serve_config(
    models: Sequence[str] = (),
    *,
    file: Path | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, Any] = MappingProxyType({}),
    served_model_name: str | None = None,
) -> ServeConfig:
    """Resolve everything a user said into one record, or raise BadConfig naming what is wrong and what would be right.

    models are command-line arguments; sets are "key=value" texts; flags are values by key, only those that were given.
    """
    table = _read_file(file) if file is not None else {}
    listed = table.pop("models", {})
    given = [(key, raw, f"{key} in {file}") for key, raw in table.items()]
    given += [(key, raw, f"--set {key}") for key, raw in map(_parse_set, sets)]
    given += [(key, raw, _setting(key, key).flags[0]) for key, raw in flags.items()]
    fields: dict[str, Any] = {}
    for key, raw, source in given:  # later ones win
        setting = _setting(key, source)
        fields[setting.field] = _read(setting, raw, source)
    entries = _entries(models, listed, served_model_name)
    fields.setdefault("memory_bytes", default_memory_bytes())
    fields.setdefault("threads", machine.cores())
    fields.setdefault("cache_dir", default_cache_dir())
    return _checked(ServeConfig(models=entries, **fields))


def default_memory_bytes() -> int:
    """The page budget when none was asked for: half of the memory this process may use, at most 8 GiB."""
    return min(machine.memory_bytes() // 2, MEMORY_CAP_BYTES)


def default_cache_dir() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/janus/kernels, else ~/.cache/janus/kernels."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule: a relative path is invalid and must be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "janus" / "kernels"


def _checked(config: ServeConfig) -> ServeConfig:
    """What no single setting can judge: the budget in whole pages, and room for at least a few of them."""
    pages = config.memory_bytes // config.page_bytes
    if pages < 8:
        raise BadConfig(
            f"--memory {units.format_bytes(config.memory_bytes)} holds {pages} pages of "
            f"{units.format_bytes(config.page_bytes)}; give at least 8 pages, or a smaller --page-size"
        )
    if config.memory_bytes > machine.memory_bytes():
        raise BadConfig(
            f"--memory {units.format_bytes(config.memory_bytes)} is more than this machine lets the process use "
            f"({units.format_bytes(machine.memory_bytes())})"
        )
    return msgspec.structs.replace(config, memory_bytes=pages * config.page_bytes)


def _entries(models: Sequence[str], listed: Any, served_model_name: str | None) -> tuple[ModelEntry, ...]:
    """Models of the command line, else those of the file, else the default model."""
    if models:
        entries = tuple(modelref.resolve(text) for text in models)
    elif not isinstance(listed, dict) or not all(isinstance(path, str) for path in listed.values()):
        raise BadConfig('[models] in the config file takes lines NAME = "path, alias or hub id"')
    elif listed:
        entries = tuple(modelref.named(name, path) for name, path in listed.items())
    else:
        entries = (modelref.resolve(DEFAULT_ALIAS),)
    if served_model_name is not None:
        if len(entries) != 1:
            raise BadConfig("--served-model-name names a single model; with several, write NAME=PATH for each")
        entries = (modelref.rename(entries[0], served_model_name),)
    return modelref.unique(entries)


def _read_file(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        table = tomllib.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise BadConfig(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{file} is not TOML: {error}") from None
    except RecursionError:
        raise BadConfig(f"{file} is nested too deeply") from None
    return table


def _parse_set(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise BadConfig(f"--set {text}: write --set KEY=VALUE")
    return key.strip(), value.strip()


def _setting(key: str, source: str) -> Setting:
    """The knob of that key, with - or _ between words."""
    wanted = key.replace("-", "_")
    found = next((setting for setting in SETTINGS if setting.key == wanted), None)
    if wanted == "models":
        raise BadConfig(f"{source}: models are given as arguments, or in the [models] table of a config file")
    if found is None:
        hint = nearest(wanted, [setting.key for setting in SETTINGS] + ["models"])
        raise BadConfig(f"{source}: there is no such setting{hint}")
    return found


def _read(setting: Setting, raw: Any, source: str) -> Any:
    try:
        return setting.read(raw)
    except ValueError as error:
        raise BadConfig(f"{source}: {error}") from None


# Readers: a raw value (TOML, --set text or flag text) to the field's type, or ValueError with what is allowed.

E = TypeVar("E", bound=enum.Enum)


def _choice(kind: type[E]) -> Callable[[Any], E]:
    names = [member.value for member in kind]

    def read(raw: Any) -> E:
        if raw not in names:
            raise ValueError(f"{raw!r} is not one of {', '.join(names)}{nearest(str(raw), names)}")
        return kind(raw)

    return read


def _between(low: int, high: int, what: str) -> Callable[[Any], int]:
    def read(raw: Any) -> int:
        count = units.parse_count(raw)
        if not low <= count <= high:
            raise ValueError(f"{raw!r} is not {what} between {low} and {high}")
        return count

    return read


def _truth(raw: Any) -> bool:
    words = {True: True, False: False, "true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    if not isinstance(raw, bool | str) or raw not in words:
        raise ValueError(f"{raw!r} is not true or false")
    return words[raw]


def _page_bytes(raw: Any) -> int:
    size_bytes = units.parse_bytes(raw)
    if size_bytes < PAGE_BYTES_MIN or size_bytes & (size_bytes - 1) or size_bytes > 1 << 30:
        raise ValueError(f"{raw!r} is not a page size; a power of two from 4KiB to 1GiB, such as 2MiB")
    return size_bytes


def _model_len(raw: Any) -> int | None:
    return None if raw == "auto" else _between(1, 1 << 24, "a number of tokens")(raw)


def _host(raw: Any) -> str:
    if not isinstance(raw, str) or not re.fullmatch(r"[A-Za-z0-9.:_%-]{1,253}", raw):
        raise ValueError(f"{raw!r} is not a host name or address, such as 127.0.0.1 or 0.0.0.0")
    return raw


def _folder(raw: Any) -> Path:
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"{raw!r} is not a folder")
    return Path(raw).expanduser().absolute()


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("host", "host", _host, ("--host",), "address to listen on (default 127.0.0.1, this machine only)"),
    Setting("port", "port", _between(0, 65535, "a port"), ("--port",), "port to listen on (default 8000; 0: any free)"),
    Setting(
        "memory",
        "memory_bytes",
        units.parse_bytes,
        ("--memory",),
        "budget for weights and KV cache, such as 8GiB (default: half of RAM, at most 8GiB)",
        "SIZE",
    ),
    Setting(
        "page_size",
        "page_bytes",
        _page_bytes,
        ("--page-size",),
        "size of a physical page, a power of two (default 2MiB)",
        "SIZE",
    ),
    Setting(
        "max_model_len",
        "max_model_len",
        _model_len,
        ("--max-model-len",),
        "longest prompt plus answer in tokens (default: what the model allows)",
        "TOKENS",
    ),
    Setting(
        "dtype",
        "dtype",
        _choice(DTypeChoice),
        ("--dtype",),
        "auto, float32 or bfloat16 (default auto: as the checkpoint)",
    ),
    Setting(
        "kernels", "kernels", _choice(KernelChoice), ("--kernels",), "auto, cpu (native) or torch_ref (default auto)"
    ),
    Setting(
        "threads",
        "threads",
        _between(1, 1024, "a number of threads"),
        ("--threads",),
        "threads that compute (default: physical cores allowed to this process)",
        "N",
    ),
    Setting(
        "max_num_seqs",
        "max_num_seqs",
        _between(1, 4096, "a number of sequences"),
        ("--max-num-seqs",),
        "most sequences in one step (default 128)",
        "N",
    ),
    Setting(
        "max_num_batched_tokens",
        "max_num_batched_tokens",
        _between(1, 1 << 20, "a number of tokens"),
        ("--max-num-batched-tokens",),
        "most tokens in one step (default 512)",
        "N",
    ),
    Setting(
        "prefix_cache",
        "prefix_cache",
        _truth,
        ("--enable-prefix-caching",),
        "reuse the KV cache of shared prompt beginnings (default on)",
    ),
    Setting(
        "one_prompt_at_a_time",
        "one_prompt_at_a_time",
        _truth,
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
        "log_level", "log_level", _choice(LogLevel), ("--log-level",), "debug, info, warning or error (default info)"
    ),
    Setting(
        "cache_dir",
        "cache_dir",
        _folder,
        ("--cache-dir",),
        "where compiled kernels are kept (default ~/.cache/janus/kernels)",
        "FOLDER",
    ),
)
