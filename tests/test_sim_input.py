"""Bad input, of the library and of the command line: one line that says what is wrong, before any work."""

import json

import numpy as np
import pytest

from metasd_sim import bounds
from metasd_sim.cli import main
from metasd_sim.costs import CostModel
from metasd_sim.environments import CategoricalEnvironment, StationaryEnvironment
from metasd_sim.policies import RandomArm, RouterWeights, SlidingWindowUCB
from metasd_sim.rewards import BlockEfficiency
from metasd_sim.simulate import simulate
from tests.sim_cases import refuses

TWO = ["simulate", "--arms", "0.9,0.5"]
WINDOW = "sw-ucb:window=1e12"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*TWO, "--budget", "inf"], ["--budget", "whole numbers", "'inf'"]),
        ([*TWO, "--budget", "nan"], ["--budget", "whole numbers", "'nan'"]),
        ([*TWO, "--draft-length", "inf"], ["--draft-length", "whole numbers", "'inf'"]),
        ([*TWO, "--draft-length", "1e30"], ["draft_length", "0 to 1024"]),
        ([*TWO, "--draft-length", "1025", "--draft-cost", "1,1"], ["draft_length", "0 to 1024", "1025"]),
        ([*TWO, "--draft-length", "1e12", "--draft-cost", "1,1"], ["draft_length", "0 to 1024"]),
        ([*TWO, "--draft-length", "-1"], ["draft_length", "0 to 1024", "-1"]),
        ([*TWO, "--draft-length", "0"], ["draft_length", "drafts 1 token or more", "0"]),
        (["simulate", "--arms", "0.9", "--draft-length", "5,5"], ["draft_length", "one per arm, 1 here", "[5, 5]"]),
        ([*TWO, "--policy", WINDOW], ["window", "100,000,000", "1,000,000,000,000", "fewer runs"]),
        ([*TWO, "--draft-cost", "inf,0"], ["draft", "finite", "found inf"]),
        ([*TWO, "--draft-cost", "1,1", "--verify-cost", "nan"], ["verify", "found nan"]),
        ([*TWO, "--draft-cost", "1e308,0"], ["draft", "found 1e+308"]),
        (["simulate", "--arms", "-0.1,0.8"], ["--arms: expected one argument", "--arms=VALUE"]),
        (["simulate", "--arms=-0.1,0.8"], ["[0, 1]", "-0.1"]),
        (["replay", "/nonexistent"], ["no such file", "metasd-live record"]),
        (["replay", "."], ["found a folder", "name a file"]),
        (["bounds", "--arms", "0.9,0.5", "--budget", "1e30"], ["budget"]),
        (["bounds", "--arms", "0.9,0.5", "--draft-length", "1e30"], ["draft_length", "0 to 1024"]),
        (["bounds", "--arms", "0.9,0.5", "--budget", "100,10"], ["budget", "increasing"]),
    ],
)
def test_numbers_of_the_command_line(argv, words, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("metasd-sim: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arms": [1, 1]}, ["different names", "[1, 1]"]),
        ({"arms": ["a", "a"]}, ["different names"]),
        ({"objective": 7}, ["objective", "rounds, time", "7"]),
        ({"provenance": [3]}, ["provenance", "[3]"]),
    ],
)
def test_router_files_of_the_wrong_types(change, words, tmp_path):
    record = {"arms": ["a", "b"], "weights": [[1.0], [2.0]], "objective": "rounds", "provenance": {}} | change
    path = tmp_path / "router.json"
    path.write_text(json.dumps(record))
    with refuses("router", *words):
        RouterWeights.read(str(path))


def test_arguments_of_the_library():
    environment = StationaryEnvironment([0.9, 0.5])
    with refuses("carry_over", "None"):
        simulate(RandomArm(), environment, 10, carry_over=None)
    for name in ("runs", "seed"):
        with refuses(name, "True"):
            simulate(RandomArm(), environment, 10, **{name: True})
    with refuses("alpha", "['a']"):
        StationaryEnvironment(["a"])
    for length in ("5", 2000, 1.5, [1, 2, 3]):
        with refuses("draft_length"):
            StationaryEnvironment([0.9, 0.5], length)
    with refuses("draft_length", "1024"):
        CategoricalEnvironment.random({"A": 0.5}, ["A@100000"])
    with refuses("window", "100,000,000"):
        SlidingWindowUCB(BlockEfficiency(), 1e6).start(101, ("a", "b"), 5, np.random.default_rng(0))
    with refuses("costs", "draft", "inf"):
        CostModel.linear([np.inf, 0.0], 5)


def test_arguments_of_bounds():
    with refuses("alphas", "shape [0]"):
        bounds.ucb_upper([], 5, 100, BlockEfficiency())
    with refuses("bound", "-5"):
        bounds.hedge_regret(2, -5)
    for regret in (bounds.hedge_regret, bounds.normal_hedge_regret):
        with refuses("bound", "1 arm", "0"):
            regret(0, 5)
        assert regret(1, np.array([0.0, 5.0])).tolist() == [0.0, 0.0]
    with refuses("bound", "1 arm", "0"):
        bounds.exp3_spec_tokens(0, 5, 10)
    with refuses("gamma", "0"):
        bounds.exp3_spec_tokens(2, 0, 10)
    for budget in (np.inf, np.nan):
        with refuses("budget", "finite"):
            bounds.lower([0.9, 0.5], 5, budget)
