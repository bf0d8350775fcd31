"""One node: memory, kernels, models and the device thread, put together. `serve` runs it, the HTTP layer reads it.

Loading happens on a worker thread before the device thread starts, so the pool has one user at a time. The node
executes and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from janus_server.config import ServeConfig
from janus_server.executor import Attach, DeviceThread, EndAll, StepReport, Stop
from janus_server.instance import ServedModel, Streams
from janus_server.kernels.choose import choose
from janus_server.kv.touch import TouchAhead
from janus_server.kv.xtensor import XTensor
from janus_server.lifecycle import Progress, engine_of, fill, open_models, served
from janus_server.observe.log import decision
from janus_server.sched.scarcity import Scarcity
from janus_server.tokens.render import Renderers
from janus_server.types import BatcherStats, Load, Owner

log = logging.getLogger("janus.node")


class Node:
    """What this process serves and with which memory. Built on the loop's thread; `load` runs on a worker."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.models: Mapping[str, ServedModel] = MappingProxyType({})
        self.streams = Streams()
        self.pool_pages = config.memory_bytes // config.page_bytes
        self.free_pages = self.pool_pages
        self._loaded = False
        self._draining: str | None = None
        self._device: DeviceThread | None = None
        self._toucher: TouchAhead | None = None
        self._renderers = Renderers()
        self._stats: Mapping[str, BatcherStats] = MappingProxyType({})
        self._pages: Mapping[Owner, int] = MappingProxyType({})
        self._listeners: list[Callable[[StepReport], None]] = []

    def on_step(self, listener: Callable[[StepReport], None]) -> None:
        """`listener` is called on the loop after each step (metrics)."""
        self._listeners.append(listener)

    def refusing(self) -> str | None:
        """Why no model can take requests just now, or None."""
        if self._draining is not None:
            return self._draining
        if not self._loaded:
            return "the models are still loading"
        if self._device is None or not self._device.alive:
            return "the device thread has ended"
        return None

    def ready(self) -> str | None:
        """None when every model takes requests, else the reason why not."""
        failed = [name for name, model in self.models.items() if model.failed]
        return self.refusing() or self._frozen() or (f"stopped after an error: {', '.join(failed)}" if failed else None)

    def stats(self) -> Mapping[str, BatcherStats]:
        return self._stats

    def loads(self) -> Mapping[str, Load]:
        """What is open of each model, counted where requests come in."""
        return self.streams.loads(time.monotonic())

    def memory(self) -> Mapping[Owner, int]:
        """Pages held, by owner, after the last step."""
        return self._pages

    def load(self, loop: asyncio.AbstractEventLoop, progress: Progress) -> None:
        """Load every configured model, then start the device thread. On a worker thread; raises BadModel, BadConfig.

        `progress` may raise to stop it: nothing runs then, and the process is expected to end.
        """
        config = self._config
        kernels, reasons = choose(config.kernels.value, config.threads, config.cache_dir)
        for reason in reasons:
            log.debug("%s", reason)
        opened = open_models(config, kernels)
        xtensor = XTensor(config.memory_bytes, config.page_bytes)
        toucher = self._toucher = TouchAhead(xtensor)
        scarcity = Scarcity(xtensor.pool)
        device = DeviceThread(
            xtensor.pool, scarcity, lambda report: _hand_over(loop, self._deliver, report), toucher.below,
            xtensor.close_weights,
        )  # fmt: skip
        models, stats = {}, {}
        for one in opened:
            filled = fill(one, xtensor, kernels, self._renderers, config.threads, progress)
            engine = engine_of(filled, config, xtensor, kernels, scarcity)
            device.post(Attach(engine))
            models[engine.model] = served(filled, config, device, self.streams)
            stats[engine.model] = engine.batcher.stats()
        toucher.below(xtensor.pool.n_pages)
        loop.call_soon_threadsafe(self._serve, device, models, stats, xtensor.pool.held(), xtensor.pool.free_pages)

    def drain(self, reason: str) -> None:
        """Refuse new requests; running ones go on."""
        self._draining = reason
        open_requests = len(self.streams)
        decision(f"no new requests: {reason}; {open_requests} go on", kind="drain", open_requests=open_requests)

    def end_all(self) -> None:
        """End what still runs with an error event."""
        if self._device is not None:
            self._device.post(EndAll())

    def close(self) -> None:
        """End the threads and helper processes, the device thread after its step. Memory goes with the process."""
        if self._toucher is not None:
            self._toucher.close()
        if self._device is not None and self._device.alive:
            self._device.post(Stop())
            self._device.join(timeout_s=60.0)
        self._renderers.close()

    def _serve(
        self, device: DeviceThread, models: dict[str, ServedModel], stats: dict[str, BatcherStats],
        pages: dict[Owner, int], free_pages: int,
    ) -> None:  # fmt: skip
        """Everything is loaded: show it to the loop in one piece, and start."""
        self._device = device
        self.models = MappingProxyType(models)
        self._stats = MappingProxyType(stats)
        self._pages, self.free_pages = pages, free_pages
        self._loaded = True
        device.start()

    def _frozen(self) -> str | None:
        """Work waits and nothing moves: a busy node ends a step now and then, a frozen one never does."""
        stalled_s = self._device.stalled_s(time.monotonic()) if self._device is not None else 0.0
        if stalled_s <= self._config.frozen_after_s:
            return None
        return (
            f"work waits and no step has ended for {stalled_s:.0f} s (--frozen-after {self._config.frozen_after_s:g})"
        )

    def _deliver(self, report: StepReport) -> None:
        if report.stats is not None:
            self._stats = MappingProxyType({**self._stats, report.model: report.stats})
        self._pages, self.free_pages = report.pages, report.free_pages
        if report.failed:
            self.models[report.model].failed = True
        self.streams.deliver(report)
        for listener in self._listeners:
            listener(report)


def _hand_over(loop: asyncio.AbstractEventLoop, deliver: Callable[[StepReport], None], report: StepReport) -> None:
    loop.call_soon_threadsafe(deliver, report)
