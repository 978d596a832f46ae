"""The tutorial's CustomDiT as an mm_core plugin."""
