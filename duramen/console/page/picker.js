// Choosing a topic: a field that proposes names as one types.
"use strict";
(() => {
  const D = window.duramen;
  const { html, useState, useEffect } = D;

  function TopicPicker({ value, onChange, all, inline }) {
    const [typed, setTyped] = useState(value);
    const [search, setSearch] = useState("");
    useEffect(() => setTyped(value), [value]);
    useEffect(() => {
      const timer = setTimeout(() => setSearch(typed === value ? "" : typed), 150);
      return () => clearTimeout(timer);
    }, [typed]);
    const answer = D.useApi("/topics", { search, limit: 50 }, { refresh: false });
    const names = answer.data ? answer.data.topics.map((t) => t.name) : [];
    const take = (name) => { setTyped(name); if (name !== value && (name === "" ? all : true)) onChange(name); };
    const input = html`<input type="text" class="topic-input" list="topic-names" maxlength="249" value=${typed} autocomplete="off" spellcheck="false" placeholder=${all ? "all topics" : "topic"}
      onInput=${(event) => { setTyped(event.target.value); if (names.includes(event.target.value)) take(event.target.value); }}
      onChange=${(event) => take(event.target.value.trim())} />
      <datalist id="topic-names">${names.map((name) => html`<option value=${name}></option>`)}</datalist>`;
    return html`<label class=${inline ? "field-inline" : "field"}><span>Topic</span>${input}</label>`;
  }

  Object.assign(D, { TopicPicker });
})();
