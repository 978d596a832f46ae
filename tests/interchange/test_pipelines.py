"""Pipelines in and out, and components in several folders: complete and loadable, or one error."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from mm_core.checkpoint.reading import load_model_only, open_checkpoint
from mm_core.cli.main import main
from mm_core.errors import CheckpointError, ContractError, MMError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from mm_core.interchange.inspect import contents, differences
from mm_core.weights import Layout
from mm_core.weights.formats.format import divided, of_component
from mm_core.weights.formats.libraries import Diffusers, pipeline_parts
from support import out_pipelines, runs, warm
from support.tensors import same, stored

FILE = "diffusion_pytorch_model.safetensors"
OTHERS = {"model_index.json", "scheduler", "text_encoder", "tokenizer", "vae"}


def make_pipeline() -> LTXPipeline:
    torch.manual_seed(5)
    names = ["<pad>", "</s>", "<unk>", "a", "red", "circle"]
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    encoder = T5EncoderModel(T5Config(vocab_size=6, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    vae = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1,) * 4,
        timestep_conditioning=False, patch_size=1, patch_size_t=1, decoder_causal=False,
    )  # fmt: skip
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=encoder.eval(),
        tokenizer=tokenizer,
        transformer=out_pipelines.transformer().eval(),
    )


@pytest.fixture(scope="module")
def saved_pipeline(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "ltx"
    make_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def origin(saved_pipeline, tmp_path) -> Path:
    """A copy that a test may damage."""
    import shutil

    return Path(shutil.copytree(saved_pipeline, tmp_path / "ltx"))


@pytest.fixture
def pair(saved_pipeline, tmp_path) -> Path:
    """A pipeline's folder with two transformers of one shape."""
    folder = tmp_path / "pair"
    torch.manual_seed(6)
    for name in ("transformer", "transformer_2"):
        out_pipelines.transformer().save_pretrained(folder / name)
    (folder / "scheduler").mkdir()
    (folder / "scheduler/scheduler_config.json").write_text("{}")
    kinds = {key: ["diffusers", "LTXVideoTransformer3DModel"] for key in ("transformer", "transformer_2")}
    kinds["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "PairPipeline", **kinds}))
    return folder


def config_of(folder: Path, task: dict, name: str = "tuned", **sections):
    return runs.config_of(folder, task, name, plugin=out_pipelines.__file__, **sections)


LTX, EXPERTS = {"type": "local/ltx"}, {"type": "local/experts"}


def after_training(config, saved: Path, part: str) -> torch.nn.Module:
    """With the facts that training records."""
    return runs.moved(config, saved, part, imported=open_checkpoint(saved).facts["imported"])


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def latents(pipeline: LTXPipeline) -> torch.Tensor:
    """Two steps from fixed noise."""
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 8 * 8 * 2, 8, generator=torch.Generator().manual_seed(2))
    return pipeline(
        "a red circle", num_frames=5, height=32, width=32, num_inference_steps=2, latents=noise,
        output_type="latent", max_sequence_length=8, guidance_scale=2.0,
    ).frames  # fmt: skip


def nothing_at(out: Path) -> bool:
    return not out.exists() and not [p for p in out.parent.iterdir() if ".tmp-" in p.name]


# -- pipelines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [".", "transformer", f"transformer/{FILE}"])
def test_a_run_that_began_with_a_pipeline_is_written_as_one(given, origin, tmp_path):
    """Whether the pipeline, its transformer's folder or a file in that was given."""
    import_weights(config_of(tmp_path, LTX), origin / given)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "diffusers")
    held, taken = contents_of(origin), contents_of(out)
    assert {Path(name).parts[0] for name in taken} == OTHERS | {"transformer", "README.md"}
    for name in held:
        if not name.startswith("transformer/"):
            assert taken[name] == held[name], name
    same(stored(out / "transformer"), stored(origin / "transformer"))
    assert torch.equal(
        latents(LTXPipeline.from_pretrained(out)), latents(LTXPipeline.from_pretrained(origin))
    )
    assert 'pipeline = LTXPipeline.from_pretrained("out")' in (out / "README.md").read_text()


