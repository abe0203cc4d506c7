"""Check your own algorithms and model families, with tiny models and made-up records."""

from realrl.families.config_json import check_writing
from realrl.families.family import check_family
from realrl.testing.check import check_algorithm
from realrl.testing.compare import CheckFailure
from realrl.testing.records import make_up_records
from realrl.testing.shrink import SHAPE, save_model

__all__ = [
    "SHAPE",
    "CheckFailure",
    "check_algorithm",
    "check_family",
    "check_writing",
    "make_up_records",
    "save_model",
]
