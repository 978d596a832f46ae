"""YAML of LLaMA-Factory and JSON of TrainingArguments: exactly what they become."""

import json
import re

import pytest
import yaml
from mm_trainers.language import LlamaFactory, TrainingArguments

from mm_core.cli.main import main
from mm_core.config.load import load_config
from mm_core.contracts import TrainingFacts
from mm_core.errors import ConfigError
from mm_core.interchange import to_yaml

SFT = {
    "model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "dataset": "chats",
    "output_dir": "saves/chats",
    "bf16": True,
}
INFO = {
    "chats": {"file_name": "chats.json", "formatting": "sharegpt"},
    "more": {"file_name": "more.jsonl", "formatting": "sharegpt"},
    "alpaca": {"file_name": "alpaca.json"},
    "far": {"hf_hub_url": "org/far"},
}


@pytest.fixture
def sft(written):
    def write(**changed):
        written("data/dataset_info.json", json.dumps(INFO))
        keys = {key: value for key, value in {**SFT, **changed}.items() if value is not None}
        return written("sft.yaml", yaml.safe_dump(keys))

    return write


def migrated(file, tool=LlamaFactory):
    (run,) = tool().migrate([file])
    return run


ARGUMENTS = {
    "engine.type": "fsdp2",
    "task.type": "pretrained",
    "data.train.type": "conversations",
    "data.loader.drop_last": False,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 8,
    "train.epochs": 3.0,
    "train.clip_grad_norm": 1.0,
    "train.decay_norms_and_biases": False,
    "optimizer.type": "adamw",
    "optimizer.lr": 5e-5,
    "optimizer.weight_decay": 0.0,
    "optimizer.betas.0": 0.9,
    "optimizer.betas.1": 0.999,
    "lr_schedule.type": "linear",
    "checkpoint.every": 500,
    "log.every": 500,
    "run.seed": 42,
}
VLM = {
    **ARGUMENTS,
    "run.name": "chats",
    "run.dir": "saves",
    "task.from_pretrained": "hub:Qwen/Qwen3-VL-4B-Instruct",
    "task.auto_class": "AutoModelForImageTextToText",
    "data.train.sources.0.annotations": "data/chats.json",
    "data.train.sources.0.folder": "data",
    "data.train.max_length": 2048,
    "train.base_dtype": "bf16",
    "train.adapters.0.targets": "auto",
    "train.adapters.0.exclude": ["model.model.visual"],
    "train.adapters.0.rank": 8,
    "train.adapters.0.alpha": 16.0,
    "engine.param_dtype": "bf16",
    "engine.recompute_modules": "auto",
}


def test_a_small_run_has_the_defaults_of_the_tool_and_alpha_of_twice_the_rank(sft, lists):
    run = migrated(sft())
    taken, dropped, differs = lists(run)
    assert (taken, [*dropped], [*differs]) == (VLM, ["do_train", "chats.formatting"], ["image_max_pixels"])
    assert run.lines["train.adapters.0.alpha"].note == "absent, twice the rank; ours is the rank"
    assert any("times the ranks" in each for each in run.todo)


def test_a_whole_model_of_text_with_steps_and_warm_up(sft, lists):
    changed = {
        **{"model_name_or_path": "Qwen/Qwen3-4B", "finetuning_type": "full", "max_steps": 100},
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "warmup_ratio": 0.1},
        **{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        **{
            "neat_packing": True,
            "packing": True,
            "report_to": "wandb",
            "save_total_limit": 2,
            "lora_rank": 4,
        },
    }
    taken, dropped, differs = lists(migrated(sft(**changed)))
    told = {"do_train", "lora_rank", "chats.formatting"}
    assert (dropped.keys(), differs) == (told, {})
    changes = {key: value for key, value in taken.items() if VLM.get(key, "absent") != value}
    assert changes == {
        "task.from_pretrained": "hub:Qwen/Qwen3-4B",
        "task.auto_class": "AutoModelForCausalLM",
        "train.micro_batch_size": 2,
        "train.steps": 100,
        "lr_schedule.type": "cosine",
        "lr_schedule.min_lr": pytest.approx(5e-6),
        "lr_schedule.warmup_fraction": 0.1,
        "data.train.packing": True,
        "log.trackers": ["wandb"],
        "checkpoint.keep": 2,
    }
    assert taken["train.global_batch_size"] == 8  # of one rank
    gone = {key for key in VLM if key not in taken}
    assert gone == {key for key in VLM if "adapters" in key} | {"train.epochs", "train.base_dtype"}


