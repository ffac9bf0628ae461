"use strict";
// Draws the picked leaf on both sides from the values in #data; reads the heat map out.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = { leaf: data.first, side: "target", part: 0, cell: 0, shown: [] };

function bytes(count) {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (size < 1024 || unit === "TiB") return `${unit === "B" ? size : Number(size.toPrecision(4))} ${unit}`;
    size /= 1024;
  }
}

function ranges(numbers) {
  const runs = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    if (runs.length && n === runs.at(-1)[1] + 1) runs.at(-1)[1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "g"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") element.style.cssText = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// The devices that hold each shard of a layout.
const holders = data.layouts.map((layout) => {
  const held = Array.from({ length: layout.parts.reduce((a, b) => a * b, 1) }, () => []);
  layout.cells.forEach((cell, at) => held[cell].push(layout.devices[at]));
  return held;
});

// Colours are the actor's devices; a device that only receives is grey.
const order = new Map(data.actor.map((device, at) => [device, at]));
const tint = (device) => (order.has(device) ? `--hue:${Math.round((360 * order.get(device)) / order.size)}` : "--hue:0;--tint:0%");

// ---------------------------------------------------------------- where shards lie in the picture

// A picture has rows (all dims but the last) and columns (the last). Where one dim alone is cut, rows are to scale.
function geometry(layout, shape) {
  const parts = layout.parts.length ? layout.parts : [1];
  const edges = layout.edges.length ? layout.edges : [[0, 1]];
  const sizes = shape.length ? shape : [1];
  const last = parts.length - 1;
  const cut = parts.slice(0, last).flatMap((count, dim) => (count > 1 ? [dim] : []));
  const scaled = cut.length <= 1;
  const rowDim = cut.length === 1 ? cut[0] : Math.max(0, last - 1);
  const numRows = parts.slice(0, last).reduce((a, b) => a * b, 1);
  const rows = last === 0 ? [0, 1] : scaled ? edges[rowDim].map((e) => e / sizes[rowDim]) : null;
  const columns = edges[last].map((e) => e / Math.max(1, sizes[last]));
  const height = last === 0 ? 0.16 : Math.min(1.1, Math.max(0.4, sizes.slice(0, last).reduce((a, b) => a * b, 1) / sizes[last]));
  const row = (r) => (rows ? [rows[r], rows[r + 1]] : [r / numRows, (r + 1) / numRows]);
  return {
    height,
    count: numRows * parts[last],
    cell(index) {
      const c = index % parts[last];
      const [top, bottom] = row(Math.floor(index / parts[last]));
      return { x: columns[c], y: top, w: columns[c + 1] - columns[c], h: bottom - top };
    },
    // A box within the leaf; to scale only where the picture is, else the whole shard.
    box(spans, index) {
      const whole = this.cell(index);
      if (!spans.length) return whole;
      const [a, b] = spans[last].map((e) => e / Math.max(1, sizes[last]));
      if (last === 0) return { x: a, y: 0, w: b - a, h: 1 };
      if (!rows) return { x: a, y: whole.y, w: b - a, h: whole.h };
      const [c, d] = spans[rowDim].map((e) => e / Math.max(1, sizes[rowDim]));
      return { x: a, y: c, w: b - a, h: d - c };
    },
    words(index) {
      let rest = index;
      const spans = [];
      for (let dim = last; dim >= 0; dim--) {
        const at = rest % parts[dim];
        rest = Math.floor(rest / parts[dim]);
        spans.unshift(parts[dim] > 1 ? `${edges[dim][at]}:${edges[dim][at + 1]}` : ":");
      }
      return shape.length ? `[${spans.join(", ")}]` : "[]";
    },
  };
}

const WIDTH = 400;

function rectangle(box, height, attributes) {
  return make("rect", {
    x: (box.x * WIDTH).toFixed(2), y: (box.y * height).toFixed(2),
    width: Math.max(0, box.w * WIDTH).toFixed(2), height: Math.max(0, box.h * height).toFixed(2), ...attributes,
  });
}

// ---------------------------------------------------------------- one leaf

function feedsOf(leaf) {
  return leaf.feeds.filter(([target, number, source]) =>
    state.side === "target" ? target === state.cell : number === state.part && source === state.cell);
}

function drawSide(side, leaf, part, selected) {
  const at = side === "source" ? leaf.sources[part].layout : leaf.target;
  const shape = side === "source" ? leaf.sources[part].shape : leaf.shape;
  const layout = data.layouts[at];
  const form = geometry(layout, shape);
  // Several sources share the column's height.
  const height = form.height * WIDTH * (side === "source" && leaf.sources.length > 1 ? 0.45 : 1);
  const active = state.side === side && (side === "target" || state.part === part);
  const touched = new Set(selected.map((f) => (side === "source" ? `${f[1]}.${f[2]}` : `0.${f[0]}`)));
  const svg = make("svg", {
    class: form.count > 64 ? "leaf fine" : "leaf", viewBox: `-1 -1 ${WIDTH + 2} ${height + 2}`, role: "group",
    "aria-label": `${side === "source" ? leaf.sources[part].path : leaf.path} on the ${side === "source" ? "actor" : "rollout"}: ${layout.cuts}, ${form.count} shards`,
  });
  const slices = side === "target" && leaf.feeds.length > 0;
  if (slices) {
    for (const feed of leaf.feeds) {
      const owner = holders[leaf.sources[feed[1]].layout][feed[2]][0];
      const dim = state.side === "target" ? feed[0] !== state.cell : !selected.includes(feed);
      svg.append(rectangle(form.box(feed[10], feed[0]), height, {
        class: `slice${feed[3] ? "" : " local"}${dim && state.side === "source" ? " dim" : ""}`, style: tint(owner),
      }));
    }
  }
  for (let cell = 0; cell < form.count; cell++) {
    const held = holders[at][cell];
    const on = active && cell === state.cell;
    const feeds = touched.has(`${side === "source" ? part : 0}.${cell}`);
    const dim = !active && selected.length > 0 && !feeds;
    const label = `${side === "source" ? "actor" : "rollout"} shard ${form.words(cell)} on device ${ranges(held)}`;
    const node = rectangle(form.cell(cell), height, {
      class: `cell${slices ? " plain" : ""}${on ? " on" : ""}${dim ? " dim" : ""}`, style: tint(held[0]),
      tabindex: on ? "0" : "-1", role: "button", "aria-pressed": String(on), "aria-label": label,
    });
    node.append(Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "title"), { textContent: label }));
    node.addEventListener("click", () => pick(side, part, cell));
    node.addEventListener("keydown", (event) => move(event, side, part, form.count, layout.parts.at(-1) ?? 1));
    svg.append(node);
    if (form.count <= 64) svg.append(name(form.cell(cell), height, held));
  }
  for (const feed of selected) {
    if (side === "source" ? feed[1] === part : state.side === "source") {
      svg.append(rectangle(form.box(feed[side === "source" ? 11 : 10], feed[side === "source" ? 2 : 0]), height, { class: "moves" }));
    }
  }
  return svg;
}

