// What time alone brings, day by day: delete horizons, erasure deadlines, retention, retries.
"use strict";
(() => {
  const D = window.duramen;
  const { html, count, Card, Table, Text, useState } = D;
  const KINDS = {
    delete_horizon: ["delete horizon", "tombstones may be removed"],
    erasure_deadline: ["erasure deadline", "what was replaced or deleted is compacted by then"],
    key_ttl: ["key expiry", "records reach their time to live"],
    retention: ["retention", "segments reach their retention"],
    retry: ["retry", "a partition that was set aside is tried again"],
  };
  const MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
  const two = (n) => String(n).padStart(2, "0");

  function Month({ year, month, days, today, chosen, onChoose }) {
    const lead = (new Date(Date.UTC(year, month, 1)).getUTCDay() + 6) % 7;
    const length = new Date(Date.UTC(year, month + 1, 0)).getUTCDate();
    const cells = [...Array(lead).fill(null), ...Array.from({ length }, (_, i) => `${year}-${two(month + 1)}-${two(i + 1)}`)];
    return html`<div class="month"><h3>${MONTHS[month]} ${year}</h3>
      <div class="weekdays" aria-hidden="true">${["M", "T", "W", "T", "F", "S", "S"].map((d) => html`<span>${d}</span>`)}</div>
      <div class="days">${cells.map((day) => {
        if (day === null) return html`<span></span>`;
        const counts = days.get(day);
        const number = Number(day.slice(8));
        if (!counts) return html`<span class=${`day ${day === today ? "today" : ""} ${day < today ? "past" : ""}`}>${number}</span>`;
        const kinds = Object.keys(KINDS).filter((kind) => counts[kind] > 0);
        const label = `${day}: ${kinds.map((kind) => `${count(counts[kind])} ${KINDS[kind][0]}`).join(", ")}`;
        return html`<button type="button" class=${`day full ${day === today ? "today" : ""} ${day === chosen ? "on" : ""}`} aria-pressed=${day === chosen ? "true" : "false"} aria-label=${label} title=${label} onClick=${() => onChoose(day === chosen ? null : day)}>
          ${number}<span class="marks">${kinds.map((kind) => html`<i class=${`bg-${kind}`}></i>`)}</span></button>`;
      })}</div></div>`;
  }

  function Horizons({ route, go }) {
    const topic = route.params.topic || "";
    const [chosen, setChosen] = useState(null);
    const offset = D.report ? 0 : -new Date().getTimezoneOffset();
    const answer = D.useApi("/horizons", { topic, utc_offset_minutes: offset || "", limit: 1000 });
    return html`<h1 tabindex="-1">Horizons${topic ? html` · <${Text} text=${topic} />` : null}</h1>
      <p class="lead">What time alone brings in the next ninety days.</p>
      <${D.Answer} of=${answer}>${(data) => {
        const shift = data.utc_offset_minutes * 60000;
        const dayOf = (ms) => new Date(ms + shift).toISOString().slice(0, 10);
        const days = new Map(data.days.map(({ day, counts }) => [day, counts]));
        const first = new Date(data.from_ms + shift);
        const last = new Date(Math.min(data.to_ms + shift, data.from_ms + shift + 100 * 86400000));
        const months = [];
        for (let y = first.getUTCFullYear(), m = first.getUTCMonth(); y < last.getUTCFullYear() || (y === last.getUTCFullYear() && m <= last.getUTCMonth()); m === 11 ? ((y += 1), (m = 0)) : (m += 1)) months.push([y, m]);
        const events = chosen ? data.events.filter((event) => dayOf(event.time_ms) === chosen) : data.events;
        const totals = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, data.days.reduce((sum, d) => sum + (d.counts[kind] || 0), 0)]));
        return html`<${Card} title="Calendar" aside=${D.report ? html`<span class="faint">days in UTC</span>` : html`<${D.TopicPicker} value=${topic} all inline onChange=${(name) => go(`/horizons${D.query({ topic: name })}`)} />`}>
            <div class="months">${months.map(([year, month]) => html`<${Month} key=${`${year}-${month}`} year=${year} month=${month} days=${days} today=${dayOf(data.now_ms)} chosen=${chosen} onChoose=${setChosen} />`)}</div>
            <${D.Legend} items=${Object.entries(KINDS).map(([kind, [label, title]]) => [kind, label, count(totals[kind]), title])} />
          <//>
          <${Card} title=${chosen ? `On ${chosen}` : "Soonest first"} aside=${chosen ? html`<button type="button" class="link" onClick=${() => setChosen(null)}>all days</button>` : html`<span class="faint num">${count(data.total)}</span>`}>
            ${events.length === 0 ? html`<${D.Empty} title="Nothing in sight">${chosen ? "The events of that day are beyond the ones listed." : "No delete horizon, deadline or retention in the next ninety days."}<//>`
              : html`<${Table} label="Events" rows=${events.slice(0, 200)} keyOf=${(e, i) => `${e.time_ms}${e.kind}${e.topic}${e.partition}${i}`} columns=${[
                { label: "When", className: "name-cell", render: (e) => html`<${D.Time} ms=${e.time_ms} />` },
                { label: "In", num: true, low: 1, render: (e) => html`<${D.Ago} ms=${e.time_ms} />` },
                { label: "What", render: (e) => html`<span class="pair"><i class=${`swatch bg-${e.kind}`} aria-hidden="true"></i>${KINDS[e.kind] ? KINDS[e.kind][0] : e.kind}</span>` },
                { label: "Partition", render: (e) => html`<a href=${`#/topics/${encodeURIComponent(e.topic)}/${e.partition}`}><${Text} text=${`${e.topic}-${e.partition}`} /></a>` },
                { label: "Meaning", low: 1, className: "why-cell", render: (e) => html`<${Text} text=${e.what} />` },
              ]} />`}
            ${events.length > 200 ? html`<${D.Note}>The first 200 of ${count(events.length)}.<//>` : null}
          <//>`;
      }}<//>`;
  }

  D.pages.horizons = Horizons;
})();
