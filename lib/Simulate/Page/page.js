'use strict';
const plan = JSON.parse(document.getElementById('data').textContent);
const text = plan.strings;
const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------
// Colours, and numbers for people
// ---------------------------------------------------------------------------

const USE_COLOURS = ['#8f8f94', '#4c84c4', '#b08968', '#e0654f', '#a06cc0', '#ec98a4', '#58a55c',
  '#3f7f8c', '#6fb3b8', '#b8b2a7', '#d0a8c8', '#e59a3c', '#c0698f'];
const PHASES = ['forward', 'backward', 'optimizer'];
const PHASE_COLOURS = ['#4c84c4', '#e08a3c', '#3f8f8c'];
const AGAIN_COLOUR = '#a06cc0';
const KIND_COLOURS = ['', '#58a55c', '#d9574a', '#9a64b8', '#b08968', '#8a7a5c', '#c9a227'];

const scaled = (value, step, names, digits) => {
  let i = 0;
  while (value >= step && i < names.length - 1) { value /= step; ++i; }
  return `${i === 0 ? Math.round(value) : value.toFixed(digits)} ${names[i]}`;
};
const bytes = (value) => scaled(value, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB'], 2);
const time = (ns) => {
  if (ns === 0) return '0';
  for (const [unit, size] of [['s', 1e9], ['ms', 1e6], ['µs', 1e3]])
    if (Math.abs(ns) >= size) return `${(ns / size).toPrecision(4)} ${unit}`;
  return `${Math.round(ns)} ns`;
};
const plural = (count, noun) => `${count} ${noun}${count === 1 ? '' : 's'}`;
const escape = (string) => String(string).replace(/[&<>"]/g,
  (c) => ({'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;'}[c]));

// ---------------------------------------------------------------------------
// Data
// ---------------------------------------------------------------------------

const titleOf = (i) => text[plan.instructions[i][3]];
const moduleOf = (i) => text[plan.instructions[i][4]];
const phaseOf = (i) => PHASES[plan.instructions[i][1]];
/** Why the compiler put it there, as a sentence; empty where the plan does not say. */
const whyOf = (i) => {
  const why = text[plan.instructions[i][6]];
  return why && `${why[0].toUpperCase()}${why.slice(1)}.`;
};
/** `aten::mm in layers.0 (instruction 12)` */
const named = (i) => `${titleOf(i)}${moduleOf(i) ? ` in ${moduleOf(i)}` : ''} (instruction ${i})`;
const kindName = (c) => plan.streams[c.kind];
const unitName = (c) => c.unit < 0 ? 'no unit' : plan.units[c.unit].name;
/** `all_gather of layers.0`; of the model's own, `_c10d_functional::all_reduce over tensor` */
const whatOf = (c) =>
  c.axis ? `${titleOf(c.instruction)} over ${c.axis}` : `${kindName(c)} of ${unitName(c)}`;
const end = Math.max(1, plan.step * 1e9);

// Bytes by use at each position, as plan::replayMemory has them.
const positions = plan.instructions.length;
const uses = plan.uses.length;
const held = new Float64Array((positions + 1) * uses);
for (const [size, use, , , , ...lives] of plan.storages)
  for (let k = 0; k < lives.length; k += 2) {
    held[lives[k] * uses + use] += size;
    held[(lives[k + 1] + 1) * uses + use] -= size;
  }
for (let u = 0; u < uses; ++u) {
  held[u] += plan.static[u];
  for (let p = 1; p <= positions; ++p) held[p * uses + u] += held[(p - 1) * uses + u];
}
const totalAt = (p) => {
  let sum = 0;
  for (let u = 0; u < uses; ++u) sum += held[p * uses + u];
  return sum;
};
const samples = plan.samples.map(([at, position]) => ({at, position, total: totalAt(position)}));
const peak = Math.max(0, ...samples.map((s) => s.total));
const usesShown = [...Array(uses).keys()].filter((u) => {
  for (let p = 0; p < positions; ++p) if (held[p * uses + u] > 0) return true;
  return false;
});
// What is there all the time is at the bottom of the chart.
usesShown.sort((a, b) => (plan.static[b] > 0) - (plan.static[a] > 0) || a - b);

const collectiveAt = new Map(plan.collectives.map((c, index) => [c.instruction, index]));
/** Spans by stream, each [instruction, begin, end, microbatch]. */
const byStream = plan.streams.map(() => []);
for (const span of plan.spans) byStream[plan.instructions[span[0]][0]].push(span);
const lanes = [...plan.streams.keys()].filter((s) => byStream[s].length > 0);
/** The first span that ends after `at`. */
const firstAfter = (spans, at) => {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle][2] > at) high = middle; else low = middle + 1;
  }
  return low;
};
/** What compute waits for: [begin, end], of collectives that are exposed beside it. */
const stalls = [];
{
  let last = 0;
  for (const [, begin, finish] of byStream[0]) {
    if (begin > last) stalls.push([last, begin]);
    last = Math.max(last, finish);
  }
  if (end > last) stalls.push([last, end]);
}

