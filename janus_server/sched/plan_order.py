"""In which order replicas rise and go so that no device runs out of pages and no model out of replicas. Pure.

`plan` says what rises and what goes; the answer is one order of all of it, with detours over spare devices where
replicas stand in each other's way, and stops where nothing else helps. Where few things touch each other it searches
until it finds an order or has tried them all; where many do, it takes the first that fits and does not go back.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

# Things that touch each other, up to which all orders are tried; states that are looked at for these, and for a plan.
_FEW: Final = 16
_STATES: Final = 3000
_ALL_STATES: Final = 20_000
# Detours in one search, and devices that one may go to.
_DETOURS: Final = 2
_SPARES: Final = 8


class Piece(NamedTuple):
    """A replica as the order sees it: pages on each of its devices.

    serving: it counts among those that serve its model. after: replicas of the same model on the same devices, which
    must be gone first.
    """

    model: str
    devices: tuple[str, ...]
    pages: int
    serving: bool = True
    after: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return self.model, self.devices


class Task(NamedTuple):
    """What has to happen, the most important first.

    serving: replicas of each model that serve; floor: those that it may not fall below. cost: what stopping one is
    worth avoiding, the least first. free are pages of all devices, homes those of each model, now and in the end.
    """

    rising: Sequence[Piece]
    going: Sequence[Piece]
    serving: Mapping[str, int]
    floor: Mapping[str, int]
    cost: Mapping[str, tuple[float, ...]]
    free: Mapping[str, int]
    homes: Mapping[str, frozenset[str]]


class Turn(NamedTuple):
    """One thing of the order: a replica rises or goes. detour: for the time being; stopped: below its model's floor."""

    rises: bool
    piece: Piece
    detour: bool = False
    stopped: bool = False


def order(task: Task) -> list[Turn]:
    """Everything that goes and all that can rise, each once, and detours. What goes for nobody's sake comes last."""
    board = _Board(task, task.free, task.serving, task.floor, {piece.key for piece in task.going})
    turns: list[Turn] = []
    last: list[Turn] = []
    states = _ALL_STATES
    for rising, going in _parts(task):
        greedy = _Greedy(board, rising, going)
        if greedy.run(detours=False):
            done, rest = greedy.turns, greedy.rest()
        else:
            greedy.undo()
            budget = _Budget(min(_STATES, states))
            found = _search(board, rising, going, budget) if len(rising) + len(going) <= _FEW else None
            states -= budget.spent
            if found is not None:
                done, rest = found
                for turn in done:
                    board.play(turn)
            else:
                greedy = _Greedy(board, rising, going)
                greedy.run(detours=True)
                done, rest = greedy.turns, greedy.rest()
        back = [turn for turn in rest if turn.detour]
        for turn in back:
            board.play(turn)
        turns += done + back
        last += [turn for turn in rest if not turn.detour]
    return turns + last


class _Board:
    """Pages, replicas that serve, and who stands where, at one moment of the order."""

    def __init__(
        self,
        task: Task,
        free: Mapping[str, int],
        serving: Mapping[str, int],
        floor: Mapping[str, int],
        standing: set[tuple[str, tuple[str, ...]]],
    ) -> None:
        self.task, self.cost, self.homes = task, task.cost, task.homes
        self.free = dict(free)
        self.serving = defaultdict(int, serving)
        self.floor = dict(floor)
        self.standing = set(standing)

    def copy(self) -> _Board:
        return _Board(self.task, self.free, self.serving, self.floor, self.standing)

    def lacking(self, piece: Piece) -> str | None:
        """The first device that has no room for it yet."""
        for key in piece.after:
            if key in self.standing:
                return key[1][0]
        return next((device for device in piece.devices if self.free[device] < piece.pages), None)

    def may_go(self, piece: Piece) -> bool:
        return not piece.serving or self.serving[piece.model] > self.floor.get(piece.model, 0)

    def play(self, turn: Turn) -> None:
        piece, sign = turn.piece, 1 if turn.rises else -1
        for device in piece.devices:
            self.free[device] -= sign * piece.pages
        if piece.serving:
            self.serving[piece.model] += sign
        if turn.rises:
            self.standing.add(piece.key)
        else:
            self.standing.discard(piece.key)
        if turn.stopped:
            self.floor[piece.model] = min(self.floor.get(piece.model, 0), self.serving[piece.model])

    def spares(self, piece: Piece, taken: Iterable[str] = ()) -> list[tuple[str, ...]]:
        """Sets of devices where the piece could be for the time being, those with the most room first."""
        closed = self.homes[piece.model].union(taken)
        closed |= {device for model, on in self.standing if model == piece.model for device in on}
        room = [device for device, pages in self.free.items() if pages >= piece.pages and device not in closed]
        room = heapq.nsmallest(_SPARES, room, key=lambda device: (-self.free[device], device))
        n = len(piece.devices)
        if n == 1:
            return [(device,) for device in room]
        return [tuple(room[:n])] if len(room) >= n else []


