"""Test suites of other projects, run against the app over HTTP: each says what it fetches and leaves out."""