// ---------------------------------------------------------------------------
// Header
// ---------------------------------------------------------------------------

$('title').textContent = `${plan.model} on ${plural(plan.ranks, 'rank')}`;
document.title = $('title').textContent;
$('subtitle').textContent = [
  `simulated on ${plan.device}, ${plural(plan.hosts, 'host')}`,
  plan.replicas > 1 ? `${plan.replicas} replicas` : '',
  plan.microbatches > 1 ? `${plan.microbatches} microbatches a step` : '',
  plan.serial ? 'one thread runs all streams' : '',
  plan.gathersTakeMemory ? '' : 'gathered parameters are in memory that the ranks share',
].filter(Boolean).join(' · ');
{
  const always = plan.static.reduce((a, b) => a + b, 0);
  const gap = plan.arena - plan.lowerBound;
  const percent = (part, whole) => `${(whole ? 100 * part / whole : 0).toFixed(1)} %`;
  const numbers = [
    ['step time', time(end), `${Math.round(plan.tokens / plan.step).toLocaleString('en')} tokens/s`],
    ['exposed communication', time(plan.exposed * 1e9), `${percent(plan.exposed, plan.step)} of the step`],
    ['MFU', `${(100 * plan.mfu).toFixed(2)} %`, ''],
    ['peak a rank', bytes(always + plan.arena),
      plan.capacity > 0 ? `of ${bytes(plan.capacity)}` : ''],
    ['kept all the time', bytes(always), ''],
    ['arena', bytes(plan.arena), ''],
    ['its lower bound', bytes(plan.lowerBound), `gap ${bytes(gap)}, ${percent(gap, plan.lowerBound)}`],
    ['instructions', positions.toLocaleString('en'), plural(plan.units.length, 'unit')],
  ];
  $('numbers').innerHTML = numbers.map(([name, value, note]) =>
    `<div><dt>${name}</dt><dd>${value}<small>${note}</small></dd></div>`).join('');
}
const legend = (entries) => entries.map(([colour, name]) =>
  `<span><i style="background:${colour}"></i>${escape(name)}</span>`).join('');
$('uses').innerHTML = legend(usesShown.map((u) => [USE_COLOURS[u], plan.uses[u]]));
{
  const entries = PHASES.map((name, p) => [PHASE_COLOURS[p], name])
    .filter((_, p) => plan.instructions.some((row) => row[1] === p));
  if (plan.instructions.some((row) => row[2])) entries.push([AGAIN_COLOUR, 'recomputed in backward']);
  // The model's own collectives are in the lane of computation.
  const kinds = new Set([...lanes, ...plan.collectives.map((c) => c.kind)]);
  for (const s of [...kinds].sort()) if (s > 0) entries.push([KIND_COLOURS[s], plan.streams[s]]);
  entries.push(['var(--stall)', 'compute waits']);
  $('phases').innerHTML = legend(entries);
}

// ---------------------------------------------------------------------------
// Chart: a time axis, memory, a lane a stream; all on one view [from, to]
// ---------------------------------------------------------------------------

let from = 0, to = end;
let selected = null; // {collective, run}
const rows = [];

