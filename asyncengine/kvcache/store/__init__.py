"""Durable prefix cache: pages, window pages and states on disk, found by their tokens after a restart.

`record` is the format of one record; `segments` keeps records in a folder, with an index in memory; `survey` looks at
such a folder; `prefix_stream` is one prefix as a stream of records; `disk` is all that they ask of an operating system.
`engine.prefix_store` and `engine.prefix_files` are who calls them.
"""
