"""What a prompt takes is what the nodes that computed some say, wherever it came in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.cluster.prices import Prices
from janus_server.cluster.tally import Tally
from janus_server.desk import PromptCosts
from janus_server.orders import Counted, Counts, Ticket
from janus_server.sched.cost import PromptCost, Shape, StepCost


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


def test_the_sum_of_all_nodes_says_nothing_of_prices_and_counts_as_before() -> None:
    tally = Tally()
    tally.heard("n0", counted(PromptCost(0.1, 0.1, 0.1, 8)))
    tally.heard("n1", counted(PromptCost(0.2, 0.2, 0.2, 8)))
    assert tally.take() == Counted({"m": Counts(20, 20)})


def test_a_node_tells_prices_of_what_ran_there_alone() -> None:
    costs = PromptCosts({"m": 1_000_000, "never": 1_000_000}, 512)
    counts = {"m": Counts(1, 1), "never": Counts(2, 2), "stranger": Counts(3, 3)}
    assert costs.priced(counts) == counts
