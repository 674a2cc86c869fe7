"""The `asyncengine` command: demo, chat, generate, bench. Each command imports what it needs when it runs."""
