"""Text from a saved model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from realrl.checkpoint import huggingface
from realrl.checkpoint.origin import read_origin
from realrl.checkpoint.special_tokens import end_ids
from realrl.config.algorithms import GenerationConfig
from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.data.forms import Text
from realrl.data.tokenization import check_tokenizer, tokenize
from realrl.data.tokenizer import load_tokenizer
from realrl.engine.finite import NotFiniteError
from realrl.engine.generate import Noise, generate
from realrl.engine.model import whole_model

CACHE_TOKENS = 65536
"""Most tokens in the key/value cache at a time."""


def generate_text(
    model_dir: str, prompts: Sequence[str], sampling: GenerationConfig, seed: int, n: int
) -> Iterator[dict[str, Any]]:
    """Continue each prompt `n` times. Yields {prompt, completion, tokens, finished}, in the order of prompts.

    UserError when the directory holds no model that can be loaded.
    """
    tokenizer = load_tokenizer(model_dir)
    check_tokenizer(tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = huggingface.read_shape(model_dir)
    ends = end_ids(tokenizer, read_origin(model_dir), shape.vocab_size)
    texts = [prompt for prompt in prompts for _ in range(n)]
    encoded = tokenize([Text(text, None) for text in texts], tokenizer)
    for text, row in zip(texts, encoded, strict=True):
        if not row.ids:
            raise UserError(
                f"prompt {text!r} has no tokens, and the tokenizer has no beginning-of-sequence token"
            )
    # A CPU is no faster at bfloat16, and float32 repeats what training computed.
    dtype = huggingface.read_dtype(model_dir) if device.type == "cuda" else torch.float32
    model = whole_model(shape, "lm", dtype=dtype, device=device)
    huggingface.load(model_dir, model.layout.specs, model.parameters)
    rows = Ragged.of([row.ids for row in encoded], dtype=torch.int64)
    try:
        batch = generate(
            model,
            Batch(tuple(range(len(texts))), {"prompts": rows}),
            "prompts",
            sampling=sampling,
            ends=ends,
            noise=Noise(seed, 0),
            budget=CACHE_TOKENS,
        )
    except NotFiniteError as error:
        raise UserError(f"{model_dir} cannot generate: {error}") from None
    for i, text in enumerate(texts):
        tokens = batch["sequences"].row(i)[len(rows.row(i)) :].tolist()
        yield {
            "prompt": text,
            "completion": tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": tokens,
            "finished": bool(batch["finished"].row(i)),
        }
