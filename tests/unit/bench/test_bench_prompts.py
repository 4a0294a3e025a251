"""Datasets are told apart by what is in them, and a bad line is named."""

import json
from pathlib import Path

import pytest

from foreword.bench.prompts import (
    MT_BENCH,
    BenchPrompt,
    bench_prompts,
    document_prompts,
    long_documents,
    own_prompts,
    parse_prompts,
    prompts_digest,
    read_prompts,
    spec_bench_kinds,
    take_per_category,
)
from foreword.errors import RequestError


def test_every_known_format_is_read_by_its_content():
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []},
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
        {"question": "How many?", "answer": "3"},
    ]
    prompts = parse_prompts("\n\n".join(json.dumps(line) for line in lines) + "\n", "file")
    assert [(p.name, p.category, p.text) for p in prompts] == [
        ("81", "writing", "Write."),
        ("HumanEval/0", "code", "def f():\n"),
        ("5", "math", "How many?"),
    ]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ('{"text": "hi"}', "no prompt"),
        ('{"question_id": 1, "category": "x", "turns": []}', "turns"),
        ('{"question_id": 1, "category": "x", "turns": [3]}', "turns"),
        ('{"question_id": 1, "turns": ["hi"]}', "category"),
        ('{"prompt": "  "}', "prompt"),
        ('{"question": null}', "question"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, word: str):
    with pytest.raises(RequestError, match=rf"^data, line 3: .*{word}") as caught:
        parse_prompts('{"question": "a"}\n\n' + line, "data")
    assert "\n" not in str(caught.value)


def test_empty_doubled_and_unreadable_datasets_are_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="no prompts"):
        parse_prompts("\n \n", "data")
    twice = '{"question_id": 7, "category": "x", "turns": ["hi"]}\n'
    with pytest.raises(RequestError, match="prompt 7 is there twice"):
        parse_prompts(twice * 2, "data")
    with pytest.raises(RequestError, match="nowhere"):
        read_prompts(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="binary"):
        read_prompts(tmp_path / "binary")


def test_our_own_prompts_cover_the_kinds_of_work():
    prompts = own_prompts()
    kinds = {"chat", "code", "summarising", "translation", "extraction", "repetition"}
    assert kinds <= {prompt.category for prompt in prompts}
    for kind in kinds:
        assert sum(prompt.category == kind for prompt in prompts) >= 4
    assert len({prompt.key for prompt in prompts}) == len(prompts)


def test_the_limit_counts_every_category_by_itself():
    prompts = own_prompts()
    taken = take_per_category(prompts, 2)
    assert len(taken) == 2 * len({prompt.category for prompt in prompts})
    assert taken == [prompt for prompt in prompts if prompt in taken]  # the order stays
    assert take_per_category(prompts, None) == prompts
    with pytest.raises(RequestError, match="at least 1"):
        take_per_category(prompts, 0)


def test_several_files_are_one_set_and_a_category_of_two_of_them_is_two(tmp_path: Path):
    mixed = [{"category": kind, "turns": [f"{kind} {place}"]} for kind in ("math", "qa") for place in (1, 2)]
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    (tmp_path / "school.jsonl").write_text('{"question": "1 + 1?"}\n{"question": "2 + 2?"}\n')
    paths = [tmp_path / "bench.jsonl", tmp_path / "school.jsonl"]
    found = bench_prompts(paths, 1)
    assert [(prompt.category, prompt.text) for prompt in found] == [
        ("math (bench)", "math 1"),
        ("qa", "qa 1"),
        ("math (school)", "1 + 1?"),
    ]
    assert [prompt.category for prompt in bench_prompts(paths[1:], 1)] == ["math"]
    assert bench_prompts(None, 2) == take_per_category(own_prompts(), 2)
    with pytest.raises(RequestError, match="the datasets: prompt 1 is there twice"):
        bench_prompts([paths[1], paths[1]], None)


def test_documents_are_cut_to_lengths_and_end_with_a_question_or_a_continuation():
    documents = {"docs": "".join(map(chr, range(300, 600))), "source": "long " * 300}
    prompts = document_prompts([150, 400, 150], documents, list)  # one token per character
    assert [(prompt.category, prompt.name) for prompt in prompts] == [
        ("150 tokens", "docs, question"),
        ("150 tokens", "source, question"),
        ("150 tokens", "docs, continuation"),
        ("150 tokens", "source, continuation"),
        ("400 tokens", "source, question"),
        ("400 tokens", "source, continuation"),
    ]
    for prompt in prompts:
        assert len(prompt.text) == int(prompt.category.split()[0])
        assert documents[prompt.name.split(",")[0]].startswith(prompt.text.partition("\n\n")[0])
        assert ("Question:" in prompt.text, "Continue" in prompt.text) == (
            "question" in prompt.name,
            "continuation" in prompt.name,
        )


def test_lengths_without_room_or_document_are_refused():
    with pytest.raises(RequestError, match="--context 10 has no room"):
        document_prompts([10], {"docs": "long " * 300}, list)
    with pytest.raises(RequestError, match="--context 2000 is longer than every document"):
        document_prompts([150, 2000], {"docs": "long " * 300}, list)


def test_the_project_has_long_documents():
    documents = long_documents()
    assert list(documents) == ["docs", "source"]
    assert min(map(len, documents.values())) > 4 * 32768  # about four characters per token
    assert "def long_documents" in documents["source"]


def test_other_prompts_have_another_digest():
    prompts = take_per_category(own_prompts(), 2)
    assert prompts_digest(prompts) == prompts_digest(list(prompts))
    assert len({prompts_digest(prompts), prompts_digest(prompts[1:]), prompts_digest(prompts[::-1])}) == 3


def test_conversations_of_spec_bench_are_one_kind():
    names = [*sorted(MT_BENCH), "translation"]
    found = spec_bench_kinds([BenchPrompt(str(k), name, "text") for k, name in enumerate(names)])
    assert [prompt.category for prompt in found] == ["conversation"] * 8 + ["translation"]
    ours = [BenchPrompt("1", "extraction", "text")]
    assert spec_bench_kinds(ours) == ours
