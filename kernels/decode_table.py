"""What `decode_triton` was measured to do best with, by the (sequence, kv head) pairs of a step.

Rows of one device, from few pairs to many; a step takes the first row that it fits. Refill with
`python -m bench.kernels --tune` on the device: it prints the rows to put here. An unknown device takes the default's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Tunables up to `pairs` pairs.

    programs   wanted in a launch, a multiprocessor: (contexts of about one length, mixed lengths)
    min_tokens of a split: below this, combining costs more than it wins
    tile       context tokens a tile, at most; less where shared memory or the block size ask for it
    num_warps, num_stages   Triton's, of a program
    fused      the last program of a pair combines its splits; else a second launch does
    """

    pairs: int
    programs: tuple[int, int]
    min_tokens: int
    tile: int
    num_warps: int
    num_stages: int
    fused: bool


DEFAULT = "NVIDIA H200"
TABLE = {
    "NVIDIA H200": (
        DecodeRow(16, (4, 4), 64, 64, 2, 2, fused=False),
        DecodeRow(128, (4, 8), 128, 64, 4, 2, fused=True),
        DecodeRow(384, (4, 4), 256, 64, 4, 2, fused=True),
        DecodeRow(512, (4, 8), 128, 64, 2, 2, fused=True),
        DecodeRow(1024, (4, 12), 128, 64, 2, 2, fused=True),
        DecodeRow(1536, (4, 8), 128, 64, 2, 2, fused=True),
        DecodeRow(1 << 30, (4, 12), 128, 64, 2, 2, fused=True),
    ),
}


def row_for(pairs: int, device_kind: str) -> DecodeRow:
    """The row for a step of so many pairs on a device."""
    return next(row for row in TABLE.get(device_kind, TABLE[DEFAULT]) if pairs <= row.pairs)
