"""Recording: the target's texts with every drafter's acceptance on them."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from metasd_sim import traces
from metasd_sim.errors import InputError
from metasd_sim.files import check_free
from metasd_sim.rounds import FloatArray
from metasd_sim.traces import Query, Trace

from .calibrate import measure_costs
from .decode import draft_tokens
from .drafters import Arm, Draft, longest_draft
from .drafters.base import LawStream, StartLawStream, open_stream
from .ending import Ending
from .engines.base import ModelState
from .files import file_hash
from .prompts import Prompt, prompt_features
from .sampling import check_processors
from .settings import REPETITIONS
from .target import Target
from .verify import LogitsError, Rule, TextRule, acceptance, overlaps

SIGNALS = ("entropy", "top_probability", "margin")  # of a drafter's law, for stop rules


@dataclass(frozen=True)
class Recorder:
    """Records prompts with one target and one set of arms; `overlap_dtype` is how overlaps are kept."""

    target: Target
    arms: Sequence[Arm]
    max_new_tokens: int
    rule: Rule = field(default_factory=Rule)
    chat_template: bool = True
    seed: int = 0
    overlap_dtype: str = "float16"
    blocks: bool = False  # also overlaps past a rejection, for block divergence; a target pass per place and arm
    eos: Collection[int] | None = None  # ids that end a text; None: the target's own
    stop_strings: Sequence[str] = ()
    signals: bool = False  # also what stop rules and ensembles need: entropy, largest probability, margin, log q

    def __post_init__(self) -> None:
        if self.blocks and self.rule.verification == "gumbel":
            raise InputError("blocks: expected greedy or rejection verification, found gumbel; record without --blocks")
        if self.blocks and self.rule.guarded:
            raise InputError(
                "blocks: expected processors that answer for any text, found one that may be asked about accepted "
                "tokens only; record without --blocks, or set its any_text = True"
            )
        white = [arm.name for arm in self.arms if arm.white_box]
        if self.blocks and white:
            raise InputError(
                f"blocks: expected drafters whose law does not depend on where a round starts, found "
                f"{', '.join(white)}; record without --blocks"
            )
        remembering = [arm.name for arm in self.arms if getattr(arm.drafter, "remembers", False)]
        if remembering:
            raise InputError(
                f"drafter: expected drafters that start afresh with each prompt, found {', '.join(remembering)}, which "
                f"remembers earlier texts: its drafts depend on their order and do not replay; use suffix"
            )
        check_processors(self.rule, self.target.vocab_size, device=self.target.device)

    @cached_property
    def ending(self) -> Ending:
        return Ending.of(self.target, self.eos, self.stop_strings)

    @property
    def max_draft(self) -> int:
        return longest_draft(self.arms)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        target = self.target
        return {
            "target": target.name,
            "weights": target.weights,
            "drafter_files": {file: file_hash(Path(file)) for arm in self.arms for file in arm.files},
            "tokenizer": target.tokenizer_hash,
            "chat_template": self.chat_template,
            "temperature": self.rule.temperature,
            "processors": list(self.rule.settings),
            "eos": sorted(self.ending.eos),
            "stop_strings": list(self.ending.strings),
            "blocks": self.blocks,
            "signals": self.signals,
            "seed": self.seed,
            "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.machine(),
            "engine": target.settings,
            "dtype": str(target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("metasd", "torch", "transformers")},
        }

    def encode(self, prompt: Prompt) -> list[int]:
        ids = self.target.encode(prompt.text, self.chat_template)
        self.check_length(len(ids))
        return ids

    def check_length(self, prompt_tokens: int) -> None:
        """Refuses a text that the target or a drafter has no room for."""
        self.target.check_length(prompt_tokens, self.max_new_tokens)
        for arm in self.arms:
            if arm.max_length is not None and prompt_tokens + self.max_new_tokens > arm.max_length:
                raise InputError(
                    f"{arm.name}: expected prompt and new tokens to fit the drafter's {arm.max_length} positions, "
                    f"found {prompt_tokens} and {self.max_new_tokens}; leave the drafter out or lower --max-new-tokens"
                )

    def record(self, query: int, prompt: Prompt) -> Trace:
        """The trace of one prompt, the `query`-th of the recording, which gives it its randomness."""
        return self._trace(prompt, ids := self.encode(prompt), self._decode(query, ids))

    def record_text(self, prompt: Prompt, ids: Sequence[int], text: Sequence[int]) -> Trace:
        """The trace of a `text` that the target wrote after the prompt `ids`, with this rule and this ending."""
        self.check_length(len(ids))
        if self.rule.verification == "gumbel":
            raise InputError("trace: expected greedy or rejection verification, found gumbel; record its prompts")
        return self._trace(prompt, ids, self._decode(0, list(ids), list(text)))

    def _trace(self, prompt: Prompt, ids: Sequence[int], columns: dict[str, Any]) -> Trace:
        names, features = prompt_features(prompt.text)
        return Trace(
            arms=tuple(arm.name for arm in self.arms),
            drafters=tuple(map(str, self.arms)),
            queries=(Query(prompt.id, prompt.category, prompt.sha256, len(ids)),),
            verification=self.rule.verification,
            max_new_tokens=self.max_new_tokens,
            provenance=self.provenance,
            features=np.array([features], dtype=np.float32),
            feature_names=names,
            **columns,
        )

    def _drafter_laws(self, arm: int, rule: TextRule, logits: torch.Tensor) -> torch.Tensor:
        """Its laws; refuses by its name a drafter whose logits make none."""
        laws = rule.laws(logits)
        if laws[:, 0].isnan().any():  # one NaN or infinity makes a whole row of them
            raise InputError(f"drafter {self.arms[arm].name}: {LogitsError()}")
        return laws

    @torch.inference_mode()
    def _decode(self, query: int, prompt: list[int], known: list[int] | None = None) -> dict[str, Any]:
        """Plain decoding, or the `known` text; every arm drafts everywhere, and is followed while the text agrees.

        Drafters with a law do not depend on where a round starts: one pass over the finished text tells all.
        """
        shape = (self.max_new_tokens, len(self.arms), self.max_draft)
        accept = np.zeros(shape, dtype=np.float32)
        overlap = np.full(shape, np.nan, dtype=np.float32)
        drafted = np.zeros(shape[:2], dtype=np.uint8)
        log_q = np.full(shape, np.nan, dtype=np.float32)
        rule = self.rule.open(np.random.SeedSequence((self.seed, query)), self.max_new_tokens, len(prompt))
        white_box = any(arm.white_box for arm in self.arms)
        state = self.target.prefill(prompt, features=True) if white_box else self.target.prefill(prompt)
        streams = [open_stream(arm.drafter, prompt, state.features) for arm in self.arms]
        with_law = {a: stream for a, stream in enumerate(streams) if isinstance(stream, LawStream)}
        by_start = {a: stream for a, stream in enumerate(streams) if isinstance(stream, StartLawStream)}
        context = list(prompt)
        laws = []  # of the target at each position, where a drafter with a law needs them
        log_p = []
        drafts: dict[tuple[int, int], list[int]] = {}  # (start, arm) of the point masses
        followed: list[tuple[int, int]] = []  # drafts that the text has not contradicted
        ended = False
        while not ended:
            t = len(context) - len(prompt)
            left = self.max_new_tokens - t
            for a, (arm, stream) in enumerate(zip(self.arms, streams, strict=True)):
                drafted[t, a] = limit = min(arm.length, left)
                if a not in with_law and a not in by_start:
                    tokens = draft_tokens(stream, context, limit, rule, t, self.ending.eos).tokens
                    drafted[t, a] = len(tokens)
                    if tokens:
                        drafts[t, a] = tokens
                        followed.append((t, a))
            logits = rule.process(self.target.forward(state, context[-1:]), context)
            if known is None:
                try:
                    verdict = rule.verify(logits, Draft(), t, self.ending.eos, left)
                except LogitsError as error:
                    raise InputError(f"target {self.target.name}: {error}") from None
                if self.ending.strings:
                    verdict = self.ending.cut(context[len(prompt) :], verdict)
                (token,), ended = verdict.emitted, verdict.ended
            else:
                token, ended = known[t], t + 1 == len(known)
            law = rule.laws(logits)[0]
            if with_law or by_start:
                laws.append(law)
            proposed = [drafts[start, a][t - start] for start, a in followed]
            p, *overlaps_here = law[[token, *proposed]].tolist()
            log_p.append(np.log(p))
            for (start, a), drafted_token, value in zip(followed, proposed, overlaps_here, strict=True):
                overlap[start, a, t - start] = value
                accept[start, a, t - start] = drafted_token == token
                log_q[start, a, t - start] = 0.0 if drafted_token == token else -np.inf
            followed = [
                (start, a)
                for (start, a), drafted_token in zip(followed, proposed, strict=True)
                if drafted_token == token and t - start + 1 < drafted[start, a]
            ]
            context.append(token)
        text = context[len(prompt) :]
        own = {a: rule.process_draft(stream.logits(context, len(text)), prompt, text) for a, stream in with_law.items()}
        signals = {name: np.full_like(log_q, np.nan) for name in (SIGNALS if self.signals else ())}
        for a, logits in own.items():
            p, q, depths = torch.stack(laws), self._drafter_laws(a, rule, logits), self.arms[a].length
            accept[: len(text), a, :depths] = _by_depth(rule.accept_given_text(p, logits, text), depths, 0.0)
            overlap[: len(text), a, :depths] = _by_depth(overlaps(p, q, text), depths, np.nan)
            if self.signals:
                for name, values in law_signals(q).items():
                    signals[name][: len(text), a, :depths] = _by_depth(values, depths, np.nan)
                chosen = acceptance(q, None, text).clamp(max=1.0).log()
                log_q[: len(text), a, :depths] = _by_depth(chosen, depths, np.nan)
        for a, start_stream in by_start.items():
            for s in range(len(text)):
                before, along = context[: len(prompt) + s], text[s : s + self.arms[a].length]
                logits = rule.process_draft(start_stream.logits_along(before, along), before, along)
                n = len(logits)
                if n < len(along):  # it can draft no more
                    drafted[s, a] = n
                if not n:
                    continue
                p, q = torch.stack(laws[s : s + n]), self._drafter_laws(a, rule, logits)
                accept[s, a, :n] = rule.accept_given_text(p, logits, along[:n], s).cpu().numpy()
                overlap[s, a, :n] = overlaps(p, q, along[:n]).cpu().numpy()
                if self.signals:
                    for name, values in law_signals(q).items():
                        signals[name][s, a, :n] = values.cpu().numpy()
                    log_q[s, a, :n] = acceptance(q, None, along[:n]).clamp(max=1.0).log().cpu().numpy()
        bits = self.rule.verification != "rejection" or not (with_law or by_start)
        columns = {
            "tokens": np.array(text, dtype=np.int32),
            "offsets": np.array([0, len(text)], dtype=np.int64),
            "accept": accept[: len(text)].astype(np.uint8 if bits else np.float32),
            "drafted": drafted[: len(text)],
            "overlap": overlap[: len(text)].astype(self.overlap_dtype),
            "log_p": np.array(log_p, dtype=np.float32),
        }
        if self.signals:
            columns["log_q"] = log_q[: len(text)]
            with np.errstate(over="ignore"):  # a margin beyond the type is infinite
                columns |= {name: values[: len(text)].astype(self.overlap_dtype) for name, values in signals.items()}
        if self.blocks:
            rng = np.random.default_rng((self.seed, query, 1))
            branches = _Branches(self, prompt, text, rule, state, with_law, rng)
            columns["block_tail"] = branches.tails(laws, own, drafts, drafted).astype(self.overlap_dtype)
        return columns


@dataclass(frozen=True)
class _Branches:
    """What arms would have drafted past a first rejection: given the text, one branch for each place of it."""

    recorder: Recorder
    prompt: list[int]
    text: list[int]
    rule: TextRule
    state: ModelState  # of the target, which has read all of the text but its last token
    with_law: dict[int, LawStream]
    rng: np.random.Generator

    def tails(
        self,
        laws: Sequence[torch.Tensor],
        own: dict[int, torch.Tensor],
        drafts: dict[tuple[int, int], list[int]],
        drafted: NDArray[np.uint8],
    ) -> FloatArray:
        """[T, arms, depth] mean overlap of the depths past one that is the first to be rejected; NaN where none is."""
        recorder = self.recorder
        tails = np.full((len(self.text), len(recorder.arms), recorder.max_draft), np.nan)
        for s in reversed(range(len(self.text))):  # backwards, so that the target only ever forgets
            before = [*self.prompt, *self.text[:s]]
            for a, stream in self.with_law.items():
                wrong = self.rule.rejected(laws[s], own[a][s], self.text[s], self.rng.random())
                more = min(recorder.arms[a].length, recorder.max_new_tokens - s) - 1
                if wrong is None or not more:
                    continue
                values = self._overlaps(before, wrong, stream.draft([*before, wrong], more, self.rule, s + 1))
                for j in range(min(recorder.arms[a].length, s + 1)):
                    past = int(drafted[s - j, a]) - 1 - j
                    if past > 0:
                        tails[s - j, a, j] = values[:past].mean()
            for j in range(min(recorder.max_draft, s + 1)):
                for a in range(len(recorder.arms)):
                    tokens = drafts.get((s - j, a), [])
                    if j < len(tokens) - 1 and tokens[:j] == self.text[s - j : s] and tokens[j] != self.text[s]:
                        past_it = Draft(tokens[j + 1 :])
                        tails[s - j, a, j] = self._overlaps(before, tokens[j], past_it).mean()
            if s:
                recorder.target.rollback(self.state, 1)
        return tails

    def _overlaps(self, context: Sequence[int], wrong: int, draft: Draft) -> FloatArray:
        """Of each drafted token after the text so far and the `wrong` one."""
        target = self.recorder.target
        logits = target.forward(self.state, [wrong, *draft.tokens[:-1]])
        logits = self.rule.process(logits, [*context, wrong], draft.tokens)
        target.rollback(self.state, len(draft.tokens))
        return overlaps(self.rule.laws(logits), draft.laws, draft.tokens).double().cpu().numpy()


def law_signals(q: torch.Tensor) -> dict[str, torch.Tensor]:
    """Entropy in nats, largest probability, and `ln q_(1) - ln q_(2)` of laws [n, vocab]; each [n]."""
    first, second = q.topk(2, dim=-1).values.log().unbind(dim=-1)
    values = torch.special.entr(q).sum(dim=-1), first.exp().clamp(max=1.0), first - second
    return dict(zip(SIGNALS, values, strict=True))


def _by_depth(values: torch.Tensor, depths: int, beyond: float) -> FloatArray:
    """values [T] at text positions -> [T, depths] seen from each start, `beyond` past the text's end."""
    padded = np.append(values.double().cpu().numpy(), np.full(depths - 1, beyond))
    return np.lib.stride_tricks.sliding_window_view(padded, depths)


