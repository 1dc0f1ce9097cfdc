"""Replay of recorded texts has the law of live runs: thousands of live runs against as many replays, each of a fresh
text, compared by two-sample chi-square; wrong replays are rejected by the same comparison. Greedy and Gumbel-coupled
runs agree round by round."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.special import softmax

from metasd_live.decode import LiveEnvironment
from metasd_live.prompts import Prompt
from metasd_live.record import Recorder
from metasd_live.verify import Rule
from metasd_sim import ReplayEnvironment, make_policy, simulate, traces
from metasd_sim.environments.base import OVERLAP
from metasd_sim.rounds import Rounds

from .chain_models import ChainTarget, chain_logits, law_arm, no_draft, same_law_p_value, table_arm

VOCABULARY = 4
PROMPT = [1, 2]
LIMIT = 10
RUNS = 5_000
RULE = Rule("rejection", 0.8)
UCB_BE, UCB_BD = "metasd-ucb:reward=be,beta=0.3", "metasd-ucb:reward=bd-verified,beta=0.3"
POLICIES = [UCB_BE, UCB_BD, "thompson-trials", "hedge:eta=1"]
WHOLE_BLOCKS = "metasd-ucb:reward=bd,beta=0.2"
CASES = [((0,), policy) for policy in (*POLICIES, WHOLE_BLOCKS)] + [
    ((), UCB_BD),
    ((), "hedge:eta=1"),
    ((), WHOLE_BLOCKS),
]
FAMILY = 1e-3  # chance of any false alarm in the comparisons of this file, over all seeds
LIMIT_OF_P = FAMILY / (7 * len(CASES))  # at most seven statistics a case


def a_target(eos):
    return ChainTarget(chain_logits(0, VOCABULARY), eos)


def some_arms():
    return [
        law_arm("near", chain_logits(0, VOCABULARY) + chain_logits(1, VOCABULARY, 0.7), 3),
        law_arm("far", chain_logits(2, VOCABULARY, 2.0, 0.3), 4),
        table_arm("table", 3, VOCABULARY, 2),
        no_draft(),
    ]


@cache
@torch.inference_mode()
def fresh_texts(eos):
    """One trace of a recorded text for each run; other randomness than the live runs'."""
    recorder = Recorder(a_target(eos), some_arms(), LIMIT, RULE, seed=2, overlap_dtype="float32", blocks=True)
    text = " ".join(map(str, PROMPT))
    return traces.merge([recorder.record(i, Prompt(str(i), text)) for i in range(RUNS)])


@dataclass
class Runs:
    """Rounds of many runs, each run's in order."""

    run: np.ndarray  # of each round
    rounds: Rounds
    texts: list[list[int]]  # of each run

    def statistics(self):
        """Of each run, as outcomes that can be counted; float sums are rounded to cells no exact value lies on."""
        rounds, count = self.rounds, self.run.max() + 1

        def per_run(values):
            return np.bincount(self.run, values, minlength=count)

        def cells(values, width):
            return np.floor(per_run(np.nan_to_num(values)) / width + 0.2718).tolist()

        pulls = np.stack([per_run(rounds.arm == arm) for arm in range(4)], axis=1)
        opening = [[] for _ in range(count)]
        for run, *played in zip(
            *map(np.ndarray.tolist, (self.run, rounds.arm, rounds.accepted, rounds.drafted)), strict=True
        ):
            if len(opening[run]) < 2:
                opening[run].append(tuple(played))
        found = {
            "tau": per_run(np.ones(len(self.run))).tolist(),
            "pulls": [tuple(row) for row in pulls.tolist()],
            "block efficiency": per_run(rounds.accepted).tolist(),
            "verified overlap": cells(np.nansum(rounds.overlap, axis=1), 0.4),
            "first two rounds": [tuple(played) for played in opening],
            "first arms and text": [
                (rows[0][0], rows[-1][0], *text[:3]) for rows, text in zip(opening, self.texts, strict=True)
            ],
        }
        if rounds.every_arm is not None:
            found["scores of one arm"] = cells(np.nansum(rounds.every_arm[:, 0], axis=1), 0.4)
        return found


def play(policy, environment, runs, seed):
    """`runs` rows of one query, or one row of so many queries."""
    policy = make_policy(policy)
    policy.needs = policy.needs | {OVERLAP}
    history = simulate(policy, environment, runs=runs, seed=seed, history=True).history
    run = history.row if runs > 1 else history.query
    return run, history.rounds


@cache
@torch.inference_mode()
def live_runs(eos, policy):
    environment = LiveEnvironment(a_target(eos), some_arms(), [PROMPT], LIMIT, RULE)
    run, rounds = play(policy, environment, RUNS, seed=1)
    order = np.argsort(run, kind="stable")
    return Runs(run[order], rounds[order], [row[0].token_ids for row in environment.texts])


def replayed_runs(trace, policy):
    """The policy restarts at each query, as at a new run."""
    run, rounds = play(policy, ReplayEnvironment(trace), 1, seed=1)
    return Runs(run, rounds, [text.tolist() for text in np.split(trace.tokens, trace.offsets[1:-1])])


def p_values(a, b):
    a, b = a.statistics(), b.statistics()
    assert a.keys() == b.keys()
    return {name: same_law_p_value(a[name], b[name]) for name in a}


