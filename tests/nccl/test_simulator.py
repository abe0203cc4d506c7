"""The simulator finds what would hang, and nothing else."""

import pytest

from tests.nccl.simulator import (
    Action,
    Collective,
    DeadlockError,
    HostReceive,
    HostSend,
    Launch,
    Messages,
    MismatchError,
    Simulator,
    Sync,
)

PAIR = (0, 1)
A, B = "0-1", "1-0"


def send(peer: int, *, comm: str = A, after: tuple[int, ...] = ()) -> Launch:
    return Launch(comm, Messages(comm, sends=((peer, 8),)), after)


def receive(peer: int, *, comm: str = A, after: tuple[int, ...] = ()) -> Launch:
    return Launch(comm, Messages(comm, receives=((peer, 8),)), after)


def run(*programs: list[Action], synchronous: bool = False) -> None:
    Simulator(dict(enumerate(programs)), synchronous=synchronous).run()


def test_two_sends_that_cross_on_one_communicator_hang() -> None:
    with pytest.raises(DeadlockError, match="rank 0: host at 2: end"):
        run([send(1), receive(1)], [send(0), receive(0)])


def test_crossing_messages_of_two_communicators_hang_only_where_the_host_waits() -> None:
    programs: list[list[Action]] = [[send(1), receive(1, comm=B)], [send(0, comm=B), receive(0)]]
    run(*programs)
    with pytest.raises(DeadlockError):
        run(*programs, synchronous=True)


def test_a_group_sends_and_receives_at_once() -> None:
    both = [Launch(A, Messages(A, sends=((peer, 8),), receives=((peer, 8),))) for peer in (1, 0)]
    run(both[:1], both[1:], synchronous=True)


def test_a_receive_posted_before_what_it_waits_for_hangs_once_the_host_waits_for_the_device() -> None:
    """The first stage of a pipeline, which posts the receive of a gradient and then loads a module for its forward
    pass; the gradient comes after that pass."""
    last: list[Action] = [receive(0), Launch("compute", None, (0,)), send(0, comm=B, after=(1,))]
    early: list[Action] = [receive(1, comm=B), Sync(), Launch("compute", None), send(1, after=(1,))]
    late: list[Action] = [Sync(), Launch("compute", None), send(1, after=(0,)), receive(1, comm=B)]
    run(late, last)
    with pytest.raises(DeadlockError, match="rank 0: host at 1: Sync"):
        run(early, last)


def test_collectives_of_two_communicators_in_different_orders_hang_only_where_the_host_waits() -> None:
    first, second = (Launch(name, Collective(name, PAIR)) for name in (A, B))
    run([first, second], [second, first])
    with pytest.raises(DeadlockError):
        run([first, second], [second, first], synchronous=True)


def test_different_collectives_and_sizes_are_told_apart() -> None:
    with pytest.raises(MismatchError, match="all_gather"):
        run([Launch(A, Collective(A, PAIR))], [Launch(A, Collective(A, PAIR, "all_gather"))])
    with pytest.raises(MismatchError, match="4 and 8 bytes"):
        run([send(1)], [Launch(A, Messages(A, receives=((0, 4),)))])


def test_hosts_wait_for_messages_between_hosts() -> None:
    run([HostSend(1, "x"), HostReceive(1, "y")], [HostSend(0, "y"), HostReceive(0, "x")])
    with pytest.raises(DeadlockError, match="HostReceive"):
        run([HostReceive(1, "y"), HostSend(1, "x")], [HostReceive(0, "x"), HostSend(0, "y")])


def test_waves_have_one_message_per_peer_and_rounds_one_distance() -> None:
    group = Messages("0-1-2", sends=((1, 8), (2, 8), (1, 4)), receives=((2, 8),))
    assert [wave.sends for wave in group.divide("waves", 0)] == [((1, 8), (2, 8)), ((1, 4),)]
    rounds = group.divide("rounds", 0)
    assert [(r.sends, r.receives) for r in rounds] == [
        (((1, 8),), ((2, 8),)),
        (((2, 8),), ()),
        (((1, 4),), ()),
    ]
