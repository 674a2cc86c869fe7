"""The long form of tests, by `ASYNCENGINE_LONG=20`: so many times the random cases, and every case where the suite
takes some of each kind."""

import os

TIMES = int(os.environ.get("ASYNCENGINE_LONG", "1"))
LONG = TIMES > 1
