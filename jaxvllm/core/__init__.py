"""The host room: who runs, how many tokens, in which blocks. Standard library, numpy and xxhash; never jax.

Read in this order: `request` (one request's numbers), `block_pool` (the cache as bookkeeping) with its `free_list` and
`prefix_table`, `rows` (the same numbers as arrays), `queues` (waiting and running, and the moves between them) with
`waiting` (in which order), `policy`, `prefill_first` and `running_first` (who runs: one screen each) under `rules`
(what the caller may choose), `step` (what a step does; the counters), `scheduler` (schedule, commit, abort), `buckets`
(padded shapes), `plan` and `knobs` (what crosses to the device), `integrity` (what is true between two calls).
"""

from jaxvllm.core.block_pool import BlockPool
from jaxvllm.core.buckets import Bucket, BucketTable, default_decode_sizes, default_token_sizes
from jaxvllm.core.plan import PlanLayout, StepPlan, fill_plan
from jaxvllm.core.request import Request, RequestStatus
from jaxvllm.core.rules import Rules
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.step import Counters, ScheduledStep

__all__ = [
    "BlockPool",
    "Bucket",
    "BucketTable",
    "Counters",
    "PlanLayout",
    "Request",
    "RequestStatus",
    "Rules",
    "ScheduledStep",
    "Scheduler",
    "StepPlan",
    "default_decode_sizes",
    "default_token_sizes",
    "fill_plan",
]
