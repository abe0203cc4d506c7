"""Names for a file that describes a model family. CONTRIBUTING.md shows such a file."""

from typing import TYPE_CHECKING

from realrl.config.lazy import reexport

if TYPE_CHECKING:
    from realrl.families.decoder_tensors import LLAMA_NAMES as LLAMA_NAMES
    from realrl.families.decoder_tensors import Names as Names
    from realrl.families.decoder_tensors import decoder_tensors as decoder_tensors
    from realrl.families.decoder_tensors import named_decoder as named_decoder
    from realrl.families.family import Family as Family
    from realrl.families.settings import ConfigReader as ConfigReader
    from realrl.families.settings import read_activation as read_activation
    from realrl.families.settings import read_dense_layers as read_dense_layers
    from realrl.families.settings import read_layer as read_layer
    from realrl.families.settings import read_mixture as read_mixture
    from realrl.families.settings import read_rope as read_rope
    from realrl.families.settings import read_rope_by_layer_type as read_rope_by_layer_type
    from realrl.families.settings import read_sizes as read_sizes
    from realrl.families.settings import read_unrotated as read_unrotated
    from realrl.families.settings import read_windows as read_windows
    from realrl.families.settings import write_activation as write_activation
    from realrl.families.settings import write_layer as write_layer
    from realrl.families.settings import write_mixture as write_mixture
    from realrl.families.settings import write_partial_rotary as write_partial_rotary
    from realrl.families.settings import write_rope as write_rope
    from realrl.families.settings import write_rope_by_layer_type as write_rope_by_layer_type
    from realrl.families.settings import write_sizes as write_sizes
    from realrl.families.settings import write_unrotated as write_unrotated
    from realrl.families.settings import write_windows as write_windows
    from realrl.families.shape import Head as Head
    from realrl.families.shape import LayerOptions as LayerOptions
    from realrl.families.shape import Mixture as Mixture
    from realrl.families.shape import ModelShape as ModelShape
    from realrl.families.shape import RopeScaling as RopeScaling
    from realrl.families.tensors import Init as Init
    from realrl.families.tensors import Parameter as Parameter
    from realrl.families.tensors import Partial as Partial
    from realrl.families.tensors import Partition as Partition
    from realrl.families.tensors import Place as Place
    from realrl.families.tensors import Stored as Stored
    from realrl.families.tensors import StoredRows as StoredRows
    from realrl.families.tensors import TensorSpec as TensorSpec
    from realrl.families.tensors import Units as Units

__getattr__, __dir__ = reexport(__name__)
