"""White-box drafters that are trained within the tests, on what a tiny target writes."""

from functools import cache

import torch

from metasd_live.drafters import Arm
from metasd_live.drafters.eagle import EagleDrafter, EagleModel
from metasd_live.drafters.medusa import MedusaDrafter, MedusaHeads
from metasd_live.target import Target
from metasd_live.train import EagleSettings, MedusaSettings, TrainingText, train_eagle, train_medusa
from metasd_live.train.eagle import layer_config
from metasd_live.train.loop import Checkpoint, fit

from .live_cases import tiny_target, tiny_tokenizer

EAGLE = EagleSettings(epochs=8, batch=8, learning_rate=5e-3, vocabulary=0)
MEDUSA = MedusaSettings(epochs=6, heads=3, learning_rate=3e-3)
MAKE = {EagleSettings: train_eagle, MedusaSettings: train_medusa}


def sampled_texts(target, count, tokens, seed=0, prompt_tokens=3):
    """What the target writes at temperature 1 after random prompts."""
    ids = torch.randint(2, target.vocab_size, (count, prompt_tokens), generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        written = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
    return [TrainingText(row, prompt_tokens) for row in written.tolist()]


def trained(target, settings, folder, texts=120, tokens=40):
    learner = MAKE[type(settings)](
        sampled_texts(target, texts, tokens), target, settings, 0, folder, lambda *step: None
    )
    curve = fit(learner, settings.schedule, Checkpoint(folder / "drafter", {}))
    return learner, curve


def eagle_drafter(target, seed=0, frequent=None):
    """Untrained."""
    torch.manual_seed(seed)
    return EagleDrafter(EagleModel(layer_config(target)), "eagle", target, frequent)


def medusa_drafter(target, heads=3, seed=0, frequent=None, noise=0.3):
    """Untrained: near the target's own head, so that some drafts are accepted."""
    torch.manual_seed(seed)
    model = MedusaHeads(heads, 1, target.model.config.get_text_config().hidden_size, target.vocab_size)
    with torch.no_grad():
        for _, last in model.parts():
            head = target.model.get_output_embeddings().weight
            last.weight.copy_(head + noise * head.std() * torch.randn_like(head))
    return MedusaDrafter(model, "medusa", target, frequent)


def white_box_arms(target, frequent=None):
    return [
        Arm("eagle", eagle_drafter(target, 0, frequent), 4),
        Arm("medusa", medusa_drafter(target, 3, 0, frequent), 3),
    ]


@cache
def small_target(vocabulary=4, eos=(), seed=0):
    """So few tokens that all short texts can be enumerated."""
    torch.manual_seed(seed)
    kept = tiny_target()
    config = type(kept.model.config)(**(kept.model.config.to_dict() | {"vocab_size": vocabulary, "hidden_size": 16}))
    model = type(kept.model)(config).eval()
    model.generation_config.eos_token_id = list(eos) or None
    return Target(model, tiny_tokenizer(["<unk>", *(f"w{i}" for i in range(1, vocabulary))]), "small")
