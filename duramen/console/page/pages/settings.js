// Every setting with its value, where that comes from, and its documentation.
"use strict";
(() => {
  const D = window.duramen;
  const { html, count, Card, Table, Text, useState } = D;

  const Source = ({ setting: s }) => html`<${D.Pill} kind=${`source-${["topic", "store"].find((name) => s.source.startsWith(name)) || "default"}`}><${Text} text=${s.source} /><//>${s.source_name && s.source !== "default" && s.source_name !== s.name ? html`<span class="faint block"><${Text} text=${s.source_name} /></span>` : null}
    ${s.shadowed.length ? html`<span class="faint block">overrules ${s.shadowed.map((x) => D.plain(x)).join(", ")}</span>` : null}`;

  const COLUMNS = [
    { label: "Setting", className: "setting-cell", render: (s) => html`<code><${Text} text=${s.name} /></code>${s.broker_names.some((n) => n !== s.name) ? html`<span class="faint block">${s.broker_names.map((n, i) => html`${i ? ", " : null}<${Text} text=${n} />`)}</span>` : null}<span class="narrow doc"><${Text} text=${s.doc} /></span>` },
    { label: "Value", className: "wrap set-cell", render: (s) => html`<b class="mono"><${Text} text=${s.value === "" ? "(empty)" : s.value} max=${400} /></b>${D.reading(s.name, s.value) ? html`<span class="faint"> ${D.reading(s.name, s.value)}</span>` : null}${s.value !== s.default ? html`<span class="faint block">default <${Text} text=${s.default === "" ? "(empty)" : s.default} max=${200} /></span>` : null}<span class="narrow"><${Source} setting=${s} /></span>` },
    { label: "Source", low: 1, render: (s) => html`<${Source} setting=${s} />` },
    { label: "Documentation", low: 1, className: "doc-cell", render: (s) => html`<${Text} text=${s.doc} />${s.no_effect ? html`<span class="faint block">No effect here: ${D.plain(s.no_effect)}</span>` : ""}<span class="faint block">${D.plain(s.type)}${s.valid ? ` · ${D.plain(s.valid)}` : ""}</span>` },
  ];

  function Settings({ route, go }) {
    const topic = route.params.topic || "";
    const [search, setSearch] = useState(route.params.search || "");
    const [changed, setChanged] = useState(false);
    const answer = D.useApi("/settings", { topic });
    return html`<h1 tabindex="-1">Settings${topic ? html` · <${Text} text=${topic} />` : null}</h1>
      ${topic ? html`<${D.TopicLinks} topic=${topic} at="settings" />` : null}
      <${D.Answer} of=${answer}>${(data) => {
        const wanted = search.toLowerCase();
        const rows = data.settings.filter((s) => (!changed || s.source !== "default") && (!wanted || [s.name, s.doc, s.value, ...s.broker_names].some((text) => text.toLowerCase().includes(wanted))));
        return html`<${Card} title=${`${D.plural(rows.length, "setting")}`} aside=${html`
            ${D.report ? null : html`<${D.TopicPicker} value=${topic} all inline onChange=${(name) => go(`/settings${D.query({ topic: name })}`)} />`}
            <label class="check"><input type="checkbox" checked=${changed} onChange=${(event) => setChanged(event.target.checked)} /> not default</label>
            <label class="search"><span class="sr">Search settings</span><input type="search" data-search placeholder="Search   /" value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>`}>
          <p class="faint store-file">Store file: <${Text} class="mono" text=${data.store_file} /></p>
          ${rows.length ? html`<${Table} label="Settings" rows=${rows} keyOf=${(s) => `${s.scope} ${s.name}`} columns=${COLUMNS} />` : html`<${D.Empty} title="No setting matches" />`}
        <//>`;
      }}<//>`;
  }

  D.pages.settings = Settings;
})();
