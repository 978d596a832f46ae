// The page: which charts there are, what the controls do, clips, tables.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const MANY = RUNS.length > 1;
const view = { smoothing: 0, log: false, x: "step", byRow: false, shown: RUNS.map(() => true) };
const redraws = [];

const AXES = { step: "steps", samples: "samples", time: "time in steps" };
const CHARTS = [
  ["Loss", ["loss"]],
  ["Validation loss", ["validation/loss", "validation_ema/loss"]],
  ["Learning rate", ["lr"]],
  ["Gradient norm", ["grad_norm"]],
  ["Seconds per step", ["step_time", "data_wait"]],
  ["Samples per second", ["samples_per_second"]],
  ["Tokens per second", ["tokens_per_second"]],
  ["Peak memory per rank, GiB", ["memory"], 2 ** -30],
  ["Model FLOPs per second per rank", ["model_flops_per_second"]],
  ["Share of the device's peak FLOPs (MFU)", ["mfu"]],
];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4"];
const LOOKS = ["solid", "dashed", "dotted", "dash-dotted", "long-dashed"];

function along(run, steps) {
  if (view.x === "step") return steps;
  const table = run.axis;
  const [xs, ys] = view.x === "samples" ? [table.samples_x, table.samples] : [table.time_x, table.time];
  return xs.length > 1 ? steps.map((step) => interpolate(xs, ys, step)) : [];
}

const xText = (value) => (view.x === "time" ? duration(value) : `${short(Math.round(value * 100) / 100)}`);

function card(grid, title, draw) {
  const readout = html("div", { className: "readout" });
  const place = html("div");
  const node = html("section", { className: "card" }, html("h3", {}, title), place, readout);
  grid.append(node);
  redraws.push(() => place.replaceChildren(...[draw(node, readout)].flat()));
}

function section(title) {
  const grid = html("div", { className: "grid" });
  document.getElementById("page").append(html("h2", {}, title), grid);
  return grid;
}

// One chart of the named metrics of all runs. Of one run, each metric has a colour; of several, each run
// has one and the metrics differ by their dashes.
function metricsChart(grid, title, names, factor = 1, height = 210) {
  const present = names.filter((name) => RUNS.some((run) => run.curves[name]));
  if (!present.length) return;
  const times = (values) => values && values.map((v) => (v === null ? null : v * factor));
  const common = present.length > 1 && present.every((name) => name.includes("_at/")) ? present[0].lastIndexOf("/") + 1 : 0;
  const legend = () => {
    if (present.length === 1) return [present[0] === title.toLowerCase() ? "" : present[0]];
    return present.flatMap((name, n) => (MANY
      ? [`${n ? ", " : ""}${LOOKS[n % LOOKS.length]}: ${name.slice(common)}`] : [swatch(n), ` ${name.slice(common)}  `]));
  };
  card(grid, title, (node, readout) => {
    const lines = [];
    let notFinite = 0;
    for (const [r, run] of RUNS.entries()) for (const [n, name] of present.entries()) {
      const curve = run.curves[name];
      const x = curve && view.shown[r] ? along(run, curve.x) : [];
      if (!x.length) continue;
      notFinite += curve.bad_count || 0;
      const label = [MANY ? run.label : "", present.length > 1 || !MANY ? name.slice(common) : ""].filter(Boolean).join(" ");
      const look = MANY ? { colour: colour(r), dash: DASHES[n % DASHES.length] } : { colour: colour(n), dash: "" };
      lines.push({ label, ...look, x, y: times(curve.y), low: times(curve.low), high: times(curve.high), bad: along(run, curve.bad || []) });
    }
    const warning = notFinite ? [`${notFinite} not finite, marked`] : [];
    return lineChart(node, readout, lines, { title, height, log: view.log, smoothing: view.smoothing, xText, rest: [...legend(), ...warning] });
  });
}

function curves() {
  const grid = section("Curves");
  const used = new Set(CHARTS.flatMap(([, names]) => names));
  for (const [title, names, factor] of CHARTS.slice(1)) metricsChart(grid, title, names, factor);
  const all = [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))].filter((name) => !used.has(name));
  const groups = new Map();
  for (const name of all) {
    const family = name.includes("_at/") ? name.slice(0, name.lastIndexOf("/")) : name.replace(/^(validation|test)_ema\//, "$1/");
    groups.set(family, [...(groups.get(family) || []), name]);
  }
  for (const [family, names] of [...groups].sort()) metricsChart(grid, family.replace(/_at$/, " at quantiles of the timesteps"), names.sort());
}

