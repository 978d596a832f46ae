"""The commands `mm` and `mm-train`: options, help, exit codes, printed output; one module per command."""
