// Small plots in SVG: axes and contents. Plots are drawn again when the available width changes.


function axis(values, { log = false, zero = false, low, high } = {}) {
  let [a, b] = [low ?? Math.min(...values), high ?? Math.max(...values)];
  if (log) {
    a = Math.log10(a > 0 ? a : 1e-9);
    b = Math.log10(b > 0 ? b : 1);
    if (b - a < 0.3) { a -= 0.2; b += 0.2; }
  } else {
    if (zero) a = Math.min(0, a);
    if (a === b) { a -= Math.abs(a) * 0.1 || 1; b += Math.abs(b) * 0.1 || 1; }
  }
  const at = (value) => ((log ? Math.log10(Math.max(value, 1e-12)) : value) - a) / (b - a);
  return { at, ticks: () => (log ? logTicks(a, b) : ticks(a, b)) };
}

function ticks(a, b) {
  const rough = (b - a) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let i = Math.ceil(a / step); i * step <= b + step * 1e-6; i += 1) found.push(Number((i * step).toPrecision(6)));
  return found;
}

function logTicks(a, b) {
  const found = [];
  const every = Math.max(1, Math.ceil((b - a) / 7));
  for (let i = Math.ceil(a); i <= b; i += every) found.push(10 ** i);
  if (found.length > 2) return found;
  const between = [];
  for (let i = Math.floor(a); i <= b; i += 1) between.push(10 ** i, 2 * 10 ** i, 5 * 10 ** i);
  return between.filter((v) => v >= 10 ** a && v <= 10 ** b);
}

const room = (host) => Math.max(260, (host.clientWidth || 600) - 20);  // without the padding

class Plot {
  constructor(host, { x, y, xLabel, yLabel, height = 320, xText, yText, label, right = 14, top = 26 }) {
    const width = room(host);
    Object.assign(this, { x, y, width, height });
    this.left = 58;
    this.bottom = 44;
    this.top = top;
    this.right = right;
    this.root = svg('svg', { class: 'plot', width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label || `${yLabel} over ${xLabel}` });
    host.replaceChildren(this.root);
    const inner = [width - this.left - this.right, height - this.top - this.bottom];
    this.px = (value) => this.left + x.at(value) * inner[0];
    this.py = (value) => this.top + (1 - y.at(value)) * inner[1];
    this.axes(xLabel, yLabel, xText || formatAmount, yText || formatAmount);
    this.area = svg('g', {});
    this.root.append(this.area);
  }

  axes(xLabel, yLabel, xText, yText) {
    const group = svg('g', { class: 'axes' });
    const floor = this.height - this.bottom;
    const most = Math.max(2, Math.floor((this.width - this.left) / 62));
    const xs = this.x.ticks();
    const every = Math.ceil(xs.length / most);
    xs.filter((_, i) => i % every === 0).forEach((value) => {
      const x = this.px(value);
      if (x < this.left - 1 || x > this.width - this.right + 1) return;
      group.append(svg('line', { x1: x, x2: x, y1: this.top, y2: floor }), svg('text', { x: clamp(x, 16, this.width - 18), y: floor + 16, 'text-anchor': 'middle' }, xText(value)));
    });
    this.y.ticks().forEach((value) => {
      const y = this.py(value);
      if (y < this.top - 1 || y > floor + 1) return;
      group.append(svg('line', { x1: this.left, x2: this.width - this.right, y1: y, y2: y }), svg('text', { x: this.left - 6, y: y + 4, 'text-anchor': 'end' }, yText(value)));
    });
    group.append(
      svg('text', { class: 'label', x: (this.left + this.width - this.right) / 2, y: this.height - 8, 'text-anchor': 'middle' }, xLabel),
      svg('text', { class: 'label', x: 4, y: 14 }, yLabel),
    );
    this.root.append(group);
  }

  add(tag, attributes, title, go) {
    const node = svg(tag, attributes, title ? svg('title', {}, title) : null);
    if (go) {
      node.classList.add('go');
      node.addEventListener('click', go);
    }
    this.area.append(node);
    return node;
  }

