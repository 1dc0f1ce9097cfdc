"""Inputs at the edge: text of any editor, names of any signs, terminals of any encoding, files of another kind."""

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy

from metasd_sim import bounds, console, make_policy, plots, traces
from metasd_sim.arms import parse_spec
from metasd_sim.cli import main
from metasd_sim.files import lone_surrogate, read_json, read_text, split_lines
from metasd_sim.policies import RouterWeights
from metasd_sim.quoting import quote, split_parts, unquote
from metasd_sim.rewards import BlockEfficiency
from tests.sim_cases import make_trace, refuses

SIMULATE = ["simulate", "--arms", "0.9,0.5", "--budget", "60", "--runs", "2"]
ENDS_ELSEWHERE = "a\u2028b\u2029c\u0085d\fe\vf\x1cg\rh"  # each ends a line for str.splitlines


# --- text


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\n\n", ["one", ""]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\ntwo", ["one", "two"]),
        (b"one\r\r\n", ["one\r"]),
        (ENDS_ELSEWHERE.encode(), [ENDS_ELSEWHERE]),
    ],
)
def test_only_a_line_feed_ends_a_line(tmp_path, content, lines):
    (tmp_path / "t").write_bytes(content)
    assert split_lines(read_text(tmp_path / "t")) == lines


def test_json_too_deep_is_broken_json():
    with pytest.raises(ValueError, match="deep"):
        read_json("[" * 200_000)


def test_half_a_character_is_found():
    assert lone_surrogate("whole \U0001f600") is None
    assert lone_surrogate("half \ud83d") == "\\ud83d"


# --- tables


def printed(monkeypatch, encoding, *table):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    monkeypatch.setattr(sys, "stdout", stream)
    console.table(*table)
    stream.flush()
    return raw.getvalue().decode(encoding)


MARKUP = ["run[greedy].safetensors", "math[/INST]", "[bold]", "a:smile:b", "[red]x[/red]"]


def test_names_are_no_markup(monkeypatch):
    shown = printed(monkeypatch, "utf-8", "of [b]run[/b]", ["arm[/x]", "n"], [[name, 1] for name in MARKUP])
    for name in ("of [b]run[/b]", "arm[/x]", *MARKUP):
        assert name in shown


@pytest.mark.parametrize("columns", [3, 9, 30])
@pytest.mark.parametrize("name", ["a", "a name of several words " * 8, "x" * 300])
def test_tables_fit_and_show_every_cell(monkeypatch, columns, name):
    headers = ["policy", *(f"number of {i:02d}" for i in range(1, columns))]
    rows = [[name, *(f"{row}{i:02d}.5 ± 0.125" for i in range(1, columns))] for row in (1, 2)]
    shown = printed(monkeypatch, "utf-8", "title " * 40, headers, rows)
    assert max(map(len, shown.splitlines())) <= 100
    together = "".join(shown.split())
    for cell in (cell for row in rows for cell in row[1:]):
        assert cell.replace(" ", "") in together
        assert cell in shown  # a number is never broken
    if name[0] == "x":
        assert together.count("x") == 600 * shown.count("policy")  # whole in every block


def test_columns_come_in_their_order_and_names_again_in_each_block(monkeypatch):
    headers = ["policy", *(f"c{i}" for i in range(20))]
    shown = printed(monkeypatch, "utf-8", "t", headers, [["exp3", *(f"{i:010d}" for i in range(20))]])
    blocks = [block.splitlines() for block in shown.split("\n\n") if block.strip()]
    found = [line.split() for block in blocks for line in block if "policy" in line]
    assert [name for line in found for name in line if name != "policy"] == headers[1:]
    assert [line[0] for line in found] == ["policy"] * len(found)
    assert len(found) == 3
    assert shown.count("exp3") == 3


