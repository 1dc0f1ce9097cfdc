"""Every difference between the supported versions of transformers, in one place.

The cache is handled through its public methods alone: it is made, grown by the model, and cropped by a
negative number of tokens, which means the same in all supported versions.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from packaging.specifiers import SpecifierSet
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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


def rotation(config: Any) -> tuple[NDArray[np.float32], float] | None:
    """Inverse frequencies [head size / 2] and scale of rotary positions, or None where they change with the length."""
    if config.rope_parameters["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        return None
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.numpy(), float(rotary.attention_scaling)


def check_rows(model: Any, name: str) -> None:
    """Refuses models that cannot read rows of unequal lengths: those need a mask and positions of their own, and
    windows that slide over places in the cache, not positions, would see the gaps that rejected drafts leave."""
    parameters = inspect.signature(model.forward).parameters
    missing = [key for key in ("attention_mask", "position_ids") if key not in parameters]
    sliding = any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers)
    if missing or sliding:
        reason = f"no argument {' and '.join(missing)}" if missing else "layers that slide over a window"
        raise InputError(
            f"batch size: expected 1 for {name} of type {model.config.model_type}, which has {reason}; "
            f"decode its prompts one after the other"
        )


def check_rollback(model: Any, name: str) -> None:
    """Refuses models with a state that a rejected draft would spoil for good."""
    stateful = getattr(model, "_is_stateful", False)
    layers = [] if stateful else DynamicCache(config=model.config).layers
    restorable = (DynamicLayer, DynamicSlidingWindowLayer)
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in restorable})
    if stateful or unknown:
        raise InputError(
            f"{name}: expected a model of attention layers, whose cache can be rolled back; found the type "
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


def select_rows(cache: DynamicCache, rows: torch.Tensor) -> None:
    """Keeps these rows of a batch."""
    cache.batch_select_indices(rows)


def select_slots(cache: DynamicCache, slots: torch.Tensor) -> None:
    """Keeps of each row the places `slots` [rows, n] along the sequence."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            whole = getattr(layer, name)  # [rows, heads, slots, head size]
            at = slots[:, None, :, None].to(whole.device).expand(-1, whole.shape[1], -1, whole.shape[3])
            setattr(layer, name, whole.gather(2, at))


@torch.inference_mode()
def check_plain_head(model: Any, name: str) -> None:
    """Refuses models that do more than a product between their body's last hidden state and the logits."""
    ids = torch.arange(3, device=model.device)[None]
    logits = model(ids, use_cache=False).logits.float()
    head = model.get_output_embeddings()
    plain = head(model.base_model(ids, use_cache=False).last_hidden_state).float()
    if not torch.allclose(plain, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
        raise InputError(
            f"{name}: expected a model whose logits are a product of its last hidden state, found type "
            f"{model.config.model_type}, which changes them; leave the reduced vocabulary out"
        )
