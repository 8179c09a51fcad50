"""A histogram of times between tokens, for any number of them: logarithmic bins, 1.2 % wide. No jax."""

import numpy as np

LOW_S = 1e-5  # shorter times count as this
DECADES = 8
BINS_PER_DECADE = 200


class Gaps:
    """Counts by bin, and the longest time exactly. Seconds throughout."""

    def __init__(self) -> None:
        self.counts = np.zeros(DECADES * BINS_PER_DECADE, np.int64)
        self.longest_s = 0.0

    def add(self, gaps_s: np.ndarray) -> None:
        """Takes in times of any shape."""
        if not gaps_s.size:
            return
        bins = (np.log10(np.maximum(gaps_s.ravel(), LOW_S) / LOW_S) * BINS_PER_DECADE).astype(np.int64)
        self.counts += np.bincount(np.minimum(bins, len(self.counts) - 1), minlength=len(self.counts))
        self.longest_s = max(self.longest_s, float(gaps_s.max()))

    def percentile_s(self, percent: float) -> float:
        """The middle of the bin in which the percentile lies: within 0.6 % of it."""
        place = np.searchsorted(self.counts.cumsum(), self.counts.sum() * percent / 100)
        return float(bin_start_s(int(place) + 0.5))


def survival(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(times in s, share of gaps at least that long) of a histogram's counts, at the beginning of each filled bin."""
    filled = counts.nonzero()[0]
    at_least = counts[::-1].cumsum()[::-1][filled]
    return bin_start_s(filled), at_least / max(1, counts.sum())


def bin_start_s(number: np.ndarray | float) -> np.ndarray:
    """Where a bin begins; half a number is its middle."""
    return LOW_S * 10 ** (np.asarray(number) / BINS_PER_DECADE)
