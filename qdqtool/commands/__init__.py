"""One module per command of the command line; each has a click command named `command`."""
