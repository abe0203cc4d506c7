"""`config.json` of transformers 5 and of before become our shape; what we cannot do is refused."""

import pytest
from transformers import AutoConfig

from realrl.config.errors import UserError
from realrl.families.config_json import shape_from_hf, shape_to_hf
from realrl.families.shape import ModelShape
from tests.model.small_models import SHAPES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> ModelShape:
    return SHAPES[request.param]


def test_a_shape_comes_back_from_what_we_write(shape: ModelShape) -> None:
    assert shape_from_hf(shape_to_hf(shape, "lm", "float32", {})) == shape


def test_transformers_understands_what_we_write(shape: ModelShape) -> None:
    settings = shape_to_hf(shape, "scalar", "bfloat16", {"eos_token_id": 7, "pad_token_id": 3})
    written = AutoConfig.for_model(settings.pop("model_type"), **settings)
    assert shape_from_hf(written.to_dict()) == shape
    assert (written.num_labels, written.eos_token_id, written.pad_token_id) == (1, 7, 3)
    assert str(written.dtype) == "torch.bfloat16"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 5000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5000.0}},
    ],
    ids=["before", "both-types", "transformers-5"],
)
def test_rotary_settings_are_read_in_every_style(rope: dict) -> None:
    config = shape_to_hf(SHAPES["plain"], "lm", "float32", {})
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        del config[key]
    shape = shape_from_hf(config | rope)
    assert shape.rope_theta == 5000.0 and shape.rope_scaling == SHAPES["llama3"].rope_scaling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "bert"},
            "model_type 'bert' is not supported; supported are: gemma, gemma2, gemma3_text, glm4,",
        ),
        ({"attention_bias": 1}, "attention_bias=1 is not true or false"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; it must be silu, swish, gelu,"),
        ({"is_decoder": True}, "is_decoder=true is not supported; it must be false"),
        ({"use_mrope": True}, "use_mrope=true is not supported; it must be false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported; give a model whose"),
        ({"mystery": 0.5}, "mystery=0.5 is an unknown setting that may change the model"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"vocab_size": "many"}, "vocab_size='many' is not a whole number above 0"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not a whole number above 0"),
        ({"num_attention_heads": "32", "head_dim": None}, "num_attention_heads='32' is not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=true is not a whole number"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is not a section of keys"),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            "rope_parameters: rope_type='spiral' is not supported; it must be default, linear, dynamic,",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type=['yarn'] is not supported"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_scaling: type='spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing from the yarn rotary"),
        (
            {"rope_parameters": {"mrope_section": [1]}},
            "rope_parameters: mrope_section=[1] is an unknown setting",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be above 0 and at most 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; it must be 1"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor is missing from the llama3"),
    ],
)
def test_unsupported_config_settings_are_refused_in_one_error_message(change: dict, message: str) -> None:
    check_refused(shape_to_hf(SHAPES["plain"], "lm", "float32", {}) | change, message)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention, but sliding_window is missing",
        ),
        (
            {"layer_types": ["full_attention"]},
            "must be a list of 2 words, each sliding_attention or full_attention",
        ),
        ({"layer_types": ["full_attention", "chunked"]}, "must be a list of 2 words"),
    ],
)
def test_contradictions_about_windows_are_refused(family: str, change: dict, message: str) -> None:
    check_refused(shape_to_hf(SHAPES[family], "lm", "float32", {}) | change, message)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("where", ["after the last layer", "by the type of layers"])
def test_a_sliding_window_that_no_layer_has_is_accepted(family: str, where: str) -> None:
    shape = SHAPES[family]
    change: dict = {"max_window_layers": shape.layers, "sliding_window": 16, "layer_types": None}
    if where == "by the type of layers":
        change = {"max_window_layers": 0, "layer_types": ["full_attention"] * shape.layers}
    config = shape_to_hf(shape, "lm", "float32", {}) | {"use_sliding_window": True} | change
    theirs = AutoConfig.for_model(**config)
    assert set(theirs.layer_types) == {"full_attention"}
    assert shape_from_hf(config) == shape_from_hf(theirs.to_dict()) == shape


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_are_those_of_the_layers_that_have_one(family: str) -> None:
    change = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16, "layer_types": None}
    config = shape_to_hf(SHAPES[family], "lm", "float32", {}) | change
    shape = shape_from_hf(config)
    assert (shape.window, shape.windowed_layers) == (16, (1,))
    assert shape_from_hf(AutoConfig.for_model(**config).to_dict()) == shape


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_settings_that_a_file_leaves_out_are_those_of_its_class(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = {"model_type": family, **sizes, "num_attention_heads": 32}
    theirs = AutoConfig.for_model(family, **sizes, num_attention_heads=32)
    assert shape_from_hf(config) == shape_from_hf(theirs.to_dict())


def check_refused(config: dict, message: str) -> None:
    text = refusal(config)
    assert message in text and "\n" not in text


def refusal(config: dict) -> str:
    with pytest.raises(UserError, match=r"^dir/config\.json: ") as caught:
        shape_from_hf(config, where="dir/config.json")
    return str(caught.value)


def test_a_model_of_another_family_is_refused_with_the_nearest_one_and_what_it_lacks() -> None:
    config = AutoConfig.for_model("granitemoe").to_dict()
    check_refused(config, "model_type 'granitemoe' is not supported; supported are: gemma, ")
    check_refused(
        config, "the nearest is granite, which has no num_local_experts=8; to use a family of your own"
    )
    check_refused({"model_type": "bert"}, "starcoder2; to use a family of your own")
    assert "the nearest" not in refusal({"model_type": "bert", "hidden_size": 64})
