"""Memory that gradients of matrices take on a CPU before they are added to those of other passes."""

from realrl.layout.limits import ADDED_ELEMENTS


def added_bytes(elements: int, element_bytes: int) -> int:
    """Compute the bytes of a matrix's gradient apart from the float32 gradients that it is added to.

    float32 products add to them. Those of narrow numbers are computed part by part, and widened before.
    """
    return min(elements, ADDED_ELEMENTS) * (element_bytes + 4) if element_bytes < 4 else 0