@pytest.mark.parametrize(("eos", "policy"), CASES)
def test_replayed_runs_have_the_law_of_live_runs(eos, policy):
    live, replayed = live_runs(eos, policy), replayed_runs(fresh_texts(eos), policy)
    assert len(live.texts) == len(replayed.texts) == RUNS
    assert min(p_values(live, replayed).values()) > LIMIT_OF_P, p_values(live, replayed)


# --- wrong replays, which the comparison must reject


def laws_on_text(trace):
    """p and q of the arms with laws, of each recorded token; from the tables, not from the recorder."""
    tables = [chain_logits(0, VOCABULARY), *(arm.drafter.model.table for arm in some_arms()[:2])]
    laws = [softmax(np.reshape(table, (VOCABULARY,) * 3) / RULE.temperature, axis=-1) for table in tables]
    texts = [[*PROMPT, *text] for text in np.split(trace.tokens, trace.offsets[1:-1])]
    triples = np.array([text[t : t + 3] for text in texts for t in range(len(text) - 2)])
    return [law[tuple(triples.T)] for law in laws]


def by_depth(values, trace, depths):
    """[T] -> [T, depths], 0 past the text's end."""
    depth = np.arange(depths)
    at = np.minimum(np.arange(len(values))[:, None] + depth, len(values) - 1)
    return np.where(depth < trace.remaining()[:, None], values[at], 0.0)


def with_acceptance(trace, rule):
    """The trace with `rule(p, q)` as the acceptance of the arms with laws."""
    accept = trace.accept.astype(float)
    p, *laws = laws_on_text(trace)
    for a, q in enumerate(laws):
        depths = some_arms()[a].length
        accept[:, a, :depths] = by_depth(rule(p, q), trace, depths)
    return replace(trace, accept=accept)


def accepts_as_if_drafted(trace):
    """`min(1, p/q)`, the rule for a drafted token, instead of `min(1, q/p)` for one that was emitted."""
    return with_acceptance(trace, lambda p, q: np.divide(p, q, out=np.ones_like(p), where=q > p))


def accepts_the_overlap(trace):
    """The mean rate of acceptance, which forgets what the text says."""
    return replace(trace, accept=np.where(trace.accept > 0, np.nan_to_num(trace.overlap), 0.0))


def shows_the_next_overlap(trace):
    return replace(trace, overlap=np.roll(trace.overlap, -1, axis=0))


def accepts_point_masses_for_sure(trace):
    """As if nobody had looked whether the text agrees."""
    accept = trace.accept.copy()
    accept[:, 2] = by_depth(np.ones(len(accept)), trace, accept.shape[2]) * (np.arange(4) < trace.drafted[:, 2, None])
    return replace(trace, accept=accept)


def test_recorded_acceptance_is_the_ratio_of_the_laws():
    trace = fresh_texts((0,))
    right = with_acceptance(trace, lambda p, q: np.minimum(1.0, q / p))
    np.testing.assert_allclose(trace.accept, right.accept, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrong", [accepts_as_if_drafted, accepts_the_overlap, accepts_point_masses_for_sure])
def test_wrong_acceptance_is_rejected(policy, wrong):
    found = p_values(live_runs((0,), policy), replayed_runs(wrong(fresh_texts((0,))), policy))
    assert min(found["tau"], found["first two rounds"]) < LIMIT_OF_P / 1e3


@pytest.mark.parametrize("policy", [UCB_BD, "hedge:eta=1"])
def test_wrong_feedback_is_rejected(policy):
    found = p_values(live_runs((0,), policy), replayed_runs(shows_the_next_overlap(fresh_texts((0,))), policy))
    assert min(found["pulls"], found["verified overlap"]) < LIMIT_OF_P / 1e3


# --- round by round


PATHS = ["random", "kl-ucb-trials", *POLICIES, *(f"fixed:{arm}" for arm in ("near", "far", "table", "none"))]


@pytest.mark.parametrize("rule", [Rule(), Rule("gumbel", 0.8)])
@pytest.mark.parametrize("eos", [(), (0,)])
def test_greedy_and_gumbel_runs_equal_their_replay(rule, eos):
    prompts = [[i % 4, i // 4 % 4, i % 3] for i in range(16)]
    recorder = Recorder(a_target(eos), some_arms(), 24, rule, seed=5, overlap_dtype="float64")
    trace = traces.merge(
        [recorder.record(i, Prompt(str(i), " ".join(map(str, prompt)))) for i, prompt in enumerate(prompts)]
    )
    live = LiveEnvironment(recorder.target, recorder.arms, prompts, 24, rule, seed=5)
    accepted = 0
    for spec in PATHS:
        for seed in range(2):
            a, b = (play_one(spec, environment, seed) for environment in (live, ReplayEnvironment(trace)))
            np.testing.assert_array_equal(a.query, b.query)
            for name in ("arm", "drafted", "accepted", "emitted"):
                np.testing.assert_array_equal(getattr(a.rounds, name), getattr(b.rounds, name), err_msg=spec)
            for name in ("overlap", "every_arm"):
                if getattr(a.rounds, name) is not None:
                    np.testing.assert_allclose(getattr(a.rounds, name), getattr(b.rounds, name), atol=1e-12)
            accepted += a.rounds.accepted.sum()
        assert [token for text in live.texts[0] for token in text.token_ids] == trace.tokens.tolist()
    assert accepted > 100


def play_one(spec, environment, seed):
    policy = make_policy(spec, arms=environment.arms)
    return simulate(policy, environment, seed=seed, carry_over="keep", history=True).history
