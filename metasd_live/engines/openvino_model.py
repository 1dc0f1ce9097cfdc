"""The engine for CPUs: the model as a graph of OpenVINO, its weights as the checkpoint holds them.

Keys and values stay inside the graph. A rejected token stays there too, masked, while positions go on without it: that
costs nothing at the time, and once many places are masked the cache is compacted.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray

from metasd_sim.errors import InputError
from metasd_sim.rounds import FloatArray

from ..compat import rotation
from . import graph, weights
from .base import BatchState, CausalModel, Features, ModelState, check_rollback
from .graph import MASKED, Shape
from .threads import allowed_threads
from .weights import Weights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MODES = ("", "int8")
# activations, products and cache in float32; the plug-in's own choice is 8-bit integers where the weights have few bits
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
SPARE_PLACES = 128  # masked places that are cheaper to keep than to clear out


def unsupported(config: Any) -> str | None:
    """What of a model the graph does not know, or None."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in FAMILIES:
        return f"type {config.model_type}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    if rotation(config) is None:
        return f"rotation {config.rope_parameters['rope_type']}"
    if len(kinds) > 1:
        return f"layers of {' and '.join(sorted(kinds))}"
    return None


def shape_of(config: Any) -> Shape:
    inv_freq, scale = rotation(config)  # type: ignore[misc]
    kinds = getattr(config, "layer_types", None)
    sliding = "sliding_attention" in kinds if kinds else config.model_type == "mistral"
    return Shape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        inv_freq=inv_freq,
        rotation_scale=scale,
        vocab_size=config.vocab_size,
        window=getattr(config, "sliding_window", None) if sliding else None,
    )


