"""llama.cpp's server of the wheels `xllamacpp`, with those arguments of `llama-server` that the driver gives."""

from __future__ import annotations

import argparse
import threading
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("-t", "-tb", "-np", "-c", "--cache-ram", "--port", "--threads-http"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("-m", required=True)
    parser.add_argument("--host", required=True)
    given = parser.parse_args()

    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = given.m, [given.host], given.port
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = given.t, given.tb
    params.n_parallel, params.n_ctx, params.cont_batching = given.np, given.c, True
    params.cache_ram_mib, params.n_threads_http = given.cache_ram, given.threads_http
    server = xllamacpp.Server(params)
    print("listening at", server.listening_address, flush=True)
    threading.Event().wait()  # until it is killed


if __name__ == "__main__":
    main()
