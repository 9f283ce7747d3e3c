// Passes of compaction: when, what they saved, what they removed and why; and the receipt of one.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, count, Card, Table, Text, useState, useEffect } = D;
  const LIMIT = 100;
  const RESULTS = ["running", "done", "failed", "skipped", "abandoned"];

  const Result = ({ result }) => html`<${D.Pill} kind=${RESULTS.includes(result) ? result : "plain"}>${D.plain(result)}<//>`;
  const removedSum = (run) => Object.values(run.removed).reduce((sum, n) => sum + n, 0);

  function Shrink({ run, most }) {
    if (run.before_bytes === null) return html`<span class="faint">–</span>`;
    const after = run.after_bytes;
    return html`<span class="shrink"><${D.Stack} thin max=${most} label=${`${bytes(run.before_bytes)} before, ${bytes(after)} after`}
      parts=${after === null ? [{ kind: "muted", value: run.before_bytes }] : [{ kind: "clean", value: after }, { kind: "freed", value: Math.max(0, run.before_bytes - after) }]} />
      <span class="num">${bytes(run.before_bytes)} → ${bytes(after)}</span></span>`;
  }

  function RunTable({ runs, go, label, bare }) {
    const most = Math.max(1, ...runs.map((run) => Math.max(run.before_bytes || 0, run.after_bytes || 0)));
    const columns = [
      { label: "Started", className: "name-cell", render: (run) => html`<a href=${`#/runs/${encodeURIComponent(run.run_id)}`}>${run.started_ms === null ? D.plain(run.run_id) : D.time(run.started_ms)}</a>` },
      { label: "Result", render: (run) => html`<${Result} result=${run.result} />` },
      ...(bare ? [] : [{ label: "Partition", render: (run) => html`<${Text} text=${run.topic === null ? "–" : `${run.topic}-${run.partition}`} />` }]),
      { label: "Before → after", low: 1, className: "shrink-cell", render: (run) => html`<${Shrink} run=${run} most=${most} />` },
      { label: "Removed", num: true, low: 1, render: (run) => count(removedSum(run)) },
      { label: "Map fill", num: true, low: bare ? 2 : 3, render: (run) => run.map_fill === null ? html`<span class="faint">–</span>` : html`<span class="pair"><${D.Meter} value=${run.map_fill} label=${`offset map filled to ${D.percent(run.map_fill)}`} /><span class="num">${D.percent(run.map_fill)}</span></span>` },
      { label: "Took", num: true, render: (run) => D.duration(run.seconds === null ? null : run.seconds * 1000) },
      { label: "Engine", low: 3, render: (run) => html`<${Text} text=${run.engine} />` },
      { label: "Workers", num: true, low: 3, render: (run) => count(run.workers.length) },
      { label: "Why", low: 2, className: "why-cell", render: (run) => html`<${Text} text=${D.briefly(run.reason)} max=${160} />` },
    ];
    return html`<${Table} label=${label} columns=${columns} rows=${runs} keyOf=${(run) => run.run_id} onOpen=${(run) => go(`/runs/${encodeURIComponent(run.run_id)}`)} />`;
  }

  function Summary({ data }) {
    const { summary, forgotten } = data;
    const saved = summary.before_bytes - summary.after_bytes;
    const forgottenCount = Object.values(forgotten.results).reduce((sum, n) => sum + n, 0);
    return html`<div class="columns columns-even">
      <${Card} title="Result">
        <dl class="figures figures-row">
          <${D.Figure} label="runs" value=${count(data.total)} note=${forgottenCount ? `and ${count(forgottenCount)} older, summed up` : null} />
          <${D.Figure} label="saved" value=${bytes(saved).split(" ")[0]} unit=${bytes(saved).split(" ")[1]} note=${`${bytes(summary.before_bytes)} → ${bytes(summary.after_bytes)}`} />
        </dl>
        <div class="pills">${RESULTS.filter((r) => summary.results[r]).map((r) => html`<${D.Pill} kind=${r}>${r} <b class="num">${count(summary.results[r])}</b><//>`)}</div>
      <//>
      <${Card} title="Records removed, by reason"><${D.Removed} removed=${summary.removed} /><//>
    </div>`;
  }

  function Runs({ route, go }) {
    const topic = route.params.topic || "";
    const partition = route.params.partition === undefined ? "" : route.params.partition;
    const [result, setResult] = useState("");
    const [pages, setPages] = useState([null]);
    const position = pages[pages.length - 1];
    const answer = D.useApi("/runs", { topic, partition, result, limit: LIMIT, position });
    useEffect(() => setPages([null]), [topic, partition, result]);
    return html`<h1 tabindex="-1">Runs${topic ? html` · <${Text} text=${partition === "" ? topic : `${topic}-${partition}`} />` : null}</h1>
      ${topic ? html`<${D.TopicLinks} topic=${topic} at="runs" />` : null}
      <${D.Answer} of=${answer}>${(data) => html`
        <${Summary} data=${data} />
        <${Card} title="Timeline" aside=${html`<label class="field-inline">Result <select value=${result} onChange=${(event) => setResult(event.target.value)}>
            <option value="">all</option>${RESULTS.map((r) => html`<option value=${r}>${r}</option>`)}</select></label>`}>
          ${data.runs.length === 0 ? html`<${D.Empty} title="No run">${result ? "None ended like this." : "The first pass of compaction leaves its receipt here."}<//>`
            : html`<${D.Timeline} runs=${data.runs} /><${RunTable} runs=${data.runs} go=${go} label="Runs, newest first" />
          <nav class="pager" aria-label="Pages"><button type="button" disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Newer</button>
            <span class="num">page ${pages.length} of ${Math.max(1, Math.ceil(data.total / LIMIT))}</span>
            <button type="button" disabled=${data.next === null} onClick=${() => setPages([...pages, data.next])}>Older</button></nav>`}
        <//>`}<//>`;
  }

  const isTime = (name) => name.endsWith("_ms") && !["late_ms"].includes(name);
  const isSize = (name) => name.endsWith("_bytes") || name === "map_buffer_wanted";
  const NAMES = { extra_bytes: "extra disk, at most", late_ms: "late by", index_seconds: "indexing took", map_buffer_wanted: "map buffer that would do", map_threads_wanted: "threads that would do", records: "records left", tombstones: "tombstones left" };
  const label = (name) => NAMES[name] || name.replace(/_(ms|bytes)$/, "").replaceAll("_", " ");
  function said(name, value) {
    if (value === null || value === undefined) return html`<span class="faint">–</span>`;
    if (typeof value === "number") {
      if (name === "late_ms") return D.duration(value);
      if (isTime(name)) return html`<${D.Time} ms=${value} />`;
      if (isSize(name)) return bytes(value);
      if (name.endsWith("_seconds") || name === "seconds") return D.duration(value * 1000);
      return Number.isInteger(value) ? count(value) : D.ratio(value);
    }
    if (typeof value === "boolean") return value ? "yes" : "no";
    return html`<${Text} text=${typeof value === "string" ? value : JSON.stringify(value)} max=${2000} />`;
  }

  function Run({ route }) {
    const answer = D.useApi(`/runs/${encodeURIComponent(route.run_id)}`);
    return html`<div class="title-row"><h1 tabindex="-1"><a class="crumb" href="#/runs">Runs</a> <span class="faint">/</span> receipt</h1></div>
      <${D.Answer} of=${answer}>${(run) => html`
        <${Card} title=${html`<${Text} text=${run.topic === null ? run.run_id : `${run.topic}-${run.partition}`} />`} aside=${html`<${Result} result=${run.result} />`} className="receipt">
          <p class="why-sentence"><${Text} text=${run.reason} /></p>
          <div class="before-after">
            <div><span>before</span><${D.Stack} max=${Math.max(run.before_bytes || 0, run.after_bytes || 0, 1)} parts=${[{ kind: "dirty", value: run.before_bytes || 0 }]} label=${`${bytes(run.before_bytes)} before`} /><b class="num">${bytes(run.before_bytes)}</b></div>
            <div><span>after</span><${D.Stack} max=${Math.max(run.before_bytes || 0, run.after_bytes || 0, 1)} parts=${[{ kind: "clean", value: run.after_bytes || 0 }]} label=${`${bytes(run.after_bytes)} after`} /><b class="num">${bytes(run.after_bytes)}</b></div>
          </div>
          <dl class="figures figures-row">
            <${D.Figure} label="started" value=${html`<${D.Time} ms=${run.started_ms} />`} kind="small" />
            <${D.Figure} label="took" value=${D.duration(run.seconds === null ? null : run.seconds * 1000)} kind="small" />
            <${D.Figure} label="saved" value=${run.after_bytes === null || run.before_bytes === null ? "–" : bytes(run.before_bytes - run.after_bytes)} kind="small" />
            <${D.Figure} label="offset map" value=${D.percent(run.map_fill)} note=${run.details && run.details.map_keys !== undefined ? `${count(run.details.map_keys)} keys` : null} kind="small" />
          </dl>
        <//>
        <div class="columns columns-even">
          <${Card} title="Records removed, by reason"><${D.Removed} removed=${run.removed} /><//>
          <${Card} title="Who and where"><dl class="configs">
            <div><dt>run</dt><dd><${Text} text=${run.run_id} /></dd></div>
            <div><dt>engine</dt><dd><${Text} text=${run.engine} /></dd></div>
            <div><dt>workers</dt><dd>${run.workers.length ? run.workers.map((w) => html`<${Text} class="chip" text=${w} />`) : "–"}</dd></div>
            ${run.airflow_run_id ? html`<div><dt>Airflow run</dt><dd><${Text} text=${run.airflow_run_id} /></dd></div>` : null}
            ${run.topic === null ? null : html`<div><dt>partition</dt><dd><a href=${`#/topics/${encodeURIComponent(run.topic)}/${run.partition}`}><${Text} text=${`${run.topic}-${run.partition}`} /></a></dd></div>`}
          </dl><//>
        </div>
        <${Card} title="Receipt"><dl class="configs configs-num configs-wide">${Object.entries(run.details || {}).map(([name, value]) => html`<div><dt><${Text} text=${label(name)} /></dt><dd>${said(name, value)}</dd></div>`)}</dl><//>`}<//>`;
  }

  D.RunTable = RunTable;
  D.pages.runs = Runs;
  D.pages.run = Run;
})();
