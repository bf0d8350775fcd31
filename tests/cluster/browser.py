"""A headless Chromium that tests drive over its DevTools socket: what it shows, fetches and complains of."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")


def installed() -> str:
    """A Chromium's path; the test is skipped where there is none."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is installed")


class Browser:
    """`async with Browser(profile) as browser:` has one empty page. What the page complains of is in `complaints`."""

    def __init__(self, profile: Path) -> None:
        self._command = [
            installed(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._port_file = profile / "DevToolsActivePort"
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.fetched: list[str] = []

    async def __aenter__(self) -> Browser:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        self._http = aiohttp.ClientSession()
        try:
            end = time.monotonic() + 60
            while not (self._port_file.exists() and "\n" in self._port_file.read_text()):
                assert self._process.returncode is None and time.monotonic() < end, "Chromium did not start"
                await asyncio.sleep(0.05)
            port = self._port_file.read_text().split()[0]
            async with self._http.get(f"http://127.0.0.1:{port}/json/list") as reply:
                page = next(one for one in await reply.json() if one["type"] == "page")
            self._socket = await self._http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
            self._reader = asyncio.create_task(self._read())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await self.call(f"{domain}.enable")
            await self.size(1200, 1000)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._end()

    async def _end(self) -> None:
        await self._http.close()
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if (number := said.get("id")) is not None:
                self._waiting.pop(number).set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, method: str, said: dict[str, Any]) -> None:
        """What the page did or complained of by itself."""
        match method:
            case "Network.requestWillBeSent":
                self.fetched.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                details = said["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(f"console.{said['type']}: {[one.get('value') for one in said['args']]}")
            case "Log.entryAdded":
                self.complaints.append(f"{said['entry']['source']}: {said['entry']['text']}")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(60):
            said = await answer
        assert "error" not in said, f"{method}: {said}"
        return dict(said["result"])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def run(self, expression: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        said = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, f"{expression}: {said['exceptionDetails']}"
        return said["result"].get("value")

    async def until(self, expression: str, limit_s: float = 60.0) -> Any:
        """What the expression says once that is true."""
        return await self.when(lambda: self.run(expression), expression, limit_s)

    async def when(self, check: Callable[[], Awaitable[Any]], what: str, limit_s: float = 60.0) -> Any:
        end = time.monotonic() + limit_s
        while not (found := await check()):
            shown = await self.run("document.body ? document.body.innerText : ''")
            assert time.monotonic() < end, f"not within {limit_s} s: {what}\n{self.complaints}\n{shown}"
            await asyncio.sleep(0.1)
        return found

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def texts(self, selector: str) -> list[str]:
        return list(await self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((n) => n.textContent)"))

    async def type(self, selector: str, text: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str, text: str = "") -> None:
        """Press the first that is meant, or the first of them with that text, with a real mouse."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        meant = f"{found}.find((n) => n.offsetParent && (!{json.dumps(text)} || n.textContent === {json.dumps(text)}))"
        await self.until(f"Boolean({meant})")
        spot = await self.run(
            f"(() => {{ const n = {meant}; n.scrollIntoView({{ block: 'center' }});"
            " const b = n.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", clickCount=1)

    async def size(self, width: int, height: int, *, phone: bool = False, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    async def colours(self, scheme: str) -> None:
        """ "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(said["data"]))

    def elsewhere(self, url: str) -> list[str]:
        """What was fetched from anywhere but the server at `url`."""
        kinds = ("data:", "about:", "blob:")
        return [
            one for one in self.fetched if urlsplit(one).netloc != urlsplit(url).netloc and not one.startswith(kinds)
        ]
