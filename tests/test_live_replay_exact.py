"""Replay of recorded texts has the law of live runs: thousands of live runs against as many replays, each of a fresh
text, compared by two-sample chi-square; wrong replays are rejected by the same comparison. Greedy and Gumbel-coupled
runs agree round by round."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

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
ROWS, RUNS = 200, 5_000
RULE = Rule("rejection", 0.8)
UCB_BE, UCB_VERIFIED, UCB_BLOCK = (f"metasd-ucb:reward={reward},beta=0.3" for reward in ("be", "bd-verified", "bd"))
HEDGE = "hedge:eta=1"
# end of sequence, most new tokens, whether blocks are recorded past a rejection
ENDING, ENDLESS, BLOCKS = ((0,), 10, False), ((), 9, False), ((0,), 4, True)
CASES = [(ENDING, policy) for policy in (UCB_BE, UCB_VERIFIED, "thompson-trials", HEDGE)]
CASES += [(ENDLESS, UCB_VERIFIED), (BLOCKS, UCB_BLOCK)]
FAMILY = 1e-3  # chance of any false alarm in the comparisons of this file, over all seeds
LIMIT_OF_P = FAMILY / (7 * len(CASES))  # at most seven statistics a case


def logits_of_the_target():
    """Token 0, which ends some texts, is rare."""
    logits = chain_logits(0, VOCABULARY)
    logits[:, :, 0] -= 0.5
    return logits


def a_target(eos):
    return ChainTarget(logits_of_the_target(), eos)


def some_arms():
    return [
        law_arm("near", logits_of_the_target() + chain_logits(1, VOCABULARY, 0.7), 3),
        law_arm("far", chain_logits(2, VOCABULARY, 2.0, 0.3), 4),
        table_arm("table", 3, VOCABULARY, 2),
        no_draft(),
    ]


@cache
@torch.inference_mode()
def fresh_texts(eos, limit, blocks):
    """One trace of a recorded text for each run; other randomness than the live runs'."""
    recorder = Recorder(a_target(eos), some_arms(), limit, RULE, seed=2, overlap_dtype="float32", blocks=blocks)
    text = " ".join(map(str, PROMPT))
    return traces.merge([recorder.record(i, Prompt(str(i), text)) for i in range(RUNS)])


@dataclass
class Runs:
    """Rounds of many runs, each run's in order."""

    run: np.ndarray  # of each round
    rounds: Rounds
    texts: list[list[int]]  # of each run

    @cached_property
    def statistics(self):
        """Of each run, as outcomes that can be counted; sums of overlaps fall into cells."""
        rounds, count = self.rounds, self.run.max() + 1

        def per_run(values):
            return np.bincount(self.run, values, minlength=count)

        def cells(values, width):
            return np.floor(per_run(np.nan_to_num(values)) / width + 0.2718).tolist()

        pulls = np.stack([per_run(rounds.arm == arm) for arm in range(4)], axis=1)
        opening = [[] for _ in range(count)]
        for run, *played in np.stack([self.run, rounds.arm, rounds.accepted, rounds.drafted], axis=1).tolist():
            if len(opening[run]) < 2:
                opening[run].append(tuple(played))
        found = {
            "tau": per_run(np.ones(len(self.run))).tolist(),
            "pulls": [tuple(row) for row in pulls.tolist()],
            "block efficiency": per_run(rounds.accepted).tolist(),
            "overlaps": cells(np.nansum(rounds.overlap, axis=1), 0.4),
            "first two rounds": [tuple(played) for played in opening],
            "first arms and text": [
                (rows[0][0], rows[-1][0], *text[:3]) for rows, text in zip(opening, self.texts, strict=True)
            ],
        }
        if rounds.every_arm is not None:
            found["scores of one arm"] = cells(np.nansum(rounds.every_arm[:, 0], axis=1), 0.4)
        return found