def test_a_switch_that_is_written_at_its_default_leaves_the_default_of_the_tool(sft, lists):
    keys = {"disable_gradient_checkpointing": False, "neat_packing": True, "packing": False}
    taken, _, _ = lists(migrated(sft(**keys, eval_dataset="more")))
    assert taken["engine.recompute_modules"] == "auto"
    assert taken["data.train.packing"] is taken["data.validation.packing"] is True


def test_adapters_quantised_bases_and_frozen_parts(sft, lists):
    lora = {"lora_rank": 4, "lora_target": "q_proj,v_proj", "use_dora": True, "loraplus_lr_ratio": 16.0}
    taken, _, _ = lists(migrated(sft(**lora)))
    adapter = {key.rpartition(".")[2]: value for key, value in taken.items() if "adapters" in key}
    assert adapter == {
        **{"targets": ["q_proj", "v_proj"], "rank": 4, "alpha": 8.0, "dora": True, "b_lr_scale": 16.0},
        "exclude": ["model.model.visual"],
    }
    taken, _, _ = lists(migrated(sft(quantization_bit=4, quantization_method="bnb")))
    assert taken["train.base_dtype"] == "nf4"
    taken, _, _ = lists(migrated(sft(finetuning_type="full", freeze_multi_modal_projector=False)))
    assert taken["train.freeze"] == ["model.model.visual.patch_embed", "model.model.visual.blocks"]
    llava = {"model_name_or_path": "llava-hf/llava-1.5-7b-hf", "finetuning_type": "full"}
    taken, _, _ = lists(migrated(sft(**llava)))
    assert taken["train.freeze"] == ["model.model.vision_tower", "model.model.multi_modal_projector"]


def test_every_key_of_a_data_set_is_read_or_told(sft, written, lists):
    file = sft()
    usual = {"columns": {"messages": "messages", "images": "images"}, "tags": {"role_tag": "role"}}
    written("data/dataset_info.json", json.dumps({"chats": {**INFO["chats"], "split": "train", **usual}}))
    run = migrated(file)
    _, dropped, differs = lists(run)
    assert differs.keys() == {"image_max_pixels", "chats.split"}
    assert {key for key in dropped if key.startswith("chats.")} == {
        *("chats.formatting", "chats.columns.messages", "chats.columns.images", "chats.tags.role_tag"),
    }
    assert run.lines["data.train.sources.0.annotations"].place == "dataset_info.json:1 chats.file_name"
    odd = {"num_samples": 9, "hf_hub_url": "org/x", "ranking": True, "colour": "blue"}
    odd |= {"columns": {"messages": "talk", "chosen": "good"}, "tags": {"user_tag": "me"}}
    written("data/dataset_info.json", json.dumps({"chats": {**INFO["chats"], **odd, "formatting": "alpaca"}}))
    _, _, differs = lists(migrated(file))
    assert {key.removeprefix("chats.") for key in differs} == {
        *("image_max_pixels", "formatting", "num_samples", "hf_hub_url", "ranking", "colour"),
        *("columns.messages", "columns.chosen", "tags.user_tag"),
    }


def test_data_sets_are_found_by_the_file_that_describes_them(sft, lists):
    changed = {"dataset": "chats, alpaca,far", "eval_dataset": "more", "eval_steps": 50, "max_samples": 9}
    taken, _, differs = lists(migrated(sft(**changed, default_system="Be brief.")))
    sources = {key: value for key, value in taken.items() if key.endswith(".annotations")}
    assert sources == {
        "data.train.sources.0.annotations": "data/chats.json",
        "data.train.sources.1.annotations": "data/alpaca.json",
        "data.train.sources.2.annotations": "data/far.json",
        "data.validation.sources.0.annotations": "data/more.jsonl",
    }
    assert (taken["data.validation.system"], taken["validation.every"]) == ("Be brief.", 50)
    assert differs.keys() == {"image_max_pixels", "max_samples", "alpaca", "far", "far.hf_hub_url"}
    assert "write them as messages" in differs["alpaca"]
    run = migrated(sft(dataset_dir="elsewhere"))
    assert any("elsewhere/dataset_info.json is not there" in each for each in run.todo)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"colour": "blue"}, "colour"),
        ({"use_galore": True}, "use_galore"),
        ({"packing": True}, "packing"),
        ({"val_size": 0.1}, "val_size"),
        ({"train_on_prompt": True}, "train_on_prompt"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ({"additional_target": "embed_tokens"}, "additional_target"),
        ({"quantization_bit": 2}, "quantization_bit"),
        ({"optim": "adafactor"}, "optim"),
        ({"save_steps": 0.1}, "save_steps"),
        ({"freeze_multi_modal_projector": False}, "freeze_multi_modal_projector"),
        ({"deepspeed": "absent.json"}, "deepspeed"),
    ],
)
def test_what_has_no_counterpart_is_in_the_third_list(sft, lists, changed, key):
    assert lists(migrated(sft(**changed)))[2].keys() == {"image_max_pixels", key}


