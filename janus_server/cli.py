"""The `janus` command: arguments in, exit code out.

Called by the console script and `__main__`. Each sub-command imports its own room when it is asked for, since what is
imported here is paid by every launch. Exit codes: 0 done, 1 not possible here, 2 wrong settings or model, 130
interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from janus_server import cli_admin
from janus_server.errors import BadConfig, BadModel
from janus_server.suggest import nearest

_OVERVIEW: Final = """\
Serve language models on this machine, behind an OpenAI-compatible HTTP API.

  janus serve                                   serve the default model on http://127.0.0.1:8000
  janus chat                                    talk to it in this terminal
  janus models                                  where its models stand; load, wake, sleep, evict, fork and pin them
  janus memory                                  who holds which pages of its memory
  janus status                                  all nodes of its cluster, their models and requests, what was decided
  janus drain NODE                              empty a node of it, so that it can be stopped
  janus dashboard                               the same in a browser: the address, with the key that opens it
  janus doctor                                  what this machine can run, and why
"""
_SERVE_EXAMPLES: Final = """\
A MODEL is a folder from Hugging Face (config.json and safetensors), a .gguf file, the alias of an
installed model, or a hub id; NAME=MODEL chooses the name that clients send. Without one, smollm2-135m is served.

examples:
  janus serve                                   the default model
  janus serve ~/models/Qwen3-0.6B               a folder, served as "Qwen3-0.6B"
  janus serve chat=~/models/qwen3.gguf --port 9000
  janus serve a=model-a b=model-b --memory 16GiB
  janus serve a=model-a --node n1               shares weights with your servers that have a name too
  janus serve --config janus.toml --set max_num_seqs=32
  JANUS_API_KEY=$(cat my.key) janus serve --host 0.0.0.0

janus.toml takes the same settings, and flags win over it:
  port = 9000
  memory = "16GiB"
  max_model_len = 4096
  [models]
  chat = "~/models/Qwen3-0.6B"
  [models.code]
  path = "~/models/code.gguf"
  idle = "10min"                # then it leaves the device; also pin, preload, kv_floor, kv_ceiling, max_model_len
  [applications.support]        # one more name for a model, with a promise of its own
  model = "chat"
  ttft = "300ms"
  tpot = "50ms"
  priority = 10

then, for the user who started it (others need JANUS_ADMIN_KEY, see janus models --help):
  janus models                                  where its models stand
  janus memory                                  who holds its memory
and for everybody:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}]}'
"""
_CHAT_EXAMPLES: Final = """\
examples:
  janus chat                                    a conversation; /help lists its commands
  janus chat "What is the capital of France?"   one answer, then exit
  git diff | janus chat "Explain this change"   piped text follows the prompt
  janus chat --url http://10.0.0.5:8000 --model chat --system "Answer in French."
the server's API key is taken from JANUS_API_KEY
"""
_REPLAY_EXAMPLES: Final = """\
examples:
  janus serve a=~/models/x b=~/models/y --journal journal.jsonl
  janus replay journal.jsonl --sentences        what was decided when, and why
  janus replay journal.jsonl.*                  of a cluster: one file for each term, NAME.NODE.TERM
exit code 1 when a decision comes out otherwise than it did
"""
_BENCH_EXAMPLES: Final = """\
examples:
  janus bench engine                            decode and prefill speed of the engine
  janus bench serve --request-rate 5            what clients of a running server feel: any OpenAI-compatible one
  janus bench client                            how much load the bench client itself can make on this machine
  janus bench http                              what the API layer costs, beside bare aiohttp
  janus bench soak                              whether a server stays as it was: clients that leave, ten times the load
  janus bench dispatch                          LST-IMH and its rivals: guarantees, cost, requests on time
  janus bench packing                           how many devices a demand takes, beside the exact optimum
  janus bench scaling                           replicas over time when traffic bursts, and what deciding costs
  janus bench memory all                        what one pool of pages for many models is worth
  janus bench oracle                            how well demand and attainment are predicted, and what that costs
  janus bench simulate --list                   policies on an imaginary cluster, also reached as janus simulate
  janus bench plan --target 0.9                 how many devices keep a promise, also reached as janus plan
  janus bench workload                          what the traffic of 62 applications looks like
  janus bench simulate_sweep                    how much load each policy bears, or how tight promises may be
  janus bench simulate_day                      every policy on a whole day, the cluster sized for the trace's peaks
  janus bench simulate_loads                    how long copies take in the simulator, beside the published times
  janus bench simulate_devices                  its two fidelities; simulate_agreement: on a cluster; simulate_fit: CPUs
  janus bench cluster                           what it costs that a request comes in at one node and runs on another
  janus bench chaos                             a cluster under load whose nodes are killed, stopped and cut off
  janus bench rolling                           a cluster under load whose nodes are emptied, restarted and taken away
  janus bench live shadow                       the live scheduler on paced nodes, beside the simulator
  janus bench transfer                          how fast one node copies another's memory, beside bare sockets
  janus bench serve --help                      what a benchmark takes
