"""An independent scheduler: vLLM V1's policy as tests/traces_v1/README.md tells it, in plain lists, slow and obvious.

The oracle of `test_oracle_running`. It shares no code and no data structure with jaxvllm.core. A token in flight is a
None in the list of tokens. Blocks are findable once written and known, oldest first.
"""

from __future__ import annotations

from tests.core.naive import Scheduled, Sequence


class NaiveRunningFirst:
    def __init__(self, config, rules):
        self.config, self.rules = config, rules
        self.block_size, self.num_blocks = config["block_size"], config["num_blocks"]
        self.free = list(range(self.num_blocks))
        self.refs = [0] * self.num_blocks
        self.published: list[tuple[tuple, int]] = []  # (prefix, block), oldest first
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.keys: dict[str, tuple[int, int]] = {}

    def add(self, name, prompt, max_tokens, ends, priority):
        limit = min(len(prompt) + max_tokens, self.config["max_model_len"], self.num_blocks * self.block_size + 1)
        sequence = Sequence(name, list(prompt), limit, set(ends), len(prompt))
        self.keys[name] = (priority, len(self.keys))
        self.waiting.append(sequence)
        self.sort()
        return sequence

    def sort(self):
        if self.rules["policy"] == "priority":
            self.waiting.sort(key=lambda sequence: self.keys[sequence.name])

    # Blocks

    def known(self, block):
        return any(b == block for _, b in self.published)

    def take(self):
        block = self.free.pop(0)
        self.published = [(prefix, b) for prefix, b in self.published if b != block]
        self.refs[block] = 1
        return block

    def deallocate(self, sequence):
        gone = []
        for block in reversed(sequence.table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                gone.append(block)
        self.free = [b for b in gone if not self.known(b)] + self.free + [b for b in gone if self.known(b)]
        sequence.table, sequence.computed = [], 0
        sequence.life += 1

    def cached(self, sequence):
        tokens, blocks = sequence.known(), []
        if self.config["enable_prefix_caching"]:
            for end in range(self.block_size, len(tokens), self.block_size):
                block = next((b for prefix, b in self.published if prefix == tuple(tokens[:end])), None)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    # Steps

    def cut(self, wanted):
        threshold = self.rules["long_prefill_token_threshold"]
        return min(wanted, threshold) if threshold else wanted

    def schedule(self):
        budget = self.config["max_num_batched_tokens"]
        picked: list[tuple[Sequence, int]] = []
        preempted: list[Sequence] = []
        i, stopped = 0, False
        while i < len(self.running) and budget > 0 and not stopped:
            sequence = self.running[i]
            count = min(self.cut(len(sequence.tokens) - sequence.computed), budget)
            if len(sequence.tokens) >= sequence.limit:
                i += 1
                continue
            while -(-(sequence.computed + count) // self.block_size) - len(sequence.table) > len(self.free):
                victim = self.running[-1]
                if self.rules["policy"] == "priority":
                    victim = max(self.running, key=lambda other: self.keys[other.name])
                for entry in [entry for entry in picked if entry[0] is victim]:
                    picked.remove(entry)
                    budget += entry[1]
                i -= self.running.index(victim) < i
                self.running.remove(victim)
                self.deallocate(victim)
                self.waiting.insert(0, victim)
                self.sort()
                preempted.append(victim)
                if victim is sequence:
                    stopped = True
                    break
            if not stopped:
                while len(sequence.table) * self.block_size < sequence.computed + count:
                    sequence.table.append(self.take())
                picked.append((sequence, count))
                budget -= count
                i += 1
        if not preempted:
            self.admit(picked, budget)
        step = []
        for sequence, count in picked:
            start = sequence.computed
            sequence.computed += count
            samples = sequence.computed == len(sequence.tokens)
            step.append((sequence, start, count, samples, sequence.life))
            if samples:
                sequence.tokens.append(None)
        return Scheduled("", step, preempted)

    def admit(self, picked, budget):
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.config["max_num_seqs"]:
                return
            if None in sequence.tokens:
                continue
            if self.config["max_running"] is not None and len(self.running) >= self.config["max_running"]:
                return
            hits = self.cached(sequence)
            count = self.cut(len(sequence.tokens) - len(hits) * self.block_size)
            if count > budget and not self.rules["enable_chunked_prefill"]:
                return
            count = min(count, budget)
            end = len(hits) * self.block_size + count
            needed = len(sequence.tokens) if self.rules["reserve_full_prompt"] else end
            if -(-needed // self.block_size) - sum(self.refs[b] > 0 for b in hits) > len(self.free):
                return
            for block in hits:
                if self.refs[block] == 0:
                    self.free.remove(block)
                self.refs[block] += 1
            sequence.table = list(hits)
            while len(sequence.table) * self.block_size < end:
                sequence.table.append(self.take())
            sequence.computed = len(hits) * self.block_size
            self.waiting.remove(sequence)
            self.running.append(sequence)
            picked.append((sequence, count))
            budget -= count

    def commit(self, step, tokens):
        finished = []
        for (sequence, start, count, samples, life), token in zip(step.entries, tokens, strict=True):
            if life == sequence.life and self.config["enable_prefix_caching"] and not sequence.done:
                for end in range(self.block_size, start + count + 1, self.block_size):
                    if end > start:
                        block = sequence.table[end // self.block_size - 1]
                        self.published.append((tuple(sequence.tokens[:end]), block))
            if not samples or sequence.done:
                continue
            sequence.tokens[sequence.tokens.index(None)] = int(token)
            if token in sequence.ends or len(sequence.known()) >= sequence.limit:
                finished.append((sequence, "stop" if token in sequence.ends else "length"))
        for sequence, reason in finished:
            self.finish(sequence, reason)
        return [sequence for sequence, _ in finished]

    def finish(self, sequence, reason):
        sequence.done = reason
        self.deallocate(sequence)
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        sequence.tokens = list(sequence.known())
