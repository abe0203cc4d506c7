"""Verifier of sums."""


def exact(completions: list[str], answer: list[str]) -> list[float]:
    """1 for each completion that is the answer and nothing else, else 0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
