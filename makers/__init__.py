"""Makers of the bundled models: run from a checkout, never installed. README.md has the commands."""
