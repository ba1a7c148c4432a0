// Elements are made only with text nodes and attributes, so that no name of a model becomes markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? '' : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const known = (value) => value !== null && value !== undefined;

function formatMs(value) {
  if (!known(value)) return '–';
  const digits = value >= 1000 ? 0 : value >= 100 ? 1 : value >= 1 ? 2 : value >= 0.1 ? 3 : 4;
  return `${value.toFixed(digits)} ms`;
}

function formatNumber(value, digits = 4) {
  return known(value) ? String(Number(value.toPrecision(digits))) : '–';
}

function formatAmount(value) {
  if (!known(value)) return '–';
  for (const [unit, sign] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (Math.abs(value) >= unit) return `${Number((value / unit).toPrecision(3))} ${sign}`;
  }
  return formatNumber(value, 3);
}

function timeText(layer) {  // the measured time, then the estimated time
  if (!known(layer?.measured)) return known(layer?.ms) ? `est. ${formatMs(layer.ms)}` : '';
  return formatMs(layer.measured) + (known(layer.ms) ? ` (est. ${formatMs(layer.ms).replace(' ms', '')})` : '');
}

function save(name, content, type) {
  const link = el('a', { href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// The data is JSON, deflated and in base64. This takes a tenth of the bytes of the text.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'))).text());
}

const page = await unpacked(byId('page-data').textContent);

// Node numbers are positions in the lists of a model; `after` is the model that the report is about.
const models = { after: page.model, before: page.before };
const isMeasured = page.model.layers.some((layer) => known(layer.measured));
const fileName = (page.model.path || 'model').split(/[\\/]/).pop().replace(/(\.onnx)?(\.gz)?$/, '');
