"""Runs of Transformers' models: trained, resumed, exported, and loaded by the library."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
import yaml

from support import pretrained_models as models
from support.logs import losses
from support.token_rows import TokenRows

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["qwen3_tied", "bert_classes", "qwen3_vl"])
def test_a_model_is_trained_resumed_and_goes_back_to_its_library(name, tmp_path, mm):
    folder = models.save_model(name, tmp_path)
    _, kind, _, auto_class, rows = models.MODELS[name]
    held_out = {"type": "token_rows", "kind": rows, "seed": 1, "rows": 7}
    path = models.run_config(name, folder, tmp_path, data={"validation": held_out}, validation={"every": 4})
    # Dropout is on where the model has some: a resume must draw the same.
    options = ["task.overrides={hidden_dropout_prob: 0.1}"] if name == "bert_classes" else []
    done = mm("train", "--config", path, "--nproc", 2, "--verify-resume", 2, *options)
    assert done.code == 0 and "bit-equal" in done.out, done.out + done.err
    done = mm("train", "--config", path, "--nproc", 2, *options)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / name
    done = mm("export", "--run", run, "--to", "transformers", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    trained = getattr(transformers, auto_class).from_pretrained(tmp_path / "out")
    assert type(trained).__name__ == kind
    before = getattr(transformers, auto_class).from_pretrained(folder).state_dict()
    moved = [n for n, tensor in trained.state_dict().items() if not torch.equal(tensor, before[n])]
    assert len(moved) > 0.9 * len(before)
    # What the run says of held-out rows is what the library says of the exported model.
    data = TokenRows(kind=rows, rows=7, seed=1)
    total = count = 0.0
    with torch.no_grad():
        for row in range(7):
            batch = models.batch_of(data, range(row, row + 1))
            labels = batch.inputs["labels"]
            weight = int((labels[:, 1:] != -100).sum()) if labels.dim() == 2 else 1
            total += float(trained.eval()(**batch.inputs).loss) * weight
            count += weight
    assert losses(run, "validation/loss")[-1] == pytest.approx(total / count, rel=1e-5)
    assert losses(run, "validation/rows")[-1] == 7


def test_only_an_adapter_is_trained_and_peft_loads_it(tmp_path, mm):
    from peft import PeftModel

    folder = models.save_model("qwen3_tied", tmp_path)
    path = models.run_config(
        "qwen3_tied",
        folder,
        tmp_path,
        train={"adapters": [{"targets": ["q_proj", "v_proj"], "rank": 4}]},
        optimizer={"lr": 1e-2},
    )
    done = mm("train", "--config", path, "--nproc", 2)
    assert done.code == 0, done.err
    run = tmp_path / "runs/qwen3_tied"
    for flag, out in (((), "adapter"), (("--merge-lora",), "merged")):
        to = ("--to", "transformers")
        done = mm("export", "--run", run, *to, "--out", tmp_path / out, *flag)
        assert done.code == 0, done.err
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    batch = models.batch_of(TokenRows(), range(4)).inputs
    with torch.no_grad():
        plain = base(**batch).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(**batch).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(**batch).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-5, atol=1e-5)
    assert (adapted - plain).abs().max() > 1e-3


def test_what_is_frozen_stays(tmp_path, mm):
    folder = models.save_model("bert_classes", tmp_path)
    path = models.run_config(
        "bert_classes", folder, tmp_path, train={"freeze": ["model.bert.encoder.layer.0"]}
    )
    assert mm("train", "--config", path).code == 0
    done = mm(
        "export", "--run", tmp_path / "runs/bert_classes", "--to", "transformers", "--out", tmp_path / "out"
    )
    assert done.code == 0, done.err
    before = transformers.AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    after = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(".layer.0." in name for name in changed)
    assert "bert.encoder.layer.1.output.dense.weight" in changed


@pytest.mark.parametrize(
    "name, task",
    [
        ("bert_masked", {"weights": "random"}),
        ("bert_classes", {"new_modules": ["model.classifier", "model.bert.pooler"]}),
    ],
)
def test_randomly_initialised_weights_do_not_depend_on_the_ranks(name, task, tmp_path, mm):
    """Rows of padding and tied tables included; the same in bf16 compute, and in the checkpoint of step 0.
    Also where files have all but new modules."""
    folder = models.save_model("bert_masked", tmp_path)
    found = []
    for ranks in (1, 2):
        path = models.run_config(
            name, folder, tmp_path, task=task, train={"steps": 0, "global_batch_size": 4}
        )
        here = f"run.dir={tmp_path / str(ranks)}"
        done = mm("train", "--config", path, "--nproc", ranks, here)
        assert done.code == 0, done.err
        run = tmp_path / str(ranks) / name
        assert mm("export", "--run", run, "--to", "transformers", "--out", tmp_path / f"out{ranks}").code == 0
        kind = getattr(transformers, models.MODELS[name][3])
        found.append(kind.from_pretrained(tmp_path / f"out{ranks}").state_dict())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    if task.get("weights") == "random":
        assert not found[0]["bert.embeddings.word_embeddings.weight"][0].any()
    else:
        assert found[0]["classifier.weight"].any()


def test_a_run_in_bf16_learns_and_is_not_stopped_by_chunks(tmp_path, mm):
    folder = models.save_model("qwen3_tied", tmp_path)
    path = models.run_config(
        "qwen3_tied",
        folder,
        tmp_path,
        task={"chunk_tokens": 7},
        engine={"param_dtype": "bf16", "recompute_modules": "auto"},
        train={"steps": 30, "overfit_one_batch": True},
        optimizer={"lr": 1e-2},
        checkpoint={"every": 30},
    )
    done = mm("train", "--config", path, "--nproc", 2)
    assert done.code == 0, done.err
    found = losses(tmp_path / "runs/qwen3_tied")
    assert found[-1] < 0.6 * found[0]


def test_the_manifest_lists_whose_code_has_run(tmp_path, mm):
    folder = models.save_model("bert_classes", tmp_path)
    path = models.run_config(
        "bert_classes", folder, tmp_path, task={"trust_remote_code": True}, train={"steps": 0}
    )
    done = mm("train", "--config", path)
    assert done.code == 0, done.err
    (told,) = (line for line in done.err.splitlines() if "trust_remote_code is on" in line)
    assert told == f"warning: task.trust_remote_code is on: Python files in {folder} are executed"
    manifest = json.loads((tmp_path / "runs/bert_classes/manifest.json").read_text())
    assert manifest["config"]["task"]["trust_remote_code"] is True
    written = yaml.safe_load((tmp_path / "runs/bert_classes/config.yaml").read_text())
    assert written["task"]["trust_remote_code"] is True


def test_an_output_embedding_that_is_gathered_alone_is_refused(tmp_path, mm):
    folder = models.save_model("qwen3", tmp_path)
    path = models.run_config(
        "qwen3", folder, tmp_path, engine={"sub_modules_to_wrap": ["model.lm_head", "model.model.layers.{*}"]}
    )
    done = mm("train", "--config", path)
    assert done.code != 0
    assert "engine.sub_modules_to_wrap: the output embedding is sharded as a module of its own" in done.err
    assert mm("train", "--config", path, "task.loss=plain").code == 0


def test_ranks_whose_batches_have_other_inputs_end_before_they_wait_for_one_another(tmp_path, mm):
    folder = models.save_model("bert_classes", tmp_path)
    data = {"train": {"type": "token_rows", "kind": "classes", "segments": True}}
    data["loader"] = {"workers": 0, "sampler": "sequential"}
    batches = {"micro_batch_size": 1, "global_batch_size": 2}
    path = models.run_config("bert_classes", folder, tmp_path, data=data, train=batches)
    done = mm("train", "--config", path, "--nproc", 2)
    sentence = "the batches of rank 0 and rank 1 have different inputs: only one rank has token_type_ids"
    assert done.code != 0 and sentence in done.err and "a blank image, for example" in done.err
