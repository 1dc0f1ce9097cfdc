"""Stop rules: values worked out by hand, limits, and what is refused."""

import numpy as np
import pytest

from metasd_sim.stop_rules import STOP_RULES, StopRule, entropy, margin, parse_stop_rule, top_probability
from tests.sim_cases import refuses

# q = (1/2, 1/4, 1/4): H = 1.5 ln 2 = 1.03972, sqrt 1.01967, 1 - sqrt(0.2 H) = 1 - sqrt(.207944) = .54399, margin ln 2
# q = (.9, .05, .05): H = .9 * .105361 + .1 * 2.995732 = .394398, sqrt .62801, 1 - sqrt(.0788796) = .71915, ln 18
LAWS = np.array([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05], [0.0, 0.0, 1.0]])


def go(text, laws=LAWS):
    return parse_stop_rule(text)(entropy(laws), top_probability(laws), margin(laws)).tolist()


def test_signals_of_hand_made_laws():
    np.testing.assert_allclose(entropy(LAWS), [1.039721, 0.394398, 0.0], atol=1e-6)
    np.testing.assert_allclose(top_probability(LAWS), [0.5, 0.9, 1.0])
    np.testing.assert_allclose(margin(LAWS), [np.log(2), np.log(18), np.inf])
    assert margin(np.ones((2, 1))).tolist() == [np.inf, np.inf]
    assert entropy(np.full((1, 8), 1 / 8)) == pytest.approx(3 * np.log(2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-confidence=0.4", [True, True, True]),
        ("max-confidence=0.5", [True, True, True]),  # strict: goes on at the threshold
        ("max-confidence=0.51", [False, True, True]),
        ("max-confidence=0.91", [False, False, True]),
        ("entropy=1.02", [True, True, True]),
        ("entropy=1.019", [False, True, True]),
        ("entropy=0.62", [False, False, True]),
        ("entropy=0", [False, False, True]),
        ("adaedl=0.543", [True, True, True]),
        ("adaedl=0.545", [False, True, True]),
        ("adaedl=0.72", [False, False, True]),
        ("adaedl=-5", [True, True, True]),
        ("margin=0.69", [True, True, True]),
        ("margin=0.7", [False, True, True]),
        ("margin=2.9", [False, False, True]),
    ],
)
def test_rules_on_hand_made_laws(text, expected):
    assert go(text) == expected


def test_adaedl_is_an_entropy_rule_with_another_threshold():
    # 1 - sqrt(0.2 H) < h  <=>  sqrt(H) > (1 - h) / sqrt(0.2)
    laws = np.random.default_rng(0).dirichlet(np.full(5, 0.5), 500)
    for h in (0.5, 0.6, 0.7):
        expected = go(f"entropy={(1 - h) / np.sqrt(0.2)}", laws)
        assert go(f"adaedl={h}", laws) == expected
        assert 0 < sum(expected) < 500


def test_an_unknown_law_goes_on():
    for rule in (StopRule(name, 1.0) for name in STOP_RULES):
        assert rule(np.nan, np.nan, np.nan)


def test_names_make_the_same_rule_again():
    for text in ("max-confidence=0.5", "entropy=1.2", "adaedl=0.123456789", "margin=2"):
        rule = parse_stop_rule(text)
        assert parse_stop_rule(str(rule)) == rule
        assert str(rule) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("svip=1", ("max-confidence, entropy, adaedl, margin", "'svip'")),
        ("svip", ("'svip'",)),
        ("entropy", ("threshold", "entropy", "nan")),
        ("entropy=x", ("threshold", "entropy", "nan")),
        ("entropy=inf", ("threshold", "inf")),
        ("entropy=-1", ("[0, inf]", "-1")),
        ("max-confidence=1.5", ("[0, 1]", "1.5")),
        ("adaedl=1.1", ("[-inf, 1]", "1.1")),
        ("margin=-0.1", ("[0, inf]", "-0.1")),
    ],
)
def test_refusals(text, words):
    with refuses("stop rule", *words):
        parse_stop_rule(text)