function addRow(kind, label, note, height, draw) {
  const div = document.createElement('div');
  div.className = `lane ${kind}`;
  div.innerHTML = `<span>${escape(label)}<small>${escape(note)}</small></span><canvas></canvas>`;
  const canvas = div.lastChild;
  canvas.style.height = `${height}px`;
  $('chart').append(div);
  rows.push({kind, canvas, height, draw});
  return div;
}
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const x = (at, width) => (at - from) / (to - from) * width;

function drawAxis(pen, width, height) {
  const step = niceStep((to - from) / Math.max(2, width / 110));
  pen.fillStyle = css('--faint');
  pen.font = '11.5px system-ui, sans-serif';
  pen.textBaseline = 'middle';
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    const left = x(at, width);
    pen.fillRect(Math.round(left), height - 4, 1, 4);
    const label = axisLabel(at, step);
    const half = pen.measureText(label).width / 2;
    pen.fillText(label, Math.min(Math.max(left - half, 0), width - 2 * half), height / 2 - 2);
  }
}
function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
}
function axisLabel(at, step) {
  const [unit, size] = to >= 1e9 ? ['s', 1e9] : to >= 1e6 ? ['ms', 1e6] : ['µs', 1e3];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  return `${(at / size).toFixed(digits)} ${unit}`;
}

/** The last sample at or before `at`. */
function sampleAt(at) {
  let low = 0, high = samples.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (samples[middle].at <= at) low = middle; else high = middle;
  }
  return low;
}

function drawMemory(pen, width, height) {
  const top = peak * 1.06 || 1;
  const y = (value) => height - value / top * height;
  // Per column the sample with most bytes, so that no peak is lost.
  const columns = [];
  let s = sampleAt(from);
  for (let column = 0; column < width; ++column) {
    const until = from + (column + 1) / width * (to - from);
    let best = s;
    while (s + 1 < samples.length && samples[s + 1].at < until) {
      ++s;
      if (samples[s].total > samples[best].total) best = s;
    }
    columns.push(samples[best]);
  }
  if (samples.length === 0) return;
  let base = new Float64Array(width);
  for (const use of usesShown) {
    pen.fillStyle = USE_COLOURS[use];
    pen.beginPath();
    const next = new Float64Array(width);
    for (let column = 0; column < width; ++column) {
      next[column] = base[column] + held[columns[column].position * uses + use];
      const high = y(next[column]);
      pen.lineTo(column, high);
      pen.lineTo(column + 1, high);
    }
    for (let column = width - 1; column >= 0; --column) {
      pen.lineTo(column + 1, y(base[column]));
      pen.lineTo(column, y(base[column]));
    }
    pen.fill();
    base = next;
  }
  // Scale: lines with their bytes.
  const step = 2 ** Math.floor(Math.log2(top / 3));
  pen.font = '11.5px system-ui, sans-serif';
  pen.textBaseline = 'bottom';
  for (let value = step; value < top; value += step) {
    pen.fillStyle = css('--line');
    pen.fillRect(0, Math.round(y(value)), width, 1);
    if (y(value) > 18) label(pen, bytes(value), 4, y(value) - 2);
  }
  pen.fillStyle = css('--mark');
  for (let left = 0; left < width; left += 8) pen.fillRect(left, Math.round(y(peak)), 4, 1);
  pen.textBaseline = 'top';
  const mark = `peak ${bytes(peak)}`;
  label(pen, mark, width - pen.measureText(mark).width - 6, y(peak) + 3);
}
/** Text that can be read on any colour. */
function label(pen, string, left, top) {
  pen.lineWidth = 3;
  pen.lineJoin = 'round';
  pen.strokeStyle = css('--back');
  pen.strokeText(string, left, top);
  pen.fillStyle = css('--ink');
  pen.fillText(string, left, top);
}

const colourOf = (span, stream) => {
  const [, phase, again] = plan.instructions[span[0]];
  const collective = collectiveAt.get(span[0]);
  if (collective !== undefined) return KIND_COLOURS[plan.collectives[collective].kind];
  if (stream > 0) return KIND_COLOURS[stream];
  return again ? AGAIN_COLOUR : PHASE_COLOURS[phase];
};