  point(shape, x, y, name, title, go, size = 4.5) {
    const [cx, cy] = [this.px(x), this.py(y)];
    const paths = {
      diamond: `M${cx} ${cy - size * 1.3}L${cx + size * 1.3} ${cy}L${cx} ${cy + size * 1.3}L${cx - size * 1.3} ${cy}Z`,
      square: `M${cx - size} ${cy - size}h${2 * size}v${2 * size}h${-2 * size}Z`,
      triangle: `M${cx} ${cy - size * 1.3}L${cx + size * 1.2} ${cy + size}L${cx - size * 1.2} ${cy + size}Z`,
    };
    if (shape === 'circle') return this.add('circle', { class: name, cx, cy, r: size }, title, go);
    return this.add('path', { class: name, d: paths[shape] }, title, go);
  }

  line(points, name) {
    return this.add('path', { class: `curve ${name}`, d: points.map(([x, y], i) => `${i ? 'L' : 'M'}${this.px(x).toFixed(1)} ${this.py(y).toFixed(1)}`).join('') });
  }

  upright(value, name, text, row = -1) {  // a vertical line; its label is in a row above the plot, or at the top inside
    const x = this.px(value);
    const y = row < 0 ? this.top + 11 : 28 + 13 * row;
    this.add('line', { class: `rule ${name}`, x1: x, x2: x, y1: row < 0 ? this.top : y + 3, y2: this.height - this.bottom }, text);
    const left = x > this.width / 2;
    this.add('text', { class: `rule-text ${name}`, x: x + (left ? -4 : 4), y, 'text-anchor': left ? 'end' : 'start' }).append(text);
  }

  level(value, name, text, left = false) {
    const y = this.py(value);
    this.add('line', { class: `rule ${name}`, x1: this.left, x2: this.width - this.right, y1: y, y2: y }, text);
    this.add('text', { class: `rule-text ${name}`, x: left ? this.left + 4 : this.width - this.right - 2, y: y - 4, 'text-anchor': left ? 'start' : 'end' }).append(text);
  }
}

// Draws a plot, and draws it again when the width of its element changes.
function drawn(host, draw) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (host.clientWidth && host.clientWidth !== width) {
      width = host.clientWidth;
      requestAnimationFrame(draw);  // after the browser's layout
    }
  });
  observer.observe(host);
}

// Joins values that are at one place in a plot. Returns pairs of a value and its names, in ascending order.
function together(values, near) {
  const found = [];
  for (const [value, name] of [...values].sort((a, b) => a[0] - b[0])) {
    const last = found[found.length - 1];
    if (last && value - last[0] <= near) last[1].push(name);
    else found.push([value, [name]]);
  }
  return found;
}

// Histograms and weights --------------------------------------------------------------------------------------