function binned() {
  const tables = [["loss_by", "loss"], ["grad_norm_by", "gradient norm"]];
  if (!RUNS.some((run) => run.loss_by || run.density)) return;
  const grid = section("By noise level");
  const box = html("input", { type: "checkbox", onchange: (event) => { view.byRow = event.target.checked; redraw(); } });
  grid.before(html("label", {}, box, " each bin on a scale of its own"));
  for (const [key, name] of tables)
    for (const [r, run] of RUNS.entries())
      if (run[key]) hideable(r, () => card(grid, titled(run, `${name} by ${run.scale}`), (node, readout) =>
        heatMap(node, readout, run[key], { title: name, name, scale: run.scale, byRow: view.byRow, range: extent(shown((other) => other[key]).flatMap((found) => found.rows)) || [0, 1] })));
  for (const [r, run] of RUNS.entries())
    if (run.density) hideable(r, () => card(grid, titled(run, `training ${run.density.name}, drawn and declared`), (node, readout) =>
      densityChart(node, readout, run.density, { title: "timesteps", colour: colour(r), most: Math.max(...shown((other) => other.density).flatMap((found) => [...found.realised, ...found.declared])) })));
}

function times() {
  if (!RUNS.some((run) => run.time)) return;
  const grid = section("Where the time goes");
  for (const [r, run] of RUNS.entries())
    if (run.time) hideable(r, () => card(grid, titled(run, "seconds per step by phase"), (node, readout) =>
      stackedChart(node, readout, run.time, { title: "time by phase", most: Math.max(...shown((other) => other.time).flatMap(heights)) })));
}

// The values that the visible runs have: charts of one kind share their scale.
const shown = (choose) => RUNS.filter((_, r) => view.shown[r]).map(choose).filter(Boolean);
const titled = (run, text) => (MANY ? `${run.label}: ${text}` : text);

// A card that is hidden when its run is switched off.
function hideable(r, make) {
  const before = document.querySelectorAll(".card").length;
  make();
  const node = document.querySelectorAll(".card")[before];
  redraws.unshift(() => { node.hidden = !view.shown[r]; });
}

function clip(entry, run, shot) {
  const caption = `${MANY ? `${run.label}, ` : ""}step ${shot.step}`;
  if (!entry.src) return html("figure", {}, html("figcaption", {}, `${caption}: not embedded in this page; see samples/${entry.file}`));
  if (entry.src.startsWith("data:image/")) return html("figure", {}, html("img", { src: entry.src, title: entry.prompt }), html("figcaption", {}, caption));
  const video = html("video", { src: entry.src, autoplay: true, loop: true, muted: true, playsInline: true, controls: false, title: entry.prompt });
  const text = html("figcaption", {}, caption);
  video.addEventListener("loadedmetadata", () => {
    video.style.imageRendering = video.videoWidth < 128 ? "pixelated" : "auto";  // tiny clips show their pixels
  });
  video.addEventListener("click", () => (video.paused ? video.play() : video.pause()));
  video.addEventListener("error", () => {
    text.textContent = `${caption}: this browser does not decode the clip (H.264 with full chroma); samples/${entry.file}`;
  });
  return html("figure", {}, video, text);
}

// The steps that stand side by side: of several runs the newest, of one up to four, evenly spread.
function beside(shots) {
  const count = Math.min(MANY ? 1 : 4, shots.length);
  return Array.from({ length: count }, (_, i) => shots[Math.round(count > 1 ? (i * (shots.length - 1)) / (count - 1) : shots.length - 1)]);
}

