"""The conformance checks of predictors, and `check_predictor`, which runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from mm_core.errors import ContractError, MMError, foreign_code
from mm_core.testing.kit import Check, Kit, NotApplicable, Probe, checks_of, sentence_of
from mm_core.testing.predictors import capabilities, declared, forward, given, sharded, training
from mm_core.testing.predictors.probe import Build, PredictorProbe
from mm_core.testing.ranks import ComponentBuild

_ALONE = checks_of(*(module.__name__ for module in (declared, forward, training, capabilities, given)))
_ON_RANKS = checks_of(sharded.__name__)
_FIRST = ("attributes", "initialisation")
PREDICTOR_CHECKS: Mapping[str, Check] = MappingProxyType({**_ALONE, **_ON_RANKS})
"""Each conformance check by its name, to run one test per check. The last three start several processes."""


def check_predictor(
    build: Build,
    *,
    patches: tuple[int, int, int] | None = None,
    text_length: int = 6,
    conditions: Mapping[str, Sequence[int] | Tensor] | None = None,
    ranks: bool = False,
) -> None:
    """Runs every conformance check of PREDICTOR_CHECKS on a predictor.

    It gets the conditions that its forward names: `fps`, `size` and `guidance`, and those with known shapes.

    Args:
        build: creates the predictor with a small config: a function, a component's name, or a mapping with
            `type` as in a YAML.
        patches: tokens of the test clips along (t, h, w), for a predictor that takes no others; None:
            (2, 3, 2) and other numbers, with fewer frames for a predictor with `max_frames`.
        text_length: tokens of the test captions.
        conditions: name -> shape of one sample's tensor, without the batch, or such a tensor; for conditions
            that the predictor does not declare in `condition_shapes`.
        ranks: also the checks that train on two ranks, which takes longer: each is a process, so `build` must
            be a name, a mapping or a function of a module.

    Raises:
        ContractError: lists every check that failed.
    """
    probe = PredictorProbe(build, patches, text_length, conditions)
    chosen = {name: check for name, check in PREDICTOR_CHECKS.items() if ranks or name not in _ON_RANKS}
    faults: dict[str, str] = {}
    for name, check in chosen.items():
        if faults and (name in _ON_RANKS or not faults.keys().isdisjoint(_FIRST)):
            break  # the others would only meet the same fault again
        try:
            with foreign_code():
                check(probe)
        except NotApplicable as reason:
            if name == sharded.sharded_training.__name__:
                faults[name] = str(reason)
        except MMError as fault:
            faults[name] = fault.render()
        except Exception as fault:  # any exception of the model is a failed check
            faults[name] = sentence_of(fault)
    if faults:
        found = [f"{name}: {fault}" for name, fault in faults.items()]
        raise ContractError(
            "\n".join([f"the predictor fails {len(faults)} of {len(chosen)} checks:", *found])
        )


def _probe(probe: Probe) -> PredictorProbe:
    found = PredictorProbe(ComponentBuild(probe), place=probe.place)
    found.compiles = probe.registered.component.capabilities.get("compiles") is True
    return found


KIT = Kit(PREDICTOR_CHECKS, probe=_probe, ranks=tuple(_ON_RANKS), first=_FIRST)
"""The conformance checks of predictors."""
