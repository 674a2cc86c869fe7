"""Durable prefix cache: pages, window pages and states on disk, found by their tokens after a restart.

`record` is the format of one record; `segments` keeps records in a folder, with an index in memory; `survey` looks at
such a folder; `prefix_stream` is one prefix as a stream of records; `disk` is all that they ask of an operating system.
`engine.prefix_store` and `engine.prefix_files` are who calls them.
"""

from asyncengine.kvcache.store.disk import Disk, SystemDisk
from asyncengine.kvcache.store.record import Header, RecordError, read_records, write_record
from asyncengine.kvcache.store.segments import SegmentStore, StoreCounts
from asyncengine.step import RecordPart

__all__ = [
    "Disk",
    "Header",
    "RecordError",
    "RecordPart",
    "SegmentStore",
    "StoreCounts",
    "SystemDisk",
    "read_records",
    "write_record",
]  # fmt: skip