def test_a_pipeline_that_was_trained_samples_as_the_run_does(origin, tmp_path):
    config = config_of(tmp_path, LTX)
    saved, _ = import_weights(config, origin)
    task = after_training(config, saved, "to_q")
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "diffusers")
    trained = LTXPipeline.from_pretrained(out)
    same(dict(trained.transformer.state_dict()), dict(task.predictor.inner.state_dict()))
    plain = LTXPipeline.from_pretrained(origin)
    before = latents(plain)
    plain.transformer.load_state_dict(task.predictor.inner.state_dict())
    assert torch.equal(latents(trained), latents(plain))
    assert not torch.equal(latents(plain), before)


def test_a_pipeline_is_found_through_the_run_that_began_with_it(origin, tmp_path):
    config = config_of(tmp_path, LTX)
    saved, _ = import_weights(config, origin)
    after_training(config, saved, "to_q")
    second = config_of(tmp_path, LTX, "second")
    import_weights(second, tmp_path / "runs/tuned")
    out = export(tmp_path / "runs/second", tmp_path / "out", "diffusers")
    assert LTXPipeline.from_pretrained(out).vae is not None
    same(
        stored(out / "transformer"),
        stored(export(tmp_path / "runs/tuned", tmp_path / "o", "diffusers") / "transformer"),
    )


def test_without_a_pipeline_it_is_a_lone_model_and_any_can_be_named(origin, tmp_path):
    lone = tmp_path / "lone"
    (origin / "transformer").rename(lone)
    import_weights(config_of(tmp_path, LTX), lone)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "diffusers")
    assert set(contents_of(out)) == {"README.md", "config.json", FILE}
    assert 'model = LTXVideoTransformer3DModel.from_pretrained("out")' in (out / "README.md").read_text()
    with pytest.raises(MMError) as caught:
        export(tmp_path / "runs/tuned", tmp_path / "o", "diffusers", pipeline=lone)
    assert str(caught.value) == (
        f"--pipeline: {lone}: this pipeline has no component for the weights that the run trained"
        " (format core/diffusers)\n"
        "  accepted: a folder whose model_index.json lists a model of the exported class\n"
        "  hint: pass the pipeline that the training started from"
    )
    whole = export(tmp_path / "runs/tuned", tmp_path / "whole", "diffusers", pipeline=origin)
    same(stored(whole / "transformer"), stored(lone))
    assert LTXPipeline.from_pretrained(whole).transformer is not None


def test_an_origin_that_is_gone_is_reported(origin, tmp_path, capsys):
    import_weights(config_of(tmp_path, LTX), origin)
    origin.rename(tmp_path / "elsewhere")
    command = ["export", "--run", str(tmp_path / "runs/tuned"), "--to", "diffusers", "--out"]
    assert main([*command, str(tmp_path / "alone")]) == 0
    said = f"mm: {origin}: the run started from this, but it is gone; only trained weights are written\n"
    assert said in capsys.readouterr().err
    assert set(contents_of(tmp_path / "alone")) == {"README.md", "config.json", FILE}
    assert main([*command, str(tmp_path / "whole"), "--pipeline", str(tmp_path / "elsewhere")]) == 0
    assert "gone" not in capsys.readouterr().err and (tmp_path / "whole/model_index.json").is_file()


def test_a_part_alone_is_no_pipeline(origin, tmp_path):
    task = {**LTX, "beside": True}
    init = {"path": "x", "include": ["predictor"]}
    with pytest.raises(
        CheckpointError, match="'predictor' and 'control' would both be read from transformer"
    ):
        import_weights(config_of(tmp_path, task), origin)
    import_weights(config_of(tmp_path, task, init_from=init), origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "diffusers", component="predictor")
    assert set(contents_of(out)) == {"README.md", "config.json", FILE}
    with pytest.raises(MMError, match="--pipeline needs an export of all weights that the run trains, but"):
        export(tmp_path / "runs/tuned", tmp_path / "o", "diffusers", component="control", pipeline=origin)
    assert nothing_at(tmp_path / "o")


