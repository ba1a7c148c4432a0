// A drawing of boxes and edges, with the layout that the page contains. It can be moved, zoomed, and used by keyboard.

const NEAREST = 2.5;
const READABLE = 0.7;  // names cannot be read at smaller scales
const FAR = 0.34;  // texts are left out at smaller scales

class GraphView {
  constructor(host, side, { onSelect, onOpen }) {
    this.host = host;
    this.side = side;
    this.model = models[side];
    this.onSelect = onSelect;
    this.onOpen = onOpen;
    this.lengths = new Map();
    this.views = {};
    this.scale = 1;
    this.x = 0;
    this.y = 0;
    this.selected = null;
    this.canvas = el('div', {
      class: 'graph', role: 'group', tabindex: '0', 'data-side': side,
      'aria-label': `Graph of ${this.model.path || 'the model'}; arrow keys go from box to box, Shift and arrow keys`
        + ' move the picture, plus and minus zoom, 0 shows all',
    });
    this.map = el('div', { class: 'minimap', 'aria-hidden': 'true' });
    this.frame = el('div', { class: 'frame' });
    this.painted = 1;
    host.append(this.canvas, this.map);
    this.measure();
    this.listen();
  }

  show(name) {
    this.name = name;
    this.drawing = name === 'modules' ? arranged(this.model.modules, this.extent) : this.model[name];
    this.view = name === 'modules' ? this.build(this.drawing) : this.views[name] ??= this.build(this.drawing);
    this.canvas.replaceChildren(this.view.world);
    this.map.replaceChildren(this.view.map, this.frame);
    this.host.classList.toggle('none', Boolean(this.drawing.why));
    if (name === 'modules') this.fit();
    else this.home();
    this.color();
    this.paint();
  }

  // Building --------------------------------------------------------------------------------------------------

  build(drawing) {
    const shapes = this.shapeRows(drawing);
    const edges = drawing.edges.map((edge, at) => this.edge(edge, at, shapes.get(at)));
    const boxes = drawing.boxes.map((box, at) => this.box(box, at));
    const world = svg('svg', {
      class: 'world', viewBox: `0 0 ${drawing.width || 1} ${drawing.height || 1}`,
    }, svg('g', { class: 'edges' }, edges), svg('g', { class: 'boxes' }, boxes));
    if (drawing.why) world.append(svg('text', { x: 0, y: 0, class: 'why' }, drawing.why));
    const map = svg('svg', { viewBox: `0 0 ${drawing.width || 1} ${drawing.height || 1}` },
      drawing.boxes.map((b) => svg('rect', { x: b.x, y: b.y, width: b.w, height: b.h, class: `dot ${b.paint}` })),
      drawing.edges.filter((e) => e.marks.some((m) => m.stays)).map((e) => {
        const [x, y] = e.points[e.points.length - 1];
        return svg('rect', { x: x - 70, y: y - 60, width: 140, height: 60, class: 'dot conversion' });
      }));
    const into = drawing.boxes.map(() => []);
    const outOf = drawing.boxes.map(() => []);
    drawing.edges.forEach((edge) => {
      outOf[edge.source].push(edge.target);
      into[edge.target].push(edge.source);
    });
    const place = new Map();
    drawing.boxes.forEach((box, at) => box.rows.forEach((node) => { if (!place.has(node)) place.set(node, at); }));
    return { world, map, boxes, edges, into, outOf, place, drawing };
  }

  box(box, at) {
    const group = svg('g', {
      class: `box ${box.role} ${box.paint}`, transform: `translate(${box.x} ${box.y})`, 'data-box': at,
      role: 'button', tabindex: '-1', 'aria-label': this.describe(box),
    });
    group.append(svg('title', {}, this.describe(box)));
    const round = box.role === 'input' || box.role === 'output' ? box.h / 2 : 7;
    group.append(svg('rect', { class: 'body', width: box.w, height: box.h, rx: round }));
    if (box.role === 'input' || box.role === 'output') {
      group.append(
        svg('text', { class: 'op', x: box.w / 2, y: 15, 'text-anchor': 'middle' }, `${box.role}  ${box.note}`),
        svg('text', { class: 'name', x: box.w / 2, y: 27, 'text-anchor': 'middle' }, box.title),
      );
    } else if (box.role === 'layer') {
      this.layerText(group, box);
    } else if (box.role === 'module') {
      this.moduleText(group, box);
    } else {
      this.rows(group, box);
    }
    return group;
  }

