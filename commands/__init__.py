"""The command line, one file for the options of each command; `tune.py` puts them together."""