# -- what is wrong with a pipeline -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["gone", "link", "pipe", "cut", "configs"])
def test_parts_that_cannot_be_taken_over_are_a_readable_error(what, origin, tmp_path):
    import_weights(config_of(tmp_path, LTX), origin)
    part = origin / "vae"
    if what == "cut":
        os.truncate(part / FILE, (part / FILE).stat().st_size - 10)
        said = f"vae/{FILE}: this is not a complete safetensors file: it is truncated"
    elif what == "configs":
        (part / FILE).unlink()
        said = "vae: weights of this part of the pipeline are missing"
    elif what == "gone":
        part.rename(tmp_path / "elsewhere")
        said = "the pipeline's folder lacks a file or folder that the export copies"
    else:
        (part / "config.json").unlink()
        if what == "link":
            (tmp_path / "secret").write_text("key")
            (part / "config.json").symlink_to(tmp_path / "secret")
        else:
            os.mkfifo(part / "config.json")
        said = "this is a link out of it, or not a file"
    with pytest.raises(CheckpointError, match=said):
        export(tmp_path / "runs/tuned", tmp_path / "out", "diffusers")
    assert nothing_at(tmp_path / "out")


def test_an_index_that_leads_elsewhere_is_not_followed(origin, tmp_path):
    (tmp_path / FILE).write_bytes((origin / "transformer" / FILE).read_bytes())
    index = json.loads((origin / "model_index.json").read_text())
    hostile = {"..": ["x", "Y"], "../../etc": ["x", "Y"], "/etc": ["x", "Y"], ".": ["x", "Y"], "": ["x", "Y"]}
    index |= hostile | {"tokenizer_2": [None, None], "odd": [], "_class_name": "X\n\nimport os"}
    (origin / "model_index.json").write_text(json.dumps(index))
    assert set(pipeline_parts(origin)) == OTHERS - {"model_index.json"} | {"transformer"}
    assert set(Diffusers().folders(origin)) == {"transformer", "vae", "text_encoder"}
    import_weights(config_of(tmp_path, LTX), origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "diffusers")
    assert {path.name for path in out.iterdir()} == OTHERS | {"transformer", "README.md"}
    card = (out / "README.md").read_text()
    assert "import os" not in card and 'DiffusionPipeline.from_pretrained("out")' in card


def test_a_file_that_may_not_grow_leaves_nothing_of_a_pipeline(origin, tmp_path):
    """As a full disk: the trained part fits, one that is copied does not."""
    import_weights(config_of(tmp_path, LTX), origin)
    trained = (origin / "transformer" / FILE).stat().st_size
    copied = (origin / "vae" / FILE).stat().st_size
    assert copied > trained + 5000
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (trained + 4000, limits[1]))
    try:
        with pytest.raises(MMError, match="was removed again: File too large"):
            export(tmp_path / "runs/tuned", tmp_path / "out", "diffusers")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert nothing_at(tmp_path / "out")


@pytest.mark.slow
def test_a_pipeline_that_is_killed_leaves_nothing_under_its_name(origin, tmp_path):
    """Killed while its other parts are copied; the next export removes the remains."""
    save_file({"large": torch.zeros(150_000_000)}, origin / "vae" / "large.safetensors")
    import_weights(config_of(tmp_path, LTX), origin)
    out = tmp_path / "out"
    script = Path(__file__).with_name("export_once.py")
    command = [sys.executable, str(script), str(tmp_path / "runs/tuned"), str(out), "diffusers"]
    process = warm.Process(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not (begun := [p for p in tmp_path.glob(".out.tmp-*") if (p / "vae/large.safetensors").exists()]):
        assert process.poll() is None, "it was killed too late"
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert (begun[0] / "transformer" / FILE).is_file() and not out.exists()
    export(tmp_path / "runs/tuned", out, "diffusers")
    assert not list(tmp_path.glob(".out.tmp-*"))
    assert LTXPipeline.from_pretrained(out).transformer is not None


# -- components in several folders -----------------------------------------------------------------


def test_a_component_in_two_folders_in_and_out(pair, tmp_path):
    saved, notes = import_weights(config_of(tmp_path, EXPERTS), pair)
    assert "(local/folders in transformer and transformer_2)" in notes[0]
    state = {f"predictor.{part}.{name}": torch.empty_like(t) for part, folder in out_pipelines.FOLDERS.items()
             for name, t in stored(pair / folder).items()}  # fmt: skip
    load_model_only(saved, state, "model")
    for part, folder in out_pipelines.FOLDERS.items():
        same({n.removeprefix(f"predictor.{part}."): t for n, t in state.items() if f".{part}." in n},
             stored(pair / folder))  # fmt: skip
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "folders")
    assert {path.name for path in out.iterdir()} == {
        "README.md", "model_index.json", "scheduler", "transformer", "transformer_2"
    }  # fmt: skip
    for name in ("transformer", "transformer_2"):
        same(stored(out / name), stored(pair / name))
        _, info = type(out_pipelines.transformer()).from_pretrained(out / name, output_loading_info=True)
        assert not any(info.values())
    assert differences(out, pair).none


