"""The long form of tests, by `ASYNCENGINE_LONG=1`: every case where the suite takes some of each kind."""

import os

LONG = os.environ.get("ASYNCENGINE_LONG") == "1"
