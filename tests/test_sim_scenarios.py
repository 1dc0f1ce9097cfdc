"""The options of `metasd-sim simulate` that describe an environment."""

import json

import numpy as np
import pytest

from metasd_sim.cli import build_parser, main
from metasd_sim.environments import (
    DomainEnvironment,
    DriftingEnvironment,
    LostFeedback,
    NoisyFeedback,
    PiecewiseEnvironment,
    StationaryEnvironment,
    SwitchingCost,
    staying,
)
from metasd_sim.policies import RandomArm
from metasd_sim.scenarios import build
from metasd_sim.simulate import simulate

ONE, TWO = ["--arms", "0.9,0.5"], ["--arms", "0.9,0.5", "--arms", "0.4,0.8"]
COSTS = ["--draft-cost", "0.1,0.2"]


def made(*argv):
    return build(build_parser().parse_args(["simulate", *argv]))


def test_lists_of_rates_choose_the_environment():
    assert type(made(*ONE)) is StationaryEnvironment
    piecewise = made(*TWO)
    assert type(piecewise) is PiecewiseEnvironment
    assert piecewise.alphas.tolist() == [[0.9, 0.5], [0.4, 0.8]]
    assert piecewise.segment_tokens.tolist() == [1000, 1000]
    assert not piecewise.cycle
    listed = made(*TWO, "--segment-tokens", "30,40", "--cycle")
    assert listed.segment_tokens.tolist() == [30, 40]
    assert listed.cycle
    drift = made(*TWO, "--environment", "drift", "--segment-tokens", "100", "--every", "50")
    assert type(drift) is DriftingEnvironment
    np.testing.assert_allclose(drift.alphas, [[0.775, 0.575], [0.525, 0.725], [0.4, 0.8]])
    assert drift.segment_tokens.tolist() == [50, 50, 50]
    domains = made(
        *TWO,
        "--environment",
        "domains",
        "--queries",
        "7",
        "--query-tokens",
        "11",
        "--stay",
        "0.9",
        "--feature-noise",
        "0",
    )
    assert type(domains) is DomainEnvironment
    assert (domains.queries, domains.query_tokens, domains.feature_noise) == (7, 11, 0.0)
    np.testing.assert_allclose(domains.transition, staying(2, 0.9))


def test_the_law_and_the_wrappers_are_as_asked_for():
    environment = made(
        *ONE, *COSTS, "--draft-length", "4,0", "--decay", "0.9", "--silent", "0.1,0.2", "--block-correlation", "0.3",
        "--arm-correlation", "0.4", "--concentration", "7", "--noise", "0.2", "--overlap-noise", "0.05",
        "--lost", "0.25", "--switch-cost", "0.5",
    )  # fmt: skip
    assert type(environment) is SwitchingCost
    assert environment.seconds == 0.5
    assert type(environment.inner) is LostFeedback
    assert environment.inner.probability == 0.25
    noisy = environment.inner.inner
    assert type(noisy) is NoisyFeedback
    assert (noisy.probability, noisy.overlap_noise) == (0.2, 0.05)
    law = noisy.inner.law
    assert (law.decay, law.block_correlation, law.arm_correlation, law.concentration) == (0.9, 0.3, 0.4, 7.0)
    assert law.silent.tolist() == [0.1, 0.2]
    assert law.lengths.tolist() == [4, 0]
    assert type(made(*ONE, "--noise", "0.2")) is NoisyFeedback
    assert made(*ONE, "--silent", "0.1").law.silent.tolist() == [0.1, 0.1]


