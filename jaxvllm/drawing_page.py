"""The page of `jaxvllm trace`: markup, style and script in one string. The data takes the place of /*DATA*/null.

Plain JavaScript, nothing from elsewhere: it must open from a disk without a network. Arrow keys step too.
"""

PAGE = r"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>jaxvllm trace</title>
<style>
:root { --ink:#222; --soft:#777; --line:#ddd; --paper:#fff; --mark:#fff3c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink:#e6e6e6; --soft:#9a9a9a; --line:#444; --paper:#1b1b1d; --mark:#4a421f; } }
body { font:14px/1.45 system-ui,sans-serif; color:var(--ink); background:var(--paper); margin:1.2rem auto;
  max-width:76rem; padding:0 1rem; }
h1 { font-size:1.25rem; margin:0 } h2 { font-size:1rem; margin:1.2rem 0 .4rem } .soft { color:var(--soft) }
#controls { position:sticky; top:0; background:var(--paper); padding:.6rem 0; display:flex; gap:.6rem;
  align-items:center;   z-index:2; border-bottom:1px solid var(--line) }
#slider { flex:1 } button { font:inherit; padding:.1rem .7rem }
.scroll { overflow-x:auto } table { border-collapse:collapse; font-variant-numeric:tabular-nums }
#rounds td, #rounds th { border:1px solid var(--line); min-width:2.6rem; height:1.6rem; text-align:center;
  padding:0 .25rem;   font-weight:normal; cursor:pointer; white-space:nowrap }
#rounds th:first-child { text-align:left; position:sticky; left:0; background:var(--paper); z-index:1; cursor:default }
#rounds .now { background:var(--mark) } #rounds .ran { color:#111 }
#pool { display:flex; flex-wrap:wrap; gap:4px }
.block { width:4.4rem; height:3.4rem; border:2px solid var(--line); border-radius:4px; padding:2px 4px; font-size:12px;
  line-height:1.3; overflow:hidden; box-sizing:border-box }
