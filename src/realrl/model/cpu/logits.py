"""Soft bound of logits on a CPU."""

from realrl.model.cpu.arithmetic import soft_bound
from realrl.model.cpu.rows import Work, claim, number, row, row_kernel


@row_kernel(outputs=1)
def bound_rows(work: Work) -> None:
    """Compute bound * tanh(x / bound): x [N, V], bound -> out [N, V], which may be x."""
    bound = number(work, 1)
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            x, out = row(work, 0, i), row(work, 2, i)
            for j in range(len(x)):
                out[j] = soft_bound(x[j], bound)
        first, last = claim(work)
