"""The command's entry point: of the script `asyncengine`, and of `python -m asyncengine`."""


def script() -> None:
    """Run the command in a process of its own, with Ctrl-C heard before its imports begin."""
    from asyncengine.integrations.cli.exits import end_at_interrupt

    end_at_interrupt()
    from asyncengine.integrations.cli import main

    main.script()


if __name__ == "__main__":
    script()
