// One partition: the strip of its segments, why and when it is compacted, its runs.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, count, Card, Table, Text, useState } = D;
  const ROWS = 100;

  function SegmentTable({ segments }) {
    const [open, setOpen] = useState(false);
    const [offset, setOffset] = useState(0);
    return html`<details class="segments" onToggle=${(event) => setOpen(event.target.open)}><summary>Segments as a table</summary>
      ${open ? html`<${Table} label="Segments" rows=${segments.slice(offset, offset + ROWS)} keyOf=${(s) => s.base_offset} columns=${[
        { label: "Base offset", num: true, render: (s) => count(s.base_offset) },
        { label: "End offset", num: true, low: 1, render: (s) => count(s.end_offset) },
        { label: "Section", render: (s) => html`<span class="pair"><i class=${`swatch bg-${s.section}`} aria-hidden="true"></i>${s.section}${s.count > 1 ? ` × ${count(s.count)}` : ""}</span>` },
        { label: "Size", num: true, render: (s) => bytes(s.size_bytes) },
        { label: "Records", num: true, low: 1, render: (s) => count(s.records) },
        { label: "Keys", num: true, low: 2, render: (s) => count(s.keys) },
        { label: "Tombstones", num: true, low: 2, render: (s) => count(s.tombstones) },
        { label: "Newest record", num: true, low: 1, render: (s) => html`<${D.Time} ms=${s.largest_timestamp_ms} />` },
      ]} /><${D.Pager} total=${segments.length} offset=${offset} limit=${ROWS} onOffset=${setOffset} />` : null}
    </details>`;
  }

  const Losses = ({ losses }) => losses.length === 0 ? null : html`<${D.Note} kind="error"><strong>Damage took records.</strong>
    <ul>${losses.map((l) => html`<li>offsets ${count(l.base_offset)} to ${count(l.end_offset - 1)}${l.at_most ? " at most" : ""}: <${Text} text=${l.reason} /></li>`)}</ul><//>`;

  function Partition({ route, go }) {
    const { topic, partition } = route;
    const answer = D.useApi(`/topics/${encodeURIComponent(topic)}/partitions/${partition}`);
    const { store } = D.useStore();
    const running = store && store.running.find((r) => r.topic === topic && r.partition === partition);
    const progress = running && running.total_bytes ? Math.min(1, (running.done_bytes || 0) / running.total_bytes) : running ? 0.02 : 0;
    return html`<div class="title-row"><h1 tabindex="-1"><a class="crumb" href=${`#/topics/${encodeURIComponent(topic)}`}><${Text} text=${topic} /></a> <span class="faint">/</span> partition ${partition}</h1>
        <div class="actions"><${D.ActionButton} action="compact" topic=${topic} partition=${partition} label="Compact now" primary />
          <a class="button" href=${`#/messages?topic=${encodeURIComponent(topic)}&partition=${partition}`}>Messages</a></div></div>
      <${D.Answer} of=${answer}>${(log) => html`
        <${Card} title="Segments" className="strip-card" aside=${html`<span class="num">${bytes(log.size_bytes)} in ${D.plural(log.segments_total, "segment")}</span>`}>
          ${log.segments.length === 0 ? html`<${D.Empty} title="An empty log" />` : html`<${D.Strip} log=${log} progress=${progress} />`}
          ${running ? html`<p class="running-line"><${D.Pill} kind="running">compacting<//> ${running.step ? `${running.step}: ` : ""}${bytes(running.done_bytes)} of ${bytes(running.total_bytes)}${running.bytes_per_second ? `, ${bytes(running.bytes_per_second)}/s` : ""}</p>` : null}
          <${SegmentTable} segments=${log.segments} />
        <//>
        <${Losses} losses=${log.losses} />
        <div class="columns columns-why">
          <${D.Why} why=${log.why} now_ms=${log.now_ms} topic=${topic} />
          <${Card} title="Offsets">
            <dl class="configs configs-num">
              <div><dt>log start</dt><dd>${count(log.log_start_offset)}</dd></div>
              <div><dt>first dirty</dt><dd>${count(log.first_dirty_offset)}</dd></div>
              <div><dt>first uncleanable</dt><dd>${count(log.first_uncleanable_offset)}</dd></div>
              <div><dt>last stable</dt><dd>${count(log.last_stable_offset)}</dd></div>
              <div><dt>log end</dt><dd>${count(log.log_end_offset)}</dd></div>
              <div><dt>records</dt><dd>${D.atMost(log.records_exact, count(log.records))}</dd></div>
            </dl>
          <//>
        </div>
        <${Card} title="Runs" aside=${html`<a href=${`#/runs?topic=${encodeURIComponent(topic)}&partition=${partition}`}>all runs</a>`}>
          ${log.runs.length === 0 ? html`<${D.Empty} title="No run yet">The first pass leaves its receipt here.<//>`
            : html`<${D.Timeline} runs=${log.runs} /><${D.RunTable} runs=${log.runs} go=${go} label=${`Runs of partition ${partition}`} bare />`}
        <//>`}<//>`;
  }

  D.pages.partition = Partition;
})();
