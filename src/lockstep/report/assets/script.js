"use strict";
// Crosshair and tooltip for the charts (pointer or arrow keys).
const tip = document.getElementById("tip");
const charts = [...document.querySelectorAll("svg.chart")].map((svg) => ({
  svg,
  steps: JSON.parse(svg.dataset.steps),
  x: JSON.parse(svg.dataset.x),
  series: JSON.parse(svg.dataset.series),
  cursor: svg.querySelector(".cursor"),
  at: -1,
}));

function text(value) {
  if (value === null) return "–";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

function show(chart, index, left, top) {
  for (const other of charts) {
    const at = other.steps.indexOf(chart.steps[index]);
    other.cursor.setAttribute("visibility", at < 0 ? "hidden" : "visible");
    if (at >= 0) {
      other.cursor.setAttribute("x1", other.x[at]);
      other.cursor.setAttribute("x2", other.x[at]);
    }
  }
  chart.at = index;
  const lines = Object.entries(chart.series).map(([label, values]) => `${label}  ${text(values[index])}`);
  tip.textContent = [`step ${chart.steps[index]}`, ...lines].join("\n");
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${left + 16 + box.width < innerWidth ? left + 16 : left - 16 - box.width}px`;
  tip.style.top = `${Math.max(4, Math.min(top + 14, innerHeight - box.height - 4))}px`;
}

function hide() {
  tip.hidden = true;
  for (const chart of charts) chart.cursor.setAttribute("visibility", "hidden");
}

for (const chart of charts) {
  if (!chart.steps.length) continue;
  const scale = () => chart.svg.getBoundingClientRect().width / chart.svg.viewBox.baseVal.width;
  chart.svg.addEventListener("pointermove", (event) => {
    const at = (event.clientX - chart.svg.getBoundingClientRect().left) / scale();
    let nearest = 0;
    chart.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(chart.x[nearest] - at)) nearest = i; });
    show(chart, nearest, event.clientX, event.clientY);
  });
  chart.svg.addEventListener("pointerleave", hide);
  chart.svg.addEventListener("blur", hide);
  chart.svg.addEventListener("keydown", (event) => {
    const last = chart.steps.length - 1;
    const to = { ArrowLeft: chart.at - 1, ArrowRight: chart.at + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(last, to));
    const box = chart.svg.getBoundingClientRect();
    show(chart, index, box.left + chart.x[index] * scale(), box.top + 20);
  });
}