"""
# Each benchmark is a module of the package janus_bench with main(arguments) -> exit code.
_BENCHES: Final = ("engine", "serve", "client", "http", "soak", "dispatch", "packing", "scaling", "memory", "oracle",
                  "simulate", "plan", "workload", "simulate_sweep", "simulate_day", "simulate_loads",
                  "simulate_devices", "simulate_agreement", "simulate_fit", "chaos", "rolling",
                  "cluster", "live", "transfer")  # fmt: skip
# Benchmarks that are commands of their own too.
_WHOLE: Final = {
    "simulate": "try whole days of an imaginary cluster",
    "plan": "how many devices a load takes, by simulation",
}


class _Parser(argparse.ArgumentParser):
    """argparse without guessing: no abbreviations, and an unknown flag is answered with the nearest known one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage, which would push the reason off the screen."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        word = unknown[0].partition("=")[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        self.error(f"{word}: there is no such {'flag' if word.startswith('-') else 'argument'}{nearest(word, known)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; argv defaults to the process's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        return _guarded(lambda: _bench(arguments[1], arguments[2:]))
    if arguments and arguments[0] in _WHOLE:
        return _guarded(lambda: _bench(arguments[0], arguments[1:]))
    parser, commands = _parser()
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.get(chosen.command, parser).refuse(unknown)
    if chosen.command is None and not chosen.version:
        parser.print_help()
        return 0
    return _guarded(lambda: _run(chosen, commands))


def _guarded(command: Any) -> int:
    """A user's mistake is one line on stderr, never a traceback."""
    try:
        return int(command())
    except (BadConfig, BadModel) as error:
        print(f"janus: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`janus doctor | head`). Point stdout elsewhere so that the interpreter's
        # closing flush does not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(chosen: argparse.Namespace, commands: dict[str, _Parser]) -> int:
    match "version" if chosen.version else chosen.command:
        case "serve":
            return _serve(chosen)
        case "chat":
            return _chat(chosen)
        case "models" | "memory" | "status" | "dashboard" | "drain":
            return cli_admin.run(chosen)
        case "replay":
            return _replay(chosen)
        case "doctor":
            from janus_server.terminal.doctor import run as doctor

            return doctor(as_json=chosen.json, kernels=chosen.kernels)
        case "version":
            print(f"janus {_version()}")
            return 0
        case _:
            commands[chosen.command].print_help()
            return 0


def _serve(chosen: argparse.Namespace) -> int:
    from janus_server.config import SETTINGS, serve_config

    if chosen.api_key is not None:
        # The value is in the process list by now, and is not repeated here.
        raise BadConfig(
            "--api-key: every user of this machine can read a command line; set JANUS_API_KEY, or write the key into "
            "a file of yours and give --api-key-file FILE"
        )
    given = {s.key: getattr(chosen, s.key) for s in SETTINGS if getattr(chosen, s.key) is not None}
    config = serve_config(
        chosen.models, file=chosen.config, sets=chosen.set, flags=given, served_model_name=chosen.served_model_name
    )
    from janus_server.serve import run

    return int(run(config, chosen.listen_fd))


def _chat(chosen: argparse.Namespace) -> int:
    from janus_server.terminal.chat import ChatOptions, run

    return run(
        ChatOptions(
            url=chosen.url.rstrip("/"),
            model=chosen.model,
            system=chosen.system,
            temperature=chosen.temperature,
            max_tokens=chosen.max_tokens,
            prompt=" ".join(chosen.prompt) or None,
            key=os.environ.get("JANUS_API_KEY"),
        )
    )


def _replay(chosen: argparse.Namespace) -> int:
    from janus_server.terminal.replay import ReplayOptions, run

    return run(ReplayOptions(tuple(Path(file).expanduser() for file in chosen.files), sentences=chosen.sentences))


def _bench(name: str, arguments: Sequence[str]) -> int:
    if name not in _BENCHES:
        raise BadConfig(f"there is no benchmark {name!r}; there are: {', '.join(_BENCHES)}{nearest(name, _BENCHES)}")
    try:
        module = importlib.import_module(f"janus_bench.{name}")
    except ModuleNotFoundError as error:
        raise BadConfig(f"the benchmarks are not installed ({error}); run: make install") from None
    return int(module.main(list(arguments)))


def _version() -> str:
    # Imported here: package metadata costs milliseconds that only this command needs.
    from importlib import metadata

    try:
        return metadata.version("janus-server")
    except metadata.PackageNotFoundError:
        return "(from a source folder that is not installed)"


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="janus", description=_OVERVIEW)
    parser.add_argument("--version", action="store_true", help="print the version")
    kinds = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands = {
        "serve": _serve_parser(kinds),
        "chat": _chat_parser(kinds),
        **cli_admin.parsers(kinds),
        "replay": _replay_parser(kinds),
        "doctor": _doctor_parser(kinds),
        "bench": kinds.add_parser("bench", help="measure speed", epilog=_BENCH_EXAMPLES),
        **{name: kinds.add_parser(name, help=what) for name, what in _WHOLE.items()},
        "version": kinds.add_parser("version", help="print the version"),
    }
    commands["bench"].add_argument("name", nargs="?", metavar="NAME", help=f"one of: {', '.join(_BENCHES)}")
    return parser, commands


def _serve_parser(kinds: Any) -> _Parser:
    from janus_server.readers import truth
    from janus_server.settings import SETTINGS

    parser: _Parser = kinds.add_parser("serve", help="serve one or more models over HTTP", epilog=_SERVE_EXAMPLES)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="NAME=MODEL or MODEL (see below)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML; flags win over it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting of the file")
    parser.add_argument("--served-model-name", metavar="NAME", help="the name clients send, for a single model")
    for setting in SETTINGS:
        shape: dict[str, Any] = {"dest": setting.key, "default": None, "help": setting.help}
        if setting.read is truth:
            shape["action"] = argparse.BooleanOptionalAction
        else:
            shape["metavar"] = setting.metavar or setting.key.upper()
        parser.add_argument(*setting.flags, **shape)
    # What `--nodes` gives to each of its nodes.
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    # Known only to be refused with what to do instead: other servers have it.
    parser.add_argument("--api-key", nargs="*", help=argparse.SUPPRESS)
    return parser


def _chat_parser(kinds: Any) -> _Parser:
    parser: _Parser = kinds.add_parser("chat", help="talk to a running server", epilog=_CHAT_EXAMPLES)
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="ask this once and exit; without it, a conversation"
    )
    parser.add_argument("--url", default=cli_admin.LOCAL_URL, help=f"the server (default {cli_admin.LOCAL_URL})")
    parser.add_argument("--model", help="a served model's name (default: the server's first)")
    parser.add_argument("--system", metavar="TEXT", help="instructions that stand before the conversation")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is always the likeliest word")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    return parser


def _replay_parser(kinds: Any) -> _Parser:
    parser: _Parser = kinds.add_parser(
        "replay", help="decide again what a journal tells of, and compare", epilog=_REPLAY_EXAMPLES
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="journals, as janus serve --journal FILE writes them")
    parser.add_argument("--sentences", action="store_true", help="print each decision's sentence first")
    return parser


def _doctor_parser(kinds: Any) -> _Parser:
    parser: _Parser = kinds.add_parser("doctor", help="show what this machine can run, and which path is taken and why")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--kernels", default="auto", metavar="KERNELS", help="the choice to explain (default auto)")
    return parser
