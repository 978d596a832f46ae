"""Files of the small instances of mm_core's own components, written in their real layouts.

Each function is called with an empty folder and returns the fields of a component (`Component.tiny`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch

from mm_core.builtin.configs.callbacks import Event
from mm_core.testing.data.video_readers import write_clip

CAPTIONS = ("a red circle", "a blue square, which moves to the left", "Zwölf grüne Quadrate", "yellow")


def text_encoder(folder: Path) -> Mapping[str, object]:
    """Writes a tiny T5 encoder with a byte-level tokenizer, as Transformers' `save_pretrained` does."""
    from transformers import T5Config, T5EncoderModel

    words = write_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        config = T5Config(
            vocab_size=words, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, pad_token_id=0
        )
        T5EncoderModel(config).eval().save_pretrained(folder)
    return {"from_pretrained": str(folder), "max_length": 64, "dtype": "fp32"}


def plain_model(folder: Path) -> torch.nn.Module:
    """A model of no library, with a buffer and a scalar."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
        model.register_parameter("logit_scale", torch.nn.Parameter(torch.zeros(())))
    return model


def diffusers_model(folder: Path) -> torch.nn.Module:
    """A tiny model of Diffusers."""
    from diffusers import DiTTransformer2DModel

    with torch.device("meta"):
        model: torch.nn.Module = DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=4, num_layers=1, sample_size=4, norm_num_groups=2
        )
    return model


def transformers_model(folder: Path) -> torch.nn.Module:
    """A tiny model of Transformers, with tied weights."""
    from transformers import T5Config, T5EncoderModel

    with torch.device("meta"):
        model: torch.nn.Module = T5EncoderModel(
            T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
        )
    return model


def text_to_video(folder: Path) -> Mapping[str, object]:
    """The parts of a tiny task of clips; its predictor is the quickstart's, since the core contains none."""
    from mm_core.plugin.registry import get_registry
    from mm_core.testing.kit import NotApplicable

    name = "custom_dit/custom_dit"
    if name not in {component.qualified for component in get_registry().components("predictor")}:
        raise NotApplicable("its small instance needs a predictor: `pip install mm-custom-dit`")
    size = {"in_channels": 12, "out_channels": 12, "text_dim": 8}
    more = {"num_layers": 1, "num_heads": 2, "head_dim": 12, "ffn_dim": 16, "freq_dim": 8}
    return {
        "predictor": {"type": name, **size, **more, "patch_size": [1, 2, 2], "rope_max_seq_len": 16},
        "autoencoder": {"type": "core/pixel", "spatial": 2},
        "text_encoder": {"type": "core/bytes", "hidden_size": 8, "max_length": 32},
        "scheduler": {"type": "core/flow_match"},
    }


def classifier(folder: Path) -> Mapping[str, object]:
    """The config of a tiny model of Transformers that classifies texts into two classes."""
    from transformers import BertConfig

    words = write_tokenizer(folder)
    config = BertConfig(
        vocab_size=words,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        architectures=["BertForSequenceClassification"],
    )
    config.save_pretrained(folder)
    return {"from_pretrained": str(folder), "auto_class": "AutoModelForSequenceClassification"}


def classified_rows(folder: Path) -> Mapping[str, object]:
    """The dataset that the task `pretrained` is tested with."""
    return {"type": "core/text_rows", **text_rows(folder)}


def text_rows(folder: Path) -> Mapping[str, object]:
    """Writes a table of texts with labels, and a tokenizer."""
    write_tokenizer(folder / "tokenizer")
    rows = [{"text": caption, "label": number % 2} for number, caption in enumerate(CAPTIONS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "file": str(folder / "rows.jsonl"),
        "tokenizer": str(folder / "tokenizer"),
        "label": "label",
        "max_length": 16,
    }


def conversations(folder: Path) -> Mapping[str, object]:
    """Writes conversations of text alone, and a tokenizer with a chat template."""
    processor, file = folder / "processor", folder / "rows.jsonl"
    write_tokenizer(processor)
    answered = "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + '</s>' }}{% endfor %}"
    asked = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    (processor / "chat_template.jinja").write_text(answered + asked, encoding="utf-8")
    rows = [{"query": "What?", "response": caption} for caption in CAPTIONS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"sources": [{"annotations": str(file)}], "processor": str(processor), "max_length": 64}


def video_text(folder: Path) -> Mapping[str, object]:
    """Writes short clips with captions, listed in an annotation file."""
    rows = []
    for number, caption in enumerate(CAPTIONS):
        grey = [20 + 50 * number + 4 * frame for frame in range(8)]
        frames = torch.tensor(grey, dtype=torch.uint8)[:, None, None, None].expand(-1, 16, 24, 3)
        write_clip(folder / f"{number}.mp4", frames, 8)
        rows.append({"path": f"{number}.mp4", "cap": [caption, caption.upper()]})
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    size = {"num_frames": 4, "height": 8, "width": 8}
    return {"annotations": str(folder / "rows.json"), "random_start": True, **size}


def media_text(folder: Path) -> Mapping[str, object]:
    """Writes short clips in a table, and others in a folder with captions beside them."""
    table = video_text(folder)
    beside = folder / "beside"
    beside.mkdir()
    for number, caption in enumerate(CAPTIONS[:2]):
        frames = torch.full((6, 16, 16, 3), 60 + 90 * number, dtype=torch.uint8)
        write_clip(beside / f"{number}.mp4", frames, 8)
        (beside / f"{number}.txt").write_text(f"{caption}, still, grey", encoding="utf-8")
    tags = {"shuffle": True, "drop": 0.2, "keep": 1}
    sources = [{"annotations": table["annotations"]}, {"annotations": str(beside), "tags": tags}]
    sizes = {name: table[name] for name in ("num_frames", "height", "width")}
    return {"sources": sources, "random_start": True, **sizes}


def command(folder: Path) -> Mapping[str, object]:
    """A program that does nothing, at every event."""
    return {"run": [sys.executable, "-S", "-E", "-c", ""], "events": get_args(Event)}


def mlflow_store(folder: Path) -> Mapping[str, object]:
    """An MLflow store of files; newer versions of MLflow ask for a variable.

    "Default" exists in every store. MLflow would draw a new experiment's id from the generator of `random`
    now and then, on the tracker's thread: a side effect that is not the tracker's.
    """
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return {"tracking_uri": (folder / "mlruns").as_uri(), "experiment": "Default", "finish_timeout": 60.0}


def write_tokenizer(folder: Path) -> int:
    """Writes a tokenizer with one token for each byte; returns the number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=512
    ).save_pretrained(folder)
    return len(names)
