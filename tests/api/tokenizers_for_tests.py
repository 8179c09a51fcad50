"""Small tokenizers of three families: byte-level (as Qwen's), byte fallback (as Llama 2's) and words."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
    "the cat sat on the mat and the dog sat on the log. In the beginning was the word, and naïve café owners "
    "said: don't worry! Straße, über, señor. 你好 世界 你好。 Привет мир. "
) * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(*, vocab_size: int = 380) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens(["<think>", "<a b>"])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdehlorstw.", "he", "▁the", "▁cat", "é"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def words() -> tokenizers.Tokenizer:
    vocab = {word: i for i, word in enumerate(["[UNK]", "the", "cat", "##s", "sat", ".", "don", "'", "t"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer
