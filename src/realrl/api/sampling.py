"""Settings of sampling, and their other names in vLLM."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from realrl.api.errors import plain_errors
from realrl.config.errors import UserError
from realrl.config.explain import explain
from realrl.recipe.generation import GenerationConfig

_VLLM = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


class Sampling:
    """How answers are sampled, for `Session.sample` and `LLM.generate`.

    n: answers per prompt. The other arguments are the settings `generation` of recipes: max_new_tokens (128), stop,
    temperature, top_k, top_p, greedy, min_new_tokens, stop_token_ids and ignore_eos. vLLM's names work, too:
    max_tokens, min_tokens, temperature=0 for greedy, and top_k=-1 for all. Raises UserError for a mistake.
    """

    @plain_errors
    def __init__(self, n: int = 1, **settings: Any) -> None:
        if not isinstance(n, int) or n < 1:
            raise UserError(f"n={n!r} is not a whole number above 0")
        self.n = n
        self.config = read_sampling(settings)

    def __repr__(self) -> str:
        given = self.config.model_dump(exclude_defaults=True)
        return (
            f"Sampling({', '.join([f'n={self.n}', *(f'{name}={value!r}' for name, value in given.items())])})"
        )


def read_sampling(settings: Mapping[str, Any]) -> GenerationConfig:
    """Read sampling settings by our names or vLLM's. Raises UserError for a mistake."""
    if "seed" in settings:
        raise UserError(
            "seed belongs to the model: realrl.LLM(model, seed=1) or realrl.Session(models, seed=1)"
        )
    if "logprobs" in settings:
        raise UserError("logprobs need not be requested: every answer has those of its tokens")
    found: dict[str, Any] = {}
    for name, value in settings.items():
        ours = _VLLM.get(name, name)
        if ours in found:
            raise UserError(f"{name} and {ours} are the same setting; give one of them")
        found[ours] = value
    if found.get("temperature") == 0:
        del found["temperature"]
        found["greedy"] = True
    if found.get("top_k") == -1:
        found["top_k"] = 0
    for name in ("stop_token_ids", "stop"):
        if name in found and found[name] is None:
            del found[name]
    try:
        return GenerationConfig(**found)
    except ValidationError as error:
        raise UserError(explain(error, GenerationConfig)) from None
