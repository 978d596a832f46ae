"use strict";
// Charts as SVG: lines, heat maps, bars and stacked areas. No library: the page must open without a network.

const NS = "http://www.w3.org/2000/svg";
const MARGIN = { left: 62, right: 10, top: 8, bottom: 24 };
const COLOURS = 8;

function html(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, parent = null, text = null) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

const colour = (index) => `var(--c${index % COLOURS})`;

function swatch(index) {
  const node = html("span", { className: "swatch" });
  node.style.background = colour(index);
  return node;
}

function short(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(3);
  if (size >= 1e12) return `${+(value / 1e12).toPrecision(4)}T`;
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(+value.toPrecision(4));
}

function duration(seconds) {
  if (seconds < 60) return `${+seconds.toPrecision(3)}s`;
  if (seconds < 3600) return `${+(seconds / 60).toPrecision(3)}min`;
  return `${+(seconds / 3600).toPrecision(3)}h`;
}

function linearTicks(low, high, count) {
  const raw = (high - low) / count;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(+(k * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const m of [1, 2, 5]) ticks.push(m * 10 ** power);
  const inside = ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  if (inside.length < 2) return linearTicks(low, high, 4).filter((t) => t > 0);
  const tens = inside.filter((t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-9);
  return inside.length > 6 && tens.length > 1 ? tens : inside;
}

// A scale from data to pixels; `log` needs a positive domain.
function scale(low, high, from, to, log = false) {
  const f = log ? Math.log : (v) => v;
  const a = f(low), span = f(high) - a || 1;
  return (value) => from + ((f(value) - a) / span) * (to - from);
}

// y at x, between the points (xs rising); the ends beyond them.
function interpolate(xs, ys, x) {
  let low = 0, high = xs.length - 1;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// An exponential mean, without the bias of its first value (Adam's correction).
function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function path(xs, ys, x, y) {
  let text = "", open = false;
  ys.forEach((value, i) => {
    if (value === null || !Number.isFinite(y(value))) { open = false; return; }
    text += `${open ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  });
  return text;
}

function band(xs, lows, highs, x, y) {
  const kept = xs.map((_, i) => i).filter((i) => lows[i] !== null && Number.isFinite(y(lows[i])));
  if (!kept.length) return "";
  const along = (order, values) => order.map((i) => `${x(xs[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`).join("L");
  return `M${along(kept, highs)}L${along(kept.reverse(), lows)}Z`;
}

function frame(card, height, label) {
  const width = Math.max(240, card.clientWidth - 26);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  return { root, width, right: width - MARGIN.right, bottom: height - MARGIN.bottom };
}

function axes(box, x, y, xTicks, yTicks, xText, yText) {
  for (const tick of yTicks) {
    const at = y(tick);
    svg("line", { class: "rule", x1: MARGIN.left, x2: box.right, y1: at, y2: at }, box.root);
    svg("text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, box.root, yText(tick));
  }
  for (const tick of xTicks) {
    const at = x(tick);
    const anchor = at > box.right - 20 ? "end" : at < MARGIN.left + 12 ? "start" : "middle";
    svg("text", { x: at, y: box.bottom + 16, "text-anchor": anchor }, box.root, xText(tick));
  }
}

function onMove(root, move, leave) {
  const onPointer = (event) => move((event.clientX - root.getBoundingClientRect().left) * (root.viewBox.baseVal.width / root.clientWidth), event);
  root.addEventListener("pointermove", onPointer);
  root.addEventListener("pointerdown", onPointer);
  root.addEventListener("pointerleave", leave);
}

function extent(arrays) {
  let low = Infinity, high = -Infinity;
  for (const values of arrays) for (const v of values) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
  return low <= high ? [low, high] : null;
}

// lines: {label, colour, dash, x: [], y: [], low, high, bad: []}; xText formats the x axis.
function lineChart(card, readout, lines, options) {
  const box = frame(card, options.height || 210, options.title);
  const drawn = lines.map((line) => {
    const positive = (values) => (options.log && values ? values.map((v) => (v !== null && v > 0 ? v : null)) : values);
    const y = positive(line.y);
    return { ...line, y, low: positive(line.low), high: positive(line.high), smoothed: smooth(y, options.smoothing) };
  });
  const domain = extent(drawn.map((line) => (options.smoothing ? line.smoothed : line.y)));
  const reach = extent([...drawn.map((line) => line.x), ...drawn.map((line) => line.bad)]);
  if (!domain || !reach) {
    readout.textContent = options.log && lines.length ? "nothing above 0 to show on a log scale" : "no finite values";
    if (!reach) return box.root;
  }
  let [low, high] = domain || [0, 1];
  if (options.log && domain) {
    const room = (high / low) ** 0.04 || 1.1;
    [low, high] = low === high ? [low / 1.5, high * 1.5] : [low / room, high * room];
  } else {
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    [low, high] = [low - room, high + room];
  }
  const log = options.log && domain !== null;
  const x = scale(reach[0], reach[1], MARGIN.left, box.right);
  const y = scale(low, high, box.bottom, MARGIN.top, log);
  axes(box, x, y, linearTicks(reach[0], reach[1], box.width / 90), log ? logTicks(low, high) : linearTicks(low, high, 5), options.xText, short);
  const clip = `clip${lineChart.count = (lineChart.count || 0) + 1}`;
  svg("rect", { x: MARGIN.left, y: MARGIN.top, width: box.right - MARGIN.left, height: box.bottom - MARGIN.top },
    svg("clipPath", { id: clip }, box.root));
  const plot = svg("g", { "clip-path": `url(#${clip})` }, box.root);
  for (const line of drawn) {
    if (line.low) svg("path", { d: band(line.x, line.low, line.high, x, y), fill: line.colour, "fill-opacity": 0.18 }, plot);
    const stroke = { fill: "none", stroke: line.colour, "stroke-width": 1.6, "stroke-linejoin": "round", "stroke-dasharray": line.dash || "none" };
    if (options.smoothing) svg("path", { ...stroke, d: path(line.x, line.y, x, y), "stroke-opacity": 0.25 }, plot);
    svg("path", { ...stroke, d: path(line.x, line.smoothed, x, y) }, plot);
    if (line.x.length < 30)
      line.x.forEach((at, i) => line.smoothed[i] !== null && svg("circle", { cx: x(at), cy: y(line.smoothed[i]), r: 2.4, fill: line.colour }, plot));
    for (const at of line.bad)
      svg("path", { class: "bad", d: `M${x(at) - 4} ${box.bottom}l4 -8l4 8z` }, box.root);
  }
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: box.bottom, visibility: "hidden" }, box.root);
  const unscale = (pixel) => reach[0] + ((pixel - MARGIN.left) / (box.right - MARGIN.left || 1)) * (reach[1] - reach[0]);
  onMove(box.root, (pixel) => {
    const at = Math.min(reach[1], Math.max(reach[0], unscale(pixel)));
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    cursor.setAttribute("visibility", "visible");
    readout.replaceChildren(html("b", {}, options.xText(at)), ...drawn.filter((line) => line.x.length).flatMap((line) => {
      const i = nearest(line.x, at);
      const range = line.low && line.low[i] !== null ? ` (${short(line.low[i])} to ${short(line.high[i])})` : "";
      return ["  ", line.label, " ", html("b", {}, short(line.smoothed[i])), range];
    }));
  }, () => { cursor.setAttribute("visibility", "hidden"); readout.replaceChildren(...options.rest); });
  if (domain) readout.replaceChildren(...options.rest);
  return box.root;
}

const HEAT = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];  // viridis

function heatColour(share) {
  const at = Math.min(0.9999, Math.max(0, share)) * (HEAT.length - 1);
  const [a, b] = [HEAT[Math.floor(at)], HEAT[Math.floor(at) + 1]];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * (at % 1))).join(",")})`;
}

// table: {bins, x, rows}; colours over `range`, or over each row where `byRow`.
function heatMap(card, readout, table, options) {
  const height = MARGIN.top + MARGIN.bottom + 17 * table.bins.length;
  const box = frame(card, height, options.title);
  const cell = [(box.right - MARGIN.left) / table.x.length, 17];
  table.rows.forEach((row, r) => {
    const [low, high] = (options.byRow ? extent([row]) : options.range) || [0, 1];
    const log = low > 0;
    const share = scale(low, high, 0, 1, log);
    const top = box.bottom - 17 * (r + 1);
    svg("text", { x: MARGIN.left - 6, y: top + 13, "text-anchor": "end" }, box.root, table.bins[r]);
    row.forEach((value, c) => value !== null && svg("rect", {
      x: (MARGIN.left + c * cell[0]).toFixed(1), y: top, width: (cell[0] + 0.3).toFixed(1), height: 16.5,
      fill: heatColour(low === high ? 0.5 : share(value)),
    }, box.root));
  });
  const every = Math.max(1, Math.ceil(table.x.length / (box.width / 90)));
  table.x.forEach((step, c) => c % every === 0 && svg("text", {
    x: MARGIN.left + (c + 0.5) * cell[0], y: box.bottom + 16, "text-anchor": c ? "middle" : "start",
  }, box.root, short(step)));
  const rest = `${options.name} by ${options.scale}`;
  onMove(box.root, (pixel, event) => {
    const c = Math.floor((pixel - MARGIN.left) / cell[0]);
    const r = Math.floor((box.bottom - (event.clientY - box.root.getBoundingClientRect().top)) / 17);
    const value = table.rows[r] && table.rows[r][c];
    readout.textContent = value === undefined || value === null ? rest
      : `to step ${table.x[c]}, ${options.scale} ${table.bins[r]}: ${short(value)}`;
  }, () => { readout.textContent = rest; });
  readout.textContent = rest;
  return [box.root, colourBar(card, options.byRow ? null : options.range)];
}

// The colours of a heat map with their numbers; without a range, each bin has its own.
function colourBar(card, range) {
  const box = frame(card, 36, "colours");
  const width = box.right - MARGIN.left;
  for (let i = 0; i < 60; i++)
    svg("rect", { x: MARGIN.left + (i * width) / 60, y: 4, width: width / 60 + 0.3, height: 12, fill: heatColour((i + 0.5) / 60) }, box.root);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const [low, high] = range || [0, 0];
    const value = low > 0 ? low * (high / low) ** share : low + (high - low) * share;
    const text = range ? short(value) : { 0: "least of each bin", 1: "greatest of each bin" }[share];
    if (text) svg("text", { x: MARGIN.left + share * width, y: 32, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, box.root, text);
  }
  return box.root;
}

// Bars of the realised shares, a stair line of the declared ones. `most`: the top of the scale, as below.
function densityChart(card, readout, table, options) {
  const box = frame(card, 210, options.title);
  const most = options.most * 1.08 || 1;
  const y = scale(0, most, box.bottom, MARGIN.top);
  const width = (box.right - MARGIN.left) / table.bins.length;
  const left = (i) => MARGIN.left + i * width;
  axes(box, (v) => v, y, [], linearTicks(0, most, 4), short, (v) => `${+(v * 100).toPrecision(3)}%`);
  table.bins.forEach((bin, i) => {
    svg("rect", { x: left(i) + 1, width: width - 2, y: y(table.realised[i]), height: box.bottom - y(table.realised[i]), fill: options.colour, "fill-opacity": 0.55 }, box.root);
    svg("text", { x: left(i), y: box.bottom + 16, "text-anchor": "middle" }, box.root, bin.split("-")[0]);
  });
  const stair = table.declared.map((share, i) => `${i ? "L" : "M"}${left(i)} ${y(share)}L${left(i + 1)} ${y(share)}`).join("");
  svg("path", { d: stair, fill: "none", stroke: "var(--text)", "stroke-width": 1.8 }, box.root);
  const rest = "bars: drawn; line: declared by the configuration";
  onMove(box.root, (pixel) => {
    const i = Math.floor((pixel - MARGIN.left) / width);
    const percent = (v) => `${(v * 100).toFixed(2)}%`;
    readout.textContent = table.bins[i] === undefined ? rest
      : `${table.name} ${table.bins[i]}: drawn ${percent(table.realised[i])}, declared ${percent(table.declared[i])}`;
  }, () => { readout.textContent = rest; });
  readout.textContent = rest;
  return box.root;
}

const heights = (table) => table.x.map((_, c) => table.rows.reduce((sum, row) => sum + row[c], 0));

// Seconds per step by phase, stacked.
function stackedChart(card, readout, table, options) {
  const box = frame(card, 210, options.title);
  const most = options.most * 1.05 || 1;
  const x = scale(table.x[0], table.x[table.x.length - 1], MARGIN.left, box.right);
  const y = scale(0, most, box.bottom, MARGIN.top);
  axes(box, x, y, linearTicks(table.x[0], table.x[table.x.length - 1], box.width / 90), linearTicks(0, most, 4), short, duration);
  let base = table.x.map(() => 0);
  table.rows.forEach((row, r) => {
    const top = base.map((value, c) => value + row[c]);
    svg("path", { d: band(table.x, base, top, x, y), fill: colour(r), "fill-opacity": 0.8, stroke: colour(r), "stroke-width": 0.5 }, box.root);
    base = top;
  });
  const sum = table.means.reduce((a, b) => a + b, 0) || 1;
  const rest = "seconds a step, of the slowest rank";
  onMove(box.root, (pixel) => {
    const at = table.x[0] + ((pixel - MARGIN.left) / (box.right - MARGIN.left)) * (table.x[table.x.length - 1] - table.x[0]);
    const c = nearest(table.x, at);
    readout.textContent = `to step ${table.x[c]}: ` + table.phases.map((p, r) => `${p} ${duration(table.rows[r][c])}`).join("  ");
  }, () => { readout.textContent = rest; });
  readout.textContent = rest;
  const legend = html("div", { className: "legend readout" }, ...table.phases.map((phase, r) =>
    html("span", {}, swatch(r), ` ${phase} ${((table.means[r] / sum) * 100).toFixed(1)}%`)));
  return [box.root, legend];
}
