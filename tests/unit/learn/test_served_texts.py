"""The ring of served texts: limits, tenants, and which texts are held out."""

from pathlib import Path

from foreword.learn.factory import restored_texts
from foreword.learn.settings import LearnSettings
from foreword.learn.stored_texts import forget_stored, read_texts, store_texts
from foreword.learn.texts import ServedTexts
from foreword.train.texts.documents import is_held_out, make_document, write_shard
from helpers.clocks import ScriptedClock

ANSWER = list(range(20))


def _all(tenant: str) -> bool:
    """All tenants take part."""
    return True


def _texts(clock: ScriptedClock | None = None, **settings: object) -> ServedTexts:
    return ServedTexts(LearnSettings("unused", **settings), clock or ScriptedClock())  # type: ignore[arg-type]


def _fill(texts: ServedTexts, count: int, tenant: str = "", first: int = 0) -> None:
    for number in range(first, first + count):
        assert texts.add([number, 7], ANSWER, tenant, 0.5)


def test_the_oldest_texts_leave_beyond_the_tokens():
    texts = _texts(tokens=100)
    _fill(texts, 6)
    assert len(texts) == 4 and texts.tokens == 88
    assert [text.document.tokens[0] for text in texts] == [2, 3, 4, 5]
    assert texts.new_tokens == 120  # those that left still count: they were new traffic


def test_old_texts_are_dropped():
    clock = ScriptedClock()
    texts = _texts(clock, hours=1)
    _fill(texts, 2)
    clock.pass_by(3599)
    _fill(texts, 1, first=2)
    assert len(texts) == 3
    clock.pass_by(2)
    texts.expire()
    assert len(texts) == 1 and texts.tokens == 22 and texts.new_tokens == 20
    texts.trained(texts.for_training())
    clock.pass_by(3600)
    texts.expire()
    assert len(texts) == 0 and texts.new_tokens == 0


def test_short_long_and_foreign_texts_are_not_kept():
    texts = _texts(text_tokens=30, tenants=("mine",))
    assert not texts.add([1], ANSWER[:15], "mine", 0.0)
    assert not texts.add(list(range(11)), ANSWER, "mine", 0.0)
    assert not texts.add([1], ANSWER, "other", 0.0)
    assert not texts.add([], ANSWER, "mine", 0.0)
    assert texts.add(list(range(10)), ANSWER, "mine", 0.0)
    assert len(texts) == 1


def test_a_document_has_the_answer_its_temperature_and_no_tenant():
    texts = _texts()
    texts.add([5, 6, 7], ANSWER, "secret", 0.5)
    (document,) = texts.for_training().documents
    assert document.tokens.tolist() == [5, 6, 7, *ANSWER] and document.answer_begin == 3
    assert document.temperature == 0.5 and "secret" not in document.kind


def test_the_hash_of_a_prompt_decides_what_is_held_out():
    texts = _texts()
    _fill(texts, 300)
    held_out = [text for text in texts if text.document.held_out]
    assert 15 <= len(held_out) <= 45  # a tenth
    assert all(is_held_out([int(token) for token in text.document.tokens[:2]], 100) for text in held_out)
    chosen = texts.for_training()
    assert [d.held_out for d in chosen.documents[: len(held_out)]] == [True] * len(held_out)
    assert int(chosen.documents[0].tokens[0]) == int(held_out[-1].document.tokens[0])  # newest first


def test_at_least_one_prompt_is_held_out():
    texts = _texts(held_out_permille=0)
    for number in (3, 4, 4, 5):
        texts.add([number, 7], ANSWER, "", 0.0)
    documents = texts.for_training().documents
    held_out = {int(document.tokens[0]) for document in documents if document.held_out}
    assert len(held_out) == 1
    assert held_out.isdisjoint(int(d.tokens[0]) for d in documents if not d.held_out)


def test_a_training_has_new_texts_and_as_many_tokens_of_older_ones():
    texts = _texts(held_out_permille=0)
    _fill(texts, 100)
    texts.trained(texts.for_training())
    assert texts.new_tokens == 0
    _fill(texts, 20, first=100)
    assert texts.new_tokens == 400
    chosen = texts.for_training()
    numbers = sorted(int(document.tokens[0]) for document in chosen.documents)
    assert [number for number in numbers if number >= 100] == list(range(100, 120))
    assert len(numbers) == 40 and chosen.new_tokens == 400


