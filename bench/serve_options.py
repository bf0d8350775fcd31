"""The flags of `janus bench serve`: vLLM's names where it has them, so that hands and scripts carry over.

`serve` parses with this and acts. No defaults that depend on a machine, no reading of files or environment.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from janus_server.suggest import nearest

from .stats import METRICS

TRACES: Final = ("trace", "timed_trace", "azure", "burstgpt", "mooncake", "multi")
DATASETS: Final = ("random", "sharegpt", "custom", *TRACES)
_DESCRIPTION: Final = """\
Put load on any OpenAI-compatible server and tell what its clients would feel.

  janus bench serve                                          1000 random prompts at once, first served model
  janus bench serve --request-rate 5 --num-prompts 200 --random-input-len 256 --random-output-len 64
  janus bench serve --base-url https://host/v1 --endpoint chat --dataset-name custom --dataset-path prompts.jsonl
  janus bench serve --dataset-name trace --dataset-path azure.csv.gz --speed 2 --goodput ttft:500 tpot:50
  janus bench serve --dataset-name trace --dataset-path requests.csv.gz --apps apps.toml --output r.json --plot plots
"""


class Described(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A description as it was written, and the default behind the help of what has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_one = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_one else action.help


class Parser(argparse.ArgumentParser):
    """argparse without guessing, and with one line for a mistake."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        chosen, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            known = [flag for action in self._actions for flag in action.option_strings]
            self.error(
                f"{word}: there is no such {'flag' if word.startswith('-') else 'argument'}{nearest(word, known)}"
            )
        return chosen


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags by their names with underscores."""
    parser = Parser("janus bench serve", _DESCRIPTION)
    for add in (_add_target, _add_load, _add_data, _add_applications, _add_sampling, _add_report):
        add(parser)
    return parser.parse(arguments)


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    add = group.add_argument
    add("--base-url", metavar="URL", help="http(s)://HOST:PORT, with or without /v1; wins over --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=_whole, default=8000)
    add("--backend", choices=("openai", "openai-chat", "vllm"), default="openai", help="openai-chat: --endpoint chat")
    add("--endpoint", metavar="WHICH", help="completions (default), chat, or a path")
    add(
        "--model", action="append", metavar="NAME", help="name on the wire; may be repeated (default: the first served)"
    )
    add("--served-model-name", metavar="NAME", help="the same as --model, and wins over it")
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json or its folder: exact texts, ids of the vocabulary",
    )
    add("--header", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add("--ready-check-timeout-sec", type=_seconds, default=0.0, metavar="S", help="wait so long for the server")
    add("--request-id-prefix", default="bench-", metavar="TEXT", help="x-request-id is this and a number")
    parser.epilog = "The key of the environment variable OPENAI_API_KEY is sent as a bearer token."


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=_positive, metavar="N", help="requests (random: 1000; files and traces: all)")
    add("--request-rate", type=float, default=math.inf, metavar="RPS", help="requests a second; inf: all at once")
    add("--burstiness", type=float, default=1.0, metavar="B", help="gamma shape: 1 Poisson, below 1 burstier, inf even")
    add("--ramp-up-strategy", choices=("linear", "exponential"))
    add("--ramp-up-start-rps", type=float, metavar="RPS")
    add("--ramp-up-end-rps", type=float, metavar="RPS")
    add("--max-concurrency", type=_positive, metavar="N", help="hold requests back beyond N at once")
    add("--self-timed", action=argparse.BooleanOptionalAction, default=True, help="a trace's own times, or a rate")
    add("--speed", type=float, default=1.0, metavar="X", help="replay a trace X times as fast")
    add("--request-timeout", type=_seconds, default=600.0, metavar="S", help="give a request up after so long")
    add("--num-warmups", type=count, default=0, metavar="N", help="requests to each model before the run, not counted")
    add("--seed", type=count, default=0, metavar="N")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--dataset-name", choices=DATASETS, default="random", metavar="NAME", help=", ".join(DATASETS))
    add("--dataset-path", type=Path, metavar="FILE", help="gzipped or not; a trace's format is told by its first line")
    add("--random-input-len", "--input-len", type=_positive, default=1024, metavar="N", help="prompt tokens")
    add("--random-output-len", type=_positive, default=128, metavar="N", help="answer tokens")
    add("--output-len", type=_positive, metavar="N", help="answer tokens, whatever the data set")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by ± this share")
    add("--random-prefix-len", type=count, default=0, metavar="N", help="further tokens that all prompts begin with")
    add("--sharegpt-output-len", type=_positive, metavar="N", help="instead of the recorded answers' lengths")
    add("--custom-output-len", type=_positive, default=256, metavar="N", help="for lines that name none")
    add("--disable-shuffle", action="store_true", help="keep a file's order")
    add("--prompt-form", choices=("ids", "text"), help="of drawn prompts; ids for completions, text for chat")
    add("--random-ids", metavar="LOW:HIGH", help="draw token ids from LOW … HIGH-1")
    add("--text-file", type=Path, metavar="FILE", help="draw prompts as slices of this text (needs --tokenizer, ids)")
    add("--trace-start", type=_seconds, default=0.0, metavar="S", help="skip the trace's first seconds")
    add("--trace-duration", type=_seconds, default=math.inf, metavar="S", help="replay so many of its seconds")
    add("--trace-apps", metavar="A,B,…", help="replay these applications alone")
    add("--max-input-len", type=_positive, metavar="N", help="cut a trace's prompts to what the model takes")
    add("--max-output-len", type=_positive, metavar="N", help="cut a trace's answers")


def _add_applications(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("applications and promises").add_argument
    add("--goodput", nargs="+", default=[], metavar="KEY:MS", help="ttft:500 tpot:50 e2el:5000, in milliseconds")
    add("--apps", type=Path, metavar="FILE", help="TOML ([app.NAME] model, ttft_ms, tpot_ms, share, …) or apps.csv")
    add(
        "--model-map",
        nargs="+",
        action="extend",
        default=[],
        metavar="FROM=TO",
        help="rename applications' models; *=TO",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling (not sent unless given)").add_argument
    for name in ("temperature", "top-p", "min-p", "repetition-penalty", "frequency-penalty", "presence-penalty"):
        add(f"--{name}", type=float, metavar="X")
    add("--top-k", type=int, metavar="N")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers of the full length (default for random and traces)",
    )
    add("--extra-body", default="{}", metavar="JSON", help="further fields of every request")
    add("--continuous-usage", action="store_true", help="ask for running token counts: exact where events hold several")


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("report").add_argument
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el,client_queue_time",
        metavar="M,…",
        help=f"of {','.join(METRICS)}",
    )
    add("--metric-percentiles", default="90,99", metavar="P,…")
    add("--output", type=Path, metavar="FILE", help="write the result there as JSON")
    add("--save-detailed", action="store_true", help="with every request's times, texts and errors")
    add("--plot", type=Path, metavar="DIR", help="write PNGs there (needs matplotlib)")
    add("--label", metavar="TEXT", help="goes into the result")
    add("--metadata", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="go into the result")
    add("--quiet", "--disable-tqdm", action="store_true", help="no progress line")


def _whole(text: str) -> int:
    return _bounded(text, 1, 65535)


def _positive(text: str) -> int:
    return _bounded(text, 1, 1 << 40)


def count(text: str) -> int:
    return _bounded(text, 0, 1 << 62)


def fraction(text: str) -> float:
    """Of promises and the like: above 0 and at most 1."""
    value = _number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, above 0 and at most 1")
    return value


def above_zero(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _number(text: str) -> float:
    """What is no number is NaN, which lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _bounded(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low}")
    return int(text)


def _seconds(text: str) -> float:
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def key_values(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words; a word without = is a key with an empty value."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}
