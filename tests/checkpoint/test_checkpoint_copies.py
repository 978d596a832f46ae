"""What a save in the background holds: copies on the host of tensors whose mesh is of another device, and the
proof that they are the tensors in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mm_core.checkpoint.files import fingerprints as checkpoint_sample
from mm_core.checkpoint.files import host_copies
from mm_core.checkpoint.files.fingerprints import drawn, fingerprints
from mm_core.checkpoint.files.host_copies import HostCopies
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError
from mm_core.modules.shards import like
from mm_core.optim.muon import _orthogonal_step
from mm_core.runtime.process_group import process_group
from support.marks import needs_muon

CONFIG = "run: {name: test}\n"


@pytest.fixture(scope="module")
def group():
    with process_group(None):
        yield


@pytest.fixture
def mesh(group) -> DeviceMesh:
    return DeviceMesh("cpu", [0])


def relabel(mesh: DeviceMesh) -> None:
    """Has a mesh of CPUs call itself one of another device, as an accelerator's with offloaded tensors is."""
    mesh._device_type = "meta"


def spread(mesh: DeviceMesh) -> dict[str, dict[str, Tensor]]:
    """Weights and moments as FSDP lays them out; a counter that no mesh has."""
    torch.manual_seed(0)
    laid = {
        "sharded": DTensor.from_local(torch.randn(6, 3), mesh, [Shard(0)]),
        "copied": DTensor.from_local(torch.randn(5, dtype=torch.bfloat16), mesh, [Replicate()]),
    }
    moments = {f"{name}.exp_avg": tensor * 0.5 for name, tensor in laid.items()}
    return {"model": laid, "optimizer": {**moments, "sharded.step": torch.tensor(0.0)}}


def own(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def change(state: dict[str, dict[str, Tensor]], step: int) -> dict[str, dict[str, Tensor]]:
    """An optimizer's step; returns the numbers that a save of it has to hold."""
    for named in state.values():
        for tensor in named.values():
            own(tensor).add_(float(step))
    return {part: {k: own(v).clone() for k, v in named.items()} for part, named in state.items()}


def test_a_copy_stays_in_the_buffer_that_is_filled_later(mesh):
    """An accelerator's mesh would draw it to its device before it is filled."""
    state = spread(mesh)
    relabel(mesh)
    for tensor in state["model"].values():
        buffer = torch.empty_like(own(tensor))
        copy = like(tensor, buffer)
        assert copy.to_local().data_ptr() == buffer.data_ptr()
        assert (copy.shape, copy.stride(), copy.placements) == (
            tensor.shape, tensor.stride(), tensor.placements
        )  # fmt: skip


@pytest.mark.parametrize("asynchronous", [True, False])
def test_three_saves_with_steps_between_hold_each_its_own_moment(asynchronous, mesh, tmp_path, same):
    state = spread(mesh)
    relabel(mesh)
    store = CheckpointStore(tmp_path / "run", keep=3, asynchronous=asynchronous)
    store.reserve(state)
    wanted = {}
    for step in (1, 2, 3):
        wanted[step] = change(state, step)
        path = store.save(step, state, {}, CONFIG)
        wanted[path] = wanted.pop(step)
        for named in state.values():
            for tensor in named.values():
                own(tensor).add_(1000.0)  # training goes on while the save is written
        store.wait()
    store.close()
    for path, numbers in wanted.items():
        empty = {part: {k: torch.zeros_like(v) for k, v in named.items()} for part, named in numbers.items()}
        store.load(path, empty)
        same(empty, numbers)


def test_a_copy_on_the_host_is_of_the_mesh_it_came_from(mesh):
    """`take` as a whole: nothing of it lies on the mesh's device."""
    state = spread(mesh)
    relabel(mesh)
    taken = HostCopies().take(state)
    for part, named in state.items():
        for name, tensor in named.items():
            assert own(taken[part][name]).device.type == "cpu"
            assert torch.equal(own(taken[part][name]), own(tensor)), name


@needs_muon
def test_a_step_of_muon_stays_where_the_gradient_is(mesh):
    """With `offload_to_cpu` that is the host, and the mesh is an accelerator's."""
    direction = DTensor.from_local(torch.randn(6, 4), mesh, [Shard(0)])
    group = {"lr": 0.1, "ns_steps": 5, "adjust_lr": "original"}
    wanted = _orthogonal_step(direction.to_local(), group)
    relabel(mesh)
    found = _orthogonal_step(direction, group)
    assert torch.equal(found.to_local(), wanted) and found.placements == direction.placements


# -- the proof -------------------------------------------------------------------------------------


def refusal(name: str) -> str:
    return (
        f"step_00000002: the copy of {name} to be saved differs from {name} in training: nothing was saved\n"
        "  hint: the copy in host memory is wrong: set checkpoint.async=false, and report this as a bug"
    )


def test_a_copy_that_is_stale_gets_no_checkpoints_name(mesh, tmp_path, monkeypatch):
    """As on an accelerator before the fix: what is written was copied before the buffer was filled."""
    state = spread(mesh)
    store = CheckpointStore(tmp_path / "run", keep=3, asynchronous=True)
    good = store.save(1, state, {}, CONFIG)
    store.wait()
    monkeypatch.setattr(host_copies, "like", lambda tensor, share: like(tensor, share.clone()))
    change(state, 2)
    store.save(2, state, {}, CONFIG)
    with pytest.raises(CheckpointError) as caught:
        store.wait()
    (name,) = (f"model.{name}" for name in drawn(2, state["model"]))
    assert str(caught.value) in (refusal(name), refusal(f"optimizer.{drawn(2, state['optimizer'])[0]}"))
    store.close()
    assert {path.name for path in store.folder.iterdir()} == {good.name, "LATEST"}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_one_bit_between_copy_and_file_is_seen(asynchronous, part, tmp_path, monkeypatch, state):
    """The last bit of a sampled tensor of either part, in every way of saving."""
    store = CheckpointStore(tmp_path / "run", keep=1, asynchronous=asynchronous)
    (name,) = drawn(2, state[part])
    held = state[part][name].reshape(-1)
    taken = checkpoint_sample.fingerprints

    def changed(*arguments):
        found = taken(*arguments)
        copy = store._copies._buffers.get((part, name), held).reshape(-1)
        copy.view(torch.uint8)[-1] ^= 1
        return found

    monkeypatch.setattr("mm_core.checkpoint.store.fingerprints", changed)
    with pytest.raises(CheckpointError) as caught:
        store.save(2, state, {}, CONFIG)
        store.wait()
    assert str(caught.value) == refusal(f"{part}.{name}")
    store.close()
    assert not list(store.folder.iterdir())


def test_every_tensor_has_its_turn():
    """Saves come every thousand steps, as a rule: no tensor is left out because of what these divide by."""
    names = [
        f"blocks.{block}.{kind}.weight" for block in range(40) for kind in ("q", "k", "v", "o", "up", "down")
    ]
    turns = [drawn(1000 * save, names) for save in range(1, 101)]
    assert all(len(turn) == 30 for turn in turns)
    assert set().union(*turns) == set(names)
    assert drawn(7, names) == drawn(7, reversed(names)), "the same on all ranks"
    assert drawn(7, ["one"]) == ["one"] and drawn(7, []) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1000, 33)[1:],
        torch.randn(64, 48).t(),
        torch.randn(513, dtype=torch.bfloat16)[1:],
        torch.tensor([True, False, True]),
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.randn(7, 3).to(torch.float8_e4m3fn),
        torch.randn(5, dtype=torch.complex64).conj(),
    ],
    ids=["view", "transposed", "odd place", "bool", "empty", "scalar", "float8", "lazy conjugate"],
)
def test_a_fingerprint_is_of_the_numbers_not_of_how_they_lie(tensor):
    (found,) = fingerprints(1, {"model": {"w": tensor}}).values()
    found.check(tensor.resolve_conj().clone(memory_format=torch.contiguous_format), "step_1")


