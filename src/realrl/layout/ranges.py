"""Which heads, rows and layers belong to a TP rank or a pipeline stage."""

from functools import cache
from itertools import pairwise

from realrl.config.errors import UserError
from realrl.families.shape import ModelShape
from realrl.families.tensors import Units


def query_heads(shape: ModelShape, tp: int, t: int) -> range:
    """Find the query heads of TP rank `t`. They are consecutive, and counts differ by at most one between ranks."""
    if tp > shape.heads:
        raise UserError(f"tp={tp} is more than the {shape.heads} attention heads of the model")
    return _share(shape.heads, tp, t)


def kv_heads(shape: ModelShape, tp: int, t: int) -> range:
    """Find the key/value heads that the query heads of TP rank `t` read; neighbouring ranks may share some."""
    queries = query_heads(shape, tp, t)
    group = shape.heads // shape.kv_heads
    return range(queries.start // group, (queries.stop - 1) // group + 1)


def feed_forward(units: int, tp: int, t: int) -> range:
    """Find which of a block's feed-forward units TP rank `t` holds; counts differ by at most one between ranks."""
    return _share(units, tp, t)


def padded_vocabulary(shape: ModelShape, tp: int) -> int:
    """Count the rows of the embedding table, or of the head, that every TP rank allocates."""
    return -(-shape.vocab_size // tp)


def vocabulary(shape: ModelShape, tp: int, t: int) -> range:
    """Find the token ids whose rows TP rank `t` holds; the last ranks may hold none."""
    rows = padded_vocabulary(shape, tp)
    return range(min(t * rows, shape.vocab_size), min((t + 1) * rows, shape.vocab_size))


def find_elements(shape: ModelShape, units: Units, size: int, tp: int, t: int) -> range:
    """Find the elements that TP rank `t` holds along a dim of `size` elements that is divided in `units`."""
    match units:
        case Units.VOCABULARY:
            return vocabulary(shape, tp, t)
        case Units.QUERY_HEADS:
            return _scaled(query_heads(shape, tp, t), shape.head_dim)
        case Units.HEADS:
            return query_heads(shape, tp, t)
        case Units.KV_HEADS:
            return _scaled(kv_heads(shape, tp, t), shape.head_dim)
        case Units.FEED_FORWARD:
            return feed_forward(size, tp, t)


def _scaled(part: range, width: int) -> range:
    return range(part.start * width, part.stop * width)


@cache
def stage_layers(layers: int, pp: int) -> tuple[range, ...]:
    """Divide layers among pipeline stages. Each stage gets consecutive layers, and their numbers differ by at most
    one between stages. Larger stages are in the middle, because the first stage also holds the embedding and the
    last one the head."""
    if pp > layers:
        raise UserError(f"pp={pp} is more pipeline stages than the model has layers ({layers})")
    size, larger = divmod(layers, pp)
    first = (pp - larger) // 2
    ends = [0]
    for stage in range(pp):
        ends.append(ends[-1] + size + (first <= stage < first + larger))
    return tuple(range(a, b) for a, b in pairwise(ends))


@cache
def virtual_stage_layers(layers: int, pp: int, vpp: int) -> tuple[tuple[range, ...], ...]:
    """Divide layers among the virtual stages of each pipeline stage, [stage][virtual stage].

    A micro-batch passes the first virtual stage of every pipeline stage, then the second ones, and so on. Raises
    UserError for more virtual stages than layers.
    """
    if vpp == 1:
        return tuple((own,) for own in stage_layers(layers, pp))
    if pp * vpp > layers:
        raise UserError(
            f"pp={pp} with vpp={vpp} is more virtual pipeline stages ({pp * vpp}) than the model has layers"
            f" ({layers})"
        )
    runs = stage_layers(layers, pp * vpp)
    return tuple(runs[stage::pp] for stage in range(pp))


def check_experts(shape: ModelShape, ep: int) -> None:
    """Raise UserError if `ep` ranks cannot divide the experts of a model."""
    if ep == 1:
        return
    if shape.mixture is None:
        raise UserError(f"ep={ep}: the model has no experts")
    if shape.mixture.experts % ep:
        raise UserError(f"ep={ep} does not divide the {shape.mixture.experts} experts of the model")
    if shape.quantised is not None:
        raise UserError(f"ep={ep}: experts that are quantised have no expert parallelism; leave ep out")


def _share(total: int, parts: int, index: int) -> range:
    return range(total * index // parts, total * (index + 1) // parts)
