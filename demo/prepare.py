"""Fetch the demo's data and write it as records: python demo/prepare.py [--out data/demo]

The data are 10,605 sentences of movie reviews (Pang and Lee 2004), each rated by about 20 people from -4 to 4
(Hutto and Gilbert 2014); two occur twice and are used once. They come
inside the source distribution of vaderSentiment (MIT licence).
"""

import argparse
import hashlib
import html
import io
import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PACKAGE, VERSION = "vaderSentiment", "3.3.2"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = f"{PACKAGE}-{VERSION}/additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"

SEED = 1
HELD_OUT = 1600
"""Sentences never trained on: enough for 1,000 pairs, and for prompts to train and to evaluate on."""
EVAL_PROMPTS = 320
PAIRS_PER_SENTENCE = 4
EVAL_PAIRS_PER_SENTENCE = 2
MIN_DIFFERENCE = 1.0
"""Ratings closer than this are within the disagreement of 20 people."""
PROMPT_WORDS = (3, 5)
"""Fewest and most words of a prompt: enough to set a subject, seldom enough to give the judgement away."""


class Sentence(NamedTuple):
    """A sentence and the mean of its human ratings, from -4 to 4."""

    rating: float
    text: str

    @property
    def key(self) -> str:
        """Equal for sentences that differ in case, punctuation or spacing only."""
        return " ".join("".join(c if c.isalnum() else " " for c in self.text.casefold()).split())


def main() -> None:
    """Write the records, and one line about them."""
    parser = argparse.ArgumentParser(description="Fetch the demo's data and write it as records.")
    parser.add_argument("--out", type=Path, default=Path("data/demo"), help="folder to write to")
    out: Path = parser.parse_args().out
    records = make_records(parse(ratings_text(fetch(out / "cache"))))
    for name, rows in records.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{out}: " + ", ".join(f"{len(rows)} {name}" for name, rows in records.items()))


def fetch(cache: Path) -> Path:
    """The source distribution, cached or from PyPI; exits with a sentence where its checksum is wrong."""
    file = cache / f"{PACKAGE}-{VERSION}.tar.gz"
    if not (file.is_file() and _checksum(file) == SHA256):
        cache.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        # Not `--no-binary :all:`, with which pip also builds the build tools themselves from source.
        command += ["--no-deps", "--no-binary", PACKAGE, "--dest", str(cache), f"{PACKAGE}=={VERSION}"]
        if subprocess.run(command).returncode or not file.is_file():
            sys.exit(f"pip could not download {PACKAGE} {VERSION}; check the network and pip's package index")
    if _checksum(file) != SHA256:
        file.unlink()
        sys.exit(
            f"{file} did not have the expected checksum and was deleted; run this again to fetch it anew"
        )
    return file


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def ratings_text(sdist: Path) -> str:
    """The file of ratings inside the archive inside the source distribution. Nothing is unpacked to disk."""
    inner = _member(sdist.read_bytes(), INNER)
    return _member(inner, RATINGS).decode("utf-8")


def _member(packed: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        content = archive.extractfile(name)
        assert content is not None, f"{name} is not a file"
        return content.read()


def parse(text: str) -> list[Sentence]:
    """Sentences of tab-separated lines (id, rating, text), cleaned, each once."""
    sentences: dict[str, Sentence] = {}
    for line in text.splitlines():
        _, rating, words = line.split("\t")
        sentence = Sentence(float(rating), _clean(words))
        if sentence.key:
            sentences.setdefault(sentence.key, sentence)
    return list(sentences.values())


def _clean(text: str) -> str:
    """Undo what the collection did to quotation marks and ampersands; single spaces between words."""
    return " ".join(html.unescape(text).replace("''", '"').split())


def make_records(sentences: Iterable[Sentence], held_out: int = HELD_OUT) -> dict[str, list[dict[str, str]]]:
    """The records of each file. Training files are made of other sentences than the held-out ones, of which
    the evaluation files and all prompts are made; prompts to train and to evaluate on differ too."""
    rng = random.Random(SEED)
    shuffled = sorted(sentences, key=lambda s: s.key)
    rng.shuffle(shuffled)
    held, train = shuffled[:held_out], shuffled[held_out:]
    prompts = _prompts(held, {s.text for s in train}, rng)
    return {
        "sft_train": [{"prompt": "", "answer": s.text} for s in train],
        "sft_eval": [{"prompt": "", "answer": s.text} for s in held],
        "reward_train": _pairs(train, PAIRS_PER_SENTENCE, rng),
        "reward_eval": _pairs(held, EVAL_PAIRS_PER_SENTENCE, rng),
        "prompts_train": [{"prompt": p} for p in prompts[EVAL_PROMPTS:]],
        "prompts_eval": [{"prompt": p} for p in prompts[:EVAL_PROMPTS]],
    }


def _pairs(sentences: list[Sentence], per_sentence: int, rng: random.Random) -> list[dict[str, str]]:
    """Pairs of sentences rated clearly apart; a sentence takes part in at most `per_sentence` of them."""
    pairs = []
    for _ in range(per_sentence):
        waiting = list(sentences)
        for _ in range(5):  # each pass finds partners for most of those who have none yet
            rng.shuffle(waiting)
            left = waiting[len(waiting) // 2 * 2 :]
            for a, b in zip(waiting[::2], waiting[1::2], strict=False):
                if abs(a.rating - b.rating) > MIN_DIFFERENCE:
                    pairs.append((a, b) if a.rating > b.rating else (b, a))
                else:
                    left += [a, b]
            waiting = left
    rng.shuffle(pairs)
    return [{"prompt": "", "chosen": a.text, "rejected": b.text} for a, b in pairs]


def _prompts(sentences: list[Sentence], known: set[str], rng: random.Random) -> list[str]:
    """The first words of each sentence that has more of them, no prompt twice and none a `known` text."""
    prompts: dict[str, None] = {}
    for sentence in sentences:
        words = sentence.text.split()
        count = rng.randint(*PROMPT_WORDS)
        prompt = " ".join(words[:count])
        if len(words) > count and prompt not in known:
            prompts[prompt] = None
    return list(prompts)


if __name__ == "__main__":
    main()
