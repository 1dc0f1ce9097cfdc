"""The scripts that ask a question run, in a tiny setting, and their committed outputs are of the full one."""

import runpy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUESTIONS = (
    "bd_against_be",
    "exp3_adversary",
    "changing",
    "full_information",
    "switching_cost",
    "near_the_lower_bound",
)


def claims(text: str) -> list[str]:
    """What each verdict is about: the words before its first number or bracket, whether it held or not."""
    lines = [
        line.split(": ", 1)[1].strip() for line in text.splitlines() if line.startswith(("held:", "did not hold:"))
    ]
    return [line.split("(")[0].rstrip() for line in lines]


def run(name: str, out: Path, monkeypatch, *options: str) -> str:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{name}.py"), "--quick", "--out", str(out), *options])
    runpy.run_path(sys.argv[0], run_name="__main__")
    return out.with_suffix(".txt").read_text()


@pytest.mark.parametrize("name", QUESTIONS)
def test_runs_in_a_tiny_setting(name, tmp_path, monkeypatch):
    before = (BENCHMARKS / f"{name}.txt").read_text()
    text = run(name, tmp_path / "out", monkeypatch)
    first = text.splitlines()[0]
    assert first.endswith("; seed 0 (quick: a tiny setting)")
    assert "nan" not in text.lower().split()
    assert len(claims(text)) >= 4
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not plt.get_fignums()  # no figure is left open
    assert (BENCHMARKS / f"{name}.txt").read_text() == before  # nothing is written beside the script


@pytest.mark.parametrize("name", QUESTIONS)
def test_committed_output_is_of_the_full_setting(name):
    text = (BENCHMARKS / f"{name}.txt").read_text()
    assert "quick" not in text
    assert text.splitlines()[0].endswith("; seed 0")
    assert len(claims(text)) >= 4
    assert (BENCHMARKS / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_same_seed_gives_the_same_table(tmp_path, monkeypatch):
    """All but the second line, which has the seconds it took; another seed gives another table."""
    tables = [
        run("bd_against_be", tmp_path / f"out{i}", monkeypatch, "--seed", seed).splitlines()[2:]
        for i, seed in enumerate(("3", "3", "4"))
    ]
    assert tables[0] == tables[1]
    assert tables[0] != tables[2]
