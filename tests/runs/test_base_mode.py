"""Mode `base`: a Dataset, IterableDataset or DataLoader of torch is read as it is, and resumes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import mm_core
from mm_core.cli.main import main
from mm_core.contracts import Batch, DataRanks, DictBatch, Randomness, SampleKey, VideoTextBatch
from mm_core.data.datasets.shapes import ShapesDataset
from mm_core.data.loading.loader import CodeError, MicroBatchLoader
from mm_core.data.loading.plain import PlainBatches, PlainSamples
from mm_core.data.loading.sampler import BatchPlan
from mm_core.data.loading.seeding import build_split
from mm_core.data.loading.streams import BatchStream, TrainingStream, ended, held_out
from mm_core.errors import ConfigError, ContractError, DataError, MMError, PlanError, RunWarning
from mm_core.evaluation.batches import StreamedEvaluation
from mm_core.plugin.registry import get_registry
from mm_core.schema.checking import check_component
from mm_core.tasks.text_to_video.captions import TokenizeCaptions
from support.logs import log_of, losses
from support.pages import ROOT, blocks
from support.reading import plain_data

PLUGIN = Path(__file__).parent / "plain_sets.py"
SHAPES = "{type: shapes, num_frames: 8, height: 16, width: 16, clips: 12}"


def tokens(captions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[sum(map(ord, text))] for text in captions])
    return ids, torch.ones_like(ids, dtype=torch.bool)


TRANSFORM = TokenizeCaptions(tokens)


def built(name: str, **options: object) -> Any:
    return plain_data(PLUGIN, name, **options)


def stream_of(
    source: PlainBatches, share: int = 0, shares: int = 1, workers: int = 0, whole: bool = True, **more: Any
) -> BatchStream:
    settings: dict[str, Any] = {"transform": TRANSFORM, "rows": 2, "note": print, **more}
    return BatchStream(
        source,
        rng=Randomness(1),
        share=DataRanks(share, shares),
        whole=whole,
        workers=workers,
        pin_memory=False,
        ranks=1,
        **settings,
    )


def trained_on(source: PlainBatches, steps: range, position: dict | None = None, **more: Any) -> Any:
    return TrainingStream(stream_of(source, **more), 2, steps, position or {}, repeat_first=False)


def samples_of(dataset: Any, rank: int = 0, ranks: int = 1, workers: int = 0, steps: int = 5) -> list[Batch]:
    plan = BatchPlan(len(dataset), 2, 4, 1, "random", drop_last=True)
    own = {"rng": Randomness(1), "share": DataRanks(rank, ranks), "steps": range(steps)}
    settings = {"workers": workers, "prefetch": 1, "pin_memory": False, "device_type": "cpu"}
    return list(MicroBatchLoader(dataset, plan, batch_transform=TRANSFORM, **own, **settings))


def pixels(batches: Any) -> torch.Tensor:
    return torch.cat([batch.pixels for batch in batches])


# -- what is read ----------------------------------------------------------------------------------


def test_the_samples_of_a_dataset_are_each_read_once_over_the_ranks():
    dataset = built("clips", noise=0.1)
    assert isinstance(dataset, PlainSamples)
    shares = [samples_of(dataset, rank, 2) for rank in range(2)]
    read = [key.index for own in shares for batch in own for key in batch.keys]
    assert sorted(read) == list(range(20)) and not any(batch.failures for own in shares for batch in own)
    alone = samples_of(dataset)
    in_turn = [batch for pair in zip(*shares, strict=True) for batch in pair]
    assert torch.equal(pixels(alone), pixels(in_turn)), "the same samples and draws at any number of ranks"
    assert torch.equal(pixels(alone), pixels(samples_of(dataset, workers=1))), "and of workers"
    assert isinstance(alone[0], VideoTextBatch) and alone[0].captions[0].startswith("a ")


def test_the_tutorials_tokens_take_the_place_of_captions():
    batch = samples_of(built("tutorial"))[0]
    assert isinstance(batch, VideoTextBatch) and batch.text_ids is not None and batch.text_mask is not None
    assert batch.text_ids.tolist() == [[b + 3 for b in b"a shape"]] * 2
    assert batch.text_mask.dtype == torch.bool and batch.text_mask.all()


@pytest.mark.parametrize("name", ["stream", "loader"])
def test_a_stream_is_what_a_dataset_of_the_same_rows_is(name):
    """In its own order, with the keys of a sequential order: noise and dropped captions are the same."""
    plain = [built("clips")[index] for index in range(20)]
    batches = list(trained_on(built(name), range(7)))  # five steps are an epoch
    assert torch.equal(pixels(batches), torch.stack([plain[i % 20]["video"] for i in range(28)]))
    keys = [key for batch in batches for key in batch.keys]
    assert keys == [SampleKey(i // 20, i % 20) for i in range(28)]
    assert [text for batch in batches for text in batch.captions][:20] == [one["caption"] for one in plain]


def test_a_dataset_with_a_collate_of_ours_is_itself():
    section = {"type": "shapes", "num_frames": 8, "height": 16, "width": 16}
    checked = check_component("dataset", section, get_registry(), "d")
    assert isinstance(build_split(get_registry(), checked, 1, "base", "train"), ShapesDataset)


def test_the_pages_file_with_the_tutorials_dataset_has_at_most_15_lines():
    """tests/repo/test_pages_run.py trains with it."""
    (text,) = (block.text for block in blocks(ROOT / "docs/data.md") if "class Clips" in block.text)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 15 and all(name in text for name in ("__len__", "__getitem__", "prompt_ids"))


def test_a_loaders_own_collate_fn_is_used():
    batch = next(iter(trained_on(built("renamed"), range(1))))
    assert batch.ids == ["x", "y"] and batch.captions[0].startswith("own a ")


def test_an_iterable_dataset_has_at_most_one_worker_since_each_would_read_all_rows():
    one, none = (list(trained_on(built("stream", noise=0.1), range(3), workers=w)) for w in (4, 0))
    assert torch.equal(pixels(one), pixels(none)) and len(pixels(one)) == 12


@pytest.mark.parametrize("name", ["divided", "distributed"])
def test_what_takes_rank_and_world_gets_the_share_of_its_rank(name):
    shares = [list(islice(stream_of(built(name), rank, 2).epoch(0), 5)) for rank in range(2)]
    captions = sorted(text for own in shares for batch in own for text in batch.captions)
    assert captions == sorted(built("clips")[index]["caption"] for index in range(20))
    keys = [key for own in shares for batch in own for key in batch.keys]
    assert len({*keys}) == 20, "no two ranks draw the same noise"


def test_a_sampler_hears_of_the_epoch():
    source = built("distributed")
    first, again, later = (next(stream_of(source).epoch(epoch)).captions for epoch in (0, 0, 1))
    assert first == again != later


# -- resume ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "workers"), [("stream", 0), ("stream", 1), ("loader", 0)])
@pytest.mark.parametrize("stop", [2, 5, 8])
def test_a_resumed_stream_continues_where_it_stopped(name, workers, stop):
    """With random pixels and, for the loader, a random order; five steps are an epoch."""
    options: dict[str, object] = {"noise": 0.1, **({"shuffle": True} if name == "loader" else {})}
    whole = list(trained_on(built(name, **options), range(9), workers=workers))
    begun = trained_on(built(name, **options), range(9), workers=workers)
    list(islice(iter(begun), 2 * stop))
    torch.manual_seed(99)  # another process has drawn other numbers
    rest = list(trained_on(built(name, **options), range(stop, 9), begun.facts(), workers=workers))
    assert torch.equal(pixels(rest), pixels(whole[2 * stop :]))
    assert [batch.keys for batch in rest] == [batch.keys for batch in whole[2 * stop :]]


def test_a_step_that_was_read_but_not_taken_is_read_again():
    """A run that fails between reading a step and its update saves the steps before it."""
    whole = list(trained_on(built("loader"), range(4)))
    begun = trained_on(built("loader"), range(4))
    list(islice(iter(begun), 6))  # three steps are read, two are taken
    rest = list(trained_on(built("loader"), range(2, 4), begun.facts()))
    assert torch.equal(pixels(rest), pixels(whole[4:]))


# -- evaluation ------------------------------------------------------------------------------------


def test_an_evaluation_reads_each_row_once_and_the_incomplete_batch_too():
    batches = list(held_out(stream_of(built("stream", clips=5), whole=False), None))
    found = StreamedEvaluation(stream_of(built("stream", clips=5), whole=False), 3).read(2)
    assert [batch and len(batch.keys) for batch in found] == [2, 2, None] * 2, "up to complete batches"
    assert [len(batch.keys) for batch in batches] == [2, 2, 1]
    assert len(list(held_out(stream_of(built("loader"), whole=False), 3))) == 3


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Trains tiny's model in this process; the same data in all forms."""
    folder = tmp_path_factory.mktemp("base")

    def train(name: str, train: str, mode: str = "base", *more: str) -> Path:
        own = [f"run.name={name}", f"run.dir={folder}", f"plugins.path=[{PLUGIN}]", f"data.train={train}"]
        held = [f"data.validation={train}", "validation={every: 4}", "checkpoint={every: 4}"]
        steps = ["train={steps: 4, micro_batch_size: 2, global_batch_size: 4}", "log.every=1"]
        loader = f"data.loader={{mode: {mode}, sampler: sequential, workers: 0}}"
        mm_core.train(mm_core.load_config(tiny, [*own, *held, *steps, loader, *more]))
        return folder / name

    return train