def test_texts_that_arrive_during_a_training_stay_new():
    texts = _texts()
    _fill(texts, 10)
    chosen = texts.for_training()
    _fill(texts, 3, first=10)
    texts.trained(chosen)
    assert texts.new_tokens == 60


def test_a_forgotten_tenant_leaves_no_text():
    texts = _texts()
    _fill(texts, 5, "a")
    _fill(texts, 4, "b", first=5)
    texts.forget("a")
    assert len(texts) == 4 and texts.tokens == 88 and texts.new_tokens == 80
    assert texts.for_training().tenants == ("b",)


def test_stored_texts_are_read_again(tmp_path: Path):
    clock = ScriptedClock(now=1234.5)
    texts = _texts(clock)
    for number, tenant in enumerate(("a", "", "..", "a")):
        _fill(texts, 1, tenant, first=number)
        clock.pass_by(1)
    folder = tmp_path / "texts"
    store_texts(folder, texts, "model")
    store_texts(folder, texts, "model")  # replaces what was stored
    read = read_texts(folder, "model", _all)
    assert [(text.tenant, text.at) for text in read] == [(t.tenant, t.at) for t in texts]
    assert all((a.document.tokens == b.document.tokens).all() for a, b in zip(read, texts, strict=True))
    assert folder.stat().st_mode & 0o077 == 0
    forget_stored(folder, "a")
    forget_stored(folder, "..")
    assert [text.tenant for text in read_texts(folder, "model", _all)] == [""]


def test_damaged_stored_texts_are_left_out(tmp_path: Path, caplog: object):
    for name, kind in (("good", "5.0"), ("bad", "no time"), ("never", "nan")):
        (tmp_path / name).mkdir()
        document = make_document([1, 2, 3], [(1, 3)], kind, 0.0)
        write_shard(tmp_path / name, [document], "model")
    (tmp_path / "worse").mkdir()
    (tmp_path / "worse/shard-00000.safetensors").write_bytes(b"nothing")
    assert [text.tenant for text in read_texts(tmp_path, "model", _all)] == ["good"]
    assert not read_texts(tmp_path, "another model", _all)


def test_stored_texts_of_tenants_that_no_longer_take_part_are_deleted(tmp_path: Path):
    texts = _texts()
    for tenant in ("a", "b"):
        _fill(texts, 2, tenant)
    store_texts(tmp_path / "texts", texts, "model")
    settings = LearnSettings(str(tmp_path), tenants=("b",), keeps_texts=True)
    restored = restored_texts(settings, "model", ScriptedClock())
    assert {text.tenant for text in restored} == {"b"} and len(restored) == 2
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["b"]


def test_stored_texts_that_are_too_old_leave_the_disk_at_the_next_start(tmp_path: Path):
    clock = ScriptedClock()
    texts = _texts(clock)
    _fill(texts, 2)
    clock.pass_by(3600)
    _fill(texts, 1, first=2)
    store_texts(tmp_path / "texts", texts, "model")
    clock.pass_by(1)
    settings = LearnSettings(str(tmp_path), hours=1, keeps_texts=True)
    assert len(restored_texts(settings, "model", clock)) == 1
    assert len(read_texts(tmp_path / "texts", "model", _all)) == 1


def test_texts_of_an_interrupted_store_are_deleted(tmp_path: Path):
    """The server was killed while it replaced the stored texts."""
    texts = _texts()
    _fill(texts, 2, "a")
    store_texts(tmp_path / "texts", texts, "model")
    (tmp_path / "texts").replace(tmp_path / ".texts")
    forget_stored(tmp_path / "texts", "a")
    assert not list((tmp_path / ".texts").iterdir())
    store_texts(tmp_path / "texts", texts, "model")
    (tmp_path / "texts").replace(tmp_path / ".texts")
    assert not read_texts(tmp_path / "texts", "model", _all)
    assert not (tmp_path / ".texts").exists()


def test_a_text_longer_than_all_that_may_be_kept_drops_no_others():
    texts = _texts(tokens=100)
    _fill(texts, 3)
    assert not texts.add([9], list(range(100)), "", 0.0)
    assert len(texts) == 3
