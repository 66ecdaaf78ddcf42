// Elements, numbers in words, and the look of each series.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

// Children and attribute values are set as text: nothing in a result file is ever read as markup.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Three significant digits; more would be noise.
function shortNumber(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "" : String(value);
  if (value === 0 || Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2);
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });
}

const COLUMN_WORDS = {
  seq: "sequence length", tokens: "tokens", width: "width", resolution: "resolution", layers: "layers",
  head_dim: "head size", dtype: "dtype", impl: "implementation", mode: "mode", op: "operation",
  median_ms: "median time", per_step_ms: "time per step", rel_err: "relative error against float64",
  compile_s: "compile time", lower_compile_s: "lowering and compile time", trace_s: "trace time",
  first_call_s: "time of the first call", second_call_s: "time of the second call",
  xla_temp_mb: "temporary memory (XLA's analysis)", xla_arg_mb: "argument memory", xla_out_mb: "output memory",
  xla_alias_mb: "memory shared by arguments and outputs", peak_mb: "peak memory of the process, above its inputs", baseline_mb: "memory of the process with its inputs",
  min_ms: "shortest time", device_us: "time of the kernels alone", program_us: "time inside one program", max_seq: "longest sequence that fits", peaks: "peak memory", max_fit: "longest that fits",
};
const VALUE_WORDS = {
  fwd: "forward", fwdbwd: "forward + backward", forward: "forward", train_step: "training step",
  masked_bias: "masked bias", documents: "documents, causal", window: "causal window of 256", bias: "dense bias", mask: "random mask",
};
const UNITS = { ms: "ms", us: "µs", s: "s", mb: "MB", gb: "GB", bytes: "bytes" };

const columnWords = (column) => COLUMN_WORDS[column] || column.replace(/_(ms|us|s|mb|gb|bytes)$/, "").replace(/_/g, " ");
const unitOf = (column) => UNITS[column.split("_").pop()] || "";
function valueWords(column, value) {
  if (typeof value === "string") return VALUE_WORDS[value] || value;
  if (value === null || value === undefined) return `${columnWords(column)} not given`;
  if (typeof value === "boolean") return value ? `with ${column}` : `without ${column}`;
  return `${columnWords(column)} ${value}`;
}

// One colour and one shape per label, the same in every report: shape tells apart what a reader may not by colour.
const SHAPES = ["circle", "diamond", "square", "up", "down", "hexagon", "cross", "plus"];
const KNOWN_STYLES = {
  probjax_default: [0, "circle"], probjax_mha: [5, "square"], probjax_flex: [4, "diamond"], probjax_flax: [7, "down"],
  xla_tiled: [3, "up"], xla_dense: [6, "cross"], mha_interpret: [9, "plus"], jax_xla: [2, "square"],
  torch_sdpa: [1, "diamond"], jax_cudnn: [8, "hexagon"], tokamax: [9, "up"], torch_flex: [1, "plus"],
  probjax_cudnn: [5, "hexagon"], pallas_mha: [3, "square"], tokamax_mosaic: [9, "circle"], tokamax_triton: [6, "up"],
  tokamax_xla: [6, "down"], torch_cudnn: [1, "hexagon"], torch_flash: [1, "up"],
  no_attention: [7, "cross"],
};
function seriesStyle(name, names) {
  if (Object.hasOwn(KNOWN_STYLES, name)) return { colour: KNOWN_STYLES[name][0], shape: KNOWN_STYLES[name][1] };
  const known = names.filter((other) => Object.hasOwn(KNOWN_STYLES, other));
  const taken = new Set(known.map((other) => KNOWN_STYLES[other][0]));
  const free = [0, 1, 3, 2, 4, 5, 6, 8, 9, 7].filter((colour) => !taken.has(colour));
  const colours = free.length ? free : [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
  const place = names.filter((other) => !Object.hasOwn(KNOWN_STYLES, other)).indexOf(name);
  const shapes = SHAPES.length;
  return { colour: colours[place % colours.length], shape: SHAPES[(place + Math.floor(place / colours.length)) % shapes] };
}

const POLYGONS = {
  diamond: [[0, -4.6], [4.6, 0], [0, 4.6], [-4.6, 0]],
  square: [[-3.3, -3.3], [3.3, -3.3], [3.3, 3.3], [-3.3, 3.3]],
  up: [[0, -4.4], [4.2, 3.2], [-4.2, 3.2]],
  down: [[0, 4.4], [4.2, -3.2], [-4.2, -3.2]],
  hexagon: [[-2.1, -3.7], [2.1, -3.7], [4.2, 0], [2.1, 3.7], [-2.1, 3.7], [-4.2, 0]],
};
function mark(style, x, y, open) {
  const at = `translate(${x.toFixed(1)} ${y.toFixed(1)})`;
  const look = { class: open ? "mark open" : "mark", style: `--c:var(--s${style.colour})`, transform: at };
  if (style.shape === "circle") return svg("circle", { ...look, r: 3.8 });
  if (style.shape === "cross") return svg("path", { ...look, class: "mark stroked", d: "M-3.4-3.4L3.4 3.4M-3.4 3.4L3.4-3.4" });
  if (style.shape === "plus") return svg("path", { ...look, class: "mark stroked", d: "M-4.2 0H4.2M0-4.2V4.2" });
  return svg("polygon", { ...look, points: POLYGONS[style.shape].map((corner) => corner.join()).join(" ") });
}
const swatch = (style, open) => svg("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" }, mark(style, 0, 0, open));

const measured = document.createElement("canvas").getContext("2d");
function textWidth(text, size = 11.5) {
  measured.font = `${size}px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif`;
  return measured.measureText(text).width;
}