def test_one_of_two_parts_in_its_place(pair, tmp_path):
    """A component with only one part; the other part of the pipeline is copied."""
    import_weights(config_of(tmp_path, {**EXPERTS, "parts": ["low"]}), pair)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "folders")
    for name in ("transformer", "transformer_2"):
        same(stored(out / name), stored(pair / name))


def test_one_folder_fills_the_part_that_it_is_called_after(pair, tmp_path):
    init = {"path": "x", "include": ["predictor.low"]}
    for given in (pair / "transformer_2", pair / "transformer_2" / FILE):
        name = f"from-{given.name[:5]}"
        saved, _ = import_weights(config_of(tmp_path, EXPERTS, name, init_from=init), given)
        held = stored(export(saved, tmp_path / f"{name}-out", "safetensors"))
        low = {name.removeprefix("low."): t for name, t in held.items() if name.startswith("low.")}
        same(low, stored(pair / "transformer_2"))
    with pytest.raises(CheckpointError) as caught:
        import_weights(config_of(tmp_path, EXPERTS, "both"), pair / "transformer_2")
    said = str(caught.value)
    assert "missing: predictor.high." in said and "predictor.low" not in said.partition("hint")[0]
    assert (
        "; there is no folder transformer\n" in said
        and "select the existing parts with init_from.include" in said
    )


def test_a_part_may_be_absent_where_the_format_declares_it(pair, tmp_path, monkeypatch):
    config = config_of(tmp_path, EXPERTS)
    index = json.loads((pair / "model_index.json").read_text())
    del index["transformer_2"]
    (pair / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"missing: predictor\.low.*there is no folder transformer_2"):
        import_weights(config, pair)
    plugin = next(m for n, m in sys.modules.items() if n.startswith("mm_local_") and n.endswith("_pipelines"))
    monkeypatch.setattr(plugin, "OPTIONAL", True)
    _, notes = import_weights(config, pair)
    assert "40 missing (predictor.low." in notes[0]
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "folders")
    same(stored(out / "transformer"), stored(pair / "transformer"))
    assert {p.name for p in out.iterdir()} >= {"transformer_2", "model_index.json"}


