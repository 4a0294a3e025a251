"""Conversations on a tiny model: turns, commands, interruptions, a context that fills up."""

import errno
import io
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.cli.chat.commands import Commands, save_messages
from foreword.cli.chat.session import AnswerEnd, ChatSession
from foreword.cli.chat.text import TextPiece
from foreword.engine.config import EngineConfig
from foreword.errors import RequestError
from helpers.tiny_models import make_hf_model, write_tiny_tokenizer

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "fixed": True, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")


@pytest.fixture
def session(llm: LLM) -> ChatSession:
    return ChatSession(llm, SamplingParams(temperature=0, max_tokens=40), NGRAM)


def never() -> bool:
    return False


def after(steps: int) -> Callable[[], bool]:
    calls = count()
    return lambda: next(calls) >= steps


def say(
    session: ChatSession, question: str, interrupted: Callable[[], bool] = never
) -> tuple[AnswerEnd, list[TextPiece]]:
    pieces: list[TextPiece] = []
    outcome = session.answer(session.plan(question), pieces.append, interrupted)
    return outcome, pieces


def test_a_conversation_is_what_chat_with_all_messages_says(llm: LLM, session: ChatSession):
    session.set_system("Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for question in ("the sky", "the sea"):
        outcome, pieces = say(session, question)
        messages.append({"role": "user", "content": question})
        expected = llm.chat(messages, session.params)[0].outputs[0]
        assert outcome.text == expected.text == "".join(piece.text for piece in pieces)
        assert outcome.finish_reason == expected.finish_reason
        messages.append({"role": "assistant", "content": outcome.text})
    assert [turn.question for turn in session.turns] == ["the sky", "the sea"]
    assert not llm.engine.has_requests


def test_a_follow_up_finds_its_beginning_in_the_cache(session: ChatSession):
    say(session, "She sells sea shells by the sea shore")
    say(session, "more")
    assert session.last.cached_tokens >= 16


def test_as_many_pieces_are_guesses_as_were_accepted(session: ChatSession):
    session.set_params(max_tokens=200, logit_bias={2: -100})
    outcome, pieces = say(session, "the the the the the")
    guessed = sum(piece.drafted for piece in pieces)
    assert 0 < guessed <= outcome.tally.accepted  # a token may end in the middle of a character
    assert outcome.tally.tokens_per_pass is not None
    assert outcome.tally.tokens_per_pass > 1
    Commands(session).run("/plain")
    session.reset()
    plain, pieces = say(session, "the the the the the")
    assert plain.text == outcome.text
    assert not any(piece.drafted for piece in pieces)


def test_an_interrupted_answer_stays_as_far_as_it_came(llm: LLM, session: ChatSession):
    whole, _ = say(session, "the sky")
    session.reset()
    part, _ = say(session, "the sky", after(6))
    assert part.finish_reason == "abort"
    assert part.text
    assert whole.text.startswith(part.text.rstrip("\ufffd"))
    assert len(part.text) < len(whole.text)
    assert session.turns[0].answer == part.text
    llm.engine.check_integrity()
    assert llm.engine.cache.num_open == 0
    outcome, _ = say(session, "go on")  # and the conversation does
    assert outcome.finish_reason != "abort"
    assert len(session.turns) == 2


def test_a_question_without_an_answer_is_not_kept(session: ChatSession):
    outcome, pieces = say(session, "the sky", after(0))
    assert (outcome.text, outcome.finish_reason, pieces, session.turns) == ("", "abort", [], [])


def test_a_listener_that_breaks_leaves_the_engine_in_order(llm: LLM, session: ChatSession):
    def broken(_: TextPiece) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        session.answer(session.plan("the sky"), broken, never)
    assert not llm.engine.has_requests
    assert session.turns == []


def test_the_oldest_turns_give_way_when_the_context_is_full(tiny_model: Path):
    small = LLM(
        str(tiny_model), dtype="float32", device="cpu", backend="cpu", config=EngineConfig(max_model_len=128)
    )
    session = ChatSession(small, SamplingParams(temperature=0, max_tokens=16), NGRAM)
    session.set_system("Be brief.")
    dropped = 0
    for number in range(9):
        plan = session.plan(f"question {number}")
        assert len(plan.prompt_ids) <= 128 - 16
        before = list(session.turns)
        session.answer(plan, lambda _: None, never)
        assert session.turns[:-1] == before[plan.dropped :]
        assert small.tokenizer.decode(plan.prompt_ids).startswith("system\nBe brief.")
        dropped += plan.dropped
    assert dropped > 0
    turns = list(session.turns)
    with pytest.raises(RequestError, match="shorten it"):
        session.plan("too long " * 100)
    assert session.turns == turns
    assert len(session.plan("xyz " * 22).prompt_ids) > 112  # fits alone, with less room for the answer


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path):
    directory = make_hf_model(tmp_path / "plain")
    write_tiny_tokenizer(directory, chat_template=None)
    with pytest.raises(RequestError, match="chat template"):
        ChatSession(LLM(str(directory), dtype="float32"), SamplingParams(), None)


