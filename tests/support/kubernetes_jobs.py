"""What a Job must keep for the ranks of a run to meet, save and start again, and no schema knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

Documents = dict[str, Any]
"""Kind of a document -> the document."""


def documents(text: str) -> Documents:
    """The documents of a file, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def faults(found: Documents) -> list[str]:
    """What is wrong with a run's Job and what goes with it."""
    return [what for check in (_numbers, _names, _ends, _folders) for what in check(found)]


def _parts(found: Documents) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    job = found["Job"]["spec"]
    pod = job["template"]["spec"]
    return job, pod, pod["containers"][0]


def _options(container: Mapping[str, Any]) -> dict[str, str]:
    pairs = (word.partition("=") for word in container["args"] if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def _numbers(found: Documents) -> Iterator[str]:
    job, _, container = _parts(found)
    options = _options(container)
    if not job["completions"] == job["parallelism"] == int(options["--nnodes"]):
        yield "not all hosts run at once"
    if job.get("completionMode") != "Indexed":
        yield "pods have no numbers"
    index = re.fullmatch(r"\$\((\w+)\)", options.get("--node-rank", ""))
    sources = {each["name"]: each.get("valueFrom") for each in container["env"]}
    path = ((sources.get(index[1]) or {}).get("fieldRef", {}) if index else {}).get("fieldPath", "")
    if "job-completion-index" not in path:
        yield "hosts do not know their number"
    for devices in (container["resources"].get("limits") or {}).values():
        if devices != int(options["--nproc"]):
            yield "ranks and devices differ in number"


def _names(found: Documents) -> Iterator[str]:
    job, pod, container = _parts(found)
    service, name = found["Service"], found["Job"]["metadata"]["name"]
    host, _, port = _options(container)["--rdzv-endpoint"].partition(":")
    if host != f"{name}-0.{service['metadata']['name']}":
        yield "hosts meet at a name that no pod has"
    if int(port) not in [each["port"] for each in service["spec"]["ports"]]:
        yield "the service has another port"
    if pod.get("subdomain") != service["metadata"]["name"]:
        yield "pods have no names in DNS"
    if service["spec"].get("clusterIP") != "None":
        yield "the service has an address of its own"
    if not service["spec"].get("publishNotReadyAddresses"):
        yield "names come only once pods are ready"
    labels = job["template"]["metadata"]["labels"]
    if not service["spec"]["selector"].items() <= labels.items():
        yield "the service selects other pods"
    if len(f"{name}-{job['completions'] - 1}") > 63:
        yield "a pod's name is too long for a host"


def _ends(found: Documents) -> Iterator[str]:
    job, pod, container = _parts(found)
    if pod.get("restartPolicy") != "Never":
        yield "a failure policy needs restartPolicy Never"
    rules: Sequence[Mapping[str, Any]] = job["podFailurePolicy"]["rules"]
    codes = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
    if any(each["containerName"] not in (container["name"],) for each in codes):
        yield "a rule names no container"
    if _action(rules, 75) != "Ignore":
        yield "a stop on request counts as a failure"
    if _action(rules, 1) != "FailJob":
        yield "an error is tried again"
    if {_action(rules, code) for code in (69, 137)} != {None}:
        yield "a lost rank is not counted"
    if not any("onPodConditions" in rule and rule["action"] == "Ignore" for rule in rules):
        yield "a host that is taken away counts as a failure"
    if pod.get("terminationGracePeriodSeconds", 30) < 60:
        yield "there is no time for a save"
    if not pod.get("shareProcessNamespace"):
        yield "a signal in the first seconds is lost"
    if container["args"][0] != "mm-train" or "command" in container:
        yield "signals do not reach mm-train"


def _action(rules: Sequence[Mapping[str, Any]], code: int) -> str | None:
    for rule in rules:
        if "onExitCodes" in rule:
            held = code in rule["onExitCodes"]["values"]
            if held == (rule["onExitCodes"]["operator"] == "In"):
                return str(rule["action"])
    return None


def _folders(found: Documents) -> Iterator[str]:
    _, pod, container = _parts(found)
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["mountPath"]: volumes.get(each["name"]) for each in container["volumeMounts"]}
    if None in mounts.values():
        yield "a mount names no volume"
    if ((mounts.get("/dev/shm") or {}).get("emptyDir") or {}).get("medium") != "Memory":
        yield "/dev/shm is not memory"
    config = mounts.get("/etc/mm") or {}
    if config.get("configMap", {}).get("name") != found["ConfigMap"]["metadata"]["name"]:
        yield "the config is another one"
    run = yaml.safe_load(found["ConfigMap"]["data"]["run.yaml"])["run"]
    claims = [path for path, volume in mounts.items() if "persistentVolumeClaim" in (volume or {})]
    folder = run["dir"] if run["dir"].startswith("/") else f"{container.get('workingDir', '/')}/{run['dir']}"
    if not any(f"{folder}/".startswith(f"{path}/") for path in claims):
        yield "the run ends with its pods"


