import json

import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config.sections import SourceSection
from megatron_rl.data.errors import DataError
from megatron_rl.data.sources import read_source, reward_name


def write_jsonl(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def read(**fields):
    return list(read_source(SourceSection(name="mine", **fields), seed=1))


def test_jsonl_rows_become_questions_with_their_place(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "2+2", "a": 4, "more": [1]}, "", {"q": "half", "a": "1/2"}])
    questions = read(kind="jsonl", path=path, prompt_key="q", answer_key="a", prompt_template="Q: {prompt} {x}")
    assert [(q.prompt_id, q.text, q.answer) for q in questions] == [
        ("mine/1", "Q: 2+2 {x}", "4"),
        ("mine/3", "Q: half {x}", "1/2"),
    ]
    assert questions[1].place == f"{path}:3"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{'prompt': 1}", r"a.jsonl:2: not JSON \("),
        ("[1, 2]", "a.jsonl:2: expected one JSON object a line, got list"),
        ({"prompt": "p"}, r"a.jsonl:2: no key 'answer' \(it has prompt\); set the source's answer_key"),
        ({"prompt": "p", "answer": " "}, "a.jsonl:2: 'answer' is empty"),
        ({"prompt": "", "answer": "1"}, "a.jsonl:2: 'prompt' is empty"),
        ({"prompt": ["p"], "answer": "1"}, "a.jsonl:2: 'prompt' must be text or a number, not list"),
        ({"prompt": "p", "answer": True}, "a.jsonl:2: 'answer' must be text or a number, not bool"),
    ],
)
def test_a_bad_jsonl_row_is_named_by_file_and_line(tmp_path, row, message):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ok", "answer": "1"}, row])
    with pytest.raises(DataError, match=message):
        read(kind="jsonl", path=path)


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a.jsonl: not UTF-8 \(invalid start byte"):
        read(kind="jsonl", path=str(tmp_path / "a.jsonl"))


def test_parquet_rows_become_questions(tmp_path):
    path = tmp_path / "b.parquet"
    table = pyarrow.table({"prompt": ["x", "y", "z"], "answer": [1, 2, 3], "rest": [[1], [2], [3]]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    questions = read(kind="parquet", path=str(path))
    assert [(q.prompt_id, q.text, q.answer) for q in questions] == [
        ("mine/1", "x", "1"),
        ("mine/2", "y", "2"),
        ("mine/3", "z", "3"),
    ]


def test_bad_parquet_is_named_by_file_row_and_column(tmp_path):
    path = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "answer": ["1", None]}), path)
    with pytest.raises(DataError, match=r"b.parquet row 2: 'answer' must be text or a number, not NoneType"):
        read(kind="parquet", path=str(path))
    with pytest.raises(DataError, match=r"b.parquet: no column 'question'; it has prompt, answer"):
        read(kind="parquet", path=str(path), prompt_key="question")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"b.parquet: not a readable Parquet file"):
        read(kind="parquet", path=str(path))


def test_reasoning_gym_keeps_the_varying_part_and_its_metadata():
    fields = {"task": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 4}, "size": 13}
    questions = read(kind="reasoning_gym", prompt_regex=r": (\w+)$", prompt_template="{prompt}=", **fields)
    assert len(questions) == 13
    assert all(q.text == q.answer[::-1] + "=" for q in questions)
    assert questions[12].metadata["index"] == 12
    assert questions[12].place == "source 'mine', spell_backward entry 12"


def test_two_sources_of_one_task_draw_different_entries():
    section = {"kind": "reasoning_gym", "task": "chain_sum", "params": {"max_digits": 3}, "size": 30}
    first = {q.text for q in read_source(SourceSection(name="one", **section), seed=1)}
    second = {q.text for q in read_source(SourceSection(name="two", **section), seed=1)}
    assert len(first & second) < 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "jsonl"}, "source 'mine': kind jsonl needs a path"),
        ({"kind": "parquet", "path": "nowhere.parquet"}, "source 'mine': nowhere.parquet: no such file"),
        ({"kind": "reasoning_gym"}, "source 'mine': kind reasoning_gym needs a task"),
        ({"kind": "reasoning_gym", "task": "chain_sums"}, "source 'mine': .*did you mean 'chain_sum'"),
        ({"kind": "reasoning_gym", "task": "chain_sum", "size": 0}, "source 'mine': .*refuses size 0"),
        ({"kind": "reasoning_gym", "task": "chain_sum", "prompt_template": "go"}, r"must contain \{prompt\}"),
        ({"kind": "reasoning_gym", "task": "chain_sum", "prompt_regex": "("}, "not a regular expression"),
        ({"kind": "reasoning_gym", "task": "chain_sum", "prompt_regex": "sum"}, "must have one group"),
        ({"kind": "reasoning_gym", "task": "chain_sum", "prompt_regex": "(sum!)"}, "entry 0: prompt_regex .*not match"),
    ],
)
def test_a_wrong_source_setting_is_one_line(fields, message):
    with pytest.raises(DataError, match=message) as caught:
        read(**fields)
    assert "\n" not in str(caught.value)


def test_the_reward_of_a_source_is_its_own_unless_named():
    assert reward_name(SourceSection(name="a", kind="reasoning_gym")) == "reasoning_gym"
    assert reward_name(SourceSection(name="a", kind="jsonl")) == "math_verify"
    assert reward_name(SourceSection(name="a", kind="parquet", reward="exact_match")) == "exact_match"
