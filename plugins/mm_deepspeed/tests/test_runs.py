"""Real runs on two ranks: the losses are those of fsdp2, and a run changes its stage and its engine."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from mm_custom_dit.model import CustomDiT
from safetensors.torch import load_file, save_file

from support import warm
from support.checkpoints import tensors
from support.logs import losses
from support.ranks import environment
from support.runs import DIT, VIDEO

pytestmark = pytest.mark.slow

PROBED = Path(__file__).with_name("probed.py")
FSDP2 = ("engine={type: fsdp2}",)
SMALL = {"predictor": {"type": "custom_dit", **DIT, "num_layers": 1}}
JSON = """{ # a comment
  "zero_optimization": {"stage": 2}, "train_batch_size": "auto", "gradient_clipping": "auto"
}"""


def stage(number: int) -> tuple[str, str]:
    """What turns the YAML's engine into one of a stage that shows what it has loaded."""
    settings = f"{{zero_optimization: {{stage: {number}}}}}"
    return f"engine={{type: local/probed, settings: {settings}}}", f"plugins.path=[{PROBED}]"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a run on two ranks, with a JSON file: two micro-batches of two on each, and an average."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "ds.json").write_text(JSON, encoding="utf-8")
    document = {
        "run": {"name": "run", "seed": 1234},
        "task": {**VIDEO, **SMALL, "caption_dropout": 0.2},
        "data": {
            "train": {"type": "shapes", "num_frames": 8, "height": 16, "width": 16, "clips": 32},
            "loader": {"workers": 0},
        },
        "engine": {"type": "deepspeed", "config": str(folder / "ds.json")},
        "optimizer": {"type": "adamw", "lr": 2e-3},
        "lr_schedule": {"type": "constant"},
        "train": {"steps": 18, "micro_batch_size": 2, "global_batch_size": 8, "clip_grad_norm": 0.5},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": 3, "keep": 9},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def train(config: Path) -> Callable[..., Path]:
    """Trains in a folder to a step, on two ranks by default; returns the run."""

    def run(folder: Path, steps: int, *engine: str, ranks: int = 2) -> Path:
        words = ("train", "--config", config, "--nproc", ranks, f"run.dir={folder}", f"train.steps={steps}")
        probe = {"PROBE": str(folder / "loaded.pt")}
        own = environment(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", **probe)
        done = warm.mm(*words, *engine, env=own, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / "run"

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., Path]) -> Path:
    """Eighteen steps of fsdp2."""
    return train(tmp_path_factory.mktemp("whole"), 18, *FSDP2)


@pytest.fixture(scope="module")
def stage_2(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., Path]) -> Path:
    """Six steps of stage 2, by the JSON file."""
    return train(tmp_path_factory.mktemp("stage2"), 6)


def close(found: Path, wanted: Path) -> None:
    """Asserts that two checkpoints hold the same tensors to 1e-6."""
    one, other = tensors(found), tensors(wanted)
    assert {name: (t.shape, t.dtype) for name, t in one.items()} == {
        name: (t.shape, t.dtype) for name, t in other.items()
    }
    assert {"model", "optimizer", "ema"} == {name.split(".")[0] for name in one}
    far = {n: float((t - other[n]).norm()) / max(float(other[n].norm()), 1e-30) for n, t in one.items()}
    assert {name: distance for name, distance in far.items() if distance > 1e-6} == {}


def test_the_losses_of_stage_2_are_those_of_fsdp2(stage_2: Path, whole: Path) -> None:
    for key in ("loss", "grad_norm"):
        assert len(losses(stage_2, key)) == 6
        assert losses(stage_2, key) == pytest.approx(losses(whole, key)[:6], rel=1e-6, abs=1e-6)
    close(stage_2 / "checkpoints/step_00000006", whole / "checkpoints/step_00000006")


def test_a_run_changes_its_ranks_its_stage_and_its_engine(
    whole: Path, train: Callable[..., Path], tmp_path: Path
) -> None:
    """Three steps with each, resumed without --allow: together the eighteen steps of fsdp2 on two ranks.

    What a stage has loaded is the checkpoint bit for bit, from two ranks on one and from one on two.
    """
    run, before = Path(), None
    chain = ((stage(1), 2), (stage(2), 1), (stage(3), 2), (stage(3), 1), (FSDP2, 1), (stage(2), 2))
    for number, (engine, ranks) in enumerate(chain, 1):
        run = train(tmp_path, 3 * number, *engine, ranks=ranks)
        if before is not None and engine is not FSDP2:
            loaded = torch.load(tmp_path / "loaded.pt")
            saved = {name: t for name, t in before.items() if not name.startswith("ema.")}
            assert loaded.keys() == saved.keys()
            assert [name for name, tensor in saved.items() if not torch.equal(loaded[name], tensor)] == []
        before = tensors(run / f"checkpoints/step_{3 * number:08d}")
    assert losses(run) == pytest.approx(losses(whole), rel=1e-6, abs=1e-6)
    close(run / "checkpoints/step_00000018", whole / "checkpoints/step_00000018")


