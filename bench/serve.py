"""Load on any OpenAI-compatible server, and what its clients would feel: `janus bench serve`.

Reads the flags, makes plans of them, lets `load` run them, and hands the outcomes to `report` and `plots`. This file
joins the parts and decides nothing that a figure depends on. `janus bench serve --help` shows examples.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from janus_server.errors import BadConfig

from . import datasets, report, wording
from .applications import for_models, parse_goodput, read_applications, renamed
from .arrivals import Ramp, check_rate
from .load import LoadRun
from .progress import show
from .prompts import read_jsonl, read_sharegpt
from .records import Application, Drawn, Endpoint, Plan
from .serve_options import TRACES, key_values, parse
from .stats import METRICS
from .target import Caller, Target, check_extra, make_target, parse_object, served_models
from .traces import TraceSlice, open_text, read_trace

_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Everything that is settled before the first request leaves."""

    target: Target
    caller: Caller
    plans: Sequence[Plan]
    apps: Sequence[Application]
    exact_prompts: bool
    ignore_eos: bool
    notes: Sequence[str]


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    metrics, percentiles = _metrics(options)
    if options.plot is not None and find_spec("matplotlib") is None:  # said before the run, not after it
        raise BadConfig("--plot needs matplotlib; run: pip install 'janus-server[bench]'")
    setup = prepare(options, os.environ.get("OPENAI_API_KEY"))
    allow_open_files(min(len(setup.plans), options.max_concurrency or len(setup.plans)))
    warmups = datasets.warmup_plans(setup.apps, options.num_warmups, setup.plans)
    warm_run = execute(setup, warmups, options) if warmups else None
    run = execute(setup, setup.plans, options)
    result = report.Run(
        outcomes=run.outcomes,
        warmups=warm_run.outcomes if warm_run is not None else (),
        apps=setup.apps,
        settings=_settings(options, setup),
        metrics=metrics,
        percentiles=percentiles,
        most_active=run.counts.most_active,
        cpu_s=run.cpu_s,
        lags_s=run.lags_s,
        wall_s=run.wall_s,
        exact_prompts=setup.exact_prompts,
        ignore_eos=setup.ignore_eos,
        notes=setup.notes,
    )
    found = report.document(result, detailed=options.save_detailed)
    print(report.table(found))
    _write(options, found, run, setup.apps)
    return 130 if found["interrupted"] else 0 if found["completed"] else 1


def execute(setup: Setup, plans: Sequence[Plan], options: argparse.Namespace) -> LoadRun:
    """Run plans to their end; an interrupt ends them early and keeps what was measured."""
    run = LoadRun(
        setup.target,
        setup.caller,
        plans,
        max_concurrency=options.max_concurrency,
        timeout_s=options.request_timeout,
        keep_text=options.save_detailed,
    )

    async def go() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, run.stop)
        progress = asyncio.ensure_future(show(run, len(plans), quiet=options.quiet))
        try:
            await run.run()
        finally:
            progress.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await progress

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(go())
    return run


def prepare(options: argparse.Namespace, api_key: str | None) -> Setup:
    """From flags to plans. Talks to the server only to ask for its models."""
    base_url = options.base_url or f"http://{options.host}:{options.port}"
    endpoint = options.endpoint or ("chat" if options.backend == "openai-chat" else "completions")
    target = make_target(base_url, endpoint, options.header, api_key, insecure=options.insecure)
    check_rate(options.request_rate, options.burstiness)
    _check_times(options)
    extra = parse_object(options.extra_body, "--extra-body")
    listed = served_models(target, options.ready_check_timeout_sec)
    rng = np.random.default_rng(options.seed)
    apps = _applications(options, listed)
    plans, apps, notes = _plans(options, apps, target.endpoint, rng)
    for app in apps:
        check_extra(app.extra_body, f"the application {app.name!r}: extra_body")
    strangers = sorted({app.model for app in apps} - set(listed)) if listed else []
    if strangers:
        notes = [*notes, f"not in /v1/models: {', '.join(strangers[:8])}"]
    words = _wording(options, target.endpoint, plans)
    synthetic = options.dataset_name == "random" or options.dataset_name in TRACES
    ignore_eos = synthetic if options.ignore_eos is None else options.ignore_eos
    caller = Caller(
        target,
        words,
        sampling={key: getattr(options, key) for key in _SAMPLING if getattr(options, key) is not None},
        ignore_eos=ignore_eos,
        running_usage=options.continuous_usage,
        extra_body=extra,
        id_prefix=options.request_id_prefix,
    )
    exact = words.exact or not any(isinstance(plan.prompt, Drawn) for plan in plans)
    return Setup(target, caller, plans, apps, exact, ignore_eos, notes)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed: it reads a token in about half the time."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _applications(options: argparse.Namespace, listed: Sequence[str]) -> list[Application]:
    slo = parse_goodput(options.goodput)
    if options.apps is not None:
        apps = read_applications(options.apps, slo)
    else:
        names = [options.served_model_name] if options.served_model_name else options.model or list(listed[:1])
        if not names:
            raise BadConfig("the server lists no models; name one with --model")
        apps = for_models(names, slo)
    if len({app.name for app in apps}) < len(apps):
        raise BadConfig("two applications have the same name")
    return renamed(apps, options.model_map)


