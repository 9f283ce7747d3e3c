// A key: every place that may still hold it, until when, and the run that removed it.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, count, Card, Table, Text, useState } = D;
  const FORMATS = ["text", "hex", "long", "json"];

  /** Why there is no day yet by which all is gone: what the first place says that has none. */
  function Staying({ places }) {
    const open = places.filter((place) => place.goes_ms === null);
    const said = open[0].goes.replace(/^stays: /, "");
    return html`${open.length === places.length ? (open.length === 1 ? "It stays" : "They stay") : `${open.length === 1 ? "One" : count(open.length)} of them ${open.length === 1 ? "stays" : "stay"}`} for now: <${Text} text=${said} />.`;
  }

  function Verdict({ data }) {
    const n = data.places.length;
    return html`<div class=${`verdict ${data.erased ? "verdict-good" : "verdict-open"}`}>
      <p class="verdict-title">${data.erased ? "Nothing in this store holds this key." : `${D.plural(n, "place")} may still hold this key.`}</p>
      <p>${data.erased ? (data.removed_by ? html`The last trace went with <a href=${`#/runs/${encodeURIComponent(data.removed_by.run_id)}`}>the run of ${D.time(data.removed_by.ended_ms || data.removed_by.started_ms)}</a>.` : "No receipt names the run that removed it.")
        : data.gone_ms === null ? html`<${Staying} places=${data.places} />` : html`All of them can be gone <b><${D.Ago} ms=${data.gone_ms} /></b>, on ${D.time(data.gone_ms)}.`}</p>
      <p class="faint">${bytes(data.scanned_bytes)} read. <${Text} text=${data.note} /></p>
    </div>`;
  }

  /** From a moment on, not at that moment. */
  const Goes = ({ ms }) => (D.useNow() >= ms ? "from now on" : html`<${D.Ago} ms=${ms} />`);

  const KINDS = { segment: "segment", deleted: "deleted, not swept yet", leftover: "leftover", staging: "staging", run: "unfinished run", quarantine: "quarantine" };
  const COLUMNS = [
    { label: "Place", className: "name-cell wrap", render: (p) => html`<${Text} class="mono" text=${p.file} /><span class="faint block">${KINDS[p.kind] || p.kind}${p.unreadable ? html` · <span class="bad">unreadable: it may hold it</span>` : null}</span><span class="narrow faint"><${Text} text=${p.holds} /></span>` },
    { label: "Holds", className: "wrap", low: 1, render: (p) => html`<${Text} text=${p.holds} />` },
    { label: "Records", num: true, low: 1, render: (p) => count(p.records) },
    { label: "Offsets", num: true, low: 2, render: (p) => (p.first_offset === null ? "–" : p.first_offset === p.last_offset ? count(p.first_offset) : `${count(p.first_offset)}–${count(p.last_offset)}`) },
    { label: "Goes", className: "wrap", render: (p) => html`<${Text} text=${p.goes} />${p.goes_ms === null ? null : html`<span class="faint block"><${Goes} ms=${p.goes_ms} /></span>`}` },
  ];

  function Erasure({ route }) {
    const start = { topic: route.params.topic || "", key: route.params.key || "", key_format: route.params.key_format || "text" };
    const [form, setForm] = useState(start);
    const [asked, setAsked] = useState(start.topic && start.key ? { ...start, n: 0 } : null);
    const answer = D.useApi(asked ? `/topics/${encodeURIComponent(asked.topic)}/erasure` : null, asked ? { key: asked.key, key_format: asked.key_format } : {}, { refresh: false });
    const submit = (event) => { event.preventDefault(); setAsked({ ...form, n: (asked ? asked.n : 0) + 1 }); if (asked) answer.again(); };
    return html`<h1 tabindex="-1">Erasure${form.topic ? html` · <${Text} text=${form.topic} />` : null}</h1>
      ${form.topic ? html`<${D.TopicLinks} topic=${form.topic} at="erasure" />` : null}
      <p class="lead">Where a key still is, until when, and which run removed it.</p>
      ${D.report ? html`<${Card} title="A key"><${D.NeedsLive}>Looking for a key reads the store. Open it in duramen console.<//><//>` : html`
      <${Card} title="A key" className="form-card"><form class="form" onSubmit=${submit}>
        <${D.TopicPicker} value=${form.topic} onChange=${(topic) => setForm({ ...form, topic })} />
        <label class="field field-grow"><span>Key</span><input type="text" data-search maxlength="8192" autocomplete="off" spellcheck="false" value=${form.key} onInput=${(event) => setForm({ ...form, key: event.target.value })} /></label>
        <label class="field"><span>Written as</span><select value=${form.key_format} onChange=${(event) => setForm({ ...form, key_format: event.target.value })}>${FORMATS.map((f) => html`<option value=${f}>${f}</option>`)}</select></label>
        <button type="submit" class="primary" disabled=${!form.topic}>Look for it</button>
      </form><//>
      ${asked ? html`<${Card} title="What holds it"><${D.Answer} of=${answer}>${(data) => html`<${Verdict} data=${data} />
        ${data.places.length ? html`<${Table} label="Places" rows=${data.places} keyOf=${(p) => p.file} columns=${COLUMNS} />` : null}
        ${Object.keys(data.log_starts).length ? html`<p class="faint">Gone by retention or delete-records: ${Object.entries(data.log_starts).map(([p, at]) => `partition ${p} below offset ${count(at)}`).join(", ")}.</p>` : null}`}<//><//>` : null}`}`;
  }

  D.pages.erasure = Erasure;
})();
