"""The conformance kits of frozen components: autoencoders, text encoders and image encoders."""
