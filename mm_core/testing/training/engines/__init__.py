"""The conformance kit of engines."""
