"""The task `pretrained`: what it builds, what it counts, what it refuses and with which errors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.constants import HF_HUB_CACHE

from mm_core import load_config
from mm_core.contracts import Batch, Randomness, SampleKey, SampleRequest, TextBatch
from mm_core.errors import CheckpointError, ConfigError, ContractError, MMError, PlanError
from mm_core.modules.casting import cast_inputs
from mm_core.modules.initialise import initialise
from mm_core.plan import build_task
from mm_core.tasks.pretrained import model as pretrained_model
from mm_core.tasks.pretrained.task import PretrainedTask
from mm_core.tokenizer import open_tokenizer
from mm_core.weights.formats.libraries import Transformers
from support import pretrained_models as models
from support.token_rows import TokenRows


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of the models that are asked for."""
    top, made = tmp_path_factory.mktemp("models"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = models.save_model(name, top)
        return made[name]

    return folder


def task_of(folder: Path, name: str, **options) -> PretrainedTask:
    """The task, ready to compute in this process, with randomly initialised weights."""
    with torch.device("meta"):
        task = PretrainedTask(str(folder), models.MODELS[name][3], **options)
    task.model.to_empty(device="cpu")
    task.model.tie_weights()
    initialise(task.model, "model", Randomness(1))
    return task


def loss_of(task: PretrainedTask, batch):
    return task.loss(task.prepare(task.batch_transform()(batch), Randomness(1)))


# -- what it builds ------------------------------------------------------------------------------


def test_a_model_has_no_memory_before_the_engine_gives_it_some(folders):
    with torch.device("meta"):
        task = PretrainedTask(str(folders("qwen3_vl")), "AutoModelForImageTextToText")
    assert type(task.model) is transformers.Qwen3VLForConditionalGeneration
    assert all(parameter.is_meta for parameter in task.model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in task.model.parameters())
    # Tables that no file holds are there.
    table = task.model.get_buffer("model.language_model.rotary_emb.inv_freq")
    assert table.device.type == "cpu" and table[0] == 1
    assert task.model.weights_from.path == str(folders("qwen3_vl"))


def test_randomly_initialised_weights_are_those_of_the_library(folders):
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**models.BERT, "hidden_size": 128, "vocab_size": 600})
    theirs = transformers.BertForMaskedLM(config)
    config.save_pretrained(wide := folders("bert_masked").parent / "wide")
    task = task_of(wide, "bert_masked", weights="random")
    assert task.model.weights_from is None
    for (name, own), their in zip(task.model.named_parameters(), theirs.parameters(), strict=True):
        own, their = own.detach(), their.detach()
        assert own.std() == pytest.approx(float(their.std()), rel=0.15, abs=1e-6), name
        assert own.mean() == pytest.approx(float(their.mean()), abs=0.01), name
    words = task.model.bert.embeddings.word_embeddings.weight
    assert not words[0].any(), "the row of padding begins at zero"
    assert task.model.cls.predictions.decoder.weight is words
    again = task_of(wide, "bert_masked", weights="random")
    assert torch.equal(again.model.bert.embeddings.word_embeddings.weight, words)


def test_a_random_start_of_a_large_model_notes_the_memory_of_rank_0(folders):
    large = {"overrides": {"vocab_size": 2**19, "hidden_size": 1024}}
    sentence = "task.weights: random: rank 0 of a new run first builds the complete model in host memory, "
    place, kind = str(folders("bert_classes")), models.MODELS["bert_classes"][3]
    with torch.device("meta"):
        (note,) = PretrainedTask(place, kind, weights="random", **large).notes()
        assert PretrainedTask(place, kind, **large).notes() == []
    assert note == f"{sentence}2.0 GiB"


def test_class_names_keys_of_config_and_attention_are_set(folders):
    with torch.device("meta"):
        task = PretrainedTask(
            str(folders("bert_classes")),
            "AutoModelForSequenceClassification",
            labels=("joy", "anger", "fear", "calm"),
            overrides={"hidden_dropout_prob": 0.25},
            attn_implementation="eager",
        )
    config = task.model.config
    assert config.num_labels == 4 and config.id2label[3] == "calm" and config.label2id["anger"] == 1
    assert task.model.classifier.out_features == 4
    assert task.model.dropout.p == 0.25 and config._attn_implementation == "eager"


def test_a_class_may_be_named_by_its_module(folders):
    with torch.device("meta"):
        task = PretrainedTask(str(folders("qwen3")), "transformers:Qwen3ForCausalLM")
    assert type(task.model) is transformers.Qwen3ForCausalLM