@pytest.fixture(scope="module")
def reference(runs):
    return runs("reference", SHAPES, "sampler")


@pytest.mark.parametrize("name", ["clips", "stream", "loader"])
def test_the_same_clips_train_the_same_in_every_form(name, runs, reference, capsys):
    """custom_dit over an epoch and a step, its validation and `mm eval`: the losses are equal."""
    run = runs(name, f"{{type: local/{name}, clips: 12}}")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("data.train is")]
    assert len(said) == 1 and "a resumed run" in said[0]
    assert losses(run) == losses(reference) and len(losses(run)) == 4
    for figure in ("validation/loss", "validation/rows"):
        own, other = ([row[figure] for row in log_of(one) if figure in row] for one in (run, reference))
        assert own == other and own
    found, wanted = (mm_core.evaluate(one).figures for one in (run, reference))
    assert found == wanted and found["rows"] == 12
    assert main(["sample", "--run", str(run), "--prompt", "a"]) == 1
    assert "--height N --width N) or under task.sample" in capsys.readouterr().err


# -- what is wrong ---------------------------------------------------------------------------------


def test_what_is_no_dataset_is_refused():
    with pytest.raises(ContractError, match="local/endless is a Endless, which torch cannot read") as caught:
        built("endless")
    assert f"{PLUGIN}, line " in str(caught.value.where) and "IterableDataset" in str(caught.value.hint)
    with pytest.raises(ContractError, match="SharedSamples takes its share of the data by `rank`"):
        stream_of(built("sharedsamples"))


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("uncaptioned", ContractError, "the samples have no 'caption', only video"),
        ("numbered", ContractError, "the `caption` of a sample is not a text"),
        ("shapeless", ContractError, r"video is \[3, 8, 16, \d+\] float32 in sample \d+, and \[3, 8, 16, "),
        ("flat", ContractError, r"the video of a sample is \[8, 16, 16\]"),
        ("shapelessstream", ContractError, r"video is \[3, 8, 16, 16\] float32 in sample 0, and \[3, 8, 16"),
        ("failing", CodeError, "the IterableDataset raised KeyError: 'caption'"),
        (
            "unmasked",
            ContractError,
            "only video, prompt_ids\n.*\n  hint: return `prompt_mask` too: 1 at tokens",
        ),
        ("framesfirst", ContractError, r"\[8, 3, 16, 16\]\n.*\n  hint: .* `video.movedim\(1, 0\)`"),
        ("channelslast", ContractError, r"\[8, 16, 16, 3\]\n.*\n  hint: .* `video.movedim\(3, 0\)`"),
        ("picture", ContractError, r"\[3, 16, 16\]\n.*\n  hint: .* `picture\[:, None\]`"),
        ("pairs", CodeError, r"sample \d+ is a tuple\n.*\n  hint: name the values: return {name: value"),
        ("of_tuples", CodeError, "a batch of data.train is a tuple\n.*\n  hint: name the values"),
        ("of_uneven_columns", CodeError, "no common number of rows: a 2, b 3"),
    ],
)
def test_what_the_task_cannot_take_is_a_sentence(name, kind, what):
    source = built(name)
    with pytest.raises(kind, match=what) as caught:
        samples_of(source) if isinstance(source, PlainSamples) else list(trained_on(source, range(1)))
    if kind is CodeError or "video is" in what:
        assert str(PLUGIN) in str(caught.value.where)


