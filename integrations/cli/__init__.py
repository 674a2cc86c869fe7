"""The `asyncengine` command: demo, chat, generate, embed, bench, fit. Each imports what it needs when it runs."""