def check_out(out: str | Path, force: bool = False) -> None:
    """Refuses a file that is there, unless its shards are too: then a recording was killed on its last step."""
    if not _shards(Path(out)).is_dir():
        check_free(out, force)


def record(
    recorder: Recorder,
    prompts: Sequence[Prompt],
    out: str | Path,
    calibration: Sequence[Prompt] = (),
    repetitions: int = REPETITIONS,
    force: bool = False,
    on_text: Callable[[], None] = lambda: None,
    on_calibration: Callable[[], None] = lambda: None,
) -> Trace:
    """Records all prompts into `out`, through one shard each, so that an interrupted recording resumes.

    The cost model of the trace is measured on the prompts of `calibration`, if there are any.
    """
    out = Path(out)
    if not prompts:
        raise InputError("prompts: expected at least one, found none")
    check_out(out, force)
    for prompt in (*prompts, *calibration):
        recorder.encode(prompt)  # refuses what does not fit before the work begins
    shards = _shards(out)
    if out.exists() and not force:
        trace = _resume(recorder, prompts, out)
        shutil.rmtree(shards)
        return trace
    shards.mkdir(exist_ok=True)
    parts = []
    for number, prompt in enumerate(prompts):
        parts.append(_shard(recorder, number, prompt, shards / f"{number:05d}.safetensors", force))
        on_text()
    trace = traces.merge(parts)
    if calibration:
        trace = calibrated(trace, recorder, calibration, repetitions, on_calibration)
    whole = shards / out.name  # among the shards, so that a kill leaves nothing elsewhere
    traces.write(trace, whole, force=True)
    check_free(out, force)  # it may have appeared meanwhile
    whole.replace(out)
    shutil.rmtree(shards)
    return trace


