"""Packed rows of conversations about pictures: as the same conversations apart, or refused before a step."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml

from mm_core.contracts import IGNORED_LABEL, Randomness
from mm_core.errors import ContractError
from mm_core.tasks.pretrained import packing_check
from mm_core.tasks.pretrained import task as task_module
from mm_core.tasks.pretrained.own_positions import PackedInputs
from mm_core.tasks.pretrained.packed_attention import blocks_in_pieces, register
from support.chat_families import FAMILIES
from support.packed_chats import AUTO, batch_of, chats, made, task_of
from support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:rows are packed")  # plain sdpa is tried too

HERE, RNG = Path(__file__).parent, Randomness(0)
SEPARATE = [name for name in FAMILIES if name != "qwen3_5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packed")


def step(task, batch):
    """Summed loss of a batch, and gradients."""
    task.zero_grad()
    loss = task.loss(task.prepare(task.batch_transform()(batch), RNG))
    loss.total.backward()
    gradients = {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}
    return loss.total.item(), loss.weight, gradients


def gap(found, wanted):
    """Relative difference of all gradients together."""
    difference, norm = (
        torch.stack([part.norm() for part in parts]).norm()
        for parts in ([found[path] - wanted[path] for path in wanted], list(wanted.values()))
    )
    return float(difference / norm)


def library(model):
    """The model as Transformers loads it."""
    return getattr(transformers, AUTO).from_pretrained(model).train()


# -- positions, masks and lengths ----------------------------------------------------------------------------


def row_of_two():
    """Two conversations with pictures of other sizes, and a blank picture: tokens, kinds, grids, lengths."""
    kinds = [*[0] * 3, *[1] * 6, *[0] * 2, *[0] * 2, *[1] * 4, 0, 0, *[1] * 1]
    ids = torch.arange(len(kinds))[None]
    grids = torch.tensor([[1, 4, 6], [1, 4, 4], [1, 2, 2]])
    lengths = [11, 8, 1]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    given = {"input_ids": ids, "mm_token_type_ids": torch.tensor([kinds]), "position_ids": places}
    return {**given, "image_grid_thw": grids}, lengths


def test_positions_are_those_of_each_conversation_with_its_own_pictures():
    kind = transformers.Qwen2_5_VLModel
    config = transformers.Qwen2_5_VLConfig(vision_config={"spatial_merge_size": 2, "tokens_per_second": 2})
    inputs, lengths = row_of_two()
    packed = pickle.loads(pickle.dumps(PackedInputs(kind, config)))
    found = packed(inputs, lengths)["position_ids"]
    assert torch.equal(found[0], inputs["position_ids"])
    with torch.device("meta"):
        model = kind(config)
    start = 0
    for number, length in enumerate(lengths):
        own = slice(start, start + length)
        kinds, grid = inputs["mm_token_type_ids"][:, own], inputs["image_grid_thw"][[number]]
        alone, _ = model.get_rope_index(inputs["input_ids"][:, own], kinds, image_grid_thw=grid)
        assert torch.equal(found[1:, :, own], alone)
        start += length


def test_layers_without_positions_are_given_where_conversations_begin():
    inputs, lengths = row_of_two()
    found = PackedInputs(lengths=True)(inputs, lengths)
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 11, 19, 20]
    assert found["seq_idx"].tolist() == [[0] * 11 + [1] * 8 + [2]]
    assert found["position_ids"] is inputs["position_ids"]


@pytest.mark.parametrize("attention", ["sdpa", "packed_sdpa"])
def test_a_picture_is_seen_both_ways_within_its_conversation_alone(attention):
    from transformers.models.gemma3 import modeling_gemma3 as module

    register()
    config = transformers.Gemma3TextConfig(sliding_window=4, hidden_size=8)
    config._attn_implementation = attention
    # The second conversation begins with a picture where the first ends with one.
    kinds = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]])
    pieces = torch.tensor([0] * 7 + [1] * 8)
    images = torch.tensor([-1, 0, 0, 0, -1, 1, 1, 2, 2, 2, -1, -1, -1, -1, -1])
    places = torch.cat([torch.arange(7), torch.arange(8)])
    causal = torch.ones(15, 15, dtype=torch.bool).tril()
    same = (images[:, None] == images) & (images >= 0)
    wanted = (causal | same) & (pieces[:, None] == pieces)

    def masks():
        blocks = module.get_block_sequence_ids_for_mask(kinds)
        given = torch.zeros(1, 15, 8), None, None, places[None], blocks
        return module.create_masks_for_vision_model(config, *given)

    with blocks_in_pieces(SimpleNamespace(config=config)):
        found = masks()
    assert torch.equal(found["full_attention"][0, 0], wanted)
    assert torch.equal(
        found["sliding_attention"][0, 0],
        wanted & (places[:, None] - places < 4) & (pieces[:, None] == pieces),
    )
    assert not torch.equal(masks()["full_attention"], found["full_attention"])  # Transformers' own


# -- packed as apart -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "packed_sdpa"])
@pytest.mark.parametrize("name", SEPARATE)
def test_a_packed_row_is_learnt_as_its_conversations_apart(name, attention, folder):
    model = made(folder, name)
    data, task = chats(model, packing=True), task_of(model, attn_implementation=attention)
    row = data[0]
    text = next(piece for n in range(len(data)) for piece in data[n]["pieces"] if not piece.vision)
    pieces = [*row["pieces"][:2], text]
    total, weight, gradients = step(task, batch_of(data, [{"id": "packed", "pieces": pieces}]))
    theirs, apart, alone = library(model), chats(model, packing=False), 0.0
    for piece in pieces:
        inputs = batch_of(apart, [{"id": "alone", "pieces": [piece]}]).inputs
        labels = int((inputs["labels"][:, 1:] != IGNORED_LABEL).sum())
        loss = theirs(**inputs).loss * labels
        loss.backward()
        alone, weight = alone + loss.item(), weight - labels
    assert weight == 0 and total == pytest.approx(alone, rel=1e-6)
    wanted = {f"model.{path}": p.grad for path, p in theirs.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    assert gap(gradients, wanted) <= 1e-6


# -- the check -----------------------------------------------------------------------------------------------


def plain(task):
    task._labels = replace(task._labels, packed=PackedInputs())


def without_text_row(task):
    given = task._labels.packed

    def packed(inputs, lengths):
        inputs = given(inputs, lengths)
        return {**inputs, "position_ids": inputs["position_ids"][1:]}

    task._labels = replace(task._labels, packed=packed)


def caches(task):
    task._options = {}


def positions_only(task):
    task._labels = replace(task._labels, packed=replace(task._labels.packed, lengths=False))


def own_masks(task):
    task_module.blocks_in_pieces = lambda model: nullcontext()  # the fixture puts it back


FAULTS = {
    "positions of text": ("qwen2_5_vl", plain),
    "positions of text, right mask": ("qwen3_vl", plain),
    "no row of text": ("qwen2_5_vl", without_text_row),
    "a cache": ("qwen2_5_vl", caches),
    "a cache, tiles": ("internvl", caches),
    "pictures by places in a piece": ("gemma3", own_masks),
    "linear layers without lengths": ("qwen3_5", positions_only),
}


@pytest.fixture
def masks_put_back(monkeypatch):
    monkeypatch.setattr(task_module, "blocks_in_pieces", task_module.blocks_in_pieces)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["several", "one"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_mixes_conversations_is_refused_before_a_step(fault, rows, folder, masks_put_back):
    name, plant = FAULTS[fault]
    model = made(folder, name)
    data, task = chats(model, packing=True), task_of(model)
    plant(task)
    pieces = data[0]["pieces"]
    seen = [piece for piece in pieces if piece.vision]
    batch = batch_of(data, [{"id": "row", "pieces": pieces if rows == "several" else seen[:1]}])
    with pytest.raises(ContractError, match=r"conversations in one row change each other") as caught:
        task.prepare(task.batch_transform()(batch), RNG)
    assert type(task.model).__name__ in str(caught.value)
    assert caught.value.where == "data.train.packing" and "packing: false" in caught.value.hint


@pytest.mark.slow
def test_layers_whose_kernels_are_missing_are_refused_in_a_sentence(folder):
    model = made(folder, "qwen3_5")
    data, task = chats(model, packing=True), task_of(model)
    with pytest.raises(
        ContractError, match=r"cannot train on packed rows.*Install.*layers: .*linear_attention"
    ):
        task.prepare(task.batch_transform()(batch_of(data, [data[0]])), RNG)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEPARATE)
def test_a_model_that_separates_conversations_passes_in_half_precision(name, folder):
    model = made(folder, name)
    data, task = chats(model, packing=True), task_of(model).bfloat16()
    for number in range(4):
        batch = task.batch_transform()(batch_of(data, [data[number]]))
        halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.inputs.items()}
        packing_check.check_packing(task.model, replace(batch, inputs=halves), task._labels.packed, task._run)


@pytest.mark.parametrize(("bits", "refused"), [(1, False), (8, True)])
def test_the_last_bit_of_a_loss_is_rounding(bits, refused, folder, monkeypatch):
    """Also where other padding changes none of the few tokens that are tried."""
    monkeypatch.setattr(packing_check, "_ABOVE", 0)
    model = made(folder, "qwen2_5_vl")
    data, task = chats(model, packing=True), task_of(model)
    batch = task.batch_transform()(batch_of(data, [data[0]]))

    def run(inputs, record):
        task._run(inputs, record)
        for _ in range(bits * (len(inputs["input_ids"]) == 1)):  # the packed row
            record.each[::2] = record.each[::2].nextafter(torch.tensor(torch.inf))

    with pytest.raises(ContractError, match="change each other") if refused else nullcontext():
        packing_check.check_packing(task.model, batch, task._labels.packed, run)


def test_the_check_changes_nothing_of_a_run(folder, monkeypatch):
    model = made(folder, "qwen2_5_vl")
    data = chats(model, packing=True)
    dropped = {"text_config": {"attention_dropout": 0.3}}
    states = []
    for check in (packing_check.check_packing, lambda *given: None):
        monkeypatch.setattr(task_module, "check_packing", check)
        task = task_of(model, overrides=dropped)
        task.model.model.visual.eval()
        torch.manual_seed(3)
        total, _, gradients = step(task, batch_of(data, [data[0]]))
        modes = [module.training for module in task.modules()]
        states.append((total, modes, torch.get_rng_state(), [*gradients.values()]))
    (one, modes, drawn, gradients), (other, *others) = states
    assert one == other and modes == others[0] and torch.equal(drawn, others[1])
    assert all(map(torch.equal, gradients, others[2]))


def test_the_tried_conversations_have_every_kind_of_picture_and_are_the_shortest(folder):
    model = made(folder, "smolvlm")
    data = chats(model, packing=True, max_length=900)
    batch = batch_of(data, [data[0]])
    sizes = [count for _, counts in [batch.sections["pixel_values"]] for count in counts]
    seeing = sorted(length for length, count in zip(batch.pieces[0], sizes, strict=True) if count)
    tried = packing_check._Tried.of(batch, 10**6)
    assert sorted(tried.lengths) == seeing[:2]
    alone, together = tried.alone(5), tried.together()
    assert alone["pixel_values"].shape[0] == 2 and together["pixel_values"].shape[0] == 1
    assert alone["input_ids"].shape == (2, max(tried.lengths) + 5)
    assert int((alone["labels"] != IGNORED_LABEL).sum()) == int((together["labels"] != IGNORED_LABEL).sum())


# -- ranks ---------------------------------------------------------------------------------------------------


def on_ranks(world, model, folder, mode):
    """Output of the ranks, and loss and gradients of two packed rows."""
    document = {
        "run": {"name": "packed", "dir": str(folder / "runs")},
        "task": {"type": "pretrained", "from_pretrained": str(model), "auto_class": AUTO},
        "data": {"train": {"type": "conversations", "max_length": 600, "packing": True}},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 1, "micro_batch_size": 1, "global_batch_size": 2},
    }
    document["data"]["train"]["sources"] = [{"annotations": str(model.parent / "rows" / "chat.jsonl")}]
    (config := folder / f"{model.name}.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    out = folder / f"{model.name}_{world}_{mode}.pt"
    said = run_ranks(HERE / "packed_ranks.py", world, out, config, mode)
    return said, torch.load(out) if out.exists() else None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_packed_rows_on_two_ranks_are_those_on_one(name, folder):
    model = made(folder, name)
    _, one = on_ranks(1, model, folder, "checked")
    _, two = on_ranks(2, model, folder, "checked")
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["gradients"].keys() == one["gradients"].keys()
    assert gap(two["gradients"], one["gradients"]) <= 1e-6
    _, unchecked = on_ranks(2, model, folder, "unchecked")
    assert unchecked["loss"] == two["loss"]
    assert all(torch.equal(unchecked["gradients"][path], two["gradients"][path]) for path in two["gradients"])


@pytest.mark.slow
def test_a_fault_that_one_rank_sees_ends_all_of_them(folder):
    said, found = on_ranks(2, made(folder, "qwen2_5_vl"), folder, "planted")
    assert found is None
    assert all("refused: data.train.packing" in each and "change each other" in each for each in said)
