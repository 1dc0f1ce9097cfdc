"""Greedy verification, by hand and against decoding one token at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_live.drafters import Draft
from metasd_live.verify import Verdict, clip, settle

EOS = frozenset({0})


def verify_greedy(draft, argmax, eos, limit):
    stands = [token == choice for token, choice in zip(draft, argmax, strict=False)]
    return settle(stands, draft, lambda accepted: argmax[accepted], eos, limit)


def clipped(tokens, eos, limit):
    return clip(Draft(tokens), eos, limit).tokens


@pytest.mark.parametrize(
    ("draft", "argmax", "limit", "expected"),
    [
        ([], [4], 9, Verdict(0, [4], False)),
        ([5, 6], [5, 6, 7], 9, Verdict(2, [5, 6, 7], False)),
        ([5, 6, 7], [5, 9, 7, 8], 9, Verdict(1, [5, 9], False)),  # what agrees after a rejection does not count
        ([5, 6], [4, 6, 7], 9, Verdict(0, [4], False)),
        ([5, 0], [5, 0, 7], 9, Verdict(2, [5, 0], True)),  # nothing after an accepted end of sequence
        ([5, 6], [5, 0, 7], 9, Verdict(1, [5, 0], True)),  # the target's own end of sequence
        ([5, 6], [5, 6, 7], 2, Verdict(2, [5, 6], True)),  # the limit cuts the block: emitted == accepted
        ([5, 6], [5, 6, 7], 3, Verdict(2, [5, 6, 7], True)),
        ([5], [5, 6], 1, Verdict(1, [5], True)),
        ([5], [6, 6], 1, Verdict(0, [6], True)),
        ([], [0], 1, Verdict(0, [0], True)),
    ],
)
def test_by_hand(draft, argmax, limit, expected):
    assert verify_greedy(draft, argmax, EOS, limit) == expected


def test_drafts_are_clipped():
    assert clipped([5, 0, 6, 0], EOS, 9) == [5, 0]
    assert clipped([5, 6, 7], EOS, 2) == [5, 6]
    assert clipped([5, 6, 0], frozenset(), 9) == [5, 6, 0]
    assert clipped([], EOS, 3) == []


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7), st.integers(1, 6))
def test_equals_decoding_one_token_at_a_time(draft, argmax, limit):
    draft = clipped(draft, EOS, limit)
    emitted, accepted = [], 0
    while len(emitted) < limit and not (emitted and emitted[-1] in EOS):
        token = argmax[len(emitted)]  # what plain decoding emits next
        matches = accepted == len(emitted) < len(draft) and draft[accepted] == token
        emitted.append(token)
        accepted += matches
        if not matches:
            break
    verdict = verify_greedy(draft, argmax, EOS, limit)
    assert verdict == Verdict(accepted, emitted, len(emitted) == limit or emitted[-1] in EOS)
    assert len(verdict.emitted) == accepted + 1 or (verdict.ended and len(verdict.emitted) == accepted)
