"""The side that computes a prompt for another node: lends it the pages of keys and values that came of that.

`guests` asks for it once such a prompt is over. The pages are held until they are read or the grant's time is over, and
let go before that only where somebody who runs would have to stop for them (`sched/loans`). Lives on the loop and
decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from janus_server.catalogue import OpenedModel
from janus_server.executor import DeviceThread
from janus_server.fork import checkpoint_of, kv_words
from janus_server.kv.move import sampled_digest_of
from janus_server.kv.prefix import PrefixCache
from janus_server.kv.xtensor import XTensor
from janus_server.sched.scarcity import Scarcity
from janus_server.threads import ended
from janus_server.transfer.frames import Denial
from janus_server.transfer.grants import Grants, Offer
from janus_server.transfer.serving import SLOWEST_BYTES_PER_S
from janus_server.types import Lent, Request
from janus_server.wire.frames import Lend

# Whoever had a prompt computed comes for it at once. While a grant lasts its model does not leave the device.
LEND_S: Final = 2.0


class _Found(NamedTuple):
    """Cached pages that are held by that loan, and the marks by which they are known to be cached still."""

    prefix: PrefixCache
    pages: tuple[int, ...]
    marks: tuple[object, ...]
    loan: int


class Lending:
    """Cached pages of every model of a node."""

    def __init__(
        self, device: DeviceThread, scarcity: Scarcity, xtensor: XTensor, table: str, grants: Grants,
        term: Callable[[], int],
    ) -> None:  # fmt: skip
        """table is the name of the kernels that wrote the pages, term() that of whoever leads."""
        self._device, self._scarcity, self._xtensor = device, scarcity, xtensor
        self._table, self._grants, self._term = table, grants, term

    def able(self, model: str) -> bool:
        """True while what is computed of the model is cached here."""
        batcher = self._scarcity.batcher(model)
        return batcher is not None and batcher.limits.prefix_caching

    async def lend(self, opened: OpenedModel, request: Request, lend: Lend, reader: str) -> Lent | None:
        """What the node `reader` may read of a prompt that was computed here; None where nothing of it is cached."""
        found = await ended(asyncio.wrap_future(self._device.ask(lambda: self._find(request, lend.first))))
        if found is None:
            return None
        try:
            return await self._granted(opened, lend, reader, found)
        except BaseException:
            self._end(found.loan)
            raise

    async def _granted(self, opened: OpenedModel, lend: Lend, reader: str, found: _Found) -> Lent | None:
        page_bytes = self._xtensor.page_bytes
        parts = [self._xtensor.slab[page * page_bytes : (page + 1) * page_bytes] for page in found.pages]
        digest = await ended(asyncio.get_running_loop().run_in_executor(None, sampled_digest_of, parts))
        layout, size_bytes = kv_words(opened, self._table, page_bytes), len(found.pages) * page_bytes
        offer = Offer(
            layout=layout, checkpoint=checkpoint_of(opened), size_bytes=size_bytes, pages=found.pages, digest=digest
        )
        lasts_s, loans = LEND_S + size_bytes / SLOWEST_BYTES_PER_S, self._scarcity.loans
        grant = self._grants.issue(
            reader, lend.incarnation, opened.name, offer, lasts_s, self._term(),
            lambda: loans.stands(found.loan) and found.prefix.still(found.pages, found.marks),
            lambda: self._end(found.loan),
        )  # fmt: skip
        if isinstance(grant, Denial):
            self._end(found.loan)
            return None
        asyncio.get_running_loop().call_later(lasts_s, self._end, found.loan)  # where nobody comes for it
        return Lent(grant.id, layout, lend.first, len(found.pages))

    def _end(self, loan: int) -> None:
        """Twice does no harm."""
        if self._scarcity.loans.stands(loan):
            self._device.ask(lambda: self._scarcity.loans.end(loan))

    def _find(self, request: Request, first: int) -> _Found | None:
        """On the device thread."""
        batcher = self._scarcity.batcher(request.model)
        if batcher is None:
            return None
        match = batcher.prefix.match(request.prompt, len(request.prompt), request.tenant)
        pages = match.pages[first:]
        if match.partial is not None:
            batcher.kv.drop(match.partial)
        loan = self._scarcity.loans.hold(batcher, match.pages)
        if not pages:
            self._scarcity.loans.end(loan)
            return None
        return _Found(batcher.prefix, pages, batcher.prefix.marks(pages), loan)
