"""Tiny exact language models: chains of order 2 whose laws are tables, cheap enough for tens of thousands of texts."""

import hashlib
import time

import numpy as np
import torch
from scipy.special import softmax
from scipy.stats import chi2, chi2_contingency

from metasd_live.drafters import Arm, Draft
from metasd_live.drafters.causal import CausalDrafter
from metasd_live.drafters.none import NoDraft
from metasd_live.engines.base import ModelState

torch.set_num_threads(1)  # the models are too small to share, and threads do not live on in a fork


class ChainModel:
    """Stands in for `CausalModel`. The cache is the list of tokens; a text's first token has token 0 before it."""

    device, dtype, max_length = torch.device("cpu"), torch.float64, None
    clock = staticmethod(time.perf_counter)

    def __init__(self, logits, name="chain"):
        self.name, self.vocab_size, self.settings = name, len(logits), {"name": "chain"}
        self.table = torch.as_tensor(logits, dtype=self.dtype).reshape(-1, self.vocab_size)  # [last two, next]

    def check_length(self, prompt_tokens, max_new_tokens):
        pass

    def prefill(self, ids):
        return ModelState(list(ids[:-1]), len(ids[:-1]))

    def forward(self, state, ids, keep=0):
        before = [state.cache[-1] if state.cache else 0, *ids]
        state.cache.extend(ids)
        state.length += len(ids)
        pairs = [a * self.vocab_size + b for a, b in zip(before, ids, strict=False)]
        return self.table.index_select(0, torch.tensor(pairs[-keep:]))

    def rollback(self, state, tokens):
        assert 0 <= tokens <= state.length
        del state.cache[state.length - tokens :]
        state.length -= tokens


class ChainTarget(ChainModel):
    """Stands in for `Target`; a prompt's text is its token ids."""

    def __init__(self, logits, eos=(), name="chain"):
        super().__init__(logits, name)
        self.eos = frozenset(eos)
        self.weights = {"table": hashlib.sha256(self.table.numpy().tobytes()).hexdigest()}
        self.tokenizer_hash = f"{self.vocab_size} numbers"

    def encode(self, text, chat_template=True):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


class TableDrafter:
    """A point mass: a function of the last two tokens, 0 before the first; it proposes nothing where that is -1."""

    point_mass = True

    def __init__(self, following, name="table"):
        self.following, self.name = np.asarray(following), name  # [last two]

    def open(self, prompt):
        return self

    def draft(self, context, limit, rule, position):
        text = [0, *context][-2:]
        while len(text) < 2 + limit and (token := int(self.following[text[-2], text[-1]])) >= 0:
            text.append(token)
        return Draft(text[2:])


def chain_logits(seed, vocabulary, scale=1.0, zeros=0.0):
    """[last two, next]; each token but one is impossible with probability `zeros`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(vocabulary,) * 3) * scale
    impossible = rng.random(logits.shape) < zeros
    impossible[np.arange(vocabulary)[:, None], np.arange(vocabulary), logits.argmax(axis=2)] = False
    return np.where(impossible, -np.inf, logits)


def law_arm(name, logits, length):
    return Arm(name, CausalDrafter(ChainModel(logits, name), name, len(logits)), length)


def table_arm(name, seed, vocabulary, length, silent=0.2):
    """A point mass that proposes nothing after a share `silent` of the pairs of tokens."""
    rng = np.random.default_rng(seed)
    following = rng.integers(0, vocabulary, size=(vocabulary, vocabulary))
    return Arm(name, TableDrafter(np.where(rng.random(following.shape) < silent, -1, following), name), length)


def no_draft():
    return Arm("none", NoDraft(), 0)


def next_law(logits, temperature, context):
    """`softmax(logits / T)` after the context's last two tokens; [vocab]."""
    return softmax(np.asarray(logits)[context[-2], context[-1]] / temperature)


def text_laws(logits, temperature, prompt, limit, eos=()):
    """Probability of every text of up to `limit` tokens that plain decoding may write; text -> probability."""
    texts, finished = {(): 1.0}, {}
    while texts:
        longer = {}
        for text, probability in texts.items():
            if len(text) == limit or set(text[-1:]) & set(eos):
                finished[text] = probability
                continue
            for token, p in enumerate(next_law(logits, temperature, (*prompt, *text))):
                longer[(*text, token)] = probability * p
        texts = longer
    return finished


def _pool_rare(cells, size, least):
    """cells [rows, n] with the smallest in one cell, as many as it takes for each to have a `size` of `least`."""
    order = np.argsort(size, kind="stable")
    cells, size = cells[:, order], size[order]
    rare = max(np.count_nonzero(size < least), 1 + int(np.searchsorted(size.cumsum(), least)))
    return np.column_stack([cells[:, :rare].sum(axis=1), cells[:, rare:]])


def fit_p_value(texts, law, least=5.0):
    """Chi-square of texts against their law; rare ones share a cell, impossible ones give 0."""
    possible = {text: p for text, p in law.items() if p > 0}
    if not set(texts) <= set(possible):
        return 0.0
    counts = dict.fromkeys(possible, 0)
    for text in texts:
        counts[text] += 1
    expected = len(texts) * np.array(list(possible.values()))
    observed, expected = _pool_rare(np.stack([list(counts.values()), expected]), expected, least)
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1))


def same_law_p_value(a, b, least=10):
    """Two-sample chi-square of hashable outcomes; rare ones share a cell."""
    outcomes = {outcome: i for i, outcome in enumerate(dict.fromkeys([*a, *b]))}
    counts = np.zeros((2, len(outcomes)))
    for row, sample in zip(counts, (a, b), strict=True):
        np.add.at(row, [outcomes[outcome] for outcome in sample], 1)
    cells = _pool_rare(counts, counts.sum(axis=0), least)
    return float(chi2_contingency(cells, correction=False).pvalue)