def _shards(out: Path) -> Path:
    return out.with_name(out.name + ".shards")


def calibrated(
    trace: Trace,
    recorder: Recorder,
    prompts: Sequence[Prompt],
    repetitions: int = REPETITIONS,
    on_round: Callable[[], None] = lambda: None,
) -> Trace:
    """The trace with a cost model measured here, on texts that follow `prompts`."""
    encoded = [recorder.encode(prompt) for prompt in prompts]
    costs = measure_costs(recorder.target, recorder.arms, encoded, recorder.rule, repetitions, recorder.seed, on_round)
    settings = {
        "prompts": [prompt.id for prompt in prompts],
        "repetitions": repetitions,
        "engine": recorder.provenance["engine"],
        "device": recorder.provenance["device"],
        "threads": recorder.provenance["threads"],
    }
    return replace(trace, costs=costs, provenance=trace.provenance | {"calibration": settings})


def _shard(recorder: Recorder, query: int, prompt: Prompt, path: Path, force: bool) -> Trace:
    """The prompt's trace: from its shard if there is one, which `force` discards where the settings differ."""
    if path.exists():
        try:
            return _resume(recorder, [prompt], path)
        except InputError:
            if not force:
                raise
    trace = recorder.record(query, prompt)
    traces.write(trace, path, force)
    return trace


