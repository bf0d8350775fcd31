"""A node of the coordinator's tests: a process that joins, stands for election, and tells what it sees and does.

Run by `node_process`. It writes one JSON object a line. Every 10 ms in which it may lead it says so, with a time taken
before it asked for the right: the clock is that of the whole machine, so that a test can compare processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from janus_server.coordinator.address import open_coordinator
from janus_server.coordinator.base import Session, boot_clock
from janus_server.coordinator.records import Member
from janus_server.errors import BadConfig


def say(**what: object) -> None:
    os.write(1, (json.dumps({"at": boot_clock(), **what}) + "\n").encode())


async def tell(session: Session) -> None:
    async for change in session.observe():
        say(change=type(change).__name__, what=str(change), term=getattr(change, "term", None))


async def act(session: Session) -> None:
    while True:
        asked_s = boot_clock()
        held = session.leadership()
        if held is not None:
            say(acts=held.term, asked=asked_s, until=held.until_s)
        await asyncio.sleep(0.01)


async def main(where: str, name: str, lease_s: str) -> None:
    member = Member(name=name, incarnation=os.urandom(6).hex(), url=f"ws://127.0.0.1/{os.getpid()}")
    try:
        session = await open_coordinator(where, lease_s=float(lease_s)).join(member)
    except BadConfig as error:
        say(refused=str(error))
        sys.exit(2)
    say(joined=member.incarnation)
    session.campaign()
    asyncio.get_running_loop().add_reader(0, lambda: os.read(0, 1) or sys.exit(0))
    await asyncio.gather(tell(session), act(session))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
