"""The private parts of DeepSpeed that the engine needs: its norms, how it discards, and where masters lie.

DeepSpeed's public API gives the norm after an update only, cannot discard gradients, and sets states only of
tensors that divide evenly. All of that is here, for `library.VERSIONS`, and each line is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm_core.modules import adapted_layers

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Numbers of DeepSpeed's dynamic loss scaler."""


class Fragment(NamedTuple):
    """What a rank holds of a trained parameter.

    Attributes:
        master: [n] the float32 elements of this rank; n may be 0.
        start: index of the first in the whole parameter.
        state: the optimizer's state of the flat buffer, if there is any: tensors of its size are cut to
            these elements.
    """

    master: Tensor
    start: int
    state: Mapping[str, Tensor]


class Zero:
    """DeepSpeed's optimizer of a stage, through one interface; this is that of stages 1 and 2."""

    _measures = "scaled_global_norm"
    """DeepSpeed's method that adds up the gradients' squares over the ranks: `step` would call it again."""

    _received = "_offload_accumulated_param_ids"
    """DeepSpeed's keys of the parameters that had a gradient in this step."""

    _finish = "_finalize_cpu_offload_gradient_accumulation"
    """DeepSpeed's method that brings the sums of gradients of those keys to the host."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.inner = engine, engine.optimizer
        self._found: Any = None
        self._begun = False
        self._scale_state: dict[str, Tensor] = {}

    @property
    def scaler(self) -> Any:
        """The loss scaler of float16; None without a dynamic one."""
        found = getattr(self.inner, "loss_scaler", None)
        return found if getattr(found, "dynamic", False) else None

    @property
    def scale(self) -> float:
        """The factor of the loss before backward."""
        return float(getattr(self.inner, "loss_scale", 1.0))

    def scale_state(self, *, loaded: bool) -> dict[str, Tensor]:
        """The numbers of the loss scaler as tensors; without one, none.

        Args:
            loaded: a checkpoint may have been loaded into the tensors since the last call.
        """
        if (scaler := self.scaler) is None:
            return {}
        if loaded:
            self.load_scale()
        for key in _SCALE:
            value = torch.tensor(float(getattr(scaler, key)), dtype=torch.float64)
            self._scale_state.setdefault(key, value).copy_(value)
        return self._scale_state

    def load_scale(self) -> None:
        """Sets the loss scaler to the numbers of `scale_state`'s tensors."""
        for key, value in self._scale_state.items():
            kind = type(getattr(self.scaler, key))
            setattr(self.scaler, key, kind(float(value)))

    def received(self, last: bool) -> None:
        """Called after each backward. DeepSpeed adds to what a parameter without a gradient in the step's
        first backward had in an earlier step: that becomes 0.

        Args:
            last: whether it was the step's last one.
        """
        if not self._begun:
            for key, total in self._sums().items():
                if key not in getattr(self.inner, self._received):
                    total.zero_()
        self._begun = not last

    def norm(self) -> float:
        """The L2 norm of the averaged gradients; not finite if one of them is not."""
        if self._keeps_gradient():
            self._complete()
        self._found = getattr(self.inner, self._measures)()
        norm = float(self._combined(self._found)) / self.scale
        return norm if norm >= 0 else float("inf")  # -1 stands for a norm that is not finite

    def step(self, clip: float | None) -> None:
        """Clips and updates."""
        self.inner.clip_grad = clip or 0.0
        with patch.object(self.inner, self._measures, lambda *_, **__: self._found):
            self.engine.step()

    def fragment(self, parameter: nn.Parameter) -> Fragment:
        """What this rank holds of a trained parameter."""
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            flat = self._flats()[0]
            return Fragment(flat.detach()[:0], 0, self._cut(flat, 0, 0))
        address = mapping.hp_fragment_address
        flat = self._flats()[mapping.param_group_index]
        cut = flat.detach().narrow(0, address.start, address.numel)
        start = mapping.lp_fragment_address.start
        return Fragment(cut, start, self._cut(flat, address.start, address.numel))

    def frozen(self, parameter: nn.Parameter) -> Fragment:
        """What this rank holds of a frozen parameter, in the dtype of the computation."""
        return Fragment(parameter.detach().view(-1), 0, {})

    def make_state(self) -> None:
        """Gives the optimizer the states of its first step, which are zero."""
        for flat in self._flats():
            flat.grad = torch.zeros_like(flat)
        self._make_state()
        for flat in self._flats():
            for value in self.inner.optimizer.state[flat].values():
                value.zero_()
            if not self._keeps_gradient():
                flat.grad = None

    # -- what the stages differ in -------------------------------------------------------------

    def _combined(self, found: Any) -> Any:
        """The norm from what DeepSpeed's method returns."""
        return found

    def _sums(self) -> Mapping[int, Tensor]:
        """Sums of gradients over micro-batches, by the keys of their parameters."""
        return self.inner.accumulated_grads_in_cpu if self.inner.cpu_offload else {}

    def _own(self) -> Iterable[nn.Parameter]:
        """The parameters of which this rank has gradients."""
        return chain(*self.inner.params_in_partition)

    def _key(self, parameter: nn.Parameter) -> int:
        return int(self.inner.get_param_id(parameter))

    def _complete(self) -> None:
        """Brings to the host what the step's last micro-batch has left out: gradients of those before it, and
        0 where there is none."""
        inner, flats, late = self.inner, self._flats(), set()
        received = getattr(inner, self._received)
        for parameter in self._own():
            if (number := inner.get_param_id(parameter)) in inner.norm_for_param_grads:
                continue
            if (key := self._key(parameter)) in received:
                late.add(key)
            else:
                group, *_, offset, size = inner.grad_position[number]
                flats[group].grad.narrow(0, offset, size).zero_()
        with patch.object(inner, self._received, late):
            getattr(inner, self._finish)()

    def _flats(self) -> list[Tensor]:
        return list(self.inner.single_partition_of_fp32_groups)

    def _keeps_gradient(self) -> bool:
        return bool(self.inner.cpu_offload)

    def _make_state(self) -> None:
        for index in range(len(self._flats())):
            self.inner._optimizer_step(index)

    def _cut(self, flat: Tensor, start: int, count: int) -> dict[str, Tensor]:
        state = self.inner.optimizer.state.get(flat, {})
        return {
            key: value.detach().narrow(0, start, count) if value.shape == flat.shape else value
            for key, value in state.items()
        }

    def publish(self) -> None:
        """Copies the masters into the parameters that compute."""
        self.inner.update_lp_params()

    def discard(self) -> None:
        """Clears the gradients of a step."""
        inner = self.inner
        inner.micro_step_id = -1
        inner._wait_for_offload_copies()
        inner.zero_grad()
        for key in inner.averaged_gradients:
            inner.averaged_gradients[key] = inner.all_grad_tensors[key] = None
        if inner.cpu_offload:
            inner._offload_accumulated_param_ids = set()
            inner.reset_cpu_buffers()
        inner._release_preflattened_grad_buffers()


