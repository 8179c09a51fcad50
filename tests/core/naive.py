"""An independent scheduler: nano-vLLM's policy as its readers tell it, in plain lists, slow and obvious.

The oracle of `test_oracle`. It shares no code and no data structure with jaxvllm.core: it walks where that
one computes with arrays, compares whole prefixes where that one hashes, and finds positions by searching
lists. A token in flight is a None in the list of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    name: str
    tokens: list[int | None]
    limit: int
    ends: set[int]
    num_prompt: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    life: int = 0  # grows when it loses its blocks
    done: str | None = None

    def known(self) -> list[int]:
        return [token for token in self.tokens if token is not None]


@dataclass
class Scheduled:
    kind: str
    entries: list[tuple[Sequence, int, int, bool, int]]  # sequence, start, count, samples, life
    preempted: list[Sequence]


class NaiveScheduler:
    def __init__(self, block_size, num_blocks, max_num_seqs, budget, max_model_len, max_running, caching):
        self.block_size, self.num_blocks = block_size, num_blocks
        self.max_num_seqs, self.budget = max_num_seqs, budget
        self.max_model_len, self.max_running, self.caching = max_model_len, max_running, caching
        self.free = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.prefix_of_block: dict[int, tuple] = {}  # what a full block holds, with everything before it
        self.block_of_prefix: dict[tuple, int] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, name, prompt, max_tokens, ends):
        limit = min(len(prompt) + max_tokens, self.max_model_len, self.num_blocks * self.block_size + 1)
        assert len(prompt) < limit
        sequence = Sequence(name, list(prompt), limit, set(ends), len(prompt))
        self.waiting.append(sequence)
        return sequence

    # Blocks

    def take(self) -> int:
        block = self.free.pop(0)
        prefix = self.prefix_of_block.pop(block, None)
        if prefix is not None and self.block_of_prefix.get(prefix) == block:
            del self.block_of_prefix[prefix]
        self.refs[block] = 1
        return block

    def deallocate(self, sequence: Sequence) -> None:
        for block in reversed(sequence.table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.append(block)
        sequence.table = []
        sequence.computed = 0
        sequence.life += 1

    def cached(self, sequence: Sequence) -> list[int]:
        known, blocks = sequence.known(), []
        if not self.caching:
            return blocks
        for end in range(self.block_size, len(known), self.block_size):  # never the last token
            block = self.block_of_prefix.get(tuple(known[:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    # Steps

    def schedule(self) -> Scheduled | None:
        order = list(self.running)
        entries: list[tuple[Sequence, int]] = []
        preempted: set[str] = set()
        kind, used = "prefill", 0
        while self.waiting and len(entries) < self.max_num_seqs:
            sequence, remaining = self.waiting[0], self.budget - used
            if remaining == 0:
                break
            hits: list[int] = []
            if not sequence.table:
                if None in sequence.tokens:
                    break
                holders = len(self.running) + sum(1 for other in self.waiting if other.table)
                if self.max_running is not None and holders >= self.max_running:
                    break
                hits = self.cached(sequence)
                total = -(-len(sequence.tokens) // self.block_size)
                if total - sum(1 for block in hits if self.refs[block] > 0) > len(self.free):
                    break
                left = len(sequence.tokens) - len(hits) * self.block_size
            else:
                left = len(sequence.tokens) - sequence.computed
            if remaining < left and entries:
                break
            if not sequence.table:
                for block in hits:
                    if self.refs[block] == 0:
                        self.free.remove(block)
                    self.refs[block] += 1
                sequence.table = list(hits)
                while len(sequence.table) * self.block_size < len(sequence.tokens):
                    sequence.table.append(self.take())
                sequence.computed = len(hits) * self.block_size
            count = min(left, remaining)
            used += count
            entries.append((sequence, count))
            if count == left:
                self.running.append(self.waiting.pop(0))
        if not entries:
            kind, i = "decode", 0
            while i < len(self.running) and len(entries) < self.max_num_seqs:
                sequence = self.running[i]
                if len(sequence.tokens) >= sequence.limit:
                    i += 1
                    continue
                while len(sequence.tokens) > len(sequence.table) * self.block_size and not self.free:
                    victim = self.running.pop()
                    self.deallocate(victim)
                    self.waiting.insert(0, victim)
                    preempted.add(victim.name)
                    if victim is sequence:
                        break
                else:
                    if len(sequence.tokens) > len(sequence.table) * self.block_size:
                        sequence.table.append(self.take())
                    entries.append((sequence, 1))
                    i += 1
        if not entries:
            return None
        step = []
        for sequence, count in entries:
            start = sequence.computed
            sequence.computed += count
            samples = sequence.computed == len(sequence.tokens)
            step.append((sequence, start, count, samples, sequence.life))
            if samples:
                sequence.tokens.append(None)
        return Scheduled(kind, step, [sequence for sequence in order if sequence.name in preempted])

    def commit(self, step: Scheduled, tokens) -> list[Sequence]:
        finished = []
        for (sequence, start, count, samples, life), token in zip(step.entries, tokens, strict=True):
            if sequence.done:
                continue
            if life == sequence.life and self.caching:
                for end in range(self.block_size, start + count + 1, self.block_size):
                    if end > start:
                        self.publish(sequence.table[end // self.block_size - 1], sequence.tokens[:end])
            if not samples:
                continue
            sequence.tokens[sequence.tokens.index(None)] = int(token)
            if token in sequence.ends:
                self.finish(sequence, "stop")
            elif len(sequence.known()) >= sequence.limit:
                self.finish(sequence, "length")
            else:
                continue
            finished.append(sequence)
        return finished

    def publish(self, block: int, prefix) -> None:
        assert None not in prefix
        self.prefix_of_block[block] = tuple(prefix)
        self.block_of_prefix[tuple(prefix)] = block

    def finish(self, sequence: Sequence, reason: str) -> None:
        sequence.done = reason
        self.deallocate(sequence)
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        sequence.tokens = list(sequence.known())
