"""Texts for training: generated in batches, kept and read again."""

import pytest

from metasd_live.outputs import Output, generate_outputs, read_outputs, to_lines
from metasd_live.prompts import Prompt
from metasd_live.train import cut, output_sequences, text_sequences
from tests.live_cases import reference_text, tiny_target
from tests.sim_cases import refuses

PROMPTS = [Prompt(f"p{i}", " ".join(f"w{j}" for j in range(2, 4 + i)), "ab"[i % 2]) for i in range(5)]
OUTPUTS = [Output("1", "a", [1, 2, 3], [4, 5]), Output("2", "b", [6], [7, 8, 9]), Output("3", "a", [], [10])]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_batches_write_the_single_texts(batch_size):
    plain = tiny_target()
    text = reference_text(plain, plain.encode(PROMPTS[1].text), 12)
    target = tiny_target(eos=(text[4],))
    outputs = generate_outputs(target, PROMPTS, 12, batch_size)
    assert [(output.id, output.category) for output in outputs] == [(p.id, p.category) for p in PROMPTS]
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_ids == target.encode(prompt.text)
        assert output.token_ids == reference_text(target, output.prompt_ids, 12)
    assert len(outputs[1].token_ids) <= 5


def test_outputs_are_kept(tmp_path):
    path = tmp_path / "outputs.jsonl"
    path.write_text(to_lines(OUTPUTS, "a" * 64))
    assert read_outputs(str(path), "a" * 64) == OUTPUTS
    with refuses("outputs.jsonl", "aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        read_outputs(str(path), "b" * 64)
    for broken in ("", "{}", '{"tokenizer": 1}\n{"id": 1}', "no JSON"):
        path.write_text(broken)
        with refuses("outputs.jsonl", "expected"):
            read_outputs(str(path), "a" * 64)


def test_sequences_of_outputs():
    sequences = output_sequences(OUTPUTS, [], prompt_tokens=2)
    assert sorted(sequences) == [[2, 3, 4, 5], [6, 7, 8, 9], [10]]  # each after the end of its prompt
    assert sorted(output_sequences(OUTPUTS, ["a"], 2)) == [[2, 3, 4, 5], [10]]
    orders = {str(output_sequences(OUTPUTS, [], 2, seed)) for seed in range(20)}
    assert len(orders) > 1
    with refuses("category", "a, b", "c"):
        output_sequences(OUTPUTS, ["c"], 2)


def test_sequences_are_cut_to_a_number_of_tokens():
    sequences = [[1, 2, 3], [4, 5], [6]]
    assert cut(sequences, None) == sequences
    assert cut(sequences, 4) == [[1, 2, 3], [4]]
    assert cut(sequences, 3) == [[1, 2, 3]]
    assert cut(sequences, 99) == sequences


def test_sequences_of_a_text(tmp_path):
    (tmp_path / "text.txt").write_text("w2 w3\nw4")
    assert text_sequences(str(tmp_path / "text.txt"), tiny_target()) == [[2, 3, 4]]
    with refuses("absent.txt"):
        text_sequences(str(tmp_path / "absent.txt"), tiny_target())