def test_a_fingerprint_sees_zeros_exchanged_rows_and_a_sign():
    tensor = torch.randn(40, 16)
    (found,) = fingerprints(1, {"model": {"w": tensor}}).values()
    signed = tensor.clone()
    signed[7, 3] *= -1
    for other in (torch.zeros_like(tensor), tensor.flip(0), tensor.t().contiguous().view(40, 16), signed):
        with pytest.raises(
            CheckpointError, match=r"the copy of model\.w to be saved differs from model\.w in training"
        ):
            found.check(other, "step_1")


def test_packed_tensors_are_compared_by_what_they_are_made_of():
    from torch.testing._internal.two_tensor import TwoTensor  # a packed kind that torch's own tests use

    one, other = torch.randn(30), torch.randn(30)
    (found,) = fingerprints(1, {"optimizer": {"w": TwoTensor(one, other)}}).values()
    found.check(TwoTensor(one.clone(), other.clone()), "step_1")
    with pytest.raises(CheckpointError, match=r"optimizer\.w"):
        found.check(TwoTensor(one, other + 1), "step_1")


def test_a_device_that_cannot_add_integers_has_its_tensors_read_back(monkeypatch):
    """`meta` stands in for it: it has no numbers at all. The bytes then come to the host to be summed."""
    checkpoint_sample._adds_integers.cache_clear()
    assert checkpoint_sample._adds_integers("cpu") and not checkpoint_sample._adds_integers("meta")
    tensor = torch.randn(50)
    (direct,) = fingerprints(1, {"model": {"w": tensor}}).values()
    monkeypatch.setattr(checkpoint_sample, "_adds_integers", lambda kind: False)
    assert fingerprints(1, {"model": {"w": tensor}}) == {"model.w": direct}


def test_state_that_is_no_tensor_is_named_before_it_is_copied(tmp_path):
    store = CheckpointStore(tmp_path / "run", keep=1, asynchronous=True)
    with pytest.raises(
        CheckpointError, match=r"optimizer\.w\.step cannot be saved as a tensor: it has the type int"
    ):
        store.save(1, {"model": {"w": torch.zeros(2)}, "optimizer": {"w.step": 3}}, {}, CONFIG)
    store.close()
    assert not list(store.folder.iterdir())
