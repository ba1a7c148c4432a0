// Connects the parts of the page: a node that is chosen in one part is shown in all parts.

const panel = byId('details');
const views = [];
const details = new Details(panel, { go });
let search = null;
let viewName = 'onnx';
let chosen = null;

function select(side, number, layer, { move = true, from = null } = {}) {
  const model = models[side];
  chosen = [side, number, layer];
  search?.light();
  details.show(side, number, layer);
  for (const view of views) {
    let [node, ofLayer] = [number, layer];
    if (view.side !== side) {  // the node with the same name in the other model
      const name = model.nodes[number]?.name;
      node = name === undefined ? -1 : view.model.nodes.findIndex((other) => other.name === name);
      ofLayer = node >= 0 ? view.model.nodes[node].layer : -1;
    } else if (node >= 0) {
      ofLayer = model.nodes[node].layer;
    }
    let at = view === from?.view ? from.at : view.boxOf(node, ofLayer ?? -1);
    if (at < 0 && view.side === side) at = view.boxOf(view.model.layers[ofLayer]?.at ?? -1, -1);
    view.mark(at, node);
    if (at >= 0 && move && view !== from?.view) view.center(at);
  }
  const hash = number >= 0 ? `#${side === 'after' ? 'node' : 'before'}-${number}` : ' ';
  if (number >= 0) history.replaceState(null, '', hash);
}

// Shows a node that was chosen outside of the network, and scrolls to the network.
function go(side, number, layer = -1) {
  if (number < 0 && layer < 0) return;
  if (viewName === 'modules') show('onnx');
  select(side, number, layer);
  if (!isInSight(byId('stages'))) byId('network').scrollIntoView({ block: 'start' });
}

// Shows the nodes of a module, and the nodes with the same names in the other model.
function open(view, box) {
  const names = new Set(box.rows.map((number) => view.model.nodes[number].name));
  chosen = null;
  show('onnx');
  details.module(view.side, box);
  for (const one of views) {
    const numbers = one === view ? box.rows : one.model.nodes.map((_, i) => i).filter((i) => names.has(one.model.nodes[i].name));
    const boxes = [...new Set(numbers.map((number) => one.boxOf(number, -1)).filter((at) => at >= 0))];
    one.highlight(boxes.length ? boxes : null);
    one.frameBoxes(boxes);
  }
}

function goToLayer(number, layer) {
  const view = views.find((one) => one.side === 'after');
  if (view.boxOf(-1, number) < 0 && layer.at < 0) show('engine');
  go('after', layer.type === 'Conversion' ? -1 : layer.at, number);
}

function isInSight(node) {
  const box = node.getBoundingClientRect();
  return box.top > -60 && box.top < window.innerHeight * 0.35;
}

function follow() {
  const found = /^#(node|before|layer)-(\d+)$/.exec(location.hash);
  if (found && found[1] === 'layer') {
    const number = Number(found[2]);
    const layer = models.after.layers[number];
    if (layer) goToLayer(number, layer);
    return;
  }
  if (found) {
    const side = found[1] === 'node' ? 'after' : 'before';
    if (models[side]?.nodes[Number(found[2])]) go(side, Number(found[2]));
    return;
  }
  const finding = /^#finding-\d+$/.test(location.hash) && document.querySelector(location.hash);
  if (finding) {
    for (let group = finding.closest('details'); group; group = group.parentElement.closest('details')) group.open = true;
    finding.scrollIntoView({ block: 'center' });
    finding.classList.add('flash');
    setTimeout(() => finding.classList.remove('flash'), 1600);
  }
}

function show(name) {
  viewName = name;
  document.querySelectorAll('input[name=view]').forEach((radio) => { radio.checked = radio.value === name; });
  views.forEach((view) => view.show(name));
  search?.light();
  colorLegend();
}