def _plans(
    options: argparse.Namespace, apps: Sequence[Application], endpoint: Endpoint, rng: np.random.Generator
) -> tuple[list[Plan], list[Application], list[str]]:
    """The plans, the applications that occur in them, and what a reader should know."""
    name = options.dataset_name
    notes: list[str] = []
    if name == "random":
        output = options.output_len or options.random_output_len
        sizes = datasets.Sizes(options.random_input_len, output, options.random_range_ratio, options.random_prefix_len)
        plans = datasets.random_plans(apps, options.num_prompts or 1000, sizes, _pace(options), rng)
    elif options.dataset_path is None:
        raise BadConfig(f"--dataset-name {name} needs --dataset-path")
    elif name in TRACES:
        chosen = frozenset((options.trace_apps or "").split(",")) - {""}
        rows = read_trace(options.dataset_path, TraceSlice(options.trace_start, options.trace_duration, chosen))
        if options.apps is None:
            apps = renamed(datasets.apps_of_trace(rows, apps), options.model_map)
        rows = rows[: options.num_prompts]
        caps = datasets.Caps(options.max_input_len, options.output_len or options.max_output_len)
        plans = datasets.trace_plans(apps, rows, options.speed if options.self_timed else _pace(options), caps, rng)
        prompts_cut, answers_cut = datasets.cut_counts(rows, caps)
        if prompts_cut or answers_cut:
            notes.append(f"{prompts_cut} prompts and {answers_cut} answers of the trace were cut to the caps")
    else:
        samples = _samples(options, endpoint)
        plans = datasets.written_plans(
            apps, samples, options.num_prompts, _pace(options), rng, shuffle=not options.disable_shuffle
        )
        if name == "sharegpt" and options.tokenizer is None:
            notes.append("lengths of the data set are estimates (no --tokenizer)")
    used = {plan.app.name for plan in plans}
    return plans, [app for app in apps if app.name in used], notes


def _samples(options: argparse.Namespace, endpoint: Endpoint) -> list[Any]:
    path: Path = options.dataset_path
    if options.dataset_name == "custom":
        return list(read_jsonl(path, endpoint, options.output_len or options.custom_output_len))
    tokenizer = wording.load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
    return list(read_sharegpt(path, endpoint, tokenizer, options.output_len or options.sharegpt_output_len))


def _check_times(options: argparse.Namespace) -> None:
    """A flag that would change nothing is a mistake: the run would not be the one that was meant."""
    replayed = options.dataset_name in TRACES and options.self_timed
    if replayed and (not math.isinf(options.request_rate) or options.ramp_up_strategy is not None):
        raise BadConfig("a trace is replayed at its own times; use --speed, or --no-self-timed to set a rate")
    if not replayed and options.speed != 1.0:
        raise BadConfig("--speed is for traces at their own times; use --request-rate")