  layerText(group, box) {
    const layer = this.model.layers[box.layer];
    const ends = `${layer.inputs.map((t) => t[1]).filter((v, i, all) => all.indexOf(v) === i).join('+') || '–'} → `
      + `${layer.outputs.map((t) => t[1]).filter((v, i, all) => all.indexOf(v) === i).join('+') || '–'}`;
    const time = timeText(layer);
    group.append(
      svg('rect', { class: 'bar', width: 6, height: box.h, rx: 3 }),
      svg('text', { class: 'op', x: 14, y: 18 }, layer.type),
      svg('text', { class: 'badge', x: box.w - 10, y: 18, 'text-anchor': 'end' }, ends),
      svg('text', { class: 'name', x: 14, y: 36 }, box.title),
      svg('text', { class: 'small', x: 14, y: 53 }, time || (layer.nodes.length ? `${layer.nodes.length} ONNX nodes` : 'moves data')),
    );
    if (layer.findings.length) this.flag(group, box, layer.findings);
  }

  moduleText(group, box) {
    const convs = box.rows.map((number) => this.model.convs[this.model.nodes[number].conv]).filter(Boolean);
    const quantized = convs.filter((conv) => kindOf(conv.precision) === 'int8');
    const types = [...new Set(quantized.map((conv) => conv.precision))].sort().reverse();
    const time = this.timeOf(box);
    const findings = new Set(box.rows.flatMap((number) => this.model.nodes[number].findings));
    group.append(
      svg('rect', { class: 'bar', width: 6, height: box.h, rx: 3 }),
      svg('text', { class: 'name strong', x: 14, y: 18 }, ending(box.title, 25)),
      svg('text', { class: 'small', x: 14, y: 35 }, [convs.length ? `${quantized.length} of ${convs.length} in ${types.join(', ') || 'INT8'}` : box.note,
        time ? `${isMeasured ? '' : 'est. '}${formatMs(time)}` : ''].filter(Boolean).join(', ')),
    );
    if (findings.size) this.flag(group, box, [...findings]);
  }

  // Milliseconds of the layers in a box; null if no time is known.
  timeOf(box) {
    const numbers = box.role === 'layer' ? [box.layer] : [...new Set(box.rows.map((number) => this.model.nodes[number].layer))];
    const times = numbers.filter((number) => number >= 0)
      .map((number) => this.model.layers[number][isMeasured && this.side === 'after' ? 'measured' : 'ms']).filter(known);
    return times.length ? times.reduce((a, b) => a + b, 0) : null;
  }

  // The shape of each tensor is written once, where an edge leaves the box. Several shapes are below each other.
  shapeRows(drawing) {
    const leaving = new Map();
    drawing.edges.forEach((edge, at) => {
      if (!edge.shape || (this.name === 'modules' && edge.marks.length)) return;
      if (!leaving.has(edge.source)) leaving.set(edge.source, new Map());
      const tensors = leaving.get(edge.source);
      const known = tensors.get(edge.tensor);
      if (known === undefined || drawing.edges[known].points[0][0] < edge.points[0][0]) tensors.set(edge.tensor, at);
    });
    const rows = new Map();
    for (const tensors of leaving.values()) {
      const listed = [...tensors.values()].sort((a, b) => drawing.edges[a].points[0][0] - drawing.edges[b].points[0][0]);
      const deep = Math.min(3, listed.length - (listed.length > 1));
      if (listed.length <= 9) listed.forEach((at, i) => rows.set(at, i % deep));
    }
    return rows;
  }

  // Width of the name of an operator in pixels.
  lengthOf(text) {
    if (!this.lengths.has(text)) {
      this.pen ??= Object.assign(document.createElement('canvas').getContext('2d'), { font: '650 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif' });
      this.lengths.set(text, this.pen.measureText(text).width);
    }
    return this.lengths.get(text);
  }