def test_what_is_wrong_in_any_folder_is_one_error(pair, tmp_path):
    config = config_of(tmp_path, EXPERTS)
    for name, gone in (("transformer", "proj_in.bias"), ("transformer_2", "proj_out.bias")):
        tensors = stored(pair / name)
        tensors["stray" if name == "transformer" else "odd"] = tensors.pop(gone)
        save_file(tensors, pair / name / FILE, {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        import_weights(config, pair)
    said = str(caught.value)
    assert "2 missing: predictor.high.proj_in.bias" in said and "predictor.low.proj_out.bias" in said
    assert "2 unexpected: transformer/stray, transformer_2/odd" in said
    shown = contents(pair, tmp_path / "tuned.yaml").fits
    assert shown == ("predictor (Around) by local/folders: 78 tensors; 2 missing, 2 unexpected",)
    os.truncate(pair / "transformer_2" / FILE, (pair / "transformer_2" / FILE).stat().st_size - 10)
    with pytest.raises(CheckpointError, match=r"transformer_2/.*this is not a complete safetensors file"):
        import_weights(config, pair)
    out_pipelines.transformer(num_layers=2).save_pretrained(pair / "transformer_2")
    with pytest.raises(
        CheckpointError, match=r"unexpected: transformer/stray, transformer_2/transformer_blocks\.1"
    ):
        import_weights(config, pair)
    assert not list((tmp_path / "runs").rglob("step_*"))


def test_two_folders_as_one_component_are_listed_and_compared(pair, tmp_path):
    import_weights(config_of(tmp_path, EXPERTS), pair)
    listed = contents(pair, tmp_path / "tuned.yaml")
    assert listed.fits == ("predictor (Around) by local/folders: yes, completely",)
    assert {tensor.name.partition("/")[0] for tensor in listed.tensors} == {"transformer", "transformer_2"}


def test_layouts_that_do_not_divide_a_component():
    names = ["high.a", "high.b.c", "low.a"]
    halves = [Layout(part="high", folder="1"), Layout(part="low", folder="2")]
    assert divided(of_component(halves), names) == [["high.a", "high.b.c"], ["low.a"]]
    assert [one.keys.prefix for one in of_component(halves)] == ["high.", "low."]
    with pytest.raises(
        ContractError, match=r"no layout of the weight format covers 'shared'\n  accepted: names "
    ):
        divided(of_component(halves), [*names, "shared"])
    for wrong in (
        [Layout(part="high", folder="1"), Layout(part="high.b", folder="2")],
        [Layout(folder="1"), Layout(part="high", folder="2")],
        [Layout(part="high", folder="1"), Layout(part="low", folder="1")],
    ):
        with pytest.raises(ContractError, match="the layouts of a weight format overlap: parts"):
            of_component(wrong)


# -- adapters of them ------------------------------------------------------------------------------

ADAPTER = {"targets": ["to_q", "to_v"], "rank": 3, "alpha": 6.0}


@pytest.mark.parametrize("parts", [("high", "low"), ("low",)])
def test_adapters_lie_in_a_file_for_each_part(parts, pair, tmp_path):
    targets = [f"predictor.{part}.transformer_blocks" for part in parts]
    train = {"epochs": 1, "adapters": [{**ADAPTER, "targets": targets}]}
    config = config_of(tmp_path, EXPERTS, train=train)
    saved, _ = import_weights(config, pair)
    task = after_training(config, saved, "lora_")
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "folders")
    file = "pytorch_lora_weights.safetensors"
    folders = {out_pipelines.FOLDERS[part]: part for part in parts}
    assert set(contents_of(out)) == {"README.md", *(f"{folder}/{file}" for folder in folders)}
    merged = export(tmp_path / "runs/tuned", tmp_path / "merged", "folders", merge_adapters=True)
    inputs = {
        "hidden_states": torch.randn(1, 8, 8), "encoder_hidden_states": torch.randn(1, 4, 32),
        "timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, 4),
        "num_frames": 2, "height": 2, "width": 2,
    }  # fmt: skip
    for folder, part in folders.items():
        model = type(out_pipelines.transformer()).from_pretrained(pair / folder)
        with torch.no_grad():
            plain = model(**inputs).sample
            model.load_lora_adapter(load_file(out / folder / file), prefix="transformer", alpha=None)
            mine = task.predictor.get_submodule(part)(**inputs).sample
            together = type(model).from_pretrained(merged / folder)(**inputs).sample
        assert (mine - plain).abs().max() > 1e-2
        assert (together - mine).abs().max() < 1e-5
    if len(parts) == 1:
        same(stored(merged / "transformer"), stored(pair / "transformer"))
    again = config_of(tmp_path, EXPERTS, "again", train={"epochs": 1, "adapters": [{"from": str(out)}]})
    import_weights(again, pair)
    back = export(tmp_path / "runs/again", tmp_path / "back", "folders")
    for folder in folders:
        same(stored(back / folder), stored(out / folder))


def test_a_file_that_fits_both_parts_is_refused_and_its_name_decides(pair, tmp_path):
    train = {"epochs": 1, "adapters": [{**ADAPTER, "targets": ["predictor.low.transformer_blocks"]}]}
    import_weights(config_of(tmp_path, EXPERTS, train=train), pair)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "folders")
    file = out / "transformer_2/pytorch_lora_weights.safetensors"
    plain = file.rename(tmp_path / "lora.safetensors")
    given = {"epochs": 1, "adapters": [{"from": str(plain)}]}
    with pytest.raises(CheckpointError) as caught:
        import_weights(config_of(tmp_path, EXPERTS, "odd", train=given), pair)
    assert "this adapter fits several components equally well: predictor.high, predictor.low\n" in str(
        caught.value
    )
    plain.rename(file)
    given = {"epochs": 1, "adapters": [{"from": str(file)}]}
    import_weights(config_of(tmp_path, EXPERTS, "named", train=given), pair)
    back = export(tmp_path / "runs/named", tmp_path / "back", "folders")
    assert set(contents_of(back)) == {"README.md", "transformer_2/pytorch_lora_weights.safetensors"}
