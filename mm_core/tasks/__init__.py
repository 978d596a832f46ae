"""Tasks: what a step computes, from checked inputs and clip sizes to logits and losses; generation."""
