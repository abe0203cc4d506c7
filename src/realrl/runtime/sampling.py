"""Text from a saved model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from realrl.checkpoint import huggingface
from realrl.config.algorithms import GenerationConfig
from realrl.config.errors import UserError
from realrl.config.explain import brief
from realrl.config.shape import ModelShape
from realrl.data.batch import Batch, Ragged
from realrl.data.forms import Text
from realrl.data.tokenization import check_tokenizer, tokenize
from realrl.data.tokenizer import load_tokenizer
from realrl.engine.generate import Noise, generate
from realrl.engine.model import whole_model

CACHE_TOKENS = 65536
"""Most tokens in the key/value cache at a time."""
_CHARACTERS = 64
"""More than a token has, in text that means something."""


def _check_limits(
    prompts: Sequence[str], tokenizer: Any, shape: ModelShape, sampling: GenerationConfig
) -> None:
    """UserError for what the model is too small for. Needs no weights."""
    if sampling.top_k > shape.vocab_size:
        raise UserError(
            f"top_k={sampling.top_k} is more than the {shape.vocab_size} tokens of the vocabulary"
        )
    enough = _CHARACTERS * shape.max_positions
    for number, prompt in enumerate(prompts, 1):
        # Of a text of megabytes the beginning is too long already, and takes no seconds to tokenise.
        for text in (prompt[:enough], prompt) if len(prompt) > enough else (prompt,):
            tokens = len(tokenize([Text(text, None)], tokenizer)[0].ids)
            if tokens + sampling.max_new_tokens > shape.max_positions:
                raise UserError(
                    f"prompt {number} ({brief(prompt)}) has {tokens}{'' if text == prompt else ' or more'} tokens;"
                    f" with max_new_tokens={sampling.max_new_tokens} that is more than the {shape.max_positions}"
                    " positions that the model is declared for"
                )


def generate_text(
    model_dir: str, prompts: Sequence[str], sampling: GenerationConfig, seed: int, n: int
) -> Iterator[dict[str, Any]]:
    """Continue each prompt `n` times. Yields {prompt, completion, tokens, finished}, in the order of prompts.

    UserError when the directory holds no model that can be loaded, or the model has fewer positions, or tokens,
    than are asked for.
    """
    shape = huggingface.read_shape(model_dir)
    tokenizer = load_tokenizer(model_dir)
    check_tokenizer(tokenizer)
    _check_limits(prompts, tokenizer, shape, sampling)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A CPU is no faster at bfloat16, and float32 repeats what training computed.
    dtype = huggingface.read_dtype(model_dir) if device.type == "cuda" else torch.float32
    model = whole_model(shape, "lm", dtype=dtype, device=device)
    huggingface.load(model_dir, model.layout.specs, model.parameters)
    texts = [prompt for prompt in prompts for _ in range(n)]
    encoded = tokenize([Text(text, None) for text in texts], tokenizer)
    for text, row in zip(texts, encoded, strict=True):
        if not row.ids:
            raise UserError(
                f"prompt {text!r} has no tokens, and the tokenizer has no beginning-of-sequence token"
            )
    rows = Ragged.of([row.ids for row in encoded], dtype=torch.int64)
    batch = generate(
        model,
        Batch(tuple(range(len(texts))), {"prompts": rows}),
        "prompts",
        sampling=sampling,
        eos=tokenizer.eos_token_id,
        noise=Noise(seed, 0),
        budget=CACHE_TOKENS,
    )
    for i, text in enumerate(texts):
        tokens = batch["sequences"].row(i)[len(rows.row(i)) :].tolist()
        yield {
            "prompt": text,
            "completion": tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": tokens,
            "finished": bool(batch["finished"].row(i)),
        }