def _pace(options: argparse.Namespace) -> datasets.Pace:
    if options.ramp_up_strategy is None:
        if options.ramp_up_start_rps is not None or options.ramp_up_end_rps is not None:
            raise BadConfig("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential")
        return datasets.Pace(options.request_rate, options.burstiness)
    if options.ramp_up_start_rps is None or options.ramp_up_end_rps is None:
        raise BadConfig("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if not math.isinf(options.request_rate):
        raise BadConfig("--ramp-up-strategy and --request-rate both set the rate; give one of them")
    ramp = Ramp(options.ramp_up_start_rps, options.ramp_up_end_rps, options.ramp_up_strategy == "exponential")
    return datasets.Pace(burstiness=options.burstiness, ramp=ramp)


def _wording(options: argparse.Namespace, endpoint: Endpoint, plans: Sequence[Plan]) -> wording.Wording:
    """How drawn prompts are made; files with prompts of their own need none."""
    chat = endpoint is Endpoint.CHAT
    form = options.prompt_form or ("text" if chat else "ids")
    if form == "ids" and chat:
        raise BadConfig("--prompt-form ids: the chat endpoint takes text")
    if not any(isinstance(plan.prompt, Drawn) for plan in plans):
        return wording.RoughWording(options.seed)
    tokenizer = wording.load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
    if options.text_file is not None:
        if tokenizer is None or form == "text":
            raise BadConfig("--text-file needs --tokenizer and prompts as ids (the completions endpoint)")
        with open_text(options.text_file) as file:
            return wording.SliceWording(tokenizer, file.read(), options.seed)
    if form == "text":
        if tokenizer is None:
            return wording.RoughWording(options.seed)
        return wording.WordWording(tokenizer, options.seed, adds_special=not chat)
    low, high = wording.DEFAULT_IDS
    if tokenizer is not None:
        high = tokenizer.get_vocab_size(with_added_tokens=False)
    if options.random_ids is not None:
        words = options.random_ids.split(":")
        if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
            raise BadConfig(f"--random-ids: {options.random_ids!r}; write LOW:HIGH, for example 16:250")
        low, high = int(words[0]), int(words[1])
    return wording.IdWording(low, high, options.seed)


def _metrics(options: argparse.Namespace) -> tuple[list[str], list[float]]:
    """Checked before the run: a typo must not cost an hour of load."""
    metrics = [word for word in options.percentile_metrics.split(",") if word]
    unknown = [word for word in metrics if word not in METRICS]
    if unknown:
        raise BadConfig(f"--percentile-metrics: {unknown[0]!r}; there are {', '.join(METRICS)}")
    try:
        percentiles = [float(word) for word in options.metric_percentiles.split(",") if word]
    except ValueError:
        percentiles = [math.nan]
    if not all(0 <= p <= 100 for p in percentiles):
        raise BadConfig(f"--metric-percentiles: {options.metric_percentiles!r}; write numbers from 0 to 100, as 50,99")
    return metrics, percentiles


def _settings(options: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """What was asked for, by vLLM's names."""
    replayed = options.dataset_name in TRACES and options.self_timed
    rate: object = "trace" if replayed else "inf" if math.isinf(options.request_rate) else options.request_rate
    found: dict[str, Any] = {
        **key_values(options.metadata),
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if setup.target.endpoint is Endpoint.CHAT else "openai",
        "backend": options.backend,
        "label": options.label,
        "model_id": ", ".join(sorted({app.model for app in setup.apps})[:8]),
        "tokenizer_id": None if options.tokenizer is None else str(options.tokenizer),
        "num_prompts": len(setup.plans),
        "request_rate": rate,
        "burstiness": "inf" if math.isinf(options.burstiness) else options.burstiness,
        "max_concurrency": options.max_concurrency,
        "base_url": setup.target.url,
        "endpoint": setup.target.path,
        "dataset_name": options.dataset_name,
        "dataset_path": None if options.dataset_path is None else str(options.dataset_path),
        "seed": options.seed,
    }
    if replayed:
        found["speed"] = options.speed
    if options.ramp_up_strategy is not None:
        found |= {f"ramp_up_{k}": getattr(options, f"ramp_up_{k}") for k in ("strategy", "start_rps", "end_rps")}
    return found


def _write(options: argparse.Namespace, found: Mapping[str, Any], run: LoadRun, apps: Sequence[Application]) -> None:
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        print(f"result: {options.output}")
    if options.plot is not None:
        from .plots import draw

        files = draw(options.plot, [o for o in run.outcomes if o.failure != "interrupted"], apps)
        print(f"plots: {', '.join(str(file) for file in files)}")


def allow_open_files(wanted: int) -> None:
    """A socket a stream: take what the hard limit allows when the soft one is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted += 64
    if soft < wanted and soft != resource.RLIM_INFINITY:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BadConfig as error:
        sys.exit(f"janus: {error}")
