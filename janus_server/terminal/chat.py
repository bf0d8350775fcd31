"""`janus chat`: a conversation in the terminal with a running server, or one question and its answer.

Called by `cli`. It speaks the public HTTP API only (so any OpenAI-compatible server will do) and knows nothing of
the engine. What a model writes reaches the terminal without control characters, so no answer can move the cursor or
retitle the window.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from janus_server import units
from janus_server.suggest import nearest


class ChatOptions(msgspec.Struct, frozen=True):
    """What the command line asked for; model None takes the server's first. key is the server's API key, if any."""

    url: str
    model: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    prompt: str | None = None
    key: str | None = None


class Failed(Exception):
    """The server could not be reached or refused; the sentence is for the user."""


class Piece(msgspec.Struct, frozen=True):
    """One event of an answer: text to show, and the number of tokens once the server has told it."""

    text: str = ""
    completion_tokens: int | None = None


# The parts of the server's JSON that a conversation needs; everything else in it is ignored.


class _Error(msgspec.Struct):
    message: str


class _DeltaText(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _DeltaText


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Listed(msgspec.Struct):
    data: list[_Model]


class Answer:
    """An answer as it grows. It outlives a Ctrl-C, so that what was already said stays in the conversation."""

    def __init__(self) -> None:
        self.text = ""
        self.completion_tokens: int | None = None
        self._asked_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s: float | None = None

    def add(self, piece: Piece) -> None:
        if piece.text:
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s
            self.text += piece.text
        if piece.completion_tokens is not None:
            self.completion_tokens = piece.completion_tokens

    def summary(self) -> str:
        """Tokens, tokens per second after the first, and the wait for the first."""
        if self._first_s is None or self._last_s is None:
            return ""
        wait = f"first after {units.format_seconds(self._first_s - self._asked_s)}"
        spent_s = self._last_s - self._first_s
        if not self.completion_tokens:
            return wait
        count = f"{self.completion_tokens} token{'s' if self.completion_tokens != 1 else ''}"
        if self.completion_tokens < 2 or spent_s <= 0:
            return f"{count} · {wait}"
        return f"{count} · {(self.completion_tokens - 1) / spent_s:.1f} tokens/s · {wait}"


_HELP: Final = """\
/model [NAME]   show the served models, or change to one
/clear          forget the conversation
/save FILE      write the conversation (.json: as messages; else as text)
/help           this list
/quit           leave (so does Ctrl-D)
Ctrl-C stops an answer. \"\"\" begins and ends a text of several lines."""
_COMMANDS: Final = ("/model", "/clear", "/save", "/help", "/quit")
# What a broken, foreign or absent server can raise: a host label too long is a UnicodeError, an endless line the third.
_NO_ANSWER: Final = (
    aiohttp.ClientError, UnicodeError, aiohttp.http.HttpProcessingError, TimeoutError, msgspec.MsgspecError,
)  # fmt: skip
# C0 and C1 control characters but for newline and tab.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def run(options: ChatOptions) -> int:
    """Answer once when there is a prompt or piped text, else converse. 0: done, 1: no answer, 130: interrupted."""
    url = options.url if "://" in options.url else f"http://{options.url}"
    options = msgspec.structs.replace(options, url=url.rstrip("/").removesuffix("/v1"))
    for stream in (sys.stdin, sys.stdout):  # what the terminal's encoding cannot say is shown as "?", not fatal
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    try:
        models = asyncio.run(_models(options))
        model = _pick(models, options.model)
        if options.prompt is not None or not sys.stdin.isatty():
            question = "\n\n".join(part for part in (options.prompt, piped.strip()) if part)
            if not question:
                raise Failed("nothing to ask: the prompt and the piped text are empty")
            return _once(options, model, question)
        return Conversation(options, model, models).loop()
    except Failed as error:
        print(f"janus: {error}", file=sys.stderr)
        return 1


def _once(options: ChatOptions, model: str, question: str) -> int:
    answer = Answer()
    messages = [*_system(options), {"role": "user", "content": question}]
    asyncio.run(_show(options, model, messages, answer))
    print(flush=True)
    if sys.stderr.isatty():
        _dim(answer.summary(), sys.stderr)
    return 0