class ZeroBF16(Zero):
    """Stage 1 in bfloat16 with float32 gradients: another class in DeepSpeed."""

    _measures = "get_grads_for_norm"

    def _combined(self, found: Any) -> Any:
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        return get_global_norm_of_tensors(found[0], mpu=None, norm_type=2)

    def step(self, clip: float | None) -> None:
        self.inner.clip_grad = clip or 0.0
        self.engine.step()  # it asks for gradients of another form to clip

    def _flats(self) -> list[Tensor]:
        return list(self.inner.fp32_groups_flat_partition)

    def _sums(self) -> Mapping[int, Tensor]:
        return {}

    def _complete(self) -> None:
        """Nothing is left out."""

    def _keeps_gradient(self) -> bool:
        return True

    def _make_state(self) -> None:
        self.inner.optimizer.step()

    def discard(self) -> None:
        self.inner.clear_hp_grads()
        self.inner.clear_lp_grads()


class Zero3(Zero):
    """Stage 3: the parameters are split too, each of them evenly."""

    _measures = "_get_norm_groups"
    _received = "_offload_boundary_param_ids"
    _finish = "_finalize_offload_gradient_accumulation"

    def _combined(self, found: Any) -> Any:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return combine_grad_norm_groups(found)

    def _flats(self) -> list[Tensor]:
        return list(self.inner.fp32_partitioned_groups_flat)

    def _keeps_gradient(self) -> bool:
        return bool(self.inner.offload_optimizer)

    def _sums(self) -> Mapping[int, Tensor]:
        found: Mapping[int, Tensor] = self.inner._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return found

    def _own(self) -> Iterable[nn.Parameter]:
        return chain(*self.inner.fp16_groups)

    def _key(self, parameter: nn.Parameter) -> int:
        return int(parameter.ds_id)  # type: ignore[attr-defined]

    def fragment(self, parameter: nn.Parameter) -> Fragment:
        group, offset, size = self.inner.grad_position[self.inner.get_param_id(parameter)]
        flat = self._flats()[group]
        start, count = _own_part(parameter, size)
        return Fragment(flat.detach().narrow(0, offset, count), start, self._cut(flat, offset, count))

    def frozen(self, parameter: nn.Parameter) -> Fragment:
        held = parameter.ds_tensor  # type: ignore[attr-defined]
        start, count = _own_part(parameter, held.numel())
        return Fragment(held.detach().view(-1)[:count], start, {})

    def publish(self) -> None:
        inner = self.inner
        inner._partition_all_parameters()
        for index in range(len(inner.fp16_groups)):
            inner._reassign_or_swap_out_partitioned_parameters(index)
        self._gather_persistent()

    def discard(self) -> None:
        self.inner._pre_step()
        self.inner._partition_all_parameters()
        self.inner._overflow_clean_up(self.scale)
        self._gather_persistent()

    def _gather_persistent(self) -> None:
        """Gathers the small parameters, which stay whole between steps."""
        if kept := self.inner.persistent_parameters:
            kept[0].all_gather(kept)


