"""The commands of who runs a server: models, memory, status, dashboard, drain. What they take, how they are begun.

`cli` adds them to its own. They call a running server's admin routes, as `terminal` does it.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from janus_server.errors import BadConfig

_MODELS_EXAMPLES: Final = """\
list (the default) shows every model: active (on the device), warm (a copy in host memory) or cold (its files only).
load and wake bring one onto the device, sleep leaves a copy in host memory, evict leaves nothing. A pinned model stays.
fork copies one from the memory of another server of yours on this machine; both are to be started with --node NAME.

examples:
  janus models
  janus models load qwen --wait                 with a bar; exit code 1 when it cannot be loaded
  janus models sleep qwen
  janus models fork qwen --from n1 --wait
  janus models list --json --url http://10.0.0.5:8000
"""
_STATUS_EXAMPLES: Final = """\
examples:
  janus status                                  drawn anew every second until Ctrl-C
  janus status --once                           printed once; the same without a terminal
  janus status --url http://10.0.0.5:8000       any node answers for all of them
  janus status --json                           what GET /admin/cluster answers
"""
_DRAIN_EXAMPLES: Final = """\
What only that node serves is brought up on other nodes first; then it takes no new requests, finishes those that it has
and lets go of its models. It is refused where no other node has room for a model, unless it is forced.

examples:
  janus drain n1 --wait                         then end n1 with Ctrl-C or SIGINT: no request fails
  janus drain n1 --undo                         it serves again; a node that is started again does so by itself
  janus drain n1 --force --url http://10.0.0.5:8000
"""
_DASHBOARD_EXAMPLES: Final = """\
examples:
  janus dashboard                               open what it prints in a browser
