"""Tasks: what a training step computes. Each is an `nn.Module` that satisfies `mm_core.contracts.Task`."""
