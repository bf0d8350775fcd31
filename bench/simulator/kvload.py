"""How much KV the requests of a replica hold, as a policy can know it that is told of prompts and of sums.

`blitzscale` and `llumnix` decide by it. Neither is told what each request holds: its prompt is known, its answer is
half of the mean one. The world knows better; no imitation may ask it.
"""

from __future__ import annotations

from collections.abc import Mapping

from janus_server.orders import Counted

from .replicas import Replica

BLOCK_TOKENS = 16


class KvLoad:
    """room_tokens by model: the tokens whose KV one replica has room for."""

    def __init__(self, room_tokens: Mapping[str, float]) -> None:
        self._room_tokens = room_tokens
        self._answer_tokens: dict[str, float] = {}

    def counted(self, event: Counted) -> None:
        for model, counts in event.models.items():
            if counts.ended:
                self._answer_tokens[model] = counts.output_tokens / counts.ended

    def room_tokens(self, model: str) -> float:
        return max(1.0, self._room_tokens[model])

    def tokens(self, replica: Replica) -> float:
        return replica.tokens + replica.running * self._answer_tokens.get(replica.model, 0.0) / 2.0

    def freeness(self, replica: Replica) -> float:
        """Blocks free for each of its requests; those that wait in its engine count as what they ask for.

        Example: room for 16,000 tokens, 10 requests that hold 8,000 together: 500 blocks free, 50 for each.
        """
        free = self.room_tokens(replica.model) - self.tokens(replica)
        return free / BLOCK_TOKENS / max(1, replica.running)
