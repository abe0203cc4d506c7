"""Nobody but the families knows tensors by name, or concludes anything from how many dims one has."""

import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "realrl"
NAMES = r"_proj\b|embed_tokens|layernorm|self_attn|inv_freq|model\.(norm|layers)\b|(lm_head|score)\.weight"
RANKS = r"len\([\w.\[\]]*shape\)\s*[=!<>]"
FORBIDDEN = re.compile(rf"{NAMES}|{RANKS}")


def test_no_decision_by_tensor_name_or_number_of_dims_outside_the_families() -> None:
    found = [
        f"{file.relative_to(SOURCES)}:{number}: {line.strip()}"
        for file in sorted(SOURCES.rglob("*.py"))
        if "families" not in file.parts
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not found, "\n".join(found)
