"""A Job of Kubernetes that trains a run: the text that `kubectl apply` takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mm_core.config.dump import inline, to_yaml
from mm_core.device.resources import RESOURCES
from mm_core.errors import MMError, plural
from mm_core.runtime.submit import Submission, filled

PORT = 29500
WORK = "/work"
FAILURES = 10
"""Failures of each host, on average, after which the Job fails."""

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SIZE = r"[1-9]\d*(Ki|Mi|Gi|Ti|k|M|G|T)?"


@dataclass(frozen=True)
class Place:
    """Where the pods of a Job run: options of `mm launch kubernetes`."""

    image: str
    claim: str
    shm: str
    namespace: str | None = None

    def __post_init__(self) -> None:
        names = rf"{_LABEL}(\.{_LABEL})*"
        rules = (
            ("image", r"[^\s-]\S*", "the name of an image, as registry/mm:0.2"),
            ("claim", names, "the name of a PersistentVolumeClaim: small letters, digits, dashes"),
            ("namespace", _LABEL, "the name of a namespace: small letters, digits, dashes"),
            ("shm", _SIZE, "a size, as 16Gi"),
        )
        for name, form, accepted in rules:
            value = getattr(self, name)
            if value is not None and not re.fullmatch(form, value, re.ASCII):
                raise MMError(f"{value!r} cannot be used", where=f"--{name}", accepted=accepted)


def kubernetes_file(job: Submission, place: Place) -> str:
    """The text of a ConfigMap with the run's config, a headless Service and an indexed Job.

    Raises:
        MMError: the run needs files that no pod would have.
    """
    config = job.config
    if paths := config.plugins.path:
        raise MMError(
            f"the run needs {plural(len(paths), 'file')} that no pod has: {', '.join(paths)}",
            where="plugins.path",
            hint="make a package of it (mm plugins new) and install it in the image",
        )
    if Path(config.run.dir).is_absolute() and not Path(config.run.dir).is_relative_to(WORK):
        raise MMError(
            f"{config.run.dir} is not in the claim, so the run would end with its pods",
            where="run.dir",
            accepted=f"a relative path, or one in {WORK}, where the claim is",
            hint="add run.dir=runs",
        )
    resource = RESOURCES[job.device].kubernetes
    train = ["mm-train", "--config=/etc/mm/run.yaml", f"--nproc={job.nproc}", f"--nnodes={job.nodes}"]
    train += [f"--rdzv-endpoint={job.name}-0.{job.name}:{PORT}", f"--rdzv-id={job.name}"]
    train += ["--node-rank=$(NODE_INDEX)", *job.restarts]
    device = [] if resource else ["- name: MM_DEVICE", f"  value: {job.device}"]
    return filled(
        "kubernetes.yaml",
        {
            "command": job.command,
            "name": job.name,
            "namespace": [f'namespace: "{place.namespace}"'] if place.namespace else [],
            "config": to_yaml(config),
            "work": WORK,
            "port": str(PORT),
            "nodes": str(job.nodes),
            "failures": str(FAILURES * job.nodes),
            "grace": str(job.grace),
            "image": inline(place.image),
            "train": [f"- {inline(word)}" for word in train],
            "environment": device,
            "limits": [f"{resource}: {job.nproc}"] if resource else ["{}"],
            "claim": place.claim,
            "shm": place.shm,
        },
    )
