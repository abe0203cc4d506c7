"""The order of records depends on the seed and the step, and on nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.errors import UserError
from realrl.data.order import Order, split_eval_batches


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5), st.booleans())
def test_every_epoch_takes_every_item_once(size, batch, seed, shuffle):
    batch = min(batch, size)
    order = Order(size, batch, seed, shuffle)
    stream = [i for step in range(-(-3 * size // batch)) for i in order.indices(step)]
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_the_order_of_a_step_does_not_depend_on_earlier_steps(size, batch, step):
    batch = min(batch, size)
    used = Order(size, batch, 7)
    for earlier in (0, step + 3, step // 2):
        used.indices(earlier)
    assert used.indices(step) == Order(size, batch, 7).indices(step)


def test_the_order_of_a_seed_never_changes():
    """The expected order was computed by an independent Philox4x64-10 (Salmon et al. 2011)."""
    assert Order(8, 4, 1).indices(0) + Order(8, 4, 1).indices(1) == [3, 5, 2, 7, 0, 6, 1, 4]


def test_without_shuffling_the_order_is_that_of_the_file():
    order = Order(5, 2, 1, shuffle=False)
    assert [order.indices(step) for step in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_a_batch_larger_than_the_data_is_a_user_error():
    with pytest.raises(UserError, match=r"data\.batch=8 is more than the 5 records"):
        Order(5, 8, 1)


@given(st.integers(1, 100), st.integers(1, 30))
def test_evaluation_takes_all_items_in_order_in_batches_of_nearly_equal_size(size, batch):
    batches = split_eval_batches(size, batch)
    assert [i for indices in batches for i in indices] == list(range(size))
    sizes = list(map(len, batches))
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (0.5, 2), (1, 3), (2, 5), (4, 10), (0.1, 1)])
def test_steps_suffice_for_the_epochs(epochs, steps):
    assert Order(10, 4, 1).steps(epochs) == steps