function setUpHistograms(go) {
  const host = byId('histogram');
  if (!host) return;
  const choice = byId('histogram-choice');
  const draw = () => {
    const found = page.histograms[Number(choice.value)];
    const counts = found.counts;
    const width = found.absmax / counts.length;
    const highest = Math.max(1, ...counts);
    const far = Math.max(found.absmax, found.chosen || 0) || 1;
    const lines = together([...(known(found.chosen) ? [[found.chosen, 'in the model']] : []), ...found.methods.map((m) => [m.amax, m.name])], 0.008 * far);
    const plot = new Plot(host, {
      top: 30 + 13 * lines.length,
      x: axis([0, far], { low: 0, high: far * 1.02 }), y: axis([0.7, highest], { log: true, low: 0.7, high: highest * 2 }),
      xLabel: 'magnitude |x|', yLabel: 'values in each bin (log)', label: `Histogram of ${found.tensor}`,
      xText: (v) => formatNumber(v, 3),
    });
    counts.forEach((count, i) => {
      if (!count) return;
      const [x0, x1] = [plot.px(i * width), plot.px((i + 1) * width)];
      const y = plot.py(count);
      const clipped = known(found.chosen) && i * width >= found.chosen;
      plot.add('rect', { class: `bin${clipped ? ' clipped' : ''}`, x: x0, y, width: Math.max(0.5, x1 - x0 - 0.5), height: Math.max(0, plot.height - plot.bottom - y) },
        `${formatNumber(i * width)} to ${formatNumber((i + 1) * width)}: ${formatAmount(count)} values${clipped ? ', clipped' : ''}`);
    });
    lines.forEach(([value, names], row) => {
      const chosen = names.includes('in the model');
      const text = names.join(', ');
      plot.upright(value, chosen ? 'chosen' : 'method', text.length * 7 < plot.width / 2 ? text : [chosen && 'in the model', `${names.length - chosen} methods`].filter(Boolean).join(', '), row);
    });
    const rows = [...found.methods.map((m) => [found.nearest.includes(m.name) ? `${m.name} ✓` : m.name, m.amax, m.clipped]), ...(known(found.chosen) ? [['in the model', found.chosen, found.clipped]] : [])];
    byId('histogram-facts').replaceChildren(
      el('table', { class: 'small' }, el('thead', {}, el('tr', {}, ['method', 'range ±', 'scale', 'clipped'].map((h, i) => el('th', { scope: 'col', class: i ? 'number' : null }, h)))),
        el('tbody', {}, rows.map(([name, amax, clipped]) => el('tr', {}, el('th', { scope: 'row' }, name), el('td', { class: 'number' }, formatNumber(amax)), el('td', { class: 'number' }, formatNumber(amax / 127)), el('td', { class: 'number' }, clipped ? `${formatNumber(100 * clipped, 3)} %` : '0 %'))))),
      el('p', { class: 'muted' }, `${found.nearest.length ? '✓ marks methods with the range in the model. ' : ''}${formatAmount(found.values)} values from ${formatNumber(found.minimum)} to ${formatNumber(found.maximum)}. `,
        found.node >= 0 ? el('button', { type: 'button', class: 'link', onclick: () => go('after', found.node) }, 'Show in the network') : ''),
    );
  };
  choice.addEventListener('change', draw);
  drawn(host, draw);
}

function setUpWeights(go) {
  const host = byId('weights-plot');
  if (!host) return;
  const choice = byId('weights-choice');
  const draw = () => {
    const found = page.model.weights[Number(choice.value)];
    const one = found.holds.length === 1;
    const shown = found.largest.length ? found.largest : found.holds;
    const most = Math.max(...shown, ...found.holds) || 1;
    const plot = new Plot(host, {
      x: axis([0, shown.length], { low: 0, high: Math.max(1, shown.length) }), y: axis([0, most], { low: 0, high: most * 1.05 }),
      xLabel: 'output channel', yLabel: 'largest |weight|', height: 260, xText: (v) => formatNumber(v), yText: (v) => formatNumber(v, 3),
      label: `Range of the weights of ${found.name} by output channel`,
    });
    const gap = shown.length > 200 ? 0 : 0.15;
    shown.forEach((value, i) => {
      const [x0, x1] = [plot.px(i + gap), plot.px(i + 1 - gap)];
      const y = plot.py(value);
      plot.add('rect', { class: 'bin', x: x0, y, width: Math.max(0.4, x1 - x0), height: plot.height - plot.bottom - y }, `channel ${i}: ${formatNumber(value)}`);
    });
    if (one) plot.level(found.holds[0], 'chosen', 'one scale for all channels');
    else plot.line(found.holds.flatMap((value, i) => [[i, value], [i + 1, value]]), 'chosen');
    const sorted = [...shown].filter((v) => v > 0).sort((a, b) => a - b);
    const spread = sorted.length ? sorted[sorted.length - 1] / sorted[0] : 1;
    byId('weights-facts').replaceChildren(
      `${found.shape}, ${shown.length} channels; `,
      sorted.length ? `the largest range of a channel is ${formatNumber(spread, 3)} times the smallest. ` : 'all weights are zero. ',
      one ? 'All channels have one scale, so channels with a small range have few levels. ' : 'The line is the largest value that the scale of each channel can represent. ',
      found.largest.length ? '' : 'The weights are not available, so the ranges follow from the scales. ',
      el('button', { type: 'button', class: 'link', onclick: () => go('after', found.node) }, 'Show in the network'),
    );
  };
  choice.addEventListener('change', draw);
  drawn(host, draw);
}
