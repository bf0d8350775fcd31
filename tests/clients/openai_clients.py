"""openai-python's two clients behind one face, and a record of every HTTP request that they made.

For tests that want the same behaviour from the synchronous and the asynchronous client.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import httpx
import openai

KINDS = ("sync", "async")


class Recorded:
    """A client of one kind; `run` makes one call with it, `seen` holds the replies it met, retries included."""

    def __init__(self, kind: str, base_url: str, **options: Any) -> None:
        self.kind = kind
        self.seen: list[httpx.Response] = []
        self._options = {"base_url": base_url, "api_key": "unused", "timeout": 60.0, **options}

    @property
    def statuses(self) -> list[int]:
        return [reply.status_code for reply in self.seen]

    def run(self, call: Callable[[Any], Any]) -> Any:
        """`call` gets an OpenAI or AsyncOpenAI client; what it returns is awaited where that is due."""
        if self.kind == "async":
            return asyncio.run(self._run(call))
        with httpx.Client(event_hooks={"response": [self.seen.append]}) as http:
            return call(openai.OpenAI(http_client=http, **self._options))

    async def _run(self, call: Callable[[Any], Any]) -> Any:
        async def see(reply: httpx.Response) -> None:
            self.seen.append(reply)

        async with httpx.AsyncClient(event_hooks={"response": [see]}) as http:
            result = call(openai.AsyncOpenAI(http_client=http, **self._options))
            return await result if inspect.isawaitable(result) else result


def chat(api: Any, text: str = "the quick brown fox", **more: Any) -> Any:
    """One chat call to `tiny` that ends after 8 tokens unless `more` says otherwise."""
    given = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
    return api.chat.completions.create(**given)


def complete(api: Any, prompt: Any = "the quick brown fox", **more: Any) -> Any:
    """One completion by `tiny`, of 8 tokens unless `more` says otherwise."""
    return api.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 8, **more})
