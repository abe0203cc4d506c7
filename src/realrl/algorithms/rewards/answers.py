"""Answers that the verifiers of a reward read out of completions. No torch."""

from realrl.algorithms.rewards.config import Rewards, is_mixture, name_setting
from realrl.algorithms.rewards.graph import name_key
from realrl.algorithms.rewards.verifiers.base import AnswerVerifier
from realrl.config.errors import UserError, join
from realrl.recipe.evaluation import AnswerReader


def find_answer_reader(reward: Rewards | None) -> AnswerReader | None:
    """Find the verifier of a reward that reads an answer out of completions; None where there is none.

    UserError where several terms have one.
    """
    found = {
        name: term.verifier
        for name, term in (reward or {}).items()
        if isinstance(term.verifier, AnswerVerifier) and term.verifier.reads_answers
    }
    if len(found) > 1:
        raise UserError(
            f"evaluation.majority_at: {join([name_setting(name) for name in found])} each read an answer out of"
            " completions; one term may"
        )
    for name, verifier in found.items():
        key = name_key(name) if is_mixture(reward or {}) else "score"
        return AnswerReader(key, verifier.read_answer)
    return None