// The devices of a shard, where there is room for them.
function name(box, height, held) {
  const words = held.length > 3 ? `${held[0]} +${held.length - 1}` : held.join(", ");
  const text = make("text", { x: ((box.x + box.w / 2) * WIDTH).toFixed(1), y: ((box.y + box.h / 2) * height + 4).toFixed(1), "text-anchor": "middle" });
  if (box.w * WIDTH > words.length * 7 && box.h * height > 13) text.textContent = words;
  return text;
}

function move(event, side, part, count, columns) {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(side, part, state.cell); return; }
  if (step === undefined) return;
  event.preventDefault();
  const to = state.cell + step;
  if (to >= 0 && to < count) pick(side, part, to, true);
}

function pick(side, part, cell, focus = false) {
  Object.assign(state, { side, part, cell });
  draw();
  if (focus) document.querySelector("svg.leaf rect.on")?.focus();
}

function draw() {
  const leaf = data.leaves[state.leaf];
  const selected = feedsOf(leaf);
  const each = leaf.fate === "in place" ? "its buffers are reused" : `${bytes(leaf.crossing)} over links${leaf.all > leaf.crossing ? " each" : ""}`;
  byId("title").replaceChildren(
    make("code", {}, leaf.name), ` ${leaf.dtype} ${leaf.shape.join(" x ")}: ${bytes(leaf.bytes)}, ${each}`,
    leaf.operations.length ? ` (${leaf.operations.join(", ")})` : "",
  );
  byId("target-cuts").textContent = data.layouts[leaf.target].cuts;
  byId("source-cuts").textContent = leaf.sources.length ? [...new Set(leaf.sources.map((s) => data.layouts[s.layout].cuts))].join("; ") : "made of zeros";
  byId("target").replaceChildren(drawSide("target", leaf, 0, selected));
  byId("source").replaceChildren(...leaf.sources.flatMap((source, part) => [
    ...(leaf.sources.length > 1 || source.path !== leaf.path ? [make("p", { class: "part" }, source.path)] : []),
    drawSide("source", leaf, part, selected),
  ]));
  byId("hint").textContent = leaf.fate === "in place"
    ? "In place: every rollout device has its part already, nothing moves."
    : `Colours are devices${leaf.feeds.length ? "; a slice of a rollout shard has the colour of the device that holds it at the actor, and is grey where that is its own device" : ""}. Pick a shard on either side (arrow keys move).`;
  drawTable(leaf, selected);
  const layout = data.layouts[state.side === "target" ? leaf.target : leaf.sources[state.part].layout];
  const on = new Set(layout.devices.filter((_, at) => layout.cells[at] === state.cell));
  const role = state.side === "target" && document.querySelector('.mesh[data-role="rollout"]') ? "rollout" : "actor";
  for (const button of document.querySelectorAll(".mesh button")) {
    button.classList.toggle("on", button.parentElement.dataset.role === role && on.has(Number(button.dataset.device)));
  }
}

