// Plots of the time by kind of layer, the roofline, the front of `tune`, and measured over estimated times.

const SHAPES = { int8: 'circle', float: 'diamond', conversion: 'square', copy: 'triangle', edge: 'triangle' };

function setUpParts() {
  const host = byId('parts-plot');
  if (!host) return;
  const draw = () => {
    const width = room(host);
    const has = (field) => page.parts.some((p) => known(p[field]));
    const bars = [['measured', 'measured_ms'], [has('measured_ms') ? 'estimated' : 'after', 'ms'], ['before', 'before_ms']]
      .filter(([, field]) => has(field)).map(([name, field]) => [name, page.parts.map((p) => p[field] || 0)]);
    const most = Math.max(...bars.map(([, values]) => values.reduce((a, b) => a + b, 0))) || 1;
    const label = bars.length > 1 ? 72 : 0;
    const root = svg('svg', { class: 'plot', width, height: bars.length * 52 + 4, role: 'img', 'aria-label': 'Time by kind of layer; the table below has the numbers' });
    bars.forEach(([name, values], row) => {
      let x = label;
      if (label) root.append(svg('text', { class: 'label', x: 0, y: row * 52 + 26 }, name));
      values.forEach((value, i) => {
        if (!value) return;
        const part = page.parts[i];
        const w = (value / most) * (width - label - 2);
        root.append(svg('g', { class: `part ${part.kind}` },
          svg('title', {}, `${part.name}: ${formatMs(value)}`),
          svg('rect', { x, y: row * 52 + 4, width: Math.max(1, w - 1.5), height: 38, rx: 3 }),
          w > 90 ? svg('text', { x: x + 8, y: row * 52 + 28 }, w > 170 ? `${part.name} ${formatMs(value)}` : part.name) : null));
        x += w;
      });
    });
    host.replaceChildren(root);
  };
  drawn(host, draw);
}

function setUpRoofline(go) {
  const host = byId('roofline');
  if (!host) return;
  const roof = page.roof;
  const layers = page.model.layers.map((layer, at) => ({ layer, at })).filter(({ layer }) => layer.macs > 0 && layer.bytes > 0 && (layer.measured || layer.ms) > 0);
  const draw = () => {
    const points = layers.map(({ layer, at }) => ({ layer, at, x: layer.macs / layer.bytes, y: layer.macs / ((layer.measured || layer.ms) / 1e3) }));
    const peaks = Object.values(roof.rates);
    const xs = axis([...points.map((p) => p.x), Math.max(...peaks) / roof.bandwidth * 3], { log: true });
    const low = Math.min(...points.map((p) => p.y), Math.max(...peaks) / 1e3) / 2;
    const plot = new Plot(host, {
      x: xs, y: axis([], { log: true, low, high: Math.max(...peaks) * 2.2 }), height: 380, right: 40,
      xLabel: 'intensity: MACs for each byte moved (log)', yLabel: 'MACs per second (log)', label: `Roofline of ${roof.gpu}`,
    });
    const ends = [...points.map((p) => p.x), Math.max(...peaks) / roof.bandwidth * 3];
    const [x0, x1] = [Math.min(...ends), Math.max(...ends)];
    Object.entries(roof.rates).forEach(([name, rate]) => {
      const knee = rate / roof.bandwidth;
      const from = Math.min(x0, knee);
      plot.line([[Math.max(from, x0), Math.min(rate, Math.max(from, x0) * roof.bandwidth)], [Math.max(knee, x0), rate], [x1, rate]], 'roof');
      plot.add('text', { class: 'rule-text', x: plot.width - plot.right + 4, y: plot.py(rate) + 4 }, `${name}: ${formatAmount(rate)}MAC/s`).append(name);
    });
    points.forEach(({ layer, at, x, y }) => plot.point(SHAPES[layer.kind] || 'circle', x, y, layer.kind,
      `${layer.title}\n${layer.type}, ${layer.precision}\n${formatNumber(x, 3)} MAC/B, ${formatAmount(y)}MAC/s, ${timeText(layer)}`,
      () => go('after', layer.at, at)));
  };
  drawn(host, draw);
}

