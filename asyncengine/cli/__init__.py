"""The `asyncengine` command: demo, chat, generate, embed, bench, fit. Each command imports what it needs when it runs."""