function drawLane(stream) {
  return (pen, width, height) => {
    const spans = byStream[stream];
    if (stream === 0) {
      pen.fillStyle = css('--stall');
      for (const [begin, finish] of stalls)
        if (finish >= from && begin <= to)
          pen.fillRect(x(begin, width), 0, Math.max(x(finish, width) - x(begin, width), 0.5), height);
    }
    pen.font = '11.5px system-ui, sans-serif';
    pen.textBaseline = 'middle';
    let drawn = -1; // up to this column
    for (let k = firstAfter(spans, from); k < spans.length && spans[k][1] <= to; ++k) {
      const left = Math.max(x(spans[k][1], width), -1);
      const right = Math.min(x(spans[k][2], width), width + 1);
      if (right < drawn && right - left < 0.3) continue;
      drawn = left + 0.3;
      const wide = right - left;
      pen.fillStyle = colourOf(spans[k], stream);
      pen.fillRect(left, 2, Math.max(wide - (wide > 3 ? 1 : 0), stream > 0 ? 2 : 0.4), height - 4);
      if (wide < 34) continue;
      const name = laneLabel(spans[k][0], stream);
      pen.save();
      pen.beginPath();
      pen.rect(left + 4, 0, wide - 8, height);
      pen.clip();
      pen.fillStyle = '#ffffff';
      pen.fillText(name, left + 5, height / 2 + 0.5);
      pen.restore();
    }
    drawSelection(pen, width, height, stream);
  };
}
/** In a lane of its own the unit says it all. */
function laneLabel(i, stream) {
  const title = titleOf(i);
  return stream > 0 ? title.slice(title.indexOf(' ') + 1) : title.replace('aten::', '');
}

function drawSelection(pen, width, height, stream) {
  if (!selected) return;
  const c = plan.collectives[selected.collective];
  const [begin, finish, , , , use] = c.times[selected.run];
  pen.fillStyle = css('--mark');
  if (plan.instructions[c.instruction][0] === stream) {
    pen.strokeStyle = css('--ink');
    pen.lineWidth = 2;
    pen.strokeRect(x(begin, width), 1, Math.max(x(finish, width) - x(begin, width), 2), height - 2);
  }
  for (const at of [begin, use]) if (at >= 0) pen.fillRect(x(at, width) - 0.5, 0, 1.5, height);
}

addRow('axis', '', '', 22, drawAxis);
addRow('memory', 'memory', 'of rank 0', 230, drawMemory).dataset.lane = 'memory';
for (const stream of lanes) {
  const busy = byStream[stream].reduce((sum, span) => sum + span[2] - span[1], 0);
  const row = addRow('stream', plan.streams[stream].replaceAll('_', ' '), `${time(busy)} busy`,
    stream === 0 ? 38 : 30, drawLane(stream));
  row.dataset.lane = plan.streams[stream];
}

let pending = false;
function draw() {
  pending = false;
  const ratio = window.devicePixelRatio || 1;
  for (const row of rows) {
    const width = Math.max(1, Math.floor(row.canvas.clientWidth));
    row.canvas.width = Math.round(width * ratio);
    row.canvas.height = Math.round(row.height * ratio);
    const pen = row.canvas.getContext('2d');
    pen.scale(ratio, ratio);
    row.draw(pen, width, row.height);
  }
}
function redraw() {
  if (!pending) requestAnimationFrame(draw);
  pending = true;
}
function view(left, right) {
  const least = Math.min(end, 20); // nanoseconds
  const wide = Math.min(Math.max(right - left, least), end);
  from = Math.min(Math.max(left, 0), end - wide);
  to = from + wide;
  redraw();
}
function zoom(factor, around = (from + to) / 2) {
  view(around - (around - from) * factor, around + (to - around) * factor);
}

// ---------------------------------------------------------------------------
// Pointer
// ---------------------------------------------------------------------------

const chart = $('chart');
const timeAt = (event, canvas) => {
  const box = canvas.getBoundingClientRect();
  return from + (event.clientX - box.left) / box.width * (to - from);
};
const rowAt = (event) => rows.find((row) => row.canvas === event.target);
function spanAt(row, event) {
  const stream = plan.streams.indexOf(row.canvas.parentElement.dataset.lane);
  if (stream < 0) return null;
  const at = timeAt(event, row.canvas);
  const reach = 3 * (to - from) / row.canvas.clientWidth;
  const spans = byStream[stream];
  const first = firstAfter(spans, at - reach);
  let best = null, distance = reach;
  for (let k = first; k < spans.length && spans[k][1] <= at + reach; ++k) {
    const away = Math.max(spans[k][1] - at, at - spans[k][2], 0);
    if (away < distance || (best === null && away <= distance)) [best, distance] = [spans[k], away];
    if (away === 0) break;
  }
  return best;
}