  rows(group, box) {
    const model = this.model;
    let y = 0;
    if (box.role === 'fused') {
      const layer = model.layers[box.layer];
      group.append(svg('text', { class: 'small head', x: 10, y: 14 }, [layer.type, timeText(layer)].filter(Boolean).join(', ')));
      y = 20;
    }
    const findings = new Set();
    box.rows.forEach((number, at) => {
      const node = model.nodes[number];
      const height = box.heights[at];
      const inner = box.role === 'fused' ? 6 : 0;
      const conv = node.conv >= 0 ? model.convs[node.conv] : null;
      const paint = conv ? kindOf(conv.precision) : box.paint;
      const row = svg('g', { class: `row ${paint}${conv ? ' conv' : ''}`, transform: `translate(${inner} ${y})`, 'data-node': number });
      const width = box.w - 2 * inner;
      if (box.role === 'fused' || conv) row.append(svg('rect', { class: 'cell', width, height: height - 2, rx: 5 }));
      if (conv) {
        row.append(
          svg('rect', { class: 'bar', width: 6, height: height - 2, rx: 3 }),
          svg('text', { class: 'op', x: 13, y: 16 }, node.op),
          svg('text', { class: 'badge', x: width - 8, y: 16, 'text-anchor': 'end' }, `${conv.inputs[0] || conv.precision} → ${conv.output}`),
          svg('text', { class: 'name', x: 13, y: 32 }, ending(plainName(node), 33 - (inner ? 2 : 0))),
        );
      } else if (height > 30) {
        row.append(
          svg('text', { class: 'op', x: 13, y: 16 }, node.op),
          svg('text', { class: 'badge', x: width - 8, y: 16, 'text-anchor': 'end' }, box.layer >= 0 ? box.note : 'no layer of its own'),
          svg('text', { class: 'name', x: 13, y: 32 }, ending(plainName(node), 33)),
        );
      } else {
        const left = Math.floor((width - 31 - this.lengthOf(node.op)) / 6.3);
        row.append(
          svg('text', { class: 'op', x: 13, y: 14 }, node.op),
          left > 3 ? svg('text', { class: 'name', x: width - 8, y: 14, 'text-anchor': 'end' }, ending(plainName(node), left)) : '',
        );
      }
      node.findings.forEach((finding) => findings.add(finding));
      group.append(row);
      y += height;
    });
    if (findings.size) this.flag(group, box, [...findings]);
  }

  flag(group, box, ids) {
    const worst = ids.map((id) => this.model.findings[id].severity)
      .sort((a, b) => SEVERITIES.indexOf(a) - SEVERITIES.indexOf(b))[0];
    const text = `${SIGNS[worst]} ${ids.length}`;
    const width = 14 + 7 * text.length;
    group.append(svg('g', { class: `flag ${worst}`, transform: `translate(${box.w - width + 6} -13)` },
      svg('rect', { width, height: 18, rx: 9 }),
      svg('text', { x: width / 2, y: 13, 'text-anchor': 'middle' }, text)));
  }

  describe(box) {
    if (box.role === 'input' || box.role === 'output') return `${box.role} ${box.title}, ${box.note}`;
    if (box.role === 'module') return `Module ${box.title}, ${box.note}; click to open`;
    if (box.role === 'layer') {
      const layer = this.model.layers[box.layer];
      return `${layer.type} layer ${box.title}, ${layer.precision}`;
    }
    return box.rows.map((number) => {
      const node = this.model.nodes[number];
      const conv = node.conv >= 0 ? this.model.convs[node.conv] : null;
      return `${node.op} ${node.name}${conv ? `, ${conv.inputs[0] || conv.precision} to ${conv.output}` : ''}`;
    }).join('; ');
  }