def test_a_loader_of_another_batch_size_is_refused():
    with pytest.raises(DataError, match=r"a batch has 4 rows, but train\.micro_batch_size is 2") as caught:
        list(trained_on(built("loader", batch_size=4), range(1)))
    assert caught.value.where == "data.train"
    with pytest.raises(DataError, match="a batch has 1 row, but"):
        list(trained_on(built("loader", batch_size=1), range(1)))


def test_an_epoch_without_a_step_is_refused():
    with pytest.raises(DataError, match="an epoch has fewer than the 2 batches of a step"):
        list(trained_on(built("stream", clips=3), range(1)))


def test_only_all_ranks_may_reach_their_end():
    assert ended([2, 2], 2, 2, "data.train", 4) is False and ended([1, 0], 1, 2, "data.train", 4) is True
    assert ended([2, -1], 2, 2, "data.train", 4) is False, "the failed rank raises its own error"
    with pytest.raises(DataError, match="the loader of rank 0 has no rows for step 4, but others have"):
        ended([1, 2], 1, 2, "data.train", 4)


def test_ranks_that_read_the_same_rows_are_a_warning_and_shares_that_differ_an_error():
    notes: list[str] = []

    def compare(*rows: list[int]) -> None:
        stream_of(built("stream"), 0, 2, note=notes.append)._compare(torch.tensor(rows))

    compare([2, 0, 7], [2, 1, 8])
    compare([2, 0, 7], [2, 0, 7], [2, 1, 8], [2, 1, 8])
    assert not notes
    compare([2, 0, 7], [2, 1, 7])
    assert len(notes) == 1 and "ranks 0 and 1 read the same rows of data.train" in notes[0]
    with pytest.raises(DataError, match="ranks 0 and 1 compute the same samples, but their loaders"):
        compare([2, 0, 7], [2, 0, 8])


