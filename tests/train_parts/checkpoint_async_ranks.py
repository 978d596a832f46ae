"""Run by each of two ranks: saves behind the loop's back while the ranks go on speaking with each other, and
prints what each attempt said, as one JSON object.

usage: checkpoint_async_ranks.py RUN_DIR (thread|process) [hurry|error]
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mm_core.errors import CheckpointError
from mm_core.parallel.shards import like
from mm_core.train import checkpoint_bytes, checkpoint_opening
from mm_core.train import checkpoint_io as files
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.checkpoint_retention import complete_steps
from mm_core.train.failure import leave

_spec = importlib.util.spec_from_file_location("sync_ranks", Path(__file__).with_name("checkpoint_ranks.py"))
sync = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sync)


def talk() -> None:
    """Some steps' worth of collectives in the default group, which the writer must not disturb."""
    for number in range(50):
        total = torch.tensor(float(number + dist.get_rank()))
        dist.all_reduce(total)
        assert float(total) == 2 * number + 1


def unreadable(path: Path) -> None:
    raise files.DamagedError("facts.json has step: -5", where=str(path))


def finished(store: CheckpointStore) -> str:
    return sync.attempt(store.wait)


def main() -> dict[str, object]:
    run, mode = Path(sys.argv[1]), sys.argv[2]
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    wanted = sync.states.make_state(0)
    state, target = sync.spread(wanted, mesh), sync.spread(sync.filled(wanted, 9.0), mesh)
    store = CheckpointStore(run, keep=3, asynchronous=mode)
    store.begin(0)
    said: dict[str, object] = {}
    good = store.save(1, state, {}, "x: 1\n", digest=False)
    with torch.no_grad():
        state["model"]["blocks.0.bias"].fill_(5.0)
    talk()
    said["saved"] = [finished(store), [path.name for path in store.poll()]]
    store.load(good, target)
    said["as it was"] = sync.equal(sync.whole(target), wanted)
    dist.barrier()

    if mode == "thread":  # the limit would have to be the child's
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        store.save(2, state, {}, "x: 1\n")
        talk()
        said["a full disk on rank 1"] = finished(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()

        if rank == 1:
            checkpoint_bytes.like = lambda tensor, share: like(tensor, share.clone())
        with torch.no_grad():
            state["optimizer"]["blocks.0.weight.exp_avg"].add_(1.0)
            state["model"]["blocks.0.weight"].add_(1.0)
        store.save(2, state, {}, "x: 1\n")
        said["a stale copy on rank 1"] = finished(store)
        checkpoint_bytes.like = like

    broken = {part: dict(named) for part, named in state.items()}
    weight = broken["model"]["blocks.0.weight"].detach().clone()
    weight.to_local()[0, 0] = float("nan") if rank == 1 else 0.0
    broken["model"]["blocks.0.weight"] = weight
    store.save(3, broken, {}, "x: 1\n")
    said["not finite on rank 1"] = finished(store)

    last = store.save(4, state, {}, "x: 1\n", digest=False)
    store.wait()
    dist.barrier()
    if rank == 0:
        sync.flip(last / "__1_0.distcp")
    dist.barrier()
    path, refused = store.open("auto")
    said["chosen"] = [path.name if path else None, [fault.what for fault in refused]]
    store.begin(1, [last])
    said["left"] = sorted(complete_steps(store.folder))

    # What one rank alone finds wrong in a checkpoint, none of them takes.
    five = store.save(5, state, {}, "x: 1\n", digest=False)
    store.wait()
    if rank == 1:
        checkpoint_opening.read_facts = lambda path: unreadable(path) if path == five else {"step": 1}
    path, refused = store.open("auto")
    said["chosen by what one rank saw"] = [path.name if path else None, [fault.what for fault in refused]]
    store.begin(1, [five])

    # A fault that only one rank meets in the background ends the next save on both.
    if rank == 1:
        (good / "sha256.json").write_text('{"__1_0.distcp": "0"}')
    dist.barrier()
    store.verify_digests(good)
    store._checks.finish()
    try:
        store.save(4, state, {}, "x: 1\n")
        said["a sum that one rank found wrong"] = "nothing"
    except CheckpointError as fault:
        said["a sum that one rank found wrong"] = fault.what
    store.save(4, state, {}, "x: 1\n")
    said["after it"] = finished(store)
    store.close()
    return said


def hurry() -> dict[str, object]:
    """A signal has reached rank 1 only, which leaves it no time for sha256; the next save has time again."""
    mesh = init_device_mesh("cpu", (2,))
    state = sync.spread(sync.states.make_state(0), mesh)
    store = CheckpointStore(Path(sys.argv[1]), keep=3, asynchronous=sys.argv[2])
    store.begin(0)
    store.save(1, state, {}, "x: 1\n", digest=dist.get_rank() == 0)
    store.save(2, state, {}, "x: 1\n")
    store.close()
    paths = complete_steps(store.folder).values()
    return {path.name: (path / "sha256.json").exists() for path in paths}


def error() -> dict[str, object]:
    """Rank 0 has an error to tell while rank 1, which knows of none, still sums."""
    mesh = init_device_mesh("cpu", (2,))
    state = sync.spread(sync.states.make_state(0), mesh)
    store = CheckpointStore(Path(sys.argv[1]), keep=3, asynchronous=sys.argv[2])
    store.begin(0)
    if dist.get_rank() == 1:
        files.sha256 = lambda path, hurry: time.sleep(60)
    store.save(1, state, {}, "x: 1\n")
    began = time.monotonic()
    if dist.get_rank() == 0:
        store.close(hurry=True)
    return {"in time": time.monotonic() - began < 20, "saved": sorted(complete_steps(store.folder))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer = hurry() if "hurry" in sys.argv else error() if "error" in sys.argv else main()
    dist.barrier()
    print("SAID " + json.dumps(answer))
    leave(0)
