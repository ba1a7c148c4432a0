// Tables: a click on a column head sorts the rows, and the text in the field above a table filters them.

const collator = new Intl.Collator(undefined, { numeric: true });

function cellKey(row, column) {
  const cell = row.cells[column];
  const value = cell.dataset.v;
  if (value === undefined) return { text: cell.textContent.trim() };
  return { number: value === '' ? null : Number(value) };
}

function compareKeys(a, b) {
  if ('text' in a) return collator.compare(a.text, b.text);
  return a.number - b.number;
}

function sortTable(table, column, direction) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, key: cellKey(row, column) }));
  const unknown = rows.filter(({ key }) => key.number === null);  // at the end in both directions
  const listed = rows.filter(({ key }) => key.number !== null);
  listed.sort((a, b) => direction * compareKeys(a.key, b.key));
  body.append(...listed.map(({ row }) => row), ...unknown.map(({ row }) => row));
  [...table.tHead.rows[0].cells].forEach((head, at) => {
    if (at === column) head.setAttribute('aria-sort', direction > 0 ? 'ascending' : 'descending');
    else head.removeAttribute('aria-sort');
  });
}

function filterTable(table, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    row.searchText ??= row.textContent.toLowerCase();
    const fits = wanted.every((word) => row.searchText.includes(word));
    row.hidden = !fits;
    shown += fits;
  }
  return shown;
}

// Returns the visible rows as CSV (RFC 4180). Text that a spreadsheet would read as a formula gets an apostrophe.
function tableAsCsv(table) {
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
  const safe = (text) => quoted(/^[=+\-@\t]/.test(text) ? `'${text}` : text);
  const cells = (row) => [...row.cells].map((cell) => cell.dataset.v ?? safe((cell.innerText || cell.textContent).trim().replace(/\s+/g, ' ')));
  const rows = [...table.tBodies[0].rows].filter((row) => !row.hidden);
  const head = [...table.tHead.rows[0].cells].map((cell) => quoted(cell.textContent.trim()));
  return [head, ...rows.map(cells)].map((row) => `${row.join(',')}\r\n`).join('');
}

function setUpTable(wrapper) {
  const table = wrapper.querySelector('table');
  const input = wrapper.querySelector('input');
  const count = wrapper.querySelector('.count');
  const total = table.tBodies[0].rows.length;
  const state = (shown) => { count.textContent = shown === total ? `${total} ${total === 1 ? 'row' : 'rows'}` : `${shown} of ${total} rows`; };
  state(total);
  const csv = wrapper.querySelector('.csv');
  csv.addEventListener('click', () => save(`${fileName}-${csv.dataset.name}.csv`, tableAsCsv(table), 'text/csv'));
  input.addEventListener('input', () => state(filterTable(table, input.value)));
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector('button').addEventListener('click', () => {
      const first = head.dataset.first === 'down' ? -1 : 1;
      const now = head.getAttribute('aria-sort');
      const direction = now === null ? first : now === 'ascending' ? -1 : 1;
      sortTable(table, column, direction);
    });
  });
}
