// The first page: the store's cross-section and its history, then every topic.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, short, count, Card, Table, Text, useState } = D;
  const LIMIT = 50;

  function Summary({ store, state, onState }) {
    const { totals, history } = store;
    return html`<div class="hero">
      <${Card} title="Store" className="hero-store">
        <div class="hero-body">
          <${D.Rings} row=${totals} size="132" grain />
          <dl class="figures">
            <${D.Figure} label="log" value=${D.scaled(store.space.log_bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])[0]}
              unit=${bytes(store.space.log_bytes).split(" ")[1]} note=${`${D.plural(totals.segments, "segment")}`} />
            <${D.Figure} label="records" value=${D.atMost(totals.records_exact, short(totals.records))} />
            <${D.Figure} label="topics" value=${count(totals.topics)} note=${D.plural(totals.partitions, "partition")} />
          </dl>
        </div>
        <${D.Legend} items=${[
          ["clean", "clean", bytes(totals.clean_bytes), D.SECTIONS.clean],
          ["dirty", "dirty", bytes(totals.dirty_bytes), D.SECTIONS.dirty],
          ["uncleanable", "not yet cleanable", bytes(totals.uncleanable_bytes), D.SECTIONS.uncleanable],
        ]} />
      <//>
      <${Card} title="Last three hours" className="hero-history">
        <${D.HistoryChart} points=${history} label="Size of the store" height=${186} />
      <//>
    </div>
    <div class="states" role="group" aria-label="Partitions by state">
      ${Object.keys(D.STATES).filter((name) => totals.states[name] > 0 || name === state).map((name) => html`<button type="button"
          class=${`state-chip ${state === name ? "on" : ""}`} aria-pressed=${state === name ? "true" : "false"} title=${D.STATES[name][1]}
          onClick=${() => onState(state === name ? "" : name)}>
        <i class=${`dot dot-${name}`} aria-hidden="true"></i>${D.STATES[name][0]} <b class="num">${count(totals.states[name])}</b></button>`)}
    </div>`;
  }

  const topicState = (topic) => {
    const worst = ["unreadable", "settings_unknown", "set_aside", "due"].find((name) => topic.states[name] > 0);
    if (worst) return html`<span class="pair"><${D.State} state=${worst} />${topic.partitions > 1 ? html`<span class="faint num">${count(topic.states[worst])}</span>` : null}</span>`;
    if (topic.paused) return html`<${D.State} state="paused" />`;
    return html`<${D.State} state=${topic.compacted ? "waiting" : "not_compacted"} />`;
  };

  const COLUMNS = (most) => [
    { key: "name", label: "Topic", sort: "name", className: "name-cell",
      render: (t) => html`<span class="name"><${D.Rings} row=${t} size="22" /><a href=${`#/topics/${encodeURIComponent(t.name)}`}><${Text} text=${t.name} /></a></span>` },
    { key: "state", label: "State", render: topicState },
    { key: "size", label: "Size", num: true, sort: "size", render: (t) => bytes(t.size_bytes) },
    { key: "bar", label: "Clean · dirty", low: 4, className: "bar-cell", render: (t) => html`<${D.Sections} row=${t} max=${most} />` },
    { key: "ratio", label: "Dirty ratio", num: true, sort: "dirty_ratio", low: 1, render: (t) => html`<${D.Gauge} small value=${t.dirty_ratio} max=${t.dirty_ratio_max} />` },
    { key: "records", label: "Records", num: true, sort: "records", low: 1, render: (t) => D.atMost(t.records_exact, count(t.records)) },
    { key: "keys", label: "Keys", num: true, sort: "keys", low: 2, render: (t) => count(t.keys) },
    { key: "tombstones", label: "Tombstones", num: true, sort: "tombstones", low: 2, render: (t) => count(t.tombstones) },
    { key: "policy", label: "Policy", low: 2, render: (t) => html`<${Text} text=${t.policy} />` },
    { key: "partitions", label: "Parts", num: true, sort: "partitions", low: 3, render: (t) => count(t.partitions) },
    { key: "last", label: "Last record", num: true, sort: "last_record", low: 3, render: (t) => html`<${D.Ago} ms=${t.last_record_ms} />` },
    { key: "growth", label: "Growth, 3 h", low: 1, render: (t) => html`<${D.Sparkline} points=${t.growth} field="size_bytes" width="96" label=${`size ${D.growth(t.growth)}`} />` },
  ];

  function Topics({ route, go }) {
    const { store } = D.useStore();
    const [search, setSearch] = useState(route.params.search || "");
    const [state, setState] = useState(route.params.state || "");
    const [sort, setSort] = useState(["name", "asc"]);
    const [offset, setOffset] = useState(0);
    const answer = D.useApi("/topics", { search, state, sort: sort[0], order: sort[1], limit: LIMIT, offset });
    const most = answer.data ? Math.max(1, ...answer.data.topics.map((t) => t.size_bytes)) : 1;
    return html`
      <h1 tabindex="-1" class="sr">Topics</h1>
      ${store ? html`<${Summary} store=${store} state=${state} onState=${(name) => { setState(name); setOffset(0); }} />` : html`<${D.Loading} />`}
      <${Card} title="Topics" aside=${html`<label class="search"><span class="sr">Search topics</span>
          <input type="search" data-search placeholder="Search topics   /" value=${search} maxlength="249"
            onInput=${(event) => { setSearch(event.target.value); setOffset(0); }} /></label>
          <${D.ActionButton} action="compact" label="Compact now" /> <${D.ActionButton} action="retain" label="Retain" />`}>
        <${D.Answer} of=${answer}>${(data) => data.topics.length === 0
          ? html`<${D.Empty} title=${search || state ? "No topic matches" : "No topic yet"}>${search || state ? "Try another search, or clear the state filter." : "Make one with duramen topics create, or let a query write."}<//>`
          : html`<${Table} label="Topics" columns=${COLUMNS(most)} rows=${data.topics} keyOf=${(t) => t.id + t.name} sort=${sort[0]} order=${sort[1]}
                onSort=${(name, order) => { setSort([name, order]); setOffset(0); }} onOpen=${(t) => go(`/topics/${encodeURIComponent(t.name)}`)} />
              <${D.Pager} total=${data.total} offset=${data.offset} limit=${LIMIT} onOffset=${setOffset} />`}
        <//>
      <//>`;
  }

  D.pages.topics = Topics;
})();
