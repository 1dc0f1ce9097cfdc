"""A training from texts to the folder of a drafter, with its learning curve and what it is worth."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metasd_sim import traces
from metasd_sim.files import check_folder_free

from ..drafters import Arm
from ..drafters.causal import load_causal
from ..drafters.eagle import load_eagle
from ..drafters.medusa import load_medusa
from ..prompts import Prompt
from ..record import Recorder
from ..settings import DRAFT_LENGTH, CausalSettings, EagleSettings, MedusaSettings
from ..target import Target
from .causal import train_causal
from .eagle import train_eagle
from .loop import Checkpoint, OnStep, differing, fit, training_folder
from .medusa import train_medusa
from .sources import TrainingText

RECORD = "metasd_training.json"
Settings = CausalSettings | EagleSettings | MedusaSettings
# class of settings -> kind on the command line, how to make a learner, how to load the drafter
KINDS: dict[type, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    CausalSettings: ("causal", train_causal, load_causal),
    EagleSettings: ("eagle", train_eagle, load_eagle),
    MedusaSettings: ("medusa", train_medusa, load_medusa),
}


@dataclass(frozen=True)
class Evaluation:
    """Greedy texts of prompts, on which the new drafter's acceptance is recorded."""

    prompts: Sequence[Prompt]
    max_new_tokens: int
    draft_length: int = DRAFT_LENGTH
    chat_template: bool = True

    def settings(self) -> dict[str, Any]:
        return {
            "prompts": [prompt.id for prompt in self.prompts],
            "max_new_tokens": self.max_new_tokens,
            "draft_length": self.draft_length,
            "chat_template": self.chat_template,
        }

    def measure(self, drafter: Any, target: Target, on_step: OnStep) -> dict[str, Any]:
        """Mean accepted tokens of a round that starts at any position, and the shares of rounds with so many."""
        length = min(self.draft_length, getattr(drafter, "longest_draft", self.draft_length))
        recorder = Recorder(
            target, [Arm("trained", drafter, length)], self.max_new_tokens, chat_template=self.chat_template
        )
        parts = []
        for number, prompt in enumerate(self.prompts):
            parts.append(recorder.record(number, prompt))
            on_step("evaluation", number + 1, len(self.prompts))
        trace = traces.merge(parts)
        reached = np.cumprod(trace.accept[:, 0].astype(float), axis=1).mean(axis=0)
        return self.settings() | {
            "draft_length": length,
            "tokens": len(trace.tokens),
            "mean_accepted": float(reached.sum()),
            "accepted_by_depth": reached[:length].tolist(),  # share of positions with a draft accepted that far
        }


def check_training_out(out: str, force: bool = False) -> bool:
    """Whether a training was begun here; refuses a folder that is there, unless it was killed on its last step."""
    begun = training_folder(out).is_dir()
    if not begun:
        check_folder_free(out, force)
    return begun


def train_drafter(
    texts: Sequence[TrainingText],
    target: Target,
    settings: Settings,
    out: str,
    seed: int = 0,
    source: str = "texts",
    evaluation: Evaluation | None = None,
    force: bool = False,
    on_step: OnStep = lambda what, done, of: None,
) -> dict[str, Any]:
    """Trains, resuming what was begun here, and puts the folder in place whole; returns its training record."""
    check_training_out(out, force)
    kind, make, load = KINDS[type(settings)]
    content = json.dumps([[text.ids, text.start] for text in texts])
    identity = {
        "kind": kind,
        **asdict(settings),
        "seed": seed,
        "target": target.name,
        "weights": target.weights,
        "tokenizer": target.tokenizer_hash,
        "texts": hashlib.sha256(content.encode()).hexdigest()[:16],
        "evaluation": None if evaluation is None else evaluation.settings(),
    }
    checkpoint = Checkpoint(out, identity, force)
    place = Path(out)
    if place.exists() and not force:
        done = _read_record(place)
        if done is None or differing(checkpoint.settings, done["settings"]) is not None:
            check_folder_free(out)
        checkpoint.remove()
        return done or {}
    learner = make(texts, target, settings, seed, checkpoint.folder, on_step)
    curve = fit(learner, settings.schedule, checkpoint, on_step)
    built = checkpoint.folder / "built"
    if built.exists():
        shutil.rmtree(built)
    built.mkdir()
    learner.save(built)
    found = None
    if evaluation is not None and evaluation.prompts:
        found = evaluation.measure(load(str(built), f"{kind}:{out}", target), target, on_step)
    record = {
        "settings": checkpoint.settings,
        "source": source,
        "texts": len(texts),
        "tokens": sum(len(text.ids) for text in texts),
        "parameters": sum(p.numel() for p in learner.model.parameters() if p.requires_grad),
        "curve": [asdict(epoch) for epoch in curve],
        "evaluation": found,
    }
    (built / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    check_folder_free(out, force)  # it may have appeared meanwhile
    if place.exists():
        replaced = checkpoint.folder / "replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        place.rename(replaced)
    built.rename(place)
    checkpoint.remove()
    return record


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record.get("settings"), dict) else None
