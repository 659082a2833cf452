from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.mixture import apportion, choose_source


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=2), st.integers(1, 200))
def test_two_sources_are_never_a_whole_prompt_from_their_share(weights, num_draws):
    counts = [0, 0]
    for num_drawn in range(1, num_draws + 1):
        counts[choose_source(weights, counts)] += 1
        shares = [num_drawn * weight / sum(weights) for weight in weights]
        assert all(abs(count - share) < 1.0 for count, share in zip(counts, shares, strict=True))


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=7), st.integers(0, 300))
def test_many_sources_stay_near_their_share_and_the_counts_sum_up(weights, num_items):
    counts = apportion(num_items, weights)
    assert sum(counts) == num_items
    assert all(
        abs(count - num_items * weight / sum(weights)) < len(weights) for count, weight in zip(counts, weights, strict=True)
    )


def test_ties_go_to_the_first_and_the_order_interleaves():
    counts = [0, 0]
    order = []
    for _ in range(6):
        source = choose_source([2.0, 1.0], counts)
        counts[source] += 1
        order.append(source)
    assert order == [0, 1, 0, 0, 1, 0]


def test_a_source_of_weight_zero_gives_nothing():
    assert apportion(11, [0.0, 3.0]) == (0, 11)
