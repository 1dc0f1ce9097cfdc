"""The training loop of every drafter with a model, which a killed training resumes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from metasd_sim.errors import InputError
from metasd_sim.files import write_atomically

from ..settings import Schedule

OnStep = Callable[[str, int, int], None]  # what is under way, how much of it is done, of how much
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Score:
    """On a batch: the loss to be lowered, over how many tokens, and how many of them the argmax hits."""

    loss: torch.Tensor  # a mean, of which gradients are taken
    tokens: int
    hits: int


class Learner(Protocol):
    """A model and its examples, which are numbered; `noise` is there while it trains, for losses that want some."""

    @property
    def model(self) -> nn.Module: ...

    training: torch.Tensor  # [n] numbers of examples
    held_out: torch.Tensor
    generator: torch.Generator  # of all randomness but the model's first weights

    def score(self, examples: torch.Tensor, noise: torch.Generator | None = None) -> Score: ...

    def save(self, folder: Path) -> None:
        """The model in its public layout."""


@dataclass(frozen=True)
class Epoch:
    epoch: int
    training_loss: float
    held_out_loss: float
    held_out_top1: float  # share of argmax hits


def seeded(seed: int, build: Callable[[], M]) -> tuple[M, torch.Generator]:
    """A model with weights drawn by the seed, and the generator that goes on from there."""
    generator = torch.Generator()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        generator.set_state(torch.get_rng_state())
    return model, generator


def fit(
    learner: Learner, schedule: Schedule, checkpoint: Checkpoint, on_step: OnStep = lambda what, done, of: None
) -> list[Epoch]:
    """The learning curve; goes on from the last epoch that the checkpoint knows."""
    weights = {name: weight for name, weight in learner.model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
    batches = -(-len(learner.training) // schedule.batch)
    total = schedule.epochs * batches
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.learning_rate, total_steps=total)
    curve: list[Epoch] = []
    state = checkpoint.read()
    if state is not None:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(state["weights"][name])
        optimizer.load_state_dict(state["optimizer"])
        rates.load_state_dict(state["rates"])
        learner.generator.set_state(state["generator"])
        curve = [Epoch(**epoch) for epoch in state["curve"]]
    on_step("steps", len(curve) * batches, total)
    for epoch in range(len(curve) + 1, schedule.epochs + 1):
        learner.model.train()
        losses = []
        order = learner.training[torch.randperm(len(learner.training), generator=learner.generator)]
        for examples in torch.split(order, schedule.batch):
            loss = learner.score(examples, learner.generator).loss
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
            rates.step()
            losses.append(float(loss.detach()))
            on_step("steps", (epoch - 1) * batches + len(losses), total)
        mean = sum(losses) / len(losses)
        if mean != mean or mean == float("inf"):
            raise InputError(f"train: expected a finite loss, found {mean} in epoch {epoch}; lower --learning-rate")
        curve.append(Epoch(epoch, mean, *_held_out(learner, schedule.batch)))
        checkpoint.write(
            {
                "weights": {name: weight.detach() for name, weight in weights.items()},
                "optimizer": optimizer.state_dict(),
                "rates": rates.state_dict(),
                "generator": learner.generator.get_state(),
                "curve": [asdict(epoch) for epoch in curve],
            }
        )
    return curve


@torch.no_grad()
def _held_out(learner: Learner, batch: int) -> tuple[float, float]:
    """Mean loss of a token, share of argmax hits."""
    learner.model.eval()
    loss, tokens, hits = 0.0, 0, 0
    for examples in torch.split(learner.held_out, batch):
        score = learner.score(examples)
        loss += float(score.loss) * score.tokens
        tokens, hits = tokens + score.tokens, hits + score.hits
    return loss / max(tokens, 1), hits / max(tokens, 1)


class Checkpoint:
    """The folder OUT.training beside the folder to be written: what a training needs to resume, and its large files.

    `settings` are everything that makes a training what it is; others than those it began with are refused, or with
    `force` begin anew.
    """

    def __init__(self, out: str | Path, settings: dict[str, Any], force: bool = False) -> None:
        self.folder, self.settings = training_folder(out), json.loads(json.dumps(settings))
        self.path, known = self.folder / "state.pt", self.folder / "settings.json"
        try:
            self._check(known)
        except InputError:
            if not force:
                raise
            self.remove()
        self.folder.mkdir(exist_ok=True)
        write_atomically(known, json.dumps(self.settings, indent=1).encode(), force=True)

    def _check(self, known: Path) -> None:
        if not known.exists() and not self.path.exists():
            return
        try:
            found = json.loads(known.read_text())
            difference = differing(self.settings, found)
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{known}: expected settings of a training to resume, found {error}; {REMEDY}") from None
        if difference is not None:
            name, expected, other = difference
            raise InputError(f"{self.folder}: expected to resume with {name} {expected}, found {other}; {REMEDY}")

    def read(self) -> dict[str, Any] | None:
        """The last epoch's state."""
        if not self.path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file raises
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"{self.path}: expected a training to resume, found {reason}; {FRESH}") from None
        return state

    def write(self, state: dict[str, Any]) -> None:
        """Whole or not at all; what a kill leaves of it lies in the folder and goes with it."""
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".state.", delete=False) as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self.path)

    def remove(self) -> None:
        shutil.rmtree(self.folder)


REMEDY = "repeat the command it began with, or pass --force to start again"
FRESH = "remove the folder to start again"


def training_folder(out: str | Path) -> Path:
    return Path(out).with_name(Path(out).name + ".training")


def differing(expected: dict[str, Any], found: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """Name and values of the first setting that differs."""
    for name in {**expected, **found}:
        if expected.get(name) != found.get(name):
            return name, expected.get(name), found.get(name)
    return None
