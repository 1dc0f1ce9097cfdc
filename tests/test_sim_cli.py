"""The command line as people and programs use it: tables, JSON, figures, and one-line errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metasd_sim import traces
from metasd_sim.cli import main
from tests.sim_cases import make_trace

SIMULATE = ["simulate", "--arms", "0.9,0.5", "--budget", "200", "--runs", "20"]
KEYS = {
    *("policy", "reward", "budget", "runs", "rounds_mean", "rounds_se", "regret_mean", "regret_se", "best_arm_ratio"),
    *("arms", "pulls", "tokens_per_round", "switches_mean"),
}


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "tiny.safetensors"
    traces.write(make_trace((9, 7, 8, 6), verification="greedy"), path)
    return str(path)


def records(capsys, *argv):
    assert main([*argv, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)  # nothing but JSON on stdout


def test_simulate_json(capsys):
    found = records(
        capsys, *SIMULATE, "--policy", "metasd-ucb:reward=bd", "--policy", "fixed:0.5", "--policy", "random"
    )
    assert [r["policy"] for r in found] == ["metasd-ucb:reward=bd", "fixed:0.5", "random"]
    assert all(set(r) >= KEYS for r in found)
    assert [r["reward"] for r in found] == ["bd", None, None]
    assert found[0]["upper_bound"] > found[0]["regret_mean"] > found[1]["best_arm_ratio"] == 0
    assert "upper_bound" not in found[2]
    assert found[2]["lower_bound"] > 0
    assert found[1]["pulls"][0] == 0
    assert sum(found[2]["pulls"]) == pytest.approx(found[2]["rounds_mean"], abs=4 * found[2]["rounds_se"])


def test_simulate_is_reproducible_and_reads_its_seed(capsys):
    first, again = (records(capsys, *SIMULATE, "--policy", "random", "--seed", "3") for _ in range(2))
    other = records(capsys, *SIMULATE, "--policy", "random", "--seed", "4")
    assert first == again != other


def test_costs_add_time(capsys):
    argv = [*SIMULATE, "--draft-cost", "0.4,0.0", "--policy"]
    (slow,), (fast,) = records(capsys, *argv, "fixed:0"), records(capsys, *argv, "fixed:1")
    # 5 drafted tokens at 0.4 s after a pass of 1 s: 3 s a round of 4.69 tokens; free drafts: 1 s a round of 1.97
    assert slow["speedup_mean"] == pytest.approx(4.69 / 3, rel=0.05)
    assert fast["speedup_mean"] == pytest.approx(1.97, rel=0.05)
    assert fast["fastest_arm"] == "0.5"
    assert fast["best_arm"] == "0.9"


def test_all_means_every_policy_that_the_environment_feeds(capsys):
    untimed = {r["policy"] for r in records(capsys, *SIMULATE, "--policy", "all")}
    assert untimed >= {"fixed:0.9", "fixed:0.5", "random", "kl-ucb-trials", "thompson-trials", "metasd-ucb:reward=bd"}
    timed = {r["policy"] for r in records(capsys, *SIMULATE, "--policy", "all", "--draft-cost", "0.1,0.1")}
    assert timed - untimed == {"metasd-ucb:reward=tokens-per-second"}


def test_bounds_json(capsys):
    found = records(capsys, "bounds", "--arms", "0.8,0.6,0.5", "--budget", "1000,10000")
    assert {r["reward"] for r in found if r["policy"] == "metasd-ucb"} == {"be", "bd", "bd-verified", "trials"}
    others = {"ucb-spec", "exp3-spec", "hedge", "normal-hedge", "sequential-halving", "explore-then-commit"}
    assert {r["policy"] for r in found} == {"metasd-ucb", *others}
    assert [r["lower_bound"] for r in found if r["budget"] == 10_000] == pytest.approx([23.447] * 10, abs=1e-3)
    # a schedule for each budget: the same as asking for that budget alone
    alone = records(capsys, "bounds", "--arms", "0.8,0.6,0.5", "--budget", "1000")
    assert [r for r in found if r["budget"] == 1000] == alone
    only = records(capsys, "bounds", "--arms", "0.8,0.6,0.5", "--reward", "bd")
    assert {r["policy"] for r in only} == {"metasd-ucb"}


def test_replay_json_and_figures(capsys, trace_file, tmp_path):
    figure = str(tmp_path / "r.png")
    found = records(capsys, "replay", trace_file, "--runs", "5", "--figure", figure, "--by-category")
    assert {"fixed:arm0", "fixed:arm2", "metasd-ucb:reward=bd-verified"} <= {r["policy"] for r in found}
    assert not any("reward=bd" in r["policy"] and "verified" not in r["policy"] for r in found)
    assert all(set(r) >= KEYS | {"speedup_mean", "speedup_se"} for r in found)
    assert min(r["regret_mean"] for r in found if r["policy"].startswith("fixed")) == pytest.approx(0)
    assert Path(figure).read_bytes().startswith(b"\x89PNG")


def test_fixed_finds_an_arm_by_name_drafter_or_index(capsys, trace_file):
    by_name, by_drafter, by_index = (
        records(capsys, "replay", trace_file, "--policy", f"fixed:{arm}")[0] for arm in ("arm1", "model:1", "1")
    )
    assert by_name["pulls"] == by_drafter["pulls"] == by_index["pulls"]
    assert by_name["pulls"][1] > 0


def test_fixed_finds_an_arm_as_it_was_typed(capsys):
    argv = ["simulate", "--arms", "0.90,.5", "--budget", "50", "--policy"]
    assert records(capsys, *argv, "fixed:.5")[0]["pulls"][0] == 0
    assert records(capsys, *argv, "fixed:0.90")[0]["pulls"][1] == 0


def test_carry_over_is_forwarded(capsys, trace_file):
    afresh, kept = (
        records(capsys, "replay", trace_file, "--policy", "metasd-ucb", "--carry-over", how)[0]
        for how in ("none", "keep")
    )
    assert (afresh["carry_over"], kept["carry_over"]) == ("none", "keep")
    assert afresh["pulls"] != kept["pulls"]
    assert main(["replay", trace_file, "--carry-over", "half"]) == 2


def test_order_and_category_choose_the_stream(capsys, trace_file):
    every = records(capsys, "replay", trace_file, "--policy", "random", "--order", "shuffled", "--seed", "1")[0]
    some = records(capsys, "replay", trace_file, "--policy", "random", "--category", "a")[0]
    assert (every["budget"], some["budget"]) == (30, 17)


def test_tables_are_for_people(capsys, trace_file):
    assert main([*SIMULATE, "--policy", "random"]) == 0
    assert main(["replay", trace_file, "--policy", "random", "--by-category"]) == 0
    assert main(["bounds", "--arms", "0.9,0.5"]) == 0
    out = capsys.readouterr().out
    assert "regret" in out
    assert "tiny, greedy, 4 prompts, 30 tokens" in out
    assert "fixed:arm0" in out
    assert "upper bound" in out
    assert main([*SIMULATE, "--policy", "random", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["simulate", "--arms", "0.9,1.2"], "acceptance rates in [0, 1], found 1.2"),
        (["simulate", "--arms", "0.9,x"], "numbers"),
        (["simulate", "--arms", "0.9,0.5", "--budget", "0"], "budget"),
        (["simulate", "--arms", "0.9,0.5", "--runs", "0"], "runs"),
        (["simulate", "--arms", "0.9,0.5", "--draft-length", "0"], "draft_length"),
        (["simulate", "--arms", "0.9,0.5", "--draft-length", "1.5"], "whole numbers"),
        (["simulate", "--arms", "0.9,0.5", "--policy", "ucb9"], "policy"),
        (["simulate", "--arms", "0.9,0.5", "--policy", "metasd-ucb:gamma=1"], "reward=..., beta=..."),
        (["simulate", "--arms", "0.9,0.5", "--policy", "kl-ucb-trials:reward=bd"], "c=..."),
        (["simulate", "--arms", "0.9,0.5", "--policy", "fixed:7"], "fixed"),
        (["simulate", "--arms", "0.9,0.5", "--policy", "metasd-ucb:reward=tokens-per-second"], "seconds"),
        (["simulate", "--arms", "0.9,0.5", "--verify-cost", "2"], "--draft-cost"),
        (["simulate", "--arms", "0.9,0.5", "--overlaps", "constant", "--concentration", "3"], "--overlaps beta"),
        (["simulate", "--arms", "0.9,0.5", "--policy", "random", "--reward", "bd"], "reward: expected a policy"),
        (["simulate", "--arms", "0.9,0.5", "--policy", "kl-ucb-trials", "--reward", "bd"], "reward: expected a policy"),
        (["simulate", "--arms", "0.9,0.5", "--json", "/", "--force"], "folder"),
        (["simulate", "--arms", "0.9,0.5", "--policy", "random", "--quiet", "--json", "/proc/x.json"], "/proc/x.json"),
        (["simulate", "--arms", "0.9,0.5", "--draft-cost", "1"], "--draft-cost"),
        (["simulate", "--arms", "0.9,0.5", "--figure", "a.gif"], ".png"),
        (["simulate", "--arms", "0.9,0.5", "--frob"], "--frob"),
        (["simulate"], "--arms"),
        (["bounds", "--arms", "0.9,0.5", "--reward", "be", "--beta", "0.5"], "beta >= 2 sigma"),
        (["bounds", "--arms", "0.9,0.5", "--reward", "tokens-per-second"], "known sigma"),
        (["bounds", "--arms", "0.9,0.5", "--draft-length", "4,5"], "one"),
        (["replay", "missing.safetensors"], "no such file"),
        (["replay", __file__], "safetensors"),
        ([], "COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("metasd-sim: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_errors_of_a_trace_at_the_command_line(capsys, trace_file, tmp_path):
    content = Path(trace_file).read_bytes()
    Path(trace_file).write_bytes(content[:-3] + b"\x00\x01\x02")
    assert main(["replay", trace_file]) == 2
    assert "checksum" in capsys.readouterr().err


def test_nothing_is_overwritten_without_force(capsys, tmp_path):
    out = tmp_path / "r.json"
    argv = [*SIMULATE, "--policy", "random", "--quiet", "--json", str(out)]
    assert main(argv) == 0
    assert main(argv) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*argv, "--force"]) == 0
    assert len(json.loads(out.read_text())) == 1


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="policy"):
        main([*SIMULATE, "--policy", "ucb9", "--debug"])


@pytest.mark.parametrize("command", ["simulate", "bounds", "replay", "train-router"])
def test_help_has_an_example_that_parses(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "example:" in out
    assert f"metasd-sim {command}" in out


def test_the_simulator_does_not_import_torch():
    code = (
        "import sys, metasd_sim.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'metasd_live')))"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_importing_the_library_leaves_slow_modules_alone():
    code = (
        "import sys, metasd_sim; sys.exit(any(m in sys.modules for m in ('matplotlib', 'scipy.signal', 'scipy.stats')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_curve_figure_keeps_the_budgets_asked_for(tmp_path, capsys):
    figure = tmp_path / "regret.svg"
    found = records(capsys, *SIMULATE, "--policy", "random", "--figure", str(figure))
    assert [r["budget"] for r in found] == [200]
    assert np.isfinite(found[0]["regret_se"])
    assert "<svg" in figure.read_text()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "argv",
    [
        ["--arms", "0.9,0.8,0.6", "--budget", "100", "--runs", "3", "--policy", "all"],
        ["--arms", "0.9", "--budget", "1", "--runs", "1", "--policy", "all"],
        ["--arms", "0.9", "--budget", "1", "--runs", "1", "--policy", "random"],
    ],
)
def test_curves_stay_readable_beside_any_legend(argv, tmp_path, capsys, monkeypatch):
    figures = []
    monkeypatch.setattr("metasd_sim.cli.save_figure", lambda figure, path, force: figures.append(figure))
    assert main(["simulate", *argv, "--figure", "c.png", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    figures[0].canvas.draw()
    width, height = figures[0].get_size_inches() * figures[0].dpi
    ax = figures[0].axes[0]
    assert ax.bbox.height > 0.75 * height
    assert ax.bbox.width > 0.5 * width
    legend = ax.get_legend().get_window_extent()
    assert min(legend.x0, legend.y0) >= 0
    assert legend.x1 <= width
    assert legend.y1 <= height


def test_two_outputs_in_one_place_are_refused_before_the_work(tmp_path, capsys, monkeypatch, trace_file):
    monkeypatch.chdir(tmp_path)
    for argv in (
        [*SIMULATE, "--policy", "random", "--figure", "a.png", "--json", "./a.png"],
        ["replay", trace_file, "--figure", "a.png", "--json", str(tmp_path / "a.png"), "--force"],
        ["train-router", trace_file, "--out", "a.json", "--json", "a.json"],
    ):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "found it twice" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.safetensors"]


@pytest.mark.parametrize("module", ["metasd_sim.cli", "metasd_live.cli"])
def test_the_modules_of_the_commands_run_them(module):
    if module == "metasd_live.cli":
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "COMMAND" in done.stderr