let drag = null;
chart.addEventListener('pointerdown', (event) => {
  const row = rowAt(event);
  if (!row || event.button !== 0) return;
  drag = {x: event.clientX, from, to, width: row.canvas.clientWidth, moved: false};
  event.target.setPointerCapture(event.pointerId);
});
chart.addEventListener('pointermove', (event) => {
  if (drag) {
    const shift = (event.clientX - drag.x) / drag.width * (drag.to - drag.from);
    if (Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
    if (drag.moved) {
      chart.classList.add('panning');
      view(drag.from - shift, drag.to - shift);
      $('tip').hidden = true;
      return;
    }
  }
  hover(event);
});
chart.addEventListener('pointerup', (event) => {
  const clicked = drag && !drag.moved;
  drag = null;
  chart.classList.remove('panning');
  const row = rowAt(event);
  if (!clicked || !row) return;
  const span = spanAt(row, event);
  const collective = span && collectiveAt.get(span[0]);
  if (collective !== null && collective !== undefined)
    select(collective, plan.collectives[collective].times.findIndex((t) => t[0] === span[1]));
});
chart.addEventListener('pointerleave', () => { $('tip').hidden = true; });
chart.addEventListener('dblclick', () => view(0, end));
chart.addEventListener('wheel', (event) => {
  const row = rowAt(event);
  if (!row) return;
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
    const shift = (event.deltaX || event.deltaY) / row.canvas.clientWidth * (to - from);
    view(from + shift, to + shift);
  } else {
    zoom(2 ** (event.deltaY / 250), timeAt(event, row.canvas));
  }
}, {passive: false});
$('zoom-in').onclick = () => zoom(0.5);
$('zoom-out').onclick = () => zoom(2);
$('whole').onclick = () => view(0, end);
document.addEventListener('keydown', (event) => {
  const quarter = (to - from) / 4;
  const keys = {'+': () => zoom(0.5), '-': () => zoom(2), 0: () => view(0, end),
    ArrowLeft: () => view(from - quarter, to - quarter),
    ArrowRight: () => view(from + quarter, to + quarter)};
  if (!event.ctrlKey && !event.metaKey && keys[event.key]) keys[event.key]();
});