def test_the_module_of_a_class_may_make_another_config_json_known(folders, tmp_path, monkeypatch):
    """By `AutoConfig.register`; which layout the weights are in is then seen by reading."""
    (tmp_path / "other_config.py").write_text(
        "from transformers import AutoConfig, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM\n"
        "from mm_core.errors import ContractError\n"
        "class Other(PretrainedConfig):\n"
        "    model_type = 'other_qwen'\n"
        "    @classmethod\n"
        "    def from_dict(cls, found, **options):\n"
        "        if 'body' not in found:\n"
        "            raise ContractError('this folder has no body')\n"
        "        return Qwen3Config.from_dict(found['body'], **options)\n"
        "AutoConfig.register('other_qwen', Other, exist_ok=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    written = json.loads((folders("qwen3") / "config.json").read_text())
    auto_class = "other_config:Qwen3ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other_qwen", "body": written}))
    with torch.device("meta"):
        task = PretrainedTask(str(tmp_path), auto_class)
    assert task.model.config.hidden_size == written["hidden_size"]
    assert task.model.weights_from.format is None
    with torch.device("meta"):
        same = PretrainedTask(str(folders("qwen3")), auto_class)
    assert same.model.weights_from.format == "core/transformers"
    (tmp_path / "config.json").write_text('{"model_type": "other_qwen"}')
    assert refused(tmp_path, auto_class).what == "this folder has no body"


def test_a_new_head_begins_at_random_and_the_rest_is_read(folders, tmp_path):
    """A classifier of a masked language model's folder: other heads of the files are passed over."""
    import mm_core

    path = models.run_config(
        "bert_classes",
        folders("bert_masked"),
        tmp_path,
        task={"new_modules": ["model.classifier", "model.bert.pooler"], "labels": ["a", "b", "c"]},
        train={"steps": 0},
    )
    mm_core.train(load_config(path))
    found = transformers.BertForMaskedLM.from_pretrained(folders("bert_masked")).state_dict()
    from mm_core.checkpoint.reading import load_model_only

    task = build_task(load_config(path))
    state = {f"model.{n}": torch.zeros(p.shape) for n, p in task.model.named_parameters()}
    load_model_only(tmp_path / "runs/bert_classes/checkpoints/step_00000000", state)
    assert torch.equal(
        state["model.bert.encoder.layer.1.output.dense.weight"],
        found["bert.encoder.layer.1.output.dense.weight"],
    )
    assert 0.005 < state["model.classifier.weight"].std() < 0.04


def test_a_head_that_the_files_lack_is_named(folders, tmp_path):
    import mm_core

    path = models.run_config("bert_classes", folders("bert_masked"), tmp_path)
    with pytest.raises(CheckpointError, match=r"4 missing: .*model\.classifier\.weight"):
        mm_core.train(load_config(path))


# -- what it counts ------------------------------------------------------------------------------


def test_labels_are_counted_as_each_loss_counts_them(folders):
    tokens = models.batch_of(TokenRows("tokens"), range(9, 12), last=0.0)
    shifted = task_of(folders("qwen3"), "qwen3").batch_transform()(tokens)
    known = (tokens.inputs["labels"] != -100).sum(1).tolist()
    assert shifted.counts == known  # the first label of a row is never learnt here
    assert shifted.tokens == int(tokens.inputs["attention_mask"].sum())
    every = {**tokens.inputs, "labels": tokens.inputs["input_ids"].clone()}
    tokens.inputs = every
    lengths = every["labels"].shape[1]
    assert task_of(folders("qwen3"), "qwen3").batch_transform()(tokens).counts == [lengths - 1] * 3
    masked = task_of(folders("bert_masked"), "bert_masked")
    assert masked.batch_transform()(tokens).counts == [lengths] * 3
    assert masked.weight(masked.batch_transform()(tokens)) == 2 * lengths


