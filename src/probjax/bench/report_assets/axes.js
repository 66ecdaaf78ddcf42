// Logarithmic axes with labels that can be read.

// Zero has no logarithm: when there are zeros they get a place of their own at the start of the axis.
function logScale(values, from, to, { pad = 0.05, room = 26 } = {}) {
  const positive = values.filter((value) => value > 0);
  const zero = values.some((value) => value === 0);
  let low = Math.log10(positive.length ? Math.min(...positive) : 1);
  let high = Math.log10(positive.length ? Math.max(...positive) : 1);
  const extra = high - low < 0.02 ? 0.15 : pad && Math.max((high - low) * pad, 0.02);
  low -= extra;
  high += extra;
  const start = zero ? from + Math.sign(to - from) * 16 : from;
  const place = (value) => value === 0 ? from : start + ((Math.log10(value) - low) / (high - low)) * (to - start);
  const ticks = pickTicks(low, high, Math.abs(to - start), room);
  return { place, ticks: zero ? [0, ...ticks] : ticks, zero };
}

function pickTicks(low, high, length, room) {
  const ladders = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7], [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]];
  let best = [];
  for (const ladder of ladders) {
    const ticks = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++)
      for (const step of ladder) {
        const value = Number((step * 10 ** power).toPrecision(3));
        if (Math.log10(value) >= low && Math.log10(value) <= high) ticks.push(value);
      }
    if (best.length >= 3 && crowded(ticks, length, low, high, room)) break;
    if (!crowded(ticks, length, low, high, room)) best = ticks;
  }
  if (best.length < 2) best = linearTicks(10 ** low, 10 ** high, Math.max(2, Math.floor(length / (room * 2))));
  return thin(best, (value) => ((Math.log10(value) - low) / (high - low)) * length, room);
}

function crowded(ticks, length, low, high, room) {
  for (let i = 1; i < ticks.length; i++)
    if ((Math.log10(ticks[i] / ticks[i - 1]) / (high - low)) * length < room) return true;
  return false;
}

function linearTicks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) ticks.push(Number(value.toPrecision(6)));
  return ticks;
}

// Keeps the last label and drops those that would touch their neighbour.
function thin(ticks, place, room) {
  const kept = [];
  for (const tick of [...ticks].reverse())
    if (!kept.length || Math.abs(place(kept[0]) - place(tick)) >= room) kept.unshift(tick);
  return kept;
}

function tickText(value) {
  if (value === 0) return "0";
  if (value >= 1e6 || value < 1e-4) return Number(value.toPrecision(6)).toExponential().replace("e+", "e");
  return value.toLocaleString("en", { maximumFractionDigits: 6 });
}
