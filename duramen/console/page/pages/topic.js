// One topic: its figures, how it grew, its partitions.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, short, count, Card, Table, Text, useState, useMemo } = D;
  const PAGE = 100;
  const FETCH = 1000;

  function TopicLinks({ topic, at }) {
    const name = encodeURIComponent(topic);
    const links = [["topic", `#/topics/${name}`, "Partitions"], ["messages", `#/messages?topic=${name}`, "Messages"], ["why", `#/why?topic=${name}`, "Why and when"],
      ["runs", `#/runs?topic=${name}`, "Runs"], ["whatif", `#/what-if?topic=${name}`, "What if"], ["erasure", `#/erasure?topic=${name}`, "Erasure"], ["settings", `#/settings?topic=${name}`, "Settings"]];
    return html`<nav class="subnav" aria-label="This topic">${links.map(([key, href, label]) => html`<a href=${href} aria-current=${key === at ? "page" : undefined}>${label}</a>`)}</nav>`;
  }

  /** Every partition as a cell: the darker, the nearer to its threshold. */
  function Heat({ topic, rows }) {
    if (rows.length < 8) return null;
    const side = rows.length > 300 ? 12 : 18;
    return html`<div class="heat" aria-hidden="true">${rows.map((p) => html`<a tabindex="-1" key=${p.partition} class=${`cell cell-${p.state}`} href=${`#/topics/${encodeURIComponent(topic)}/${p.partition}`}
      style=${{ width: `${side}px`, height: `${side}px`, "--heat": String(Math.round(100 * Math.min(1, p.dirty_ratio || 0))) }} title=${`${p.partition}: ${p.state}, dirty ratio ${D.ratio(p.dirty_ratio)}, ${bytes(p.size_bytes)}`}></a>`)}</div>`;
  }

  const COLUMNS = (topic, most, threshold) => [
    { label: "Partition", sort: "partition", className: "part-cell", render: (p) => html`<a href=${`#/topics/${encodeURIComponent(topic)}/${p.partition}`}>${p.partition}</a>` },
    { label: "State", sort: "state", render: (p) => html`<${D.State} state=${p.state} />` },
    { label: "Size", num: true, sort: "size_bytes", render: (p) => bytes(p.size_bytes) },
    { label: "Clean · dirty", low: 1, className: "bar-cell", render: (p) => html`<${D.Sections} row=${p} max=${most} />` },
    { label: "Dirty ratio", num: true, sort: "dirty_ratio", render: (p) => html`<${D.Gauge} small value=${p.dirty_ratio} max=${threshold} />` },
    { label: "Records", num: true, sort: "records", low: 1, render: (p) => D.atMost(p.records_exact, count(p.records)) },
    { label: "Keys", num: true, sort: "keys", low: 2, render: (p) => count(p.keys) },
    { label: "Tombstones", num: true, sort: "tombstones", low: 2, render: (p) => count(p.tombstones) },
    { label: "Segments", num: true, sort: "segments", low: 3, render: (p) => count(p.segments) },
    { label: "End offset", num: true, sort: "log_end_offset", low: 4, render: (p) => count(p.log_end_offset) },
    { label: "Why", low: 2, className: "why-cell", render: (p) => html`<${Text} text=${p.error || D.briefly(p.why)} />` },
    { label: "By time", num: true, sort: "next_ms", low: 2, render: (p) => html`<${D.Ago} ms=${p.next_ms} />` },
  ];

  function sorted(rows, [field, order]) {
    const sign = order === "desc" ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [x, y] = [a[field], b[field]];
      if (x === y) return a.partition - b.partition;
      if (x === null) return 1;
      if (y === null) return -1;
      return x < y ? -sign : sign;
    });
  }

  function History({ name }) {
    const [range, setRange] = useState(D.report ? "2d" : "3h");
    const answer = D.useApi(`/topics/${encodeURIComponent(name)}/history`, { range });
    return html`<${Card} title="Growth" aside=${D.report ? null : html`<${D.Choice} label="Range" name="range" value=${range} onChange=${setRange}
        options=${[["3h", "3 h"], ["2d", "2 d"], ["30d", "30 d"]]} />`}>
      <${D.Answer} of=${answer}>${(data) => html`<${D.HistoryChart} points=${data.points} label=${`Size of ${name}`} height=${250} />`}<//>
    <//>`;
  }

  function Partitions({ data, go }) {
    const [sort, setSort] = useState(["partition", "asc"]);
    const [offset, setOffset] = useState(0);
    const rows = useMemo(() => sorted(data.partitions, sort), [data.partitions, sort]);
    const most = Math.max(1, ...rows.map((p) => p.size_bytes));
    const name = data.topic.name;
    return html`<${Card} title="Partitions" aside=${html`<span class="faint num">${count(data.total)}</span>`}>
      <${Heat} topic=${name} rows=${data.partitions} />
      <${Table} label=${`Partitions of ${D.plain(name)}`} columns=${COLUMNS(name, most, data.topic.dirty_ratio_max)} rows=${rows.slice(offset, offset + PAGE)} keyOf=${(p) => p.partition}
        sort=${sort[0]} order=${sort[1]} onSort=${(field, order) => { setSort([field, order]); setOffset(0); }} onOpen=${(p) => go(`/topics/${encodeURIComponent(name)}/${p.partition}`)} />
      <${D.Pager} total=${rows.length} offset=${offset} limit=${PAGE} onOffset=${setOffset} />
      ${data.total > rows.length ? html`<${D.Note}>The first ${count(rows.length)} of ${count(data.total)} partitions are shown.<//>` : null}
    <//>`;
  }

  function Topic({ route, go }) {
    const name = route.topic;
    const answer = D.useApi(`/topics/${encodeURIComponent(name)}`, { limit: FETCH });
    return html`<div class="title-row"><h1 tabindex="-1"><${Text} text=${name} /></h1>
        <div class="actions">${answer.data ? html`<${D.ActionButton} action="compact" topic=${name} label="Compact now" primary />
          <${D.ActionButton} action=${answer.data.topic.paused ? "resume" : "pause"} topic=${name} label=${answer.data.topic.paused ? "Resume" : "Pause"} />
          <${D.ActionButton} action="retain" topic=${name} label="Retain" />` : null}</div></div>
      <${TopicLinks} topic=${name} at="topic" />
      <${D.Answer} of=${answer}>${(data) => { const t = data.topic; return html`
        ${t.error ? html`<${D.Note} kind="error"><${Text} text=${t.error} /><//>` : null}
        <div class="columns">
          <${Card} title="At a glance" className="glance">
            <div class="hero-body"><${D.Rings} row=${t} size="112" grain />
              <dl class="figures">
                <${D.Figure} label="size" value=${bytes(t.size_bytes).split(" ")[0]} unit=${bytes(t.size_bytes).split(" ")[1]} note=${D.plural(t.segments, "segment")} />
                <${D.Figure} label="records" value=${D.atMost(t.records_exact, short(t.records))} note=${t.keys === null ? "keys not counted yet" : `${short(t.keys)} ${t.keys === 1 ? "key" : "keys"}, ${D.plural(t.tombstones, "tombstone")}`} />
                <${D.Figure} label="highest dirty ratio" value=${D.ratio(t.dirty_ratio)} note=${t.dirty_ratio_max === null ? null : `due above ${D.ratio(t.dirty_ratio_max)}`} />
                <${D.Figure} label="last pass" value=${html`<${D.Ago} ms=${t.last_run_ms} />`} kind="small" />
              </dl></div>
            <${D.Legend} items=${[["clean", "clean", bytes(t.clean_bytes)], ["dirty", "dirty", bytes(t.dirty_bytes)], ["uncleanable", "not yet cleanable", bytes(t.uncleanable_bytes)]]} />
            <dl class="configs">${Object.entries(data.configs).map(([key, value]) => html`<div><dt><${Text} text=${key} max=${80} /></dt><dd><${Text} text=${value} max=${200} />${D.reading(key, value) ? html` <span class="faint">(${D.reading(key, value)})</span>` : null}</dd></div>`)}</dl>
          <//>
          <${History} name=${name} />
        </div>
        <${Partitions} data=${data} go=${go} />`; }}<//>`;
  }

  D.TopicLinks = TopicLinks;
  D.pages.topic = Topic;
})();