function drawTable(leaf, selected) {
  const table = byId("feeds");
  const target = state.side === "target";
  const source = leaf.sources[state.part];
  const form = target ? geometry(data.layouts[leaf.target], leaf.shape) : geometry(data.layouts[source.layout], source.shape);
  const held = holders[target ? leaf.target : source.layout][state.cell];
  const shard = `${target ? "rollout" : "actor"} shard ${form.words(state.cell)} on device ${ranges(held)}`;
  const total = leaf.totals.find(([cell]) => cell === state.cell);
  const row = (kind, cells, numbers) => make("tr", {}, ...cells.map((c, i) => make(kind, numbers.includes(i) ? { class: "n" } : {}, String(c))));
  if (leaf.totals.length) {
    table.caption.textContent = target && total ? `${shard}: fed by ${total[3]} source shards, too many to list` : `${shard}: pick a rollout shard to see what feeds it`;
    table.tHead.replaceChildren(row("th", ["source shards", "over links", "local", "rounds"], [0, 1, 2]));
    table.tBodies[0].replaceChildren(...(target && total ? [row("td", [total[3], bytes(total[1]), bytes(total[2]), span(total[4])], [0, 1, 2])] : []));
    return;
  }
  table.caption.textContent = selected.length
    ? `${shard}: ${target ? "fed by" : "feeds"} ${selected.length} ${target ? "source" : "rollout"} shard${selected.length === 1 ? "" : "s"}`
    : `${shard}: ${leaf.fate === "in place" ? "stays where it is" : "no bytes come from it"}`;
  table.tHead.replaceChildren(selected.length ? row("th", [target ? "source shard" : "rollout shard", "sent by device", "receivers", "over links", "local", "rounds"], [2, 3, 4]) : "");
  table.tBodies[0].replaceChildren(...selected.map((feed) => {
    const [cell, number, from, crossing, local, relayed, senders, numSenders, receivers, rounds] = feed;
    const there = target ? leaf.sources[number] : null;
    const words = target ? geometry(data.layouts[there.layout], there.shape).words(from) : geometry(data.layouts[leaf.target], leaf.shape).words(cell);
    const more = numSenders > senders.length ? ` and ${numSenders - senders.length} more` : "";
    const path = target && leaf.sources.length > 1 ? `${there.path} ` : "";
    return row("td", [path + words, senders.length ? ranges(senders) + more + (relayed ? " (relayed)" : "") : "–", receivers || "–", bytes(crossing), bytes(local), span(rounds)], [2, 3, 4]);
  }));
}

