"""Every setting of the server, resolved once: defaults, then janus.toml, then --set, then flags; frozen afterwards.

Called by `cli`. `ServeConfig` is what the rest of the process sees: numbers in base units, paths that exist. Unknown
keys are refused with the nearest known name. This is the only module that reads environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from janus_server import applications, keys, machine, modelref, tables, units
from janus_server.applications import Application
from janus_server.errors import BadConfig
from janus_server.keys import Key
from janus_server.modelref import ModelEntry, ModelOptions
from janus_server.packaged import DEFAULT_ALIAS
from janus_server.settings import SETTINGS as SETTINGS
from janus_server.settings import DTypeChoice as DTypeChoice
from janus_server.settings import KernelChoice as KernelChoice
from janus_server.settings import LogFormat as LogFormat
from janus_server.settings import LogLevel as LogLevel
from janus_server.settings import OracleChoice as OracleChoice
from janus_server.settings import Setting
from janus_server.suggest import nearest
from janus_server.types import Split

# Where peers reach a node whose cluster is one host.
_OWN_HOST: Final = "127.0.0.1"


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `janus serve` runs with.

    memory_bytes is the whole budget of physical pages (weights, KV cache, scratch), a multiple of page_bytes;
    host_memory_bytes that of host copies of models that sleep. port 0 means any free port. max_model_len None follows
    the checkpoint. keys are those of the environment; those of api_key_file are read when the server starts, and
    again on SIGHUP. max_queued_* None are derived by `admission`. copy_bytes_per_s bounds moves of weights while
    requests run. idle_after_s and preload are for models whose own options say nothing, and stand in those options.
    With a node's name, others of this user's that have one copy weights from its memory and it from theirs; they meet
    in run_dir. Several nodes of this host are one server, and so are all that join the same; peer_* is how they reach
    each other. prepare_bytes is what tokenizers and the like of
    models that are Cold may take.
    """

    models: tuple[ModelEntry, ...]
    applications: tuple[Application, ...] = ()
    memory_bytes: int
    host_memory_bytes: int
    threads: int
    cache_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    page_bytes: int = 2 << 20
    copy_bytes_per_s: int | None = 256 << 20
    max_model_len: int | None = None
    idle_after_s: float | None = None
    preload: bool = True
    dtype: DTypeChoice = DTypeChoice.AUTO
    kernels: KernelChoice = KernelChoice.AUTO
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    prefix_cache: bool = True
    share_prefixes: bool = False
    prefix_idle_s: float | None = 300.0
    one_prompt_at_a_time: bool = False
    shutdown_timeout_s: float = 30.0
    keys: tuple[Key, ...] = ()
    api_key_file: Path | None = None
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_connections: int = 4096
    header_timeout_s: float = 20.0
    idle_timeout_s: float = 75.0
    request_timeout_s: float | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    frozen_after_s: float = 60.0
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.HUMAN
    access_log: bool = True
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    oracle: OracleChoice = OracleChoice.AUTO
    journal: Path | None = None
    paced: Path | None = None
    node: str | None = None
    run_dir: Path | None = None
    nodes: int = 1
    join: str | None = None
    cluster_secret: Path | None = None
    etcd_login: Path | None = None
    pd_split: Split = Split.OFF
    domain: str | None = None
    peer_host: str = _OWN_HOST
    peer_certfile: Path | None = None
    peer_keyfile: Path | None = None
    peer_cafile: Path | None = None
    prepare_bytes: int = 256 << 20


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
    listed, on_models = table.pop("models", {}), table.pop("applications", {})
    given = [(key, raw, f"{key} in {file}") for key, raw in table.items()]
    given += [(key, raw, f"--set {key}") for key, raw in map(_parse_set, sets)]
    given += [(key, raw, _setting(key, key).flags[0]) for key, raw in flags.items()]
    fields: dict[str, Any] = {}
    for key, raw, source in given:  # later ones win
        setting = _setting(key, source)
        fields[setting.field] = _read(setting, raw, source)
    defaults = ModelOptions(idle_s=fields.get("idle_after_s"), preload=fields.get("preload", True))
    of_file = () if models else tables.models(listed, str(file), defaults)
    entries = _entries(models, of_file, served_model_name, defaults)
    served = applications.check(tables.applications(on_models, str(file)), [entry.name for entry in entries])
    shares = fields.get("nodes", 1)
    fields.setdefault("memory_bytes", default_memory_bytes() // shares)
    fields.setdefault("host_memory_bytes", machine.memory_bytes() // 4 // shares)
    fields.setdefault("threads", max(1, machine.cores() // shares))
    fields.setdefault("cache_dir", default_cache_dir())
    return _checked(ServeConfig(models=entries, applications=served, keys=environment_keys(), **fields))


def environment_keys() -> tuple[Key, ...]:
    """The user key of JANUS_API_KEY and the admin key of JANUS_ADMIN_KEY, where they are set."""
    found = ((name, os.environ.get(name, "")) for name in (keys.USER_VARIABLE, keys.ADMIN_VARIABLE))
    return tuple(keys.from_environment(name, text) for name, text in found if text)


def default_memory_bytes() -> int:
    """The page budget when none was asked for: half of the memory this process may use, at most 8 GiB."""
    return min(machine.memory_bytes() // 2, MEMORY_CAP_BYTES)


def default_cache_dir() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/janus/kernels, else ~/.cache/janus/kernels."""
    from janus_server.kernels.build import cache_dir

    return cache_dir(os.environ)


def run_folders() -> tuple[Path, ...]:
    """Where a server leaves what only its user may read: $XDG_RUNTIME_DIR/janus, or else ~/.cache/janus/run."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    first = (Path(base) / "janus",) if base.startswith("/") else ()
    return (*first, default_cache_dir().with_name("run"))


def admin_key() -> str | None:
    """The admin key that commands send to a server, from JANUS_ADMIN_KEY."""
    return os.environ.get(keys.ADMIN_VARIABLE) or None


def _check_alone(config: ServeConfig) -> None:
    """What only nodes of a cluster have a use for must not be taken without a word by one that is alone."""
    if config.join is not None or config.nodes > 1:
        return
    given = {
        "--cluster-secret": config.cluster_secret is not None, "--domain": config.domain is not None,
        "--peer-host": config.peer_host != _OWN_HOST, "--peer-certfile": config.peer_certfile is not None,
        "--peer-keyfile": config.peer_keyfile is not None, "--peer-cafile": config.peer_cafile is not None,
        "--etcd-login": config.etcd_login is not None, "--pd-split": config.pd_split is not Split.OFF,
    }  # fmt: skip
    for flag, is_given in given.items():
        if is_given:
            raise BadConfig(f"{flag} is for a server that is part of a cluster: give --nodes N or --join WHERE")


def _checked(config: ServeConfig) -> ServeConfig:
    """What no single setting can judge: the budget in whole pages, and room for at least a few of them."""
    pages = config.memory_bytes // config.page_bytes
    if pages < 8:
        raise BadConfig(
            f"--memory {units.format_bytes(config.memory_bytes)} holds {pages} pages of "
            f"{units.format_bytes(config.page_bytes)}; give at least 8 pages, or a smaller --page-size"
        )
    times = f" for each of {config.nodes} nodes" if config.nodes > 1 else ""
    if config.memory_bytes * config.nodes > machine.memory_bytes():
        raise BadConfig(
            f"--memory {units.format_bytes(config.memory_bytes)}{times} is more than this machine lets the process use "
            f"({units.format_bytes(machine.memory_bytes())})"
        )
    if config.run_dir is not None and config.node is None:
        raise BadConfig("--run-dir says where nodes of this machine meet: give this one a name with --node NAME")
    if config.nodes > 1 and config.node is not None:
        raise BadConfig("--nodes names its nodes itself: leave --node out")
    _check_alone(config)
    if config.etcd_login is not None and "://" not in (config.join or ""):
        raise BadConfig("--etcd-login is for nodes that meet in etcd: give --join etcd://HOST:2379/NAME")
    peer_files = (config.peer_certfile, config.peer_keyfile, config.peer_cafile)
    if any(peer_files) and not all(peer_files):
        raise BadConfig("--peer-certfile, --peer-keyfile and --peer-cafile go together: give all three, or none")
    if (config.ssl_certfile is None) is not (config.ssl_keyfile is None):
        raise BadConfig("--ssl-certfile and --ssl-keyfile go together: give both, or neither")
    return msgspec.structs.replace(config, memory_bytes=pages * config.page_bytes)


def _entries(
    models: Sequence[str], listed: Sequence[ModelEntry], served_model_name: str | None, defaults: ModelOptions
) -> tuple[ModelEntry, ...]:
    """Models of the command line, else those of the file, else the default model."""
    entries = tuple(listed)
    if models or not listed:
        found = [modelref.resolve(text) for text in models or (DEFAULT_ALIAS,)]
        entries = tuple(msgspec.structs.replace(entry, options=defaults) for entry in found)
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
    if wanted == "applications":
        raise BadConfig(f"{source}: applications are given as tables [applications.NAME] of a config file")
    if found is None:
        hint = nearest(wanted, [setting.key for setting in SETTINGS] + ["models", "applications"])
        raise BadConfig(f"{source}: there is no such setting{hint}")
    return found


def _read(setting: Setting, raw: Any, source: str) -> Any:
    try:
        return setting.read(raw)
    except ValueError as error:
        raise BadConfig(f"{source}: {error}") from None