  edge(edge, at, row) {
    const points = edge.points;
    let path = `M${points[0][0]} ${points[0][1]}`;
    for (let i = 1; i < points.length; i += 1) {
      const [x0, y0] = points[i - 1];
      const [x, y] = points[i];
      const middle = (y0 + y) / 2;
      path += x === x0 ? `L${x} ${y}` : `C${x0} ${middle} ${x} ${middle} ${x} ${y}`;
    }
    const [x, y] = points[points.length - 1];
    const stays = edge.marks.filter((m) => m.stays);
    const group = svg('g', { class: `edge ${edge.paint}${stays.length ? ' converts' : ''}`, 'data-edge': at });
    group.append(svg('title', {}, [edge.tensor, edge.shape, edge.precision, ...edge.marks.map((m) => `${m.op} ${m.name}${m.stays ? ' (conversion)' : ''}`)].join('\n')));
    group.append(svg('path', { class: 'line', d: path }), svg('path', { class: 'head', d: `M${x - 4} ${y - 7}L${x} ${y}L${x + 4} ${y - 7}Z` }));
    if (stays.length) {
      const text = `⇄ ${stays.map((m) => m.op).join('+')}`;
      const width = 16 + 8 * text.length;
      group.append(svg('g', { class: 'mark conversion', transform: `translate(${x - width / 2} ${y - 40})` },
        svg('rect', { width, height: 20, rx: 4 }),
        svg('text', { x: width / 2, y: 14, 'text-anchor': 'middle' }, text)));
    } else if (edge.marks.length) {
      group.append(svg('circle', { class: 'mark', cx: x, cy: y - 18, r: 4 }));
    }
    if (row !== undefined) {
      group.append(svg('text', { class: 'shape', x: points[0][0] + 5, y: points[0][1] + 12 + 11 * row }, edge.shape));
    }
    return group;
  }

  // Moving ----------------------------------------------------------------------------------------------------
  // A CSS transform moves the picture, so that only the compositor works. Zooming scales the painted picture, and
  // paints again when the wheel rests, because the layout of a thousand texts takes longer than a frame.

  measure() {
    const box = this.canvas.getBoundingClientRect();
    this.extent = [box.width || 600, box.height || 400];
    this.mapBox = this.map.getBoundingClientRect();
    this.apply();
  }

  get middle() {
    return this.extent[0] / 2;
  }

