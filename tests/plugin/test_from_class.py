"""`mm plugins new --from-class`: plugins around users' own models and datasets."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from mm_core.cli.main import main
from mm_core.contracts import Randomness, fill_as_built
from mm_core.errors import ContractError
from mm_core.modules.initialise import initialise
from mm_core.plugin.registry import get_registry
from mm_core.plugin.scaffold.own_class import read_class
from support.pages import blocks
from support.sites import Site, clear_cache

OWN = Path(__file__).with_name("own_classes")
PAGE = Path(__file__).parents[2] / "docs/writing-a-dit.md"
DIT, CLIPS = f"{OWN}/custom_dit.py:CustomDiT", f"{OWN}/clip_folder.py:ClipFolder"
SMALL: dict[str, Any] = {
    **{"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3, "text_dim": 5, "freq_dim": 8},
    **{"ffn_dim": 16, "num_layers": 2, "max_tokens": 64},
}
MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self{init}): super().__init__()
    def forward(self, {forward}): {body}
"""
DATA = """
class Clips:
    def __init__(self): ...
    def __len__(self): return 3
    def __getitem__(self, i):
        {body}
"""


@pytest.fixture
def new(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch):
    """Writes `my-dit` around classes, installs it, and returns a module of its package; raises its faults."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def write(*classes: str, module: str = "predictor") -> Any:
        given = [word for each in classes for word in ("--from-class", each)]
        assert main(["plugins", "new", "my-dit", *given]) == 0
        (site.folder / "my_dit").symlink_to(tmp_path / "here/my-dit/my_dit")
        site.add("my-dit", {"my_dit": "my_dit.plugin"})
        clear_cache()
        return importlib.import_module(f"my_dit.{module}")

    return write


@pytest.fixture
def source(tmp_path: Path):
    """Writes a file of the user's and returns the name of a class in it."""

    def write(text: str, name: str = "Net", file: str = "mine.py") -> str:
        (tmp_path / file).write_text(text)
        return f"{tmp_path / file}:{name}"

    return write


def clips(folder: Path, count: int = 6) -> Path:
    """A folder of real clips of 10 frames of 16x16, and their captions."""
    folder.mkdir()
    rows = []
    for number in range(count):
        frames = np.full((10, 16, 16, 3), 10 * number, np.uint8)
        frames[:, :, number : number + 8] = 220
        rows.append({"file": f"{number}.mp4", "caption": f"a bar at {number}"})
        _video(folder / f"{number}.mp4", frames)
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


def _video(file: Path, frames: np.ndarray) -> None:
    av = pytest.importorskip("av")
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def edit(file: Path, *changes: tuple[str, str]) -> None:
    text = file.read_text()
    for old, fresh in changes:
        assert old in text, old
        text = text.replace(old, fresh)
    file.write_text(text)


# -- what is written -------------------------------------------------------------------------------


def test_a_package_holds_the_user_s_files_as_they_are_and_keeps_the_contract(new, capsys):
    new(DIT, CLIPS)
    for name in ("custom_dit.py", "clip_folder.py"):
        assert Path("my-dit/my_dit", name).read_bytes() == (OWN / name).read_bytes()
    capsys.readouterr()
    assert main(["plugins", "check", "--import"]) == 0, capsys.readouterr().out
    assert main(["validate", "my-dit/my_dit/configs/predictor.yaml"]) == 0
    assert main(["validate", "my-dit/my_dit/configs/dataset.yaml"]) == 1
    assert "data.train.root: found nothing (null)" in capsys.readouterr().err


def test_each_line_that_is_marked_is_listed_with_its_place(new, capsys):
    new(DIT, CLIPS)
    out = capsys.readouterr().out.splitlines()
    start = out.index("first look at what the source of your class does not show:") + 1
    listed = [line.strip().split(": ", 1) for line in out[start : out.index("next:")]]
    for place, text in listed:
        file, _, number = place.rpartition(":")
        assert f"CHECK: {text}" in Path(file).read_text().splitlines()[int(number) - 1]
    files = [file for file in Path("my-dit").rglob("*") if file.suffix in (".py", ".yaml")]
    written = [line for file in files for line in file.read_text().splitlines()]
    assert len(listed) == sum("CHECK: " in line for line in written) == 11
    assert any("act is no key and keeps its default: no YAML value is nn.SiLU" in text for _, text in listed)