def test_other_stages_and_the_newer_configuration_are_one_sentence(sft, written):
    with pytest.raises(ConfigError, match="the stage 'dpo' has no counterpart here"):
        migrated(sft(stage="dpo"))
    newer = written("v1.yaml", "model: Qwen/Qwen3-4B\ntrain_dataset: data.yaml\n")
    with pytest.raises(ConfigError, match=re.escape("the newer configuration of LLaMA-Factory (v1)")):
        migrated(newer)


def test_every_default_argument_of_transformers_is_known(written, lists):
    transformers = pytest.importorskip("transformers")
    given = transformers.TrainingArguments(output_dir="out/chats", report_to=[]).to_dict()
    run = migrated(written("arguments.json", json.dumps(given)), TrainingArguments)
    taken, _, differs = lists(run)
    assert differs == {}
    assert {key: taken[key] for key in ARGUMENTS} == ARGUMENTS
    assert [each.partition(":")[0] for each in run.todo[:2]] == ["task", "data.train"]


def test_a_json_of_deepspeed_becomes_the_engine_as_it_is(written, lists):
    stage = written("ds.json", json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}))
    keys = {"output_dir": "out/a", "num_train_epochs": 1, "gradient_checkpointing": True, "bf16": True}
    keys |= {"model_name_or_path": "Qwen/Qwen3-4B", "warmup_steps": 10, "lr_scheduler_type": "cosine"}
    named = written("arguments.json", json.dumps({**keys, "deepspeed": "ds.json"}))
    alone = written("alone.json", json.dumps(keys))
    for paths in ([named], [alone, stage]):
        (run,) = TrainingArguments().migrate(paths)
        taken, dropped, differs = lists(run)
        assert differs == {}
        engine = {key: value for key, value in taken.items() if key.startswith("engine.")}
        assert engine.keys() == {"engine.type", "engine.config"}
        assert engine["engine.type"] == "deepspeed"
        assert dropped.keys() == {"bf16", "gradient_checkpointing"}
        assert taken["lr_schedule.warmup_steps"] == 10 and "task.loss" not in taken
    for number, loss in ((1, None), (3, "plain")):  # stage 3 alone needs it
        settings = {"zero_optimization": {"stage": number}}
        inner = written("inner.json", json.dumps({**keys, "deepspeed": settings}))
        taken, _, _ = lists(migrated(inner, TrainingArguments))
        assert (taken["engine.settings"], taken.get("task.loss")) == (settings, loss)