def test_commands_change_what_they_name(session: ChatSession):
    commands = Commands(session)
    assert "plain" in commands.run("/plain").line
    assert session.speculation is None
    assert "plain now" in commands.run("/depth 7").line
    assert commands.run("/method suffix").line == "suffix, up to 7 draft tokens per pass"
    assert commands.run("/method suffix+ngram").line == "suffix+ngram, up to 7 draft tokens per pass"
    assert commands.run("/depth 3").line == "suffix+ngram, up to 3 draft tokens per pass"
    commands.run('/method {"method": "ngram", "prompt_lookup_min": 2, "num_speculative_tokens": 6}')
    assert session.speculation is not None
    assert session.speculation["prompt_lookup_min"] == 2
    assert session.speculation["num_speculative_tokens"] == 6
    assert commands.run("/method auto").line == "ngram, up to 4 draft tokens per pass"
    assert session.speculation["prompt_lookup_min"] == 1  # as at the start
    commands.run("/temperature 0.5")
    commands.run("/top-p 0.8")
    commands.run("/seed 11")
    assert (session.params.temperature, session.params.top_p, session.params.seed) == (0.5, 0.8, 11)
    commands.run("/seed off")
    assert session.params.seed is None
    commands.run("/system You are a parrot.")
    assert session.system == "You are a parrot."
    commands.run("/system")
    assert session.system is None
    assert commands.run("/exit").leave
    assert "/temperature" in commands.run("/help").line


def test_statistics_and_reset(session: ChatSession):
    commands = Commands(session)
    assert "nothing" in commands.run("/stats").line
    say(session, "the the the the")
    assert len(commands.run("/stats").tables) == 2
    commands.run("/reset")
    assert session.turns == []
    assert session.total.answers == 1


def test_retry_replaces_the_last_answer(llm: LLM, session: ChatSession):
    commands = Commands(session)
    say(session, "the sky")
    session.set_params(temperature=1.5)
    say(session, "the sea")
    first, (before, old) = session.turns[0], session.turns
    reply = commands.run("/retry")
    assert (reply.line, reply.plan is None) == ("", False)
    outcome = session.answer(reply.plan, lambda _: None, never)
    assert [turn.question for turn in session.turns] == ["the sky", "the sea"]
    assert session.turns[0] is first is before
    assert session.turns[1].answer == outcome.text != old.answer, "drawn with a fresh seed"
    session.answer(commands.run("/retry").plan, lambda _: None, after(0))
    assert session.turns[1].answer == outcome.text, "an answer that was stopped at once replaces nothing"
    commands.run("/seed 3")
    reply = commands.run("/retry")
    assert "seed 3 is set" in reply.line
    texts = {session.answer(reply.plan, lambda _: None, never).text for _ in range(2)}
    assert len(texts) == 1


def test_save_writes_the_conversation_once(session: ChatSession, tmp_path: Path):
    commands, file = Commands(session), tmp_path / "talk.json"
    commands.run("/system Be short.")
    outcome, _ = say(session, "the sky")
    assert commands.run(f"/save {file}").line == f"3 messages saved to {file}"
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved == {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "the sky"},
            {"role": "assistant", "content": outcome.text},
        ]
    }
    file.write_text("mine")
    assert "exists" in commands.run(f"/save {file}").line
    assert file.read_text() == "mine"
    for unwritable in (tmp_path / "none" / "x", "~no-such-user/x"):
        assert "No such file" in commands.run(f"/save {unwritable}").line


def test_a_conversation_that_cannot_be_written_whole_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "talk.json"
    file.touch()
    monkeypatch.setattr(Path, "open", lambda *_, **__: Full())
    with pytest.raises(RequestError, match="No space left on device"):
        save_messages(file, [])
    assert not file.exists()


@pytest.mark.parametrize(
    "line",
    [
        "/", "/foo", "/ plain", "/PLAIN", "/method", "/method oracle", "/method {", '/method {"num": 3}',
        '/method {"method": [["ngram"]]}', '/method {"method": "layer_skip", "layers": 3}', "/method draft_model",
        "/method " + '{"a":' * 50_000,
        "/depth", "/depth 0", "/depth x", "/depth 100000", "/temperature", "/temperature -1", "/temperature nan",
        "/temperature 2.1", "/temperature inf", "/top-p", "/top-p x", "/top-p 0", "/top-p 1.1", "/top-p nan",
        "/seed", "/seed -1", "/seed 1.5", "/seed 99999999999999999999999",
        "/retry", "/save", "/save file.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("plain", [False, True])
def test_a_bad_command_is_one_line_and_changes_nothing(session: ChatSession, line: str, plain: bool):
    commands = Commands(session)
    if plain:
        commands.run("/plain")
    before = (session.params, session.speculation, session.system, list(session.turns))
    reply = commands.run(line)
    assert reply.line
    assert "\n" not in reply.line
    assert not reply.leave
    assert (session.params, session.speculation, session.system, session.turns) == before
    assert commands.run("/method ngram").line == "ngram, up to 4 draft tokens per pass"


def test_a_template_that_takes_no_system_message_says_so_at_once(tmp_path: Path):
    directory = make_hf_model(tmp_path / "strict")
    strict = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    write_tiny_tokenizer(directory, chat_template=strict)
    session = ChatSession(LLM(str(directory), dtype="float32"), SamplingParams(max_tokens=4), None)
    assert "no system" in Commands(session).run("/system Be brief.").line
    assert session.system is None
    say(session, "still fine")


def test_guesses_are_shown_as_a_line_or_as_a_tree(llm: LLM):
    import io

    from rich.console import Console

    def shown(form: dict[str, object]) -> str:
        session = ChatSession(llm, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), form)
        commands = Commands(session)
        assert "no draft" in commands.run("/guesses").line
        say(session, "the sky the sky")
        console = Console(file=io.StringIO(), width=100)
        for table in commands.run("/guesses 40").tables:
            console.print(table)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    chain = shown({"method": "layer_skip", "num_speculative_tokens": 3, "fixed": True})
    assert "pass 2: " in chain
    assert "├" not in chain
    tree = shown({"method": "layer_skip", "num_speculative_tokens": 6, "tree_width": 3, "fixed": True})
    assert "├" in tree and "└" in tree
