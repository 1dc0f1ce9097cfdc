"""A recording that is killed, at any moment, resumes and ends as if nothing had happened; what does not fit is refused.

Children are forked, and killed by SIGKILL, which leaves them no last word.
"""

import os
import shutil
import signal
import tempfile
import time
import traceback
from dataclasses import replace

import numpy as np
import pytest

from metasd_live.prompts import Prompt
from metasd_live.record import Recorder, record
from metasd_live.verify import Rule
from metasd_sim import traces

from .chain_models import ChainTarget, chain_logits, law_arm, no_draft, table_arm
from .sim_cases import refuses

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

PROMPTS = [Prompt(f"p{i}", f"{i % 4} {i % 3} 1", "odd" if i % 2 else "even") for i in range(8)]
KILLS = 24
NAME = "trace.safetensors"
SHARDS = NAME + ".shards"


def a_recorder(**changes):
    arms = [no_draft(), law_arm("law", chain_logits(1, 4), 3), table_arm("table", 2, 4, 2)]
    return replace(Recorder(ChainTarget(chain_logits(0, 4), (0,)), arms, 12, Rule("rejection", 0.8)), **changes)


def in_a_child(work, kill_after=None):
    """Whether a child that does `work` died by SIGKILL, sent after some seconds or by itself; else it must succeed."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def recording(folder):
    return lambda: record(a_recorder(), PROMPTS, folder / NAME)


@pytest.fixture
def whole(tmp_path):
    """Folder of an uninterrupted recording."""
    folder = tmp_path / "whole"
    folder.mkdir()
    recording(folder)()
    return folder


def assert_same(folder, whole):
    """The same trace, bit by bit and as it is read, and no other file."""
    assert sorted(path.name for path in folder.iterdir()) == [NAME]
    a, b = traces.read(folder / NAME), traces.read(whole / NAME)
    assert a.tensors().keys() == b.tensors().keys()
    for name, value in b.tensors().items():
        np.testing.assert_array_equal(a.tensors()[name], value)
    for name in ("arms", "drafters", "queries", "verification", "max_new_tokens", "provenance", "costs"):
        assert getattr(a, name) == getattr(b, name)
    assert (folder / NAME).read_bytes() == (whole / NAME).read_bytes()


def test_killed_at_random_moments(tmp_path, whole):
    start = time.perf_counter()
    folder = tmp_path / "measured"
    folder.mkdir()
    assert not in_a_child(recording(folder))
    duration = time.perf_counter() - start
    rng = np.random.default_rng(0)
    kills, resumed = 0, 0
    for attempt in range(20 * KILLS):
        folder = tmp_path / f"{attempt}"
        folder.mkdir()
        while in_a_child(recording(folder), kill_after=rng.uniform(0, 0.7 * duration)):
            if (folder / NAME).exists() and not (folder / SHARDS).exists():
                break  # it had come to its end
            kills += 1
            resumed += (folder / SHARDS).is_dir() and any((folder / SHARDS).glob("*.safetensors"))
        assert_same(folder, whole)
        if kills >= KILLS:
            break
    assert kills >= KILLS
    assert resumed >= KILLS // 4  # with shards to resume from


def dies_at(module, name, call, after):
    """Kills the process before or after the n-th call of a function."""
    real, calls = getattr(module, name), 0

    def mortal(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if calls == call and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, mortal)


LAST = len(PROMPTS) + 1  # file that is written: the whole trace, after one shard for each prompt
WRITING = [(tempfile, "mkstemp"), (os, "fsync"), (os, "replace")]
MOMENTS = [(*step, call, after) for step in WRITING for call in (1, 3, LAST) for after in (False, True)]
MOMENTS += [(os, "replace", LAST + 1, after) for after in (False, True)]  # the trace takes its place
MOMENTS += [(os, "mkdir", 1, True), (shutil, "rmtree", 1, False), (os, "unlink", 4, True), (os, "rmdir", 1, False)]


@pytest.mark.parametrize(
    ("module", "name", "call", "after"), MOMENTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_killed_at_every_kind_of_moment(tmp_path, whole, module, name, call, after):
    folder = tmp_path / "killed"
    folder.mkdir()

    def work():
        dies_at(module, name, call, after)
        recording(folder)()

    assert in_a_child(work)
    assert not in_a_child(recording(folder))
    assert_same(folder, whole)


# --- what does not fit is refused


@pytest.fixture
def half(tmp_path):
    """Folder of a recording killed after three prompts."""
    folder = tmp_path / "half"
    folder.mkdir()

    def work():
        dies_at(os, "replace", 3, after=True)
        recording(folder)()

    assert in_a_child(work)
    assert sorted(path.name for path in (folder / SHARDS).iterdir()) == [f"0000{i}.safetensors" for i in range(3)]
    return folder


OTHERS = {
    "temperature": a_recorder(rule=Rule("rejection", 0.9)),
    "gumbel": a_recorder(rule=Rule("gumbel", 0.8)),
    "seed": a_recorder(seed=1),
    "max_new_tokens": a_recorder(max_new_tokens=11),
    "chat_template": a_recorder(chat_template=False),
    "arms": a_recorder(arms=a_recorder().arms[:2]),
    "drafters": a_recorder(arms=[replace(arm, length=2) if arm.length else arm for arm in a_recorder().arms]),
    "weights": a_recorder(target=ChainTarget(chain_logits(5, 4), (0,))),
}


@pytest.mark.parametrize("word", OTHERS)
def test_other_settings_are_refused(half, whole, word):
    with refuses(f"{SHARDS}/00000.safetensors", word, "--force"):
        record(OTHERS[word], PROMPTS, half / NAME)
    recording(half)()  # what was there is unharmed
    assert_same(half, whole)


@pytest.mark.parametrize(
    ("number", "change"), [(0, {"text": "1 2 3"}), (2, {"text": "1 2 3"}), (1, {"id": "q1"}), (1, {"category": "x"})]
)
def test_another_prompt_is_refused(half, number, change):
    prompts = list(PROMPTS)
    prompts[number] = replace(prompts[number], **change)
    with refuses(f"{SHARDS}/0000{number}.safetensors", "prompt", "--force"):
        record(a_recorder(), prompts, half / NAME)


def test_other_settings_are_recorded_anew_if_forced(half, tmp_path):
    other = a_recorder(seed=1)
    forced = record(other, PROMPTS, half / NAME, force=True)
    fresh = record(other, PROMPTS, tmp_path / NAME)
    np.testing.assert_array_equal(forced.tokens, fresh.tokens)
    assert (half / NAME).read_bytes() == (tmp_path / NAME).read_bytes()


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize("part", ["length", "header", "tensors", "last byte", "cut tail", "cut to nothing"])
def test_a_damaged_shard_is_refused(half, whole, part):
    shard = half / SHARDS / "00001.safetensors"
    content = shard.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    spread = np.linspace(0, 1, 9)
    damaged = {
        "length": [flipped(content, at) for at in range(8)],
        "header": [flipped(content, int(at)) for at in 8 + spread * (header - 9)],
        "tensors": [flipped(content, int(at)) for at in header + spread * (len(content) - header - 1)],
        "last byte": [flipped(content, len(content) - 1)],
        "cut tail": [content[:-1], content[: len(content) // 2], content[:header], content[: header - 9]],
        "cut to nothing": [content[:8], content[:3], b""],
    }
    for other in damaged[part]:
        shard.write_bytes(other)
        with refuses(str(shard), "--force"):
            record(a_recorder(), PROMPTS, half / NAME)
    assert not (half / NAME).exists()
    record(a_recorder(), PROMPTS, half / NAME, force=True)
    assert_same(half, whole)


def test_a_shard_of_another_prompt_is_refused(half):
    shards = half / SHARDS
    shutil.copy(shards / "00000.safetensors", shards / "00002.safetensors")
    with refuses("00002.safetensors", "prompt", "--force"):
        record(a_recorder(), PROMPTS, half / NAME)