class Conversation:
    """The loop at the terminal: it owns the messages so far and the model in use."""

    def __init__(self, options: ChatOptions, model: str, models: list[str]) -> None:
        self._options = options
        self._model = model
        self._models = models
        self._messages: list[dict[str, str]] = _system(options)

    def loop(self) -> int:
        _dim(f"{self._model} at {self._options.url} · /help lists commands, Ctrl-D leaves", sys.stdout)
        # Importing readline gives input() line editing and history.
        import readline  # noqa: F401

        while True:
            try:
                text = _read_turn()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                _dim("Ctrl-D or /quit leaves", sys.stdout)
                continue
            if text == "/quit":
                return 0
            if text.startswith("/") and "\n" not in text:
                self._command(text)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        answer = Answer()
        asked = [*self._messages, {"role": "user", "content": text}]
        stopped = ""
        try:
            asyncio.run(_show(self._options, self._model, asked, answer))
        except KeyboardInterrupt:
            # asyncio.run has cancelled the request and closed its connection, which aborts it on the server.
            stopped = "stopped · "
        except Failed as error:
            print(f"janus: {error}", file=sys.stderr)
            return
        print()
        _dim(stopped + answer.summary(), sys.stdout)
        if answer.text:
            self._messages = [*asked, {"role": "assistant", "content": answer.text}]

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        match name, argument.strip():
            case "/help", _:
                print(_HELP)
            case "/clear", _:
                self._messages = _system(self._options)
                _dim("forgotten", sys.stdout)
            case "/model", "":
                print("\n".join(f"{'*' if model == self._model else ' '} {model}" for model in self._models))
            case "/model", wanted:
                try:
                    self._models = asyncio.run(_models(self._options))
                    self._model = _pick(self._models, wanted)
                except Failed as error:
                    print(f"janus: {error}", file=sys.stderr)
            case "/save", "":
                print("janus: /save takes a file name", file=sys.stderr)
            case "/save", file:
                _save(Path(file).expanduser(), self._messages)
            case _:
                print(f"janus: there is no command {name}{nearest(name, _COMMANDS)}", file=sys.stderr)


def _read_turn() -> str:
    """One question: a line, or the lines between two \"\"\"."""
    text = input("> ")
    if not text.lstrip().startswith('"""'):
        return text.strip()
    lines = [text.lstrip()[3:]]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(input(". "))
    lines[-1] = lines[-1].rstrip()[:-3]
    return "\n".join(lines).strip()


async def _show(options: ChatOptions, model: str, messages: list[dict[str, str]], answer: Answer) -> None:
    async for piece in _stream(options, model, messages):
        answer.add(piece)
        sys.stdout.write(_printable(piece.text))
        sys.stdout.flush()


async def _stream(options: ChatOptions, model: str, messages: list[dict[str, str]]) -> AsyncIterator[Piece]:
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    body["stream_options"] = {"include_usage": True}
    body |= {"temperature": options.temperature} if options.temperature is not None else {}
    body |= {"max_tokens": options.max_tokens} if options.max_tokens is not None else {}
    try:
        async with _session(options) as http, http.post(f"{options.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise Failed(_refusal(await response.read(), response.status))
            async for line in response.content:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield _piece(data)
    except _NO_ANSWER as error:
        raise _unreachable(options.url, error) from None
    raise Failed("the server closed the connection before the answer was complete")


def _piece(data: bytes) -> Piece:
    event = msgspec.json.decode(data, type=_Event)
    if event.error is not None:
        raise Failed(_printable(event.error.message))
    text = (event.choices[0].delta.content or "") if event.choices else ""
    return Piece(text, event.usage.completion_tokens if event.usage else None)


async def _models(options: ChatOptions) -> list[str]:
    url = options.url
    try:
        async with _session(options) as http, http.get(f"{url}/v1/models") as response:
            if response.status != 200:
                raise Failed(_refusal(await response.read(), response.status))
            return [model.id for model in msgspec.json.decode(await response.read(), type=_Listed).data]
    except _NO_ANSWER as error:
        raise _unreachable(url, error) from None


def _session(options: ChatOptions) -> aiohttp.ClientSession:
    # No total limit: an answer may take long. Long single events are legal, hence the buffer.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    return aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20, headers=headers)


def _pick(models: list[str], wanted: str | None) -> str:
    if not models:
        raise Failed("the server serves no model yet; wait until its /ready answers 200")
    if wanted is None:
        return models[0]
    if wanted not in models:
        raise Failed(f"the server has no model {wanted!r}{nearest(wanted, models)}; it serves: {', '.join(models)}")
    return wanted


def _unreachable(url: str, error: Exception) -> Failed:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Failed(f"no server answers at {url}; start one with: janus serve")
    if isinstance(error, aiohttp.InvalidURL):
        return Failed(f"{url} is not a URL, such as http://127.0.0.1:8000")
    return Failed(f"{url} does not answer like an OpenAI-compatible server ({type(error).__name__}: {error})")


def _refusal(body: bytes, status: int) -> str:
    """The message of an OpenAI error body, or the status when there is none."""
    try:
        error = msgspec.json.decode(body, type=_Event).error
    except msgspec.MsgspecError:
        error = None
    return _printable(error.message) if error else f"the server answered with status {status}"


def _printable(text: str) -> str:
    return _CONTROL.sub("", text)


def _system(options: ChatOptions) -> list[dict[str, str]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _save(file: Path, messages: list[dict[str, str]]) -> None:
    if file.suffix == ".json":
        text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
    else:
        text = "".join(f"{message['role']}:\n{message['content']}\n\n" for message in messages)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"janus: cannot write {file}: {error.strerror}", file=sys.stderr)
        return
    _dim(f"{len(messages)} messages written to {file}", sys.stdout)


def _dim(text: str, stream: Any) -> None:
    """A quiet line; styled only on a terminal (rich knows NO_COLOR and dumb terminals)."""
    if not text:
        return
    if not stream.isatty():
        print(text, file=stream)
        return
    from rich.console import Console

    Console(file=stream, highlight=False, markup=False).print(text, style="dim", soft_wrap=True)