def play(policy, environment, rows):
    """Rounds by run; each query is a run of its own, since the policy restarts."""
    policy = make_policy(policy)
    policy.needs = policy.needs | {OVERLAP}
    history = simulate(policy, environment, runs=rows, seed=1, history=True).history
    run = history.row * environment.queries + history.query
    order = np.argsort(run, kind="stable")
    return run[order], history.rounds[order]


@cache
@torch.inference_mode()
def live_runs(eos, limit, blocks, policy):
    environment = LiveEnvironment(a_target(eos), some_arms(), [PROMPT] * (RUNS // ROWS), limit, RULE)
    run, rounds = play(policy, environment, ROWS)
    return Runs(run, rounds, [text.token_ids for row in environment.texts for text in row])


def replayed_runs(trace, policy):
    run, rounds = play(policy, ReplayEnvironment(trace), 1)
    return Runs(run, rounds, [text.tolist() for text in np.split(trace.tokens, trace.offsets[1:-1])])


def p_values(a, b):
    assert a.statistics.keys() == b.statistics.keys()
    return {name: same_law_p_value(a.statistics[name], b.statistics[name]) for name in a.statistics}


@pytest.mark.parametrize(("texts", "policy"), CASES)
def test_replayed_runs_have_the_law_of_live_runs(texts, policy):
    live, replayed = live_runs(*texts, policy), replayed_runs(fresh_texts(*texts), policy)
    assert len(live.texts) == len(replayed.texts) == RUNS
    assert min(p_values(live, replayed).values()) > LIMIT_OF_P, p_values(live, replayed)


# --- wrong replays, which the comparison must reject


def laws_on_text(trace):
    """p and q of the arms with laws, of each recorded token; from the tables, not from the recorder."""
    tables = [logits_of_the_target(), *(arm.drafter.model.table.numpy() for arm in some_arms()[:2])]
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


def accepts_point_masses_for_sure(trace):
    """As if nobody had looked whether the text agrees."""
    accept = trace.accept.copy()
    accept[:, 2] = by_depth(np.ones(len(accept)), trace, accept.shape[2]) * (np.arange(4) < trace.drafted[:, 2, None])
    return replace(trace, accept=accept)


def test_recorded_acceptance_is_the_ratio_of_the_laws():
    trace = fresh_texts(*ENDING)
    right = with_acceptance(trace, lambda p, q: np.minimum(1.0, q / p))
    np.testing.assert_allclose(trace.accept, right.accept, atol=1e-6)


@pytest.mark.parametrize("wrong", [accepts_as_if_drafted, accepts_the_overlap, accepts_point_masses_for_sure])
def test_wrong_acceptance_is_rejected(wrong):
    found = p_values(live_runs(*ENDING, UCB_VERIFIED), replayed_runs(wrong(fresh_texts(*ENDING)), UCB_VERIFIED))
    assert min(found["tau"], found["first two rounds"]) < LIMIT_OF_P / 1e3


@pytest.mark.parametrize(
    ("texts", "policy", "wrong"),
    [
        (ENDING, UCB_VERIFIED, lambda trace: replace(trace, overlap=np.roll(trace.overlap, -1, axis=0))),
        (ENDING, HEDGE, lambda trace: replace(trace, overlap=np.roll(trace.overlap, -1, axis=0))),
        (BLOCKS, UCB_BLOCK, lambda trace: replace(trace, block_tail=trace.overlap)),
    ],
    ids=["the next token's", "the next token's, of every arm", "the rejected token's, for those past it"],
)
def test_wrong_overlaps_are_rejected(texts, policy, wrong):
    found = p_values(live_runs(*texts, policy), replayed_runs(wrong(fresh_texts(*texts)), policy))
    assert min(found["pulls"], found["overlaps"]) < LIMIT_OF_P / 1e3


# --- round by round


PATHS = ["random", UCB_BE, UCB_VERIFIED, "kl-ucb-trials", "thompson-trials", HEDGE]
PATHS += [f"fixed:{arm}" for arm in ("near", "far", "table", "none")]


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
