"""Parts of a reward or judge of one's own: the built-in verifiers, and how they read answers.

A reward is a plain function of a file, which needs nothing from here. It may use a verifier:

    from realrl.rewards import Numeric

    CHECK = Numeric(kind="numeric", extract="boxed").open()

    def correct(completions, answer, **_):
        return CHECK.verify(completions, {"answer": answer})
"""

from typing import TYPE_CHECKING

from realrl.config.lazy import reexport

if TYPE_CHECKING:
    from realrl.algorithms.base.scoring import RewardFailure as RewardFailure
    from realrl.algorithms.base.scoring import Score as Score
    from realrl.algorithms.rewards.verifiers.math import MathEquality as MathEquality
    from realrl.algorithms.rewards.verifiers.numeric import Numeric as Numeric
    from realrl.algorithms.rewards.verifiers.numeric import find_number as find_number
    from realrl.algorithms.rewards.verifiers.python_tests import PythonTests as PythonTests
    from realrl.algorithms.rewards.verifiers.verifier import AnswerVerifier as AnswerVerifier
    from realrl.algorithms.rewards.verifiers.verifier import ExactMatch as ExactMatch
    from realrl.algorithms.rewards.verifiers.verifier import JsonSchema as JsonSchema
    from realrl.algorithms.rewards.verifiers.verifier import Regex as Regex
    from realrl.algorithms.rewards.verifiers.verifier import Verification as Verification
    from realrl.algorithms.rewards.verifiers.verifier import Verifier as Verifier
    from realrl.algorithms.rewards.verifiers.verifier import extract as extract

__getattr__, __dir__ = reexport(__name__)