def _resume(recorder: Recorder, prompts: Sequence[Prompt], path: Path) -> Trace:
    """What was recorded of `prompts`; refuses a damaged file and other settings."""
    remedy = "repeat the command it began with, or pass --force to start again"
    try:
        found = traces.read(path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from None
    provenance = {key: value for key, value in found.provenance.items() if key != "calibration"}
    expected_prompts = [(prompt.id, prompt.category, prompt.sha256) for prompt in prompts]
    checks = [
        ("arms", tuple(arm.name for arm in recorder.arms), found.arms),
        ("drafters", tuple(map(str, recorder.arms)), found.drafters),
        ("verification", recorder.rule.verification, found.verification),
        ("max_new_tokens", recorder.max_new_tokens, found.max_new_tokens),
        ("overlap_dtype", recorder.overlap_dtype, None if found.overlap is None else str(found.overlap.dtype)),
        ("features", prompt_features("")[0], found.feature_names),
        *((f"provenance {key}", value, provenance.get(key)) for key, value in recorder.provenance.items()),
        ("prompt", expected_prompts, [(query.id, query.category, query.sha256) for query in found.queries]),
    ]
    for name, expected, value in checks:
        if value != expected:
            raise InputError(f"{path}: expected to resume with {name} {expected}, found {value}; {remedy}")
    return found
