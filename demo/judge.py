"""The demo's independent judge: a sentiment lexicon that took no part in training."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


def vader(texts: list[str]) -> list[float]:
    """Compute VADER's compound score of each text, from -1 (negative) to 1 (positive) (Hutto and Gilbert 2014)."""
    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in texts]