@pytest.mark.parametrize("name", ["qwen3", "bert_classes", "bert_numbers", "bert_marks"])
def test_a_row_of_weight_zero_counts_for_nothing(name, folders):
    task = task_of(folders(name), name)
    data = TokenRows(models.MODELS[name][4])
    found = []
    for rows, last in ((range(9, 12), 0.0), (range(9, 11), 1.0)):
        task.zero_grad()
        loss = loss_of(task, models.batch_of(data, rows, last))
        (loss.total / loss.weight).backward()
        found.append((loss, [p.grad.clone() for p in task.parameters()]))
    assert found[0][0].weight == found[1][0].weight
    torch.testing.assert_close(found[0][0].total, found[1][0].total, rtol=1e-5, atol=0)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_numbers_to_learn_keep_their_precision_under_bf16(folders):
    task = task_of(folders("bert_numbers"), "bert_numbers")
    task.model.bfloat16()
    cast_inputs(task.model, torch.bfloat16)
    batch = models.batch_of(TokenRows("numbers"), range(3))
    batch.inputs["labels"] = torch.tensor([998.7, 3.3, -41.9])
    found = task.model(batch.inputs["input_ids"], batch.inputs["attention_mask"]).logits.float()[:, 0]
    loss = loss_of(task, batch)
    torch.testing.assert_close(loss.total, (found - batch.inputs["labels"]).square().sum())


def test_an_evaluation_returns_what_is_right_and_what_was_found(folders):
    task = task_of(folders("bert_classes"), "bert_classes").eval()
    batch = models.batch_of(TokenRows("classes"), range(6))
    found = task.evaluate(task.batch_transform()(batch), Randomness(1), ())
    assert set(found.sums) == {"loss"} and found.weights.tolist() == [1.0] * 6
    assert torch.equal(found.outputs["labels"], batch.inputs["labels"])
    assert torch.equal(found.outputs["predictions"], found.outputs["logits"].argmax(1))
    assert found.texts == [f"LABEL_{number}" for number in found.outputs["predictions"].tolist()]
    assert found.references == [(f"LABEL_{number}",) for number in batch.inputs["labels"].tolist()]
    numbers = task_of(folders("bert_numbers"), "bert_numbers").eval()
    batch = numbers.batch_transform()(models.batch_of(TokenRows("numbers"), range(6)))
    found = numbers.evaluate(batch, Randomness(1), ())
    assert set(found.sums) == {"loss"} and found.outputs["logits"].shape == (6, 1)


def test_an_evaluation_of_tokens_counts_tokens(folders):
    task = task_of(folders("qwen3"), "qwen3", chunk_tokens=3).eval()
    batch = task.batch_transform()(models.batch_of(TokenRows("tokens"), range(6)))
    found = task.evaluate(batch, Randomness(1), ())
    assert found.weights.tolist() == batch.counts
    known = found.outputs["labels"] != -100
    assert known.sum(1).tolist() == batch.counts
    # What was predicted is what the library's logits are greatest at, and no words are there unasked.
    logits = task.model(**{k: v for k, v in batch.inputs.items() if k != "labels"}).logits
    assert torch.equal(
        found.outputs["predictions"][:, :-1][known[:, :-1]], logits.argmax(-1)[:, :-1][known[:, :-1]]
    )
    assert found.texts is None


# -- what it refuses -----------------------------------------------------------------------------


def refused(folder: Path | str, auto_class: str = "AutoModelForCausalLM", **options) -> MMError:
    with pytest.raises(MMError) as found, torch.device("meta"):
        PretrainedTask(str(folder), auto_class, **options)
    return found.value


def test_folders_that_hold_no_model(folders, tmp_path):
    fault = refused(tmp_path / "absent")
    assert isinstance(fault, CheckpointError) and fault.what == "this folder does not exist"
    assert fault.hint.endswith("set task.from_pretrained: DIR")
    cached = Path(HF_HUB_CACHE, "models--org--model/snapshots/main")
    assert refused(cached).where == "hub:org/model"
    with pytest.raises(CheckpointError, match="hub:org/model: it is not in the cache"):
        open_tokenizer(str(cached))
    assert refused(tmp_path).what == "this folder contains no config.json"
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    assert "Transformers cannot read config.json" in refused(tmp_path).what


def test_a_folder_of_another_kind_of_model(folders):
    fault = refused(folders("bert_classes"), "AutoModelForImageTextToText")
    assert fault.what == (
        "AutoModelForImageTextToText cannot build this folder's model, which is of type 'bert'"
    )
    assert fault.accepted.endswith("or its own class: BertForSequenceClassification")
    fault = refused(folders("bert_classes"), "transformers:Qwen3ForCausalLM")
    assert fault.what.startswith("Qwen3ForCausalLM cannot build this folder's model")


