"""Conversations: what a file's users say, turn by turn, and what models cannot do it."""

from pathlib import Path

import pytest

from foreword.errors import TokenizerError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.train.texts import documents
from foreword.train.texts.documents import Document
from foreword.train.texts.prompts import FilePrompt, chat_pieces
from foreword.train.texts.writing import Writer, WritingLimits
from helpers.tiny_models import make_hf_model, write_tiny_tokenizer


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return open_checkpoint(tiny_model).tokenizer()


def test_the_turns_of_a_file_are_said_one_after_the_other(tokenizer: Tokenizer):
    emitted: list[Document] = []
    prompt = FilePrompt("mine", ("First?", "Second?", "Third?"), "Be brief.")
    writer = Writer(tokenizer, WritingLimits(400), emitted.append, prompts=[prompt], only_prompts=True)
    end = min(tokenizer.eos_ids)
    answers = []
    for number in range(3):
        job = next(writer)
        answers.append([*tokenizer.encode(f"answer {number}", add_special_tokens=False), end])
        job.on_done(answers[-1])
    (document,) = emitted
    assert document.kind == "mine"
    messages = [{"role": "system", "content": "Be brief."}]
    for number, turn in enumerate(prompt.turns):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": f"answer {number}"}]
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert document.tokens.tolist() == whole[: len(document.tokens)]
    assert document.tokens[document.is_answer].tolist() == [token for answer in answers for token in answer]


def test_what_does_not_fit_any_more_is_not_said(tokenizer: Tokenizer):
    emitted: list[Document] = []
    prompt = FilePrompt("mine", ("First?", "Second? " * 40))
    writer = Writer(tokenizer, WritingLimits(60), emitted.append, prompts=[prompt], only_prompts=True)
    next(writer).on_done([5, min(tokenizer.eos_ids)])
    assert len(emitted) == 1


def test_documents_are_written_outside_of_chats_and_come_back_in_prompts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """A text that is held out must not: no prompt of training may hold any of it."""
    monkeypatch.setattr(documents, "is_held_out", lambda prompt: len(prompt) % 3 == 0)
    emitted: list[Document] = []
    writer = Writer(tokenizer, WritingLimits(2000, passage=80), emitted.append)
    begins_chat = writer._opening()[:1]
    mark = tokenizer.encode("xyzzy", add_special_tokens=False)
    held_out: list[list[int]] = []
    kept: list[list[int]] = []
    prompts: list[list[int]] = []
    for _ in range(1000):
        job = next(writer)
        prompts.append(job.prompt)
        before = len(emitted)
        words = [*mark, *tokenizer.encode(f"{len(prompts)} ", add_special_tokens=False)]
        job.on_done([*(words * 40)[:64], min(tokenizer.eos_ids)])
        for document in emitted[before:]:
            if tuple(document.tokens[:1]) != begins_chat:
                assert document.kind == "passage"
                assert document.tokens[document.is_answer].tolist()[: len(words)] == words
                (held_out if document.held_out else kept).append(words)
    assert kept and held_out

    def is_prompted(words: list[int]) -> bool:
        return any(_contains(prompt, words) for prompt in prompts)

    assert sum(map(is_prompted, kept)) > len(kept) / 4
    assert not any(map(is_prompted, held_out))


def _contains(text: list[int], part: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


def test_a_model_without_a_chat_template_is_told_in_a_line(tmp_path: Path):
    model = make_hf_model(tmp_path / "plain", "llama")
    write_tiny_tokenizer(model, chat_template=None)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(TokenizerError, match=r"no chat template.*use an instruct model"):
        chat_pieces(open_checkpoint(model).tokenizer())
