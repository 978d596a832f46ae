"""Machines that a run may be planned for: memory, speed and links of their devices, as their makers publish.

Peaks are of dense products, bandwidths of one direction.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from mm_core.device.peaks import published_peak
from mm_core.errors import MMError, did_you_mean, plural

GIB = 2**30


def size_text(size: float) -> str:
    """Bytes as a forecast shows them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Device:
    """One device that a rank uses.

    Attributes:
        name: as `--on` takes it.
        memory: bytes that a process can allocate.
        bf16: FLOPs per second of bf16 and fp16 products; 0: unknown.
        fp32: of float32 products as torch computes them by default.
        bandwidth: bytes per second of its memory.
        link: bytes per second to another device of its host.
        network: bytes per second to a device of another host.
        to_host: bytes per second to its host's memory.
        context: bytes that the driver and its libraries take, which no allocator shows.
        call: seconds that a process needs to start an operator.
        timed: whether its speed is published; that of a processor has to be measured.
        like: the device whose speed it has, of one that is known by its memory alone.
    """

    name: str
    memory: int
    bf16: float = 0.0
    fp32: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    network: float = 0.0
    to_host: float = 0.0
    context: int = round(0.7 * GIB)
    call: float = 6e-6
    timed: bool = False
    like: str = ""


def _device(
    torch_name: str, gib: float, fp32: float, memory: float, *links: float, bf16: float | None = None
) -> Device:
    """A device in the units of data sheets: GiB, TFLOP/s, TB/s, and GB/s; bf16 where `published_peak` has no
    row of it."""
    peak = published_peak(torch_name) if bf16 is None else bf16 * 1e12
    assert peak is not None
    link, network, host = (1e9 * each for each in links)
    speed = peak, fp32 * 1e12, memory * 1e12
    return Device(_short(torch_name), round(gib * GIB), *speed, link, network, host, timed=True)


def _short(name: str) -> str:
    """The name of a device as `--on` takes it."""
    return re.sub(r"[\s_-]|ascend|nvidia", "", name, flags=re.I)


_DEVICES = (
    # Memory as torch reports it for a whole card. Data sheets of nvidia.com: NVLink and PCIe are published
    # for both directions together. Networks: DGX H100, H200 and B200 have 400 Gbit/s a device, DGX A100 200;
    # for cards without such a system, 100.
    _device("B200", 178.4, 80, 8.0, 900, 50, 64),
    _device("H200", 139.8, 67, 4.8, 450, 50, 64),
    _device("H100", 79.2, 67, 3.35, 450, 50, 64),
    _device("A100", 79.2, 19.5, 2.039, 300, 25, 32),
    _device("L40S", 44.4, 91.6, 0.864, 32, 12.5, 32),
    _device("RTX 4090", 23.5, 82.6, 1.008, 32, 12.5, 32),
    _device("RTX 5090", 31.4, 104.8, 1.792, 64, 12.5, 64, bf16=209.5),
    # Huawei Atlas 800T A2: 8 devices with HCCS of 392 GB/s for both directions, and 200 Gbit/s of RoCE each.
    _device("Ascend910B", 61.0, 88, 1.6, 196, 25, 32),
    # Of one of the two dies of a package, which are two devices: arXiv 2506.12708, section 3.
    _device("Ascend910C", 61.0, 94, 1.6, 196, 25, 32, bf16=376),
)
_CPU = Device("cpu", 0, 1e11, 1e11, 2e10, 5e9, 1e9, 1e10, context=0)
DEVICES = {device.name: device for device in _DEVICES}


@dataclass(frozen=True)
class Machine:
    """Hosts with devices of one kind."""

    hosts: int
    ranks: int  # of a host
    device: Device
    memory: int = 0  # of a host; 0: unknown

    def sized(self, memory: int) -> str:
        """As `--on` takes it, with devices of a size."""
        hosts = f"{self.hosts}x" if self.hosts > 1 else ""
        return f"{hosts}{self.ranks}x{memory / GIB:.1f}GB"

    @property
    def host_share(self) -> int:
        """Bytes of host memory for a rank; of unknown hosts those of servers, three times the device's."""
        return self.memory // self.ranks or 3 * self.device.memory

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.hosts * self.ranks

    @property
    def title(self) -> str:
        """As the plan names it."""
        hosts = f"{plural(self.hosts, 'host')} of " if self.hosts > 1 else ""
        return f"{hosts}{self.ranks} x {self.device.name}"


def machine_of(text: str) -> Machine:
    """The machine that `--on` names: ranks and device, such as `8xH100`, `2x8xH100` or `1x24GB`.

    Raises:
        MMError: it names none.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text.strip(), re.ASCII)
    accepted = f"RANKSxDEVICE or HOSTSxRANKSxDEVICE; devices: {', '.join(DEVICES)}, cpu, or a size as 24GB"
    if found is None or not int(found[2]) or (found[1] and not int(found[1])):
        raise MMError(f"{text!r} is not a machine", where="--on", accepted=accepted)
    name = _short(found[3])
    hosts, ranks = int(found[1] or 1), int(found[2])
    known = {key.lower(): device for key, device in {**DEVICES, "cpu": _CPU}.items()}
    if (device := known.get(name.lower())) is not None:
        return Machine(hosts, ranks, device)
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)(gi?b)", name, re.I):
        # What is printed on a card is what its driver counts in powers of two.
        here, memory = this_machine(1, 1).device, round(float(size[1]) * GIB)
        context = Device("", 0).context
        return Machine(
            hosts, ranks, replace(here, name=found[3], memory=memory, context=context, like=here.name)
        )
    hint = did_you_mean(name.upper(), list(DEVICES))
    if re.fullmatch(r"\d+(\.\d+)?", name):
        hint = f"a size of memory has a unit: {found[2]}x{name}GB"
    raise MMError(f"the device {found[3]!r} is not known", where="--on", accepted=accepted, hint=hint)


def ranked(machine: Machine) -> Machine:
    """A machine with the speed of an A100, by which settings can be compared where its own is unknown."""
    device = machine.device
    known = replace(DEVICES["A100"], name=device.name, memory=device.memory, like=device.like)
    return replace(machine, device=known)


def launched_machine() -> Machine:
    """Hosts as this one with the ranks of the launcher's environment."""
    from mm_core.device.kind import environment_world

    world = environment_world().world_size
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return this_machine(world // ranks, ranks)


def this_machine(hosts: int, ranks: int) -> Machine:
    """Hosts as the one that this process runs on, each with a number of ranks."""
    import torch

    from mm_core.device.kind import device_type

    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (kind := device_type()) == "cpu":
        return Machine(hosts, ranks, replace(_CPU, memory=whole // ranks), whole)
    module = torch.get_device_module(kind)
    name, size = str(module.get_device_name()), int(module.get_device_properties(0).total_memory)
    key = _short(name).lower()
    known = next((device for part, device in DEVICES.items() if part.lower() in key), Device(name, size))
    return Machine(hosts, ranks, replace(known, memory=size), whole)