def test_classes_that_there_are_not(folders):
    bert = folders("bert_classes")
    fault = refused(bert, "AutoModelForSequenceClasification")
    assert fault.what == "Transformers has no auto class 'AutoModelForSequenceClasification'"
    assert "AutoModelForSequenceClassification" in fault.accepted
    fault = refused(bert, "json:JSONDecoder")
    assert fault.what == "'json:JSONDecoder' is not a Transformers model"
    assert fault.accepted == "a subclass of transformers.PreTrainedModel"
    assert "cannot be imported: No module named 'nowhere'" in refused(bert, "nowhere:Model").what
    assert "AutoModel" in refused(bert, "AutoTokenizer").accepted
    with pytest.raises(ConfigError, match="neither an auto class of Transformers, e"):
        load_config(models.run_config("bert_classes", bert, bert.parent, task={"auto_class": "bert"}))


def test_options_that_do_not_fit_the_model(folders):
    bert, head = folders("bert_classes"), "AutoModelForSequenceClassification"
    fault = refused(bert, head, overrides={"hidden_droput_prob": 0.1})
    assert fault.what == "the model's config.json has no key 'hidden_droput_prob'"
    assert "hidden_dropout_prob" in fault.accepted
    fault = refused(bert, head, loss="chunked")
    assert fault.what.startswith("a chunked loss needs an output embedding, and BertForSequence")
    fault = refused(bert, head, new_modules=("model.clasifier",))
    assert isinstance(fault, PlanError) and "'model.classifier'" in fault.accepted
    fault = refused(bert, head, attn_implementation="quadratic")
    assert "BertForSequenceClassification" in fault.what or "quadratic" in fault.what
    fault = refused(bert, "AutoModel")
    assert fault.what == "BertModel computes no loss: its forward has no argument `labels`"


def test_batches_that_the_model_cannot_take(folders):
    task = task_of(folders("bert_classes"), "bert_classes")
    count = task.batch_transform()
    key = SampleKey(0, 0)
    with pytest.raises(
        ContractError, match="the dataset makes a Batch, but the task `pretrained` takes a Text"
    ):
        count(Batch([key], torch.ones(1), ["a"]))
    batch = models.batch_of(TokenRows("classes"), range(2))
    labels = batch.inputs.pop("labels")
    with pytest.raises(ContractError, match="contain no `labels`, so there is nothing to train on"):
        count(batch)
    batch.inputs["labels"] = labels
    assert task.weight(count(batch)) == 2
    batch.inputs["token_type_ids"] = torch.zeros_like(batch.inputs["input_ids"])
    with pytest.raises(ContractError, match="only some contain token_type_ids") as found:
        task.weight(count(batch))
    assert "the same names in every batch" in str(found.value)
    batch.inputs["labels"] = torch.tensor([1, 3])
    with pytest.raises(ContractError, match="a row's class is 3, but the model has 3 classes") as found:
        count(batch)
    assert found.value.accepted == "classes from 0 to 2" and "task.labels" in found.value.hint


def test_a_key_that_a_part_of_the_config_does_not_have_is_refused(folders):
    vision, head = folders("qwen3_vl"), "AutoModelForImageTextToText"
    fault = refused(vision, head, overrides={"text_config": {"atention_dropout": 0.1}})
    assert fault.what == "the model's config.json has no key 'atention_dropout'"
    assert fault.where == "task.overrides.text_config" and "attention_dropout" in fault.accepted
    with torch.device("meta"):
        task = PretrainedTask(str(vision), head, overrides={"text_config": {"attention_dropout": 0.1}})
    assert task.model.config.text_config.attention_dropout == 0.1


def class_batch(labels: torch.Tensor, ids: torch.Tensor, pad: int = 0) -> TextBatch:
    """Rows of a classifier; `pad` is what their tokenizer fills them up with."""
    keys = [SampleKey(0, place) for place in range(len(ids))]
    inputs = {"input_ids": ids, "attention_mask": (ids != pad).long(), "labels": labels}
    return TextBatch(keys, torch.ones(len(ids)), ["a"] * len(ids), inputs)


CLASSES = torch.tensor([0, 1])
TOO_MUCH = [
    (
        torch.full((2, 40), 7),
        torch.tensor([0, 1]),
        "a batch is 40 tokens long, but the model has only 32 positions",
    ),
    (
        torch.full((2, 4), 48),
        torch.tensor([0, 1]),
        "a row contains token 48, but the model's tokens are 0 to 47",
    ),
    (torch.full((2, 4), 7), torch.tensor([0.5, 1]), "the labels are numbers, but the model has 3 classes"),
]


