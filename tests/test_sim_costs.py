"""Seconds of rounds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_sim.costs import CostModel
from tests.sim_cases import refuses

# Two arms, at most 2 drafted tokens: arm 0 drafts one after another, arm 1 all at once.
COSTS = CostModel(
    draft=[[0.0, 0.1, 0.2], [0.0, 0.4, 0.4]], verify=[1.0, 1.1, 1.3], catch_up=[0.01, 0.0], overhead=0.05, plain=0.9
)


def test_seconds_by_hand():
    # draft + verify + catch-up + overhead
    assert COSTS.seconds(0, 2) == pytest.approx(0.2 + 1.3 + 0.05)
    assert COSTS.seconds(0, 2, 7) == pytest.approx(0.2 + 1.3 + 0.07 + 0.05)
    assert COSTS.seconds(1, 1, 7) == pytest.approx(0.4 + 1.1 + 0.05)
    assert COSTS.seconds(1, 0) == pytest.approx(1.05)
    seconds = COSTS.seconds(np.array([0, 1, 0]), np.array([2, 1, 0]), np.array([0, 5, 3]))
    np.testing.assert_allclose(seconds, [1.55, 1.55, 1.08])
    table = COSTS.seconds(np.arange(2), np.array([[2, 1], [0, 0]]))  # drafted [T, arms], as a trace has it
    np.testing.assert_allclose(table, [[1.55, 1.55], [1.05, 1.05]])


def test_linear_costs_by_hand():
    costs = CostModel.linear([0.1, 0.0], 3, verify=2.0, verify_token=0.25, catch_up=[0.5, 0.0], overhead=0.125)
    np.testing.assert_allclose(costs.draft, [[0, 0.1, 0.2, 0.3], [0, 0, 0, 0]])
    np.testing.assert_allclose(costs.verify, [2, 2.25, 2.5, 2.75])
    assert costs.plain == pytest.approx(2.125)  # a pass over one token
    assert costs.seconds(0, 3, 2) == pytest.approx(0.3 + 2.75 + 1.0 + 0.125)
    assert CostModel.linear([0.1, 0.2, 0.3], 2, catch_up=0.5).catch_up.tolist() == [0.5] * 3


SECONDS = st.floats(0, 1e3)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.data(),
)
def test_json_round_trip(arms, max_draft, data):
    def draw(n):
        return data.draw(st.lists(SECONDS, min_size=n, max_size=n))

    costs = CostModel(
        np.reshape(draw(arms * (max_draft + 1)), (arms, max_draft + 1)),
        draw(max_draft + 1),
        draw(arms),
        data.draw(SECONDS),
        data.draw(st.floats(1e-6, 1e3)),
    )
    record = json.loads(json.dumps(costs.to_json()))
    again = CostModel.from_json(record)
    for name in ("draft", "verify", "catch_up", "overhead", "plain"):
        np.testing.assert_array_equal(getattr(again, name), getattr(costs, name))
    assert isinstance(again.overhead, float)
    assert isinstance(again.plain, float)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft": [[0.0, -0.1, 0.2]] * 2}, ["draft", "-0.1"]),
        ({"verify": [1.0, np.nan, 1.0]}, ["verify", "nan"]),
        ({"overhead": np.inf}, ["overhead", "inf"]),
        ({"overhead": -1}, ["overhead", "-1"]),
        ({"plain": 0}, ["plain", "0"]),
        ({"verify": [1.0, 1.0]}, ["verify", "[2, 3]", "[2]"]),
        ({"draft": [0.0, 0.1, 0.2]}, ["draft", "[3]"]),
        ({"catch_up": [0.1]}, ["catch_up", "[2]", "[1]"]),
    ],
)
def test_impossible_costs_are_refused(change, words):
    with refuses("costs", *words):
        CostModel(**{**COSTS.to_json(), **change})
    with refuses("costs", *words):
        CostModel.from_json({**COSTS.to_json(), **change})


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({}, "draft, verify, catch_up, overhead, plain"),
        ([1.0], "draft, verify, catch_up, overhead, plain"),
        ({k: v for k, v in COSTS.to_json().items() if k != "plain"}, "plain"),
        ({**COSTS.to_json(), "verify": "slow"}, "slow"),
        ({**COSTS.to_json(), "draft": [[0.0, 0.1, 0.2], [0.0]]}, "draft"),
        ({**COSTS.to_json(), "overhead": [0.1, 0.2]}, "overhead"),
    ],
    ids=["empty", "a list", "a field missing", "text", "ragged", "not a number"],
)
def test_records_that_are_no_cost_model_are_refused(record, word):
    with refuses("costs", word):
        CostModel.from_json(record)


def test_the_context_costs_time_in_each_pass():
    costs = replace(CostModel.linear([0.5], 2, verify=1.0), per_context=0.01)
    assert costs.seconds(np.array([0]), np.array([2]), context=np.array([300])) == pytest.approx([1.0 + 1.0 + 3.0])
    assert CostModel.from_json(costs.to_json()).per_context == 0.01
    assert "per_context" not in CostModel.linear([0.5], 2).to_json()
    with refuses("per_context", "not negative"):
        replace(costs, per_context=-1.0)
