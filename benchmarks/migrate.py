"""Migrates every example folder of a clone of MindSpeed-MM, and prints what came of it.

    python benchmarks/migrate.py PATH_OF_A_CLONE

Each run is read, its config checked and planned; models of Transformers with their library's default sizes.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mm_mindspeed.files import find_runs, is_of_tool, value_at
from mm_mindspeed.migration import MindSpeedMM

from mm_core.config.load import load_config
from mm_core.errors import MMError, first_line
from mm_core.interchange import Migrated, to_yaml
from mm_core.plan import build_task, plan_shown

_ROOT = Path(__file__).parents[1]
sys.path += [str(_ROOT / "tests"), str(_ROOT / "plugins/mm_diffusers/tests")]

SIZES = {
    "qwen2_5vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "internvl": "internvl",
    "glm4v_moe": "glm4v_moe",
    "mistral3": "mistral3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
}
"""model_id of MindSpeed-MM -> model type of Transformers, whose default config is planned with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--under", default="examples", help="folder of the clone to go through")
    parser.add_argument("--all", action="store_true", help="also print the rows of the third lists")
    args = parser.parse_args()
    clone, counts, keys = args.clone.resolve(), Counter[str](), Counter[str]()
    top = clone / args.under
    folders = [folder for folder in (top, *sorted(top.rglob("*/"))) if any(map(_starts, folder.iterdir()))]
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        for folder in folders:
            counts["folders"] += 1
            name = folder.relative_to(clone)
            try:
                files = find_runs([folder])
            except MMError as error:
                print(f"{name}: not a training: {error.what}")
                counts["other"] += "no launch script" in error.what
                continue
            counts["parsed"] += 1
            try:
                runs = MindSpeedMM().migrate([folder])
            except MMError as error:  # of a model that is not known here, or not there
                print(f"{name}: {len(files)} runs refused: {error.where}: {error.what}")
                counts["refused"] += len(files)
                continue
            for each, run in zip(files, runs, strict=True):
                counts["runs"] += 1
                model = value_at(each.model, "model_id") or value_at(each.one_file, "model.model_id")
                state = _state(run, model)
                counts[state.partition(":")[0]] += 1
                keys.update(left.key for left in run.differs)
                print(
                    f"{name}/{run.name}: {len(run.lines)} taken, {len(run.dropped)} dropped,"
                    f" {len(run.differs)} without a counterpart, {state}"
                )
                for left in run.differs if args.all else ():
                    print(f"    {left.place}: {left.value}: {left.why}")
    for key, count in keys.most_common():
        print(f"  {count:3} {key}")
    trainings, runs = counts["folders"] - counts["other"], counts["runs"]
    for name, count, of in (
        ("parsed_folders", counts["parsed"], trainings),
        ("validated_runs", counts["planned"] + counts["valid"], runs),
    ):
        print(f"RESULT migrate_{name} {count}/{of} {of} {'ok' if count == of else 'short'}")
    print(f"planned with the sizes that are known: {counts['planned']} of {runs} runs")
    print(f"refused with a sentence, as their model is not known or not there: {counts['refused']} runs more")


def _starts(path: Path) -> bool:
    return path.suffix in (".sh", ".yaml", ".yml") and is_of_tool(path)


def _state(run: Migrated, model: object) -> str:
    file = Path("run.yaml")
    file.write_text(to_yaml(run), encoding="utf-8")
    try:
        load_config(file)
    except MMError as error:
        return f"refused: {error.render()}"
    try:
        config = load_config(file, _published(run, str(model)))
        plan_shown(config, run.world, build_task(config))
    except MMError as error:
        return f"valid: {first_line(error)}"
    return "planned"


def _published(run: Migrated, model: str) -> list[str]:
    """Overrides that name folders with the small files of a published model, which a plan reads."""
    from test_configs import published_folder  # of plugins/mm_diffusers/tests
    from transformers import AutoConfig

    for folder in ("model", "pipeline"):
        shutil.rmtree(folder, ignore_errors=True)
    if model in SIZES and "task.from_pretrained" in run.lines:
        AutoConfig.for_model(SIZES[model]).save_pretrained("model")
        return ["task.from_pretrained=model"]
    if "task.pipeline" in run.lines:
        name = "hunyuan_video_1_5" + ("_i2v" if "i2v" in run.lines["task.pipeline"].value else "")
        return [f"task.pipeline={published_folder(name, Path('pipeline'))}"]
    return []


if __name__ == "__main__":
    main()