def test_configs_that_cannot_be_kept_are_refused(tiny, runs, capsys):
    def load(*more: str) -> Any:
        return mm_core.load_config(tiny, [f"plugins.path=[{PLUGIN}]", *more])

    with pytest.raises(ConfigError, match="found 'bucket'"):
        load("data.loader.mode=bucket")
    with pytest.raises(MMError, match="group_by_length works only with mode: sampler"):
        load("data.loader={mode: base, group_by_length: true}")
    with pytest.raises(MMError, match=r"does not keep its contract.*collate") as caught:
        runs("refused", "{type: local/clips}", "sampler")
    assert "data.loader.mode: base" in caught.value.render()
    with pytest.raises(PlanError, match="has no known number of samples") as caught:
        runs("epochs", "{type: local/stream}", "base", "train.steps=null", "train.epochs=1")
    assert caught.value.where == "train.epochs"
    found = [f"plugins.path=[{PLUGIN}]", "data.train={type: local/clips}", "data.loader.mode=base"]
    assert main(["data", "check", "--config", str(tiny), *found]) == 1
    assert "this run reads a Dataset as it is (mode: base)" in capsys.readouterr().err


def test_a_batch_of_plain_dicts_trains_a_transformers_model_too():
    from mm_core.tasks.pretrained.batches import CountLabels, Limits

    ids = torch.ones(2, 3, dtype=torch.int64)
    plain = DictBatch(
        [SampleKey(0, 0)] * 2, torch.ones(2), ["a", "b"], values={"input_ids": ids, "labels": ids, "x": "y"}
    )
    batch = CountLabels(True, ("input_ids",), Limits())(plain)
    assert batch.counts == [2, 2] and [*batch.inputs] == ["input_ids", "labels"] and batch.tokens == 6  # type: ignore[attr-defined]


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clips", "divided", "distributed"])
def test_two_ranks_resume_exactly(name, tiny, tmp_path, mm):
    done = mm(
        "train", "--config", tiny, "--nproc", 2, "--verify-resume", 4, f"run.dir={tmp_path}",
        f"plugins.path=[{PLUGIN}]", f"data.train={{type: local/{name}}}", "data.loader={mode: base}",
        f"data.validation={{type: local/{name}}}", "validation={every: 4}",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert "bit-equal" in done.out and "read the same rows" not in done.err


@pytest.mark.slow
def test_a_loader_that_ends_early_on_one_rank_ends_the_run_by_one_sentence(tiny, tmp_path, mm):
    own = (f"plugins.path=[{PLUGIN}]", "data.loader={mode: base, workers: 0}", f"run.dir={tmp_path}")
    rows = "data.train={type: local/divided, clips: 24, uneven: 8}"
    done = mm("train", "--config", tiny, "--nproc", 2, *own, rows, "checkpoint.every=1")
    assert done.code == 1
    assert done.err.count("mm: error:") == 1
    assert "the loader of rank 0 has no rows for step 3, but others have" in done.err
    assert (tmp_path / "tiny/checkpoints/step_00000002").is_dir()
    done = mm(
        "train",
        "--config",
        tiny,
        "--nproc",
        2,
        *own,
        "data.train={type: local/loader}",
        "train.steps=1",
        "run.name=b",
        "lr_schedule={type: constant}",
    )
    assert done.code == 0 and done.err.count("warning: ranks 0 and 1 read the same rows of data.train") == 1


class UnitStream(IterableDataset):
    """Clips scaled by `/ 255`."""

    def __iter__(self) -> Any:
        inner = ShapesDataset(8, 16, 16, clips=4)
        return (
            {"video": (one["pixels"] + 1) / 2, "caption": one["caption"]}
            for one in map(inner.__getitem__, range(4))
        )


def test_a_stream_of_clips_from_0_to_1_is_a_warning() -> None:
    stream = stream_of(PlainBatches(lambda *_: UnitStream(), "data.train"))
    with pytest.warns(RunWarning, match="from 0 to 1: -1 is black and 1 is white"):
        assert len(list(stream.epoch(0))) == 2
