"""Tiny checkpoints of vision-language models: the published classes and file layouts, with random weights.

usage: python -m support.chat_models FAMILY FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.chat_families import FAMILIES
from support.chat_tokenizers import write_tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"


def save_chat_model(name: str, folder: Path, seed: int = 0, tokenizer: Path | None = None) -> Path:
    """Writes the folder `name` with the model, the tokenizer, the chat template and the processors' files.

    Args:
        name: one of FAMILIES.
        folder: where to make the folder.
        seed: of the weights.
        tokenizer: a published tokenizer.json; None: a small one of its kind.
    """
    import torch
    import transformers

    folder = folder / name
    folder.mkdir(parents=True)
    family = FAMILIES[name]
    ids = write_tokenizer(folder, family.words, tokenizer)
    if family.old_template:
        _write(folder / "chat_template.json", {"chat_template": template_of(name)})
    else:
        (folder / "chat_template.jinja").write_text(template_of(name), encoding="utf-8")
    for file, content in (
        ("preprocessor_config", family.image),
        ("video_preprocessor_config", family.video),
        ("processor_config", family.processor),
    ):
        if content:
            _write(folder / f"{file}.json", content)
    kind = getattr(transformers, family.model)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = kind(kind.config_class(**family.config(ids, -(-len(ids) // 64) * 64)))
        for parameter in model.parameters():  # classes leave zeros, such as Gemma 3's projection
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.generation_config.eos_token_id = [ids[end] for end in family.ends]
        model.generation_config.pad_token_id = ids[family.words.settings["pad_token"]]
        model.save_pretrained(folder)
    if family.published:
        _rename(folder / "model.safetensors", family.published)
    return folder


def _rename(file: Path, names: tuple[str, str]) -> None:
    """Gives weights their published names where the library reads them, but writes other ones."""
    from safetensors.torch import load_file, save_file

    weights = {re.sub(f"^{names[0]}", names[1], name): value for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def template_of(name: str) -> str:
    """The text of a family's chat template."""
    return (TEMPLATES / f"{FAMILIES[name].template}.jinja").read_text(encoding="utf-8").rstrip("\n")


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in FAMILIES:
        sys.exit(f"usage: python -m support.chat_models FAMILY FOLDER; families: {', '.join(FAMILIES)}")
    print(save_chat_model(sys.argv[1], Path(sys.argv[2])))
