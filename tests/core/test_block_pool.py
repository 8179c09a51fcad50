"""The pool: order of the free list, holders, and what a cached block means."""

import numpy as np
import pytest

from jaxvllm.core import BlockPool
from jaxvllm.core.block_pool import chain_hash
from jaxvllm.core.free_list import FreeList


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_blocks_are_taken_first_in_first_out_and_come_back_last_first():
    pool = BlockPool(4, 2)
    table = pool.take(3)
    assert (table, pool.free_blocks()) == ([0, 1, 2], [3])
    pool.release(table)
    assert pool.free_blocks() == [3, 2, 1, 0]
    pool.check_integrity([])


def test_a_block_is_free_only_when_its_last_holder_goes():
    pool = BlockPool(3, 2)
    table = pool.take(2)
    pool.hold(table[:1])
    pool.release(table)
    assert pool.in_use(0)
    assert pool.free_blocks() == [2, 1]
    pool.check_integrity([[0]])
    pool.release([0])
    assert pool.free_blocks() == [2, 1, 0]


def test_a_match_is_a_run_of_full_blocks_and_never_the_whole_prompt():
    pool = BlockPool(8, 2)
    text = tokens(1, 2, 3, 4, 5, 6)
    table = pool.take(3)
    pool.publish(table, 0, text, [])
    assert pool.match(text, []) == [0, 1]  # 6 tokens fill 3 blocks: the last is computed again
    assert pool.match(tokens(1, 2, 3, 4, 5, 6, 7), []) == [0, 1, 2]
    assert pool.match(tokens(1, 2, 3, 4), []) == [0]
    assert pool.match(tokens(1, 2), []) == []
    assert pool.match(tokens(1), []) == []
    assert pool.match(tokens(1, 2, 9, 9, 5, 6, 7), []) == [0]
    # The same tokens after another beginning are something else.
    assert pool.match(tokens(9, 9, 3, 4, 5, 6, 7), []) == []


def test_free_blocks_stay_findable_until_they_are_taken():
    pool = BlockPool(3, 2)
    text = tokens(1, 2, 3, 4, 5)
    table = pool.take(2)
    pool.publish(table, 0, text, [])
    pool.release(table)
    assert pool.free_blocks() == [2, 1, 0]
    assert pool.match(text, []) == [0, 1]
    pool.take(2)  # 2, then 1
    assert pool.match(text, []) == [0]
    pool.hold([0])  # revived from the middle of the list
    assert pool.free_blocks() == []
    pool.check_integrity([[0], [1, 2]])


def test_a_revived_block_leaves_the_middle_of_the_free_list():
    pool = BlockPool(5, 1)
    table = pool.take(3)
    pool.publish(table, 0, tokens(1, 2, 3), [])
    pool.release(table)
    assert pool.free_blocks() == [3, 4, 2, 1, 0]
    pool.hold([1])
    assert pool.free_blocks() == [3, 4, 2, 0]
    assert pool.cached_blocks() == [0, 1, 2]


def test_the_last_publisher_owns_the_entry():
    pool = BlockPool(4, 2)
    text = tokens(1, 2, 3)
    first, second = pool.take(1), pool.take(1)
    pool.publish(first, 0, text, [])
    pool.publish(second, 0, text, [])
    assert pool.match(text, []) == second
    pool.release(first)
    assert pool.match(text, []) == second
    pool.take(3)  # the first copy is overwritten: not its entry any more
    assert pool.match(text, []) == second
    pool.release(second)
    assert pool.take(1) == second  # now the owner is, although nothing else holds that content
    assert pool.cached_blocks() == []


def test_an_equal_hash_with_other_tokens_is_a_miss():
    pool = BlockPool(2, 2)
    hashes: list[int] = []
    pool.publish(pool.take(1), 0, tokens(1, 2), hashes)
    assert pool.match(tokens(8, 9, 10), hashes) == []  # claims to have the published hash


def test_the_chain_depends_on_everything_before():
    a, b = tokens(1, 2).tobytes(), tokens(3, 4).tobytes()
    hashes = [chain_hash(None, b), chain_hash(chain_hash(None, a), b), chain_hash(chain_hash(None, b), b)]
    assert len(set(hashes)) == 3
    chain: list[int] = []
    BlockPool(2, 2).match(tokens(1, 2, 3, 4, 5), chain)
    assert chain == [chain_hash(None, a)]  # no further than the first miss


def test_reset_forgets_held_blocks_too():
    pool = BlockPool(2, 2)
    table = pool.take(1)
    pool.publish(table, 0, tokens(1, 2), [])
    pool.reset_prefix_cache()
    assert (pool.match(tokens(1, 2, 3), []), pool.cached_blocks(), pool.in_use(0)) == ([], [], True)
    pool.check_integrity([table])


def test_without_prefix_caching_nothing_is_found():
    pool = BlockPool(2, 2, enable_prefix_caching=False)
    pool.publish(pool.take(1), 0, tokens(1, 2), [])
    assert (pool.match(tokens(1, 2, 3), []), pool.cached_blocks()) == ([], [])


def test_another_free_order_is_another_class():
    class LastInFirstOut(FreeList):
        def pop(self) -> int:
            return self._order.popitem()[0]

    pool = BlockPool(3, 2, free_list=LastInFirstOut)
    assert pool.take(2) == [2, 1]
    pool.check_integrity([[2, 1]])


@pytest.mark.parametrize("tables", [[[0]], [[0, 1, 2]], [[0, 0]], [[0, 1], [1]]])
def test_integrity_notices_wrong_tables(tables):
    pool = BlockPool(3, 2)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match=f"num_blocks={sizes[0]} and block_size={sizes[1]}"):
        BlockPool(*sizes)
