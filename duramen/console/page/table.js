// Tables: sorting by their heads, pages, and arrow keys from row to row.
"use strict";
(() => {
  const D = window.duramen;
  const { html, count } = D;

  function step(event) {
    const rows = [...event.currentTarget.querySelectorAll("tr")];
    const at = rows.findIndex((row) => row.contains(document.activeElement));
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + 10, PageUp: at - 10 };
    if (!(event.key in moves) || at < 0 || event.target.matches("input, select, textarea")) return;
    const target = rows[Math.max(0, Math.min(rows.length - 1, moves[event.key]))];
    const inside = target && target.querySelector("a[href], button, [tabindex='0']");
    if (!inside) return;
    event.preventDefault();
    inside.focus();
    target.scrollIntoView({ block: "nearest" });
  }

  const isOpen = (event) => !event.target.closest("a, button, input, label, select, summary, details") && !String(window.getSelection());

  /**
   * columns: {key, label, render(row), num, low (hidden on narrow screens: 1, 2 or 3), sort}; the first cell heads its row.
   */
  function Table({ label, columns, rows, keyOf, sort, order, onSort, onOpen, expanded }) {
    const head = columns.map((column) => {
      const active = sort && sort === column.sort;
      const classes = `${column.num ? "num" : ""} ${column.low ? `low${column.low}` : ""} ${column.className || ""}`;
      const aria = active ? (order === "desc" ? "descending" : "ascending") : undefined;
      return html`<th scope="col" class=${classes} aria-sort=${aria}>
        ${column.sort && onSort
          ? html`<button type="button" class="sort" onClick=${() => onSort(column.sort, active && order === (column.num ? "desc" : "asc") ? (column.num ? "asc" : "desc") : column.num ? "desc" : "asc")}>
              ${column.label}<span class="arrow" aria-hidden="true">${active ? (order === "desc" ? "↓" : "↑") : ""}</span></button>`
          : column.label}
      </th>`;
    });
    return html`<div class="table-wrap" role="region" aria-label=${label} tabindex="0">
      <table>
        <caption class="sr">${label}</caption>
        <thead><tr>${head}</tr></thead>
        <tbody onKeyDown=${step}>
          ${rows.map((row, index) => {
            const extra = expanded && expanded(row);
            return html`<${D.Fragment} key=${keyOf(row, index)}>
              <tr class=${`${onOpen ? "opens" : ""} ${extra ? "open" : ""}`} onClick=${onOpen ? (event) => isOpen(event) && onOpen(row) : undefined}>
                ${columns.map((column, i) => {
                  const classes = `${column.num ? "num" : ""} ${column.low ? `low${column.low}` : ""} ${column.className || ""}`;
                  return i === 0 ? html`<th scope="row" class=${classes}>${column.render(row)}</th>` : html`<td class=${classes}>${column.render(row)}</td>`;
                })}
              </tr>
              ${extra ? html`<tr class="extra"><td colspan=${columns.length}>${extra}</td></tr>` : null}
            <//>`;
          })}
        </tbody>
      </table>
    </div>`;
  }

  function Pager({ total, offset, limit, onOffset }) {
    if (total <= limit) return null;
    const last = Math.min(total, offset + limit);
    return html`<nav class="pager" aria-label="Pages">
      <button type="button" disabled=${offset <= 0} onClick=${() => onOffset(Math.max(0, offset - limit))}>Previous</button>
      <span class="num">${count(offset + 1)}–${count(last)} of ${count(total)}</span>
      <button type="button" disabled=${last >= total} onClick=${() => onOffset(offset + limit)}>Next</button>
    </nav>`;
  }

  Object.assign(D, { Table, Pager });
})();
