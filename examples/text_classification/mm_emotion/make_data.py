"""Writes texts for training and test, and config and tokenizer of a small BERT.

usage: python -m mm_emotion.make_data --out data/emotion

train.json, test.json: a JSON list of rows [text, label]. The test set combines words and sentences that
are not combined in training. bert: config.json and tokenizer files, without weights: it is trained from
scratch.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from mm_emotion import texts


def make_text(rng: random.Random, label: str) -> tuple[str, bool]:
    """A random text whose writer feels an emotion, in one of two languages, and whether it belongs to the
    test set.

    Some words are the writer's own emotion in some sentences only in the test set, so memorising words or
    sentences does not help.
    """
    other = rng.choice([name for name in texts.LABELS if name != label])
    if rng.random() < 0.5:
        words, frames, parts = texts.ENGLISH, texts.ENGLISH_FRAMES, texts.ENGLISH_PARTS
    else:
        words, frames, parts = texts.CHINESE, texts.CHINESE_FRAMES, texts.CHINESE_PARTS
    word, frame = rng.randrange(len(words[label])), rng.randrange(len(frames))
    first, second = rng.choices(parts["strength"], k=2)
    named = {"t": words[label][word], "d": rng.choice(words[other]), "who": rng.choice(parts["who"])}
    text = rng.choice(parts["when"]) + frames[frame].format(**named, a=first, b=second)
    return text, (word + frame) % 6 == 0


def make_rows(count: int, seed: int, test: bool) -> list[tuple[str, str]]:
    """Rows (text, label) of a dataset of emotions: texts are unique, labels equally frequent.

    Args:
        count: number of rows.
        seed: seed of the texts.
        test: whether the rows are for the test set.
    """
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        label = texts.LABELS[len(rows) % len(texts.LABELS)]
        text, held_out = make_text(rng, label)
        if held_out is test:
            rows.setdefault(text, label)
    return list(rows.items())


def save_bert(folder: Path, corpus: Sequence[str]) -> None:
    """Writes a WordPiece tokenizer trained on these texts, and the config of a BERT small enough for a
    laptop."""
    from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
    from tokenizers.processors import BertProcessing
    from transformers import BertConfig, PreTrainedTokenizerFast

    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(iter(corpus), vocab_size=1200, min_frequency=2, show_progress=False)
    ids = pieces.get_vocab()
    first, last = ((name, ids[name]) for name in ("[CLS]", "[SEP]"))
    pieces.post_processor = BertProcessing(last, first)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    tokenizer.save_pretrained(folder)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **size)
    config.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="writes texts with six emotions, and a small BERT without weights"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--train", type=int, default=9000, metavar="ROWS")
    parser.add_argument("--test", type=int, default=1200, metavar="ROWS")
    args = parser.parse_args()
    train = make_rows(args.train, seed=123, test=False)
    test = make_rows(args.test, seed=123, test=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (args.out / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    save_bert(args.out / "bert", [text for text, _ in train])
    print(f"{args.train} and {args.test} rows, and the config of a small BERT, in {args.out}")


if __name__ == "__main__":
    main()
