// Search of nodes by name, operator, precision or finding; the graph highlights the matches.

class Search {
  constructor(input, list, count, { views, go }) {
    Object.assign(this, { input, list, count, views, go, found: [], at: -1 });
    input.addEventListener('input', () => this.run());
    input.addEventListener('keydown', (event) => this.key(event));
    input.addEventListener('focus', () => this.open(this.found.length > 0));
    input.addEventListener('blur', () => setTimeout(() => this.open(false), 150));
  }

  text(node, model) {
    const conv = node.conv >= 0 ? model.convs[node.conv] : null;
    const codes = node.findings.map((id) => model.findings[id].code).join(' ');
    const types = conv ? `${conv.precision} ${conv.inputs.join(' ')} to ${conv.output}` : '';
    return `${node.name} ${node.op} ${types} ${codes} ${node.outputs.join(' ')}`.toLowerCase();
  }

  run() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.found = [];
    this.at = -1;
    const nodes = models.after.nodes;
    if (words.length) {
      nodes.forEach((node, number) => {
        node.searchText ??= this.text(node, models.after);
        if (words.every((word) => node.searchText.includes(word))) this.found.push(number);
      });
    }
    this.count.textContent = words.length ? `${this.found.length} found` : '';
    this.light();
    this.list.replaceChildren(...this.found.slice(0, 40).map((number, at) => el('li', {
      role: 'option', id: `found-${at}`, 'aria-selected': 'false',
      onpointerdown: (event) => { event.preventDefault(); this.take(at); },
    }, el('b', {}, nodes[number].op), ' ', nodes[number].name)));
    this.open(this.found.length > 0);
  }

  light() {  // without a match, nothing is dimmed
    const view = this.views.find((one) => one.side === 'after');
    view.highlight(this.found.length ? this.found.map((number) => view.boxOf(number, models.after.nodes[number].layer)) : null);
  }

  open(on) {
    this.list.hidden = !on;
    this.input.setAttribute('aria-expanded', String(on));
  }

  take(at) {
    if (!this.found.length) return;
    this.at = (at + this.found.length) % this.found.length;
    [...this.list.children].forEach((item, i) => item.setAttribute('aria-selected', String(i === this.at)));
    this.list.children[this.at]?.scrollIntoView({ block: 'nearest' });
    this.input.setAttribute('aria-activedescendant', `found-${this.at}`);
    this.count.textContent = `${this.at + 1} of ${this.found.length}`;
    this.go('after', this.found[this.at]);
  }

  key(event) {
    if (event.key === 'Enter') this.take(this.at + (event.shiftKey ? -1 : 1));
    else if (event.key === 'ArrowDown') this.take(this.at + 1);
    else if (event.key === 'ArrowUp') this.take(this.at - 1);
    else if (event.key === 'Escape') { this.input.value = ''; this.run(); } else return;
    event.preventDefault();
  }
}
