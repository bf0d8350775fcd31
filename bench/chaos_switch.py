"""A network between namespaces that can be cut, slowed down and made to lose frames: `chaos_net` starts it.

As a program: `chaos_switch PORT…`, each `NAME=NAMESPACE=ADDRESS/BITS`, where an empty namespace is the one it runs in.
It makes a TAP device for each and carries Ethernet frames between them as a switch does. A line of JSON on stdin is a
new `Weather`; it is answered with a line. It ends with its stdin, and all devices with it. Wants CAP_NET_ADMIN.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

_TUNSETIFF: Final = 0x400454CA
_TAP_NO_HEADER: Final = 0x0002 | 0x1000
_FRAME_BYTES: Final = 2048
_ADDRESS_BYTES: Final = 6


class Weather(NamedTuple):
    """cut: pairs of ports that do not reach each other. The rest is of frames between ports of `slow`: how late they
    are, give or take jitter_s, and the share that is lost."""

    cut: frozenset[frozenset[str]] = frozenset()
    slow: frozenset[str] = frozenset()
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


class Switch:
    """The devices, by number of their ports."""

    def __init__(self, ports: Sequence[tuple[str, str, str]]) -> None:
        self._names = [name for name, _, _ in ports]
        self._files = [_open(f"chaos{os.getpid() % 100_000}x{i}", *port[1:]) for i, port in enumerate(ports)]
        self._learnt: dict[bytes, int] = {}
        self._weather = Weather()
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Until stdin ends."""
        poll = selectors.DefaultSelector()
        poll.register(sys.stdin.fileno(), selectors.EVENT_READ, -1)
        for number, file in enumerate(self._files):
            poll.register(file, selectors.EVENT_READ, number)
        print("ready", flush=True)
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in poll.select(wait_s):
                if key.data >= 0:
                    self._take(key.data)
                elif not (line := os.read(sys.stdin.fileno(), 65536)):
                    return
                else:
                    self._weather = _weather(line)
                    print("changed", flush=True)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(self._late)
                self._put(to, frame)

    def _take(self, number: int) -> None:
        """Everything that has come there."""
        while True:
            try:
                frame = os.read(self._files[number], _FRAME_BYTES)
            except BlockingIOError:
                return
            self._learnt[frame[_ADDRESS_BYTES : 2 * _ADDRESS_BYTES]] = number
            known = self._learnt.get(frame[:_ADDRESS_BYTES])
            for to in range(len(self._files)) if known is None else (known,):
                if to != number:
                    self._carry(number, to, frame)

    def _carry(self, number: int, to: int, frame: bytes) -> None:
        weather, ends = self._weather, (self._names[number], self._names[to])
        if frozenset(ends) in weather.cut:
            return
        if not weather.slow.issuperset(ends):
            self._put(to, frame)
        elif random.random() >= weather.loss:
            late_s = weather.delay_s + random.uniform(-weather.jitter_s, weather.jitter_s)
            heapq.heappush(self._late, (time.monotonic() + late_s, next(self._numbers), to, frame))

    def _put(self, to: int, frame: bytes) -> None:
        try:
            os.write(self._files[to], frame)
        except OSError:  # a full queue or a device that is down loses it, as a real one does
            pass


def _weather(line: bytes) -> Weather:
    said = json.loads(line)
    cut = frozenset(frozenset(pair) for pair in said.pop("cut", ()))
    return Weather(cut, frozenset(said.pop("slow", ())), **said)


def _open(device: str, namespace: str, address: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP_NO_HEADER))
    into = ["-n", namespace] if namespace else []
    if namespace:
        _ip("link", "set", device, "netns", namespace)
        _ip(*into, "link", "set", "lo", "up")
    _ip(*into, "addr", "add", address, "dev", device)
    _ip(*into, "link", "set", device, "up")
    return file


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    fields = [word.split("=") for word in sys.argv[1:]]
    Switch([(field[0], field[1], field[2]) for field in fields]).run()
