// Making elements. Whatever comes from daemons and jobs becomes text here, never markup.

const SVG = "http://www.w3.org/2000/svg";

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

/** An HTML element; children are elements or text. */
export function el(tag, attributes = {}, ...children) {
  return put(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return put(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Sets text only where it differs, so that what somebody has selected stays selected. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Brings the rows of a table up to date, cell by cell. A row is a list of cells: text, or {text, n, state, node}; the
 * table's head names the cells where rows become cards.
 */
export function rows(table, wanted) {
  const labels = [...table.tHead.rows[0].cells].map((c) => c.textContent.trim());
  const body = table.tBodies[0];
  while (body.rows.length > wanted.length) body.deleteRow(-1);
  while (body.rows.length < wanted.length) body.insertRow();
  wanted.forEach((cells, i) => {
    const row = body.rows[i];
    while (row.cells.length < cells.length) row.insertCell().dataset.label = labels[row.cells.length - 1];
    cells.forEach((cell, j) => fill(row.cells[j], typeof cell === "object" ? cell : { text: cell }));
  });
}

function fill(td, { text = "", n = false, state = "", node = null }) {
  td.className = n ? "n" : "";
  if (state) td.dataset.state = state;
  else delete td.dataset.state;
  if (node) td.replaceChildren(node);
  else say(td, text);
}
