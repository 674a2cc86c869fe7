"""The actor: its loop, its front door, and what both are made of. Start in `engine.loop`."""
