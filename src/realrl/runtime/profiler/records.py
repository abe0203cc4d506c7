"""Records to measure with."""

import torch

from realrl.data.batch import Batch, Ragged


def records(sequences: int, tokens: int, vocabulary: int, device: torch.device) -> Batch:
    """What the calls of a PPO step find in a batch of so many sequences of so many tokens each, of which the first
    half is the prompt; a single token is both."""
    generator = torch.Generator().manual_seed(0)
    prompt = max(1, tokens // 2)
    drawn = torch.randint(0, vocabulary, (sequences, tokens), generator=generator)

    def rows(values: torch.Tensor) -> Ragged:
        return Ragged(values.flatten(), (values.shape[1],) * sequences)

    zeros = torch.zeros(sequences, tokens)
    once = torch.ones(sequences)
    fields = {
        "prompts": rows(drawn[:, :prompt]),
        "sequences": rows(drawn),
        "prompt_length": Ragged.scalars(torch.full((sequences,), prompt)),
        "finished": Ragged.scalars(once),
        "score": Ragged.scalars(once),
        **{name: rows(zeros) for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns")},
    }
    return Batch(tuple(range(sequences)), fields).to(device)
