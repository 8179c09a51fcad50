"""Paged attention and KV write in float64 numpy: loops over sequences and tokens, nothing shared with the kernels."""

import numpy as np


def context_of(kv: np.ndarray, layer: int, table: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [length, Hkv, D], float64, of one sequence: token by token through its block table."""
    block_size = kv.shape[4]
    tokens = [kv[layer, :, table[t // block_size], :, t % block_size] for t in range(length)]
    pair = np.asarray(tokens, np.float64).reshape(length, 2, kv.shape[3], kv.shape[5])
    return pair[:, 0], pair[:, 1]


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """softmax(scale * q k^T) v: q [Hq, D], keys and values [n, Hkv, D] -> [Hq, D]; n = 0 gives zeros."""
    out = np.zeros(q.shape, np.float64)
    if not len(keys):
        return out
    group = q.shape[0] // keys.shape[1]
    for head in range(q.shape[0]):
        scores = scale * (keys[:, head // group] @ q[head].astype(np.float64))
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[:, head // group] / weights.sum()
    return out


def decode(q, kv, layer, block_tables, context_lens, arrivals, *, scale) -> np.ndarray:
    """[B, Hq, D] float64."""
    del arrivals
    contexts = [context_of(kv, layer, t, n) for t, n in zip(block_tables, context_lens, strict=True)]
    return np.stack([attend(row, *context, scale) for row, context in zip(q, contexts, strict=True)])


def ragged(q, kv, layer, block_tables, context_lens, query_start, *, scale) -> np.ndarray:
    """[T, Hq, D] float64, zeros for pad tokens; the queries are the last tokens of their contexts."""
    out = np.zeros(q.shape, np.float64)
    for seq, length in enumerate(context_lens):
        keys, values = context_of(kv, layer, block_tables[seq], length)
        first, last = query_start[seq], query_start[seq + 1]
        for token in range(first, last):
            visible = length - (last - 1 - token)
            out[token] = attend(q[token], keys[:visible], values[:visible], scale)
    return out


def write(kv, layer, k, v, slot_mapping) -> np.ndarray:
    """A copy of kv with the tokens in their slots, slots out of range dropped."""
    out = kv.copy()
    num_blocks, block_size = kv.shape[2], kv.shape[4]
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < num_blocks * block_size:
            out[layer, 0, slot // block_size, :, slot % block_size] = k[token]
            out[layer, 1, slot // block_size, :, slot % block_size] = v[token]
    return out
