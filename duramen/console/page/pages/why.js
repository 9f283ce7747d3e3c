// Why and when: the rule that makes a partition due or holds it back, until when, how late.
"use strict";
(() => {
  const D = window.duramen;
  const { html, bytes, count, Card, Table, Text, useState } = D;
  const LIMIT = 50;

  const RULES = {
    ratio: "its dirty ratio is above the threshold",
    max_lag: "records are older than max.compaction.lag.ms",
    horizon: "tombstones or markers are past their delete horizon",
    expired: "records are past their time to live",
    recompress: "segments are to be compressed anew",
    forced: "it was asked for",
    roll: "its active segment is to be closed first",
  };
  const HOLDS = {
    ratio: "its dirty ratio is not above the threshold",
    min_lag: "its records are younger than min.compaction.lag.ms",
    nothing_new: "nothing was written since the last pass",
    open_transaction: "a transaction is open",
    not_flushed: "its records are not flushed yet",
    active_only: "everything new is in the active segment",
    empty: "it is empty",
  };

  /** The sentence beside a pill that says due or waiting already. */
  const briefly = (why) => D.unquoted(why.replace(/^(not )?due: /, ""));

  const Countdown = ({ label, ms, note }) => html`<div class="countdown"><dt>${label}</dt><dd><${D.Ago} ms=${ms} /><span class="faint">${D.time(ms)}${note ? ` · ${note}` : ""}</span></dd></div>`;

  /** One partition's card. */
  function Why({ why, now_ms, topic }) {
    const rule = why.rule || why.held_by;
    return html`<${Card} title="Why and when" className="why" aside=${html`<${D.State} state=${why.state} />`}>
      <p class="why-sentence"><${Text} text=${why.error || D.unquoted(why.why)} /></p>
      <div class="gauge-row">
        <${D.Gauge} value=${why.dirty_ratio} max=${why.dirty_ratio_max} />
        ${why.dirty_ratio === null ? null : html`<p class="gauge-said"><b class="num">${D.ratio(why.dirty_ratio)}</b> of <span class="num">${D.ratio(why.dirty_ratio_max)}</span>
          <span class="faint"> dirty ratio · min.cleanable.dirty.ratio</span></p>`}
      </div>
      <dl class="countdowns">
        ${rule ? html`<div class="countdown"><dt>${why.rule ? "made due by" : "held back by"}</dt><dd>${rule.replace("_", " ")}<span class="faint">${(why.rule ? RULES : HOLDS)[rule] || ""}${why.setting
          ? html` · <a href=${`#/settings?topic=${encodeURIComponent(topic)}&search=${encodeURIComponent(why.setting)}`}>${why.setting}</a>` : null}</span></dd></div>` : null}
        ${why.late_ms > 0 ? html`<div class="countdown late"><dt>late by</dt><dd>${D.duration(why.late_ms)}<span class="faint">max.compaction.lag.ms has passed</span></dd></div>` : null}
        ${why.next_ms !== null ? html`<${Countdown} label="due by time alone" ms=${why.next_ms} note=${why.next_rule && why.next_rule.replace("_", " ")} />`
          : why.due ? null : html`<div class="countdown"><dt>due by time alone</dt><dd>never<span class="faint">new records can make it due</span></dd></div>`}
        ${why.next_horizon_ms !== null && why.next_rule !== "horizon" ? html`<${Countdown} label="first tombstone may go" ms=${why.next_horizon_ms} />` : null}
        ${why.set_aside ? html`<${Countdown} label="tried again" ms=${why.set_aside.retry_ms} />` : null}
      </dl>
      ${why.set_aside ? html`<${D.Note} kind="error"><strong>Set aside after ${D.plural(why.set_aside.failures, "failure")}.</strong> <${Text} text=${why.set_aside.reason} />
        <span class="faint"> Last failed <${D.Ago} ms=${why.set_aside.failed_ms} />.</span><//>` : null}
      ${why.unfinished ? html`<${D.Note} kind="warning">An earlier pass stopped in the middle. The next one goes on where it ended.<//>` : null}
      ${why.paused ? html`<${D.Note}>This topic is paused.<//>` : null}
    <//>`;
  }

  const COLUMNS = [
    { label: "Partition", className: "name-cell", render: (w) => html`<a href=${`#/topics/${encodeURIComponent(w.topic)}/${w.partition}`}><${Text} text=${`${w.topic}-${w.partition}`} /></a><span class="narrow faint"><${Text} text=${w.error || briefly(w.why)} /></span>` },
    { label: "State", render: (w) => html`<${D.State} state=${w.state} />` },
    { label: "Why", className: "why-cell", low: 1, render: (w) => html`<${Text} text=${w.error || briefly(w.why)} />` },
    { label: "Dirty ratio", num: true, low: 1, render: (w) => html`<${D.Gauge} small value=${w.dirty_ratio} max=${w.dirty_ratio_max} />` },
    { label: "Late by", num: true, low: 1, render: (w) => (w.late_ms > 0 ? html`<span class="bad">${D.duration(w.late_ms)}</span>` : html`<span class="faint">–</span>`) },
    { label: "Next", num: true, render: (w) => w.due ? (w.late_ms > 0 ? html`<span class="bad">late<span class="narrow"> by ${D.duration(w.late_ms)}</span></span>` : "next pass") : html`<${D.Ago} ms=${w.set_aside ? w.set_aside.retry_ms : w.next_ms} />` },
    { label: "Dirty", num: true, low: 2, render: (w) => bytes(w.dirty_bytes) },
    { label: "Size", num: true, low: 2, render: (w) => bytes(w.size_bytes) },
  ];

  function WhyPage({ route, go }) {
    const topic = route.params.topic || "";
    const [state, setState] = useState(route.params.state || "");
    const [offset, setOffset] = useState(0);
    const answer = D.useApi("/explain", { topic, state, limit: LIMIT, offset });
    return html`<div class="title-row"><h1 tabindex="-1">Why and when${topic ? html` · <${Text} text=${topic} />` : null}</h1>
        <div class="actions"><${D.ActionButton} action="compact" topic=${topic || null} label="Compact now" primary /></div></div>
      ${topic ? html`<${D.TopicLinks} topic=${topic} at="why" />` : null}
      <p class="lead">The most urgent comes first: what makes a partition due, or what holds it back, and until when.</p>
      <${Card} title="Partitions" aside=${html`<label class="field-inline">State <select value=${state} onChange=${(event) => { setState(event.target.value); setOffset(0); }}>
          <option value="">all</option>${Object.entries(D.STATES).map(([key, [label]]) => html`<option value=${key}>${label}</option>`)}</select></label>`}>
        <${D.Answer} of=${answer}>${(data) => data.partitions.length === 0
          ? html`<${D.Empty} title="Nothing here">No partition of a compacted topic matches.<//>`
          : html`<${Table} label="Partitions, most urgent first" columns=${COLUMNS} rows=${data.partitions} keyOf=${(w) => `${w.topic}-${w.partition}`}
              onOpen=${(w) => go(`/topics/${encodeURIComponent(w.topic)}/${w.partition}`)} /><${D.Pager} total=${data.total} offset=${offset} limit=${LIMIT} onOffset=${setOffset} />`}<//>
      <//>`;
  }

  Object.assign(D, { Why, briefly });
  D.pages.why = WhyPage;
})();
