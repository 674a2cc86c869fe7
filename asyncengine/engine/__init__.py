"""The actor: its loop, its front door, and what both are wired of. Start in `engine.loop`."""