def _own_part(parameter: nn.Parameter, size: int) -> tuple[int, int]:
    """First element and number of elements of this rank, without padding."""
    whole = parameter.ds_numel  # type: ignore[attr-defined]
    start = min(dist.get_rank() * size, whole)
    return start, min(size, whole - start)


def zero_of(engine: Any, stage: int) -> Zero:
    """The interface to the optimizer that DeepSpeed has made for a stage from 1 on."""
    if stage == 3:
        return Zero3(engine)
    return ZeroBF16(engine) if type(engine.optimizer).__name__ == "BF16_Optimizer" else Zero(engine)


def split(parameter: nn.Parameter, config: Mapping[str, Any]) -> nn.Parameter:
    """Splits a whole parameter over the ranks for stage 3; rank 0's values count. Called by all ranks."""
    from deepspeed.runtime.zero.partition_parameters import Init

    shell = nn.Module()
    shape = parameter.shape
    if not shape:
        parameter = nn.Parameter(parameter.detach().view(1), parameter.requires_grad)
    shell.register_parameter("held", parameter)
    Init(module=shell, config_dict_or_path=dict(config), mem_efficient_linear=False)
    parameter.ds_shape = shape  # type: ignore[attr-defined]
    return parameter


def gather_for_adapters(module: nn.Module) -> None:
    """Lets stage 3 gather all parameters in an adapter layer for its forward: DoRA, LoKr and LoHa read those
    of modules whose forward they do not call."""
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for layer in adapted_layers(module).values():
        for parameter in layer.parameters():
            register_external_parameter(layer, parameter)
