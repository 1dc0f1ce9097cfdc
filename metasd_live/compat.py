"""Every difference between the supported versions of transformers, in one place.

The cache is handled through its public methods alone: it is made, grown by the model, and cropped by a
negative number of tokens, which means the same in all supported versions.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from metasd_sim.errors import InputError

SUPPORTED = ">=5.16,<6"


def check_version() -> None:
    found = version("transformers")
    if found not in SpecifierSet(SUPPORTED):
        raise InputError(
            f"transformers: expected version {SUPPORTED}, found {found}; run pip install 'transformers{SUPPORTED}'"
        )


def forward_names(model: Any) -> dict[str, str]:
    """What this version and model call the arguments `cache` and, where it exists, `logits_to_keep`."""
    parameters = inspect.signature(model.forward).parameters
    names = {"cache": "cache" if "cache" in parameters else "past_key_values"}
    if "logits_to_keep" in parameters:
        names["logits_to_keep"] = "logits_to_keep"
    return names


def check_rollback(model: Any, name: str) -> None:
    """Refuses models with a state that a rejected draft would spoil for good."""
    stateful = getattr(model, "_is_stateful", False)
    layers = [] if stateful else DynamicCache(config=model.config).layers
    restorable = (DynamicLayer, DynamicSlidingWindowLayer)
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in restorable})
    if stateful or unknown:
        raise InputError(
            f"target: expected a model of attention layers, whose cache can be rolled back; found {name} of type "
            f"{model.config.model_type} with {', '.join(unknown) or 'a recurrent state'}; choose another model"
        )


def new_cache() -> DynamicCache:
    """A cache that keeps every token: layers with a sliding window mask what they may not see, and nothing that a
    rollback needs is lost."""
    return DynamicCache()


def crop(cache: DynamicCache, tokens: int) -> None:
    """Forgets the last `tokens` tokens; `Cache.crop(0)` means different things in different layers and versions."""
    if tokens:
        cache.crop(-tokens)
