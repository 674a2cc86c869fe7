"""`python -m asyncengine`: the command, where its script is not on the path."""

from asyncengine.cli.main import script

if __name__ == "__main__":
    script()
