"""Fetch the demo's data and write it as records: python demo/prepare.py [--out data/demo]

The data are 10,605 sentences of movie reviews (Pang and Lee 2004). About 20 people rated each sentence from -4 to 4
(Hutto and Gilbert 2014). Two sentences occur twice and are used once. The source distribution of vaderSentiment
(MIT licence) contains the data.
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
"""Number of sentences without use in SFT and reward training. They are enough for 1,000 pairs and all prompts."""
EVAL_PROMPTS = 320
PAIRS_PER_SENTENCE = 4
EVAL_PAIRS_PER_SENTENCE = 2
MIN_DIFFERENCE = 1.0
"""Minimum difference of the ratings in a pair. 20 people disagree about smaller differences."""
PROMPT_WORDS = (3, 5)
"""Minimum and maximum words of a prompt. They are enough to set a subject, and seldom reveal the judgement."""


class Sentence(NamedTuple):
    """A sentence and the mean of its human ratings, from -4 to 4."""

    rating: float
    text: str

    @property
    def key(self) -> str:
        """Normalised text, equal for sentences that differ only in case, punctuation or spacing."""
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
    """Return the source distribution from the cache or from PyPI. Exits with a message if its checksum is wrong."""
    file = cache / f"{PACKAGE}-{VERSION}.tar.gz"
    if not (file.is_file() and _checksum(file) == SHA256):
        cache.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        # With `--no-binary :all:`, pip would also build the build tools from source.
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
    """Read the file of ratings from an archive in the source distribution. Nothing is unpacked to disk."""
    inner = _member(sdist.read_bytes(), INNER)
    return _member(inner, RATINGS).decode("utf-8")


def _member(packed: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        content = archive.extractfile(name)
        assert content is not None, f"{name} is not a file"
        return content.read()


def parse(text: str) -> list[Sentence]:
    """Parse tab-separated lines (id, rating, text) into clean sentences without duplicates."""
    sentences: dict[str, Sentence] = {}
    for line in text.splitlines():
        _, rating, words = line.split("\t")
        sentence = Sentence(float(rating), _clean(words))
        if sentence.key:
            sentences.setdefault(sentence.key, sentence)
    return list(sentences.values())


def _clean(text: str) -> str:
    """Restore quotation marks and ampersands that the collection has changed, and put one space between words."""
    return " ".join(html.unescape(text).replace("''", '"').split())


def make_records(sentences: Iterable[Sentence], held_out: int = HELD_OUT) -> dict[str, list[dict[str, str]]]:
    """Make the records of each file.

    SFT and the reward model train on sentences that are not held out. Their evaluation files and all prompts are
    made of held-out sentences. Prompts for training differ from prompts for evaluation.
    """
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
    """Pair sentences whose ratings differ clearly. A sentence is in at most `per_sentence` pairs."""
    pairs = []
    for _ in range(per_sentence):
        waiting = list(sentences)
        for _ in range(5):  # each pass finds partners for most sentences that still have none
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
    """Take the first words of each longer sentence. No prompt occurs twice or equals a `known` text."""
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
