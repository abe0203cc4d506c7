"""Origins of items in few bytes."""

from realrl.data.dataset import Origins


def test_origins_come_back_as_they_were_added() -> None:
    added = ["a.jsonl:1", "a.jsonl:20", "hub:train:7", "b", "c:x", "a.jsonl:3", "d:" + "9" * 30]
    origins = Origins()
    for origin in added:
        origins.add(origin)
    assert origins.list(range(len(added))) == added
    assert origins.list([2, 0]) == ["hub:train:7", "a.jsonl:1"]
