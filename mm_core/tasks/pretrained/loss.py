"""A model's own loss, taken as a sum.

Transformers models compute a mean over a micro-batch, each somewhere in its own forward. The labels passed to
them are a tensor subclass that survives slicing and reshaping, and intercepts the call of a loss function.
At this point the loss of each label is available, and so are sums by row.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mm_core.contracts import IGNORED_LABEL
from mm_core.device.torch_private import DisableTorchFunctionSubclass
from mm_core.errors import ContractError
from mm_core.modules.torch_calls import Args, Function, Kwargs
from mm_core.tasks.pretrained.chunked_loss import DeferredLogits, chunked_cross_entropy

_NAMES = ("cross_entropy", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits")
_LOSSES: dict[Function, str] = {getattr(functional, name): name for name in _NAMES}
_RESHAPING = {
    functional.pad,
    *(getattr(Tensor, name) for name in ("view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze")),
    *(getattr(Tensor, name) for name in ("to", "long", "float", "clone", "detach", "__getitem__")),
}


@dataclass
class RowLosses:
    """The losses of B rows in one forward of a Transformers model.

    Attributes:
        weights: [B] float32, factors of the rows' losses in `total`.
        label_weights: [B,L] float32, factors of the labels' losses in `rows`, from the first on; None: 1.
        keep_predictions: whether to keep the most likely labels, for evaluation.
        rows: [B] float32, the summed loss of each row.
        counted: [B], the number of labels in each row's sum, or the sum of their weights.
        total: the weighted sum returned to the model in place of its mean.
        predictions: the most likely label for each label.
        labels: the labels as the loss function received them.
        sums: number of loss calls with the labels.
        version: version counter of `total`, which changes if the model adds to it in place.
    """

    weights: Tensor
    label_weights: Tensor | None = None
    keep_predictions: bool = False
    rows: Tensor | None = None
    counted: Tensor | None = None
    total: Tensor | None = None
    predictions: Tensor | None = None
    labels: Tensor | None = None
    sums: int = 0
    version: int = 0

    def of_model(self, function: Function, args: Args, given: Kwargs) -> Tensor:
        """Computes the loss function that a model calls with its labels: the weighted sum instead of a mean.

        Raises:
            ContractError: the model's loss cannot be expressed as a sum over rows.
        """
        call = inspect.signature(function).bind(*args, **given)
        call.apply_defaults()
        options = call.arguments
        name = _LOSSES[function]
        if options["reduction"] == "none":
            raise _unsummable(f"it computes the {name} of each label and reduces it itself")
        if options.get("weight") is not None or options.get("pos_weight") is not None:
            raise _unsummable(f"its {name} uses class weights")
        found, target = options["input"], plain(options["target"])
        total: Tensor | None = None
        if function is functional.cross_entropy:
            losses, total = self._cross_entropy(found, target, options)
            counted = target != IGNORED_LABEL
        else:
            if isinstance(found, DeferredLogits):
                raise _unsummable(f"it computes {name} from the output embedding", "set task.loss: plain")
            losses = function(found.float(), target.float(), reduction="none")
            # A row with several values counts once, as in the mean.
            losses = self._by_row(losses).mean(1)
            counted = torch.ones_like(losses)
        self.rows, self.counted = self._weighed(losses).sum(1), self._weighed(counted).sum(1)
        self.sums += 1
        self.total = (self.rows * self.weights).sum() if total is None else total
        self.version = self.total._version
        return self.total

    def _cross_entropy(self, found: Tensor, target: Tensor, options: Kwargs) -> tuple[Tensor, Tensor | None]:
        """The loss of each label, and, if gradients do not pass through it, the weighted sum."""
        if options["ignore_index"] != IGNORED_LABEL:
            raise _unsummable(f"it ignores label {options['ignore_index']}, but only -100 may be ignored")
        total: Tensor | None = None
        if isinstance(found, DeferredLogits):
            if options["label_smoothing"]:
                raise _unsummable("it uses label smoothing", "set task.loss: plain")
            each = target.numel() // len(self.weights)  # labels in a row
            weights = self._weighed(self.weights[:, None].expand(-1, each)).reshape(-1)
            total, losses, best = chunked_cross_entropy(found, target, weights, self.keep_predictions)
        else:
            smoothing = options["label_smoothing"]
            losses = functional.cross_entropy(
                found.float(), target, ignore_index=IGNORED_LABEL, reduction="none", label_smoothing=smoothing
            )
            best = found.argmax(1) if self.keep_predictions else None
        if best is not None:
            self.predictions, self.labels = self._by_row(best), self._by_row(target)
        return losses, total

    def _weighed(self, values: Tensor) -> Tensor:
        """Values of labels [B,L], times the weights of these."""
        values = self._by_row(values)
        if self.label_weights is None:
            return values
        if (more := values.shape[1] - self.label_weights.shape[1]) < 0:
            raise _unsummable("it drops labels before the loss, so they cannot have weights")
        return values * functional.pad(self.label_weights, (0, more))

    def _by_row(self, values: Tensor) -> Tensor:
        if values.numel() % len(self.weights):
            raise _unsummable("it drops labels before the loss, so they cannot be assigned to rows")
        return values.reshape(len(self.weights), -1)


class FollowedLabels(Tensor):
    """Labels that intercept the loss function called with them; see `follow`."""

    record: RowLosses

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        given = kwargs or {}
        followed = next((a for a in (*args, *given.values()) if isinstance(a, FollowedLabels)), None)
        if func in _LOSSES and followed is not None:
            return followed.record.of_model(func, args, given)
        with DisableTorchFunctionSubclass():
            if func is Tensor.to and followed is not None and followed.is_floating_point():
                # The engine casts a forward's inputs to a lower precision; 998.7 would become 1000.
                args = (followed, *(a for a in args[1:] if not isinstance(a, torch.dtype)))
                given = {name: value for name, value in given.items() if name != "dtype"}
                if len(args) + len(given) == 1:
                    return followed
            found = func(*args, **given)
        # Anything else computed from labels (a decoder's inputs) is an ordinary tensor.
        if func in _RESHAPING and isinstance(found, Tensor) and followed is not None:
            return follow(plain(found), followed.record)
        return plain(found) if isinstance(found, FollowedLabels) else found


def follow(labels: Tensor, record: RowLosses) -> Tensor:
    """Makes labels record the loss that a model computes from them.

    Args:
        labels: the batch's labels.
        record: filled during the forward.
    """
    followed = labels.as_subclass(FollowedLabels)
    followed.record = record
    return followed


def plain(tensor: Tensor) -> Tensor:
    """Labels as an ordinary tensor again, without recording of a loss."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, FollowedLabels) else tensor


def check_returned(record: RowLosses, returned: object) -> None:
    """Checks that the loss returned by a model is the recorded sum over its labels.

    Raises:
        ContractError: the model computed another loss, or changed the sum.
    """
    if record.total is None:
        raise _unsummable(
            "it computes no loss from `labels`"
            if returned is None
            else "its loss is not cross entropy, squared error or absolute error"
        )
    if record.sums > 1:
        raise _unsummable("it computes several losses from the labels")
    if returned is not record.total or record.total._version != record.version:
        raise _unsummable(
            "it scales the loss of its labels or adds a term to it (a router's, for example)",
            "switch the term off by overriding config.json (task.overrides: {output_router_logits: false})",
        )


def _unsummable(why: str, hint: str | None = None) -> ContractError:
    return ContractError(
        f"the model's loss cannot be made a sum over the global batch: {why}",
        where="task.auto_class",
        accepted="a mean of cross entropy (over labels that are not -100), or of squared or absolute errors",
        hint=hint,
    )
