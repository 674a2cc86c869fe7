"""Simulated clusters: arrivals, failures and churn over the functions that place and route.

python -m benchmarks.cluster placement --help
"""
