"""What a model family of one's own is made of; CONTRIBUTING.md has an example."""

from typing import TYPE_CHECKING

from realrl.config.lazy import reexport

if TYPE_CHECKING:
    from realrl.families.decoder import Names as Names
    from realrl.families.decoder import decoder_tensors as decoder_tensors
    from realrl.families.decoder import named_decoder as named_decoder
    from realrl.families.family import Family as Family
    from realrl.families.options import LayerOptions as LayerOptions
    from realrl.families.settings import ConfigReader as ConfigReader
    from realrl.families.settings import read_sizes as read_sizes
    from realrl.families.settings import write_sizes as write_sizes
    from realrl.families.shape import ModelShape as ModelShape
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
