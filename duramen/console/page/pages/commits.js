// What each app commits: its rate, where its time goes, dead letters and replays; then commit by commit.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, short, count, Card, Table, Text, useState, useEffect } = D;
  const STEPS = ["encode", "plan", "commit", "append"];
  const LIMIT = 50;
  const RANGES = [[3600000, "1 h"], [86400000, "1 d"], [7 * 86400000, "7 d"]];

  const rate = (value, unit) => (value === null || value === undefined ? "–" : `${value < 10 ? value.toFixed(2) : short(Math.round(value))}${unit}`);

  function Timing({ values, max, label }) {
    const parts = STEPS.map((step, i) => ({ kind: `t${i}`, value: values[step] || 0 }));
    const total = parts.reduce((sum, part) => sum + part.value, 0);
    const unknown = STEPS.filter((step) => values[step] === null);
    const said = STEPS.map((step) => `${step} ${values[step] === null ? "unknown" : `${values[step]} ms`}`).join(", ");
    return html`<div class="timing"><span class="timing-name">${label}</span><${D.Stack} thin parts=${parts} max=${max} label=${`${label || "time"}: ${said}`} /><span class="num" title=${unknown.length ? `without ${unknown.join(" and ")}, which nobody has told of` : undefined}>${unknown.length === STEPS.length ? "–" : `${unknown.length ? "≥ " : ""}${D.duration(total)}`}</span></div>`;
  }

  function App({ app, onOnly, only }) {
    const of = (which) => Object.fromEntries(STEPS.map((step) => [step, app.timings[step][which]]));
    const sum = (values) => STEPS.reduce((total, step) => total + (values[step] || 0), 0);
    const max = Math.max(1, sum(of("p95")), sum(of("p50")), sum(of("last")));
    const name = app.app_id === null ? "no app" : app.app_id;
    return html`<${Card} title=${html`<${Text} text=${name} max=${120} />`} className="app" aside=${html`<span class="faint">last <${D.Ago} ms=${app.last_committed_ms} /></span>
        ${app.app_id === null ? null : html`<button type="button" class="link" aria-pressed=${only ? "true" : "false"} onClick=${onOnly}>${only ? "all apps" : "its commits"}</button>`}`}>
      <dl class="figures figures-row">
        <${D.Figure} label="commits" value=${count(app.commits)} note=${rate(app.commits_per_minute, "/min")} />
        <${D.Figure} label="rows" value=${short(app.rows)} note=${rate(app.rows_per_second, "/s")} />
        <${D.Figure} label="bytes" value=${bytes(app.bytes).split(" ")[0]} unit=${bytes(app.bytes).split(" ")[1]} note=${app.bytes_per_second === null ? null : `${bytes(Math.round(app.bytes_per_second))}/s`} />
        <${D.Figure} label="dead letters" value=${count(app.dead_letters)} kind=${app.dead_letters ? "bad" : ""} />
        <${D.Figure} label="replays" value=${count(app.replays)} note=${app.void ? `${count(app.void)} void` : null} />
      </dl>
      ${app.series.length > 1 ? html`<${D.TimeChart} height=${110} unit="count" times=${app.series.map((p) => p.time_ms)} label=${`Rows of ${D.plain(name)} over time`}
        series=${[{ label: "rows", color: "clean", fill: true, bars: true, values: app.series.map((p) => p.rows) }]} />` : null}
      ${STEPS.every((step) => app.timings[step].p50 === null) ? html`<p class="faint">How long its steps took is not kept.</p>` : html`
      <div class="timings"><${Timing} label="median" values=${of("p50")} max=${max} /><${Timing} label="95th" values=${of("p95")} max=${max} /><${Timing} label="last" values=${of("last")} max=${max} /></div>
      <${D.Legend} items=${STEPS.map((step, i) => [`t${i}`, step, app.timings[step].p50 === null ? "–" : `${app.timings[step].p50} ms`])} />`}
      <p class="app-topics">${app.topics.slice(0, 20).map((topic) => html`<a class="chip" href=${`#/topics/${encodeURIComponent(topic)}`}><${Text} text=${topic} /></a>`)}${app.topics.length > 20 ? html`<span class="faint">and ${count(app.topics.length - 20)} more</span>` : null}</p>
    <//>`;
  }

  function Commits({ go }) {
    const [range, setRange] = useState("86400000");
    const [app, setApp] = useState("");
    const [pages, setPages] = useState([null]);
    const apps = D.useApi("/apps", { range_ms: range });
    const answer = D.useApi("/commits", { app, limit: LIMIT, position: pages[pages.length - 1] });
    useEffect(() => setPages([null]), [app]);
    const sum = (c) => STEPS.reduce((total, step) => total + (c[`${step}_ms`] || 0), 0);
    return html`<div class="title-row"><h1 tabindex="-1">Commits</h1>${D.report ? null : html`<${D.Choice} label="How far back" name="apps-range" value=${range} onChange=${setRange} options=${RANGES.map(([ms, label]) => [String(ms), label])} />`}</div>
      <${D.Answer} of=${apps}>${(data) => data.apps.length === 0 ? html`<${Card} title="Apps"><${D.Empty} title="No commit yet">A query that writes shows up here with its first batch.<//><//>`
        : html`<div class="apps">${data.apps.map((each) => html`<${App} key=${String(each.app_id)} app=${each} only=${app !== "" && app === each.app_id} onOnly=${() => setApp(app === each.app_id ? "" : each.app_id)} />`)}</div>
          ${data.complete ? null : html`<${D.Note}>The ledger keeps the newest commits. Older ones of this time may be missing here.<//>`}`}<//>
      <${Card} title=${app ? html`Commits of <${Text} text=${app} max=${80} />` : "Commits"}>
        <${D.Answer} of=${answer}>${(data) => { const max = Math.max(1, ...data.commits.map(sum)); return data.commits.length === 0 ? html`<${D.Empty} title="No commit" />` : html`
          <${Table} label="Commits, newest first" rows=${data.commits} keyOf=${(c) => `${c.version}-${c.topic}-${c.sequence}`} onOpen=${(c) => c.topic && go(`/topics/${encodeURIComponent(c.topic)}`)} columns=${[
            { label: "Committed", className: "name-cell", render: (c) => html`<${D.Time} ms=${c.committed_ms} />` },
            { label: "Topic", render: (c) => c.topic === "" ? html`<span class="faint">deleted</span>` : html`<a href=${`#/topics/${encodeURIComponent(c.topic)}`}><${Text} text=${c.topic} /></a>` },
            { label: "App", low: 1, render: (c) => html`<${Text} text=${c.app_id} max=${40} />` },
            { label: "Batch", num: true, low: 1, render: (c) => count(c.batch_id) },
            { label: "Rows", num: true, render: (c) => count(c.rows) },
            { label: "Bytes", num: true, low: 1, render: (c) => bytes(c.bytes) },
            { label: "Encode · plan · commit · append", low: 2, className: "shrink-cell", render: (c) => html`<${Timing} label="" max=${max} values=${{ encode: c.encode_ms, plan: c.plan_ms, commit: c.commit_ms, append: c.append_ms }} />` },
            { label: "Dead letters", num: true, low: 2, render: (c) => c.dead_letters ? html`<span class="bad">${count(c.dead_letters)}</span>` : html`<span class="faint">0</span>` },
            { label: "Engine", low: 3, render: (c) => html`<${Text} text=${c.void ? "void" : c.engine} />` },
            { label: "Workers", num: true, low: 3, render: (c) => count(c.workers.length) },
          ]} />
          <nav class="pager" aria-label="Pages"><button type="button" disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Newer</button><span>page ${pages.length}</span>
            <button type="button" disabled=${data.next === null} onClick=${() => setPages([...pages, data.next])}>Older</button></nav>`; }}<//>
      <//>`;
  }

  D.pages.commits = Commits;
})();
