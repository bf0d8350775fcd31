"""What a prompt takes is what the nodes that computed some say, wherever it came in."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.cluster.lead import Lead
from janus_server.cluster.prices import Prices
from janus_server.cluster.tally import Tally
from janus_server.desk import PromptCosts
from janus_server.orders import Counted, Counts, Joined, KnownModel, Ticket
from janus_server.sched.brain import Brain
from janus_server.sched.cost import PromptCost, Shape, StepCost
from janus_server.sched.prefixes import PrefixKey, Shortcuts
from janus_server.sched.state import BrainSettings


def ticket(tokens: int = 300, work_s: float = 0.02) -> Ticket:
    return Ticket(id="n3:0:a", model="m", prompt_tokens=tokens, work_s=work_s, arrived_s=0.0)


def counted(cost: PromptCost | None, model: str = "m") -> Counted:
    return Counted({model: Counts(10, 10, prompt=cost)})


@given(st.integers(1, 4000), st.integers(1, 512), st.lists(st.floats(1e-3, 0.5), max_size=12))
def test_what_is_told_predicts_as_who_learnt_it_does(tokens: int, step_tokens: int, took_s: list[float]) -> None:
    cost = StepCost(1_000_000)
    assert cost.prompt(step_tokens) is None  # a guess is nothing to tell
    for number, seconds in enumerate(took_s):
        cost.observe(Shape(decodes=number % 3, prompt_tokens=16 + 7 * number), seconds)
    if (told := cost.prompt(step_tokens)) is not None:
        assert told.work_s(tokens) == pytest.approx(cost.prompt_s(tokens, 0.0, step_tokens, Shape()))


def test_a_guess_gives_way_to_what_was_measured_and_comes_back_when_who_knew_is_gone() -> None:
    prices = Prices()
    assert prices.of(ticket()) == ticket()
    prices.heard("n0", counted(PromptCost(0.002, 1e-4, 0.0, 512)))
    assert prices.of(ticket(tokens=600)).work_s == pytest.approx(0.004 + 0.06)
    prices.heard("n1", counted(None))
    prices.heard("n1", counted(PromptCost(1.0, 1.0, 1.0, 1), model="other"))
    assert prices.of(ticket()).work_s == pytest.approx(0.032)
    prices.gone("n0")
    assert prices.of(ticket()) == ticket()


def test_nonsense_is_not_believed_and_one_that_is_far_off_moves_nothing() -> None:
    prices = Prices()
    for bad in (PromptCost(math.nan, 0, 0, 512), PromptCost(0, -1.0, 0, 512), PromptCost(0, math.inf, 0, 512),
                PromptCost(0.0, 0.0, 0.0, 0)):  # fmt: skip
        prices.heard("n0", counted(bad))
        assert prices.of(ticket()) == ticket()
    for node, token_s in (("n0", 1e-4), ("n1", 1.1e-4), ("n2", 50.0)):
        prices.heard(node, counted(PromptCost(0.0, token_s, 0.0, 512)))
    assert prices.of(ticket()).work_s == pytest.approx(0.033)


def test_what_a_cache_leaves_is_priced_like_the_whole() -> None:
    """A front's guess of the last token may be more than what is measured for all of them."""
    guessed = msgspec.structs.replace(ticket(tokens=601, work_s=3.0), least_s=0.5, prefix=(PrefixKey(600, 7),))
    prices, shortcuts = Prices(), Shortcuts({"n0": (7,)})
    assert prices.of(guessed) == guessed
    prices.heard("n0", counted(PromptCost(0.002, 1e-4, 0.0, 601)))
    priced = prices.of(guessed)
    assert (priced.work_s, priced.least_s) == (pytest.approx(0.0621), pytest.approx(0.0021))
    assert shortcuts.on(priced, "n0") == pytest.approx(0.0021) and shortcuts.on(priced, "n1") == priced.work_s
    assert prices.of(ticket()).least_s == ticket().least_s


async def test_a_leader_keeps_sums_and_prices_of_models_of_the_cluster_alone() -> None:
    lead = Lead(Brain(BrainSettings(), 1), lambda: ["n0"], lambda node, number, action: True, lambda entry: None, None)
    known = KnownModel(model="m", weight_pages=1, host_bytes=1, longest_pages=1)
    lead.hear("n0", [Joined("n0", 10, 10, (known,))])
    for number in range(5):
        for model in ("m", f"made up {number}"):
            lead.hear("n0", [counted(PromptCost(0.1, 0.1, 0.1, 8), model)])
    assert lead._tally.take() == Counted({"m": Counts(10, 10)})
    assert list(lead._prices._known) == ["m"]
    await lead.close()


def test_the_sum_of_all_nodes_says_nothing_of_prices_and_counts_as_before() -> None:
    tally = Tally()
    tally.heard("n0", counted(PromptCost(0.1, 0.1, 0.1, 8)))
    tally.heard("n1", counted(PromptCost(0.2, 0.2, 0.2, 8)))
    assert tally.take() == Counted({"m": Counts(20, 20)})


def test_a_node_tells_prices_of_what_ran_there_alone() -> None:
    costs = PromptCosts({"m": 1_000_000, "never": 1_000_000}, 512)
    counts = {"m": Counts(1, 1), "never": Counts(2, 2), "stranger": Counts(3, 3)}
    assert costs.priced(counts) == counts