def test_the_constructor_s_arguments_are_keys_with_types_defaults_and_comments(new):
    new(DIT)
    (found,) = (each for each in get_registry().components("predictor") if each.namespace == "my_dit")
    fields = {field.name: field for field in found.config_class().__dataclass_fields__.values()}
    assert "act" not in fields and fields["patch_size"].default == (1, 2, 2)
    assert (fields["num_layers"].type, fields["num_layers"].metadata["doc"]) == (int, "blocks")
    assert fields["max_tokens"].type is int and fields["text_tokens"].default == 512


def test_nothing_of_the_file_is_run(new, source, tmp_path):
    text = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nraise SystemExit\n"
    named = source(text + MODEL.format(init="", forward="x, t, context", body="return x"))
    with pytest.raises(SystemExit):
        new(named)  # it is the import of the new package that runs it
    (tmp_path / "ran").unlink()
    assert read_class(named, ()).name == "Net" and not (tmp_path / "ran").exists()


# -- models ----------------------------------------------------------------------------------------


def test_the_adapter_predicts_what_the_class_does_when_called_by_hand(new):
    adapter = new(DIT).CustomDiTPredictor(**SMALL, text_tokens=6)
    bare = importlib.import_module("my_dit.custom_dit").CustomDiT(**SMALL)
    bare.load_state_dict(adapter.model.state_dict())
    rng = Randomness(3)
    latents, text = rng.normal((2, 3, 2, 4, 4), "latents"), rng.normal((2, 6, 5), "text")
    mask = torch.tensor([[True] * 6, [True, True, False, False, False, False]])
    text, time = text * mask[..., None], torch.tensor([998.7, 12.5])
    wanted = bare(latents, time, text, return_dict=False)[0]
    assert torch.equal(adapter(latents, time, text, mask), wanted) and wanted.std() > 0.001
    assert adapter.text_padding == ("fixed", 6) and adapter.patch_size == (1, 2, 2)
    assert (adapter.in_channels, adapter.out_channels, adapter.text_dim) == (3, 3, 5)


def test_weights_start_as_the_class_s_constructor_sets_them(new):
    module = new(DIT)
    with torch.device("meta"):
        made = module.CustomDiTPredictor(**SMALL).to_empty(device="cpu")
    initialise(made, "predictor", Randomness(5))  # which refuses tensors that are left unset
    torch.manual_seed(0)
    made.init_weights()
    torch.manual_seed(0)
    bare = module.CustomDiT(**SMALL)
    tensors = [*bare.named_parameters(), *bare.named_buffers()]
    assert len(tensors) > 40 and "positions" in dict(tensors)
    for name, tensor in tensors:
        filled = made.get_parameter if tensor.requires_grad else made.get_buffer
        assert torch.equal(filled(f"model.{name}"), tensor), name


def test_plain_tensors_are_filled_too():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.freqs = torch.arange(4) / 2

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Rotary())
    module.to_empty(device="cpu")
    fill_as_built(module, lambda: nn.Sequential(nn.Linear(2, 2), Rotary()))
    assert module[1].freqs.tolist() == [0, 0.5, 1, 1.5] and module[0].weight.abs().max() < 1


@pytest.mark.parametrize(
    ("forward", "lines", "padding"),
    [
        ("x, t, context", ["x=latents,", "t=timestep,", "context=text,"], '("fixed", text_tokens)'),
        ("sample, timesteps, prompt_embeds, *, flag=3", ["sample=latents,", "# flag=3,"], "fixed"),
        ("x, t, y, y_lens", ["y=text,", "y_lens=None,  # CHECK: a required argument whose name"], "fixed"),
        ("x, t, context, context_mask=None", ["context_mask=text_mask,  # CHECK: bool [B,L]"], None),
        (
            "x: list[int], t, context: List[int]",
            ["x=[*latents],", "[row[:n] for row, n in zip(text,", "return torch.stack([*predicted]).to("],
            None,
        ),
        ("hidden_states, timestep, guidance=None", ["guidance=guidance,", "name of the text's states"], None),
        ("a, b, c", ["name of the latents: pass latents to one", "a=None,  # CHECK"], None),
    ],
)
def test_forward_s_arguments_are_mapped_by_their_names(new, source, forward, lines, padding):
    text = "from typing import List\n" + MODEL.format(init="", forward=forward, body="return x")
    module = new(source(text))
    written = Path(module.__file__).read_text()
    assert [line for line in lines if line not in written] == []
    assert ("text_padding" in written) == (padding is not None) and (padding or "") in written


