// Panels of a figure, below one another: for a page that is too narrow for panels side by side. figure.js and the site
// call it. Returns the spec with each panel as wide as the plot and as high as before, row by row; a spec without panels
// side by side stays as it is. Writes into the spec.
function lpkitStacked({ data, layout }) {
  const short = name => name.replace("axis", "").replace(/^([xy])1(?!\d)/, "$1"); // "xaxis1", "x1", "x": one axis
  const axes = {};
  for (const key of Object.keys(layout).filter(key => /^[xy]axis\d*$/.test(key))) {
    axes[short(key)] = { ...layout[key] };
    delete layout[key];
  }
  for (const trace of data) for (const letter of "xy") {
    trace[`${letter}axis`] = short(trace[`${letter}axis`] ?? letter);
    axes[trace[`${letter}axis`]] ??= {};
  }
  const restored = () => Object.entries(axes).forEach(([name, axis]) => (layout[`${name[0]}axis${name.slice(1)}`] = axis));
  const names = letter => Object.keys(axes).filter(name => name[0] === letter);
  const ends = name => axes[name].domain ?? [0, 1];
  const parts = letter => { // of the plot; axes that overlap share one
    const found = [];
    for (const [low, high] of names(letter).map(ends).sort((a, b) => a[0] - b[0])) {
      if (found.length && low < found.at(-1)[1]) found.at(-1)[1] = Math.max(found.at(-1)[1], high);
      else found.push([low, high]);
    }
    return found;
  };
  const BETWEEN = 112; // pixels from a panel to the next: ticks, the title of an axis, words above a panel
  const columns = parts("x"), rows = parts("y").reverse(), wide = columns.length;
  if (wide < 2) {
    restored();
    return { data, layout };
  }

  const away = ([low, high], at) => Math.max(low - at, at - high, 0);
  const nearest = (found, at) => found.reduce((best, part, i) => (away(part, at) < away(found[best], at) ? i : best), 0);
  const middle = ([low, high]) => (low + high) / 2;
  const { t: above, b: below = 48 } = layout.margin, plot = layout.height - above - below;
  const heights = rows.map(([low, high]) => (high - low) * plot);
  const total = wide * heights.reduce((a, b) => a + b) + (wide * rows.length - 1) * BETWEEN;
  const across = (column, x) => (x > 1 ? x : (x - columns[column][0]) / (columns[column][1] - columns[column][0]));
  const down = (column, row, y) => { // rows from the top, and in a row its columns from the top
    const before = wide * heights.slice(0, row).reduce((a, b) => a + b, 0) + column * heights[row];
    return 1 - (before + (row * wide + column) * BETWEEN + (rows[row][1] - y) * plot) / total;
  };

  const columnOf = {}, rowOf = {}, copies = {}; // a y axis of several columns gets a copy in each
  for (const name of names("x")) columnOf[name] = nearest(columns, middle(ends(name)));
  for (const name of names("y")) {
    const column = columnOf[short(axes[name].anchor ?? "x")] ?? 0;
    columnOf[name] = column;
    rowOf[name] = nearest(rows, middle(ends(name)));
    copies[name] = { [column]: name };
  }
  const copyOf = (name, column, x) => {
    if (!copies[name][column]) {
      const made = `y${Math.max(1, ...names("y").map(one => Number(one.slice(1)))) + 1}`;
      axes[made] = { ...axes[name], anchor: x, matches: name };
      [columnOf[made], rowOf[made], copies[name][column]] = [column, rowOf[name], made];
    }
    return copies[name][column];
  };
  for (const trace of data) {
    const column = columnOf[trace.xaxis], row = rowOf[trace.yaxis], bar = trace.colorbar;
    trace.yaxis = copyOf(trace.yaxis, column, trace.xaxis);
    if (!bar) continue;
    if (bar.x !== undefined) bar.x = across(column, bar.x);
    [bar.y, bar.yanchor] = [down(column, row, middle(rows[row])), "middle"];
    bar.len = ((bar.len ?? 1) * heights[row]) / total;
  }
  for (const item of [...(layout.annotations ?? []), ...(layout.shapes ?? [])]) {
    const [x, xs = ""] = short(item.xref ?? "x").split(/(?= )/), [y, ys = ""] = short(item.yref ?? "y").split(/(?= )/);
    const [atX, atY] = ["x", "y"].map(letter => item[letter] ?? middle([item[`${letter}0`], item[`${letter}1`]]));
    const alone = copies[y] && Object.keys(copies[y]).length < 2; // an axis of one column
    const column = columnOf[x] ?? (alone ? columnOf[y] : nearest(columns, atX));
    const row = rowOf[y] ?? nearest(rows, atY);
    if (y !== "paper") item.yref = (copies[y]?.[column] ?? y) + ys;
    if (x !== "paper") item.xref = x + xs;
    for (const [key, at] of Object.entries(item)) {
      if (/^x[01]?$/.test(key) && x === "paper") item[key] = Math.min(1, Math.max(0, across(column, at)));
      if (/^y[01]?$/.test(key) && y === "paper") item[key] = down(column, row, at);
    }
  }
  const first = {}; // of each row, by what its axis is but for the title: the title, which one panel has for all
  for (const name of names("y")) {
    const axis = axes[name], row = rowOf[name], column = columnOf[name];
    axis.domain = ends(name).map(y => down(column, row, y));
    if (axis.anchor) axis.anchor = short(axis.anchor);
    const { title, anchor, domain, matches, ...rest } = axis;
    const kind = row + JSON.stringify(Object.entries(rest).sort());
    if (title?.text) first[kind] ??= title;
    else if (first[kind]) axis.title = first[kind];
  }
  for (const name of names("x")) {
    const axis = axes[name], column = columnOf[name], anchor = short(axis.anchor ?? "y");
    axis.domain = ends(name).map(x => across(column, x));
    axis.anchor = copies[anchor]?.[column] ?? anchor;
  }
  restored();
  const { x = 0, y = 1.02 } = layout.legend ?? {}, column = nearest(columns, x);
  if (layout.legend?.yref !== "container") {
    layout.legend = { ...layout.legend, x: across(column, x), y: down(column, nearest(rows, y), y) };
  }
  layout.height = above + total + below;
  return { data, layout };
}
