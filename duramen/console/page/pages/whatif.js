// What would be due with other settings, what it would save and need. Nothing is changed by it.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, count, Card, Table, Text, useState, useEffect } = D;
  const MINUTE = 60000;
  const LAGS = [0, MINUTE, 5 * MINUTE, 15 * MINUTE, 60 * MINUTE, 6 * 60 * MINUTE, 86400000, 3 * 86400000, 7 * 86400000, 30 * 86400000];
  const NEVER = 2 ** 53;

  const lag = (ms) => (ms === 0 ? "none" : ms >= NEVER ? "never" : D.duration(ms));
  const SLIDERS = [
    { name: "ratio", setting: "min.cleanable.dirty.ratio", label: "Dirty ratio", help: "Due above this share of dirty bytes",
      steps: Array.from({ length: 101 }, (_, i) => i / 100), said: (v) => v.toFixed(2) },
    { name: "min_lag_ms", setting: "min.compaction.lag.ms", label: "Minimum lag", help: "Younger records are left alone", steps: LAGS, said: lag },
    { name: "max_lag_ms", setting: "max.compaction.lag.ms", label: "Maximum lag", help: "Older records make it due, whatever the ratio",
      steps: [MINUTE / 60, ...LAGS.slice(1), NEVER], said: lag },
    { name: "segment_bytes", setting: "segment.bytes", label: "Segment size", help: "Passes merge segments up to this size",
      steps: Array.from({ length: 21 }, (_, i) => 2 ** (10 + i)), said: bytes },
  ];
  const nearest = (steps, value) => steps.reduce((best, step, i) => (Math.abs(step - value) < Math.abs(steps[best] - value) ? i : best), 0);

  function Slider({ slider, value, inForce, everywhere, onChange }) {
    const { steps, label, help, said, setting } = slider;
    const current = value === null ? (inForce === null ? null : Math.min(inForce, NEVER)) : value;
    const index = current === null ? 0 : nearest(steps, current);
    const moved = value !== null;
    // Topics may have values of their own: for all of them, nothing is said until the slider is moved.
    const shown = current === null || (everywhere && !moved) ? "as set" : said(current);
    const id = `slider-${slider.name}`;
    return html`<div class=${`slider ${moved ? "moved" : ""}`}>
      <label for=${id}>${label}</label><output for=${id} class="num">${shown}</output>
      <input id=${id} type="range" min="0" max=${steps.length - 1} step="1" value=${index} aria-valuetext=${shown} aria-describedby=${`${id}-help`}
        onInput=${(event) => onChange(steps[Number(event.target.value)])} />
      <p class="slider-help" id=${`${id}-help`}><code>${setting}</code> ${help}. ${inForce === null ? null : html`${everywhere ? "The store's default" : "In force"}: <b class="num">${said(Math.min(inForce, NEVER))}</b>.`}</p>
      ${moved ? html`<button type="button" class="link" onClick=${() => onChange(null)}>reset<span class="sr"> ${label}</span></button>` : null}
    </div>`;
  }

  const Change = ({ now, then, format, less }) => {
    if (now === null || then === null) return null;
    if (now === then) return html`<span class="change faint">unchanged</span>`;
    const better = less ? then < now : then > now;
    return html`<span class=${`change ${better ? "good" : "bad"}`}>${then > now ? "+" : "−"}${format(Math.abs(then - now))}</span>`;
  };

  function Compare({ data }) {
    const { now, then } = data;
    const rows = [
      ["due partitions", now.due, then.due, count, true],
      ["bytes to read", now.read_bytes, then.read_bytes, bytes, true],
      ["extra disk, at most", now.extra_bytes, then.extra_bytes, bytes, true],
      ["bytes saved", now.saved_bytes, then.saved_bytes, bytes, false],
    ];
    return html`<div class="compare">${rows.map(([label, a, b, format, less]) => html`<div class="compare-cell"><h3>${label}</h3>
      <p class="compare-then num" data-then=${label}>${b === null ? "–" : format(b)}</p>
      <p class="compare-now num">now ${a === null ? "–" : format(a)} ${a === null && b === null ? html`<span class="faint">not estimated</span>` : html`<${Change} now=${a} then=${b} format=${format} less=${less} />`}</p></div>`)}</div>`;
  }

  const COLUMNS = [
    { label: "Partition", className: "name-cell", render: (p) => html`<a href=${`#/topics/${encodeURIComponent(p.topic)}/${p.partition}`}><${Text} text=${`${p.topic}-${p.partition}`} /></a>` },
    { label: "Now", render: (p) => html`<${D.State} state=${p.state_now} />` },
    { label: "Then", render: (p) => html`<${D.State} state=${p.state} />` },
    { label: "Dirty ratio", num: true, low: 1, render: (p) => html`<${D.Gauge} small value=${p.dirty_ratio} max=${null} />` },
    { label: "Size", num: true, low: 3, render: (p) => bytes(p.size_bytes) },
    { label: "To read", num: true, low: 1, render: (p) => (p.state === "due" ? bytes(p.read_bytes) : html`<span class="faint">–</span>`) },
    { label: "Extra disk", num: true, low: 2, render: (p) => (p.state === "due" ? bytes(p.extra_bytes) : html`<span class="faint">–</span>`) },
    { label: "Segments", num: true, low: 4, render: (p) => count(p.segments_after) },
    { label: "Would save", num: true, render: (p) => p.estimate ? html`<span>${bytes(p.estimate.before_bytes - p.estimate.after_bytes)}${p.estimate.rough ? html` <span class="faint">about</span>` : null}</span>` : html`<span class="faint">–</span>` },
    { label: "Why", low: 3, className: "why-cell", render: (p) => html`<${Text} text=${D.briefly(p.why)} />` },
  ];

  function WhatIf({ route, go }) {
    const topic = route.params.topic || "";
    const [tried, setTried] = useState({});
    const [sent, setSent] = useState({});
    const [estimate, setEstimate] = useState(false);
    useEffect(() => {
      const timer = setTimeout(() => setSent(tried), 160);
      return () => clearTimeout(timer);
    }, [tried]);
    const settings = D.useApi("/settings", { topic }, { refresh: false });
    const answer = D.useApi("/what-if", { topic, ...sent, estimate: estimate ? "true" : "", limit: 100 }, { refresh: !estimate });
    const inForce = (name) => {
      const found = settings.data && settings.data.settings.find((s) => s.name === name);
      const value = found ? Number(found.value) : NaN;
      return Number.isFinite(value) ? value : null;
    };
    const set = (name, value) => {
      const next = { ...tried };
      if (value === null) delete next[name];
      else next[name] = value;
      setTried(next);
    };
    return html`<h1 tabindex="-1">What if${topic ? html` · <${Text} text=${topic} />` : null}</h1>
      ${topic ? html`<${D.TopicLinks} topic=${topic} at="whatif" />` : null}
      <p class="lead">Move a slider to see what would be due with other settings. Nothing is changed.</p>
      <div class="columns columns-whatif">
        ${D.report ? html`<${Card} title="Settings"><${D.NeedsLive}>The sliders need a live store. This is what is due with the settings in force.<//><//>`
          : html`<${Card} title="Settings" aside=${Object.keys(tried).length ? html`<button type="button" class="link" onClick=${() => setTried({})}>reset all</button>` : null}>
          <${D.TopicPicker} value=${topic} all onChange=${(name) => go(`/what-if${D.query({ topic: name })}`)} />
          ${SLIDERS.map((slider) => html`<${Slider} key=${slider.name} slider=${slider} value=${slider.name in tried ? tried[slider.name] : null} inForce=${inForce(slider.setting)} everywhere=${!topic} onChange=${(v) => set(slider.name, v)} />`)}
          <label class="check"><input type="checkbox" checked=${estimate} onChange=${(event) => setEstimate(event.target.checked)} /> Read records to estimate what would be saved <span class="faint">(slower)</span></label>
        <//>`}
        <div class="stack-cards">
          <${D.Answer} of=${answer}>${(data) => html`
            <${Card} title="With these settings" aside=${Object.keys(data.config).length ? html`<span class="faint">${Object.entries(data.config).map(([k, v]) => `${k} = ${D.plain(v)}`).join(", ")}</span>` : html`<span class="faint">the settings in force</span>`}>
              <${Compare} data=${data} />
              ${data.left_off ? html`<${D.Note}>${D.plural(data.left_off, "due partition")} not estimated: the limit of work was reached.<//>` : null}
            <//>
            <${Card} title="Partitions" aside=${html`<span class="faint num">${count(data.total)}</span>`}>
              ${data.partitions.length === 0 ? html`<${D.Empty} title="No partition is compacted" />`
                : html`<${Table} label="Partitions, due ones first" columns=${COLUMNS} rows=${data.partitions} keyOf=${(p) => `${p.topic}-${p.partition}`} onOpen=${(p) => go(`/topics/${encodeURIComponent(p.topic)}/${p.partition}`)} />`}
              ${data.total > data.partitions.length ? html`<${D.Note}>The first ${count(data.partitions.length)} of ${count(data.total)}.<//>` : null}
            <//>`}<//>
        </div>
      </div>`;
  }

  D.pages.whatif = WhatIf;
})();