.block.held { color:#111 }
.block.cached { border-style:double; border-width:4px; padding:0 2px; border-color:var(--ink) }
.block.fresh { outline:2px solid #c00000 }
.chip { display:inline-block; color:#111; border-radius:3px; padding:0 .45rem;
  margin:0 .25rem .2rem 0 } #queues td { padding:.15rem .8rem .15rem 0; vertical-align:top }
</style></head><body>
<h1 id="title"></h1><div class="soft" id="config"></div>
<div id="controls"><button id="back" aria-label="one step back">&#9664;</button>
<input id="slider" type="range" min="0" value="0" aria-label="step">
<button id="next" aria-label="one step on">&#9654;</button>
<b id="label"></b></div>
<h2>This step</h2><table id="queues"></table>
<h2>Block pool <span class="soft">right after scheduling: request.table position; double frame: findable by its prefix;
red outline: taken in this step; #n: place in the free list; two names: shared</span></h2>
<div id="pool"></div><div id="nopool" class="soft"></div>
<h2>All steps <span class="soft">tokens of each request; full colour: prompt or recomputed, pale: decoding;
&middot; waits, &#10007; preempted, &#9733; prefix hit, &#9632; finished; click a column</span></h2>
<div class="scroll"><table id="rounds"></table></div>
<script>
"use strict";
const data = /*DATA*/null;
const $ = id => document.getElementById(id);
const make = (parent, tag, text, cls) => { const node = document.createElement(tag); if (text !== undefined)
  node.textContent = text; if (cls) node.className = cls; parent.appendChild(node); return node; };
const colour = (r, pale) => data.colours[r % data.colours.length] + (pale ? "88" : "");
const name = r => data.requests[r].name;
let now = 0;
$("title").textContent = data.title + " \u2014 " + data.policy;
$("config").textContent = Object.entries(data.config).map(([k, v]) => k + "=" + v).join("  ");
const columns = data.steps.map(() => []);
function rounds() {
  const table = $("rounds"), head = make(table, "tr");
  make(head, "th", "request");
  data.steps.forEach((step, k) => columns[k].push(make(head, "th", k)));
  data.requests.forEach((request, r) => {
    const row = make(table, "tr");
    make(row, "th", name(r) + " (" + request.prompt + " prompt tokens)");
    let decoding = false;
    data.steps.forEach((step, k) => {
      const cell = make(row, "td"); columns[k].push(cell);
      const at = step.scheduled.findIndex(entry => entry[0] === r);
      let text = "";
      if (step.preempted.includes(r)) { text += "\u2717 "; decoding = false; }
      if (step.computed_at_admission.some(([who, hit]) => who === r && hit > 0)) text += "\u2605 ";
      if (at >= 0) { text += step.scheduled[at][2]; cell.className = "ran";
        cell.style.background = colour(r, decoding); if (step.samples[at]) decoding = true; }
      else if (step.waiting.includes(r)) text += "\u00b7";
      if (step.finished.includes(r)) text += " \u25a0";
      cell.textContent = text;
    });
  });
  const totals = make(table, "tr"), free = make(table, "tr");
  make(totals, "th", "tokens"); make(free, "th", "free blocks");
  data.steps.forEach((step, k) => {
    columns[k].push(make(totals, "td", step.scheduled.reduce((sum, entry) => sum + entry[2], 0)));
    columns[k].push(make(free, "td", step.num_free_blocks)); });
  columns.forEach((cells, k) => cells.forEach(cell => cell.addEventListener("click", () => show(k))));
}
function chips(row, list, text) {
  const cell = make(row, "td");
  if (!list.length) make(cell, "span", "nobody", "soft");
  list.forEach((r, i) => { const chip = make(cell, "span", name(r) + (text ? text(r, i) : ""), "chip");
    chip.style.background = colour(r); });
}
function queues(step) {
  const table = $("queues"); table.replaceChildren();
  const line = (label, list, text) => {
    const row = make(table, "tr"); make(row, "td", label); chips(row, list, text); };
  const hits = new Map(step.computed_at_admission);
  line("runs", step.scheduled.map(entry => entry[0]), (r, i) => { const [, from, count] = step.scheduled[i];
    return " [" + from + "\u2026" + (from + count) + ") " + count + (count === 1 ? " token" : " tokens"); });
  line("waiting", step.waiting); line("running", step.running);
  if (step.preempted.length) line("preempted", step.preempted);
  const began = [...step.admitted, ...step.resumed];
  if (began.length) line("admitted", began, r => (step.resumed.includes(r) ? " again" : "") +
    (hits.get(r) ? ", " + hits.get(r) + " tokens from the cache" : ""));
  if (step.finished.length) line("finished", step.finished);
}
function pool(step, before) {
  const grid = $("pool"), size = data.config.num_blocks; grid.replaceChildren(); $("nopool").textContent = "";
  if (size > 4096) { $("nopool").textContent = "A pool of " + size + " blocks is too large to draw."; return; }
  const owners = tables => { const all = Array.from({length: size}, () => []);
    Object.entries(tables).forEach(([r, table]) => table.forEach((block, i) => all[block].push([+r, i])));
    return all; };
  const held = owners(step.tables), held_before = owners(before ? before.tables : {});
  const place = new Map(step.free.map((block, i) => [block, i])), cached = new Set(step.cached);
  for (let block = 0; block < size; block++) {
    const cell = make(grid, "div", undefined, "block"), who = held[block];
    make(cell, "div", block, "soft");
    if (who.length) { cell.classList.add("held"); cell.firstChild.style.color = "#333";
      const paint = who.map(([r]) => colour(r));
      cell.style.background = paint.length === 1 ? paint[0] : "linear-gradient(90deg," + paint.join(",") + ")";
      make(cell, "div", who.map(([r, i]) => name(r) + "." + i).join(" "));
      if (!who.every(([r]) => held_before[block].some(([other]) => other === r))) cell.classList.add("fresh");
    } else make(cell, "div", "free #" + place.get(block));
    if (cached.has(block)) cell.classList.add("cached");
  }
}
function show(k) {
  columns[now].forEach(cell => cell.classList.remove("now"));
  now = Math.max(0, Math.min(data.steps.length - 1, k));
  columns[now].forEach(cell => cell.classList.add("now"));
  columns[now][0].scrollIntoView({block: "nearest", inline: "nearest"});
  const step = data.steps[now];
  $("slider").value = now;
  $("label").textContent = "step " + now + " of " + data.steps.length +
    (step.kind ? ", " + step.kind : ", nothing to run");
  queues(step); pool(step, data.steps[now - 1]);
}
$("slider").max = data.steps.length - 1;
$("slider").addEventListener("input", event => show(+event.target.value));
$("back").addEventListener("click", () => show(now - 1));
$("next").addEventListener("click", () => show(now + 1));
document.addEventListener("keydown", event => { if (event.target.id === "slider") return;
  if (event.key === "ArrowLeft") show(now - 1); if (event.key === "ArrowRight") show(now + 1); });
rounds(); show(Math.max(0, +(location.hash.slice(1) || 0)));
document.body.dataset.ready = "yes";
</script></body></html>
"""
