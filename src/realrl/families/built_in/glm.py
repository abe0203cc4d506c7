"""GLM-4 of 2025, and GLM-4.5 with its successors, whose first layers are dense and whose others have experts."""

from realrl.families.built_in.parts import Part, Settings, activation, describe, fixed, flag, sizes
from realrl.families.decoder_tensors import Names, named_decoder
from realrl.families.settings import (
    ConfigReader,
    read_dense_layers,
    read_mixture,
    write_mixture,
    write_partial_rotary,
)
from realrl.families.shape import MOST_EXPERTS, LayerOptions, Mixture, ModelShape

_PARTIAL_ROTARY = Part(lambda config, fields, usual: {}, lambda shape, options: write_partial_rotary(shape))

# Norms around blocks; rotary embeddings turn half of each head, in pairs of neighbouring dims.

GLM4 = describe(
    "glm4",
    "Glm4",
    sizes(
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5,
        }
    ),
    _PARTIAL_ROTARY,
    flag("attention_bias", "qkv_bias"),
    activation(),
    layer=LayerOptions(norm_place="around", qkv_bias=True),
    tensors=named_decoder(
        Names(
            interleaved=True,
            attention_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
            gate_up="mlp.gate_up_proj",
        )
    ),
)


# GLM-4.5: a router with sigmoid scores, as in DeepSeek-V3.

_EXPERTS = "n_routed_experts", "num_local_experts"
"""Names of the number of experts in files."""


def _read_experts(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    layers = fields["layers"]
    first = config.size("first_k_dense_replace", 1, least=0)
    counts = read_mixture(
        config,
        experts=128,
        per_token=8,
        normalised=config.flag("norm_topk_prob", True),
        names=_EXPERTS,
    )
    groups = config.size("n_group", 1, most=MOST_EXPERTS)
    chosen = config.size("topk_group", 1, most=MOST_EXPERTS)
    size, rest = divmod(counts.experts, groups)
    if rest or (groups > 1 and size < 2):
        raise config.fail(
            f"n_group={groups} must divide the {counts.experts} experts into groups of 2 or more"
        )
    if chosen > groups or counts.per_token > chosen * size:
        raise config.fail(
            f"topk_group={chosen} of n_group={groups} must be groups with num_experts_per_tok={counts.per_token}"
            " experts or more"
        )
    # Files may hold a further layer, which predicts tokens further ahead (`Family.further_layers`).
    config.skip("num_nextn_predict_layers", "num_mtp_layers")
    return {
        **read_dense_layers(config, layers, range(first), fields["intermediate_size"]),
        "intermediate_size": config.size("moe_intermediate_size", 1408),
        "mixture": Mixture(
            experts=counts.experts,
            per_token=counts.per_token,
            scores="sigmoid",
            correction=True,
            groups=groups,
            groups_per_token=chosen,
            normalised=counts.normalised,
            scale=config.positive("routed_scaling_factor", 1.0),
            shared=config.size("n_shared_experts", 1, most=MOST_EXPERTS),
        ),
        "layer": {"qk_norm": "heads" if config.flag("use_qk_norm", False) else "none"},
    }


def _write_experts(shape: ModelShape, options: LayerOptions) -> Settings:
    mixture = shape.mixture
    assert mixture is not None, "`check_writing` refuses such shapes"
    return {
        **write_mixture(shape, _EXPERTS),
        "intermediate_size": shape.dense_size or shape.intermediate_size,
        "moe_intermediate_size": shape.intermediate_size,
        "first_k_dense_replace": len(shape.dense_layers),
        "n_group": mixture.groups,
        "topk_group": mixture.groups_per_token,
        "norm_topk_prob": mixture.normalised,
        "routed_scaling_factor": mixture.scale,
        "n_shared_experts": mixture.shared,
        "use_qk_norm": options.qk_norm == "heads",
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE = describe(
    "glm4_moe",
    "Glm4Moe",
    sizes(
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        }
    ),
    _PARTIAL_ROTARY,
    # Some files of this family name how experts are scored and chosen.
    fixed({"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    Part(_read_experts, _write_experts),
    flag("attention_bias", "qkv_bias"),
    activation(),
    mixture=True,
    further_layers=True,
    untouched=("output_router_logits",),
)