@pytest.mark.parametrize(("ids", "labels", "sentence"), TOO_MUCH)
def test_rows_that_a_model_cannot_take_are_refused_where_they_are_read(folders, ids, labels, sentence):
    task = task_of(folders("bert_classes"), "bert_classes")
    with pytest.raises(ContractError, match=sentence) as found:
        task.batch_transform()(class_batch(labels, ids))
    assert found.value.hint


def test_a_class_a_row_is_nothing_for_a_model_that_estimates_a_number(folders):
    task = task_of(folders("bert_numbers"), "bert_numbers")
    rows = torch.full((2, 4), 7)
    with pytest.raises(ContractError, match="the labels are classes, but the model has one output") as found:
        task.batch_transform()(class_batch(CLASSES, rows))
    assert "label_type: number" in found.value.accepted and "num_labels" in found.value.hint
    assert task.weight(task.batch_transform()(class_batch(CLASSES.float(), rows))) == 2


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"num_labels": 5}, "num_labels is 5, but labels lists 3; remove num_labels"),
        ({"id2label": {0: "a"}}, "labels already sets the names of the classes; remove id2label"),
    ],
)
def test_an_override_that_contradicts_the_labels_is_refused(folders, overrides, sentence):
    bert = folders("bert_classes")
    given = {"labels": ["x", "y", "z"], "overrides": overrides}
    with pytest.raises(ConfigError, match=sentence):
        load_config(models.run_config("bert_classes", bert, bert.parent, task=given))
    load_config(models.run_config("bert_classes", bert, bert.parent, task={**given, "overrides": {}}))


def test_a_class_a_row_is_nothing_for_a_model_of_tokens(folders):
    task = task_of(folders("qwen3"), "qwen3")
    with pytest.raises(
        ContractError, match="the data have one label for each row, but the model needs one for"
    ):
        task.batch_transform()(class_batch(CLASSES, torch.full((2, 4), 7)))


def test_a_tokenizer_may_pad_with_another_token_than_the_model(folders):
    """Qwen classifies a row by its last token that is not the model's own padding."""
    task = task_of(folders("qwen3_classes"), "qwen3_classes")
    alone = loss_of(task, class_batch(torch.tensor([1]), torch.tensor([[5, 6, 7]]), pad=2)).total
    rows = torch.tensor([[5, 6, 7, 2, 2], [5, 6, 7, 8, 9]])
    other = loss_of(task, class_batch(torch.tensor([2]), rows[1:], pad=2)).total
    both = loss_of(task, class_batch(torch.tensor([1, 2]), rows, pad=2)).total
    torch.testing.assert_close(both, alone + other, rtol=1e-6, atol=0)


def test_a_classifier_without_a_padding_token_has_a_hint_how_to_name_one(folders):
    options = {"overrides": {"pad_token_id": None}}
    task = task_of(folders("qwen3_classes"), "qwen3_classes", **options)
    batch = class_batch(torch.tensor([1, 0]), torch.tensor([[5, 6, 2], [7, 8, 9]]), pad=2)
    with pytest.raises(ContractError, match="sets no pad_token_id") as found:
        task.batch_transform()(batch)
    assert "task.overrides: {pad_token_id: 2}" in found.value.hint
    even = class_batch(torch.tensor([1, 0]), torch.tensor([[5, 6], [7, 8]]))
    with pytest.raises(ContractError, match="Cannot handle batch sizes > 1 if no padding token is defined"):
        loss_of(task, even)


def test_it_makes_no_clips(folders):
    task = task_of(folders("bert_classes"), "bert_classes")
    for ask in (task.sample, task.check_request):
        with pytest.raises(ContractError, match="PretrainedTask makes no clips"):
            ask(SampleRequest(("a cat",)))


def test_a_term_beside_the_labels_loss_is_refused(folders):
    options = {**models.QWEN, **models.ENDS, "num_experts": 3, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**options, moe_intermediate_size=12, output_router_logits=True)
    config.save_pretrained(mixture := folders("qwen3").parent / "mixture")
    batch = models.batch_of(TokenRows("tokens"), range(3))
    task = task_of(mixture, "qwen3", weights="random")
    with pytest.raises(ContractError, match="it scales the loss of its labels or adds a term") as found:
        loss_of(task, batch)
    assert "task.overrides: {output_router_logits: false}" in str(found.value)
    task = task_of(mixture, "qwen3", weights="random", overrides={"output_router_logits": False})
    assert loss_of(task, batch).total > 0