def test_captions_without_padding_reach_a_class_that_takes_lists(new, source):
    body = "return x + torch.stack([row.sum() for row in context])[:, None, None, None, None]"
    text = "import torch\n" + MODEL.format(init="", forward="x, t, context: list[torch.Tensor]", body=body)
    adapter = new(source(text)).NetPredictor()
    latents, states = torch.zeros(2, 1, 1, 1, 1), torch.ones(2, 4, 3)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    found = adapter(latents, torch.zeros(2), states, mask, text_lengths=[4, 1])
    assert found.flatten().tolist() == [12, 3] and adapter.text_padding == "masked"


@pytest.mark.parametrize(
    ("init", "lines"),
    [
        (", config: DictConfig", ["config,  # CHECK: a value of the YAML arrives here: make a DictConfig"]),
        (", size: Tuple[int, int], of: Optional[int] = None", ["from typing import Optional, Tuple\n"]),
        (
            ", rate: 'of the noise' = 0.5, act: nn.Module = None",
            ["rate: float = 0.5,", "# CHECK: act is no key"],
        ),
        (", dim=4, **kwargs", ["# CHECK: Net also takes *args or **kwargs", "dim: int = 4,"]),
        (", dim, patch_size=2", ["dim,  # as in Net", "(1, patch_size, patch_size)  # CHECK: latents"]),
        (", patch_size=2, patch_size_t=None", ["(patch_size_t or 1, patch_size, patch_size)\n"]),
        ("", ["self.in_channels = 16  # CHECK: channels", "self.text_dim = 4096  # CHECK: width"]),
    ],
)
def test_arguments_of_the_constructor_that_no_yaml_has_are_marked(new, source, init, lines):
    text = "from __future__ import annotations\n"
    text += MODEL.format(init=init, forward="x, t, context", body="return x")
    written = Path(new(source(text)).__file__).read_text()
    assert [line for line in lines if line not in written] == []


def test_files_that_a_relative_import_names_are_copied_and_others_noted(new, source, tmp_path):
    (tmp_path / "blocks.py").write_text("from .deeper import WIDTH\n")
    (tmp_path / "deeper.py").write_text("WIDTH = 7\n")
    (tmp_path / "beside.py").write_text("")
    text = "from .blocks import WIDTH\n" + MODEL.format(init="", forward="x, t, y", body="return x")
    module = new(source(text, file="predictor.py"))  # a name that the package itself needs
    assert importlib.import_module("my_dit.own_predictor").WIDTH == 7
    assert module.Net.__module__ == "my_dit.own_predictor"
    named = source("import beside\nfrom ..up import a\nfrom .predictor import Net\n" + text, file="more.py")
    assert read_class(named, ("predictor",)).notes == (
        "it imports beside, which is beside your file: copy it into this folder, and import .beside",
        "it imports ..up, which is not copied: copy it yourself",
        "it imports .predictor, which is not copied: copy it yourself",
    )


# -- datasets --------------------------------------------------------------------------------------


