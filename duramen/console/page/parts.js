// Small parts that every page is built of: cards, pills, meters, times that count, notes.
"use strict";
(() => {
  const D = window.duramen;
  const { html, Text, bytes, count, duration, time, utc, ratio, useNow } = D;

  const STATES = {
    due: ["due", "Due: the next pass takes it"],
    waiting: ["waiting", "Waiting: nothing makes it due yet"],
    paused: ["paused", "Paused: kept from being compacted"],
    set_aside: ["set aside", "Set aside after failures; tried again later"],
    not_compacted: ["not compacted", "Its policy has no compaction"],
    settings_unknown: ["settings unknown", "Its settings cannot be read"],
    unreadable: ["unreadable", "It cannot be read"],
  };
  const SECTIONS = {
    clean: "compacted: one record a key",
    dirty: "written since; the next pass may compact it",
    uncleanable: "too young, in an open transaction, or not flushed: no pass may touch it yet",
    active: "the segment that is written to",
  };
  const REASONS = ["superseded", "tombstone", "expired", "aborted", "marker", "keyless"];

  const Pill = ({ kind, title, children }) =>
    html`<span class=${`pill pill-${kind || "plain"}`} title=${title}><i class="dot" aria-hidden="true"></i>${children}</span>`;
  const State = ({ state }) => {
    const [label, title] = STATES[state] || [state, state];
    return html`<${Pill} kind=${state} title=${title}>${label}<//>`;
  };

  let ids = 0;
  function Card({ title, aside, children, className, id }) {
    const own = D.useMemo(() => id || `card-${(ids += 1)}`, []);
    return html`<section class=${`card ${className || ""}`} aria-labelledby=${own}>
      <div class="card-head"><h2 id=${own}>${title}</h2>${aside ? html`<div class="card-aside">${aside}</div>` : null}</div>
      ${children}
    </section>`;
  }

  const Figure = ({ label, value, unit, note, kind }) => html`<div class=${`figure ${kind ? `figure-${kind}` : ""}`}>
    <dt>${label}</dt>
    <dd><span class="figure-value">${value}</span>${unit ? html` <span class="figure-unit">${unit}</span>` : null}
      ${note ? html`<span class="figure-note">${note}</span>` : null}</dd>
  </div>`;

  const Time = ({ ms }) =>
    ms === null || ms === undefined ? html`<span class="faint">–</span>`
      : html`<time datetime=${utc(ms)} title=${utc(ms)}>${time(ms)}</time>`;

  /** "in 1 h 30 m" or "3 m 2 s ago", by the store's clock. */
  function Ago({ ms }) {
    const now = useNow();
    if (ms === null || ms === undefined) return html`<span class="faint">–</span>`;
    const gap = now - ms;
    const said = Math.abs(gap) < 1500 ? "now" : gap > 0 ? `${duration(gap)} ago` : `in ${duration(gap)}`;
    return html`<time datetime=${utc(ms)} title=${time(ms)}>${said}</time>`;
  }

  /** A bar of parts to scale; `max` is the bytes of its whole width. */
  function Stack({ parts, max, label, thin }) {
    const total = max || parts.reduce((sum, part) => sum + part.value, 0) || 1;
    let at = 0;
    return html`<svg class=${thin ? "stack stack-thin" : "stack"} viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label=${label}>
      <rect class="track" x="0" y="0" width="1000" height="10" />
      ${parts.map((part) => {
        const x = at;
        const width = (1000 * part.value) / total;
        at += width;
        return width > 0 ? html`<rect class=${`fill-${part.kind}`} x=${x.toFixed(2)} y="0" width=${width.toFixed(2)} height="10" />` : null;
      })}
    </svg>`;
  }

  const sections = (row) => [
    { kind: "clean", value: row.clean_bytes },
    { kind: "dirty", value: row.dirty_bytes },
    { kind: "uncleanable", value: row.uncleanable_bytes },
  ];
  const saidSections = (row) =>
    `${bytes(row.clean_bytes)} clean, ${bytes(row.dirty_bytes)} dirty, ${bytes(row.uncleanable_bytes)} uncleanable`;
  const Sections = ({ row, max }) =>
    html`<${Stack} thin parts=${sections(row)} max=${max} label=${saidSections(row)} />`;

  /** A cross-section of the log, areas to scale: heartwood is clean, sapwood dirty, the bark cannot be compacted yet. */
  function Rings({ row, size, grain }) {
    const total = row.clean_bytes + row.dirty_bytes + row.uncleanable_bytes;
    const radius = 49;
    const core = total ? radius * Math.sqrt(row.clean_bytes / total) : 0;
    const wood = total ? radius * Math.sqrt((row.clean_bytes + row.dirty_bytes) / total) : 0;
    const lines = [];
    for (let r = 4; grain && r < radius - 1; r += 3.1 + 1.5 * Math.abs(Math.sin(r * 7.3))) lines.push(r);
    return html`<svg class="rings" viewBox="0 0 100 100" width=${size} height=${size} role="img"
        aria-label=${total ? saidSections(row) : "no bytes"}>
      ${total ? html`<circle class="fill-uncleanable" cx="50" cy="50" r=${radius} />
        <circle class="fill-dirty" cx="50" cy="50" r=${wood.toFixed(2)} />
        <circle class="fill-clean" cx="50" cy="50" r=${core.toFixed(2)} />`
        : html`<circle class="ring-empty" cx="50" cy="50" r=${radius - 2} />`}
      ${lines.map((r, i) => html`<circle class="grain" cx=${50 + Math.sin(i * 1.7) * 0.7} cy=${50 + Math.cos(i * 2.3) * 0.7} r=${r.toFixed(2)} />`)}
    </svg>`;
  }

  /** The dirty ratio against min.cleanable.dirty.ratio. */
  function Gauge({ value, max, small }) {
    if (value === null || value === undefined) return html`<span class="faint">–</span>`;
    const over = max !== null && max !== undefined && value > max;
    const label = `dirty ratio ${ratio(value)}${max === null || max === undefined ? "" : `, threshold ${ratio(max)}`}`;
    return html`<span class=${`gauge ${small ? "gauge-small" : ""} ${over ? "gauge-over" : ""}`}>
      <svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label=${label}>
        <rect class="track" x="0" y="2" width="100" height="6" rx="1" />
        <rect class="gauge-fill" x="0" y="2" width=${Math.min(100, value * 100).toFixed(2)} height="6" />
        ${max === null || max === undefined ? null
          : html`<rect class="gauge-mark" x=${Math.min(99, max * 100 - (small ? 0.8 : 0.2)).toFixed(2)} y="0" width=${small ? "1.6" : "0.4"} height="10" />`}
      </svg>
      ${small ? html`<span class="num">${D.ratio3(value)}</span>` : null}
    </span>`;
  }

  const Meter = ({ value, label, kind }) => html`<svg class="stack stack-thin meter" viewBox="0 0 100 10"
      preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect class="track" x="0" y="0" width="100" height="10" />
    <rect class=${`fill-${kind || "accent"}`} x="0" y="0" width=${(100 * Math.max(0, Math.min(1, value || 0))).toFixed(2)} height="10" />
  </svg>`;

  const Legend = ({ items }) => html`<ul class="legend">
    ${items.map(([kind, label, value, title]) => html`<li title=${title}><i class=${`swatch bg-${kind}`} aria-hidden="true"></i>${label}${value === undefined ? null : html` <b class="num">${value}</b>`}</li>`)}
  </ul>`;

  const Empty = ({ title, children }) => html`<div class="empty"><${RingsMark} /><p class="empty-title">${title}</p>
    ${children ? html`<p>${children}</p>` : null}</div>`;
  const RingsMark = () => html`<svg class="empty-mark" viewBox="0 0 40 40" aria-hidden="true">
    ${[4, 8, 11, 15, 18.5].map((r) => html`<circle cx="20" cy="20" r=${r} />`)}</svg>`;

  const Failure = ({ error }) => html`<div class="note note-error" role="alert">
    <strong><${Text} text=${error.what || error.message} /></strong>${error.hint ? html` <${Text} text=${error.hint} />` : null}</div>`;
  const Note = ({ kind, children }) => html`<div class=${`note note-${kind || "plain"}`}>${children}</div>`;
  const Loading = () => html`<div class="loading" role="status"><span class="sr">Loading…</span><i></i><i></i><i></i></div>`;

  /** What an answer is shown with: its error, its shadow while it loads, or itself. */
  function Answer({ of, children }) {
    if (!of.data) return of.error ? html`<${Failure} error=${of.error} />` : html`<${Loading} />`;
    return html`${of.error ? html`<${Failure} error=${of.error} />` : null}
      <div class=${of.stale ? "stale" : ""} aria-busy=${of.stale ? "true" : "false"}>${children(of.data)}</div>`;
  }

  const NeedsLive = ({ children }) => html`<${Empty} title="Not part of a report">${children || "This needs a live store. Open it in duramen console."}<//>`;

  /** Radio buttons that look like one switch. */
  const Choice = ({ label, name, options, value, onChange }) => html`<fieldset class="choice"><legend class="sr">${label}</legend>
    ${options.map(([key, said]) => html`<label class=${key === value ? "on" : ""}>
      <input type="radio" name=${name} value=${key} checked=${key === value} onChange=${() => onChange(key)} /><span>${said}</span></label>`)}
  </fieldset>`;

  const Removed = ({ removed }) => {
    const known = REASONS.filter((r) => removed[r]).concat(Object.keys(removed).filter((r) => !REASONS.includes(r) && removed[r]));
    const total = known.reduce((sum, r) => sum + removed[r], 0);
    if (!total) return html`<p class="faint">No record was removed.</p>`;
    const kind = (r) => `r${Math.min(5, Math.max(0, REASONS.indexOf(r)))}`;
    return html`<${Stack} parts=${known.map((r) => ({ kind: kind(r), value: removed[r] }))}
        label=${`records removed: ${known.map((r) => `${count(removed[r])} ${r}`).join(", ")}`} />
      <${Legend} items=${known.map((r) => [kind(r), D.plain(r), count(removed[r])])} />`;
  };

  Object.assign(D, {
    STATES, SECTIONS, Pill, State, Card, Figure, Time, Ago, Stack, Sections, saidSections, Rings, Gauge, Meter, Legend, Empty,
    Failure, Note, Loading, Answer, NeedsLive, Choice, Removed,
  });
})();
