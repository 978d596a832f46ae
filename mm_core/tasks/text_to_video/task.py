"""The task `text_to_video`: diffusion training of captioned clips, and sampling with guidance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.builtin.configs.text_to_video import SampleConfig, TextToVideoConfig
from mm_core.contracts import (
    Autoencoder,
    Batch,
    Bins,
    CachePart,
    Clip,
    Evaluation,
    Features,
    FrameNames,
    ImageEncoder,
    Loss,
    NoiseScheduler,
    Predictor,
    PredictorInputs,
    Randomness,
    SampleRequest,
    StepFlops,
    SupportsCaptions,
    TaskModule,
    TextEncoder,
)
from mm_core.device import copied_to
from mm_core.diffusion.mixture import clean_estimate, noise_share
from mm_core.errors import ContractError, plural
from mm_core.modules.casting import main_dtype
from mm_core.plugin.checks.values import returned
from mm_core.tasks.text_to_video.bins import declared_bins, sum_by_bin
from mm_core.tasks.text_to_video.captions import Captions, TokenizeCaptions, chosen
from mm_core.tasks.text_to_video.checks import (
    SIZES,
    component_faults,
    expert_faults,
    frame_faults,
    latents_faults,
    latents_of,
    size_faults,
)
from mm_core.tasks.text_to_video.conditions import Conditions, cast_condition, shapes_of
from mm_core.tasks.text_to_video.encoded import ClipEncoder, EncodedClips, TextToVideoInputs
from mm_core.tasks.text_to_video.experts import Experts
from mm_core.tasks.text_to_video.flops import TrainedFlops, sample_forward
from mm_core.tasks.text_to_video.frames import choices
from mm_core.tasks.text_to_video.inputs import GivenInputs
from mm_core.tasks.text_to_video.returned_shapes import expect, expect_latents, scheduler_faults
from mm_core.tasks.text_to_video.sampling import ClipSampler


class TextToVideo(TaskModule):
    """Trains a predictor on latents of clips, conditioned on their captions. Satisfies `Task`.

    The loss is the mean squared error over (C,T,H,W) of each sample, times its weights, summed over
    the batch. A predictor that is `SupportsFrames` is shown frames of the clip itself (`frames`); latents
    replaced by a given frame do not enter the loss. Noise, timesteps and dropped captions derive
    from (seed, purpose, epoch, sample).
    Classifier-free guidance: Ho and Salimans 2022, https://arxiv.org/abs/2207.12598.
    The arguments are the fields of `TextToVideoConfig`, with components built.
    """

    trainable = ("predictor",)
    frozen: tuple[str, ...] = ("autoencoder", "text_encoder")

    def __init__(
        self,
        predictor: Predictor,
        autoencoder: Autoencoder,
        text_encoder: TextEncoder,
        scheduler: NoiseScheduler,
        caption_dropout: float = TextToVideoConfig.caption_dropout,
        latents: str | None = TextToVideoConfig.latents,
        sample: SampleConfig | None = None,
        image_encoder: ImageEncoder | None = None,
        frames: FrameNames | None = TextToVideoConfig.frames,
        train_guidance: float | None = TextToVideoConfig.train_guidance,
    ) -> None:
        super().__init__()
        self.predictor = predictor
        self.autoencoder = autoencoder
        self.text_encoder = text_encoder
        self.experts = Experts(predictor, scheduler)
        self.flops = TrainedFlops(predictor)
        self.scheduler = self.experts.scheduler
        self._step = 0
        self._dtypes: dict[torch.dtype, torch.dtype] = {}
        self._shape: tuple[int, ...] | None = None  # of the latents of data.train, once the plan knows it
        self.image_encoder = image_encoder
        if image_encoder is not None:
            self.frozen = (*self.frozen, "image_encoder")
        self.frames: FrameNames = choices(predictor)[0] if frames is None else tuple(frames)
        self.caption_dropout = caption_dropout
        self.train_guidance = train_guidance
        self.given_guidance = 1.0 if train_guidance is None else train_guidance
        self.latents = latents_of(autoencoder, latents)
        self.sample_defaults = SampleConfig() if sample is None else sample
        self.conditions = Conditions(predictor)
        self.captions = Captions(text_encoder, predictor.text_padding, self.conditions)

    @property
    def _inputs(self) -> GivenInputs:
        parts = (self.predictor, self.conditions, self.autoencoder, self.image_encoder)
        return GivenInputs(*parts, self.frames, self.captions.reads)

    @property
    def _encoder(self) -> ClipEncoder:
        dropped, guidance = self.caption_dropout > 0, self.given_guidance
        return ClipEncoder(self.autoencoder, self.captions, self.conditions, self._inputs, guidance, dropped)

    @property
    def _sampler(self) -> ClipSampler:
        parts = (self._inputs, self.captions, self.conditions, self.experts)
        return ClipSampler(*parts, self.schedule_of, self.predict, self.sample_defaults)

    # -- training ------------------------------------------------------------------------------

    @cached_property
    def bins(self) -> Bins:
        """The bins of the training loss: ten noise levels, with their shares for clips as in data.train."""
        return declared_bins(self._trained_schedule[1])

    def schedule_of(self, shape: Sequence[int]) -> tuple[Experts, NoiseScheduler]:
        """The experts and the noise scheduler for clips with latents of the shape (C,T,H,W)."""
        experts = self.experts.for_tokens(self._tokens_of(shape))
        return experts, self.scheduler if experts is self.experts else experts.scheduler

    @property
    def _trained_schedule(self) -> tuple[Experts, NoiseScheduler]:
        return (self.experts, self.scheduler) if self._shape is None else self.schedule_of(self._shape)

    def _tokens_of(self, shape: Sequence[int]) -> int:
        return prod(shape[1:]) // prod(self.predictor.patch_size)

    def batch_transform(self) -> TokenizeCaptions:
        """The transform that data workers apply to a batch: tokenizing its captions."""
        encoder = self.text_encoder
        tokenizer = None
        if not isinstance(encoder, SupportsCaptions):
            tokenizer = returned(TextEncoder.tokenizer, encoder.tokenizer(), encoder)
        names, drops = tuple(self._inputs.names), self.caption_dropout > 0
        return TokenizeCaptions(tokenizer, names, self.captions.reads, drops)

    def begin_step(self, step: int) -> None:
        """Starts a training step (from 0); the step decides which expert is trained."""
        self._step = step

    def prepare(self, batch: Batch, rng: Randomness) -> TextToVideoInputs:
        """The inputs of a training forward, from a `VideoTextBatch`: `encode`, then `draw`."""
        return self.draw(self.encode(batch), rng)

    @torch.no_grad()
    def encode(self, batch: Batch, *, drops: bool = True) -> EncodedClips:
        """What of a `VideoTextBatch` needs no randomness: moments, text states (with `drops` also those of
        the empty caption, if any are dropped), given frames, conditions."""
        return self._encoder.encode(batch, self.weight(batch), drops)

    def cache_parts(self) -> tuple[CachePart, ...]:
        """See `SupportsCache`: latents, given frames and their features, captions."""
        return self._encoder.cache_parts()

    @torch.no_grad()
    def features(self, part: str, given: Batch | Sequence[str]) -> list[Features]:
        """See `SupportsCache`."""
        return self._encoder.features(part, given, self.compute_device())

    def use_texts(self, find: Callable[[str], Features | None]) -> None:
        """See `SupportsCache`."""
        self.captions.find = find

    @torch.no_grad()
    def draw(self, clips: EncodedClips, rng: Randomness) -> TextToVideoInputs:
        """Draws latents of the posterior, noise, timesteps and dropped captions of encoded clips.

        Args:
            clips: from `encode`.
            rng: the root of the run's randomness.
        """
        keys = clips.keys
        sampled = [rng.generator("posterior", *key) for key in keys] if self.latents == "sample" else None
        latents = expect_latents(clips.posterior, clips.shape, self.autoencoder, sampled)
        device, shape = latents.device, tuple(latents.shape[1:])
        noise = copied_to(device, torch.stack([rng.normal(shape, "noise", *key) for key in keys]))
        experts, scheduler = self.schedule_of(shape)
        # Every rank and micro-batch must train the same expert, so clips of data.train choose it.
        expert, _ = self._trained_schedule[0].of_step(rng, self._step)
        drawn = [rng.generator("timestep", *key) for key in keys]
        timestep = copied_to(device, experts.trained_on(expert).sample_timesteps(drawn))
        share = self.caption_dropout
        dropped = [share > 0 and rng.uniform("caption_dropout", *key) < share for key in keys]
        text, mask, conditions = chosen(clips.text, clips.empty, dropped)
        weights = copied_to(device, clips.sample_weights)
        return TextToVideoInputs(
            given=self._inputs.inputs(
                scheduler.add_noise(latents, noise, timestep),
                scheduler.model_timestep(timestep),
                self._inputs.dropped(clips.given, rng, keys),
                {**conditions, **clips.conditions},
            ),
            text=text,
            text_mask=mask,
            target=scheduler.target(latents, noise, timestep),
            factors=scheduler.loss_weight(timestep) * weights,
            weight=clips.weight,
            weights=weights,
            sigma=noise_share(scheduler, timestep),
            expert=expert,
        )

    def loss(self, inputs: TextToVideoInputs) -> Loss:
        """The diffusion loss: squared error of the prediction, in float32, as a weighted sum over samples."""
        predicted = self.predict(inputs.given, inputs.text, inputs.text_mask, inputs.expert)
        expect(predicted, inputs.target.shape, "predictor", "forward", self.predictor)
        losses = _squared_error(predicted, inputs.target, inputs.given.counts) * inputs.factors
        bins = sum_by_bin(inputs.sigma, losses, inputs.weights)
        latents = inputs.given.latents
        tokens = len(latents) * self._tokens_of(latents.shape[1:])
        flops = self.flops.of(inputs.given, inputs.text, inputs.expert)
        return Loss(losses.sum(), inputs.weight, bins=bins, tokens=tokens, flops=flops)

    def predict(self, given: PredictorInputs, text: Tensor, mask: Tensor, expert: str | None) -> Tensor:
        """Calls the predictor: [B,C,T,H,W].

        Args:
            given: latents, timesteps and conditions.
            text: [B,L,D].
            mask: [B,L], on any device.
            expert: the expert for all rows, or None.

        Raises:
            ContractError: a condition that the predictor needs is missing.
        """
        self.conditions.check(given.conditions, shapes_of(self.text_encoder))
        dtype = self.input_dtype or main_dtype(self.get_submodule("predictor"), self._dtypes)
        routed: dict[str, Any] = {} if expert is None else {"expert": expert}
        routed |= self.conditions.lengths_of(mask)
        return self.predictor(
            latents=given.latents.to(dtype),
            timestep=given.timestep.float(),
            text=text.to(dtype),
            text_mask=copied_to(text.device, mask),
            **routed,
            **{n: cast_condition(n, copied_to(text.device, t), dtype) for n, t in given.conditions.items()},
        )

    # -- evaluation ----------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch, rng: Randomness, quantiles: Sequence[float]) -> Evaluation:
        """Validation loss of each clip at every quantile of the training timesteps, and the mean over them.

        The noise derives from (seed, row): it is the same at all quantiles and in all evaluations. Captions
        are never dropped, and latents are the posterior's mode.

        Returns:
            Losses by name; `outputs` contains the `clean` latents and their one-step `estimate` from the
            middle quantile, [B,C,T,H,W].
        """
        clips = self.encode(batch, drops=False)
        clean = expect_latents(clips.posterior, clips.shape, self.autoencoder)
        device, shape = clean.device, tuple(clean.shape[1:])
        noise = torch.stack([rng.normal(shape, "validation noise", key.index) for key in batch.keys])
        noise = noise.to(device)
        text, mask, conditions = clips.text
        conditions = {**conditions, **clips.conditions}
        experts, scheduler = self.schedule_of(shape)
        middle = sorted(quantiles)[len(quantiles) // 2]
        losses, estimate = {}, clean
        for quantile in quantiles:
            timestep = scheduler.timestep_quantile(torch.full((len(batch),), quantile))
            expert = experts.of(timestep)
            timestep = timestep.to(device)
            noisy = scheduler.add_noise(clean, noise, timestep)
            given = self._inputs.inputs(noisy, scheduler.model_timestep(timestep), clips.given, conditions)
            predicted = self.predict(given, text, mask, expert)
            expect(predicted, clean.shape, "predictor", "forward", self.predictor)
            error = _squared_error(predicted, scheduler.target(clean, noise, timestep), given.counts)
            losses[f"loss_at/{quantile:g}"] = error * scheduler.loss_weight(timestep)
            if quantile == middle:
                estimate = clean_estimate(scheduler, noisy, predicted.float(), timestep)
                if given.counts is not None:
                    estimate = torch.where(given.counts, estimate, clean)
        mean = torch.stack(list(losses.values())).mean(0)
        outputs = {"clean": clean, "estimate": estimate}
        return Evaluation({"loss": mean, **losses}, torch.ones(len(batch), device=device), outputs)

    # -- sampling ------------------------------------------------------------------------------

    def sample(self, request: SampleRequest) -> list[Clip]:
        """Generates one clip for each prompt. The noise of clip i derives from (seed, first + i), whatever
        other clips are generated with it."""
        return list(self.clips(request))

    @torch.no_grad()
    def clips(self, request: SampleRequest) -> Iterator[Clip]:
        """Generates one clip for each prompt, and yields each as soon as it is ready."""
        sampler, device = self._sampler, self.compute_device()
        wanted = sampler.completed(request)
        with self.experts.complete(device):
            yield from sampler.clips(wanted, device)

    def check_request(self, request: SampleRequest) -> None:
        """Checks a sampling request before any work: sizes, images, guidance, files of all experts.

        Raises:
            MMError: `sample` would refuse the request.
        """
        self._sampler.completed(request)
        with self.experts.complete(self.compute_device()):
            pass  # opening the context checks that the experts' files exist

    def compute_device(self) -> torch.device:
        """The device to compute on: that of the frozen parts, since the predictor may be offloaded."""
        for part in (self.text_encoder, self.autoencoder, self.predictor):
            if isinstance(part, nn.Module):
                for tensor in chain(part.parameters(), part.buffers()):
                    if not tensor.is_meta:  # a cache is built without the predictor's weights
                        return tensor.device
        return torch.device("cpu")

    def notes(self) -> Sequence[str]:
        """A note for each condition that the text encoder returns and the predictor does not take."""
        return [
            f"task.text_encoder: `{name}` is not used: the predictor's forward does not name it"
            for name in self.conditions.unused(self.text_encoder)
        ]

    def sample_flops(self, batch_spec: Mapping[str, Any], recomputed: Collection[str]) -> StepFlops | None:
        """FLOPs of one training clip, for the plan; None where they are unknown."""
        found = self.sample_forward(batch_spec)
        return None if found is None else self.flops.of_sample(found[1], recomputed)

    def sample_forward(self, batch_spec: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
        """The predictor's arguments for one training clip, for the plan; None where sizes are unknown."""
        return sample_forward(self._inputs, self.text_encoder, self.conditions, batch_spec)

    def check(self, batch_spec: Mapping[str, Any]) -> None:
        """Checks that the components match each other, the clip sizes of the data and the sizes to sample.

        Raises:
            ContractError: lists every mismatch.
        """
        sizes = {"data.train": {name: batch_spec.get(name) for name in SIZES}}
        own = {name: getattr(self.sample_defaults, name) or batch_spec.get(name) for name in SIZES}
        if own != sizes["data.train"]:
            sizes["task.sample"] = own
        guidance = {
            "task.train_guidance": self.train_guidance,
            "task.sample.true_guidance": self.sample_defaults.true_guidance,
        }
        faults = [
            *component_faults(self.predictor, self.autoencoder, self.text_encoder),
            *expert_faults(self.predictor),
            *frame_faults(self._inputs),
            *latents_faults(self.autoencoder, self.latents),
            *self.conditions.guidance_faults(guidance),
            *self._inputs.faults(batch_spec.get("fields")),
            *self.conditions.faults(self.text_encoder, bool(self._inputs.rows)),
            *scheduler_faults(self.scheduler, self.autoencoder.latent_channels),
        ]
        for where, clip in sizes.items():
            known = {name: size for name, size in clip.items() if size is not None}
            if len(known) == len(SIZES):
                faults += size_faults(self.predictor, self.autoencoder, where, known)
        try:
            self.experts.scales(self.sample_defaults.guidance, "task.sample.guidance")
        except ContractError as fault:
            faults.append(fault)
        if len(faults) == 1:
            raise faults[0]
        if faults:
            raise ContractError(
                "\n".join(
                    [f"the task has {plural(len(faults), 'error')}:", *(fault.render() for fault in faults)]
                )
            )
        trained = [size for size in sizes["data.train"].values() if size is not None]
        if self._shape is None and len(trained) == len(SIZES):  # the first that is checked is data.train
            self._shape = self.autoencoder.latent_shape(*trained)


def _squared_error(predicted: Tensor, target: Tensor, counts: Tensor | None) -> Tensor:
    """[B] float32: the mean over (C,T,H,W) where counts[1 or B,1,T,H,W] is true (None: everywhere)."""
    squares = (predicted.float() - target).square()
    if counts is None:
        return squares.flatten(1).mean(1)
    # torch.where instead of a product: values that do not count may be non-finite.
    used = counts.flatten(1).sum(1).clamp(min=1) * squares.shape[1]
    return torch.where(counts, squares, 0.0).flatten(1).sum(1) / used
