"""One node: memory, kernels, models and the device thread, put together. `serve` runs it, the HTTP layer reads it.

Loading happens on a worker thread before the device thread starts, so the pool has one user at a time. The node
executes and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from janus_server.config import ServeConfig
from janus_server.executor import Attach, DeviceThread, EndAll, StepReport, Stop
from janus_server.instance import ServedModel, Streams
from janus_server.kernels.choose import choose
from janus_server.kv.touch import TouchAhead
from janus_server.kv.xtensor import XTensor
from janus_server.lifecycle import Loading, Progress
from janus_server.sched.scarcity import Scarcity
from janus_server.tokens.render import Renderers
from janus_server.types import BatcherStats, Owner

log = logging.getLogger("janus.node")


class Node:
    """What this process serves and with which memory. Built on the loop's thread; `load` runs on a worker."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.models: Mapping[str, ServedModel] = MappingProxyType({})
        self.streams = Streams()
        self.pool_pages = config.memory_bytes // config.page_bytes
        self._reason: str | None = "the models are still loading"
        self._xtensor: XTensor | None = None
        self._device: DeviceThread | None = None
        self._toucher: TouchAhead | None = None
        self._renderers = Renderers()
        self._stats: dict[str, BatcherStats] = {}
        self._pages: dict[Owner, int] = {}
        self.free_pages = self.pool_pages
        self._listeners: list[Callable[[StepReport], None]] = []

    def on_step(self, listener: Callable[[StepReport], None]) -> None:
        """`listener` is called on the loop after each step (metrics)."""
        self._listeners.append(listener)

    def ready(self) -> str | None:
        """None when requests are served, else the reason why not."""
        if self._reason is None and self._device is not None and not self._device.alive:
            return "the device thread has ended"
        return self._reason

    def stats(self) -> Mapping[str, BatcherStats]:
        return self._stats

    def memory(self) -> Mapping[Owner, int]:
        """Pages held, by owner, after the last step."""
        return self._pages

    def load(self, loop: asyncio.AbstractEventLoop, progress: Progress) -> None:
        """Load every configured model, then start the device thread. On a worker thread; raises BadModel, BadConfig."""
        config = self._config
        kernels, reasons = choose(config.kernels.value, config.threads, config.cache_dir)
        for reason in reasons:
            log.debug("%s", reason)
        xtensor = self._xtensor = XTensor(config.memory_bytes, config.page_bytes)
        toucher = self._toucher = TouchAhead(xtensor)
        scarcity = Scarcity(xtensor.pool)
        device = self._device = DeviceThread(
            xtensor.pool, scarcity, lambda report: _hand_over(loop, self._deliver, report), toucher.below
        )
        loaded = [Loading(entry, config, kernels, xtensor, self._renderers, progress) for entry in config.models]
        served = {}
        for one in loaded:
            engine = one.engine(scarcity)
            device.post(Attach(engine))
            served[one.entry.name] = one.served(engine, device, self.streams)
            self._stats[one.entry.name] = engine.batcher.stats()
        self._pages = xtensor.pool.held()
        self.free_pages = xtensor.pool.free_pages
        toucher.below(xtensor.pool.n_pages)
        device.start()
        self.models = MappingProxyType(served)
        self._reason = None

    def drain(self, reason: str) -> None:
        """Refuse new requests; running ones go on."""
        self._reason = reason

    def end_all(self) -> None:
        """End what still runs with an error event."""
        if self._device is not None:
            self._device.post(EndAll())

    def close(self) -> None:
        """Stop the device thread after its step and give the memory back."""
        if self._toucher is not None:
            self._toucher.close()
        if self._device is not None and self._device.alive:
            self._device.post(Stop())
            self._device.join(timeout_s=60.0)
        self._renderers.close()

    def _deliver(self, report: StepReport) -> None:
        self._stats[report.model] = report.stats
        self._pages = report.pages
        self.free_pages = report.free_pages
        if report.failed and report.model in self.models:
            self.models[report.model].failed = True
        self.streams.deliver(report)
        for listener in self._listeners:
            listener(report)


def _hand_over(loop: asyncio.AbstractEventLoop, deliver: Callable[[StepReport], None], report: StepReport) -> None:
    loop.call_soon_threadsafe(deliver, report)
