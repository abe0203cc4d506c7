"""Made-up records of every form. Their texts are short opinions."""

from typing import Any

from realrl.recipe.forms import FORMS

NOUNS = ("film", "story", "cast", "plot", "music", "ending", "hero", "joke", "scene", "script")
WORDS = {
    "good": ("great", "lovely", "moving", "clever", "warm"),
    "bad": ("dull", "awful", "tired", "weak", "clumsy"),
}


def write_sentence(i: int, mood: str) -> str:
    """Make up the i-th opinion, of one to four clauses. `mood` is good or bad."""
    clauses = [
        f"the {NOUNS[(i * 7 + k) % len(NOUNS)]} is {WORDS[mood][(i + 2 * k) % 5]}" for k in range(1 + i % 4)
    ]
    return " and ".join(clauses)


def list_sentences() -> list[str]:
    """List 80 opinions, good and bad in turn."""
    return [write_sentence(i, mood) for i in range(40) for mood in ("good", "bad")]


def make_up_records(form: str) -> list[dict[str, Any]]:
    """Make up records of a form in `recipe.forms.FORMS`, with all fields that the form's keys can use."""
    return _MAKERS[form]()


def _make_answers() -> list[dict[str, Any]]:
    return [{"prompt": "", "answer": text} for text in list_sentences()]


def _make_pairs() -> list[dict[str, Any]]:
    return [
        {
            "prompt": "",
            "chosen": write_sentence(i, "good"),
            "rejected": write_sentence(3 * i, "bad"),
            "margin": i % 3 / 2,
            "ref_chosen_logps": -20.0 - i % 5,
            "ref_rejected_logps": -22.0 - i % 7,
        }
        for i in range(80)
    ]


def _make_prompts() -> list[dict[str, Any]]:
    return [{"prompt": " ".join(text.split()[: 2 + i % 3])} for i, text in enumerate(list_sentences())]


def _make_labelled() -> list[dict[str, Any]]:
    return [
        {"prompt": " ".join(text.split()[:2]), "completion": text[8:], "label": i % 2 == 0}
        for i, text in enumerate(list_sentences())
    ]


def _make_ranked() -> list[dict[str, Any]]:
    return [
        {
            "prompt": "",
            "answers": [
                write_sentence(i, "good"),
                write_sentence(i + 1, "good"),
                write_sentence(3 * i, "bad"),
            ],
        }
        for i in range(40)
    ]


def _make_steps() -> list[dict[str, Any]]:
    return [
        {
            "prompt": "the film",
            "completions": [
                write_sentence(i + k, "good" if (i + k) % 3 else "bad") for k in range(1 + i % 3)
            ],
            "labels": [(i + k) % 3 > 0 for k in range(1 + i % 3)],
        }
        for i in range(40)
    ]


_MAKERS = {
    "answer": _make_answers,
    "pair": _make_pairs,
    "prompt": _make_prompts,
    "label": _make_labelled,
    "ranked": _make_ranked,
    "steps": _make_steps,
}
assert _MAKERS.keys() == FORMS.keys(), "every form has records"