const span = (rounds) => (rounds.length ? (rounds[0] === rounds[1] ? `${rounds[0]}` : `${rounds[0]}-${rounds[1]}`) : "–");

// ---------------------------------------------------------------- the list

function choose(index) {
  Object.assign(state, { leaf: index, side: "target", part: 0, cell: 0 });
  fill(byId("search").value);
  draw();
}

function fill(word) {
  const wanted = word.trim().toLowerCase();
  state.shown = data.leaves.flatMap((leaf, at) => (leaf.name.toLowerCase().includes(wanted) ? [at] : []));
  const list = byId("list");
  list.replaceChildren(...state.shown.map((at) => {
    const leaf = data.leaves[at];
    const item = make("li", { role: "option", id: `leaf-${at}`, "aria-selected": String(at === state.leaf) }, make("span", {}, leaf.name), make("small", {}, leaf.fate === "over links" ? bytes(leaf.all) : leaf.fate));
    item.addEventListener("click", () => choose(at));
    return item;
  }));
  if (!state.shown.length) list.append(make("li", {}, "no leaf has this in its name"));
  list.setAttribute("aria-activedescendant", `leaf-${state.leaf}`);
  const chosen = byId(`leaf-${state.leaf}`);
  if (chosen) list.scrollTop = Math.max(0, chosen.offsetTop - list.offsetTop - list.clientHeight / 2);
}

function walk(event) {
  const at = state.shown.indexOf(state.leaf);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: state.shown.length - 1 }[event.key];
  if (to === undefined || !state.shown.length || (event.target.id === "search" && ["Home", "End"].includes(event.key))) return;
  event.preventDefault();
  choose(state.shown[Math.max(0, Math.min(state.shown.length - 1, to))]);
}

// ---------------------------------------------------------------- meshes, heat map

for (const button of document.querySelectorAll(".mesh button")) {
  button.addEventListener("click", () => {
    const leaf = data.leaves[state.leaf];
    const target = button.parentElement.dataset.role === "rollout" || !document.querySelector('.mesh[data-role="rollout"]');
    const layout = data.layouts[target ? leaf.target : leaf.sources[0]?.layout ?? leaf.target];
    const at = layout.devices.indexOf(Number(button.dataset.device));
    if (at >= 0) pick(target ? "target" : "source", 0, layout.cells[at]);
  });
}

const heat = document.querySelector("svg.heatmap");
let spot = [0, 0];
function readHeat(row, column) {
  const { rows, columns, bytes: sums } = data.heat;
  spot = [Math.max(0, Math.min(rows.length - 1, row)), Math.max(0, Math.min(columns.length - 1, column))];
  const mark = heat.querySelector(".pick");
  mark.setAttribute("x", spot[1]);
  mark.setAttribute("y", spot[0]);
  mark.setAttribute("visibility", "visible");
  byId("heat-value").textContent = `Device ${rows[spot[0]]} to ${columns[spot[1]]}: ${bytes(sums[spot[0]][spot[1]])}.`;
}
heat.addEventListener("pointermove", (event) => {
  const box = heat.getBoundingClientRect();
  readHeat(Math.floor(((event.clientY - box.top) / box.height) * data.heat.rows.length), Math.floor(((event.clientX - box.left) / box.width) * data.heat.columns.length));
});
heat.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  readHeat(spot[0] + step[0], spot[1] + step[1]);
});

byId("search").addEventListener("input", (event) => fill(event.target.value));
byId("search").addEventListener("keydown", walk);
byId("list").addEventListener("keydown", walk);
if (data.leaves.length) {
  document.querySelector(".pick").hidden = false;
  fill("");
  draw();
}
