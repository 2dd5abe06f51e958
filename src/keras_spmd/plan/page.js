'use strict';
const root = document.documentElement;
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// The system's theme, until the button says otherwise.
const dark = matchMedia('(prefers-color-scheme: dark)');
const theme = document.getElementById('theme');
const isDark = () => root.dataset.theme ? root.dataset.theme === 'dark' : dark.matches;
const nameTheme = () => { theme.textContent = isDark() ? 'Light theme' : 'Dark theme'; };
theme.addEventListener('click', () => {
  root.dataset.theme = isDark() ? 'light' : 'dark';
  nameTheme();
});
dark.addEventListener('change', nameTheme);
nameTheme();

// Tables.
for (const box of all('.listing')) {
  const input = box.querySelector('.filter'), told = box.querySelector('.told');
  const body = box.querySelector('tbody'), rows = [...body.rows];
  const texts = rows.map(row => row.textContent.toLowerCase());
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every(word => texts[i].includes(word));
      shown += !row.hidden;
    });
    told.textContent = shown === rows.length ? `${shown}` : `${shown} of ${rows.length}`;
  };
  input.addEventListener('input', filter);
  filter();
  for (const head of all('th', box)) {
    const column = head.cellIndex, isNumber = head.classList.contains('n');
    const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
    head.querySelector('button').addEventListener('click', () => {
      const before = head.getAttribute('aria-sort');
      const down = before ? before === 'ascending' : isNumber;
      all('th', box).forEach(other => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      const order = isNumber ? (a, b) => a[0] - b[0]
        : (a, b) => a[0].localeCompare(b[0], 'en', {numeric: true});
      const keyed = rows.map(row => [key(row), row]);
      keyed.sort((a, b) => down ? order(b, a) : order(a, b));
      body.append(...keyed.map(pair => pair[1]));
    });
  }
}

// The timeline: what is under the pointer, and how wide it is drawn.
const timeline = document.querySelector('.timeline');
if (timeline) {
  const told = document.getElementById('span');
  timeline.addEventListener('pointerover', event => {
    const title = event.target.querySelector?.(':scope > title');
    if (title && event.target !== timeline) told.textContent = title.textContent;
  });
  document.getElementById('zoom').addEventListener('input', event => {
    timeline.style.width = `${100 * 2 ** event.target.value}%`;
  });
}

