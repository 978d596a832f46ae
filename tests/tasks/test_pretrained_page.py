"""What docs/transformers.md shows runs as it stands there."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import mm_core
from mm_core.builtin.configs.data import TextRowsConfig
from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import SampleKey
from support.logs import log_of

PAGE = (Path(__file__).parents[2] / "docs/transformers.md").read_text(encoding="utf-8")


def test_the_table_of_options_has_each_of_them():
    (table,) = re.findall(r"\| key of `task` \| \|\n(.*?)\n\n", PAGE, re.S)
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()[1:]))
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(PretrainedConfig))


def test_the_table_of_text_rows_has_each_of_its_options():
    (table,) = re.findall(r"\| key of `text_rows` \| \|\n(.*?)\n\n", PAGE, re.S)
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()[1:]))
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(TextRowsConfig))


def test_the_collate_of_the_page_makes_a_batch():
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "one": 1, "two": 2}, unk_token="[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    known: dict[str, object] = {}
    exec(re.search(r"```python\n(import torch\n.*?def collate.*?)```", PAGE, re.S)[1], known)
    key = {"key": SampleKey(0, 0), "weight": 1.0, "id": "a"}
    batch = known["collate"](
        SimpleNamespace(tokenizer=tokenizer), [{"ids": [1, 2], **key}, {"ids": [2], **key}]
    )
    assert {name: tensor.tolist() for name, tensor in batch.inputs.items()} == {
        "input_ids": [[1, 2], [2, 0]],
        "attention_mask": [[1, 1], [1, 0]],
        "labels": [[1, 2], [2, -100]],
    }


@pytest.mark.slow
def test_the_config_of_the_page_trains_a_model_and_its_commands_run(tmp_path, monkeypatch, mm):
    config = re.search(r"```yaml\n(run: .*?)```", PAGE, re.S)[1]
    monkeypatch.chdir(tmp_path)
    Path("answers.yaml").write_text(config.replace("hub:Qwen/", "ckpt/"), encoding="utf-8")
    folder = Path("ckpt/Qwen3-0.6B")
    words = ["[PAD]", "[EOS]", "[UNK]", "what", "is", "one", "and", "two", "three", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny = transformers.Qwen3Config(vocab_size=10, num_key_value_heads=1, head_dim=8, **sizes)
    transformers.Qwen3ForCausalLM(tiny).save_pretrained(folder)
    Path("data").mkdir()
    rows = [
        {"question": "what is one and two ?", "answer": "three"},
        {"question": "one ?", "answer": "one two"},
    ]
    lines = [json.dumps(row) + "\n" for row in rows * 8]
    Path("data/answers.jsonl").write_text("".join(lines), encoding="utf-8")
    small = ["train.steps=2", "train.global_batch_size=8", "data.loader.workers=0", "optimizer.lr=1e-2"]
    mm_core.train(mm_core.load_config("answers.yaml", small))
    logged = log_of(Path("runs/answers"))
    assert logged[1]["loss"] < logged[0]["loss"]
    # The run is there and done: the first command finds it so, on two ranks.
    asked = [json.dumps({"question": row["question"]}) + "\n" for row in rows]
    Path("asked.jsonl").write_text("".join(asked), encoding="utf-8")
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    lines = [shlex.split(line, comments=True) for line in commands.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["mm", "sample"], ["mm", "sample"], ["mm", "export"]]
    done = mm("train", *lines[0][1:-1], 2, *small, cwd=tmp_path)
    assert done.code == 0 and lines[0][:1] == ["mm-train"] and lines[0][-2] == "--nproc", done.err
    for line in lines[1:]:
        done = mm(*line[1:], cwd=tmp_path)
        assert done.code == 0, f"{line}: {done.err}"
    loaded = transformers.AutoModelForCausalLM.from_pretrained("answers")
    assert type(loaded) is transformers.Qwen3ForCausalLM
