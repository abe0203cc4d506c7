"""Mistral and Mistral Nemo, Ministral and Mixtral."""

from realrl.families.built_in.parts import activation, describe, fixed, mixture, one_window, sizes, windows
from realrl.families.decoder_tensors import Names, named_decoder
from realrl.families.settings import ROUTER_LOSS

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}

MISTRAL = describe("mistral", "Mistral", sizes(_DEFAULTS), one_window(4096), activation())

# A file of Ministral states for each layer whether it has the window.
MINISTRAL = describe(
    "ministral", "Ministral", sizes(_DEFAULTS), windows(lambda layer: True, 4096), activation()
)

MIXTRAL = describe(
    "mixtral",
    "Mixtral",
    # Noise on the router's inputs in training would send tokens to other experts than in sampling.
    fixed({"router_jitter_noise": 0.0}),
    sizes({**_DEFAULTS, "rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    one_window(None),
    mixture(experts=8, per_token=2, normalised=True),
    activation(),
    tensors=named_decoder(
        Names(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts",
            expert_gate="w1",
            expert_up="w3",
            expert_down="w2",
        )
    ),
    mixture=True,
    untouched=ROUTER_LOSS,
)