class _Greedy:
    """Whatever fits rises, most important first; what makes room for what does not fit goes as soon as it may."""

    def __init__(self, board: _Board, rising: Sequence[Piece], going: Sequence[Piece]) -> None:
        self.board, self.rising = board, rising
        self.turns: list[Turn] = []
        self.going: list[Turn] = [Turn(False, piece) for piece in going]
        self.gone = [False] * len(going)
        self.on: dict[str, list[int]] = defaultdict(list)
        self.of: dict[str, list[int]] = defaultdict(list)
        for i, piece in enumerate(going):
            self._index(i, piece)
        self.watched: dict[str, list[int]] = defaultdict(list)
        self.tries = list(range(len(rising)))
        self.helpful: list[int] = []
        self.left = len(rising)
        self.detoured: set[str] = set()

    def run(self, detours: bool) -> bool:
        """True when all that rises did. Without detours and stops it may be stuck; with them only by a wrong task."""
        self._advance()
        while self.left and detours and (self._detour() or self._stop()):
            self._advance()
        return not self.left

    def rest(self) -> list[Turn]:
        """What may go at the end."""
        return [turn for i, turn in enumerate(self.going) if not self.gone[i]]

    def undo(self) -> None:
        for turn in reversed(self.turns):
            self.board.play(turn._replace(rises=not turn.rises))

    def _index(self, i: int, piece: Piece) -> None:
        for device in piece.devices:
            self.on[device].append(i)
        self.of[piece.model].append(i)

    def _advance(self) -> None:
        while self.tries or self.helpful:
            if self.tries:
                self._try(heapq.heappop(self.tries))
                continue
            i = heapq.heappop(self.helpful)
            if not self.gone[i] and self._helps(i) and self.board.may_go(self.going[i].piece):
                self._go(i, stopped=False)

    def _try(self, r: int) -> None:
        piece = self.rising[r]
        device = self.board.lacking(piece)
        if device is not None:
            self.watched[device].append(r)
            for i in self.on[device]:
                heapq.heappush(self.helpful, i)
            return
        self._play(Turn(True, piece))
        self.left -= 1

    def _play(self, turn: Turn) -> None:
        self.board.play(turn)
        self.turns.append(turn)
        if turn.rises and turn.piece.serving:
            for i in self.of[turn.piece.model]:
                if not self.gone[i]:
                    heapq.heappush(self.helpful, i)

    def _helps(self, i: int) -> bool:
        return any(self.watched.get(device) for device in self.going[i].piece.devices)

    def _go(self, i: int, stopped: bool) -> None:
        self.gone[i] = True
        self._play(self.going[i]._replace(stopped=stopped))
        for device in self.going[i].piece.devices:
            for r in self.watched.pop(device, ()):
                heapq.heappush(self.tries, r)

    def _stuck(self) -> list[int]:
        """What stands in the way of something and may not go."""
        devices = sorted(device for device, waiting in self.watched.items() if waiting)
        return sorted({i for device in devices for i in self.on[device] if not self.gone[i]})

    def _detour(self) -> bool:
        """Put one replica that stands in the way elsewhere for the time being, the smallest first, each model once."""
        stuck = [self.going[i].piece for i in self._stuck()]
        for piece in sorted(stuck, key=lambda p: (p.pages * len(p.devices), p.key)):
            if piece.model in self.detoured:
                continue
            found = self.board.spares(piece, [device for device, waiting in self.watched.items() if waiting])
            if found:
                self.detoured.add(piece.model)
                spare = piece._replace(devices=found[0], serving=True, after=())
                self.going.append(Turn(False, spare, detour=True))
                self.gone.append(False)
                self._index(len(self.going) - 1, spare)
                self._play(Turn(True, spare, detour=True))
                return True
        return False

    def _stop(self) -> bool:
        """Let the least important go that stands in the way, though its model falls below its floor."""
        stuck = self._stuck()
        cost = self.board.cost
        if stuck:
            self._go(min(stuck, key=lambda i: (cost[self.going[i].piece.model], i)), stopped=True)
        return bool(stuck)