class OpenVINOModel(CausalModel):
    """A Llama, Mistral, Qwen2 or Qwen3 on the CPU.

    `read` gives the weights (again, where a drafter needs them in torch), `load` the model of transformers. With
    `cache` the graph is kept in that folder. `mode` int8 takes 8-bit weights, a scale for each row, and the plug-in's
    own precision: faster, and no longer the same model.
    """

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(
        self,
        config: Any,
        generation_config: Any,
        read: Callable[[], Weights],
        load: Callable[[], Any],
        name: str,
        mode: str = "",
        cache: Path | None = None,
    ) -> None:
        reason = unsupported(config)
        if reason is not None:
            raise InputError(f"engine: expected {', '.join(FAMILIES)} for openvino, found {reason}; take engine torch")
        self.config, self.generation_config, self.name, self.mode = config, generation_config, name, mode
        self.shape = shape_of(config)
        self._read, self._load = read, load
        self._core = ov.Core()
        self.file: Path | None = None  # that holds the graph's constants
        built = self._cached(cache) if cache is not None else self._build()
        self.vocab_size, self.size, self.layers = config.vocab_size, config.hidden_size, config.num_hidden_layers
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._compile(built)

    def _compile(self, built: ov.Model) -> None:
        options = {"INFERENCE_NUM_THREADS": allowed_threads(), "NUM_STREAMS": 1, "ENABLE_MMAP": True}
        compiled = self._core.compile_model(built, "CPU", options | ({} if self.mode else EXACT))
        self._compiled = compiled
        self.native_bytes = sum(one.get_byte_size() for one in built.get_ops() if one.get_type_name() == "Constant")
        self._free: list[Any] = []  # requests that no state uses
        for width in (1, 4, 32):  # the plug-in packs weights anew for products of one row, of few and of many
            self.prefill([0] * (width + 1))
        if self.file is not None:
            release_pages(self.file)
        self.settings = {
            "name": "openvino",
            "version": version("openvino"),
            "mode": self.mode or "exact",
            "weights": " and ".join(sorted(_matrix_types(built))),
            **{key.lower(): _plain(compiled.get_property(key)) for key in EXACT},
            "instructions": sorted(self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }

    def _build(self) -> ov.Model:
        read = self._read()
        return graph.build(self.shape, weights.to_int8(read) if self.mode == "int8" else read)

    def _cached(self, folder: Path) -> ov.Model:
        """The graph from its file, which is made if it is not there."""
        kind = f"{self.mode or 'exact'}-{graph.VERSION}-{version('openvino')}"
        place = folder / f"openvino-{kind}"
        if not place.is_dir():
            try:
                with tempfile.TemporaryDirectory(dir=folder, prefix=".openvino-", ignore_cleanup_errors=True) as new:
                    ov.save_model(self._build(), Path(new) / "graph.xml", compress_to_fp16=False)
                    os.rename(new, place)
            except OSError:
                if not place.is_dir():  # else another process was faster
                    return self._build()  # a folder that cannot be written to costs time, not the run
        self.file = place / "graph.bin"
        return self._core.read_model(place / "graph.xml")

    @cached_property
    def model(self) -> Any:
        return self._load()

    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and head in float32, for drafters that torch runs."""
        read = self._read()
        embedding = weights.dense(read["model.embed_tokens.weight"])
        head = read.get("lm_head.weight")
        return embedding, embedding if head is None else weights.dense(head)

    def embedding(self) -> torch.Tensor:
        return self._tables[0]

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._tables[1], None

    def check_head(self) -> None:
        pass  # the graph ends with a product

    def first_layers(self, layers: int, name: str) -> OpenVINOModel:
        twin = object.__new__(OpenVINOModel)
        twin.__dict__.update({key: value for key, value in vars(self).items() if key not in ("model", "_tables")})
        twin.name, twin.layers, twin.shape = name, layers, replace(self.shape, layers=layers)
        twin.file = None
        twin._compile(twin._build())
        return twin

    # one text

    def prefill(self, ids: Sequence[int], features: bool = False) -> ModelState:
        state = ModelState(self._new_cache(1), features=Features() if features else None)
        if len(ids) > 1:
            self._pass(state, ids[:-1], 1)
        return state

    def forward(self, state: ModelState, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
        self._pass(state, ids, keep or len(ids))
        return state.cache.output("logits")[0]

    def hidden(self, state: ModelState, ids: Sequence[int], keep: int) -> torch.Tensor:
        self._pass(state, ids, 1)
        return state.cache.output("hidden")[0, -keep:]

    def _pass(self, state: ModelState, ids: Sequence[int], keep: int) -> None:
        state.cache.read([ids], [state.length], keep)
        state.length += len(ids)
        if state.features is not None:
            state.features.append(state.cache.output("hidden")[0])

    def rollback(self, state: ModelState, tokens: int) -> None:
        check_rollback(state.length, tokens)
        state.cache.forget([tokens])
        state.length -= tokens
        if state.features is not None:
            state.features.forget(tokens)

    # several texts

    def check_rows(self) -> None:
        pass

    def prefill_rows(self, prompts: Sequence[Sequence[int]], features: bool = False) -> BatchState:
        own = [Features() for _ in prompts] if features else None
        state = BatchState(self._new_cache(len(prompts)), [0] * len(prompts), own)
        if max(map(len, prompts)) > 1:
            self._pass_rows(state, [prompt[:-1] for prompt in prompts], 1)
        return state

    def forward_rows(self, state: BatchState, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self._pass_rows(state, ids, max(map(len, ids)))
        logits = state.cache.output("logits")
        return [row[: len(own)] for row, own in zip(logits, ids, strict=True)]

    def _pass_rows(self, state: BatchState, ids: Sequence[Sequence[int]], keep: int) -> None:
        state.cache.read(ids, state.length, keep)
        state.length = [n + len(own) for n, own in zip(state.length, ids, strict=True)]
        if state.features is not None:
            hidden = state.cache.output("hidden")
            for row, own in enumerate(state.features):
                own.append(hidden[row, : len(ids[row])])

    def rollback_rows(self, state: BatchState, tokens: Sequence[int]) -> None:
        for length, forget in zip(state.length, tokens, strict=True):
            check_rollback(length, forget)
        state.cache.forget(tokens)
        state.length = [n - forget for n, forget in zip(state.length, tokens, strict=True)]
        for own, forget in zip(state.features or (), tokens, strict=False):
            own.forget(forget)

    def select_rows(self, state: BatchState, rows: Sequence[int]) -> None:
        state.cache.select(list(rows))
        state.length = [state.length[row] for row in rows]
        if state.features is not None:
            state.features = [state.features[row] for row in rows]

    def _new_cache(self, rows: int) -> _Cache:
        request = self._free.pop() if self._free else self._compiled.create_infer_request()
        request.reset_state()
        cache = _Cache(request, rows, self.shape)
        weakref.finalize(cache, self._free.append, request)
        return cache


class _Output(np.ndarray[Any, Any]):
    """What a request wrote, which keeps the request from other states as long as somebody looks at it."""

    cache: _Cache


class _Cache:
    """The places of a request's cache: who holds which token, and what may be seen."""

    def __init__(self, request: Any, rows: int, shape: Shape) -> None:
        self.request, self.shape, self.used = request, shape, 0
        self.bias: FloatArray = np.empty((rows, 0), dtype=np.float32)  # [rows, capacity] 0, or MASKED
        self.position: NDArray[np.int64] = np.empty((rows, 0), dtype=np.int64)  # [rows, capacity] of the token there
        self.rows = np.arange(rows, dtype=np.int32)  # of the request's cache, for the next pass

    @property
    def native_bytes(self) -> int:
        s = self.shape
        return 2 * s.layers * s.key_heads * s.head_size * 4 * self.used * len(self.rows)

    def read(self, ids: Sequence[Sequence[int]], start: Sequence[int], keep: int) -> None:
        """A pass over new tokens of each row, the first at position `start[row]`; shorter rows are padded."""
        rows, width, used = len(ids), max(map(len, ids)), self.used
        if used + width > self.bias.shape[1]:
            more = max(width, 256, used)
            self.bias = np.pad(self.bias, ((0, 0), (0, more)))
            self.position = np.pad(self.position, ((0, 0), (0, more)))
        tokens = np.zeros((rows, width), dtype=np.int64)
        positions = np.arange(width, dtype=np.int64) + np.asarray(start, dtype=np.int64)[:, None]
        self.bias[:, used : used + width] = 0
        for row, own in enumerate(ids):
            tokens[row, : len(own)] = own
            self.bias[row, used + len(own) : used + width] = MASKED
        self.position[:, used : used + width] = positions
        self.used = slots = used + width
        mask = np.repeat(self.bias[:, None, None, :slots], width, axis=2)
        mask[..., used:][..., _above(width)] = MASKED
        if self.shape.window is not None:
            mask[positions[:, None, :, None] - self.position[:, None, None, :slots] >= self.shape.window] = MASKED
        self.inputs = (tokens, positions, mask, self.rows, np.array([keep], dtype=np.int64))  # alive during the pass
        for name, values in zip(graph.INPUTS, self.inputs, strict=True):
            self.request.set_tensor(name, ov.Tensor(values, shared_memory=True))
        self.request.infer()
        self.rows = np.arange(rows, dtype=np.int32)

    def output(self, name: str) -> torch.Tensor:
        """[rows, n, ...], not copied."""
        values = self.request.get_tensor(name).data.view(_Output)
        values.cache = self
        return torch.from_numpy(values)

    def forget(self, tokens: Sequence[int]) -> None:
        """The last `tokens[row]` tokens of each row are masked."""
        for row, count in enumerate(tokens):
            if count:
                held = np.flatnonzero(self.bias[row, : self.used] == 0)
                self.bias[row, held[-count:]] = MASKED
        longest = int((self.bias[:, : self.used] == 0).sum(axis=1).max())
        if self.used - longest > SPARE_PLACES + longest // 4:
            self._compact(longest)

    def select(self, rows: list[int]) -> None:
        self.bias, self.position = self.bias[rows], self.position[rows]
        self.rows = self.rows[rows]

    def _compact(self, longest: int) -> None:
        """Closes the gaps; `longest` is the most tokens that a row holds."""
        at = np.argsort(self.bias[:, : self.used] != 0, axis=1, kind="stable")[:, :longest]  # [rows, longest]
        for state in self.request.query_state():
            values = state.state.data[self.rows]  # [rows, key_heads, slots, d]
            state.state = ov.Tensor(np.take_along_axis(values, at[:, None, :, None], axis=2))
        self.rows = np.arange(len(at), dtype=np.int32)
        self.bias = np.take_along_axis(self.bias, at, axis=1)
        self.position = np.take_along_axis(self.position, at, axis=1)
        self.used = longest


def _plain(value: Any) -> str:
    """A property of the plug-in as text: `float32` for a type."""
    return str(value.to_string() if isinstance(value, ov.Type) else value)


def _above(width: int) -> NDArray[np.bool_]:
    """Places after a token's own, among the new ones; [width, width]."""
    return np.triu(np.ones((width, width), dtype=bool), 1)


def _matrix_types(model: ov.Model) -> set[str]:
    """Types of the constants with rows and columns."""
    constants = (one for one in model.get_ops() if one.get_type_name() == "Constant")
    shapes = ((one, list(one.get_output_shape(0))) for one in constants)
    return {one.get_element_type().get_type_name() for one, s in shapes if len(s) > 1 and s[0] > 1 and s[-1] > 1}


def release_pages(file: Path) -> None:
    """Lets go of what is resident of a mapped file; it comes back from the file when somebody reads it again.

    Once the plug-in has packed the weights nobody reads their first form, but for the embeddings of single tokens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # what compiling needed
    if not hasattr(libc, "madvise") or not Path("/proc/self/maps").exists():
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f" {file.resolve()}"):
            start, end = (int(x, 16) for x in line.partition(" ")[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