function colorLegend() {
  const legend = byId('heat-legend');
  const slowest = Math.max(0, ...views.map((view) => view.slowest || 0));
  legend.hidden = !slowest;
  legend.replaceChildren(svg('svg', { width: 70, height: 14, 'aria-hidden': 'true' },
    [0, 1, 2, 3, 4].map((i) => svg('rect', { class: `key heat-${i}`, x: 14 * i, y: 1, width: 13, height: 12 }))),
  ` 0 to ${formatMs(slowest)}${isMeasured ? ', measured' : ', estimated'}`);
}

function setUpGraph() {
  document.querySelectorAll('.stage').forEach((host) => {
    const view = new GraphView(host, host.dataset.side, {
      onOpen: open,
      onSelect: (side, number, layer, at) => {
        select(side, number, layer, { from: { view, at } });
        // On a narrow screen the details are below the network.
        if (panel.getBoundingClientRect().top > window.innerHeight - 90) panel.scrollIntoView({ block: 'nearest' });
      },
    });
    views.push(view);
  });
  document.querySelectorAll('input[name=view]').forEach((radio) => radio.addEventListener('change', () => {
    show(radio.value);
    if (chosen) select(...chosen);
  }));
  const all = (act) => () => views.forEach(act);
  byId('zoom-in').addEventListener('click', all((view) => view.zoom(1.3)));
  byId('zoom-out').addEventListener('click', all((view) => view.zoom(1 / 1.3)));
  byId('zoom-fit').addEventListener('click', () => show('modules'));
  byId('zoom-home').addEventListener('click', () => {
    if (viewName === 'modules') show('onnx');
    views.forEach((view) => view.home());
  });
  byId('paint')?.addEventListener('change', (event) => {
    GraphView.coloring = event.target.value;
    views.forEach((view) => view.color());
    colorLegend();
  });
  byId('export-svg').addEventListener('click', () => exportGraph('svg'));
  byId('export-png').addEventListener('click', () => exportGraph('png'));
  search = new Search(byId('search'), byId('search-list'), byId('search-count'), { views, go });
  show(page.model.onnx.why && !page.model.modules.why ? 'modules' : viewName);
  new ResizeObserver(() => requestAnimationFrame(() => views.forEach((view) => view.measure()))).observe(byId('stages'));
}

// Saves the whole drawing with its current colors, for the model that the report is about.
function exportGraph(kind) {
  const view = views.find((one) => one.side === 'after');
  const name = `${fileName}-${viewName}.${kind}`;
  const text = svgOf(view);
  if (kind === 'svg') {
    save(name, text, 'image/svg+xml');
    return;
  }
  const { width, height } = view.drawing;
  const scale = Math.min(2, 16000 / width, 16000 / height, Math.sqrt(6e7 / (width * height)));
  const image = new Image();
  image.onload = () => {
    const canvas = el('canvas', { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
    canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => blob && save(name, blob));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

function setUpKeys() {
  document.addEventListener('keydown', (event) => {
    if (event.key !== '/' || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
    event.preventDefault();
    byId('search').focus();
    byId('network').scrollIntoView({ block: 'start' });
  });
  window.addEventListener('hashchange', follow);
  document.addEventListener('click', (event) => {  // so that a second click on a link also moves
    const link = event.target.closest('a[href^="#"]');
    if (link && link.getAttribute('href') === location.hash) follow();
  });
}

function setUpPrint() {  // paper shows the whole network; texts that are too small to read are left out
  window.addEventListener('beforeprint', () => {
    views.forEach((view) => view.canvas.classList.toggle('far', view.lowest < FAR));
    document.querySelectorAll('details.group').forEach((group) => { group.open = true; });
  });
  window.addEventListener('afterprint', () => views.forEach((view) => view.paint()));
}

setUpGraph();
document.querySelectorAll('.table').forEach(setUpTable);
setUpParts();
setUpRoofline(go);
setUpHistograms(go);
setUpWeights(go);
setUpTuning();
setUpMeasured(go);
setUpKeys();
setUpPrint();
follow();
document.documentElement.classList.add('ready');