function setUpTuning() {
  const host = byId('tuning-plot');
  if (!host) return;
  const found = page.tuning;
  const draw = () => {
    const ends = found.points.flatMap((p) => [p.metric, p.low ?? p.metric, p.high ?? p.metric]);
    [found.float_metric, found.keep].filter(known).forEach((value) => ends.push(value));
    const xs = found.points.map((p) => p.x).concat(known(found.budget) ? [found.budget] : []);
    const pad = (Math.max(...xs) - Math.min(...xs)) * 0.06 || 1;
    const padY = (Math.max(...ends) - Math.min(...ends)) * 0.08 || 0.01;
    const plot = new Plot(host, {
      x: axis([], { low: Math.min(...xs) - pad, high: Math.max(...xs) + pad }), y: axis([], { low: Math.min(...ends) - padY, high: Math.max(...ends) + padY }), height: 340,
      xLabel: ending(found.axis, Math.floor(host.clientWidth / 8)), yLabel: found.metric, xText: (v) => formatNumber(v, 4), yText: (v) => formatNumber(v, 4), label: `Pareto front: ${found.metric} over ${found.axis}`,
    });
    if (known(found.float_metric)) plot.level(found.float_metric, 'method', 'float model');
    if (known(found.keep)) plot.level(found.keep, 'goal', 'goal', true);
    if (known(found.budget)) plot.upright(found.budget, 'goal', 'budget');
    const front = found.points.filter((p) => p.on_front).sort((a, b) => a.x - b.x);
    plot.line(front.map((p) => [p.x, p.metric]), 'front');
    [...found.points].sort((a, b) => a.on_front - b.on_front).forEach((p) => {
      const title = `${p.name}\n${found.metric} ${formatNumber(p.metric)}${known(p.low) ? ` (${formatNumber(p.low)} to ${formatNumber(p.high)})` : ''}\n${[p.int8 !== null && `${p.int8} INT8`, p.conversions !== null && `${p.conversions} conversions`, known(p.ms) && formatMs(p.ms)].filter(Boolean).join(', ')}${p.chosen ? '\nchosen' : ''}`;
      if (p.on_front && known(p.low) && known(p.high)) plot.add('line', { class: 'whisker', x1: plot.px(p.x), x2: plot.px(p.x), y1: plot.py(p.low), y2: plot.py(p.high) });
      plot.point(p.chosen ? 'diamond' : p.on_front ? 'circle' : 'square', p.x, p.metric, p.chosen ? 'pick' : p.on_front ? 'front' : 'other', title, null, p.chosen ? 7 : p.on_front ? 5 : 3);
      if (p.chosen) plot.add('text', { class: 'rule-text chosen', x: plot.px(p.x) + 11, y: plot.py(p.metric) + 16 }).append('chosen');
    });
  };
  drawn(host, draw);
}

function setUpMeasured(go) {
  const host = byId('measured-plot');
  if (!host) return;
  const layers = page.model.layers.map((layer, at) => ({ layer, at })).filter(({ layer }) => layer.ms > 0 && layer.measured > 0);
  const draw = () => {
    const values = layers.flatMap(({ layer }) => [layer.ms, layer.measured]);
    const [low, high] = [Math.min(...values) / 1.3, Math.max(...values) * 1.3];
    const plot = new Plot(host, {
      x: axis([], { log: true, low, high }), y: axis([], { log: true, low, high }), height: 360, xText: (v) => formatNumber(v, 3), yText: (v) => formatNumber(v, 3),
      xLabel: 'estimated ms (log)', yLabel: 'measured ms (log)', label: 'Measured over estimated milliseconds of each layer',
    });
    plot.line([[low, low], [high, high]], 'method');
    layers.forEach(({ layer, at }) => plot.point(SHAPES[layer.kind] || 'circle', layer.ms, layer.measured, layer.kind,
      `${layer.title}\nestimated ${formatMs(layer.ms)}, measured ${formatMs(layer.measured)}`,
      () => go('after', layer.at, at)));
  };
  drawn(host, draw);
}
