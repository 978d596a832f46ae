"""Flow matching, samplers, and the codecs and text encoders that the core ships."""
