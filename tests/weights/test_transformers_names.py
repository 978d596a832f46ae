"""Transformers models whose files are laid out otherwise than they are in memory: as the library itself
writes and reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mm_core.errors import CheckpointError, ContractError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from mm_core.runtime.process_group import process_group
from mm_core.weights import open_stored
from mm_core.weights.fitting import fit
from mm_core.weights.formats.transformers_names import keys_as_loaded, keys_as_saved
from mm_core.weights.streaming import overlap, read_box, stream
from mm_core.weights.writing import assemble
from support.out_parts import model_of
from support.runs import language, published, trained
from support.tensors import close, same

FAMILIES = ("internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_moe", "mixtral", "qwen3_vl_moe")
FILE = "model.safetensors"
fifth = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="the library converts tensors from 5.0 on"
)


def shapes_of(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_by(keys, model, folder) -> dict[str, torch.Tensor]:
    """A model's tensors from a file by a map."""
    way = fit(keys, shapes_of(model), open_stored(folder))
    assert not way.missing and not way.misshapen and not way.unexpected
    found = {name: torch.full(shape, float("nan")) for name, shape in shapes_of(model).items()}
    stream(found, way.pieces)
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_in_and_out_is_what_the_library_wrote(kind, tmp_path):
    origin = published(tmp_path, kind)
    _, notes = import_weights(language(tmp_path, kind), origin)
    assert "(core/transformers)" in notes[0]
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    same(load_file(out / FILE), load_file(origin / FILE))
    library = type(model_of(kind))
    loaded, info = library.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    same(dict(loaded.state_dict()), dict(library.from_pretrained(origin).state_dict()))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, origin))
    assert {key: value for key, value in theirs.items() if ours.get(key) != value}.keys() <= {"dtype"}


@fifth
@pytest.mark.parametrize(
    ("kind", "here", "there", "shape"),
    [
        (
            "internvl",
            "model.vision_tower.encoder.layer.1.mlp.fc2.bias",
            "vision_tower.encoder.layer.1.mlp.fc2.bias",
            (16,),
        ),
        ("qwen2_5_vl", "model.language_model.norm.weight", "model.norm.weight", (16,)),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.gate_up_proj",
            "model.layers.1.mlp.experts.2.up_proj.weight",
            (12, 16),
        ),
        (
            "mixtral",
            "model.layers.0.mlp.experts.down_proj",
            "model.layers.0.block_sparse_moe.experts.0.w2.weight",
            (16, 24),
        ),
    ],
)
def test_names_in_memory_and_in_files(kind, here, there, shape):
    """Those of the published checkpoints, which versions before 5.0 can read."""
    with torch.device("meta"):
        model = model_of(kind)
    found = keys_as_saved(model, "lm.").copies({f"lm.{k}": s for k, s in shapes_of(model).items()})
    assert [c.stored_shape for c in found if (c.component, c.stored) == (f"lm.{here}", there)] == [shape]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "bert", "qwen3_vl"])
def test_what_is_stored_as_in_memory_needs_no_map(kind):
    assert not keys_as_saved(model_of(kind)).placed


@fifth
@pytest.mark.parametrize("kind", ["internvl", "qwen3_moe"])
def test_a_sharded_model_has_the_names_of_a_whole_one(kind):
    """FSDP2 changes a model's class, by which the library finds its rules."""
    with process_group(None):
        model = model_of(kind)
        wanted = keys_as_saved(model).copies(shapes_of(model))
        stored = SimpleNamespace(shapes={copy.stored: copy.stored_shape for copy in wanted})
        read = keys_as_loaded(model, stored).copies(shapes_of(model))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        sharded = type(model)
        assert keys_as_saved(model).copies(shapes_of(model)) == wanted
        assert keys_as_loaded(model, stored).copies(shapes_of(model)) == read
        assert type(model) is sharded


@fifth
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_any_box_of_experts_is_read_alone(kind, tmp_path):
    """Across experts, and across gate and up."""
    origin, model = published(tmp_path, kind), model_of(kind)
    theirs = type(model).from_pretrained(origin).state_dict()
    way = fit(keys_as_saved(model), shapes_of(model), open_stored(origin))
    draw = random.Random(0)
    for name in (name for name, tensor in theirs.items() if tensor.dim() == 3):
        for _ in range(20):
            ends = [sorted(draw.sample(range(size + 1), 2)) for size in theirs[name].shape]
            place = tuple(slice(*pair) for pair in ends)
            found = torch.full_like(theirs[name], float("nan"))
            for copy, held in way.pieces:
                if copy.component == name and (region := overlap(copy, place)) is not None:
                    found[region] = read_box(copy, held, region)
            assert torch.equal(found[place], theirs[name][place])
            assert int(found.isnan().logical_not().sum()) == theirs[name][place].numel()


