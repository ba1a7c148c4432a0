// The panel about one node: types, scales, findings with fixes, the rules and passes that decided its types, and time.

function badge(precision) {
  return el('span', { class: `precision ${kindOf(precision)}` }, precision);
}

function facts(pairs) {
  return el('dl', { class: 'facts' }, pairs.filter(([, value]) => known(value) && value !== '').map(([name, value]) =>
    el('div', {}, el('dt', {}, name), el('dd', {}, value))));
}

function scaleText(scale) {
  if (!known(scale.scale)) return 'computed or not available';
  return scale.scale === scale.highest ? formatNumber(scale.scale, 5)
    : `${formatNumber(scale.scale)} to ${formatNumber(scale.highest)}`;
}

class Details {
  constructor(panel, { go }) {
    this.panel = panel;
    this.go = go;
  }

  show(side, number, layerNumber) {
    const model = models[side];
    const node = model.nodes[number];
    const layer = model.layers[node ? node.layer : layerNumber];
    const parts = node ? this.node(side, model, node, layer) : layer ? this.layer(side, model, layer) : [];
    this.panel.replaceChildren(...parts);
    this.panel.scrollTop = 0;
    this.panel.classList.remove('empty');
  }

  node(side, model, node, layer) {
    const conv = node.conv >= 0 ? model.convs[node.conv] : null;
    return [
      el('p', { class: 'kicker' }, node.op, page.before ? ` · ${model.label}` : ''),
      el('h3', { class: 'breakable' }, node.name),
      conv && el('p', { class: 'types' }, conv.inputs.map((p, i) => [i ? ' + ' : '', badge(p)]), ' → ', badge(conv.output),
        conv.precision !== conv.inputs[0] ? [', computes in ', badge(conv.precision)] : ''),
      facts([
        ['Output shape', node.shape],
        ...node.attributes,
        ['Weights', conv && conv.weights],
        ['Before', conv && conv.before],
        ['Evidence', conv && conv.evidence],
        ['Fused with', conv && conv.fused.join(', ')],
      ]),
      this.findings(side, model, node.findings),
      this.time(model, layer),
      this.scales(node.scales),
      this.lines(model, node, conv),
      layer && this.engine(side, model, layer, node),
      !layer && model.layers.length ? el('p', { class: 'muted' }, 'No separate layer in the predicted engine: the node became a view, a constant, or a part of neighboring layers.') : null,
    ].filter(Boolean);
  }

  layer(side, model, layer) {
    return [
      el('p', { class: 'kicker' }, `${layer.type} layer`, page.before ? ` · ${model.label}` : ''),
      el('h3', { class: 'breakable' }, layer.title),
      this.findings(side, model, layer.findings),
      this.time(model, layer),
      this.engine(side, model, layer, null),
    ].filter(Boolean);
  }

  module(side, box) {
    const model = models[side];
    const ids = [...new Set(box.rows.flatMap((number) => model.nodes[number].findings))];
    const weighted = box.rows.filter((number) => model.nodes[number].conv >= 0);
    this.panel.replaceChildren(...[
      el('p', { class: 'kicker' }, 'Module', page.before ? ` · ${model.label}` : ''),
      el('h3', { class: 'breakable' }, box.title),
      facts([['Nodes', box.rows.length], ['Convolutions', weighted.length || 'none']]),
      weighted.length ? el('section', {}, el('h4', {}, 'Convolutions'), weighted.map((number) => {
        const conv = model.convs[model.nodes[number].conv];
        return el('p', {}, badge(conv.precision), ' ',
          el('button', { class: 'link mono breakable', type: 'button', onclick: () => this.go(side, number) }, conv.name),
          el('span', { class: 'muted' }, ` ${timeText(model.layers[conv.layer])}`));
      })) : null,
      this.findings(side, model, ids),
    ].filter(Boolean));
    this.panel.scrollTop = 0;
    this.panel.classList.remove('empty');
  }

