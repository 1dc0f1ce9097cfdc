"""What can be chosen, with its defaults, for the command line's help: nothing here waits for torch to load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from metasd_sim.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")
ENGINES = ("auto", "torch", "openvino", "openvino:int8")
RULES = ("greedy", "rejection", "gumbel")
DRAFT_LENGTH = 8
REPETITIONS = 20  # rounds of each drafted length, to measure costs


@dataclass(frozen=True)
class NgramSettings:
    """Which contexts may propose: of `min_context` to `max_context` tokens, seen often and predictably enough.

    A context whose best continuation came `count` times of `total` proposes it where
    `count / (total + 1) >= min_share`: 1/2 for a context seen once.
    """

    max_context: int = 4
    min_context: int = 2
    min_share: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.min_context <= self.max_context <= 16:
            raise InputError(
                f"n-gram: expected 1 <= min_context <= max_context <= 16, "
                f"found {self.min_context} and {self.max_context}"
            )
        if not 0 <= self.min_share < 1:
            raise InputError(f"n-gram: expected min_share in [0, 1), found {self.min_share}")


@dataclass(frozen=True)
class Schedule:
    """AdamW, one cycle of the learning rate, gradients clipped at norm 1."""

    epochs: int
    batch: int  # examples
    learning_rate: float
    weight_decay: float = 0.0


@dataclass(frozen=True)
class CausalSettings:
    """A small Llama over the most frequent tokens, and how it is trained."""

    vocabulary: int = 4096
    layers: int = 2
    hidden: int = 256
    heads: int = 4
    epochs: int = 12
    batch: int = 16
    window: int = 128
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        _check("causal", self)
        if self.hidden % self.heads:
            raise InputError(
                f"train causal: expected hidden to be a multiple of heads, found {self.hidden}, {self.heads}"
            )

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.epochs, self.batch, self.learning_rate, weight_decay=0.05)


@dataclass(frozen=True)
class EagleSettings:
    """The cross entropy counts the `vocabulary` most frequent tokens of the texts only (0: all tokens): both laws are
    renormalised over them, and the head costs that much less."""

    epochs: int = 12
    batch: int = 4  # pieces of texts
    window: int = 256
    learning_rate: float = 1e-3
    noise: float = 0.1  # uniform on +-noise, added to features
    law_weight: float = 0.1  # of the cross entropy
    vocabulary: int = 8192

    def __post_init__(self) -> None:
        _check("eagle", self, ("noise", "law_weight", "vocabulary"))
        if self.window < 3:
            raise InputError(f"train eagle: expected a window of 3 or more, found {self.window}")

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.epochs, self.batch, self.learning_rate)


@dataclass(frozen=True)
class MedusaSettings:
    """With a `vocabulary` (0: all tokens) the loss knows the most frequent tokens of the texts only; draft with the
    same ones then. Without `products` only the blocks learn: much less to compute and to keep."""

    heads: int = 4
    blocks: int = 1
    epochs: int = 6
    batch: int = 256  # features
    window: int = 256
    learning_rate: float = 1e-3
    vocabulary: int = 0
    products: bool = True

    def __post_init__(self) -> None:
        _check("medusa", self, ("vocabulary",))
        if self.window < 3:
            raise InputError(f"train medusa: expected a window of 3 or more, found {self.window}")

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.epochs, self.batch, self.learning_rate)


def _check(kind: str, settings: Any, may_be_zero: tuple[str, ...] = ()) -> None:
    """Refuses numbers that are not above 0, or below it where they may be 0."""
    for name, value in asdict(settings).items():
        if isinstance(value, bool):
            continue
        if name in may_be_zero and not value >= 0:
            raise InputError(f"train {kind}: expected {name} of 0 or more, found {value}")
        if name not in may_be_zero and not value > 0:
            raise InputError(f"train {kind}: expected {name} above 0, found {value}")
