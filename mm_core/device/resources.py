"""What schedulers of clusters call the devices of a host."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Resource:
    """Devices of one kind, as a job asks for them.

    Attributes:
        devices: of a host, where no number is given.
        slurm: option of `sbatch` with its value, for `count` devices a host; empty: none is needed.
        kubernetes: the extended resource of the device plugin; empty: none.
    """

    devices: int
    slurm: str = ""
    kubernetes: str = ""


RESOURCES = MappingProxyType(
    {
        "cuda": Resource(8, "gpus-per-node={count}", "nvidia.com/gpu"),
        "npu": Resource(8, "gres=npu:{count}", "huawei.com/Ascend910"),
        "cpu": Resource(1),
    }
)
"""Kind of device -> what a job asks for; the first is the default of `mm launch`."""
