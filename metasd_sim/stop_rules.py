"""Stop rules: whether a drafter draws one more token, from the law `q` that it would draw it from.

All look at `q` alone, before a token is drawn from it, so that rejection sampling stays lossless; it would not be if a
drawn token were looked at and then withheld. Entropies are in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .errors import InputError
from .rounds import BoolArray, FloatArray

ADAEDL_SCALE = 0.2  # AdaEDL's constant in front of the entropy


def entropy(q: FloatArray) -> FloatArray:
    """`H = -sum_x q(x) ln q(x)` in nats; [..., vocabulary] -> [...]."""
    return -np.sum(q * np.log(q, out=np.zeros_like(q), where=q > 0), axis=-1)


def top_probability(q: FloatArray) -> FloatArray:
    """`max_x q(x)`; [..., vocabulary] -> [...]."""
    return np.asarray(q.max(axis=-1))


def margin(q: FloatArray) -> FloatArray:
    """`ln q_(1) - ln q_(2)`, the two largest: a difference of logits; infinite for a point mass. [..., vocabulary]."""
    if q.shape[-1] < 2:
        return np.full(q.shape[:-1], np.inf)
    second, first = np.moveaxis(np.partition(q, -2, axis=-1)[..., -2:], -1, 0)
    with np.errstate(divide="ignore"):
        return np.log(first) - np.log(second)


# name -> whether drafting stops, given (H, max q, margin, h), and the range of h
_RULES: dict[str, tuple[Callable[..., BoolArray], float, float]] = {
    "max-confidence": (lambda H, top, gap, h: top < h, 0.0, 1.0),
    "entropy": (lambda H, top, gap, h: np.sqrt(H) > h, 0.0, np.inf),
    "adaedl": (lambda H, top, gap, h: 1 - np.sqrt(ADAEDL_SCALE * H) < h, -np.inf, 1.0),
    "margin": (lambda H, top, gap, h: gap < h, 0.0, np.inf),
}
STOP_RULES = tuple(_RULES)


@dataclass(frozen=True)
class StopRule:
    """Drafting stops at the first law `q` where, with the threshold `h`,

    - max-confidence: `max_x q(x) < h`, as in assisted generation with a confidence threshold;
    - entropy: `sqrt(H(q)) > h`, SVIP (arXiv 2411.18462);
    - adaedl: `1 - sqrt(0.2 H(q)) < h`, an estimated lower bound of the acceptance (AdaEDL, arXiv 2410.18351);
    - margin: `ln q_(1) - ln q_(2) < h`, of the two largest.

    TapOut (arXiv 2511.02017) takes such rules as the arms of a bandit. All of h's comparisons are strict.
    """

    name: str
    threshold: float

    def __post_init__(self) -> None:
        if self.name not in _RULES:
            raise InputError(f"stop rule: expected one of {', '.join(STOP_RULES)}; found {self.name!r}")
        _, low, high = _RULES[self.name]
        if not (np.isfinite(self.threshold) and low <= self.threshold <= high):
            raise InputError(
                f"stop rule: expected a threshold in [{low:g}, {high:g}] for {self.name}, found {self.threshold}"
            )

    def __call__(self, entropy: ArrayLike, top_probability: ArrayLike, margin: ArrayLike) -> BoolArray:
        """Whether drafting goes on; arrays of one shape, of which each rule reads one. NaN, an unknown law, goes on."""
        stops, _, _ = _RULES[self.name]
        values = (np.asarray(value, dtype=float) for value in (entropy, top_probability, margin))
        return np.asarray(~stops(*values, self.threshold))

    def __str__(self) -> str:
        short = f"{self.threshold:g}"
        return f"{self.name}={short if float(short) == self.threshold else repr(self.threshold)}"


def parse_stop_rule(text: str) -> StopRule:
    """`NAME=THRESHOLD`, such as `adaedl=0.4`."""
    name, _, threshold = text.partition("=")
    try:
        number = float(threshold)
    except ValueError:
        number = np.nan  # refused, after the name
    return StopRule(name, number)
