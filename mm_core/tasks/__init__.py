"""Tasks: what a training step computes, from inputs to logits and losses; drawing words and clips."""