def renamed(origin: Path, change) -> Path:
    """A folder with the same tensors under different names, or permuted."""
    tensors = load_file(origin / FILE)
    save_file(dict(change(name, tensor) for name, tensor in tensors.items()), origin / FILE)
    return origin


OTHERS = {
    "internvl": lambda n, t: (
        n.removeprefix("language_model.")
        if "lm_head" in n
        else f"model.{n.replace('language_model.model', 'language_model')}",
        t,
    ),
    "qwen2_5_vl": lambda n, t: (
        n.replace("model.", "model.language_model.", 1)
        if n.startswith("model.")
        else n.replace("visual.", "model.visual.", 1),
        t,
    ),
    "qwen3_vl_moe": lambda n, t: (n, t.transpose(1, 2).contiguous() if "experts" in n else t),
    "bert": lambda n, t: (
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        t,
    ),
}


@fifth
@pytest.mark.parametrize("kind", OTHERS)
def test_files_of_other_versions_are_read_as_the_library_reads_them(kind, tmp_path):
    """Names in memory; permuted experts, as published for Qwen3-VL-MoE; names from before 2019."""
    origin = published(tmp_path, kind)
    before = load_file(origin / FILE)
    folder = renamed(origin, OTHERS[kind])
    library, info = type(model_of(kind)).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    import_weights(language(tmp_path, kind), folder)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    written = load_file(out / FILE)
    same(written, before)
    same(dict(type(library).from_pretrained(out).state_dict()), dict(library.state_dict()))


@fifth
def test_a_file_that_fits_by_no_map_is_an_error_with_what_is_missing_in_it(tmp_path):
    origin = published(tmp_path, "qwen3_moe")
    tensors = load_file(origin / FILE)
    tensors["odd"] = tensors.pop("model.layers.0.mlp.experts.1.up_proj.weight")
    save_file(tensors, origin / FILE)
    with pytest.raises(CheckpointError) as caught:
        import_weights(language(tmp_path, "qwen3_moe"), origin)
    said = str(caught.value)
    assert "1 missing: lm.inner.model.layers.0.mlp.experts.gate_up_proj" in said
    assert "1 unexpected: odd" in said


@pytest.fixture
def rules(monkeypatch):
    """Registers rules for Qwen3 with the library, for one test."""
    conversions = pytest.importorskip("transformers.conversion_mapping")
    conversions.get_checkpoint_conversion_mapping("qwen3")

    def register(*given):
        table = conversions._checkpoint_conversion_mapping_cache
        monkeypatch.setitem(table, "qwen3", list(given))

    return register


@fifth
def test_rules_that_fuse_and_turn(rules, tmp_path):
    """Any family's: queries, keys and values in one, an output projection that is stored transposed."""
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter, WeightRenaming

    rules(
        WeightRenaming("transformer.h", "model.layers"),
        WeightConverter(
            "attn.kv.weight", ["self_attn.k_proj.weight", "self_attn.v_proj.weight"], operations=[Chunk(0)]
        ),
        WeightConverter("attn.o.weight", "self_attn.o_proj.weight", operations=[Transpose(0, 1)]),
    )
    origin, model = published(tmp_path, "qwen3"), model_of("qwen3")
    theirs = load_file(origin / FILE)
    assert theirs["transformer.h.0.attn.kv.weight"].shape == (16, 16)
    loaded = dict(type(model).from_pretrained(origin).state_dict())
    held: dict[str, list] = {}
    for copy in keys_as_saved(model).copies(shapes_of(model)):
        held.setdefault(copy.stored, []).append(copy)
    same({name: assemble(copies, loaded.__getitem__) for name, copies in held.items()}, theirs)
    same(read_by(keys_as_saved(model), model, origin), loaded)
    same(read_by(keys_as_loaded(model, open_stored(origin)), model, origin), loaded)