The key stands behind the # of the address, which browsers send to nobody. Paste it rather than give it to a command:
what a command is given can be seen by every user of the machine.
"""
_ADMIN_KEY: Final = """
This needs the server's admin key, taken from JANUS_ADMIN_KEY. A server that only this machine can reach and that has no
admin key makes one for the user who started it, in a file that nobody else can read ($XDG_RUNTIME_DIR/janus or
~/.cache/janus/run, one a port, removed at its end): that user need not set anything.
"""
# Those of the admin API, written out: its records cost 10 ms to import, which every launch would pay.
_MODEL_ACTIONS: Final = ("list", "load", "wake", "sleep", "evict", "fork", "pin", "unpin")
LOCAL_URL: Final = "http://127.0.0.1:8000"


def parsers(kinds: Any) -> dict[str, Any]:
    """A parser for each command."""
    return {"models": _models_parser(kinds), "memory": _memory_parser(kinds), "status": _status_parser(kinds),
            "dashboard": _dashboard_parser(kinds), "drain": _drain_parser(kinds)}  # fmt: skip


def run(chosen: argparse.Namespace) -> int:
    match chosen.command:
        case "models":
            return _models(chosen)
        case "memory":
            return _memory(chosen)
        case "dashboard":
            return _dashboard(chosen)
        case "drain":
            return _drain(chosen)
        case _:
            return _status(chosen)


def _models(chosen: argparse.Namespace) -> int:
    from janus_server.config import admin_key, run_folders
    from janus_server.terminal.models import LIST, ModelsOptions, run

    if chosen.source is not None and chosen.action != "fork":
        raise BadConfig("--from says which node to copy a model from; write: janus models fork MODEL --from NODE")
    if chosen.action != LIST and chosen.model is None:
        raise BadConfig(f"which model? write: janus models {chosen.action} MODEL (janus models lists them)")
    return run(
        ModelsOptions(
            url=chosen.url,
            action=chosen.action,
            model=chosen.model,
            source=chosen.source,
            wait=chosen.wait,
            timeout_s=_seconds("--timeout", chosen.timeout),
            as_json=chosen.json,
            key=admin_key(),
            folders=run_folders(),
        )
    )


def _memory(chosen: argparse.Namespace) -> int:
    from janus_server.config import admin_key, run_folders
    from janus_server.terminal.memory import MemoryOptions, run

    return run(
        MemoryOptions(chosen.url, as_json=chosen.json, watch=chosen.watch, key=admin_key(), folders=run_folders())
    )


def _status(chosen: argparse.Namespace) -> int:
    from janus_server.config import admin_key, run_folders
    from janus_server.terminal.status import StatusOptions, run

    return run(StatusOptions(chosen.url, once=chosen.once, as_json=chosen.json, key=admin_key(), folders=run_folders()))


def _dashboard(chosen: argparse.Namespace) -> int:
    from janus_server.config import admin_key, run_folders
    from janus_server.terminal.dashboard import DashboardOptions, run

    return run(DashboardOptions(chosen.url, key=admin_key(), folders=run_folders()))


def _drain(chosen: argparse.Namespace) -> int:
    from janus_server.config import admin_key, run_folders
    from janus_server.terminal.drain import DrainOptions, run

    if chosen.undo and (chosen.force or chosen.wait):
        raise BadConfig("--undo takes effect at once; leave out --force and --wait")
    return run(
        DrainOptions(
            chosen.url, chosen.node, undo=chosen.undo, force=chosen.force, wait=chosen.wait,
            timeout_s=_seconds("--timeout", chosen.timeout), key=admin_key(), folders=run_folders(),
        )
    )  # fmt: skip


def _seconds(flag: str, text: str) -> float:
    from janus_server.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise BadConfig(f"{flag}: {error}") from None


def _dashboard_parser(kinds: Any) -> Any:
    parser = kinds.add_parser(
        "dashboard", help="the address of the dashboard, with the key that opens it",
        epilog=_DASHBOARD_EXAMPLES + _ADMIN_KEY,
    )  # fmt: skip
    parser.add_argument("--url", default=LOCAL_URL, help=f"any node of the cluster (default {LOCAL_URL})")
    return parser


def _drain_parser(kinds: Any) -> Any:
    parser = kinds.add_parser(
        "drain", help="empty a node of a running cluster, so that it can be stopped",
        epilog=_DRAIN_EXAMPLES + _ADMIN_KEY,
    )  # fmt: skip
    parser.add_argument("node", metavar="NODE", help="its name, as janus status shows it")
    parser.add_argument("--undo", action="store_true", help="use it again")
    parser.add_argument("--force", action="store_true", help="what no other node has room for goes too")
    parser.add_argument("--wait", action="store_true", help="until it is empty")
    parser.add_argument("--timeout", default="10min", metavar="DURATION", help="with --wait, at most (default 10min)")
    parser.add_argument("--url", default=LOCAL_URL, help=f"any node of the cluster (default {LOCAL_URL})")
    return parser


def _models_parser(kinds: Any) -> Any:
    parser = kinds.add_parser(
        "models", help="show the models of a running server, and load, wake, sleep, evict, fork or pin them",
        epilog=_MODELS_EXAMPLES + _ADMIN_KEY,
    )  # fmt: skip
    parser.add_argument(
        "action", nargs="?", default="list", choices=_MODEL_ACTIONS, metavar="ACTION",
        help=f"one of: {', '.join(_MODEL_ACTIONS)}",
    )  # fmt: skip
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the model's name, as the list shows it")
    parser.add_argument("--url", default=LOCAL_URL, help=f"the server (default {LOCAL_URL})")
    parser.add_argument(
        "--from", dest="source", metavar="NODE", help="with fork, the node to copy from (default: one that holds it)"
    )
    parser.add_argument("--wait", action="store_true", help="until it is done")
    parser.add_argument("--timeout", default="10min", metavar="DURATION", help="with --wait, at most (default 10min)")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser


def _memory_parser(kinds: Any) -> Any:
    parser = kinds.add_parser(
        "memory", help="show who holds which pages of a running server's memory", epilog=_ADMIN_KEY
    )
    parser.add_argument("--url", default=LOCAL_URL, help=f"the server (default {LOCAL_URL})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", action="store_true", help="draw it every second until Ctrl-C")
    return parser


def _status_parser(kinds: Any) -> Any:
    parser = kinds.add_parser(
        "status", help="show a running server's nodes, models and applications, and what was decided last",
        epilog=_STATUS_EXAMPLES + _ADMIN_KEY,
    )  # fmt: skip
    parser.add_argument("--url", default=LOCAL_URL, help=f"any node of it (default {LOCAL_URL})")
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument("--json", action="store_true", help="print JSON, once")
    return parser
