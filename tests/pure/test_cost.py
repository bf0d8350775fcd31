"""The predicted time of a step: examples, what it learns, and that it stays sane whatever it is told."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twin_turn import Speed

from janus_server.sched.cost import Shape, StepCost, shape_of
from janus_server.types import Batch, Chunk

SPEED = Speed(fixed_s=0.004, decode_s=0.0005, token_s=0.001, context_s=1e-6)
shapes = st.builds(Shape, st.integers(0, 200), st.integers(0, 600), st.floats(0, 1e7))
times = st.one_of(st.floats(1e-7, 1e4), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300]))


def some_shape(pick: random.Random) -> Shape:
    decodes, prompt = pick.randrange(16), pick.choice([0, 0, pick.randrange(2, 500)])
    return Shape(max(decodes, not prompt), prompt, decodes * pick.randrange(1000) + prompt * pick.randrange(1000))


def learnt(speed: Speed, steps: int, seed: int = 0, weight_bytes: int = 0) -> StepCost:
    pick, cost = random.Random(seed), StepCost(weight_bytes)
    for _ in range(steps):
        shape = some_shape(pick)
        cost.observe(shape, speed.of(shape))
    return cost


def test_shape_docstring_example() -> None:
    chunks = (Chunk(1, 99, (5,), (0,)), Chunk(2, 0, (5,) * 10, (1,)))
    assert shape_of(Batch(1, chunks)) == Shape(1, 10, 155.0)


def test_docstring_example() -> None:
    cost = StepCost()
    for _ in range(10):
        for decodes in range(1, 9):
            cost.observe(Shape(decodes), 0.002 + 0.0005 * decodes)
    assert cost.seconds(Shape(20)) == pytest.approx(0.012, rel=0.02)
    guess = StepCost()
    ratio = guess.seconds(Shape(0, 100)) / guess.seconds(Shape(100))
    assert cost.seconds(Shape(0, 100)) / cost.seconds(Shape(100)) == pytest.approx(ratio, rel=1.0)


@pytest.mark.parametrize("weight_bytes", [0, 1 << 20, 1 << 34])
def test_it_learns_exact_times_whatever_the_guess_was(weight_bytes: int) -> None:
    cost = learnt(SPEED, 200, weight_bytes=weight_bytes)
    pick = random.Random(1)
    for _ in range(50):
        shape = some_shape(pick)
        assert cost.seconds(shape) == pytest.approx(SPEED.of(shape), rel=0.02)


def test_the_first_step_sets_the_speed_of_the_machine() -> None:
    cost = StepCost()
    before = [cost.seconds(shape) for shape in (Shape(1), Shape(8, 100, 900.0))]
    cost.observe(Shape(8, 100, 900.0), 3 * before[1])
    after = [cost.seconds(shape) for shape in (Shape(1), Shape(8, 100, 900.0))]
    assert after == pytest.approx([3 * value for value in before])


def test_a_larger_model_is_guessed_to_take_longer() -> None:
    small, large = StepCost(1 << 20), StepCost(1 << 30)
    assert all(small.seconds(shape) < large.seconds(shape) for shape in (Shape(1), Shape(0, 100), Shape(4, 4, 99.0)))


def test_it_follows_a_machine_that_becomes_slower() -> None:
    cost = learnt(SPEED, 200)
    slower, pick = Speed(0.016, 0.002, 0.004, 4e-6), random.Random(2)
    for _ in range(150):
        shape = some_shape(pick)
        cost.observe(shape, slower.of(shape))
    assert cost.seconds(Shape(4, 100, 50_000.0)) == pytest.approx(slower.of(Shape(4, 100, 50_000.0)), rel=0.2)


def test_outliers_move_it_little() -> None:
    cost, pick = learnt(SPEED, 200), random.Random(3)
    for i in range(200):
        shape = some_shape(pick)
        cost.observe(shape, SPEED.of(shape) * (1000 if i % 40 == 39 else 1))
    for shape in (Shape(4, 0, 900.0), Shape(4, 100, 50_000.0)):
        assert SPEED.of(shape) * 0.8 <= cost.seconds(shape) <= SPEED.of(shape) * 1.5


def test_what_no_step_had_for_long_is_not_forgotten() -> None:
    cost = learnt(SPEED, 200)
    for _ in range(5000):
        cost.observe(Shape(4, 0, 400.0), SPEED.of(Shape(4, 0, 400.0)))
    assert cost.seconds(Shape(4, 400, 80_000.0)) == pytest.approx(SPEED.of(Shape(4, 400, 80_000.0)), rel=0.1)


@given(st.integers(0, 1 << 36), st.lists(st.tuples(shapes, times), max_size=60), shapes)
def test_a_prediction_is_a_time_and_grows_with_what_is_in_the_step(
    weight_bytes: int, observed: list[tuple[Shape, float]], shape: Shape
) -> None:
    cost = StepCost(weight_bytes)
    for seen, took_s in observed:
        cost.observe(seen, took_s)
    predicted_s = cost.seconds(shape)
    assert 0 <= predicted_s < math.inf
    more = Shape(shape.decodes + 1, shape.prompt_tokens + 5, shape.context_tokens + 100)
    assert cost.seconds(more) >= predicted_s
    assert 0 <= cost.prompt_s(shape.prompt_tokens, 0.0, 64, shape) < math.inf
    assert cost.least_tokens() >= 0


@given(st.floats(0, 10), st.integers(0, 4000), st.integers(0, 64), st.integers(0, 50))
def test_as_many_tokens_fit_as_are_predicted_to(budget_s: float, start: int, decodes: int, steps: int) -> None:
    cost, beside = learnt(SPEED, steps), Shape(decodes, 0, 100.0 * decodes)
    tokens = cost.tokens_within(budget_s, start, beside)
    if budget_s <= cost.seconds(beside):
        assert tokens == 0
    else:
        whole = Shape(decodes, tokens, beside.context_tokens + tokens * (start + tokens / 2))  # type: ignore[arg-type]
        assert cost.seconds(whole) == pytest.approx(budget_s, rel=1e-6)
    assert cost.tokens_within(math.inf, start, beside) == math.inf


def test_a_prompt_takes_its_steps_and_its_rows() -> None:
    cost = learnt(Speed(0.004, 0.0005, 0.001, 0.0), 400)
    beside = Shape(4)
    expected = 3 * (0.004 + 4 * 0.0005) + 130 * 0.001
    assert cost.prompt_s(130, 0.0, 60, beside) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("times", [1, 7, 60])
def test_steps_that_were_alike_teach_as_much_at_once(times: int) -> None:
    one, many = learnt(SPEED, 200), learnt(SPEED, 200)
    shape = Shape(3, 0, 900.0)
    for _ in range(times):
        one.observe(shape, 1.2 * SPEED.of(shape))
    many.observe(shape, 1.2 * SPEED.of(shape), times)
    assert many.observed == one.observed
    for asked in (shape, Shape(8, 0, 900.0), Shape(3, 100, 9000.0)):
        assert many.seconds(asked) == pytest.approx(one.seconds(asked), rel=0.02)
