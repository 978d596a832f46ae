"""`mm report`: runs as one self-contained page. Reads what a run has written; loads no torch."""
