"""Drafters: lookup and n-gram against slow references, chains, specs, and the n-gram file."""

import json
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from metasd_live.drafters import Arm, Draft, Drafter, build_arms, parse_arm
from metasd_live.drafters.chain import Chain
from metasd_live.drafters.lookup import PromptLookup
from metasd_live.drafters.ngram import Ngram, NgramSettings, read_ngram, train_ngram, write_ngram
from metasd_live.drafters.none import NoDraft
from metasd_live.verify import GreedyText
from tests.live_cases import draft
from tests.sim_cases import refuses

TARGET = SimpleNamespace(tokenizer_hash="a" * 64, name="tiny")
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def slow_lookup(context, limit):
    """The longest suffix of 3, 2 or 1 tokens that occurred before; its most recent occurrence; what followed."""
    n = len(context)
    for length in (3, 2, 1):
        for start in range(n - length - 1, -1, -1):
            if context[start : start + length] == context[n - length :]:
                return context[start + length : start + length + limit]
    return []


@given(texts, st.integers(1, 9))
def test_lookup_equals_a_slow_search(context, limit):
    assert draft(PromptLookup(), context, limit) == slow_lookup(context, limit)


@given(texts, st.lists(st.integers(1, 6), max_size=12))
def test_lookup_that_sat_out_rounds_catches_up(context, jumps):
    stream = PromptLookup().open([])
    end = 1
    for jump in [0, *jumps, 0]:
        end = min(end + jump, len(context))
        assert stream.draft(context[:end], 5, GreedyText(), 0).tokens == slow_lookup(context[:end], 5)
    for end in range(len(context), 0, -1):  # an earlier context starts again
        assert stream.draft(context[:end], 5, GreedyText(), 0).tokens == slow_lookup(context[:end], 5)


