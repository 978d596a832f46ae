"""Tasks: what a training step computes, from inputs to logits and losses; generating words and clips."""