def test_the_command_migrates_a_run_of_a_local_model_and_plans_it(sft, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model("qwen3", **sizes, intermediate_size=64, vocab_size=128)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path / "qwen3")
    assert main(["migrate", str(sft(model_name_or_path="qwen3")), "--out", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "a run of LLaMA-Factory (chats)" in out
    assert "plan of run 'chats': 1 rank" in out
    text = (tmp_path / "run.yaml").read_text()
    assert "alpha: 16.0  # default of the tool for lora_alpha: absent, twice the rank" in text


_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "zero_optimization": {"stage": 2},
}
_NO_CLIPPING = {key: value for key, value in _AUTO.items() if key != "gradient_clipping"}
_WARMUP = dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")


@pytest.mark.parametrize(
    ("sections", "dtype", "lr_schedule"),
    [
        ({}, "fp32", {"type": "linear", "warmup_steps": 10}),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": _WARMUP}},
            "bf16",
            {
                "type": "warmup_decay",
                "warmup_steps": 10,
                "warmup_type": "log",
                "min_lr": 0.0,
                "warmup_init": 0.0,
            },
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupLR",
                    "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4, "warmup_type": "linear"},
                },
                "train_batch_size": 16,
            },
            "fp16",
            {"type": "constant", "warmup_steps": 4, "warmup_type": "linear", "warmup_init": 0.0},
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {"total_num_steps": 100, "warmup_num_steps": 4},
                }
            },
            "fp32",
            {"type": "cosine", "warmup_steps": 4, "warmup_type": "log", "min_lr": 3e-8, "warmup_init": 0.0},
        ),
    ],
)
def test_sections_of_deepspeeds_json_count_as_in_transformers(written, lists, sections, dtype, lr_schedule):
    """What the engine gets agrees with the config, on two ranks; `auto` of a dtype is the arguments'."""
    completed = pytest.importorskip("mm_deepspeed.settings").completed
    written("ds.json", json.dumps({**_AUTO, **sections}))
    keys = {"output_dir": "out/a", "max_steps": 100, "per_device_train_batch_size": 4, "warmup_steps": 10}
    keys |= {
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "bf16": dtype == "bf16",
    }
    keys |= {"fp16": dtype == "fp16", "deepspeed": "ds.json", "model_name_or_path": "Qwen/Qwen3-4B"}
    run = migrated(written("arguments.json", json.dumps(keys)), TrainingArguments)
    taken, _, differs = lists(run)
    assert differs == {}
    given = {key.removeprefix("lr_schedule."): taken[key] for key in taken if key.startswith("lr_schedule.")}
    assert given == pytest.approx(lr_schedule)
    assert taken["train.global_batch_size"] == sections.get("train_batch_size", 8)
    assert any("train.global_batch_size" in each for each in run.todo) == ("train_batch_size" not in sections)
    assert taken["train.decay_norms_and_biases"], "DeepSpeed's own optimizer decays all"
    config = load_config(written("run.yaml", to_yaml(run)))
    micro = config.train.micro_batch_size
    facts = TrainingFacts(
        *(100, micro, 16 // micro // 2, 2, config.train.clip_grad_norm),
        *(config.optimizer, config.lr_schedule),
    )
    result = completed(config.engine.options["settings"], facts)
    assert {kind: result[kind]["enabled"] for kind in ("bf16", "fp16")} == {
        kind: dtype == kind for kind in ("bf16", "fp16")
    }


def test_a_scheduler_without_a_counterpart_is_in_the_third_list(written, lists):
    written("ds.json", json.dumps({**_AUTO, "scheduler": {"type": "OneCycle", "params": {}}}))
    keys = {"output_dir": "out/a", "num_train_epochs": 1, "deepspeed": "ds.json", "model_name_or_path": "a/b"}
    (differs,) = lists(migrated(written("arguments.json", json.dumps(keys)), TrainingArguments))[2]
    assert differs == "scheduler.type OneCycle"


def test_what_is_absent_in_deepspeeds_json_is_its_default_and_auto_is_the_arguments(written, lists):
    keys = {"output_dir": "out/a", "num_train_epochs": 1, "warmup_ratio": 0.1, "learning_rate": 3e-4}
    keys |= {"deepspeed": "ds.json", "model_name_or_path": "a/b", "lr_scheduler_type": "cosine"}
    arguments = written("arguments.json", json.dumps(keys))

    def migrated_with(params):
        scheduler = {"type": "WarmupDecayLR", "params": params}
        written("ds.json", json.dumps({**_NO_CLIPPING, "scheduler": scheduler}))
        return lists(migrated(arguments, TrainingArguments))

    taken, dropped, differs = migrated_with(_WARMUP)
    assert taken["lr_schedule.warmup_fraction"] == 0.1 and "lr_schedule.warmup_steps" not in taken
    assert taken["train.clip_grad_norm"] is None and not differs and "warmup_ratio" not in dropped
    taken, _, differs = migrated_with({"warmup_type": "linear"})
    assert taken["lr_schedule.warmup_steps"] == 1000 and taken["lr_schedule.warmup_type"] == "linear"
    assert differs.keys() == {"warmup_max_lr"}