def test_lookup_by_hand():
    assert draft(PromptLookup(), [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]  # the most recent of two
    assert draft(PromptLookup(), [5, 2, 3, 9, 4, 3, 7, 2, 3]) == [9, 4, 3, 7, 2, 3]  # two tokens beat one
    assert draft(PromptLookup(), [1, 1, 1]) == [1]  # nothing follows the suffix itself
    assert draft(PromptLookup(), [1, 2, 3]) == []


def slow_ngram(sequences, settings, context, limit):
    """Counts in dictionaries; the most frequent continuation, then the most recent."""
    counts, last, clock = defaultdict(Counter), {}, 0
    for sequence in sequences:
        for i, token in enumerate(sequence):
            for k in range(settings.min_context, min(settings.max_context, i) + 1):
                seen = tuple(sequence[i - k : i])
                counts[seen][token] += 1
                last[seen, token] = clock
            clock += 1
    context, tokens = list(context), []
    while len(tokens) < limit:
        for k in range(min(settings.max_context, len(context)), settings.min_context - 1, -1):
            seen = tuple(context[-k:])
            if counts[seen]:
                best = max(counts[seen], key=lambda token: (counts[seen][token], last[seen, token]))
                if counts[seen][best] / (counts[seen].total() + 1) >= settings.min_share:
                    break
        else:
            break
        tokens.append(best)
        context.append(best)
    return tokens


@given(
    st.lists(texts, max_size=4),
    texts,
    st.sampled_from([(4, 1, 0.0), (3, 2, 0.0), (2, 1, 0.5), (1, 1, 0.4), (4, 1, 0.67)]),
)
def test_ngram_equals_slow_counts(sequences, context, values):
    settings = NgramSettings(*values)
    drafter = Ngram(train_ngram(sequences, "hash", settings))
    assert draft(drafter, context, 6) == slow_ngram(sequences, settings, context, 6)


def test_ngram_by_hand():
    model = train_ngram([[1, 2, 3, 1, 2, 4, 1, 2, 4], [9, 2, 5]], "hash", NgramSettings(2, 1, 0.0))
    assert draft(Ngram(model), [1, 2], 3) == [4, 1, 2]  # 4 came twice, 3 once
    assert draft(Ngram(model), [9, 2], 3) == [5]  # nothing follows 5, nor (2, 5)
    assert draft(Ngram(model), [7, 2], 1) == [4]  # backs off to one token: 4 twice, 3 and 5 once
    tied = train_ngram([[1, 2, 1, 3]], "hash", NgramSettings(1, 1, 0.0))
    assert draft(Ngram(tied), [1], 1) == [3]  # the most recent of equally frequent ones
    assert train_ngram([[1, 2], [3, 4]], "hash", NgramSettings(1, 1, 0.0)).tables[1][0].tolist() == [
        [1],
        [3],
    ]  # not 2 -> 3


def test_ngram_file_round_trip(tmp_path):
    model = train_ngram([[1, 2, 3, 1, 2, 4]], "b" * 64, NgramSettings(3, 2, 0.3))
    write_ngram(model, tmp_path / "model.safetensors")
    found = read_ngram(tmp_path / "model.safetensors")
    assert (found.settings, found.tokenizer) == (model.settings, model.tokenizer)
    assert found.tensors().keys() == model.tensors().keys()
    for name, value in model.tensors().items():
        np.testing.assert_array_equal(found.tensors()[name], value)
    with refuses("model.safetensors", "--force"):
        write_ngram(model, tmp_path / "model.safetensors")


def test_damaged_ngram_files(tmp_path):
    path = tmp_path / "model.safetensors"
    write_ngram(train_ngram([[1, 2, 3, 1, 2, 4]], "b" * 64, NgramSettings()), path)
    content = path.read_bytes()
    for damaged in (content[:-3], content[:40], b"", content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        with refuses(str(path), "expected", "found"):
            read_ngram(path)
    path.write_bytes(content.replace(b'\\"schema\\": 1', b'\\"schema\\": 7'))
    with refuses("schema 1", "7"):
        read_ngram(path)
    safetensors.numpy.save_file({"x": np.zeros(1)}, path, {"other": json.dumps({})})
    with refuses(str(path), "n-gram"):
        read_ngram(path)
    with refuses("absent.safetensors", "metasd-live train ngram"):
        read_ngram(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("values", [(0, 1), (2, 3), (17, 1), (2, 1, 1.0), (2, 1, -0.1)])
def test_ngram_settings_out_of_range(values):
    lengths = (*values, 0.0)[:3]
    with refuses("n-gram", "expected"):
        NgramSettings(*lengths)


def test_ngram_of_another_tokenizer_is_refused(tmp_path):
    write_ngram(train_ngram([[1, 2, 3]], "b" * 64, NgramSettings()), tmp_path / "m.safetensors")
    with refuses("m.safetensors", "aaaaaaaaaaaa", "bbbbbbbbbbbb", "tokenizer"):
        build_arms([parse_arm(f"ngram:{tmp_path}/m.safetensors")], TARGET)


class Fixed:
    """Drafts the same tokens always."""

    name = "fixed"
    point_mass = True

    def __init__(self, *tokens):
        self.tokens = list(tokens)

    def open(self, prompt):
        return self

    def draft(self, context, limit, rule, position):
        return Draft(self.tokens[:limit])


def test_chain_takes_the_first_that_proposes():
    chain = Chain([(NoDraft(), None), (Fixed(1, 2, 3), 2), (Fixed(7, 8, 9), None)], "chain")
    assert draft(chain, [0], 8) == [1, 2]  # its own length
    assert draft(chain, [0], 1) == [1]  # the arm's
    assert draft(Chain([(Fixed(), None), (NoDraft(), None)], "chain"), [0], 8) == []
    assert isinstance(chain, Drafter)
    assert chain.point_mass


def test_arms_are_parsed(tmp_path):
    path = tmp_path / "m.safetensors"
    write_ngram(train_ngram([[1, 2, 3]], TARGET.tokenizer_hash, NgramSettings()), path)
    specs = ["lookup", "lookup@5", "none", f"code=chain(ngram:{path}@3,chain(lookup,none))@4", f"ngram:{path}"]
    arms = build_arms([parse_arm(spec) for spec in specs], TARGET, 6)
    assert [arm.name for arm in arms] == ["lookup", "lookup@5", "none", "code", f"ngram:{path}"]
    assert [arm.length for arm in arms] == [6, 5, 0, 4, 6]
    assert [str(arm) for arm in arms][:3] == ["lookup@6", "lookup@5", "none"]
    assert str(arms[3]) == f"chain(ngram:{path}@3,chain(lookup,none))@4"
    assert arms[3].files == (str(path),)
    assert all(isinstance(arm, Arm) and isinstance(arm.drafter, Drafter) for arm in arms)
    assert parse_arm(str(arms[3])).drafter == parse_arm(specs[3]).drafter  # what a trace names can be built again


UNKNOWN = (
    "look ngram ngram: lookup:x none: chain chain:x chain() chain(lookup chain(lookup,) lookup@ lookup@0 lookup@65"
)
UNKNOWN += " lookup@-1 a= chain(lookup),none name=look chain(lookup),(none)"


@pytest.mark.parametrize("spec", ["", *UNKNOWN.split()])
def test_unknown_drafters_are_refused(spec):
    with refuses("drafter: expected"):
        parse_arm(spec)


def test_arms_that_cannot_be_built():
    with refuses("at least one", "--drafter"):
        build_arms([], TARGET)
    with refuses("different names", "NAME=SPEC"):
        build_arms([parse_arm("a=lookup"), parse_arm("a=none")], TARGET)
    with refuses("draft length", "0"):
        build_arms([parse_arm("lookup")], TARGET, 0)
    with refuses("absent.safetensors", "metasd-live train ngram"):
        build_arms([parse_arm("chain(lookup,ngram:absent.safetensors)")], TARGET)