function showTip(event, html) {
  const tip = $('tip');
  tip.innerHTML = html;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  const below = event.clientY + 16;
  tip.style.top = `${below + box.height < innerHeight ? below : Math.max(4, event.clientY - box.height - 12)}px`;
}
function hover(event) {
  const row = rowAt(event);
  if (!row) { $('tip').hidden = true; return; }
  if (row.kind === 'memory') { showTip(event, memoryTip(timeAt(event, row.canvas), row)); return; }
  const span = spanAt(row, event);
  if (span) showTip(event, spanTip(span));
  else $('tip').hidden = true;
}
function spanTip([i, begin, finish, microbatch]) {
  const lines = [`<b>${escape(titleOf(i))}</b> ${time(finish - begin)}`,
    `${phaseOf(i)}, from ${time(begin)} on${plan.microbatches > 1 ? `, microbatch ${microbatch}` : ''}`];
  if (moduleOf(i)) lines.push(escape(moduleOf(i)));
  if (whyOf(i)) lines.push(`<span class="why">${escape(whyOf(i))}</span>`);
  const collective = collectiveAt.get(i);
  if (collective === undefined) {
    lines.push(`<span class="hint">${escape(text[plan.instructions[i][5]])}</span>`);
  } else {
    const c = plan.collectives[collective];
    const run = c.times.findIndex((t) => t[0] === begin);
    lines.push(`${bytes(c.bytes)} a rank`, ...reasons(c, c.times[run]).map(escape));
  }
  return lines.join('<br>');
}
function memoryTip(at, row) {
  // What the column shows: the most within it.
  const wide = (to - from) / row.canvas.clientWidth;
  let s = sampleAt(at);
  for (let k = s + 1; k < samples.length && samples[k].at < at + wide; ++k)
    if (samples[k].total > samples[s].total) s = k;
  const {position, total, at: since} = samples[s];
  const parts = usesShown.filter((u) => held[position * uses + u] > 0)
    .sort((a, b) => held[position * uses + b] - held[position * uses + a]);
  const alive = plan.storages.filter(([, , , , , ...lives]) => {
    for (let k = 0; k < lives.length; k += 2)
      if (lives[k] <= position && position <= lives[k + 1]) return true;
    return false;
  }).sort((a, b) => b[0] - a[0]);
  const cell = (amount, what) => `<tr><td>${bytes(amount)}</td><td>${what}</td></tr>`;
  const dot = (u) => `<i style="background:${USE_COLOURS[u]};display:inline-block;width:9px;height:9px;` +
    'border-radius:2px"></i> ';
  return `<b>${bytes(total)}</b> from ${time(since)} on<br>` +
    `<span class="hint">${escape(named(position))}</span><table>` +
    parts.map((u) => cell(held[position * uses + u], dot(u) + escape(plan.uses[u]))).join('') +
    `</table><b>largest of ${plural(alive.length, 'storage')}</b><table>` +
    alive.slice(0, 6).map(([size, use, title, module, shape]) => cell(size, dot(use) +
      `${escape(text[shape])} <span class="hint">${escape(text[title])}` +
      `${text[module] ? ` in ${escape(text[module])}` : ''}</span>`)).join('') + '</table>';
}

// ---------------------------------------------------------------------------
// Why a collective stands where it does
// ---------------------------------------------------------------------------

/** Sentences on what comes of it in the simulated step. */
function reasons(c, [begin, finish, exposed, cause, queued, use]) {
  const lines = [];
  const hidden = finish - begin - exposed;
  if (cause < 0) lines.push('Begins with the step: it waits for nothing.');
  else if (queued) lines.push(`Begins when ${named(cause)}, before it on its ${plan.serial ? 'thread' : 'stream'}, ` +
    'has ended.');
  else lines.push(`Begins as soon as ${named(cause)} has ended: it waits for that event.`);
  if (c.wait === c.instruction)
    lines.push('It is on the compute stream: compute waits until it has ended.');
  if (exposed > 0 && plan.serial)
    lines.push('One thread runs all streams: nothing is computed beside it.');
  else if (exposed > 0 && c.wait !== c.instruction)
    lines.push(`Compute waits ${time(exposed)} for it: of its ${time(finish - begin)}, ` +
      `${hidden > 0 ? time(hidden) : 'nothing'} is hidden by the ${plural(c.callsToWait, 'call')} between its ` +
      'launch and the wait.');
  if (exposed > 0 && use > finish && !plan.serial)
    lines.push(`Its first use is ${time(use - finish)} after its end: the wait stands before other work.`);
  if (exposed === 0 && finish > begin) lines.push('Compute does not wait for it: all of it is hidden.');
  if (use >= 0 && exposed === 0 && use > finish) lines.push(`It is done ${time(use - finish)} before its first use.`);
  return lines;
}

/** The instruction that ends what a gather made; -1 if there is none. */
const reshardAfter = (c) => plan.instructions.findIndex((_, i) => i > c.instruction &&
  titleOf(i) === `reshard ${unitName(c)}`);

