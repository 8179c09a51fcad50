"""What one thread of `exchange_mosaic` does, in MLIR: Pallas has no loads and stores of addresses.

The functions run while a kernel is lowered (`plgpu.inline_mgpu`); their values are MLIR's, addresses int64.
"""

import math

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf, vector

from .exchange_layout import EMPTY, PAIR_BYTES, THREADS


def _i32(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), _signed(value))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _i64(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(64), value)


def _index(value: int) -> ir.Value:
    return arith.constant(ir.IndexType.get(), value)


def _wide(value: ir.Value) -> ir.Value:
    """An index or int32 as int64."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.index_cast(i64, value) if isinstance(value.type, ir.IndexType) else arith.extui(i64, value)


def _read_peers(peers: ir.Value, shards: int) -> tuple[ir.Value, ir.Value, list[ir.Value]]:
    """This shard's number, its buffer's address and all shards', int64."""

    def word(i: int) -> ir.Value:
        return _wide(memref.load(peers, [_index(0), _index(i)]))

    addresses = [arith.ori(word(i), arith.shli(word(i + 1), _i64(32))) for i in range(1, 3 + 2 * shards, 2)]
    return word(0), addresses[0], addresses[1:]


def _send(address: ir.Value, words: list[ir.Value]) -> None:
    """Stores 1, 2 or 4 words at a peer's address."""
    count = len(words)
    registers = ", ".join(f"${i + 1}" for i in range(count))
    form = f".v{count}.b32 [$0], {{{registers}}}" if count > 1 else f".b32 [$0], {registers}"
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [address, *words], f"st.relaxed.sys.global{form};", "l" + ",r" * count,
                    has_side_effects=True)  # fmt: skip


def _receive(addresses: list[ir.Value], count: int) -> list[list[ir.Value]]:
    """Waits until the `count` words at each address have come, and empties them."""
    total = count * len(addresses)
    lines, checks = [], []
    for i in range(len(addresses)):
        names = [f"${i * count + j}" for j in range(count)]
        form = f".v{count}.b32 {{{', '.join(names)}}}" if count > 1 else f".b32 {names[0]}"
        lines.append(f"ld.relaxed.sys.global{form}, [${total + i}];")
        checks += [f"setp.eq.{'or.' if i or j else ''}b32 empty, {name}, {_signed(EMPTY)}"
                   + (", empty;" if i or j else ";") for j, name in enumerate(names)]  # fmt: skip
    loop = "again_${:uid}"
    text = "{ .reg .pred empty; " + f"{loop}: " + " ".join([*lines, *checks]) + f" @empty bra {loop}; " + "}"
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=&r"] * total + ["l"] * len(addresses))
    if total == 1:
        flat: list[ir.Value] = [llvm.inline_asm(i32, addresses, text, constraints, has_side_effects=True)]
    else:
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * total)})>")
        result = llvm.inline_asm(struct, addresses, text, constraints, has_side_effects=True)
        flat = [llvm.extractvalue(i32, result, [i]) for i in range(total)]
    for address in addresses:
        _send(address, [_i32(EMPTY)] * count)
    return [flat[i : i + count] for i in range(0, total, count)]


def _not_empty(word: ir.Value) -> ir.Value:
    """The word, or 0 if it is EMPTY."""
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, word, _i32(EMPTY)), _i32(0), word)