OWN_LOSSES = """
import torch
from torch.nn import functional
from transformers import BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput


class Weighted(BertForSequenceClassification):
    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = super().forward(input_ids, attention_mask).logits
        return SequenceClassifierOutput(loss=self.of(logits, labels), logits=logits)

    def of(self, logits, labels):
        return functional.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))


class Twice(Weighted):
    def of(self, logits, labels):
        return functional.cross_entropy(logits, labels) + functional.cross_entropy(logits, labels)


class Hinge(Weighted):
    def of(self, logits, labels):
        return functional.multi_margin_loss(logits, labels)


class Chosen(Weighted):
    def of(self, logits, labels):
        return functional.cross_entropy(logits[labels > 0], labels[labels > 0])


class Silent(Weighted):
    def of(self, logits, labels):
        return None
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Weighted", "its cross_entropy uses class weights"),
        ("Twice", "it computes several losses from the labels"),
        ("Hinge", "its loss is not cross entropy, squared error or absolute error"),
        ("Chosen", "it drops labels before the loss, so they cannot be assigned to rows"),
        ("Silent", "it computes no loss from `labels`"),
    ],
)
def test_losses_that_are_no_sums_are_refused_with_the_reason(name, why, folders, tmp_path, monkeypatch):
    (tmp_path / "own_losses.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    with torch.device("meta"):
        task = PretrainedTask(str(folders("bert_classes")), f"own_losses:{name}")
    task.model.to_empty(device="cpu")
    initialise(task.model, "model", Randomness(1))
    with pytest.raises(ContractError) as found:
        loss_of(task, models.batch_of(TokenRows("classes"), range(4)))
    assert found.value.what.startswith("the model's loss cannot be made a sum over the global batch: ")
    assert why in found.value.what


# -- code in a folder ----------------------------------------------------------------------------

REMOTE = """
from transformers import BertConfig, BertForSequenceClassification


class OwnConfig(BertConfig):
    model_type = "own_bert"


class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""


def test_code_of_a_folder_runs_only_where_the_config_allows_it(folders, tmp_path, monkeypatch):
    from mm_core.config.dump import to_mapping

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(REMOTE)
    document = json.loads((folders("bert_classes") / "config.json").read_text())
    document["model_type"] = "own_bert"
    document["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForSequenceClassification": "modeling_own.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps(document))
    fault = refused(folder, "AutoModelForSequenceClassification")
    assert (
        fault.what
        == "the model needs Python files of its folder, which are not executed without your permission"
    )
    assert fault.hint == "read these files; if you trust them, set task.trust_remote_code: true"
    with warnings.catch_warnings(record=True) as told, torch.device("meta"):
        warnings.simplefilter("always")
        task = PretrainedTask(str(folder), "AutoModelForSequenceClassification", trust_remote_code=True)
    assert type(task.model).__name__ == "OwnModel"
    assert any(
        f"trust_remote_code is on: Python files in {folder} are executed" in str(w.message) for w in told
    )
    path = models.run_config("bert_classes", folder, tmp_path, task={"trust_remote_code": True})
    assert to_mapping(load_config(path))["task"]["trust_remote_code"] is True
    # What is exported is loaded in the same way, and by the same files.
    form = Transformers()
    assert form.companions(task, []).copies == {"modeling_own.py": folder / "modeling_own.py"}
    loading = form.layout("model", task.model).loading
    assert loading.startswith("from transformers import AutoModelForSequenceClassification\n")
    assert 'from_pretrained("{folder}", trust_remote_code=True)' in loading


def test_an_export_of_randomly_initialised_weights_has_the_tokenizer_too(folders, tmp_path):
    folder = models.save_model("bert_classes", tmp_path)
    models.save_words(folder)
    with torch.device("meta"):
        task = PretrainedTask(str(folder), models.MODELS["bert_classes"][3], weights="random")
    copies = Transformers().companions(task, []).copies
    assert copies == {name: folder / name for name in ("tokenizer.json", "tokenizer_config.json")}


@pytest.mark.parametrize("text", ["raise SystemExit(0)", "raise RuntimeError('no such chip')", "1 / 0"])
def test_a_module_that_ends_the_process_or_fails_is_a_readable_error(tmp_path, monkeypatch, text):
    (tmp_path / "own_failing.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ContractError, match="'own_failing:Model' cannot be imported: "):
        pretrained_model._class_of("own_failing:Model")
