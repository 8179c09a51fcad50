"""Measurements: each `python -m bench.NAME` appends rows to bench/results/NAME.jsonl; see `bench.report`."""
