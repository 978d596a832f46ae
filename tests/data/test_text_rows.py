"""The dataset `text_rows` against Transformers' own tokenizing and padding."""

from __future__ import annotations

import datetime
import json
import pickle
from pathlib import Path

import pyarrow
import pytest
import torch
import transformers
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import mm_core
from mm_core.contracts import SampleKey, TextBatch
from mm_core.data.datasets.text_rows import TextRowsDataset
from mm_core.errors import CheckpointError, ConfigError, DataError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]"]
WORDS += ["i", "am", "so", "very", "glad", "sad", "angry", "today", "why", "not"]


def save_tokenizer(folder: Path, classifier: bool) -> Path:
    """Of single words: as BERT's, with [CLS] and [SEP], or as a language model's, with an end token."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if not classifier:
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
        return folder
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("bert"), classifier=True)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("gpt"), classifier=False)


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def batch_of(dataset: TextRowsDataset, *places: int) -> TextBatch:
    samples = [{**dataset[place], "key": SampleKey(0, place), "weight": 1.0} for place in places]
    return dataset.collate(samples)


def test_classes_by_name_are_tokenized_and_padded_as_transformers_does_it(tmp_path, bert):
    texts = ["i am so very glad", "why not", "angry"]
    rows = [[text, label] for text, label in zip(texts, ["joy", "joy", "anger"], strict=True)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    options = {"text": 0, "label": 1, "labels": ("anger", "joy")}
    dataset = TextRowsDataset(tmp_path / "rows.json", bert, **options)
    batch = batch_of(dataset, 0, 1, 2)
    golden = transformers.AutoTokenizer.from_pretrained(bert)(texts, padding=True, return_tensors="pt")
    assert set(batch.inputs) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(batch.inputs["input_ids"], golden["input_ids"])
    assert torch.equal(batch.inputs["attention_mask"], golden["attention_mask"])
    assert batch.inputs["labels"].tolist() == [1, 1, 0] and batch.inputs["labels"].dtype == torch.int64
    assert batch.ids == ["rows.json, row 1", "rows.json, row 2", "rows.json, row 3"]


def test_pairs_and_numbers_and_a_padded_length(tmp_path, bert):
    file = tmp_path / "pairs.csv"
    file.write_text(
        'first,score,second\n"why, not",0.5,i am glad\nsad,-1,"so ""very"" sad"\n', encoding="utf-8"
    )
    options = {"text": "first", "pair": "second", "label": "score", "label_type": "number"}
    dataset = TextRowsDataset(file, bert, **options, pad_to_multiple=4)
    batch = batch_of(dataset, 0, 1)
    opened = transformers.AutoTokenizer.from_pretrained(bert)
    golden = opened(
        ["why, not", "sad"],
        ["i am glad", 'so "very" sad'],
        padding=True,
        pad_to_multiple_of=4,
        return_tensors="pt",
    )
    assert all(torch.equal(batch.inputs[name], golden[name]) for name in golden)
    assert set(golden) == {"input_ids", "attention_mask", "token_type_ids"}
    assert batch.inputs["labels"].tolist() == [0.5, -1.0]


def test_texts_to_learn_end_with_the_end_token_and_are_labelled_as_the_collator_does_it(tmp_path, gpt):
    file = written(tmp_path / "texts.jsonl", {"text": "i am so very glad today"}, {"text": "why not"})
    dataset = TextRowsDataset(file, gpt, max_length=6)
    batch = batch_of(dataset, 0, 1)
    opened = transformers.AutoTokenizer.from_pretrained(gpt)
    rows = [opened("i am so very glad today")["input_ids"], [*opened("why not")["input_ids"], 4]]
    golden = transformers.DataCollatorForLanguageModeling(opened, mlm=False)(
        [{"input_ids": row} for row in rows]
    )
    assert all(torch.equal(batch.inputs[name], golden[name]) for name in golden)
    assert batch.inputs["labels"].tolist() == [[5, 6, 7, 8, 9, 12], [13, 14, 4, -100, -100, -100]]


def test_of_prompt_and_text_only_the_text_is_learnt(tmp_path, gpt):
    rows = [{"q": "why not", "a": "i am sad"}, {"q": "so", "a": "glad"}]
    dataset = TextRowsDataset(
        written(tmp_path / "a.jsonl", *rows), gpt, text="a", prompt="q", separator=" today", max_length=5
    )
    batch = batch_of(dataset, 0, 1)
    assert batch.inputs["input_ids"].tolist() == [[13, 14, 12, 5, 6], [7, 12, 9, 4, 0]]
    assert batch.inputs["labels"].tolist() == [[-100, -100, -100, 5, 6], [-100, -100, 9, 4, -100]]
    long = written(tmp_path / "long.jsonl", {"q": "i am so very glad", "a": "why"}, *rows)
    with pytest.raises(DataError, match="the prompt has 5 tokens, so max_length 5 leaves no room for text"):
        TextRowsDataset(long, gpt, text="a", prompt="q", max_length=5)[0]


def test_the_parts_of_a_split_are_disjoint_complete_and_follow_the_seed(tmp_path, gpt):
    file = written(tmp_path / "a.jsonl", *[{"text": "glad " * (i + 1)} for i in range(50)])

    def rows(first: float, last: float, seed: int = 123) -> list[str]:
        found = TextRowsDataset(file, gpt, part=(first, last), split_seed=seed)
        return [found[place]["id"] for place in range(len(found))]

    train, rest = rows(0.0, 0.92), rows(0.92, 1.0)
    assert (len(train), len(rest)) == (46, 4)
    assert {*train} | {*rest} == {f"a.jsonl, line {i}" for i in range(1, 51)}
    assert train == rows(0.0, 0.92) and rest != rows(0.92, 1.0, seed=124)
    assert rest == sorted(rest, key=lambda name: int(name.split()[-1]))  # in the file's order


def test_a_broken_row_is_refused_when_it_is_read_and_the_others_stay_where_they_are(tmp_path, bert):
    file = tmp_path / "a.jsonl"
    good = '{"text": "glad", "label": 1}\n'
    bad = [
        '{"text": "gla\n',
        '{"label": 1}\n',
        '{"text": 3, "label": 1}\n',
        '{"text": "sad", "label": null}\n',
        "7\n",
    ]
    file.write_text(good + "".join(bad) + good, encoding="utf-8")
    dataset = TextRowsDataset(file, bert, label="label")
    assert len(dataset) == 7 and dataset[6]["labels"] == 1 and dataset[6]["id"] == "a.jsonl, line 7"
    said = []
    for place in range(1, 6):
        with pytest.raises(DataError) as caught:
            dataset[place]
        assert caught.value.where == f"{file}, line {place + 1}"
        said.append(caught.value.what)
    assert said[0].startswith("this is not JSON: Unterminated string")
    assert said[1:] == [
        "no column 'text' (found: label)",
        "the text is a number",
        "the label is empty",
        "a number instead of a row",
    ]


def test_a_text_that_is_a_date_is_broken(tmp_path, bert):
    rows = [{"text": datetime.date(2026, 1, 1)}, {"text": None}]
    for place, row in enumerate(rows):
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{place}.parquet")
    for place, found in enumerate(["of type date", "null"]):
        with pytest.raises(DataError, match=f"no row of 1 can be used; row 1: the text is {found}"):
            TextRowsDataset(tmp_path / f"{place}.parquet", bert)


def test_lengths_grow_with_the_texts_and_the_dataset_pickles_without_its_tokenizer(tmp_path, gpt):
    file = written(tmp_path / "a.jsonl", *[{"text": "glad " * count} for count in (3, 1, 2)])
    dataset = TextRowsDataset(file, gpt)
    assert dataset.lengths().tolist() == [15, 5, 10]
    again = pickle.loads(pickle.dumps(dataset))
    assert "_tokenizer" not in vars(again) and again[1] == dataset[1]


FAULTS = [
    ({"label": "mood"}, "no row of 2 can be used; line 1: no column 'mood' (found: label, text)"),
    ({"label": "label"}, "unknown labels: 'joy' (line 1), 'hapy' (line 2)"),
    ({"label": "label", "labels": ("joy", "happy")}, "unknown labels: 'hapy' (line 2)"),
    ({"text": 0}, "no row of 2 can be used; line 1: column 0 is a number, but the row is an object"),
    ({"part": (0.0, 0.1)}, "part [0.0, 0.1] of 2 rows contains no row"),
]


@pytest.mark.parametrize(("options", "sentence"), FAULTS)
def test_a_table_that_does_not_fit_its_options_is_one_error(tmp_path, bert, options, sentence):
    file = written(tmp_path / "a.jsonl", {"text": "i", "label": "joy"}, {"text": "am", "label": "hapy"})
    with pytest.raises(DataError) as caught:
        TextRowsDataset(file, bert, **options)
    assert caught.value.what.startswith(sentence) and caught.value.where == str(file)
    if options.get("labels"):
        assert caught.value.accepted == "joy, happy" and caught.value.hint == "did you mean 'happy'?"


def test_a_class_beyond_the_names_is_unknown(tmp_path, bert):
    file = written(tmp_path / "a.jsonl", {"text": "i", "label": 1}, {"text": "am", "label": 2})
    with pytest.raises(DataError, match=r"unknown labels: '2' \(line 2\)"):
        TextRowsDataset(file, bert, label="label", labels=("joy", "anger"))


@pytest.mark.parametrize("numbers", [["0", "1"], [0, 1], [0.0, 1.0]])
def test_a_column_may_hold_the_numbers_of_named_classes(tmp_path, bert, numbers):
    file = written(tmp_path / "a.jsonl", *[{"text": "i", "label": number} for number in numbers])
    dataset = TextRowsDataset(file, bert, label="label", labels=("joy", "anger"))
    assert [dataset[place]["labels"] for place in (0, 1)] == [0, 1]


@pytest.mark.parametrize("stars", [["1", "3"], [1, 3], [1.0, 3.0]])
def test_numbers_that_are_names_of_classes_are_names(tmp_path, bert, stars):
    file = written(tmp_path / "a.jsonl", *[{"text": "i", "label": number} for number in stars])
    dataset = TextRowsDataset(file, bert, label="label", labels=("1", "2", "3"))
    assert [dataset[place]["labels"] for place in (0, 1)] == [0, 2]
    none = written(tmp_path / "b.jsonl", {"text": "i", "label": 0})
    with pytest.raises(DataError, match=r"unknown labels: '0' \(line 1\)"):
        TextRowsDataset(none, bert, label="label", labels=("1", "2", "3"))


@pytest.mark.parametrize("kind", ["class", "number"])
def test_a_label_that_is_missing_in_a_column_of_numbers_is_a_broken_row(tmp_path, bert, kind):
    table = pyarrow.table({"text": ["i", "am"], "label": [1.0, float("nan")]})
    parquet.write_table(table, tmp_path / "a.parquet")
    dataset = TextRowsDataset(tmp_path / "a.parquet", bert, label="label", label_type=kind)
    assert dataset[0]["labels"] == 1
    with pytest.raises(DataError, match="the label is empty"):
        dataset[1]


def test_half_a_character_is_a_broken_row(tmp_path, gpt):
    file = written(tmp_path / "a.jsonl", {"text": "glad"}, {"text": "glad \ud83d"})
    with pytest.raises(DataError, match=r"the text contains \\ud83d, half of a character"):
        TextRowsDataset(file, gpt)[1]


def test_a_tokenizer_of_the_folders_own_code_runs_only_where_the_config_allows_it(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = save_tokenizer(tmp_path / "own_words", classifier=False)
    code = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): ...\n"
    (folder / "own.py").write_text(code)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    file = written(tmp_path / "a.jsonl", {"text": "why not"})
    with pytest.raises(
        CheckpointError, match="needs Python files in this folder, and they may not run"
    ) as caught:
        TextRowsDataset(file, folder)
    assert "trust_remote_code: true" in caught.value.hint
    with pytest.warns(UserWarning, match="text_rows.trust_remote_code is on: Python files in"):
        dataset = TextRowsDataset(file, folder, trust_remote_code=True)
    again = pickle.loads(pickle.dumps(dataset))
    assert again[0]["ids"] == [13, 14, 4] and type(again._tokenizer).__name__ == "Own"


def test_a_tokenizer_file_that_does_not_parse_is_one_error(tmp_path, gpt):
    path = save_tokenizer(tmp_path / "broken", classifier=False) / "tokenizer.json"
    file = written(tmp_path / "a.jsonl", {"text": "i"})
    # That of a later version of the library, whose kind of model this one does not know.
    path.write_text(path.read_text().replace('"WordLevel"', '"OfTomorrow"'), encoding="utf-8")
    with pytest.raises(CheckpointError, match="no tokenizer can be opened from this folder"):
        TextRowsDataset(file, path.parent)


def test_a_folder_without_a_tokenizer_is_one_error(tmp_path):
    file = written(tmp_path / "a.jsonl", {"text": "i"})
    what = {
        tmp_path / "none": "this folder does not exist",
        tmp_path: "no tokenizer can be opened from this folder",
    }
    for folder, said in what.items():
        with pytest.raises(CheckpointError) as caught:
            TextRowsDataset(file, folder)
        assert caught.value.what.startswith(said)
        assert caught.value.where == str(folder) and caught.value.hint


def test_options_that_contradict_each_other_are_faults_of_the_config(tmp_path):
    base = ["data.train.type=text_rows", "data.train.file=a.json", "data.train.tokenizer=t"]
    config = tmp_path / "run.yaml"
    config.write_text(
        "run: {name: a}\ntask: {type: pretrained, from_pretrained: m, auto_class: AutoModelForCausalLM}\n"
        "data: {train: {type: text_rows, file: a.json, tokenizer: t}}\ntrain: {steps: 1}\n"
    )
    mm_core.load_config(config, base)
    for option, sentence in (
        ("pair=other", "pair works only with label"),
        ("labels=[a,b]", "labels works only with label"),
        ("part=[0.5,0.5]", r"part must be \[start, end\] with start < end"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            mm_core.load_config(config, [*base, f"data.train.{option}"])
    with pytest.raises(ConfigError, match="prompt cannot be used with label"):
        mm_core.load_config(config, [*base, "data.train.label=b", "data.train.prompt=c"])