def _job(change: Callable[[Any, Any, Any, Any], object]) -> Callable[[Documents], object]:
    return lambda found: change(found["Job"]["spec"], *_parts(found)[1:], found["Service"]["spec"])


def _swap(container: dict[str, Any], old: str, new: str) -> None:
    container["args"] = [word.replace(old, new) for word in container["args"]]


MISTAKES: dict[str, Callable[[Documents], object]] = {
    "not all hosts run at once": _job(lambda job, pod, box, service: job.update(parallelism=1)),
    "pods have no numbers": _job(lambda job, pod, box, service: job.update(completionMode="NonIndexed")),
    "hosts do not know their number": _job(
        lambda job, pod, box, service: _swap(box, "$(NODE_INDEX)", "$(HF_HOME)")
    ),
    "ranks and devices differ in number": _job(
        lambda job, pod, box, service: box["resources"]["limits"].update({"nvidia.com/gpu": 4})
    ),
    "hosts meet at a name that no pod has": _job(lambda job, pod, box, service: _swap(box, "-0.", "-1.")),
    "the service has another port": _job(lambda job, pod, box, service: service["ports"][0].update(port=80)),
    "pods have no names in DNS": _job(lambda job, pod, box, service: pod.update(subdomain="pods")),
    "the service has an address of its own": _job(lambda job, pod, box, service: service.pop("clusterIP")),
    "names come only once pods are ready": _job(
        lambda job, pod, box, service: service.pop("publishNotReadyAddresses")
    ),
    "the service selects other pods": _job(
        lambda job, pod, box, service: service.update(selector={"app": "mm"})
    ),
    "a failure policy needs restartPolicy Never": _job(
        lambda job, pod, box, service: pod.update(restartPolicy="OnFailure")
    ),
    "a rule names no container": _job(lambda job, pod, box, service: box.update(name="main")),
    "a stop on request counts as a failure": _job(
        lambda job, pod, box, service: job["podFailurePolicy"]["rules"].pop(1)
    ),
    "an error is tried again": _job(lambda job, pod, box, service: job["podFailurePolicy"]["rules"].pop(2)),
    "a host that is taken away counts as a failure": _job(
        lambda job, pod, box, service: job["podFailurePolicy"]["rules"].pop(0)
    ),
    "there is no time for a save": _job(
        lambda job, pod, box, service: pod.pop("terminationGracePeriodSeconds")
    ),
    "a signal in the first seconds is lost": _job(
        lambda job, pod, box, service: pod.pop("shareProcessNamespace")
    ),
    "signals do not reach mm-train": _job(
        lambda job, pod, box, service: box.update(args=["sh", "-c", "mm-train", *box["args"][1:]])
    ),
    "/dev/shm is not memory": _job(
        lambda job, pod, box, service: pod["volumes"][2]["emptyDir"].pop("medium")
    ),
    "the config is another one": lambda found: found["ConfigMap"]["metadata"].update(name="other"),
    "the run ends with its pods": _job(lambda job, pod, box, service: box.update(workingDir="/tmp")),
}
"""What `faults` says -> a change after which it must; each is valid by the schema."""
