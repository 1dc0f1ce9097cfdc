"""Expected round starts along a text: a round that starts at `t` and accepts `n` is followed by one at `t + n + 1`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..rounds import FloatArray, IntArray

CHUNK = 1 << 16  # tokens held at once, however long the text


def expected_starts(pmf: FloatArray, tokens: int) -> FloatArray:
    """v(t) = [t = 0] + sum_n P(N = n) v(t - n - 1): the chance that a round starts at t; [tokens]."""
    return _filter(pmf, np.ones(1), tokens)


def _filter(pmf: FloatArray, arrivals: FloatArray, tokens: int) -> FloatArray:
    from scipy.signal import lfilter  # here, since its import takes half a second

    impulse = np.zeros(tokens)
    impulse[: len(arrivals)] = arrivals[:tokens]
    return lfilter([1.0], np.concatenate([[1.0], -pmf]), impulse)


def expected_rounds(
    pieces: Iterable[tuple[float, FloatArray, FloatArray]], budgets: IntArray
) -> tuple[FloatArray, FloatArray]:
    """E tau(B) = sum_{t < B} v(t), and E of the sum of a price per round; both [budgets, arms].

    Pieces of the text in order, with the law of the rounds that start there: tokens (the last may be inf),
    pmf [arms, max_draft + 1], price [arms].
    """
    longest, start, arrivals = int(np.max(budgets)), 0, np.zeros((0, 0))
    before = np.zeros((2, 0))  # rounds and prices of all pieces so far, [2, arms]
    out = np.zeros((2, len(budgets), 0))
    for length, pmf, price in pieces:
        if not arrivals.size:
            arrivals = np.zeros_like(pmf)  # [arms, max_draft + 1] law of the first start of a piece
            arrivals[:, 0] = 1.0
            before, out = np.zeros((2, len(pmf))), np.zeros((2, len(budgets), len(pmf)))
        end = min(start + length, longest)
        while start < end:
            tokens = int(min(end - start, CHUNK))
            within = (budgets > start) & (budgets <= start + tokens)
            last = min(tokens, pmf.shape[1])
            for arm, law in enumerate(pmf):
                starts = _filter(law, arrivals[arm], tokens)
                rounds = starts.cumsum()
                share = np.array([1.0, price[arm]])
                out[:, within, arm] = (before[:, arm] + np.multiply.outer(rounds[budgets[within] - start - 1], share)).T
                before[:, arm] += rounds[-1] * share
                spill = np.convolve(starts[-last:], law)[last - 1 :]  # rounds that jump over the piece's end
                skipped = arrivals[arm, tokens:]  # arrivals from before a piece shorter than a block
                spill[: len(skipped)] += skipped
                arrivals[arm] = spill
            start += tokens
        if start >= longest:
            break
    return out[0], out[1]


def stationary_rounds(law: FloatArray, budgets: IntArray) -> FloatArray:
    """`E tau(B) = 1 + sum_n P(N = n) E tau(B - n - 1)`, and 0 for B <= 0; law [gamma + 1], budgets [b] -> [b].

    One step of the recurrence is a matrix without negative entries: its powers lose no digits to cancellation,
    and a long budget takes neither time nor memory.
    """
    depth = len(law)
    step = np.eye(depth + 1, k=-1)  # acts on (E tau(B), ..., E tau(B - gamma), 1)
    step[0], step[-1] = [*law, 1.0], [*np.zeros(depth), 1.0]
    state, reached = np.eye(depth + 1)[-1], 0
    rounds = np.empty(len(budgets))
    for b in np.argsort(budgets):
        state = np.linalg.matrix_power(step, int(budgets[b]) - reached) @ state
        rounds[b], reached = state[0], int(budgets[b])
    return rounds
