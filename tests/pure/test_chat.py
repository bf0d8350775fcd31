"""`janus chat` against a real HTTP server that answers as the API does, through pipes and through a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from janus_server.terminal.chat import Answer, ChatOptions, Piece, run

ROOT = Path(__file__).resolve().parents[2]


def janus(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "janus_server", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


class Upstream:
    """A small OpenAI-compatible server on its own thread: it records what it was asked and answers from a script."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.events: list[bytes] = []
        self.status = 200
        self.url = ""
        self.hangs = False
        self.left = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Upstream:
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)])
        runner = web.AppRunner(app, handler_cancellation=True)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "temperature: at most 2"}}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(event)
        if self.hangs:
            try:
                await asyncio.sleep(60)
            finally:
                self.left.set()
        return response


def say(*pieces: str, tokens: int = 3) -> list[bytes]:
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    events += [{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}}]
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        yield server


@pytest.fixture
def closed_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))


@pytest.mark.usefixtures("closed_stdin")
def test_one_question_is_streamed_to_stdout(upstream: Upstream, capsys: pytest.CaptureFixture[str]) -> None:
    upstream.events = [b": ping\n\n", *say("Par", "is", ".\x1b[2J\n")]
    options = ChatOptions(url=f"{upstream.url}/v1", system="Short.", temperature=0.0, max_tokens=9, prompt="Capital?")
    assert run(options) == 0
    # The escape character is gone: what a model writes cannot drive the terminal.
    assert capsys.readouterr() == ("Paris.[2J\n\n", "")
    assert upstream.asked == [
        {
            "model": "first",
            "messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Capital?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "max_tokens": 9,
        }
    ]


def test_piped_text_follows_the_prompt(upstream: Upstream) -> None:
    upstream.events = say("ok")
    done = janus("chat", "--url", upstream.url, "--model", "second", "Explain", "this", text="a = 1\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    assert upstream.asked[0]["model"] == "second"
    assert upstream.asked[0]["messages"] == [{"role": "user", "content": "Explain this\n\na = 1"}]


@pytest.mark.usefixtures("closed_stdin")
@pytest.mark.parametrize(
    ("status", "events", "expected"),
    [
        (400, [], "temperature: at most 2"),
        (200, [b'data: {"error": {"message": "the model was unloaded"}}\n\n'], "the model was unloaded"),
        (200, [b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'], "closed the connection before"),
        (200, [b"data: {broken\n\n"], "does not answer like"),
    ],
)
def test_answers_that_fail_say_why_and_exit_with_one(
    status: int, events: list[bytes], expected: str, upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.status, upstream.events = status, events
    assert run(ChatOptions(url=upstream.url, prompt="x")) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("closed_stdin")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ChatOptions(url="http://127.0.0.1:9", prompt="x"), "start one with: janus serve"),
        (ChatOptions(url="nonsense", prompt="x"), "no server answers at http://nonsense"),
    ],
)
def test_without_a_server_the_remedy_is_shown(
    options: ChatOptions, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(options) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("closed_stdin")
def test_an_unknown_model_and_an_empty_question_are_refused(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ChatOptions(url=upstream.url, model="secnd", prompt="x")) == 1
    assert 'did you mean "second"' in capsys.readouterr().err
    assert run(ChatOptions(url=upstream.url)) == 1
    assert "nothing to ask" in capsys.readouterr().err


def test_the_summary_counts_what_the_server_counted() -> None:
    answer = Answer()
    assert answer.summary() == ""
    answer.add(Piece("a"))
    answer.add(Piece("b"))
    answer.add(Piece("", completion_tokens=2))
    assert answer.text == "ab"
    assert answer.summary().startswith("2 tokens · ")
    assert "tokens/s" in answer.summary()


class Terminal:
    """`janus chat` in a pseudo-terminal: type into it, wait for what it shows."""

    def __init__(self, *arguments: str) -> None:
        self._shown = ""
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "janus_server", "chat", *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True, preexec_fn=_own_terminal
        )
        os.close(slave)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> str:
        """What was shown up to and with `text`; fails with what came instead when it does not come."""
        while text not in self._shown:
            ready, _, _ = select.select([self._master], [], [], 30)
            if not ready:
                self.process.kill()
                pytest.fail(f"{text!r} did not come; shown: {self._shown!r}")
            self._shown += os.read(self._master, 65536).decode()
        before, _, self._shown = self._shown.partition(text)
        return before + text

    def close(self) -> int:
        code = self.process.wait(30)
        os.close(self._master)
        return code


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_conversation_remembers_and_its_commands_work(upstream: Upstream, tmp_path: Path) -> None:
    upstream.events = say("Paris")
    terminal = Terminal("--url", upstream.url)
    terminal.wait_for("> ")
    terminal.type("Capital?\n")
    assert "3 tokens" in terminal.wait_for("first after")
    terminal.wait_for("> ")
    terminal.type("/model second\n")
    terminal.wait_for("> ")
    terminal.type("And now?\n")
    terminal.wait_for("first after")
    terminal.type(f"/save {tmp_path}/talk.json\n")
    terminal.wait_for("4 messages written")
    terminal.type("/sav x\n")
    terminal.wait_for('did you mean "/save"')
    terminal.type("/clear\n")
    terminal.wait_for("forgotten")
    # Ctrl-D means the end only once the line editor reads again.
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    talk = [("user", "Capital?"), ("assistant", "Paris"), ("user", "And now?"), ("assistant", "Paris")]
    assert [(m["role"], m["content"]) for m in json.loads((tmp_path / "talk.json").read_text())] == talk
    assert [asked["model"] for asked in upstream.asked] == ["first", "second"]
    assert [message["content"] for message in upstream.asked[1]["messages"]] == ["Capital?", "Paris", "And now?"]


def test_ctrl_c_stops_the_answer_and_the_request_but_not_the_conversation(upstream: Upstream) -> None:
    upstream.events, upstream.hangs = say("half an answer")[:1], True
    terminal = Terminal("--url", upstream.url)
    terminal.wait_for("> ")
    terminal.type("Tell me\n")
    terminal.wait_for("half an answer")
    terminal.type("\x03")
    terminal.wait_for("stopped")
    # The server saw the connection go: the request is aborted there, not left running.
    assert upstream.left.wait(30)
    terminal.wait_for("> ")
    upstream.events, upstream.hangs = say("more"), False
    terminal.type("Go on\n")
    terminal.wait_for("first after")
    terminal.type("/quit\n")
    assert terminal.close() == 0
    assert [message["content"] for message in upstream.asked[1]["messages"]] == ["Tell me", "half an answer", "Go on"]
