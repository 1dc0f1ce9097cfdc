"""LinUCB and the router, and the features of prompts that they read."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from metasd_sim import traces
from metasd_sim.cli import main
from metasd_sim.environments import ReplayEnvironment
from metasd_sim.environments.base import FEATURES
from metasd_sim.policies import LinUCB, Router, RouterWeights, fit_router, make_policy, policy_specs
from metasd_sim.policies.contextual import cross_validate
from metasd_sim.rewards import REWARDS, BlockEfficiency, make_reward
from metasd_sim.simulate import simulate
from tests.sim_cases import Feedback, arm_names, make_context, make_rounds, make_trace, refuses, with_features

ROW = np.array([0])


def context_of(features, eligible=None):
    features = np.asarray(features, dtype=float)
    context = make_context(len(features), 3, eligible)
    context.features = features
    return context


def routed_trace(queries=40, length=24, depth=3, arms=("code", "chat")):
    """Greedy; one feature says which of two arms is perfect, the other one never right."""
    rng = np.random.default_rng(0)
    kind = rng.permutation(np.arange(queries) % 2)
    trace = make_trace((length,) * queries, arms=2, depth=depth, verification="greedy")
    remaining = trace.remaining()
    real = np.arange(depth) < remaining[:, None]
    perfect = np.repeat(kind, length)[:, None] == np.arange(2)
    return replace(
        trace,
        arms=arms,
        drafted=np.full_like(trace.drafted, depth),
        accept=(real[:, None, :] & perfect[:, :, None]).astype(np.uint8),
        features=kind[:, None].astype(np.float32),
        feature_names=("chat",),
    )


# --- LinUCB


def test_scores_after_two_updates_by_hand():
    policy = LinUCB(BlockEfficiency())
    policy.start(1, arm_names(2), 4, np.random.default_rng(0))
    policy.select(ROW, context_of([[2.0]]))
    np.testing.assert_allclose(policy.index(ROW), [[np.sqrt(5)] * 2])  # x = (2, 1), A = I: |x|
    policy.update(ROW, make_rounds([0], [2], 4))  # r = 2/4; A_0 = [[5, 2], [2, 2]], b_0 = (1, .5)
    policy.select(ROW, context_of([[1.0]]))
    # A^-1 = [[2, -2], [-2, 5]] / 6, theta = (1/6, 1/12); at (1, 1): 1/4, and the width is sqrt((2 - 4 + 5) / 6)
    np.testing.assert_allclose(policy.index(ROW), [[0.25 + np.sqrt(0.5), np.sqrt(2)]])
    policy.update(ROW, make_rounds([0], [4], 4))  # r = 1; A_0 = [[6, 3], [3, 3]], b_0 = (2, 1.5)
    # A^-1 = [[3, -3], [-3, 6]] / 9, theta = (1/6, 1/3); at (1, 1): 1/2, width sqrt(3 / 9)
    np.testing.assert_allclose(policy.index(ROW), [[0.5 + np.sqrt(1 / 3), np.sqrt(2)]])
    policy.restart(ROW, 0.5)
    # A_0 = I + [[5, 3], [3, 2]] / 2, det 4.75, b_0 = (1, .75): theta.x = (.875 + 1.125) / 4.75, x'A^-1x = 2.5 / 4.75
    np.testing.assert_allclose(policy.index(ROW), [[2 / 4.75 + np.sqrt(2.5 / 4.75), np.sqrt(2)]])
    policy.restart(ROW, 0.0)
    np.testing.assert_array_equal(policy.index(ROW), [[np.sqrt(2)] * 2])


@pytest.mark.parametrize("reward", ["be", "bd-verified", "trials"])
@pytest.mark.parametrize("keep", [1.0, 0.7, 0.0])
def test_equals_a_slow_reference_with_inverses(reward, keep):
    rows, steps, d, alpha, ridge = 4, 48, 3, 0.6, 0.3
    feedback = Feedback(1, rows, steps, (0.8, 0.5, 0.3), 4)
    features = np.random.default_rng(2).normal(size=(steps // 8, rows, d))
    policy = LinUCB(make_reward(reward), alpha, ridge)
    policy.start(rows, arm_names(3), 4, np.random.default_rng(3))
    gram = np.tile(ridge * np.eye(d + 1), (rows, 3, 1, 1))
    response = np.zeros((rows, 3, d + 1))
    for step in range(steps):
        active = np.arange(rows) if step % 5 else np.array([0, 2])
        if step % 8 == 0:
            some = np.array([1, 2])
            policy.restart(some, keep)
            gram[some] = keep * gram[some] + (1 - keep) * ridge * np.eye(d + 1)
            response[some] *= keep
        x = features[step // 8]
        arms = policy.select(active, context_of(x[active]))
        rounds = feedback(active, step, arms)
        value, weight = make_reward(reward)(rounds)
        index = policy.index(active)
        for i, row in enumerate(active):
            v = np.append(x[row], 1)
            inverse = [np.linalg.inv(gram[row, arm]) for arm in range(3)]
            expected = [a @ b @ v + alpha * np.sqrt(v @ a @ v) for a, b in zip(inverse, response[row], strict=True)]
            np.testing.assert_allclose(index[i], expected, rtol=1e-9)
            assert expected[arms[i]] >= max(expected) - 1e-9
            gram[row, arms[i]] += np.outer(v, v)
            response[row, arms[i]] += value[i] / weight[i] * v
        policy.update(active, rounds)


def test_time_divides_by_the_arms_pace():
    """Both arms accept all of it, arm 1 in half the time."""
    policy = LinUCB(BlockEfficiency(), 0.0, objective="time")
    policy.start(1, arm_names(2), 4, np.random.default_rng(0))
    played = []
    for _ in range(8):
        arm = policy.select(ROW, context_of([[0.5]]))
        policy.update(ROW, make_rounds(arm, [4], 4, seconds=[2.0 - arm[0]]))
        played.append(int(arm[0]))
    assert sorted(played[:2]) == [0, 1]  # an arm without a pace is played first
    assert played[2:] == [1] * 6


def test_features_help_across_queries_and_only_with_carry_over():
    """The arm that is perfect alternates with the feature: 6 rounds a query, 24 with the other arm."""
    environment = ReplayEnvironment(routed_trace())
    ideal = environment.fixed_arms(np.array([environment.tokens])).query_rounds.min(axis=1).sum()
    assert ideal == 40 * 6
    rounds = {
        (spec, carry): simulate(make_policy(spec), environment, runs=20, seed=1, carry_over=carry).rounds.mean()
        for spec in ("lin-ucb", "metasd-ucb")
        for carry in ("none", "keep", "discount:0.9")
    }
    assert rounds["lin-ucb", "none"] > 1.1 * ideal
    for carry in ("keep", "discount:0.9"):
        assert rounds["lin-ucb", carry] < 1.05 * ideal
        assert rounds["metasd-ucb", carry] > 1.1 * ideal


def test_what_lin_ucb_cannot_use_is_refused():
    with refuses("reward", "tokens-per-second", "objective=time"):
        LinUCB(REWARDS["tokens-per-second"]())
    for name, options in (("alpha", {"alpha": -1.0}), ("alpha", {"alpha": np.nan}), ("ridge", {"ridge": 0.0})):
        with refuses(name):
            LinUCB(BlockEfficiency(), **options)
    with refuses("lin-ucb", "features"):
        simulate(LinUCB(BlockEfficiency()), ReplayEnvironment(make_trace()))
    policy = LinUCB(BlockEfficiency())
    policy.start(1, arm_names(2), 4, np.random.default_rng(0))
    context = make_context(1, 2)
    context.features = None
    with refuses("features"):
        policy.select(ROW, context)


# --- the router


def test_router_learns_separable_queries():
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])

    def draw(n):
        kind = rng.integers(0, 3, n)
        cost = np.where(kind[:, None] == np.arange(3), 5.0, 9.0 + rng.random((n, 3)))
        return kind, centres[kind] + rng.uniform(-1, 1, (n, 2)), cost

    _, features, cost = draw(60)
    weights = fit_router(features, cost)
    kind, new, _ = draw(300)
    router = Router(weights)
    router.start(300, arm_names(3), 4, np.random.default_rng(0))
    np.testing.assert_array_equal(router.select(np.arange(300), context_of(new)), kind)


def test_constant_features_leave_the_shares_of_the_best_arms():
    # best arm: 0 in three queries, 1 in one, both in two: shares (3 + 1) / 6 and 2 / 6, so the odds are 2
    cost = np.array([[1, 2], [1, 2], [1, 2], [2, 1], [3, 3], [3, 3]], dtype=float)
    weights = fit_router(np.full((6, 2), 7.0), cost)
    np.testing.assert_array_equal(weights[:, :2], 0)
    np.testing.assert_allclose(softmax(weights[:, 2]), [2 / 3, 1 / 3], atol=1e-4)
    assert weights[0, 2] - weights[1, 2] == pytest.approx(np.log(2), abs=1e-4)


def test_fit_is_at_the_minimum_of_the_stated_loss():
    rng = np.random.default_rng(1)
    features, cost, ridge = rng.normal(2, 3, (30, 2)), rng.integers(1, 5, (30, 3)).astype(float), 0.05
    weights = fit_router(features, cost, ridge)
    standard = (features - features.mean(axis=0)) / features.std(axis=0)

    def loss(weights):
        """Of weights as `fit_router` returns them, taken back to standardised features."""
        slopes = weights[:, :2] * features.std(axis=0)
        constant = weights[:, 2] + weights[:, :2] @ features.mean(axis=0)
        total = 0.0
        for x, row in zip(standard, cost, strict=True):
            best = row == row.min()
            total -= log_softmax(slopes @ x + constant)[best].mean() / len(features)
        return total + ridge / 2 * (slopes**2).sum()

    least = loss(weights)
    for _ in range(40):
        assert loss(weights + rng.normal(0, 0.05, weights.shape)) > least
    for arm in range(3):
        for column in range(3):
            step = np.zeros((3, 3))
            step[arm, column] = 1e-4
            assert abs(loss(weights + step) - loss(weights - step)) / 2e-4 < 1e-3


def test_scale_and_origin_of_features_do_not_matter():
    rng = np.random.default_rng(2)
    features, cost = rng.normal(size=(40, 3)), rng.random((40, 3))
    scale, shift = np.array([1e-3, 1.0, 50.0]), np.array([3.0, -1.0, 0.0])
    plain, moved = fit_router(features, cost), fit_router(features * scale + shift, cost)
    ones = np.ones((40, 1))
    np.testing.assert_allclose(
        np.hstack([features * scale + shift, ones]) @ moved.T, np.hstack([features, ones]) @ plain.T, atol=1e-4
    )


def test_router_plays_one_arm_a_query_and_the_next_best_where_it_may_not():
    weights = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.6]])
    router = Router(weights)
    router.start(3, arm_names(3), 4, np.random.default_rng(0))
    x = [[0.9, 0.7], [0.2, 0.3], [0.1, 0.8]]  # scores: .9 .7 .6; .2 .3 .6; .1 .8 .6
    rows = np.arange(3)
    assert router.select(rows, context_of(x)).tolist() == [0, 2, 1]
    eligible = np.array([[False, True, True], [True, True, False], [True, False, True]])
    assert router.select(rows, context_of(x, eligible)).tolist() == [1, 1, 2]
    trace = routed_trace()
    outcome = simulate(Router(np.array([[-1.0, 0.5], [1.0, -0.5]])), ReplayEnvironment(trace), runs=1, history=True)
    assert outcome.rounds.tolist() == [[240]]  # 6 rounds a query: always the perfect arm
    assert outcome.switches[0, 0] == np.count_nonzero(np.diff(trace.features[:, 0]))


def test_ties_of_a_router_are_broken_at_random_and_once_a_query():
    router = Router(np.zeros((2, 2)))
    router.start(4000, arm_names(2), 4, np.random.default_rng(0))
    rows, context = np.arange(4000), context_of(np.zeros((4000, 1)))
    first = router.select(rows, context)
    np.testing.assert_array_equal(router.select(rows, context), first)
    assert abs(first.mean() - 0.5) < 4 * 0.5 / np.sqrt(4000)  # false alarm 6e-5
    router.restart(rows, 0.0)
    assert np.any(router.select(rows, context) != first)


def test_arms_are_matched_by_name(tmp_path):
    path = tmp_path / "router.json"
    weights = RouterWeights(("a", "b", "c"), np.array([[0.0, 3.0], [0.0, 1.0], [0.0, 2.0]]), "time", {"seed": 1})
    path.write_text(json.dumps(weights.to_json()))
    again = RouterWeights.read(str(path))
    assert (again.arms, again.objective, again.provenance) == (("a", "b", "c"), "time", {"seed": 1})
    np.testing.assert_array_equal(again.weights, weights.weights)
    router = make_policy(f"router:weights={path}")
    for arms, best in ((("a", "b", "c"), "a"), (("c", "b", "a"), "a"), (("b", "c"), "c")):
        router.start(1, arms, 4, np.random.default_rng(0))
        assert arms[router.select(ROW, context_of([[0.1]]))[0]] == best
    with refuses("router", "a, b, c", "other", "train it anew"):
        router.start(1, ("a", "b", "other"), 4, np.random.default_rng(0))
    with refuses("router", "3 arms", "the 2 arms x, y"):
        Router(weights.weights).start(1, ("x", "y"), 4, np.random.default_rng(0))
    router.start(1, ("a", "b"), 4, np.random.default_rng(0))
    with refuses("router", "expected 1 features, found 2"):
        router.select(ROW, context_of([[0.1, 0.2]]))


def test_a_router_needs_a_sound_file(tmp_path):
    with refuses("router", "weights=FILE", "train-router"):
        make_policy("router")
    with refuses("none.json", "No such file"):
        make_policy(f"router:weights={tmp_path / 'none.json'}")
    record = {"arms": ["a"], "weights": [[1.0, 2.0]], "objective": "rounds", "provenance": {}}
    broken = [
        "{",
        "[1]",
        json.dumps({**record, "weights": "x"}),
        json.dumps({key: value for key, value in record.items() if key != "arms"}),
        json.dumps({**record, "weights": [[1.0, 2.0], [3.0, 4.0]]}),
        json.dumps({**record, "weights": [[1.0, float("nan")]]}),
    ]
    for text in broken:
        (tmp_path / "bad.json").write_text(text)
        with refuses("expected", "found"):
            make_policy(f"router:weights={tmp_path / 'bad.json'}")
    for features, cost in ((np.zeros((3, 2)), np.zeros((2, 2))), (np.zeros(3), np.zeros((3, 2)))):
        with refuses("features", "shapes"):
            fit_router(features, cost)
    with refuses("ridge"):
        fit_router(np.zeros((3, 2)), np.zeros((3, 2)), 0.0)
    assert not any(spec.startswith("router") for spec in policy_specs("all", ("a",), frozenset({FEATURES})))
    assert "lin-ucb" in policy_specs("all", ("a",), frozenset({FEATURES}))
    assert "lin-ucb" not in policy_specs("all", ("a",), frozenset())


def test_cross_validation_judges_unseen_queries_only():
    # 40 queries of pure noise in 60 dimensions: training is perfect, unseen ones are coin tosses. More than 32 right
    # has probability 1e-4
    rng = np.random.default_rng(3)
    features, cost = rng.normal(size=(40, 60)), np.where(rng.random((40, 1)) < 0.5, [[1.0, 2.0]], [[2.0, 1.0]])
    ones = np.ones((40, 1))
    assert np.all((np.hstack([features, ones]) @ fit_router(features, cost, 0.01).T).argmax(1) == cost.argmin(1))
    score = cross_validate(features, cost, 5, rng)
    assert score.accuracy <= 32 / 40
    assert score.oracle == 40
    assert score.routed == pytest.approx(40 + 40 * (1 - score.accuracy))


def test_cross_validation_by_hand():
    # arm 0 is best in 9 of 12 queries, by 1; arm 1 in 3, by 10: totals 9 * 5 + 3 * 15 = 90 against 9 * 6 + 3 * 5 = 69
    kind = np.arange(12) % 4 == 0
    cost = np.where(kind[:, None], [[15.0, 5.0]], [[5.0, 6.0]])
    features = kind[:, None].astype(float)
    for seed in range(3):
        score = cross_validate(features, cost, 4, np.random.default_rng(seed), 0.001)
        assert (score.accuracy, score.routed, score.oracle) == (1.0, 60.0, 60.0)
        assert (score.most_frequent, score.best_fixed) == (0.75, 69.0)
    for folds in (1, 13):
        with refuses("folds", "2 to 12"):
            cross_validate(features, cost, folds, np.random.default_rng(0))


# --- features in traces


def test_features_are_written_read_selected_and_merged(tmp_path):
    trace = with_features(make_trace())
    path = tmp_path / "t.safetensors"
    traces.write(trace, path)
    again = traces.read(path)
    assert again.feature_names == ("long", "code")
    assert again.features.dtype == np.float32
    np.testing.assert_array_equal(again.features, trace.features)
    some = trace.select([2, 0])
    np.testing.assert_array_equal(some.features, trace.features[[2, 0]])
    some.check()
    merged = traces.merge([trace.select([q]) for q in range(3)])
    np.testing.assert_array_equal(merged.features, trace.features)
    assert merged.feature_names == trace.feature_names
    with refuses("merge", "feature_names"):
        traces.merge([trace.select([0]), replace(trace.select([1]), feature_names=("long", "other"))])
    with refuses("merge", "same tensors"):
        traces.merge(
            [replace(trace.select([q]), feature_names=(), features=None if q else np.zeros((1, 0))) for q in (0, 1)]
        )


def test_a_trace_without_features_has_no_word_of_them(tmp_path):
    path = tmp_path / "t.safetensors"
    traces.write(make_trace(), path)
    assert b"feature" not in path.read_bytes()  # as files of old: they stay readable
    trace = traces.read(path)
    assert (trace.features, trace.feature_names) == (None, ())
    assert FEATURES not in ReplayEnvironment(trace).gives


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": np.zeros((2, 2), dtype=np.float32)}, ["features of shape [3, 2]", "[2, 2]"]),
        ({"features": np.zeros((3, 3), dtype=np.float32)}, ["features of shape [3, 2]", "[3, 3]"]),
        ({"features": np.zeros(3, dtype=np.float32)}, ["features of shape"]),
        ({"features": np.zeros((3, 2), dtype=np.int64)}, ["features of floats"]),
        ({"features": np.full((3, 2), np.nan)}, ["features of finite"]),
        ({"features": np.full((3, 2), np.inf)}, ["features of finite"]),
        ({"feature_names": ("a", "a")}, ["feature_names"]),
        ({"feature_names": ("a",)}, ["features of shape [3, 1]"]),
        ({"features": None}, ["feature_names"]),
    ],
)
def test_bad_features_are_refused(change, words):
    with refuses(*words):
        replace(with_features(make_trace()), **change).check()


def test_replay_shows_the_features_of_the_rows_query():
    trace = with_features(make_trace((2, 1, 3)))
    environment = ReplayEnvironment(trace)
    assert FEATURES in environment.gives
    environment.reset(2, np.random.default_rng(0), frozenset())
    rows = np.arange(2)
    while rows.size:
        context = environment.observe(rows)
        np.testing.assert_array_equal(context.features, trace.features[context.query])
        assert context.features.dtype == float
        environment.step(rows, np.zeros(len(rows), dtype=int))
        rows = rows[~environment.done[rows]]


# --- the command line


@pytest.fixture
def trace_file(tmp_path):
    traces.write(routed_trace(), tmp_path / "t.safetensors")
    return str(tmp_path / "t.safetensors")


@pytest.mark.parametrize("objective", ["rounds", "time"])
def test_train_router_then_replay(capsys, tmp_path, trace_file, objective):
    out = str(tmp_path / "router.json")
    argv = ["train-router", trace_file, "--out", out, "--objective", objective]
    assert main([*argv, "--json", "-"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert score["accuracy"] == 1
    assert score["routed"] == score["oracle"] < score["best_fixed"]
    assert score["most_frequent"] <= 0.6
    if objective == "rounds":
        assert score["oracle"] == 240
    record = json.loads((tmp_path / "router.json").read_text())
    assert record["arms"] == ["code", "chat"]
    assert record["objective"] == objective
    assert record["provenance"]["features"] == ["chat"]
    assert main(argv) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*argv, "--force"]) == 0
    assert "100.0%" in capsys.readouterr().out
    assert main(["replay", trace_file, "--policy", f"router:weights={out}", "--runs", "2", "--json", "-"]) == 0
    (played,) = json.loads(capsys.readouterr().out)
    assert played["segment_regret_mean"] == 0
    assert played["rounds_mean"] == 240
    assert played["policy"] == f"router:weights={out}"


def test_train_router_reads_its_seed(capsys, tmp_path):
    traces.write(with_features(make_trace((5,) * 24)), tmp_path / "t.safetensors")
    found = []
    for seed in (0, 0, 1):
        out = str(tmp_path / f"r{len(found)}.json")
        assert (
            main(["train-router", str(tmp_path / "t.safetensors"), "--out", out, "--seed", str(seed), "--quiet"]) == 0
        )
        found.append(json.loads((tmp_path / f"r{len(found)}.json").read_text()))
    assert found[0] == found[1]
    assert found[0]["weights"] == found[2]["weights"]  # of all queries: the folds are for the score alone
    assert found[0]["provenance"]["out_of_fold"] != found[2]["provenance"]["out_of_fold"]


def test_train_router_refuses_what_it_cannot_use(capsys, tmp_path, trace_file):
    out = ["--out", str(tmp_path / "r.json")]
    traces.write(make_trace(), tmp_path / "plain.safetensors")
    traces.write(replace(routed_trace(), costs=None), tmp_path / "untimed.safetensors")
    for argv, word in (
        ([str(tmp_path / "plain.safetensors")], "features"),
        ([str(tmp_path / "untimed.safetensors"), "--objective", "time"], "--calibrate"),
        ([trace_file, "--folds", "1"], "folds"),
        ([trace_file, "--ridge", "0"], "ridge"),
    ):
        assert main(["train-router", *argv, *out]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert word in err
    assert not (tmp_path / "r.json").exists()
    traces.write(routed_trace(arms=("code", "other")), tmp_path / "other.safetensors")
    assert main(["train-router", trace_file, *out, "--quiet"]) == 0
    assert (
        main(["replay", str(tmp_path / "other.safetensors"), "--policy", f"router:weights={tmp_path / 'r.json'}"]) == 2
    )
    assert "found other beside them" in capsys.readouterr().err


def test_weights_on_stdout_stand_there_alone(capsys, trace_file, tmp_path):
    table = str(tmp_path / "score.json")
    assert main(["train-router", trace_file, "--out", "-", "--json", table]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["arms"] == ["code", "chat"]
    assert err == ""
    assert main(["train-router", trace_file, "--out", "-", "--json", "-"]) == 2
    assert "found it twice" in capsys.readouterr().err