def _parts(task: Task) -> Iterator[tuple[list[Piece], list[Piece]]]:
    """What touches each other, over devices or models, in the order of the most important of each."""
    parent: dict[str, str] = {}

    def root(x: str) -> str:
        parent.setdefault(x, x)
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for piece in (*task.rising, *task.going):
        for device in piece.devices:
            parent[root(f"d{device}")] = root(f"m{piece.model}")
    parts: dict[str, tuple[list[Piece], list[Piece]]] = {}
    for kind, pieces in enumerate((task.rising, task.going)):
        for piece in pieces:
            parts.setdefault(root(f"m{piece.model}"), ([], []))[kind].append(piece)
    yield from parts.values()


class _Budget:
    """States that a search may still look at."""

    def __init__(self, states: int) -> None:
        self.states = states
        self.spent = 0

    def spend(self) -> bool:
        self.spent += 1
        return self.spent <= self.states


def _search(
    board: _Board, rising: Sequence[Piece], going: Sequence[Piece], budget: _Budget
) -> tuple[list[Turn], list[Turn]] | None:
    """All orders without a detour, then with one and with two; then with the least important model stopped once."""
    for detours in range(_DETOURS + 1):
        found = _Search(board, rising, going, detours, budget).run()
        if found is not None:
            return found
    for model in sorted({piece.model for piece in going if piece.serving}, key=lambda m: (board.cost[m], m)):
        eased = board.copy()
        eased.floor[model] = board.floor.get(model, 0) - 1
        found = _Search(eased, rising, going, 0, budget).run()
        if found is not None:
            return _marked(board, found)
    return None


def _marked(board: _Board, found: tuple[list[Turn], list[Turn]]) -> tuple[list[Turn], list[Turn]]:
    """The same turns, with the one marked that takes its model below its floor."""
    seen = board.copy()
    turns = []
    for turn in found[0]:
        below = not turn.rises and not seen.may_go(turn.piece)
        turns.append(turn._replace(stopped=below))
        seen.play(turns[-1])
    return turns, found[1]


class _Search:
    """Depth first over everything that may happen next, never twice from the same state."""

    def __init__(
        self, board: _Board, rising: Sequence[Piece], going: Sequence[Piece], detours: int, budget: _Budget
    ) -> None:
        self.board, self.detours, self.budget = board.copy(), detours, budget
        self.rising = [Turn(True, piece) for piece in rising]
        self.going = [Turn(False, piece) for piece in going]
        self.seen: set[tuple[int, frozenset[tuple[bool, tuple[str, tuple[str, ...]], bool]]]] = set()
        self.path: list[Turn] = []

    def run(self) -> tuple[list[Turn], list[Turn]] | None:
        if not self._reach(self.rising, self.going, self.detours):
            return None
        gone = {turn.piece.key for turn in self.path if not turn.rises}
        spare = [turn._replace(rises=False) for turn in self.path if turn.rises and turn.detour]
        return self.path, [turn for turn in (*self.going, *spare) if turn.piece.key not in gone]

    def _reach(self, rising: Sequence[Turn], going: Sequence[Turn], detours: int) -> bool:
        if not rising:
            return True
        state = detours, frozenset((turn.rises, turn.piece.key, turn.detour) for turn in (*rising, *going))
        if state in self.seen or not self.budget.spend():
            return False
        self.seen.add(state)
        for turn in [turn for turn in rising if self.board.lacking(turn.piece) is None]:
            if self._step(turn, [t for t in rising if t is not turn], going, detours):
                return True
        for turn in [turn for turn in going if self.board.may_go(turn.piece)]:
            if self._step(turn, rising, [t for t in going if t is not turn], detours):
                return True
        if detours:
            for turn in [turn for turn in going if not turn.detour and turn.piece.serving]:
                for devices in self.board.spares(turn.piece):
                    spare = Turn(True, turn.piece._replace(devices=devices, after=()), detour=True)
                    if self._step(spare, rising, [*going, spare._replace(rises=False)], detours - 1):
                        return True
        return False

    def _step(self, turn: Turn, rising: Sequence[Turn], going: Sequence[Turn], detours: int) -> bool:
        self.board.play(turn)
        self.path.append(turn)
        if self._reach(rising, going, detours):
            return True
        self.path.pop()
        self.board.play(turn._replace(rises=not turn.rises))
        return False