  apply() {
    if (this.waiting || !this.view) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.keepInSight();
      const { world } = this.view;
      if (Math.abs(this.scale / this.painted - 1) > 1e-6) {
        clearTimeout(this.resting);
        this.resting = setTimeout(() => this.paint(), 140);
      }
      this.place(world);
    });
  }

  place(world) {
    world.style.transform = `translate(${Math.round(this.x)}px, ${Math.round(this.y)}px) scale(${(this.scale / this.painted).toFixed(5)})`;
    const [w, h] = this.extent;
    const at = this.mapBox;
    const d = this.drawing;
    const k = Math.min(at.width / (d.width || 1), at.height / (d.height || 1));
    const [left, top] = [(at.width - d.width * k) / 2, (at.height - d.height * k) / 2];
    const [fw, fh] = [(w / this.scale) * k, (h / this.scale) * k];
    this.frame.style.transform = `translate(${(left - (this.x / this.scale) * k).toFixed(1)}px, ${(top - (this.y / this.scale) * k).toFixed(1)}px)`;
    if (this.framed !== this.scale) {
      this.framed = this.scale;
      this.frame.style.width = `${fw.toFixed(1)}px`;
      this.frame.style.height = `${fh.toFixed(1)}px`;
    }
  }

  paint() {  // at the current scale
    const { world } = this.view;
    this.painted = this.scale;
    world.setAttribute('width', this.drawing.width * this.scale);
    world.setAttribute('height', this.drawing.height * this.scale);
    this.canvas.classList.toggle('far', this.scale < FAR);
    this.place(world);
  }

  keepInSight() {  // a part of the drawing is always visible
    const [w, h] = this.extent;
    const d = this.drawing;
    this.x = clamp(this.x, 80 - d.width * this.scale, w - 80);
    this.y = clamp(this.y, 60 - d.height * this.scale, h - 60);
  }

  get lowest() {
    const [w, h] = this.extent;
    return Math.min(1, w / Math.max(1, this.drawing.width), h / Math.max(1, this.drawing.height)) * 0.95;
  }

  home() {  // shows the beginning of the network at a readable scale
    const [w] = this.extent;
    const first = this.drawing.boxes[0];
    this.scale = w < 420 ? 0.8 : 0.95;
    this.x = first ? this.middle - (first.x + first.w / 2) * this.scale : 20;
    this.y = first ? 46 - first.y * this.scale : 40;
    this.apply();
  }

  fit() {
    const [w, h] = this.extent;
    this.scale = this.drawing.scale ?? this.lowest;
    this.x = this.middle - (this.drawing.width * this.scale) / 2;
    this.y = Math.max(4, (h - this.drawing.height * this.scale) / 2);
    this.apply();
  }

  frameBoxes(boxes) {  // shows all boxes; if they are too many to be readable, the first boxes
    const found = boxes.map((at) => this.drawing.boxes[at]).filter(Boolean);
    if (!found.length) return;
    const [w, h] = this.extent;
    const [left, top] = [Math.min(...found.map((b) => b.x)), Math.min(...found.map((b) => b.y))];
    const [right, bottom] = [Math.max(...found.map((b) => b.x + b.w)), Math.max(...found.map((b) => b.y + b.h))];
    this.scale = clamp(0.92 * Math.min(w / (right - left), h / (bottom - top)), READABLE, 0.95);
    const fits = (right - left) * this.scale < w;
    this.x = this.middle - (fits ? (left + right) / 2 : found[0].x + found[0].w / 2) * this.scale;
    this.y = (bottom - top) * this.scale < h ? h / 2 - ((top + bottom) / 2) * this.scale : 40 - top * this.scale;
    this.apply();
    this.paint();
  }

  zoom(factor, cx, cy) {
    const [w, h] = this.extent;
    const [px, py] = [cx ?? w / 2, cy ?? h / 2];
    const next = clamp(this.scale * factor, this.lowest, NEAREST);
    this.x = px - (px - this.x) * (next / this.scale);
    this.y = py - (py - this.y) * (next / this.scale);
    this.scale = next;
    this.apply();
  }

  pan(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.apply();
  }

  center(at) {
    const box = this.drawing.boxes[at];
    if (!box) return;
    const [, h] = this.extent;
    if (this.scale < READABLE) this.scale = 0.9;
    this.x = this.middle - (box.x + box.w / 2) * this.scale;
    this.y = h / 2 - (box.y + box.h / 2) * this.scale;
    this.apply();
  }

  // Choosing --------------------------------------------------------------------------------------------------

  boxOf(node, layer) {
    const found = this.view.place.get(node);
    if (found !== undefined) return found;
    return layer >= 0 ? this.drawing.boxes.findIndex((box) => box.layer === layer) : -1;
  }

  mark(at, node) {
    if (this.selected !== null) this.view.boxes[this.selected]?.classList.remove('selected');
    this.canvas.querySelectorAll('.row.selected, .edge.near').forEach((one) => one.classList.remove('selected', 'near'));
    this.selected = at >= 0 ? at : null;
    if (at < 0) return;
    const group = this.view.boxes[at];
    group.classList.add('selected');
    group.querySelector(`[data-node="${node}"]`)?.classList.add('selected');
    this.drawing.edges.forEach((edge, i) => {
      if (edge.source === at || edge.target === at) this.view.edges[i].classList.add('near');
    });
  }

  highlight(boxes) {
    const wanted = boxes && new Set(boxes);
    this.canvas.classList.toggle('searching', Boolean(wanted));
    this.view.boxes.forEach((group, at) => group.classList.toggle('match', Boolean(wanted && wanted.has(at))));
  }

  color() {  // if coloring by time is chosen, with ten steps from zero to the slowest box
    const byTime = GraphView.coloring === 'time';
    this.canvas.classList.toggle('heat', byTime);
    this.map.classList.toggle('heat', byTime);
    this.slowest = 0;
    if (!byTime) return;
    const times = this.drawing.boxes.map((box) => this.timeOf(box) ?? 0);
    this.slowest = Math.max(0, ...times);
    const dots = this.view.map.querySelectorAll('.dot:not(.conversion)');
    times.forEach((time, at) => {
      const level = this.slowest ? Math.ceil(10 * Math.sqrt(time / this.slowest)) : 0;
      for (const one of [this.view.boxes[at], dots[at]]) one.style.setProperty('--share', `${7 * level}%`);
    });
  }

  choose(at, node) {
    const box = this.drawing.boxes[at];
    if (!box) return;
    if (box.role === 'module') {
      this.onOpen(this, box);
      return;
    }
    this.onSelect(this.side, node ?? box.rows.find((n) => this.model.nodes[n].conv >= 0) ?? box.rows[box.rows.length - 1] ?? -1, box.layer, at);
  }

  stepTo(at) {  // does not open a module; only Enter opens a module
    if (this.drawing.boxes[at]?.role === 'module') this.mark(at, -1);
    else this.choose(at);
  }

  walk(dx, dy) {
    const from = this.selected;
    if (from === null) {
      const first = this.drawing.boxes.findIndex((box) => box.rows.length || box.layer >= 0);
      this.stepTo(first);
      this.center(first);
      return;
    }
    const { into, outOf, drawing } = this.view;
    const here = drawing.boxes[from];
    let near;
    if (dy) {
      near = (dy > 0 ? outOf : into)[from];
    } else {  // left or right: boxes that overlap in height
      near = drawing.boxes.map((_, at) => at).filter((at) => {
        const box = drawing.boxes[at];
        return (box.x - here.x) * dx > 0 && box.y < here.y + here.h && box.y + box.h > here.y;
      });
    }
    const away = (at) => Math.abs(drawing.boxes[at].x - here.x) + 0.3 * Math.abs(drawing.boxes[at].y - here.y);
    const best = [...near].sort((a, b) => away(a) - away(b))[0];
    if (best === undefined) return;
    this.stepTo(best);
    this.center(best);
    this.view.boxes[best].focus({ preventScroll: true });
  }

  listen() {
    const fingers = new Map();
    let moved = false;
    let spread = 0;
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.canvas.addEventListener('pointerdown', (event) => {
      if (event.button) return;
      fingers.set(event.pointerId, [event.clientX, event.clientY]);
      moved = fingers.size > 1;
      spread = 0;
    });
    this.canvas.addEventListener('pointermove', (event) => {
      const last = fingers.get(event.pointerId);
      if (!last) return;
      const [dx, dy] = [event.clientX - last[0], event.clientY - last[1]];
      if (!moved && Math.hypot(dx, dy) < 4) return;
      if (!moved) this.canvas.setPointerCapture(event.pointerId);
      moved = true;
      fingers.set(event.pointerId, [event.clientX, event.clientY]);
      if (fingers.size === 2) {
        const [a, b] = [...fingers.values()];
        const now = Math.hypot(a[0] - b[0], a[1] - b[1]);
        const box = this.canvas.getBoundingClientRect();
        if (spread) this.zoom(now / spread, (a[0] + b[0]) / 2 - box.left, (a[1] + b[1]) / 2 - box.top);
        spread = now;
      } else {
        this.pan(dx, dy);
      }
    });
    const lift = (event) => fingers.delete(event.pointerId);
    this.canvas.addEventListener('pointerup', lift);
    this.canvas.addEventListener('pointercancel', lift);
    this.canvas.addEventListener('click', (event) => {
      if (moved) { moved = false; return; }
      const box = event.target.closest('.box');
      if (!box) return;
      const row = event.target.closest('.row');
      this.choose(Number(box.dataset.box), row ? Number(row.dataset.node) : undefined);
    });
    this.canvas.addEventListener('wheel', (event) => {
      event.preventDefault();
      const [x, y] = at(event);
      this.zoom(Math.exp(-clamp(event.deltaY, -200, 200) * 0.0022), x, y);
    }, { passive: false });
    this.canvas.addEventListener('keydown', (event) => this.key(event));
    this.map.addEventListener('pointerdown', (event) => this.jump(event));
    this.map.addEventListener('pointermove', (event) => { if (event.buttons) this.jump(event); });
  }

  jump(event) {
    const at = this.map.getBoundingClientRect();
    const d = this.drawing;
    const k = Math.min(at.width / d.width, at.height / d.height);
    const [w, h] = this.extent;
    this.x = w / 2 - ((event.clientX - at.left - (at.width - d.width * k) / 2) / k) * this.scale;
    this.y = h / 2 - ((event.clientY - at.top - (at.height - d.height * k) / 2) / k) * this.scale;
    this.apply();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (way && event.shiftKey) this.pan(-60 * way[0], -60 * way[1]);
    else if (way) this.walk(...way);
    else if (event.key === '+' || event.key === '=') this.zoom(1.25);
    else if (event.key === '-') this.zoom(0.8);
    else if (event.key === '0') this.fit();
    else if (event.key === 'Home') this.home();
    else if (event.key === 'Enter' || event.key === ' ') this.walkInto(event);
    else return;
    event.preventDefault();
  }

  walkInto(event) {
    const box = event.target.closest?.('.box');
    if (box) this.choose(Number(box.dataset.box));
    byId('details').focus({ preventScroll: false });
  }
}
