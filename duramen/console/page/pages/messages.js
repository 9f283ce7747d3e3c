// Records by offset, time or key. Whatever they hold is shown as text, and nothing of it is ever run.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, count, Card, Table, Text, useState, useEffect } = D;
  const FORMATS = ["auto", "text", "json", "hex", "long", "avro", "protobuf"];
  const KEY_FORMATS = ["text", "hex", "long", "json"];
  const LIMIT = 50;
  const PREVIEW = 140;
  const SHOWN_STEP = 16384;

  function pretty(part) {
    if (part.format !== "json" || part.cut) return part.text;
    try {
      return JSON.stringify(JSON.parse(part.text), null, 2);
    } catch {
      return part.text;
    }
  }

  /** Bytes of a record, whole as far as they were sent, cut into pieces a browser likes. */
  function Whole({ part, label, onMore }) {
    const [max, setMax] = useState(SHOWN_STEP);
    if (part === null) return html`<p class="faint">null</p>`;
    const text = pretty(part);
    return html`<div class="whole">
      <div class="whole-head"><span class="chip">${part.format}</span><span class="faint num">${bytes(part.length)}${part.cut ? `, the first ${bytes(part.shown)} shown` : ""}</span>
        ${part.error ? html`<span class="bad"><${Text} text=${part.error} max=${300} /></span>` : null}</div>
      <pre tabindex="0" aria-label=${label}>${html`<${Text} text=${text} max=${max} lines />`}</pre>
      ${text.length > max ? html`<button type="button" class="link" onClick=${() => setMax(max * 4)}>show more</button>` : part.cut && onMore ? html`<button type="button" class="link" onClick=${onMore}>show more</button>` : null}
    </div>`;
  }

  function Detail({ topic, message, shown }) {
    const [size, setSize] = useState(0);
    const more = D.useApi(size ? `/topics/${encodeURIComponent(topic)}/partitions/${message.partition}/messages/${message.offset}` : null, { ...shown, value_bytes: size }, { refresh: false });
    const m = more.data || message;
    const grow = D.report || size >= 1048576 ? null : () => setSize(size ? 1048576 : 65536);
    return html`<div class="record">
      ${more.error ? html`<${D.Failure} error=${more.error} />` : null}
      <div><h4>Key</h4><${Whole} part=${m.key} label="Key" onMore=${grow} /></div>
      <div><h4>Value</h4>${m.tombstone ? html`<p><${D.Pill} kind="tombstone">tombstone<//> <span class="faint">deletes the key</span></p>` : html`<${Whole} part=${m.value} label="Value" onMore=${grow} />`}</div>
      ${m.headers.length ? html`<div><h4>Headers</h4><dl class="configs">${m.headers.map((header) => html`<div><dt><${Text} text=${header.name} max=${200} /></dt><dd>${header.value === null ? html`<span class="faint">null</span>` : html`<${Text} text=${header.value.text} max=${1000} /> <span class="faint num">${header.value.length > 40 ? bytes(header.value.length) : ""}</span>`}</dd></div>`)}</dl>
        ${m.headers_left_off ? html`<p class="faint">${D.plural(m.headers_left_off, "header")} not shown.</p>` : null}</div>` : null}
      <p class="faint record-foot">partition ${m.partition} · offset ${count(m.offset)} · ${m.timestamp_type} ${D.utc(m.timestamp_ms)} · ${bytes(m.size_bytes)}
        ${m.key ? html` · <a href=${`#/erasure?topic=${encodeURIComponent(topic)}&key=${encodeURIComponent(m.key.text)}&key_format=${KEY_FORMATS.includes(m.key.format) ? m.key.format : "hex"}`}>where else is this key?</a>` : null}</p>
    </div>`;
  }

  const Select = ({ label, value, options, onChange }) => html`<label class="field"><span>${label}</span><select value=${value} onChange=${(event) => onChange(event.target.value)}>${options.map((o) => html`<option value=${o}>${o}</option>`)}</select></label>`;

  function Form({ form, set, onSubmit, partitions }) {
    const { by } = form;
    return html`<form class="form" onSubmit=${onSubmit}>
      <${D.TopicPicker} value=${form.topic} onChange=${(topic) => set({ topic, partition: "" })} />
      <label class="field field-short"><span>Partition</span><input type="number" inputmode="numeric" min="0" max=${Math.max(0, (partitions || 1) - 1)} value=${form.partition} placeholder=${by === "key" ? "of the key" : "0"} onInput=${(event) => set({ partition: event.target.value })} /></label>
      <div class="field"><span aria-hidden="true">From</span><${D.Choice} label="From" name="by" value=${by} onChange=${(value) => set({ by: value })} options=${[["newest", "newest"], ["offset", "offset"], ["time", "time"], ["key", "key"]]} /></div>
      ${by === "offset" ? html`<label class="field field-short"><span>Offset</span><input type="number" min="0" value=${form.at_offset} onInput=${(event) => set({ at_offset: event.target.value })} /></label>` : null}
      ${by === "time" ? html`<label class="field"><span>Time</span><input type="datetime-local" step="1" value=${form.at} onInput=${(event) => set({ at: event.target.value })} /></label>` : null}
      ${by === "key" ? html`<label class="field field-grow"><span>Key</span><input type="text" data-search value=${form.key} maxlength="8192" autocomplete="off" spellcheck="false" onInput=${(event) => set({ key: event.target.value })} /></label>
        <${Select} label="Key is" value=${form.key_format} options=${KEY_FORMATS} onChange=${(key_format) => set({ key_format })} />` : null}
      <${Select} label="Show keys as" value=${form.key_as} options=${FORMATS} onChange=${(key_as) => set({ key_as })} />
      <${Select} label="Values as" value=${form.value_as} options=${FORMATS} onChange=${(value_as) => set({ value_as })} />
      <label class="check field-check"><input type="checkbox" checked=${form.committed} onChange=${(event) => set({ committed: event.target.checked })} /> committed only</label>
      <button type="submit" class="primary">Show</button>
    </form>`;
  }

  function paramsOf(form) {
    const shown = { key_as: form.key_as, value_as: form.value_as };
    const params = { ...shown, limit: LIMIT, partition: form.partition, isolation: form.committed ? "read_committed" : "" };
    if (form.by === "newest") params.direction = "backward";
    if (form.by === "offset") params.at_offset = form.at_offset || 0;
    if (form.by === "time") params.at_ms = Math.max(0, new Date(form.at || 0).getTime() || 0);
    if (form.by === "key") Object.assign(params, { key: form.key, key_format: form.key_format, direction: "backward" });
    if (form.by !== "key" && params.partition === "") params.partition = 0;
    return params;
  }

  /** Bytes that are no text say so, or they would be taken for one. */
  const Short = ({ part, max }) => html`${["text", "json"].includes(part.format) ? null : html`<span class="form-tag">${part.format}</span>`}<${Text} class="mono" text=${part.text} max=${max} />`;

  const columns = (open, toggle) => [
    { label: "Offset", num: true, className: "part-cell", render: (m) => html`<button type="button" class="link num" aria-expanded=${open(m) ? "true" : "false"} onClick=${() => toggle(m)}>${count(m.offset)}</button>` },
    { label: "P", num: true, low: 1, render: (m) => m.partition },
    { label: "Time", low: 1, render: (m) => html`<${D.Time} ms=${m.timestamp_ms} />` },
    { label: "Key", className: "key-cell", render: (m) => m.key === null ? html`<span class="faint">null</span>` : html`<${Short} part=${m.key} max=${60} />` },
    { label: "Value", className: "value-cell", render: (m) => m.tombstone ? html`<${D.Pill} kind="tombstone" title="A key without a value: it deletes the key">tombstone<//>` : m.value === null ? html`<span class="faint">null</span>` : html`<${Short} part=${m.value} max=${PREVIEW} />` },
    { label: "Headers", num: true, low: 2, render: (m) => m.headers.length + m.headers_left_off || html`<span class="faint">0</span>` },
    { label: "Size", num: true, low: 1, render: (m) => bytes(m.size_bytes) },
  ];

  function Messages({ route }) {
    const [form, setForm] = useState(() => ({ topic: route.params.topic || "", partition: route.params.partition || "", by: route.params.key ? "key" : route.params.at_offset ? "offset" : "newest", at_offset: route.params.at_offset || "0", at: "",
      key: route.params.key || "", key_format: route.params.key_format || "text", key_as: "auto", value_as: "auto", committed: false }));
    const [asked, setAsked] = useState(() => (form.topic ? { topic: form.topic, params: paramsOf(form), n: 0 } : null));
    const [pages, setPages] = useState([null]);
    const [open, setOpen] = useState(new Set());
    const about = D.useApi(form.topic ? `/topics/${encodeURIComponent(form.topic)}` : null, { limit: 1 }, { refresh: false });
    const answer = D.useApi(asked && asked.topic ? `/topics/${encodeURIComponent(asked.topic)}/messages` : null, asked ? { ...asked.params, position: pages[pages.length - 1] } : {}, { refresh: form.by === "newest" && pages.length === 1 });
    useEffect(() => { setPages([null]); setOpen(new Set()); }, [asked]);
    useEffect(() => { if (asked) answer.again(); }, [asked && asked.n]);
    const set = (change) => setForm({ ...form, ...change });
    // Everything but a key under way is asked for at once.
    useEffect(() => {
      if (!form.topic || form.by === "key") return undefined;
      const next = { topic: form.topic, params: paramsOf(form), n: asked ? asked.n : 0 };
      // The same question again would close the records that are open.
      if (JSON.stringify(next) === JSON.stringify(asked)) return undefined;
      const timer = setTimeout(() => setAsked(next), 250);
      return () => clearTimeout(timer);
    }, [form.topic, form.partition, form.by, form.at_offset, form.at, form.key_as, form.value_as, form.committed]);
    const submit = (event) => { event.preventDefault(); if (form.topic) setAsked({ topic: form.topic, params: paramsOf(form), n: (asked ? asked.n : 0) + 1 }); };
    const id = (m) => `${m.partition}:${m.offset}`;
    const toggle = (m) => { const next = new Set(open); if (!next.delete(id(m))) next.add(id(m)); setOpen(next); };
    const isOpen = (m) => open.has(id(m));
    return html`<h1 tabindex="-1">Messages${form.topic ? html` · <${Text} text=${form.topic} />` : null}</h1>
      ${form.topic ? html`<${D.TopicLinks} topic=${form.topic} at="messages" />` : null}
      <${Card} title="Where from" className="form-card">${D.report ? html`<p class="faint">A report holds only the records it was asked to keep.</p>` : null}<${Form} form=${form} set=${set} onSubmit=${submit} partitions=${about.data && about.data.topic.partitions} /><//>
      ${asked === null ? html`<${Card} title="Records"><${D.Empty} title="Choose a topic">Its newest records come first; search by offset, time or key.<//><//>`
        : html`<${Card} title="Records" aside=${answer.data ? html`<span class="faint num">${answer.data.log_end_offset === null ? "all partitions" : `offsets ${count(answer.data.log_start_offset)} to ${count(answer.data.log_end_offset)}`} · ${bytes(answer.data.scanned_bytes)} read</span>` : null}>
        <${D.Answer} of=${answer}>${(data) => html`
          ${data.messages.length === 0 ? html`<${D.Empty} title="No record">${form.by === "key" ? "No record with this key was found here." : "There is none from there on."}<//>`
            : html`<${Table} label="Records" rows=${data.messages} keyOf=${id} columns=${columns(isOpen, toggle)} onOpen=${toggle}
              expanded=${(m) => isOpen(m) ? html`<${Detail} topic=${asked.topic} message=${m} shown=${{ key_as: asked.params.key_as, value_as: asked.params.value_as }} />` : null} />`}
          ${data.complete ? null : html`<${D.Note}>The limit of work was reached. Go on to read further.<//>`}
          <nav class="pager" aria-label="Pages"><button type="button" disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Back</button><span>page ${pages.length}</span>
            <button type="button" disabled=${data.next === null} onClick=${() => setPages([...pages, data.next])}>Go on</button></nav>`}<//>
      <//>`}`;
  }

  D.pages.messages = Messages;
})();