class Rows:
    """One warpgroup's row: own, this shard's part, to be added to the others' in float32."""

    def __init__(self, own, peers: ir.Value, *, turn: int, capacity: int, shards: int) -> None:
        self.layout, self.element, self.like = own.layout, own.mlir_dtype, own.registers
        self.turn, self.capacity, self.shards = turn, capacity, shards
        self.itemsize = mgpu.bytewidth(self.element)
        self.row_bytes = math.prod(own.shape) * self.itemsize
        self.count = self.layout.vec_size * self.itemsize // 4  # words that a thread moves at once
        self.as_words = ir.VectorType.get((self.count,), ir.IntegerType.get_signless(32))
        self.number, self.own_buffer, self.buffers = _read_peers(peers, shards)
        self.token = _wide(gpu.block_id(gpu.Dimension.x))
        self.offsets = [arith.muli(_wide(i), _i64(self.itemsize)) for i in self.layout.linear_thread_idxs()]
        self.words = [self._words(register) for register in own.registers.flat]

    def one_shot(self):
        """The sum, an array of own's layout."""
        if self.shards == 2:  # a + b = b + a: its own part needn't travel
            other = arith.subi(_i64(1), self.number)
            self._send(self.words, self._chosen(other), self.number)
            sums = self._add([self._floats(words) for words in self.words], other)
        else:
            for buffer in self.buffers:
                self._send(self.words, buffer, self.number)
            sums = self._sum()
        return self._array(sums)

    def two_shots(self):
        """The same, rounded to own's dtype."""
        owner = arith.remui(self.token, _i64(self.shards))
        self._send(self.words, self._chosen(owner), self.number)
        mine = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, self.number, owner))
        with ir.InsertionPoint(mine.then_block):
            rounded = [self._words(self._rounded(register)) for register in self._sum()]
            for buffer in self.buffers:  # its own too, emptied just now
                self._send(rounded, buffer, owner)
            scf.yield_([])
        return self._array([self._floats(words) for words in self._receive(owner)])

    def _words(self, register: ir.Value) -> list[ir.Value]:
        words = vector.bitcast(self.as_words, register)
        return [_not_empty(vector.extract(words, [], [i])) for i in range(self.count)]

    def _vector(self, element: ir.Type) -> ir.Type:
        return ir.VectorType.get((self.layout.vec_size,), element)

    def _floats(self, words: list[ir.Value]) -> ir.Value:
        values = vector.bitcast(self._vector(self.element), vector.from_elements(self.as_words, words))
        is_float = self.element == ir.F32Type.get()
        return values if is_float else arith.extf(self._vector(ir.F32Type.get()), values)

    def _rounded(self, floats: ir.Value) -> ir.Value:
        is_float = self.element == ir.F32Type.get()
        return floats if is_float else arith.truncf(self._vector(self.element), floats)

    def _array(self, registers: list[ir.Value]):
        array = self.like.copy()
        array.flat[:] = registers
        return mgpu.FragmentedArray(_registers=array, _layout=self.layout, _is_signed=None)

    def _place(self, source: ir.Value) -> ir.Value:
        """Where, in any buffer, the token's row from a shard belongs."""
        slot = arith.addi(_i64(self.turn * self.shards), source)
        return arith.muli(arith.addi(arith.muli(slot, _i64(self.capacity)), self.token), _i64(self.row_bytes))

    def _chosen(self, shard: ir.Value) -> ir.Value:
        """The buffer of a shard that only the running program knows."""
        buffer = self.buffers[0]
        for i, other in enumerate(self.buffers[1:], 1):
            buffer = arith.select(arith.cmpi(arith.CmpIPredicate.eq, shard, _i64(i)), other, buffer)
        return buffer

    def _send(self, rows: list[list[ir.Value]], buffer: ir.Value, source: ir.Value) -> None:
        start = arith.addi(buffer, self._place(source))
        for words, offset in zip(rows, self.offsets, strict=True):
            _send(arith.addi(start, offset), words)

    def _receive(self, source: ir.Value) -> list[list[ir.Value]]:
        start = arith.addi(self.own_buffer, self._place(source))
        return _receive([arith.addi(start, offset) for offset in self.offsets], self.count)

    def _add(self, sums: list[ir.Value], source: ir.Value) -> list[ir.Value]:
        received = self._receive(source)
        return [arith.addf(total, self._floats(words)) for total, words in zip(sums, received, strict=True)]

    def _sum(self) -> list[ir.Value]:
        """Of the rows of all shards, in their order."""
        sums = [self._floats(words) for words in self._receive(_i64(0))]
        for source in range(1, self.shards):
            sums = self._add(sums, _i64(source))
        return sums


def exchange_pairs(peers, values, ids, out, *, shards: int, offset: int, max_seqs: int) -> None:
    """One thread's sequence: the best of the shards' candidates to out."""
    batch = ir.ShapedType(values.type).shape[0]
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    block, thread = gpu.block_id(gpu.Dimension.x), gpu.thread_id(gpu.Dimension.x)
    seq = arith.addi(arith.muli(block, _index(THREADS)), thread)
    exists = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, seq, _index(batch)))
    with ir.InsertionPoint(exists.then_block):
        number, own_buffer, buffers = _read_peers(peers, shards)
        pair = [_not_empty(arith.bitcast(i32, memref.load(values, [seq]))), memref.load(ids, [seq])]

        def place(source: ir.Value) -> ir.Value:
            index = arith.addi(arith.muli(source, _i64(max_seqs)), _wide(seq))
            return arith.addi(arith.muli(index, _i64(PAIR_BYTES)), _i64(offset))

        for buffer in buffers:
            _send(arith.addi(buffer, place(number)), pair)
        best, winner = None, None
        for shard in range(shards):
            [(word, candidate)] = _receive([arith.addi(own_buffer, place(_i64(shard)))], 2)
            value = arith.bitcast(f32, word)
            if best is None:
                best, winner = value, candidate
            else:  # shards own ascending ids: of equals the first stays
                better = arith.cmpf(arith.CmpFPredicate.OGT, value, best)
                best, winner = arith.select(better, value, best), arith.select(better, candidate, winner)
        memref.store(winner, out, [seq])
        scf.yield_([])