def test_an_adapter_is_the_one_of_fsdp2_and_resumes(train: Callable[..., Path], tmp_path: Path) -> None:
    """LoRA at stage 3: the same losses, files of the adapter and, resumed after two steps, bits."""
    lora = ("train.adapters=[{targets: [predictor], rank: 2}]",)
    runs = [
        train(tmp_path / "fsdp2", 3, *FSDP2, *lora, ranks=1),
        train(tmp_path / "zero", 3, *stage(3), *lora),
    ]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-6, abs=1e-6)
    close(*(run / "checkpoints/step_00000003" for run in runs))
    train(tmp_path, 4, *stage(3), *lora, "--verify-resume", "2", ranks=1)
    files = []
    for run in runs:
        words = ("export", "--run", run, "--to", "safetensors", "--out", run / "adapter", "--allow-code")
        done = warm.mm(*words, env=environment(), timeout=60)
        assert done.returncode == 0, done.stderr
        files.append(load_file(run / "adapter/adapter_model.safetensors"))
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [("train.adapters=[{targets: [predictor], dora: true}]",),
     ("train.adapters=[{targets: [predictor], kind: lokr}]",),
     ("train.adapters=[{targets: [predictor]}]", "train.base_dtype=nf4")],
    ids=["dora", "lokr", "nf4"],
)  # fmt: skip
def test_adapters_of_any_kind_and_a_quantised_base_train_at_stage_3(
    keys: tuple[str, ...], train: Callable[..., Path], tmp_path: Path
) -> None:
    """DoRA and LoKr read weights of layers whose forward they do not call; codes are no floats."""
    torch.manual_seed(0)
    made = CustomDiT(**{**DIT, "num_layers": 1}).state_dict()
    base = {f"predictor.{name}": torch.randn(t.shape) * 0.1 for name, t in made.items()}
    save_file(base, tmp_path / "base.safetensors")
    zero = "{stage: 3, stage3_param_persistence_threshold: 0}"
    settings = f"{{bf16: {{enabled: true}}, zero_optimization: {zero}}}"
    engines = "{type: fsdp2, param_dtype: bf16}", f"{{type: deepspeed, config: null, settings: {settings}}}"
    keys = (*keys, f"init_from.path={tmp_path}/base.safetensors")
    found = [losses(train(tmp_path / engine[7], 4, f"engine={engine}", *keys)) for engine in engines]
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    if "train.base_dtype=nf4" in keys:
        train(tmp_path, 4, f"engine={engines[1]}", *keys, "--verify-resume", "2")


def test_a_run_in_fp16_changes_its_engine(config: Path, tmp_path: Path) -> None:
    """The loss scale of another engine is left out. DeepSpeed refuses float16 on CPUs: here it does not."""
    program = (
        "import sys; from unittest import mock; import mm_core\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "half = mock.patch.object(type(get_accelerator()), 'is_fp16_supported', lambda _: True)\n"
        "with half:\n"
        "    for steps, engine in enumerate(sys.argv[3:], 1):\n"
        "        own = [sys.argv[2], f'train.steps={steps}', f'engine={engine}']\n"
        "        mm_core.train(mm_core.load_config(sys.argv[1], own), allow=['all'])\n"
    )
    zero = "{type: deepspeed, config: null, settings: {fp16: {enabled: true}, zero_optimization: {stage: 2}}}"
    engines = (zero, "{type: fsdp2, param_dtype: fp16}", zero)
    words = [sys.executable, "-c", program, str(config), f"run.dir={tmp_path}", *engines]
    own = environment(DS_ACCELERATOR="cpu")
    done = subprocess.run(words, capture_output=True, text=True, env=own, check=False)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 3


def test_a_stored_run_is_used_where_deepspeed_is_not_installed(stage_2: Path) -> None:
    program = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from mm_core.cli.main import main\n"
        "first = main(['eval', '--run', sys.argv[1], '--split', 'train', '--rows', '2'])\n"
        "sys.exit(first or main(['sample', '--run', sys.argv[1], '--prompt', 'a red ball', '--steps', '1']))"
    )
    words = [sys.executable, "-c", program, str(stage_2)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout and [*stage_2.rglob("*.mp4")]
