"""An oblivious adversary that knows a policy's code and its seed."""

from __future__ import annotations

import numpy as np

from .environments import Context
from .errors import InputError
from .policies import Policy
from .rounds import BoolArray, IntArray, Rounds
from .simulate import simulate


class _Fooling:
    """Accepts nothing of whatever is played, so every round emits one token, and remembers the arms."""

    queries = 1
    endless = True
    gives: frozenset[str] = frozenset()

    def __init__(self, arms: int, max_draft: int) -> None:
        self.arms, self.max_draft = tuple(f"arm{i}" for i in range(arms)), max_draft

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.done: BoolArray = np.zeros(rows, dtype=bool)
        self.played: list[int] = []

    def observe(self, rows: IntArray) -> Context:
        return Context(np.zeros(len(rows), dtype=np.int64), np.full(len(rows), not self.played))

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        self.played += arms.tolist()
        none = np.zeros(len(rows), dtype=np.int64)
        return Rounds(arms, np.full(len(rows), self.max_draft), none, none + 1, self.max_draft)

    def fixed_arms(self, budgets: IntArray) -> None:
        return None


def fooling_sequence(
    policy: Policy, arms: int, max_draft: int, rounds: int, seed: int = 0, others: int | None = None
) -> IntArray:
    """accepted [rounds, arms]: 0 for the arm that `simulate(policy, ..., budget=rounds, runs=1, seed=seed)` plays,
    `others` (default: max_draft) for the rest.

    The policy emits one token a round; the arm it plays least gets `others + 1` in (1 - 1/arms) of them or more. So
    against this seed regret is linear, and for a policy that draws no lots against any. Seed and budget must be these.
    """
    others = max_draft if others is None else others
    for name, number, least in (("arms", arms, 1), ("max_draft", max_draft, 1), ("rounds", rounds, 1)):
        if not isinstance(number, int | np.integer) or number < least:
            raise InputError(f"{name}: expected a whole number of {least} or more, found {number!r}")
    if not 0 <= others <= max_draft:
        raise InputError(f"others: expected accepted tokens in 0..{max_draft}, found {others}")
    environment = _Fooling(arms, max_draft)
    simulate(policy, environment, budget=rounds, runs=1, seed=seed)
    accepted: IntArray = np.full((rounds, arms), others, dtype=np.int64)
    accepted[np.arange(rounds), environment.played] = 0
    return accepted