// Which device holds which part of the chosen variable.
const where = document.querySelector('.where');
if (where) {
  const mesh = JSON.parse(where.dataset.mesh), colours = JSON.parse(where.dataset.colours);
  const most = 64, told = where.querySelector('output');
  const devices = all('.mesh g', where).map(cell => ({cell, at: JSON.parse(cell.dataset.at)}));
  const picture = where.querySelector('.tensor'), about = where.querySelector('p');
  let variable;

  // The same as `look_of` in _pictures.py.
  const paint = (cell, row, column) => {
    const {rows, columns} = variable, n = colours.length;
    let few, many, count;
    if (rows * columns <= n) [few, many, count] = [row * columns + column, 0, 1];
    else if (Math.min(rows, columns) === 1) {
      [few, many, count] = [row + column, Math.floor((row + column) / n),
        Math.ceil(rows * columns / n)];
    } else [few, many, count] = rows <= columns ? [row, column, columns] : [column, row, rows];
    cell.style.fill = colours[few % n];
    cell.style.fillOpacity = count > 1 ? 1 - 0.7 * many / (count - 1) : 1;
  };
  // The part that a device holds: its number in each dim, and its place in the picture.
  const partOf = at => {
    const numbers = variable.axes.map(axis => axis < 0 ? 0 : at[axis]);
    const row = numbers.slice(0, -1).reduce((n, k, dim) => n * variable.counts[dim] + k, 0);
    return {numbers, row, column: numbers.at(-1) ?? 0};
  };
  const sliceOf = numbers => '[' + numbers.map((k, dim) => {
    if (variable.counts[dim] === 1) return ':';
    const full = Math.ceil(variable.shape[dim] / variable.counts[dim]);
    return `${k * full}:${Math.min((k + 1) * full, variable.shape[dim])}`;
  }).join(', ') + ']';
  const say = (part, holders) => {
    const names = holders.slice(0, 8).map(d => d.cell.dataset.number).join(', ');
    const more = holders.length > 8 ? ` and ${holders.length - 8} more` : '';
    const where = variable.isWhole ? 'All of it' : sliceOf(part.numbers);
    told.textContent = `${where} is on device${holders.length > 1 ? 's' : ''} ${names}${more}.`;
  };
  const point = part => {
    const holders = [];
    for (const device of devices) {
      const is = device.row === part.row && device.column === part.column;
      if (is) holders.push(device);
      device.cell.classList.toggle('faint', !is);
    }
    for (const cell of picture.children) {
      cell.classList.toggle('faint',
        +cell.dataset.row !== part.row || +cell.dataset.column !== part.column);
    }
    if (holders.length) say(part, holders);
  };
  const clear = () => {
    for (const faint of all('.faint', where)) faint.classList.remove('faint');
    told.textContent = 'Point at a part or at a device.';
  };
  const draw = () => {
    const wide = 320, ratio = (variable.shape.at(-2) ?? 1) / (variable.shape.at(-1) ?? 1);
    const high = Math.round(Math.min(200, Math.max(40, wide * ratio)));
    const [rows, columns] = [Math.min(variable.rows, most), Math.min(variable.columns, most)];
    picture.setAttribute('viewBox', `0 0 ${wide} ${high}`);
    picture.setAttribute('width', wide);
    picture.setAttribute('height', high);
    picture.textContent = '';
    const gap = Math.min(1, high / rows / 5, wide / columns / 5);
    for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
      const cell = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
      const box = {x: column * wide / columns, y: row * high / rows,
        width: wide / columns, height: high / rows, 'stroke-width': gap};
      for (const [name, value] of Object.entries(box)) cell.setAttribute(name, value);
      paint(cell, row, column);
      Object.assign(cell.dataset, {row, column});
      picture.append(cell);
    }
    const left = variable.rows * variable.columns - rows * columns;
    where.querySelector('.drawn').textContent = left ? `; ${left} more are not drawn` : '';
  };
  const choose = row => {
    for (const other of all('tr.chosen')) other.classList.remove('chosen');
    row.classList.add('chosen');
    const shape = JSON.parse(row.dataset.shape), axes = JSON.parse(row.dataset.axes);
    const counts = axes.map(axis => axis < 0 ? 1 : mesh[axis]);
    const product = numbers => numbers.reduce((a, b) => a * b, 1);
    variable = {shape, axes, counts, rows: product(counts.slice(0, -1)),
      columns: counts.at(-1) ?? 1, isWhole: product(counts) === 1};
    about.querySelector('code').textContent = row.cells[0].textContent;
    about.querySelector('span').textContent = row.dataset.about;
    for (const device of devices) {
      Object.assign(device, partOf(device.at));
      paint(device.cell.querySelector('rect'), device.row, device.column);
    }
    draw();
    clear();
  };
  picture.addEventListener('pointerover', event => {
    if (event.target === picture) return;
    const row = +event.target.dataset.row, column = +event.target.dataset.column;
    const holder = devices.find(d => d.row === row && d.column === column);
    point({row, column, numbers: holder ? holder.numbers : []});
  });
  for (const device of devices) {
    device.cell.addEventListener('pointerover', () => point(device));
  }
  for (const svg of all('svg', where)) svg.addEventListener('pointerleave', clear);
  const table = document.querySelector('.variables tbody');
  table.addEventListener('click', event => choose(event.target.closest('tr')));
  if (table.rows.length) choose(table.querySelector('[data-first]') ?? table.rows[0]);
}
