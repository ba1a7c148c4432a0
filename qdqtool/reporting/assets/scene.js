// Functions for a drawing: positions of modules, the drawing as a file, names and signs.

// Arranges modules in columns, from top to bottom in their order. The number of columns is chosen so that the modules
// are as large as possible in the window. If not all modules are readable then, there are as many columns as fit side by
// side. An edge to the next module goes straight down. Other edges run left of their column, and above the columns to a
// later column.
function arranged(drawing, [w, h]) {
  const [width, height, gap, gutter, head] = [196, 46, 44, 48, 64];
  const total = drawing.boxes.length;
  const layout = (count) => {
    const rows = Math.ceil(total / count);
    const size = [gutter / 2 + Math.ceil(total / rows) * (width + gutter), head + rows * (height + gap)];
    return { rows, size, scale: 0.98 * Math.min(w / size[0], h / size[1], 1) };
  };
  let best = [1, 2, 3, 4, 5, 6, 7, 8].map(layout).reduce((a, b) => (b.scale > a.scale * 1.03 ? b : a));
  if (best.scale < READABLE) {
    best = layout(Math.max(1, Math.floor(w / (READABLE * (width + gutter)))));
    best.scale = 0.98 * Math.min(w / best.size[0], 1);
  }
  const column = (at) => Math.floor(at / best.rows);
  const left = (at) => gutter + column(at) * (width + gutter);
  const boxes = drawing.boxes.map((box, at) => ({ ...box, w: width, h: height, x: left(at), y: head + (at % best.rows) * (height + gap) }));
  const edges = drawing.edges.map((edge, number) => {
    const [from, to] = [boxes[edge.source], boxes[edge.target]];
    const [a, b] = [column(edge.source), column(edge.target)];
    const [bottom, top] = [from.y + height, to.y];
    const middle = width / 2;
    if (a === b && edge.target === edge.source + 1) return { ...edge, points: [[from.x + middle, bottom], [to.x + middle, top]] };
    const aside = 10 + 5 * (number % 6);
    const [out, into] = [from.x + middle - 30, to.x + middle - 60];
    const points = [[out, bottom], [out, bottom + 16]];
    const [first, last] = [(b === a + 1 ? to.x : from.x) - aside, to.x - aside];
    points.push([first, bottom + 16]);
    if (b > a + 1) points.push([first, 12 + 6 * (number % 5)], [last, 12 + 6 * (number % 5)]);
    points.push([last, top - 38], [into, top - 38], [into, top]);
    return { ...edge, shape: '', points };
  });
  return { ...drawing, boxes, edges, width: best.size[0], height: best.size[1], scale: best.scale };
}

// Browsers return mixed colors as color(srgb 0.9 0.4 0.3), which few programs can read.
function plainColor(value) {
  const found = /^color\(srgb ([\d.]+) ([\d.]+) ([\d.]+)/.exec(value);
  return found ? `rgb(${found.slice(1).map((part) => Math.round(255 * part)).join(', ')})` : value;
}

const SEVERITIES = ['error', 'warning', 'info'];
const SIGNS = { error: '■', warning: '▲', info: '●' };

function kindOf(precision) {
  if (['INT8', 'UINT8', 'FP8', 'INT4'].includes(precision)) return 'int8';
  return ['FLOAT', 'FP32', 'FP16', 'BF16'].includes(precision) ? 'float' : 'other';
}

function plainName(node) {
  const cut = node.name.lastIndexOf('/');
  const name = cut > 0 && node.name.slice(cut + 1).startsWith(node.op) ? node.name.slice(0, cut) : node.name;
  return name.replace(/^\//, '');
}

const ending = (name, width) => (name.length <= width ? name : `…${name.slice(1 - width)}`);

// Returns the drawing as a file that needs no style sheet: the styles are written into each element.
function svgOf(view) {
  const properties = ['fill', 'fill-opacity', 'stroke', 'stroke-width', 'stroke-dasharray', 'font-family', 'font-size', 'font-weight', 'text-anchor', 'opacity', 'paint-order'];
  const usual = { 'fill-opacity': '1', stroke: 'none', 'stroke-width': '1px', 'stroke-dasharray': 'none', 'text-anchor': 'start', opacity: '1', 'paint-order': 'normal' };
  const far = view.canvas.classList.contains('far');
  view.canvas.classList.remove('far');
  const copy = view.view.world.cloneNode(true);
  const originals = view.view.world.querySelectorAll('*');
  copy.querySelectorAll('*').forEach((node, at) => {
    const style = getComputedStyle(originals[at]);
    for (const name of ['class', 'role', 'tabindex', 'aria-label', 'style', 'data-box', 'data-edge', 'data-node']) node.removeAttribute(name);
    if (!/^(rect|path|circle|text)$/.test(node.tagName)) return;
    for (const name of properties) {
      const value = style.getPropertyValue(name);
      if (value === usual[name] || (name.startsWith('font') && node.tagName !== 'text')) continue;
      node.setAttribute(name, plainColor(value));
    }
  });
  view.canvas.classList.toggle('far', far);
  const { width, height } = view.drawing;
  for (const name of ['class', 'style']) copy.removeAttribute(name);
  for (const [name, value] of Object.entries({ xmlns: SVG, width, height })) copy.setAttribute(name, value);
  copy.prepend(svg('rect', { width, height, fill: getComputedStyle(view.host).backgroundColor }));
  return new XMLSerializer().serializeToString(copy);
}
