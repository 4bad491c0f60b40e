"""A seeded search for calls that do not keep the contract: `python -m tests.fuzz --help`."""
