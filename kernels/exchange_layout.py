"""What an exchange buffer looks like (`exchange_mosaic` draws it): sizes that the host and the kernels agree on."""

EMPTY = 0x80008000  # the word that no row has; as float32 it is -4.6e-41, which travels as 0
TURNS = 3
THREADS = 128  # of a program
PAIR_BYTES = 8
MAX_VALUES = 16384  # of a row: what the threads' registers hold


def pairs_offset(shards: int, capacity: int, row_bytes: int) -> int:
    """Where the pairs begin in a buffer that has room for the rows of `capacity` tokens."""
    return shards * TURNS * capacity * row_bytes


def buffer_bytes(shards: int, capacity: int, row_bytes: int, max_seqs: int) -> int:
    """The size of one shard's buffer, for steps of at most `capacity` tokens and `max_seqs` sequences."""
    return pairs_offset(shards, capacity, row_bytes) + shards * max_seqs * PAIR_BYTES


def vector_size(size: int, itemsize: int) -> int | None:
    """Values that a thread moves at once so that the threads share a row of `size` evenly; None: they can't."""
    for bytes_at_once in (16, 8, 4):
        values = bytes_at_once // itemsize
        if values and size % (THREADS * values) == 0 and size <= MAX_VALUES:
            return values
    return None
