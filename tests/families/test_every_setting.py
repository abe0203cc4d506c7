"""Every setting of a family's `config.json`, changed: we refuse it, or compute what transformers computes."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from realrl.config.errors import UserError
from realrl.families.config_json import shape_from_hf
from realrl.model.packing import Packing
from tests.conftest import thin
from tests.model.small_models import SHAPES, make_theirs, make_twin, pack, random_rows

CASES = {shape.family: shape for name, shape in SHAPES.items() if shape.layers > 1 and name != "biased-yarn"}
LENGTHS = [7, 30, 12]
LEFT_OUT = ("dtype", "torch_dtype", "return_dict")
"""The type of weights, which recipes decide, and what transformers returns."""
WORDS = ("gelu", "relu", "sliding_attention", "linear", "other")


def change(value: Any) -> Iterator[Any]:
    """Other values of a setting."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, 2 * value, 1)
        case float():
            yield from (1.5 * value + 0.01, value / 2)
        case str():
            yield from (word for word in WORDS if word != value)
        case list():
            yield value[:-1]
            for other in change(value[0]) if value else ():
                yield [other, *value[1:]]
        case dict():
            for key, inner in value.items():
                for other in change(inner):
                    yield {**value, key: other}
            yield {**value, "partial_rotary_factor": 0.5}
            yield {**value, "mystery": 1}
        case None:
            yield from (True, 5, 0.5, "linear", {"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize("family", thin(CASES, 3))
def test_a_changed_setting_is_honoured_or_refused_or_changes_nothing(family: str) -> None:
    logging.disable(logging.WARNING)
    config = make_theirs(CASES[family], "lm").config.to_dict()
    checked = refused = 0
    try:
        for key in [*config, "mystery", "quantization_config", "rope_scaling", "sliding_window"]:
            for value in change(config.get(key)) if key not in LEFT_OUT else ():
                outcome = compare({**copy.deepcopy(config), key: value}, f"{key}={value}")
                checked, refused = checked + (outcome == "equal"), refused + (outcome == "refused")
    finally:
        logging.disable(logging.NOTSET)
    # Sizes, special tokens and what is for display are honoured; activations, switches and the unknown are refused.
    assert checked > 25 and refused > 10, (checked, refused)


def compare(config: dict[str, Any], what: str) -> str:
    """Compare the logits of both sides, with the same weights; `refused` where we, or else they, do not take it."""
    try:
        shape = shape_from_hf(config)
    except UserError:
        return "refused"
    if shape.vocab_size < 2 or shape.hidden_size < 2:
        return "too small"
    try:
        torch.manual_seed(0)
        settings = {name: value for name, value in config.items() if name != "model_type"}
        found = AutoConfig.for_model(config["model_type"], **settings)
        found._experts_implementation = "eager"  # torch's kernel for others wants widths of 16 bytes
        theirs = AutoModelForCausalLM.from_config(found).eval()
    except Exception:  # whatever transformers raises for what it does not take
        return "refused by transformers"
    ours, _, theirs = make_twin(shape, "lm", theirs)
    rows = random_rows(min(shape.vocab_size, 80), [min(length, shape.max_positions) for length in LENGTHS])
    tokens, lengths = pack(rows)
    with torch.no_grad():
        logits = ours.compute_logits(ours(tokens, Packing.of(lengths, "cpu")))
        expected = torch.cat([theirs(row[None], use_cache=False, return_dict=True).logits[0] for row in rows])
    # Blocks of a single number, whose outputs are normalised, magnify its rounding.
    atol = 5e-4 if shape.intermediate_size == 1 else 1e-4
    torch.testing.assert_close(logits, expected, atol=atol, rtol=1e-5, msg=lambda m: f"{what}: {m}")
    return "equal"