  findings(side, model, ids) {
    if (!ids.length) return null;
    return el('section', {}, el('h4', {}, ids.length === 1 ? '1 finding' : `${ids.length} findings`), ids.map((id) => {
      const finding = model.findings[id];
      const title = `${SIGNS[finding.severity]} ${finding.severity === 'info' ? 'note' : finding.severity}: ${finding.code}`;
      return el('article', { class: `finding ${finding.severity}` },
        side === 'after' ? el('a', { href: `#finding-${id}`, class: 'code' }, title) : el('b', { class: 'code' }, title),
        el('p', {}, finding.message),
        finding.fix ? el('p', {}, el('b', {}, 'Fix: '), finding.fix) : null,
        finding.saving_note ? el('p', {}, el('b', {}, 'Saves: '), finding.saving_note)
          : known(finding.saves_ms) ? el('p', {}, el('b', {}, 'Saves at most: '), `${formatMs(finding.saves_ms)} (estimated)`) : null,
        el('p', { class: 'muted' }, `Evidence: ${finding.evidence}`));
    }));
  }

  time(model, layer) {
    if (!layer || !(known(layer.ms) || known(layer.measured) || known(layer.bytes))) return null;
    return el('section', {}, el('h4', {}, 'Cost of the engine layer'), facts([
      ['Measured', known(layer.measured) ? formatMs(layer.measured) : null],
      ['Estimated', known(layer.ms) ? formatMs(layer.ms) : null],
      ['Before, estimated', known(layer.before_ms) ? formatMs(layer.before_ms) : null],
      ['MACs', known(layer.macs) && layer.macs > 0 ? formatAmount(layer.macs) : null],
      ['Memory moved', known(layer.bytes) ? `${formatAmount(layer.bytes)}B` : null],
      ['Intensity', layer.macs && layer.bytes ? `${formatNumber(layer.macs / layer.bytes, 3)} MAC/B` : null],
    ]));
  }

  scales(scales) {
    if (!scales.length) return null;
    return el('section', {}, el('h4', {}, 'Scales'), scales.map((scale) => el('div', { class: 'scale' },
      el('p', {}, el('b', {}, scale.where), ' ', badge(scale.precision), scale.stays ? el('span', { class: 'precision conversion' }, '⇄ conversion') : ''),
      facts([
        ['Scale', scaleText(scale)],
        ['Range', known(scale.highest) ? `±${formatNumber(scale.highest * 127)}${scale.channels > 1 ? ' at most' : ''}` : null],
        ['Zero point', scale.zero_point],
        ['Channels', scale.channels > 1 ? scale.channels : null],
        ['Quantizer', el('span', { class: 'mono breakable' }, scale.quantizer)],
      ]))));
  }

  lines(model, node, conv) {
    const cases = conv ? conv.cases : [];
    if (!node.lines.length && !cases.length) return null;
    return el('section', {}, el('h4', {}, 'Rules and passes'),
      cases.length ? el('ul', { class: 'cases' }, cases.map((at) => this.rule(model.cases[at]))) : null,
      node.lines.length ? el('details', { open: node.lines.length <= 12 },
        el('summary', {}, `${node.lines.length} lines of the simulated optimizer's log`),
        el('ol', { class: 'lines' }, node.lines.map((at) => el('li', {}, model.lines[at].text)))) : null);
  }

  rule(rule) {
    return el('li', {}, el('details', {}, el('summary', {}, el('span', { class: `evidence ${rule.evidence}` }, rule.evidence), ' ', rule.name),
      el('p', {}, rule.says),
      rule.builds.length ? el('p', { class: 'muted' }, `Seen in: ${rule.builds.join(', ')}`) : null,
      rule.source ? el('p', { class: 'muted' }, rule.source) : null));
  }

  engine(side, model, layer, self) {
    const others = layer.nodes.map((number) => [number, model.nodes[number]]).filter(([, node]) => node !== self);
    const ends = (list) => list.map(([tensor, precision]) => el('div', {}, badge(precision), ' ', el('span', { class: 'mono breakable' }, tensor)));
    return el('section', {}, el('h4', {}, 'Engine layer'),
      el('p', { class: 'mono breakable' }, layer.name),
      facts([
        ['Type', layer.type], ['Remark', layer.remark || null], ['Reads', layer.inputs.length ? ends(layer.inputs) : null],
        ['Writes', layer.outputs.length ? ends(layer.outputs) : null],
        ['Other nodes', others.length ? others.map(([number, node]) => el('div', {},
          el('button', { class: 'link mono breakable', type: 'button', onclick: () => this.go(side, number) }, node.name))) : null],
      ]));
  }
}
