"""The page of `mm report`: one HTML file with the curves, clips and config of runs; imports no torch."""
