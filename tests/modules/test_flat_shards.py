"""Ranges of the elements of a tensor: the boxes they form, and how checkpoints store and read them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files.fingerprints import Fingerprint, fingerprints
from mm_core.checkpoint.files.layout import Checksum
from mm_core.checkpoint.files.metadata import read_metadata
from mm_core.errors import CheckpointError
from mm_core.modules.flat_shards import FlatShard, boxes
from mm_core.modules.shards import gathered, like, local
from mm_core.runtime.ranks import Ranks
from support.ranks import run_ranks

SHAPE = (3, 4, 5)
VALUES = torch.arange(60.0)


def shard(start: int, stop: int, values: torch.Tensor = VALUES) -> FlatShard:
    return FlatShard(values[start:stop].clone(), SHAPE, start)


def written(folder: Path, tensor: torch.Tensor, expected: Mapping[str, Fingerprint] = {}) -> None:
    ranks, state = Ranks.current(), {"model": {"a": tensor}}
    ranks.agree("writing", lambda: dcp.write_tensors(folder, state, ranks=ranks, expected=expected))


def filled(folder: Path, tensor: torch.Tensor) -> torch.Tensor:
    files = {path.name: Checksum(path.stat().st_size, 0) for path in folder.iterdir()}
    dcp.read_tensors(folder, read_metadata(folder, files), {"model": {"a": tensor}}, alone=True)
    return tensor


# -- boxes -----------------------------------------------------------------------------------------


def shapes_and_ranges() -> list[tuple[tuple[int, ...], int, int]]:
    drawn = random.Random(42)
    found = []
    for _ in range(400):
        shape = tuple(drawn.choice((1, 1, 2, 3, 4, 7)) for _ in range(drawn.randrange(5)))
        start = drawn.randrange(prod(shape) + 1)
        found.append((shape, start, drawn.randint(start, prod(shape))))
    return found


def test_boxes_cover_exactly_the_range_in_order():
    for shape, start, stop in shapes_and_ranges():
        whole = torch.arange(prod(shape)).view(shape)
        parts = [*boxes(shape, start, stop)]
        cut = [whole[tuple(slice(o, o + s) for o, s in zip(*part, strict=True))] for part in parts]
        assert all(tuple(piece.shape) == sizes for piece, (_, sizes) in zip(cut, parts, strict=True))
        found = torch.cat([piece.flatten() for piece in cut]) if cut else torch.empty(0)
        assert found.tolist() == [*range(start, stop)], (shape, start, stop)
        assert len(parts) <= max(2 * len(shape) - 1, 1), (shape, start, stop)


def test_an_empty_range_has_no_boxes():
    for shape in ((), (5,), (0,), (2, 0), (0, 3), (2, 3, 4)):
        assert [*boxes(shape, 0, 0)] == []


def test_whole_rows_are_one_box():
    assert [*boxes((4, 5, 6), 0, 120)] == [((0, 0, 0), (4, 5, 6))]
    assert [*boxes((4, 5, 6), 30, 90)] == [((1, 0, 0), (2, 5, 6))]


def test_a_range_that_begins_and_ends_within_rows():
    """Worked by hand: 2 of row 0, rows 1 and 2 whole, 1 of row 3."""
    wanted = [((0, 2), (1, 2)), ((1, 0), (2, 4)), ((3, 0), (1, 1))]
    assert [*boxes((5, 4), 2, 13)] == wanted


# -- a shard ---------------------------------------------------------------------------------------


def test_pieces_are_views_of_the_share():
    held = shard(13, 47)
    for piece in held.pieces().values():
        piece.zero_()
    assert held.share.tolist() == [0.0] * 34


def test_what_is_done_to_each_share_keeps_the_range():
    held = shard(7, 31)
    for made in (held.detach(), held.clone(), held.to(torch.bfloat16), held.to(torch.bfloat16, copy=True)):
        assert isinstance(made, FlatShard)
        assert (made.shape, made.start) == (held.shape, 7)
        assert made.share.tolist() == held.share.tolist()
    assert held.to(torch.bfloat16).dtype == torch.bfloat16
    copy = held.clone()
    copy.copy_(shard(7, 31, -VALUES))
    assert copy.share.tolist() == (-VALUES[7:31]).tolist() and copy.start == 7
    assert held.share.tolist() == VALUES[7:31].tolist()


def test_the_helpers_of_shards_know_ranges():
    held = shard(7, 31)
    assert local(held) is held.share
    again = like(held, torch.zeros(24))
    assert isinstance(again, FlatShard) and (again.shape, again.start) == (held.shape, 7)
    alone = gathered(shard(0, 60))
    assert torch.equal(alone, VALUES.view(SHAPE))


@pytest.mark.parametrize(
    "compute",
    [
        lambda t: t + 1, lambda t: t.sum(), lambda t: t.view(-1), lambda t: t[0], lambda t: t.mul_(2),
        lambda t: torch.equal(t, t.clone()), lambda t: t.zero_(), lambda t: t.contiguous().sum(), torch.stack,
    ],
)  # fmt: skip
def test_any_other_operation_is_refused(compute):
    held = shard(7, 31)
    with pytest.raises(NotImplementedError, match="elements lie on several ranks"):
        compute([held, held] if compute is torch.stack else held)
    assert held.share.tolist() == VALUES[7:31].tolist()


# -- in checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 60), (0, 1), (59, 60), (7, 31), (20, 40), (19, 41), (30, 30)]
)
def test_a_stored_tensor_is_read_into_any_range(start, stop, tmp_path):
    """Stored as one range, and as a plain tensor: each range gets its elements."""
    for name, stored in (("range", shard(0, 60)), ("plain", VALUES.view(SHAPE))):
        written(tmp_path / name, stored)
        found = filled(tmp_path / name, shard(start, stop, torch.full((60,), -1.0)))
        assert found.share.tolist() == VALUES[start:stop].tolist()
        assert torch.equal(filled(tmp_path / name, torch.empty(SHAPE)), VALUES.view(SHAPE))


def test_a_scalar_and_a_vector_are_stored_too(tmp_path):
    for shape, values in (((), torch.tensor([3.5])), ((7,), VALUES[:7])):
        folder = tmp_path / str(len(shape))
        written(folder, FlatShard(values.clone(), shape, 0))
        assert filled(folder, torch.empty(shape)).flatten().tolist() == values.tolist()
        found = filled(folder, FlatShard(torch.empty(len(values)), shape, 0))
        assert found.share.tolist() == values.tolist()


@pytest.mark.slow
def test_ranges_of_two_ranks_are_read_into_others(tmp_path):
    """The first rank has 17 elements, so that a row of a row is shared; and ranks without any."""
    run_ranks(Path(__file__).with_name("flat_ranks.py"), 2, tmp_path)
    for name in ("17", "0", "60"):
        assert torch.equal(filled(tmp_path / name, torch.empty(SHAPE)), VALUES.view(SHAPE))
        for start, stop in ((0, 60), (16, 18), (17, 43), (3, 5)):
            found = filled(tmp_path / name, shard(start, stop, torch.full((60,), -1.0)))
            assert found.share.tolist() == VALUES[start:stop].tolist()


def test_a_value_other_than_its_fingerprint_is_refused(tmp_path):
    """Wherever the element lies: the range's first box, its rows, and its last box."""
    for at in (0, 20, 59):
        held = shard(0, 60)
        live = fingerprints(1, {"model": {"a": held}})
        written(tmp_path / f"good{at}", held, expected=live)
        held.share[at] += 1
        with pytest.raises(CheckpointError, match=r"the copy of model\.a"):
            written(tmp_path / f"bad{at}", held, expected=live)


def test_each_piece_of_a_range_has_a_fingerprint():
    held = shard(7, 46)
    before = fingerprints(1, {"model": {"a": held}})
    assert len(before) == len(held.pieces()) == 5
    held.share[0] += 1
    after = fingerprints(1, {"model": {"a": held}})
    assert [key for key in before if before[key] != after[key]] == ["model.a@(0, 1, 2)"]


def test_a_copy_between_different_ranges_or_with_a_plain_tensor_is_refused() -> None:
    shard = FlatShard(torch.arange(5.0), (3, 4, 5), 5)
    for target, source in (
        (shard, FlatShard(torch.ones(5), (3, 4, 5), 20)),
        (torch.zeros(3, 4, 5), shard),
        (shard, torch.ones(3, 4, 5)),
    ):
        with pytest.raises(NotImplementedError):
            target.copy_(source)
    assert shard.share.tolist() == [0, 1, 2, 3, 4]