function samples() {
  const steps = [...new Set(RUNS.flatMap((run) => run.shots.map((shot) => shot.step)))].sort((a, b) => a - b);
  if (!steps.length) return;
  const page = document.getElementById("page");
  page.append(html("h2", {}, "Samples"));
  const place = html("div");
  const label = html("output", {});
  const draw = () => {
    const step = steps[slider.valueAsNumber];
    label.textContent = `step ${step} of ${steps[steps.length - 1]}`;
    const shots = RUNS.flatMap((run, r) => (view.shown[r] ? beside(run.shots.filter((shot) => shot.step <= step)).map((shot) => [shot, r]) : []));
    const rows = DATA.prompts.flatMap((prompt) => {
      const figures = shots.flatMap(([shot, r]) => shot.clips.filter((c) => c.prompt === prompt).map((c) => clip(c, RUNS[r], shot)));
      return figures.length ? [html("div", { className: "prompt" }, prompt), html("div", { className: "clips" }, ...figures)] : [];
    });
    const sheets = shots.flatMap(([shot, r]) => shot.sheet
      ? [html("figure", { className: "sheet" }, html("img", { src: shot.sheet, alt: `contact sheet of step ${shot.step}` }),
          html("figcaption", {}, `${MANY ? `${RUNS[r].label}, ` : ""}contact sheet of step ${shot.step}`))] : []);
    place.replaceChildren(...sheets, ...rows);
  };
  const slider = html("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, step: 1, oninput: draw });
  slider.setAttribute("aria-label", "step of the samples");
  slider.valueAsNumber = steps.length - 1;
  const move = (by) => () => { slider.valueAsNumber = Math.min(steps.length - 1, Math.max(0, slider.valueAsNumber + by)); draw(); };
  page.append(html("div", { className: "stepper" },
    html("button", { onclick: move(-1), title: "earlier" }, "<"), slider, html("button", { onclick: move(1), title: "later" }, ">"), label), place);
  samples.draw = draw;
  draw();
}

function table(heads, rows) {
  return html("div", { className: "scroll" }, html("table", {},
    html("thead", {}, html("tr", {}, ...heads.map((head) => html("th", {}, head)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((cell, i) => html(i ? "td" : "th", {}, cell)))))));
}

// One line per key, one column per run; a value that a run does not have stays empty.
function comparison(maps, keys = [...new Set(maps.flatMap((map) => Object.keys(map)))]) {
  return table(["", ...RUNS.map((run) => run.label)], keys.map((key) => [key, ...maps.map((map) => map[key] ?? "")]));
}

function tables() {
  const page = document.getElementById("page");
  page.append(html("h2", {}, "Config"));
  if (MANY) page.append(DATA.config_diff.length ? comparison(RUNS.map((run) => run.config), DATA.config_diff)
    : html("p", { className: "faint" }, "no difference between the runs' manifests"));
  for (const run of RUNS)
    if (run.config_text) page.append(html("details", {}, html("summary", {}, titled(run, "config.yaml, every default filled in")), html("pre", {}, run.config_text)));
  page.append(html("h2", {}, "Environment"));
  const maps = RUNS.map((run) => run.environment);
  page.append(maps.some((map) => Object.keys(map).length) ? comparison(maps)
    : html("p", { className: "faint" }, "there is no manifest.json"));
}

function head() {
  const page = document.getElementById("page");
  page.append(html("h1", {}, RUNS.map((run) => run.label).join(", ")));
  page.append(controls());
  const first = html("div", { className: "first" });
  page.append(first);
  metricsChart(first, ...CHARTS[0], 1, 380);
  const maps = RUNS.map((run) => ({ folder: run.folder, ...Object.fromEntries(run.summary) }));
  page.append(html("h2", {}, MANY ? "Runs" : "Run"), comparison(maps));
  for (const run of RUNS) for (const remark of run.remarks) page.append(html("p", { className: "remark" }, titled(run, remark)));
}

function controls() {
  const smoothing = html("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: (e) => { view.smoothing = e.target.valueAsNumber; redraw(); } });
  smoothing.setAttribute("value", "0");
  const log = html("input", { type: "checkbox", onchange: (e) => { view.log = e.target.checked; redraw(); } });
  const choice = html("select", { onchange: (e) => { view.x = e.target.value; redraw(); } },
    ...Object.entries(AXES).map(([value, text]) => html("option", { value }, text)));
  const bar = html("div", { className: "bar" }, html("label", {}, "smoothing", smoothing), html("label", {}, log, "log scale"), html("label", {}, "by", choice));
  if (MANY) bar.append(html("div", { className: "legend" }, ...RUNS.map((run, r) => html("label", {},
    html("input", { type: "checkbox", checked: true, onchange: (e) => { view.shown[r] = e.target.checked; redraw(); if (samples.draw) samples.draw(); } }),
    swatch(r), run.label))));
  return bar;
}

function redraw() { for (const draw of redraws) draw(); }

head();
curves();
binned();
times();
samples();
tables();
redraw();
let waiting = 0;
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); });