def test_a_dataset_gives_pixels_captions_and_the_same_random_choices_for_an_epoch(new, tmp_path):
    dataset = new(CLIPS, module="dataset").ClipFolderClips(str(clips(tmp_path / "clips")), num_frames=4)
    assert len(dataset) == 6
    one, again, other = (dataset.sample_at(1, Randomness(seed)) for seed in (0, 0, 1))
    assert one["pixels"].shape == (3, 4, 16, 16) and one["pixels"].dtype == torch.float32
    assert (one["caption"], one["id"], one["fps"]) == ("a bar at 1", "1.mp4", 8.0)
    assert torch.equal(one["pixels"], again["pixels"]) and -1 <= one["pixels"].min() < -0.7
    own = importlib.import_module("my_dit.clip_folder").ClipFolder(str(tmp_path / "clips"), 10)
    assert torch.allclose(dataset.data[1]["video"][:, 0], own[1]["video"][:, 0], atol=0.1)
    assert other["pixels"].shape == one["pixels"].shape


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("return video, caption", ["sample[0], LAYOUT", "sample[1],", "(0.0, 255.0)"]),
        (
            "return prompt, x.permute(0, 3, 1, 2) / 255.0",
            ["sample[1], LAYOUT, RANGE),  # CHECK", "sample[0],", 'LAYOUT = "f c y x"', "(0.0, 1.0)"],
        ),
        (
            "return a(), b()",
            ["sample[0], LAYOUT, RANGE),  # CHECK", "sample[1],  # CHECK: the place of the ca"],
        ),
        (
            "return dict(frames=a, prompt=b, fps=c, id=d)",
            ['sample["frames"]', 'sample["prompt"]', 'float(sample["fps"])', 'str(sample["id"])'],
        ),
        ("return self.rows[i]", ['"caption": sample["caption"],  # CHECK: the key of the caption; those of']),
        (
            "x = 2.0 * a - 1\n        return {'a': x, 'text': b}",
            ['sample["pixel_values"]', "are a, text", "(-1.0, 1.0)"],
        ),
    ],
)
def test_a_sample_s_parts_are_found_by_their_names(new, source, body, lines):
    written = Path(new(source(DATA.format(body=body), "Clips"), module="dataset").__file__).read_text()
    assert [line for line in lines if line not in written] == []


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named", "words"),
    [
        ("class CustomDit: ...", "mine.py:CustomDiT", ["no class 'CustomDiT'", "did you mean 'CustomDit'"]),
        ("x = (\n", "mine.py:Net", ["mine.py:1: this is not Python"]),
        (None, "mine.py:Net", ["mine.py cannot be read", "check the path"]),
        ("class Net: ...", "mine.py", ["'mine.py' names no class", "model.py:CustomDiT"]),
        ("class Net(Base):\n    pass", "mine.py:Net", ["neither forward nor __getitem__", "imported base"]),
        (
            "class Net:\n    def forward(self, *args): ...",
            "mine.py:Net",
            ["mine.py:2: forward of Net has no argument with a name", "forward(self, hidden_states"],
        ),
    ],
)
def test_what_cannot_be_read_is_a_readable_error_and_leaves_nothing(
    text, named, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("mine.py").write_text(text)
    assert main(["plugins", "new", "my-dit", "--from-class", named]) == 1
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == [], error
    assert not Path("my-dit").exists()


@pytest.mark.parametrize("other", [["--from-class", DIT], ["--from-diffusers", "WanTransformer3DModel"]])
def test_two_models_are_refused_and_a_kind_that_a_class_has_is_not_made_twice(other, new, capsys):
    assert main(["plugins", "new", "two", "--from-class", DIT, *other]) == 1
    assert "custom_dit.py:CustomDiT is a second predictor" in capsys.readouterr().err
    assert not Path("two").exists()
    assert (
        main(["plugins", "new", "two", "--kind", "predictor", "--kind", "metric", "--from-class", DIT]) == 0
    )
    assert Path("two/two/custom_dit.py").is_file() and Path("two/two/metric.py").is_file()


def test_a_wrong_layout_and_a_wrong_range_are_named_with_the_first_clip(new, source):
    body = "return {'video': torch.rand(4, 3, 8, 8), 'text': 'x'}"
    dataset = new(source("import torch\n" + DATA.format(body=body), "Clips"), module="dataset")
    assert dataset.ClipsClips()[0]["pixels"].shape == (3, 4, 8, 8)
    dataset.LAYOUT = "c f y x"
    with pytest.raises(ContractError, match=r"a clip is \[4, 3, 8, 8\]: in the layout 'c f y x', no 3"):
        dataset.ClipsClips()[0]
    dataset.LAYOUT, dataset.RANGE = "f c y x", (0.6, 0.7)
    with pytest.raises(ContractError, match=r"a clip has values from 0.* to 0.9"):
        dataset.ClipsClips()[0]


# -- training --------------------------------------------------------------------------------------


def page_lines() -> list[str]:
    """The commands of the page's section."""
    return next(block for block in blocks(PAGE) if block.language == "bash").text.splitlines()


def test_the_page_s_command_writes_what_its_run_names(new):
    command, install, train = (shlex.split(line) for line in page_lines())
    new(
        *(
            word.replace("model.py:CustomDiT", DIT).replace("clips.py:ClipFolder", CLIPS)
            for word in command[5::2]
        )
    )
    assert command[:4] == ["mm", "plugins", "new", "my-dit"] and {*command[4::2]} == {"--from-class"}
    assert install[-1] == "./my-dit" and Path(install[-1]).is_dir() and Path(train[2]).is_file()


@pytest.mark.slow
def test_both_train_on_two_ranks_as_on_one_after_the_lines_that_are_marked(new, tmp_path, mm, site):
    new(DIT, CLIPS)
    folder = clips(tmp_path / "clips", 16)
    command = shlex.split(page_lines()[-1])
    edit(Path(command[2]), ("root: # CHECK: a value that the class requires", f"root: {folder}"))
    bare = importlib.import_module("my_dit.custom_dit").CustomDiT
    fields = yaml.safe_load(Path(command[2]).read_text())["task"]["predictor"]
    del fields["type"], fields["text_tokens"]
    torch.save(bare(**fields).state_dict(), tmp_path / "own.pt")
    given = f'init_from: {{path: {tmp_path}/own.pt, prefixes: {{"": predictor.model}}}}'
    edit(Path(command[2]), ("optimizer:", f"{given}\noptimizer:"))
    losses = {}
    for ranks in (1, int(command[4])):
        run = f"run.dir={tmp_path}/runs{ranks}"
        done = mm(
            *("train", *command[1:4], ranks, command[5], "data.loader.workers=2", run),
            PYTHONPATH=str(site.folder),
            cwd=Path.cwd(),
        )  # fmt: skip
        assert done.code == 0, done.err
        (log,) = Path(f"{tmp_path}/runs{ranks}").rglob("metrics.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        losses[ranks] = [row["loss"] for row in rows if "loss" in row]
    assert len(losses[2]) == 5 and losses[2][-1] < losses[2][0]
    assert losses[1] == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.slow
def test_the_predictor_passes_the_checks_of_its_kind(new, capsys):
    new(DIT)
    capsys.readouterr()
    assert main(["plugins", "test", "my-dit"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_class_of_a_migrated_run_trains_on_two_ranks(new, tmp_path, mm, site):
    """A run of MindSpeed-MM with a predictor of the user's own, registered there as `mydit`."""
    from folders import CLIPS as DATA_FILE
    from folders import WAN, changed, write
    from mm_wan.testing import make_tiny_checkpoint

    new(DIT)
    make_tiny_checkpoint(tmp_path / "Wan")
    folder = clips(tmp_path / "clips", 8)
    rows = [{"path": path.name, "cap": f"clip {path.stem}"} for path in sorted(Path(folder).glob("*.mp4"))]
    (tmp_path / "clips.json").write_text(json.dumps(rows))
    model = {"predictor.model_id": "mydit", "ae.from_pretrained": f"{tmp_path}/Wan/vae"}
    model |= {"text_encoder.from_pretrained": f"{tmp_path}/Wan/text_encoder", "text_encoder.dtype": "fp32"}
    paths = {"data_path": f"{tmp_path}/clips.json", "data_folder": f"{folder}"}
    sizes = {"num_frames": 5, "max_height": 16, "max_width": 16}
    data = {"basic_parameters": paths, "preprocess_parameters": sizes}
    data["tokenizer_config"] = {"from_pretrained": f"{tmp_path}/Wan/tokenizer"}
    flags = {"train-iters": 5, "lr": 1e-3, "num-workers": 1}
    engine = {"sharding_size": "auto", "param_dtype": "fp32"}
    write(
        tmp_path / "theirs",
        changed(WAN, model),
        {"dataset_param": {**DATA_FILE["dataset_param"], **data}},
        flags,
        engine,
    )
    done = mm("migrate", tmp_path / "theirs", "--out", "run.yaml")
    assert done.code == 1 and "mm plugins new NAME --from-class FILE:CLASS" in done.out, done.err
    document = yaml.safe_load(Path("run.yaml").read_text())
    own = {**SMALL, "in_channels": 16, "text_dim": 32, "text_tokens": 32}
    document["task"]["predictor"] = {"type": "my_dit/my_dit", **own}
    document["task"]["text_encoder"]["max_length"] = 32
    Path("own.yaml").write_text(yaml.safe_dump(document))
    done = mm("train", "--config", "own.yaml", "--nproc", 2, PYTHONPATH=str(site.folder), cwd=Path.cwd())
    assert done.code == 0, done.err
    (log,) = Path().rglob("metrics.jsonl")
    losses = [row["loss"] for row in map(json.loads, log.read_text().splitlines()) if "loss" in row]
    assert len(losses) == 5 and losses[-1] < losses[0]
