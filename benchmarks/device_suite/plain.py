"""A plain FSDP2 loop of the model of a run: what the device suite compares a run with."""

from __future__ import annotations

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mm_core.config.sections import RunConfig
from mm_core.device import current_device


class Plain:
    """`fully_shard` by blocks, fused AdamW, clipping, one fixed sample and noise drawn on the device."""

    def __init__(self, config: RunConfig, recompute: bool) -> None:
        device = current_device()
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        with torch.device("meta"):
            self.model = config.registry.build("predictor", config.task.options["predictor"])
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for index, block in enumerate(self.model.blocks):
            self.model.blocks[index] = fully_shard(
                checkpoint_wrapper(block) if recompute else block, mp_policy=policy
            )
        fully_shard(self.model, mp_policy=policy)
        self.model.to_empty(device=device)
        self.model.init_weights()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        data = config.data.train.options
        frames, height, width = data["num_frames"], data["height"], data["width"]
        shape = (1, self.model.in_channels, (frames - 1) // 4 + 1, height // 8, width // 8)
        self.latents = torch.randn(shape, device=device)
        self.text = torch.randn(1, 512, self.model.text_dim, device=device, dtype=dtype)
        self.mask = torch.ones(1, 512, device=device, dtype=torch.bool)

    def steps(self, number: int) -> None:
        """Takes so many steps; does not wait for the device."""
        for _ in range(number):
            noise, sigma = torch.randn_like(self.latents), torch.rand(1, device=self.latents.device)
            share = sigma.view(-1, 1, 1, 1, 1)
            noisy = (1 - share) * self.latents + share * noise
            predicted = self.model(noisy, 1000 * sigma, self.text, self.mask)
            (predicted.float() - (noise - self.latents)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