def records(capsys, *argv):
    assert main(["simulate", *argv, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_domains_run_to_the_end_of_the_stream_and_carry_over(capsys):
    argv = [*TWO, "--environment", "domains", "--queries", "6", "--query-tokens", "20", "--runs", "40", "--policy",
            "kl-ucb-trials"]  # fmt: skip
    (forgets,), (keeps,) = records(capsys, *argv), records(capsys, *argv, "--carry-over", "keep")
    assert forgets["budget"] == 120
    assert (forgets["carry_over"], keeps["carry_over"]) == ("none", "keep")
    assert forgets["pulls"] != keeps["pulls"]
    environment = DomainEnvironment([[0.9, 0.5], [0.4, 0.8]], 20, 6)
    fixed = environment.fixed_arms(np.array([120]))
    assert forgets["segment_regret_mean"] == pytest.approx(forgets["rounds_mean"] - fixed.segment_rounds[0])
    assert forgets["regret_mean"] == pytest.approx(forgets["rounds_mean"] - fixed.rounds[0].min())


def test_the_table_shows_regret_to_the_best_of_each_segment(capsys):
    argv = [*TWO, "--segment-tokens", "100", "--budget", "200", "--runs", "5", "--policy", "fixed:0.9/0.4"]
    assert main(["simulate", *argv]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "regret to best of each segment" in table.replace("│ ", "").replace("┃ ", "")
    assert main(["simulate", *ONE, "--budget", "200", "--runs", "5", "--policy", "random"]) == 0
    assert "each segment" not in capsys.readouterr().out
    (record,) = records(capsys, *argv, *COSTS)
    assert {"segment_regret_mean", "segment_seconds_regret_mean"} <= set(record)
    assert "lower_bound" not in record


def test_switches_show_in_the_seconds(capsys):
    argv = [*ONE, *COSTS, "--budget", "100", "--runs", "20", "--policy", "random"]
    (free,), (paid,) = records(capsys, *argv), records(capsys, *argv, "--switch-cost", "2")
    assert paid["seconds_mean"] == pytest.approx(free["seconds_mean"] + 2 * free["switches_mean"])


def test_plain_options_make_the_environment_that_they_always_made():
    environment = made(*ONE, "--draft-length", "4")
    known = StationaryEnvironment([0.9, 0.5], 4)
    first, second = (simulate(RandomArm(), e, 200, runs=10) for e in (environment, known))
    np.testing.assert_array_equal(first.pulls, second.pulls)
    np.testing.assert_array_equal(first.rounds, second.rounds)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*ONE, "--queries", "3"], ["--queries", "domains", "stationary"]),
        ([*ONE, "--cycle"], ["--cycle", "piecewise or drift", "stationary"]),
        ([*TWO, "--every", "3"], ["--every", "drift", "piecewise"]),
        ([*TWO, "--carry-over", "keep"], ["--carry-over", "domains", "piecewise"]),
        ([*TWO, "--environment", "domains", "--segment-tokens", "9"], ["--segment-tokens", "domains"]),
        ([*TWO, "--environment", "domains", "--carry-over", "half"], ["carry_over", "half"]),
        (
            [*TWO, "--environment", "domains", "--queries", "2", "--query-tokens", "9", "--budget", "50"],
            ["budget", "18"],
        ),
        ([*TWO, "--environment", "drift", "--segment-tokens", "9,9"], ["--segment-tokens", "one number"]),
        ([*ONE, "--environment", "drift"], ["knots", "2", "1"]),
        ([*TWO, "--environment", "stationary"], ["--arms", "one list", "2"]),
        ([*ONE, "--arms", "0.5"], ["--arms", "2", "1"]),
        ([*ONE, "--switch-cost", "1"], ["--switch-cost", "--draft-cost"]),
        ([*ONE, "--decay", "1.5"], ["decay", "1.5"]),
        ([*ONE, "--lost", "2"], ["probability", "2"]),
        ([*ONE, "--silent", "0.1,0.2,0.3"], ["silent", "[3]"]),
    ],
)
def test_options_that_do_not_apply_are_refused_by_name(argv, words, capsys):
    assert main(["simulate", *argv, "--runs", "2", "--policy", "random"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_bounds_take_one_list(capsys):
    assert main(["bounds", *TWO]) == 2
    assert "--arms: expected one list" in capsys.readouterr().err