function select(index, run = 0) {
  selected = {collective: index, run: Math.max(0, run)};
  const c = plan.collectives[index];
  const at = c.times[selected.run];
  const facts = [];
  if (at) {
    facts.push(['begins', time(at[0])], ['duration', `${time(at[1] - at[0])}, ${bytes(c.bytes)} a rank`]);
    facts.push(['ends', time(at[1])]);
    if (c.use >= 0)
      facts.push(['first use', `${at[5] >= 0 ? `${time(at[5])}, ` : ''}${escape(named(c.use))}`]);
    facts.push(['launched ahead', `${plural(c.callsToUse || c.callsToWait, 'call')}` +
      (at[5] >= 0 ? `, ${time(at[5] - at[0])} before its first use` : '')]);
    const reshard = plan.streams[c.kind] === 'all_gather' ? reshardAfter(c) : -1;
    if (reshard >= 0)
      facts.push(['held until', escape(`${named(reshard)}${whyOf(reshard) && `: ${whyOf(reshard)}`}`)]);
    if (c.wait >= 0 && c.wait !== c.instruction) facts.push(['awaited by', escape(named(c.wait))]);
    facts.push(['exposed', time(at[2])]);
    if (at[5] >= 0) facts.push(['slack', time(Math.max(0, at[5] - at[1]))]);
  }
  $('detail').innerHTML = `<h3>${escape(whatOf(c))}, ${phaseOf(c.instruction)}</h3>` +
    (whyOf(c.instruction) ? `<p class="why">${escape(whyOf(c.instruction))}</p>` : '') +
    (at ? reasons(c, at).map((line) => `<p>${escape(line)}</p>`).join('') : '') +
    `<dl>${facts.map(([name, value]) => `<dt>${name}</dt><dd>${value}</dd>`).join('')}</dl>`;
  for (const row of document.querySelectorAll('#units tr'))
    row.classList.toggle('selected', row.dataset.collective === String(index));
  if (at && (at[0] < from || at[1] > to)) {
    const wide = Math.min(end, Math.max(to - from, 4 * (at[1] - at[0])));
    view(at[0] - wide / 2, at[0] + wide / 2);
  }
  redraw();
}

// ---------------------------------------------------------------------------
// Units
// ---------------------------------------------------------------------------

{
  const head = ['unit', 'collective', 'phase', 'bytes a rank', 'begins', 'duration', 'launched ahead', 'first use',
    'slack', 'exposed'];
  const numeric = new Set([3, 4, 5, 6, 7, 8, 9]);
  const row = (cells, attributes) => `<tr ${attributes}>` + cells.map((cell, k) =>
    `<td${numeric.has(k) ? ' class="n"' : ''}>${cell}</td>`).join('') + '</tr>';
  const parts = [`<thead><tr>${head.map((h, k) => `<th${numeric.has(k) ? ' class="n"' : ''}>${h}</th>`).join('')}` +
    '</tr></thead><tbody>'];
  const addUnit = (name, note, u) => {
    parts.push(`<tr class="unit" data-unit="${escape(name)}"><td>${escape(name)}</td>` +
      `<td colspan="${head.length - 1}">${note}</td></tr>`);
    plan.collectives.forEach((c, index) => {
      if (c.unit !== u) return;
      const at = c.times[0];
      const ahead = plural(c.callsToUse || c.callsToWait, 'call');
      parts.push(row(['', escape(c.axis ? whatOf(c) : kindName(c)), phaseOf(c.instruction), bytes(c.bytes),
        at ? time(at[0]) : '', at ? time(at[1] - at[0]) : '', ahead, at && at[5] >= 0 ? time(at[5]) : '',
        at && at[5] >= 0 ? time(Math.max(0, at[5] - at[1])) : '',
        at ? `<span class="${at[2] > 0 ? 'late' : ''}">${time(at[2])}</span>` : ''],
      `data-collective="${index}" tabindex="0"`));
    });
  };
  plan.units.forEach((unit, u) => {
    const note = [plural(unit.params, 'parameter'), `${bytes(unit.bytes)} gathered`,
      unit.reshards ? 'resharded after forward' : 'stays gathered', unit.offloaded ? 'offloaded' : '']
      .filter(Boolean).join(', ');
    addUnit(unit.name, note, u);
  });
  if (plan.collectives.some((c) => c.unit < 0)) addUnit('no unit', 'collectives of the model itself', -1);
  $('units').innerHTML = parts.join('') + '</tbody>';
  const choose = (event) => {
    const row = event.target.closest('tr[data-collective]');
    if (row) select(Number(row.dataset.collective));
  };
  $('units').addEventListener('click', choose);
  $('units').addEventListener('keydown', (event) => { if (event.key === 'Enter') choose(event); });
}

new ResizeObserver(redraw).observe(chart);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
draw();
document.body.dataset.ready = 'true';
