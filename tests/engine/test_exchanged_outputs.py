"""Messages between ranks of a group: what arrives is what was sent."""

import torch

from realrl.data.batch import KEY_DTYPES, Ragged
from realrl.engine.messages import _decode, _encode, gather_outputs
from realrl.model.group import make_single_rank_group


def test_outputs_of_every_type_survive_a_message() -> None:
    fields = {name: Ragged((torch.randn(5) * 100).to(dtype), (2, 0, 3)) for name, dtype in KEY_DTYPES.items()}
    fields["wide"] = Ragged(torch.randn(3, 7), (1, 2))
    fields["none"] = Ragged(torch.empty(0), ())
    found = [([4, 0, 2], fields), ([], {}), ([1], {"wide": Ragged(torch.randn(2, 4), (2,))})]
    there = _decode(_encode(found))
    assert [items for items, _ in there] == [items for items, _ in found]
    for (_, sent), (_, received) in zip(found, there, strict=True):
        assert list(sent) == list(received)
        for key, field in sent.items():
            assert received[key].lengths == field.lengths
            assert received[key].values.dtype == field.values.dtype
            assert torch.equal(received[key].values, field.values)
    assert _decode(_encode([])) == []


def test_a_single_rank_sends_nothing() -> None:
    found = [([0], {"score": Ragged(torch.ones(1), (1,))})]
    assert gather_outputs(found, make_single_rank_group(), torch.device("cpu")) is found