@pytest.mark.parametrize(
    ("encoding", "mark", "name"),
    [
        ("ascii", "+-", "caf\\xe9 \\u65e5"),
        ("iso-8859-2", "+-", "caf\xe9 \\u65e5"),
        ("koi8-r", "+-", "caf\\xe9 \\u65e5"),
        ("utf-8", "\xb1", "caf\xe9 \u65e5"),
    ],
)
def test_terminals_that_cannot_show_a_sign_show_another(monkeypatch, encoding, mark, name):
    shown = printed(monkeypatch, encoding, "t", ["arm", "value"], [["caf\xe9 \u65e5", "1 \xb1 2"]])
    assert name in shown
    assert f"1 {mark} 2" in shown


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-2", "cp437", "utf-8"])
def test_no_command_fails_for_want_of_a_sign(encoding, tmp_path):
    trace = make_trace()
    names = ("caf\xe9[/INST]", *trace.arms[1:])
    traces.write(replace(trace, arms=names), tmp_path / "r\xe9[x].safetensors")
    command = [sys.executable, "-m", "metasd_sim.cli", "replay", str(tmp_path / "r\xe9[x].safetensors"), "--runs", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([*command, "--policy", "random"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "[x].safetensors" in done.stdout.decode(encoding)
    done = subprocess.run([*command, "--policy", "fixed:\u65e5"], env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert "[/INST]" in done.stderr.decode(encoding)
    assert done.stderr.count(b"\n") == 1


def test_streams_are_left_as_they_were(capsys):
    before = sys.stdout.errors, sys.stderr.errors
    assert main([*SIMULATE, "--policy", "random"]) == 0
    assert (sys.stdout.errors, sys.stderr.errors) == before
    capsys.readouterr()


DEMO = [
    ["simulate", "--arms", "0.9,0.8,0.6", "--budget", "2000", "--runs", "3", "--policy", "all"],
    ["simulate", "--arms", "0.9,0.8,0.6", "--budget", "200,2000", "--runs", "3", "--draft-cost", "0.1,0.2,0.3"],
    ["bounds", "--arms", "0.9,0.8,0.6", "--budget", "10000,1000000000"],
    ["replay", "TRACE", "--policy", "all", "--by-category", "--runs", "3"],
    ["train-router", "TRACE", "--out", "router.json"],
]


@pytest.mark.parametrize("argv", DEMO, ids=" ".join)
def test_tables_of_commands_fit_a_hundred_columns(argv, capsys, tmp_path, monkeypatch):
    trace = os.path.abspath("traces/smollm2-greedy.safetensors")
    monkeypatch.chdir(tmp_path)
    assert main([trace if word == "TRACE" else word for word in argv]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_what_matters_stands_first(capsys):
    assert main(["replay", "traces/smollm2-greedy.safetensors", "--policy", "random", "--runs", "2"]) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("policy"))
    assert header.split()[:3] == ["policy", "speedup", "regret"]


@pytest.mark.parametrize("name", ["cost $x_{ in $", "_hidden", "a$b", "[/INST]"])
def test_names_stand_in_figures_as_they_are(name):
    record = {"policy": name, "budget": 10, "regret_mean": 1.0, "regret_se": 0.1, "tokens_per_round": 2.0}
    figure = plots.plot_regret([record | {"upper_bound": None, "lower_bound": 1.0}])
    figure.canvas.draw()
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    shown = [" ".join(text.replace(r"\$", "$").split()) for text in legend[:2]]
    assert shown == [name, f"upper bound, {name}"]
    for other in (plots.plot_policies([record]), plots.plot_categories(np.ones((1, 2)), [name, "b"], [name])):
        other.canvas.draw()
        labels = [text.get_text() for axis in other.axes for text in axis.get_yticklabels()]
        assert [text.replace(r"\$", "$").strip() for text in labels] == [name]


# --- specifications


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b", ["a", "b"]),
        ("f(a,b),c", ["f(a,b)", "c"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ('x="a)""(,b",c', ['x="a)""(,b"', "c"]),
        ("", [""]),
    ],
)
def test_parts_keep_what_stands_in_quotes(text, parts):
    assert split_parts(text) == parts


@pytest.mark.parametrize("text", ["a(1,b", "a),b", '"a,b', "(a))"])
def test_signs_without_their_other_half_are_refused(text):
    with refuses("pairs", "in quotes"):
        split_parts(text)


@pytest.mark.parametrize("name", ["plain", "a,b", 'a"b', "a(b", "", "a b", "caf\xe9@2"])
def test_a_quoted_name_is_the_name(name):
    assert unquote(quote(name)) == name
    assert split_parts(f"{quote(name)},x") == [quote(name), "x"]


def test_a_router_s_path_may_hold_any_sign(tmp_path):
    weights = RouterWeights(("a", "b"), np.zeros((2, 3)))
    path = tmp_path / 'w,1 (x@2"y.json'
    path.write_text(json.dumps(weights.to_json()))
    policy = make_policy(f"router:weights={quote(str(path))}")
    assert str(make_policy(str(policy))) == str(policy)
    plain = tmp_path / "w (x)@2.json"
    plain.write_text(json.dumps(weights.to_json()))
    assert make_policy(f"router:weights={plain}").path == str(plain)
    with refuses("policy", "in quotes"):
        make_policy("router:weights=a,b.json")


def test_members_of_an_ensemble_may_hold_any_sign():
    assert parse_spec('ensemble("a,b",c)@2', ["a,b", "c"]).drafters == ("a,b", "c")
    assert parse_spec("ensemble(a(1),c)", ["a(1)", "c"]).drafters == ("a(1)", "c")
    assert parse_spec('ensemble("a(1",c)', ["a(1", "c"]).drafters == ("a(1", "c")
    assert parse_spec("step@32", ["step@32", "step"]).length is None


# --- files


def bfloat16_file(path, **metadata):
    """A .safetensors file whose type numpy lacks."""
    header = {"tokens": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}, "__metadata__": metadata}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0\0")
    return str(path)


def foreign_files(folder):
    """Files that are no trace of ours, each in another way."""
    (folder / "empty").write_bytes(b"")
    (folder / "text").write_bytes(b"no tensors at all")
    (folder / "huge").write_bytes((1 << 60).to_bytes(8, "little"))
    safetensors.numpy.save_file({"x": np.zeros(2)}, folder / "other")
    safetensors.numpy.save_file({"x": np.zeros(2)}, folder / "list", metadata={"metasd": "[]", "metasd-ngram": "[1]"})
    deep = {"metasd": "[" * 200_000, "metasd-ngram": "[" * 200_000}
    safetensors.numpy.save_file({"x": np.zeros(2)}, folder / "deep", metadata=deep)
    half = json.dumps({"schema": 1, "checksum": "0"})
    safetensors.numpy.save_file({"x": np.zeros(2)}, folder / "half", metadata={"metasd": half, "metasd-ngram": half})
    bfloat16_file(folder / "bfloat16", metasd="{}")
    return sorted(folder.iterdir())


def test_files_of_another_kind_are_refused_as_traces(tmp_path, capsys):
    for path in (*foreign_files(tmp_path), tmp_path, tmp_path / "absent"):
        assert main(["replay", str(path)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), path
        assert str(path) in err
        assert "expected" in err


# --- numbers


def test_bounds_past_the_largest_number(capsys):
    assert np.isinf(bounds.ucb_upper([0.9, 0.8], 5, 100, BlockEfficiency(), 1e308))
    assert main(["bounds", "--arms", "0.9,0.8", "--beta", "1e308", "--json", "-"]) == 0
    assert {record["upper_bound"] for record in json.loads(capsys.readouterr().out)} == {None}
    assert main(["bounds", "--arms", "0.9,0.8", "--beta", "1e308"]) == 0
    assert "inf" in capsys.readouterr().out
    assert main([*SIMULATE, "--policy", "metasd-ucb:beta=1e308", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["upper_bound"] is None
    for beta in ("inf", "nan"):
        assert main(["bounds", "--arms", "0.9,0.8", "--beta", beta]) == 2
        assert "finite beta" in capsys.readouterr().err


def test_help_does_not_wait_for_slow_modules():
    code = "import sys\nfrom metasd_sim.cli import main\ntry:\n    main(['simulate', '--help'])\n"
    code += "except SystemExit:\n    sys.exit(any(m in sys.modules for m in ('matplotlib', 'torch', 'scipy.stats')))"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert time.perf_counter() - start < 5  # a busy machine; half a second on an idle one
