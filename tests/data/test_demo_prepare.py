"""The demo never evaluates on what it trained on. Nothing is downloaded here."""

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[2] / "demo"


@pytest.fixture
def prepare(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO))
    import prepare

    return prepare


@pytest.fixture
def records(prepare, monkeypatch) -> dict[str, list[dict[str, str]]]:
    monkeypatch.setattr(prepare, "EVAL_PROMPTS", 20)
    lines = [f"{i}\t{i % 9 - 4}\tNumber {i} has several more words\r" for i in range(400)]
    repeats = [f"{i}\t1.5\tnumber {i}  has several -- more words.\r" for i in range(0, 400, 3)]
    return prepare.make_records(prepare.parse("\n".join([*lines, *repeats])), held_out=100)


def test_held_out_sentences_are_not_trained_on_even_when_repeated(records):
    def numbers(file: str) -> set[str]:
        texts = (record.get(key) for record in records[file] for key in ("answer", "chosen", "rejected"))
        return {text.split()[1] for text in texts if text}

    train = numbers("sft_train") | numbers("reward_train")
    held_out = numbers("sft_eval") | numbers("reward_eval")
    prompts = {r["prompt"].split()[1] for f in ("prompts_train", "prompts_eval") for r in records[f]}
    assert (len(train), len(held_out)) == (300, 100)
    assert not train & (held_out | prompts)


def test_prompts_to_evaluate_on_are_not_trained_on(records):
    train, evaluation = ({r["prompt"] for r in records[f]} for f in ("prompts_train", "prompts_eval"))
    assert len(evaluation) == 20
    assert not train & evaluation


def test_prompts_are_the_first_words_of_held_out_sentences(records):
    sentences = [record["answer"] for record in records["sft_eval"]]
    for record in records["prompts_train"] + records["prompts_eval"]:
        assert 3 <= len(record["prompt"].split()) <= 5
        assert any(sentence.startswith(record["prompt"] + " ") for sentence in sentences)


@pytest.mark.parametrize(("file", "each"), [("reward_train", 4), ("reward_eval", 2)])
def test_the_preferred_sentence_is_rated_clearly_higher(records, file, each):
    def rating(text: str) -> int:
        return int(text.split()[1]) % 9 - 4

    pairs = records[file]
    assert all(rating(pair["chosen"]) - rating(pair["rejected"]) > 1 for pair in pairs)
    sentences = 300 if file == "reward_train" else 100
    assert 0.9 * each * sentences / 2 < len(pairs) <= each * sentences / 2


def test_demo_records_are_reproducible(prepare):
    sentences = [prepare.Sentence(i % 7 - 3.0, f"Number {i} has several more words") for i in range(50)]
    made = [prepare.make_records(order, held_out=10) for order in (sentences, sentences[::-1])]
    assert made[0] == made[1]


def test_demo_text_is_cleaned(prepare):
    (sentence,) = prepare.parse("1\t0.5\t ''Salt''  &amp;   pepper \r\n")
    assert sentence == (0.5, '"Salt" & pepper')


def archive(name: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def test_ratings_are_read_from_the_archive_within_the_archive(prepare, tmp_path):
    sdist = tmp_path / "sdist.tar.gz"
    sdist.write_bytes(archive(prepare.INNER, archive(prepare.RATINGS, "1\t2.0\tCafé\r\n".encode())))
    assert prepare.ratings_text(sdist) == "1\t2.0\tCafé\r\n"


def test_a_cached_file_is_not_fetched_again(prepare, tmp_path, monkeypatch):
    (tmp_path / "vaderSentiment-3.3.2.tar.gz").write_bytes(b"right")
    monkeypatch.setattr(prepare, "SHA256", hashlib.sha256(b"right").hexdigest())
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("fetched"))
    assert prepare.fetch(tmp_path).read_bytes() == b"right"


def test_a_file_with_another_checksum_is_deleted(prepare, tmp_path, monkeypatch):
    def download(command: list[str]) -> subprocess.CompletedProcess[bytes]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        (tmp_path / "vaderSentiment-3.3.2.tar.gz").write_bytes(b"tampered with")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SystemExit, match="expected checksum"):
        prepare.fetch(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_download_is_one_error_message(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="pip could not download vaderSentiment"):
        prepare.fetch(tmp_path)
