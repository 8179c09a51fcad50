"""A recorded schedule as pictures: `jaxvllm trace FILE -o out.html` (a page to step through) or `-o out.png`.

The recording is replayed, so that any kind of it (see `jaxvllm.replay`) gives the same picture, block pool included.
Owns what is shown; how the page shows it is `drawing_page`. Must not know about devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxvllm.core import Scheduler
from jaxvllm.drawing_page import PAGE
from jaxvllm.replay import Replay

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6", "#79706e")


def frames(trace: dict[str, Any]) -> dict[str, Any]:
    """What the pictures need: {title, config, requests, steps}; blocks as they stand right after each schedule().

    KeyError or ValueError if `trace` can't be replayed.
    """
    run = Replay(trace)
    steps = []
    for _ in trace["steps"]:
        if run.ended:
            break
        watched = _watch(run.scheduler)
        record = run.step()
        record |= watched
        record.pop("block_tables", None)
        record.pop("cached_blocks_after", None)
        steps.append(record)
    requests = [
        {"name": str(wish.get("request_id", f"R{number}")), "prompt": len(wish["prompt"]),
         "priority": wish.get("priority", 0), "arrival_step": wish["arrival_step"]}
        for number, wish in enumerate(trace["requests"])
    ]  # fmt: skip
    config = {name: value for name, value in trace["config"].items() if name != "eos"}
    return {"policy": run.policy, "config": config, "requests": requests, "steps": steps, "colours": COLOURS}


def _watch(scheduler: Scheduler) -> dict[str, Any]:
    """Look at the scheduler when its next schedule() returns, before the commit: who holds what, and who samples."""
    seen: dict[str, Any] = {}
    schedule = scheduler.schedule

    def watched() -> Any:
        step = schedule()
        del scheduler.schedule  # type: ignore[method-assign]  # the class's again
        seen["tables"] = {request.index: request.block_table for request in scheduler.rows.holders()}
        seen["free"] = scheduler.pool.free_blocks()
        seen["cached"] = scheduler.pool.cached_blocks()
        seen["samples"] = [] if step is None else step.samples.tolist()
        return step

    scheduler.schedule = watched  # type: ignore[method-assign]
    return seen


def page(trace: dict[str, Any], title: str) -> str:
    """One HTML page that needs nothing else."""
    data = frames(trace) | {"title": title}
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # nothing may end the script early
    return PAGE.replace("/*DATA*/null", text)


def timeline(trace: dict[str, Any], title: str, path: Path) -> None:
    """A PNG: a row for each request, a column for each step, the tokens computed in it; free blocks below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = frames(trace)
    steps, requests = data["steps"], data["requests"]
    size = (min(24.0, 3 + 0.55 * len(steps)), min(20.0, 2.2 + 0.42 * len(requests)))
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=size, sharex=True, height_ratios=[max(2, len(requests)), 2], layout="constrained"
    )
    few = len(steps) <= 60
    for number, step in enumerate(steps):
        for request, start, count in step["scheduled"]:
            prompt = start < requests[request]["prompt"]
            top.barh(request, 0.92, left=number - 0.46, height=0.8, color=COLOURS[request % len(COLOURS)],
                     alpha=1.0 if prompt else 0.55)  # fmt: skip
            if few:
                top.text(number, request, str(count), ha="center", va="center", fontsize=8)
        waiting = [request for request in step["waiting"] if request not in [s[0] for s in step["scheduled"]]]
        top.plot([number] * len(waiting), waiting, ".", color="#bbbbbb", markersize=4)
        top.plot([number] * len(step["preempted"]), step["preempted"], "x", color="#c00000", markersize=8)
        hits = [request for request, hit in step["computed_at_admission"] if hit]
        top.plot([number - 0.36] * len(hits), hits, "*", color="black", markersize=6)
    top.set_yticks(range(len(requests)), [request["name"] for request in requests])
    top.invert_yaxis()
    top.set_title(f"{title}: {data['policy']}", loc="left")
    for marker, colour, label in (
        (".", "#bbbbbb", "waits"),
        ("x", "#c00000", "preempted"),
        ("*", "black", "prefix hit"),
    ):
        top.plot([], [], marker, color=colour, label=label)
    top.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, ncols=3, frameon=False)
    used = [data["config"]["num_blocks"] - step["num_free_blocks"] for step in steps]
    bottom.step(range(len(steps)), used, where="mid", color="#444444")
    bottom.set_ylim(0, data["config"]["num_blocks"])
    bottom.set_ylabel("blocks\nin use")
    bottom.set_xlabel("step (number in a bar: tokens; dark: prompt, light: decoding)")
    if few:
        bottom.set_xticks(range(len(steps)))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw(source: Path, target: Path) -> None:
    """The recording in `source` as `target`: .html or .png. ValueError for another ending or a wrong recording."""
    try:
        trace = json.loads(source.read_text(encoding="utf-8"))
        if not isinstance(trace, dict):
            raise TypeError(f"a recording is a JSON object, not a {type(trace).__name__}")
        if target.suffix == ".html":
            target.write_text(page(trace, source.stem), encoding="utf-8")
        elif target.suffix == ".png":
            timeline(trace, source.stem, target)
        else:
            raise ValueError(f"output={str(target)!r} must end in .html or .png")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{source} is no recording: {type(error).__name__}: {error}") from error
