"""The keys of one cluster in etcd: what is asked about them, and a copy of them as they were at one revision.

`etcd` owns one. `<prefix>leader` is the leader's place, `<prefix>members/<name>` one registration each, all in JSON.
Keys and values of others are never trusted: what cannot be read belongs to no node. No input, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from janus_server.coordinator.gateway import KeyValue, Range, Watched, coded
from janus_server.coordinator.lease import Seat
from janus_server.coordinator.records import (
    MOST_MEMBERS,
    Leader,
    Member,
    check_name,
    read_member,
    write_member,
)

# Somebody wrote the leader's place by hand: nobody can lead until it is removed.
_UNKNOWN: Final = Leader("?", "?")

Ask = Mapping[str, Any]


class Keys:
    """The copy changes through `replace` and `apply` only."""

    def __init__(self, cluster: str) -> None:
        self.prefix = f"/janus/{check_name('the name of a cluster', cluster)}/".encode()
        # The first key after all that begin with the prefix: "0" follows "/".
        self.end = self.prefix[:-1] + b"0"
        self._leader = self.prefix + b"leader"
        self._members = self.prefix + b"members/"
        self._kvs: dict[bytes, KeyValue] = {}

    # Questions for the gateway.

    def everything(self) -> Ask:
        return {"key": coded(self.prefix), "range_end": coded(self.end), "limit": str(MOST_MEMBERS + 1)}

    def enter(self, member: Member, lease: int) -> Ask:
        """Register, unless the name is taken: then what has it."""
        key = self._members + member.name.encode()
        return {
            "compare": [{"target": "CREATE", "key": coded(key), "create_revision": "0"}],
            "success": [_put(key, write_member(member), lease)],
            "failure": [{"request_range": {"key": coded(key)}}],
        }

    def enter_over(self, member: Member, lease: int, there: KeyValue) -> Ask:
        """Register in place of what is there, if it still is."""
        key = self._members + member.name.encode()
        return {
            "compare": [{"target": "MOD", "key": coded(key), "mod_revision": str(there.mod_revision)}],
            "success": [_put(key, write_member(member), lease)],
        }

    def take_seat(self, own: Leader, lease: int, registered_at: int) -> Ask:
        """Lead, if nobody does and the registration made at that revision still stands."""
        key = self._members + own.name.encode()
        return {
            "compare": [
                {"target": "CREATE", "key": coded(self._leader), "create_revision": "0"},
                {"target": "MOD", "key": coded(key), "mod_revision": str(registered_at)},
            ],
            "success": [_put(self._leader, msgspec.json.encode(own), lease)],
        }

    def leave_seat(self, own: Leader) -> Ask:
        """Give the place back, if it is this node's."""
        value = coded(msgspec.json.encode(own))
        return {
            "compare": [{"target": "VALUE", "key": coded(self._leader), "value": value}],
            "success": [{"request_delete_range": {"key": coded(self._leader)}}],
        }

    # The copy.

    def replace(self, found: Range) -> None:
        self._kvs = {kv.key: kv for kv in found.kvs}

    def apply(self, news: Watched) -> int | None:
        """The revision that the copy is of now; None where nothing happened.

        Not the header's revision: a server that catches up sends that of its store with events that are older.
        """
        for event in news.events:
            if event.type == "DELETE":
                self._kvs.pop(event.kv.key, None)
            elif event.kv.key in self._kvs or len(self._kvs) <= MOST_MEMBERS:
                self._kvs[event.kv.key] = event.kv
        return max((event.kv.mod_revision for event in news.events), default=None)

    def seat(self) -> Seat:
        kv = self._kvs.get(self._leader)
        if kv is None:
            return Seat()
        try:
            holder = msgspec.json.decode(kv.value, type=Leader)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            holder = _UNKNOWN
        return Seat(kv.create_revision, holder)

    def members(self) -> tuple[Member, ...]:
        """Ordered by name."""
        found = (self.member_of(self._kvs[key]) for key in sorted(self._kvs) if key.startswith(self._members))
        return tuple(member for member in found if member is not None)

    def has(self, name: str) -> bool:
        """Whether there is a registration under this name, of whomever."""
        return self._members + name.encode() in self._kvs

    def member_of(self, kv: KeyValue) -> Member | None:
        name = kv.key.removeprefix(self._members)
        return read_member(kv.value, name.decode()) if name.isascii() else None


def _put(key: bytes, value: bytes, lease: int) -> dict[str, Any]:
    return {"request_put": {"key": coded(key), "value": coded(value), "lease": str(lease)}}
