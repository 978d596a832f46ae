"""Run by each of two ranks: saves behind the loop's back while the ranks go on exchanging messages, and
prints the outcome of each attempt, as one JSON object.

usage: checkpoint_async_ranks.py RUN_DIR [fault]
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path

import checkpoint_ranks as sync
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mm_core.checkpoint.files import dcp, host_copies
from mm_core.checkpoint.files import facts as checkpoint_facts
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.retention import complete_steps
from mm_core.checkpoint.store import CheckpointStore
from mm_core.modules.shards import like
from mm_core.runtime.launch.rank_process import leave
from support.checkpoints import chosen, make_state


def talk() -> None:
    """Some steps' worth of collectives in the default group, which the writer must not disturb."""
    for number in range(50):
        total = torch.tensor(float(number + dist.get_rank()))
        dist.all_reduce(total)
        assert float(total) == 2 * number + 1


def unreadable(path: Path) -> None:
    raise files.DamagedError("facts.json has an invalid value, step: -5", where=str(path))


def finished(store: CheckpointStore) -> str:
    return sync.attempt(store.wait)


def main() -> dict[str, object]:
    run = Path(sys.argv[1])
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    wanted = make_state(0)
    state, target = sync.spread(wanted, mesh), sync.spread(sync.filled(wanted, 9.0), mesh)
    store = CheckpointStore(run, keep=3, asynchronous=True)
    store.begin(0)
    said: dict[str, object] = {}
    good = store.save(1, state, {}, "x: 1\n")
    with torch.no_grad():
        state["model"]["blocks.0.bias"].fill_(5.0)
    talk()
    said["saved"] = [finished(store), [path.name for path in store.poll()]]
    store.load(good, target)
    said["as it was"] = sync.equal(sync.whole(target), wanted)
    dist.barrier()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    store.save(2, state, {}, "x: 1\n")
    talk()
    said["a full disk on rank 1"] = finished(store)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()

    if rank == 1:
        host_copies.like = lambda tensor, share: like(tensor, share.clone())
    with torch.no_grad():
        state["optimizer"]["blocks.0.weight.exp_avg"].add_(1.0)
        state["model"]["blocks.0.weight"].add_(1.0)
    store.save(2, state, {}, "x: 1\n")
    said["a stale copy on rank 1"] = finished(store)
    host_copies.like = like

    broken = {part: dict(named) for part, named in state.items()}
    weight = broken["model"]["blocks.0.weight"].detach().clone()
    weight.to_local()[0, 0] = float("nan") if rank == 1 else 0.0
    broken["model"]["blocks.0.weight"] = weight
    store.save(3, broken, {}, "x: 1\n")
    said["not finite on rank 1"] = finished(store)

    last = store.save(4, state, {}, "x: 1\n")
    store.wait()
    dist.barrier()
    if rank == 0:
        sync.flip(last / "__1_0.distcp")
    dist.barrier()
    path, refused = chosen(store, "auto")
    said["chosen"] = [path.name if path else None, [fault.what for fault in refused]]
    store.begin(1, [last])
    said["left"] = sorted(complete_steps(store.folder))

    # What one rank alone finds wrong in a checkpoint, none of them takes.
    five = store.save(5, state, {}, "x: 1\n")
    store.wait()
    if rank == 1:
        checkpoint_facts.read_facts = lambda path: unreadable(path) if path == five else {"step": 1}
    path, refused = chosen(store, "auto")
    said["chosen by what one rank saw"] = [path.name if path else None, [fault.what for fault in refused]]
    store.begin(1, [five])

    # A fault that only one rank meets in the background ends the next save on both.
    if rank == 1:
        store.reserve({"model": {"w": torch.empty(2**50, device="meta")}})
        done = threading.Event()
        store._thread.give(done.set)
        assert done.wait(30)
    said["no memory on rank 1"] = sync.attempt(lambda: store.save(4, state, {}, "x: 1\n"))
    store.save(4, state, {}, "x: 1\n")
    said["after it"] = finished(store)
    store.close()
    return said


def fault() -> dict[str, object]:
    """Rank 1 ends in the middle of a save; rank 0 has an error to print, and closes its store."""
    mesh = init_device_mesh("cpu", (2,))
    state = sync.spread(make_state(0), mesh)
    store = CheckpointStore(Path(sys.argv[1]), keep=3, asynchronous=True)
    store.begin(0)
    if dist.get_rank() == 1:
        dcp.write_file = lambda *arguments: time.sleep(60)
    store.save(1, state, {}, "x: 1\n")
    dist.barrier()
    began = time.monotonic()
    if dist.get_rank() == 0:
        store.close(after_fault=True)
    return {"in time": time.monotonic() - began < 20, "saved": sorted(complete_steps(store.folder))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer = fault() if "fault" in sys.argv else main()
    if "fault" not in sys.argv:
        dist.barrier()
    print("SAID " + json.dumps(answer), flush=True)
    leave(0)