@fifth
def test_a_rule_that_no_map_can_follow_is_refused(rules, tmp_path):
    from transformers.core_model_loading import PermuteForRope, Transpose, WeightConverter

    rules(
        WeightConverter("attn.o.weight", "self_attn.o_proj.weight", operations=[Transpose(0, 1)]),
        WeightConverter("attn.q.weight", "self_attn.q_proj.weight", operations=[PermuteForRope()]),
    )
    model = model_of("qwen3")
    with pytest.raises(ContractError) as caught:
        keys_as_saved(model)
    said = str(caught.value)
    # Early versions cannot invert it at all, and fail before any tensor.
    assert said.splitlines()[0] in [
        f"Qwen3ForCausalLM changes tensors between memory and file by a conversion that {how}"
        for how in ("calls view", "has no inverse")
    ]
    assert "  accepted: conversions that rename, slice, join, stack or permute tensors\n" in said
    assert "  hint: use the format safetensors, which stores the names in memory" in said
    file = {n.replace("self_attn.q_proj", "attn.q"): t for n, t in model.state_dict().items()}
    save_file(file, tmp_path / FILE)
    with pytest.raises(ContractError, match="between memory and file by a conversion that"):
        keys_as_loaded(model, open_stored(tmp_path / FILE))
    # Such a model can still be trained and exported, with its names in memory.
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({f"inner.{name}": tensor for name, tensor in model.state_dict().items()}, plain / FILE)
    (plain / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    _, notes = import_weights(language(tmp_path, "qwen3"), plain)
    assert "(core/safetensors)" in notes[0]
    with pytest.raises(ContractError, match="between memory and file by a conversion that"):
        export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    assert not (tmp_path / "out").exists()
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "safetensors")
    same(load_file(out / FILE), load_file(plain / FILE))


def test_before_5_a_class_has_a_table_of_names(monkeypatch):
    """Qwen2.5-VL's of Transformers 4.57.1, whose names in memory are those of 5."""
    from mm_core.weights.formats import transformers_names

    model = model_of("qwen2_5_vl")
    table = {"^visual": "model.visual", r"^model(?!\.(language_model|visual))": "model.language_model"}
    monkeypatch.setattr(type(model), "_checkpoint_conversion_mapping", table, raising=False)
    monkeypatch.setattr("transformers.modeling_utils.VLMS", ["qwen2_5_vl"], raising=False)
    now = keys_as_saved(model)
    monkeypatch.setattr(transformers_names, "_loading_room", lambda: None)
    assert keys_as_saved(model).placed == now.placed
    monkeypatch.setattr("transformers.modeling_utils.VLMS", ["internvl"])
    assert not keys_as_saved(model).placed


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen2_5_vl", ["self_attn.q_proj", "visual.blocks.0.attn.qkv"]),
        ("internvl", ["language_model.layers.1.self_attn.v_proj", "fc1"]),
        ("qwen3_moe", ["q_proj", "o_proj"]),
    ],
)
def test_an_adapter_is_named_as_in_memory(kind, targets, tmp_path):
    """As PEFT, which wraps the modules of a loaded model, and Transformers by PEFT find them."""
    origin = published(tmp_path, kind)
    lora = {"targets": targets, "rank": 2, "alpha": 4.0}
    config = language(tmp_path, kind, train={"epochs": 1, "adapters": [lora]})
    task = trained(config, origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    merged = export(tmp_path / "runs/tuned", tmp_path / "merged", "transformers", merge_adapters=True)
    library = type(model_of(kind))
    ids = torch.arange(10, 22).reshape(2, 6)
    with torch.no_grad():
        ours = task.lm.inner.eval()(ids).logits
        plain = library.from_pretrained(origin).eval()
        assert (ours - plain(ids).logits).abs().max() > 1e-3
        close(library.from_pretrained(merged).eval()(ids).logits, ours)
        plain.load_adapter(str(out))
        close(plain(ids).logits, ours)
        model = PeftModel.from_pretrained(library.from_pretrained(origin), out).eval()
        close(model(ids).logits, ours)
    held = {name.removeprefix("base_model.model.") for name in load_file(out / "adapter_model.safetensors")}
    assert {name.partition(".lora_")[0] for name in held} <= {n for n, _ in task.lm.inner.named_modules()}
    assert load_file(merged / FILE).keys() == load_file(origin / FILE).keys()


@pytest.mark.slow
def test_show_and_diff(tmp_path, mm):
    origin = published(tmp_path, "qwen3_moe")
    config = language(tmp_path, "qwen3_moe")
    yaml = tmp_path / "tuned.yaml"
    shown = mm("weights", "show", origin, "--config", yaml)
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[-1] == "fits lm (Wrapped) by core/transformers: yes, completely"
    import_weights(config, origin)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    assert mm("weights", "diff", origin, out).code == 0
    tensors = load_file(out / FILE)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][0, 0] += 1
    save_file(tensors, out / FILE)
    differs = mm("weights", "diff", origin, out)
    assert differs.code == 1 and "model.layers.1.mlp.experts.2.up_proj.weight" in differs.out


@pytest.mark.slow
def test_two_ranks_cut_the_experts(tmp_path, mm):
    """Three experts over two ranks: each reads its own from the files."""
    origin = published(tmp_path, "qwen3_moe")
    language(tmp_path, "qwen3_moe")
    done = mm("import", "--from", origin, "--config", tmp_path / "tuned.yaml", "--nproc", 2)
    assert done.code == 0, done.err
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "transformers")
    same(load_file(out / FILE), load_file(origin / FILE))
